"""Tensor and sequence parallelism against PyTorch's own: a Hugging Face Llama under DTensor's plans.

Fake tensors and a fake process group: one rank of four runs, no memory is taken, every storage is counted. Attention takes the
CPU's flash kernel, which keeps what CUDA's does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.llama import modeling_llama

from memfit import api, runtimes
from memfit.account.estimate import Estimate

TP, BATCH, SEQ, LAYERS = 4, 2, 64, 2
SIZES = {
    "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 352, "vocab_size": 512,
    "num_hidden_layers": LAYERS, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


class Measured(NamedTuple):
    kept: int
    peak: int


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield init_device_mesh("cpu", (TP,))
    dist.destroy_process_group()


def plan(sequence: bool, split_logits: bool) -> dict[str, Any]:
    """As torchtitan's plan for its Llama."""
    lies: Any = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=lies),
        "lm_head": ColwiseParallel(
            input_layouts=lies, output_layouts=Shard(-1) if split_logits else Replicate(), use_local_output=not split_logits
        ),
    }
    if sequence:
        found["model.norm"] = SequenceParallel(use_local_output=True)
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        if sequence:
            found[layer + "input_layernorm"] = found[layer + "post_attention_layernorm"] = SequenceParallel(use_local_output=True)
            found[layer + "self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            )
            found[layer + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            found[layer + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            found[layer + name] = RowwiseParallel(output_layouts=lies)
    return found


def local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def meta_of(op: Any, args: Any, kwargs: Any) -> TensorMeta:
    """What loss_parallel asks of a fake operation on the whole logits, which the tracker would count as if it took memory."""
    like = args[1] if "backward" in str(op) else args[0]
    shape = torch.Size(()) if "forward" in str(op) else like.shape
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), like.dtype)


def measured(mesh: Any, monkeypatch: pytest.MonkeyPatch, *, sequence: bool, split_logits: bool) -> Measured:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: None)
    monkeypatch.setattr(loss, "_propagate_tensor_meta", meta_of)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa", use_cache=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        parallelize_module(model, mesh, plan(sequence, split_logits))
        ids, labels = (torch.zeros(BATCH, SEQ, dtype=torch.long) for _ in range(2))
        places = torch.zeros(1, SEQ, dtype=torch.long)  # not made from the embedding's result, which has a part of the tokens
        own = {local(one).untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
        kept: dict[int, int] = {}
        alive = []

        def pack(tensor: Any) -> Any:
            storage = local(tensor).untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
                alive.append(storage)
            return tensor

        def step() -> None:
            with loss_parallel() if split_logits else nullcontext():
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
                    logits = model(input_ids=ids, position_ids=places).logits
                    value = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
                alive.clear()
                value.backward()

        step()  # DTensor finds out shapes by fake operations on whole tensors, once; the tracker would count them
        found = sum(kept.values())
        model.zero_grad(set_to_none=True)
        tracker = MemTracker()
        tracker.track_external(model, ids, labels)
        with tracker:
            step()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return Measured(found, peak["Total"])


def estimated(*, sequence: bool) -> Estimate:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
    workload = {"kind": "train", "batch": BATCH, "seq": SEQ, "precision": "bf16-true", "optimizer": "sgd"}
    return api.estimate(config, workload, parallelism={"tp": TP, "sp": sequence}, overheads={"runtime": "torch", "workspace": 0})


@pytest.mark.parametrize(
    ("sequence", "split_logits"), [(False, False), (True, False), (True, True)], ids=["tp", "tp-sp", "tp-sp-loss-parallel"]
)
def test_a_rank_keeps_and_takes_what_dtensor_does(
    mesh: Any, monkeypatch: pytest.MonkeyPatch, sequence: bool, split_logits: bool
) -> None:
    truth = measured(mesh, monkeypatch, sequence=sequence, split_logits=split_logits)
    monkeypatch.setitem(runtimes.RUNTIMES, "torch", runtimes.RUNTIMES["torch"]._replace(split_logits=split_logits))
    (rank,) = estimated(sequence=sequence).ranks
    # a row's 1 / rms is counted for all tokens on each device; the loss keeps its number and the count of labels, 8 B for 4
    rows = (2 * LAYERS + 1) * BATCH * SEQ * 4 * (TP - 1) // TP if sequence else 0
    assert rank.kept_bytes is not None
    assert abs(rank.kept_bytes - rows - truth.kept) <= 8
    peak = max(phase.allocated_bytes for phase in rank.phases)
    # the tracker does not see what a kernel allocates within itself, such as flash attention's accumulators
    assert abs(peak - rows - truth.peak) <= 0.02 * truth.peak, (peak, truth.peak)
