"""Traces training steps under fully_shard: prints rows of src/memfit/data/corpus/sharded_traced.jsonl.

    python scripts/trace_sharding.py > rows.jsonl

The real Hugging Face class under fake tensors and PyTorch's FSDPMemTracker, in a process group that moves nothing: the first of
`n` devices. Layers are units, the rest is the root (`separate`: the embedding, and the norm with the head, are units as well).
Two steps; figures are of the second's forward and backward. Attention keeps and works as FlashAttention 2 does; dropout is 0;
no autocast. The optimizer is SGD without momentum.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip

RUNS: list[tuple[str, str, int, int, int, dict[str, Any]]] = [
    ("llama-8b fsdp2 8", "meta-llama/Meta-Llama-3.1-8B", 1, 2048, 8, {}),
    ("llama-1b fsdp2 2", "meta-llama/Llama-3.2-1B-Instruct", 2, 1024, 2, {}),
    ("llama-1b fsdp2 4 ckpt", "meta-llama/Llama-3.2-1B-Instruct", 1, 512, 4, {"ckpt": True}),
    ("llama-1b fsdp2 16 stay", "meta-llama/Llama-3.2-1B-Instruct", 1, 512, 16, {"reshard": False}),
    ("llama-1b fsdp2 7 ckpt", "meta-llama/Llama-3.2-1B-Instruct", 1, 1024, 7, {"ckpt": True}),
    ("llama-1b hsdp 2x8 ckpt", "meta-llama/Llama-3.2-1B-Instruct", 1, 1024, 8, {"ckpt": True, "replicas": 2}),
    ("llama-1b fsdp2 8 bf16", "meta-llama/Llama-3.2-1B-Instruct", 1, 2048, 8, {"mixed": False}),
]
"""id, config, batch, sequence, devices that share, what differs from the default."""


class _Flash(torch.autograd.Function):
    """What FlashAttention 2 keeps and works with."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, seq, _ = q.shape
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.empty(batch, heads, seq, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        batch, heads, seq, width = q.shape
        work = torch.empty(batch, seq, heads, width, dtype=torch.float32), torch.empty(batch, heads, seq, dtype=torch.float32)
        dq = torch.empty(batch, seq, heads, width, dtype=q.dtype).transpose(1, 2)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        whole = [torch.empty(batch, seq, heads, width, dtype=q.dtype) for _ in (k, v)] if k.shape[1] != heads else []
        del work, whole
        return dq, dk, dv


def _model(values: dict[str, Any], *, mixed: bool, ckpt: bool) -> Any:
    config = transformers.LlamaConfig(**values)
    config._attn_implementation, config.use_cache = "sdpa", False
    torch.set_default_dtype(torch.float32 if mixed else torch.bfloat16)
    model = transformers.LlamaForCausalLM._from_config(config).train()
    torch.set_default_dtype(torch.float32)
    if ckpt:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def trace(values: dict[str, Any], batch: int, seq: int, n: int, *, mixed: bool = True, reshard: bool = True, ckpt: bool = False,
          replicas: int = 1, separate: bool = False) -> dict[str, int]:  # fmt: skip
    """Bytes of the second step."""
    dist.init_process_group("fake", rank=0, world_size=n * replicas, store=FakeStore())
    shape, names = ((replicas, n), ("replicate", "shard")) if replicas > 1 else ((n,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(values, mixed=mixed, ckpt=ckpt)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if separate:
            fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        ids = torch.randint(0, values["vocab_size"], (batch, seq))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))

        def total(kind: str) -> int:
            return sum(one["Total"] for one in tracker.get_tracker_snapshot(kind).values())

        with tracker:
            for _ in range(2):
                # the tracker has no public way to begin a new peak; under fake tensors it also counts the whole tensors with
                # which DTensor plans the optimizer's step, so that the peak is read before it
                tracker._peak_mem_snap = tracker.get_tracker_snapshot("current")
                tracker._peak_mem = {device: one["Total"] for device, one in tracker._peak_mem_snap.items()}
                out = model(input_ids=ids, labels=ids)
                forward_end = total("current")
                out.loss.backward()
                backward_end, peak = total("current"), total("peak")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del out
                tracker.reset_mod_stats()
        found = {"peak": peak, "after_fwd": forward_end, "after_bwd": backward_end}
    dist.destroy_process_group()
    return found


def main() -> None:
    """Print a row for every run."""
    transformers.PreTrainedModel.initialize_weights = lambda self: None
    torch.__future__.set_swap_module_params_on_conversion(False)
    # of real tensors it finds no packed sequences, and attention gets no mask; fake tensors cannot be asked
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: _Flash.apply(q, k, v)
    made = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    for name, config, batch, seq, n, run in RUNS:
        values = LLAMA_8B if "8B" in config else LLAMA_1B
        row = {"id": name, "config": config, "batch": batch, "seq": seq, "n": n, "run": run}
        print(json.dumps({**row, **trace(values, batch, seq, n, **run), "made_with": made}), flush=True)


if __name__ == "__main__":
    main()
