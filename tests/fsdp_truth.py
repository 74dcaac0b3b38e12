"""Measures a step under `fully_shard` with PyTorch's FSDPMemTracker: a tiny Llama on the CPU, a process group that moves nothing.

The tracker counts every storage, resized ones included, so gathered weights and reduce buffers are in its total. Collectives of
the fake group return at once; what they would have moved does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_truth import flash_attention

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}


class Step(NamedTuple):
    """Bytes of the second step."""

    peak: int
    """Of forward and backward."""
    forward_end: int
    backward_end: int
    optimizer_step: int


@contextmanager
def devices(count: int) -> Iterator[None]:
    """This process is the first of `count`."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_of(config: dict[str, Any], *, weights: torch.dtype, checkpointing: bool) -> Any:
    """A Llama of these dimensions."""
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    made = transformers.LlamaConfig(**values)
    made._attn_implementation = "sdpa"
    made.use_cache = False
    model = transformers.LlamaForCausalLM(made).to(weights).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def step(
    config: dict[str, Any],
    batch: int,
    seq: int,
    shards: int,
    *,
    replicas: int = 1,
    mixed: bool = True,
    reshard: bool = True,
    checkpointing: bool = False,
    optimizer: str = "sgd",
    frozen: tuple[str, ...] = (),
    micro_batches: int = 1,
) -> Step:
    """The second step of a raw loop over `fully_shard`ed layers and their root. `frozen`: parts of names of what is not."""
    with devices(shards * replicas), flash_attention():
        shape, names = ((replicas, shards), ("replicate", "shard")) if replicas > 1 else ((shards,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = model_of(config, weights=torch.float32 if mixed else torch.bfloat16, checkpointing=checkpointing)
        for name, one in model.named_parameters():
            one.requires_grad_(not any(part in name for part in frozen))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)
        trained = [one for one in model.parameters() if one.requires_grad]
        ids = torch.randint(0, config["vocab_size"], (batch, seq))
        return _measured(model, OPTIMIZERS[optimizer](trained), ids, micro_batches)


def _measured(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, micro_batches: int) -> Step:
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))

    def total(kind: str) -> int:
        return sum(one["Total"] for one in tracker.get_tracker_snapshot(kind).values())

    def forget() -> None:  # the tracker has no public way to begin a new peak
        tracker._peak_mem_snap = tracker.get_tracker_snapshot("current")
        tracker._peak_mem = {device: one["Total"] for device, one in tracker._peak_mem_snap.items()}

    with tracker:
        for _ in range(2):
            forget()
            for number in range(micro_batches):
                out = model(input_ids=ids, labels=ids)
                forward_end = total("current")
                out.loss.backward()
                backward_end = total("current")
                if number + 1 < micro_batches:
                    del out
                tracker.reset_mod_stats()
            peak = total("peak")
            forget()
            optimizer.step()
            optimizer_step = total("peak")
            optimizer.zero_grad()
            del out
    return Step(peak, forward_end, backward_end, optimizer_step)
