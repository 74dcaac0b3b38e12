"""Optimizer states and the scratch of a step against the real optimizers of PyTorch and transformers, on small models (CPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from transformers.optimization import Adafactor

from memfit.account.optimizers import Trained, find_optimizer
from memfit.account.states import state_bytes

SHAPES = {"embedding": (50, 16), "linear": (48, 16), "norm": (16,)}

Make = Callable[[list[torch.nn.Parameter]], Iterable[torch.optim.Optimizer]]


def _muon(parameters: list[torch.nn.Parameter]) -> Iterable[torch.optim.Optimizer]:
    """Muon for the layer's matrix, AdamW for embedding and norm, as its authors say."""
    embedding, linear, norm = parameters
    yield torch.optim.Muon([linear])
    yield torch.optim.AdamW([embedding, norm])


MAKERS: dict[str, Make] = {
    "adamw": lambda parameters: [torch.optim.AdamW(parameters)],
    "sgd": lambda parameters: [torch.optim.SGD(parameters, lr=0.1)],
    "sgd-momentum": lambda parameters: [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)],
    "adafactor": lambda parameters: [Adafactor(parameters)],
    "muon": _muon,
    "adagrad": lambda parameters: [torch.optim.Adagrad(parameters)],
    "rmsprop": lambda parameters: [torch.optim.RMSprop(parameters)],
}


def _real_state_bytes(name: str, dtype: torch.dtype) -> int:
    """Bytes of state tensors after one step, without the step counters."""
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES.values()]
    for one in parameters:
        one.grad = torch.randn_like(one)
    total = 0
    for optimizer in MAKERS[name](parameters):
        optimizer.step()
        for state in optimizer.state.values():
            tensors = [value for key, value in state.items() if torch.is_tensor(value) and key not in ("step", "RMS")]
            total += sum(value.numel() * value.element_size() for value in tensors)
    return total


@pytest.mark.parametrize(("dtype", "spelled"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_states_are_those_of_the_real_optimizer(name: str, dtype: torch.dtype, spelled: str) -> None:
    trained = [Trained(torch.Size(shape).numel(), spelled, 1, role, shape) for role, shape in SHAPES.items()]
    assert state_bytes(find_optimizer(name), trained) == _real_state_bytes(name, dtype)
