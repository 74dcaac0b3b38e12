"""DistributedDataParallel's buckets against the CPU allocator's own events: one process, its group is made of itself alone.

PyTorch's MemTracker does not see them: the reducer allocates below the dispatcher's modes, and refuses fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memfit

WIDTH, LAYERS, BATCH = 256, 8, 4
GRADIENTS = LAYERS * WIDTH * WIDTH * 4
SLACK = 64 * 1024
"""Bytes: indices and scalars that the reducer keeps; a gradient is 256 KiB."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.FileStore(str(tmp_path / "store"), 1)
    )
    yield
    torch.distributed.destroy_process_group()


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def _stays(wrap: Callable[[nn.Module], nn.Module]) -> int:
    """Bytes beside the weights that are there when the second backward is through: allocated less freed, wrapping included."""
    model = _model()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        wrapped = wrap(model)
        for _ in range(2):
            wrapped(torch.ones(BATCH, WIDTH)).sum().backward()
    return sum(one.self_cpu_memory_usage for one in events.key_averages())


@pytest.mark.parametrize(("buckets", "copies"), [("none", 1), ("copies", 2), ("views", 1)])
def test_what_backward_leaves(group: None, buckets: str, copies: int) -> None:
    """Gradients alone; gradients and buckets, as large as all of them; buckets of which the gradients are views."""

    def wrap(model: nn.Module) -> nn.Module:
        if buckets == "none":
            return model
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=buckets == "views")

    assert _stays(wrap) == pytest.approx(copies * GRADIENTS, abs=SLACK)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    }  # fmt: skip
    asked = {"kind": "train", "seq": 8, "precision": "32-true", "ddp": buckets}
    rank = memfit.estimate(config, asked, on="2xh100" if buckets != "none" else "h100").worst
    step = next(one for one in rank.phases if one.name == "optimizer-step")
    assert step.components["gradients"] == copies * 4 * memfit.load_model(config).num_parameters
