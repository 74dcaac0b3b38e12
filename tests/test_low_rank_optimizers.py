"""Adam-mini, GaLore, APOLLO and Sophia: states and scratch of a step against small implementations of the published algorithms.

They hold what the authors' code holds, names that stay bound from one tensor to the next included (see the sources in
`account/optimizers.py`), and update the parameters in place; every storage is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor
from torch_truth import LiveMemory

from memfit.account.optimizers import Trained, find_optimizer
from memfit.account.states import state_bytes, step_scratch
from memfit.errors import UsageError

SHAPES = {"embedding": (300, 96), "up": (200, 96), "down": (96, 200), "square": (96, 96), "norm": (96,)}
ROLES = {"embedding": "embedding", "norm": "norm"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

States = dict[str, list[Tensor]]
Step = Callable[[dict[str, Tensor], dict[str, Tensor], States, int], None]


def _moments(states: States, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
    if name not in states:
        states[name] = [torch.zeros_like(like), torch.zeros_like(like)]
    first, second = states[name][:2]
    return first, second


def _linear_last(tensors: Iterable[str]) -> list[str]:
    """Two groups of parameters: what is not projected, and what is."""
    return sorted(tensors, key=lambda name: ROLES.get(name, "linear") == "linear")


def _adam_mini(weights: dict[str, Tensor], gradients: dict[str, Tensor], states: States, rank: int) -> None:
    """A mean of squares for each row (arXiv 2406.16793, algorithm 1, with a block for each output neuron)."""
    update = None
    for name, weight in weights.items():
        gradient = gradients[name]
        if name not in states:
            row = torch.zeros(weight.shape[0], 1, dtype=weight.dtype) if weight.dim() > 1 else torch.zeros((), dtype=weight.dtype)
            states[name] = [torch.zeros_like(weight), row]
        moment, mean = states[name]
        squares = (gradient * gradient).mean(dim=1, keepdim=True) if weight.dim() > 1 else (gradient * gradient).mean()
        mean.mul_(0.9).add_(squares)
        moment.lerp_(gradient, 0.1)
        update = moment * (1 / (mean.sqrt() + 1e-8))
        weight.add_(-update)
    del update


def _sophia(weights: dict[str, Tensor], gradients: dict[str, Tensor], states: States, rank: int) -> None:
    """theta - lr clip(m / (rho B h)) (arXiv 2305.14342, algorithm 3)."""
    ratio = None
    for name, weight in weights.items():
        moment, hessian = _moments(states, name, weight)
        moment.mul_(0.9).add_(gradients[name])
        ratio = (moment.abs() / (0.04 * 512 * hessian + 1e-15)).clamp(None, 1)
        weight.addcmul_(moment.sign(), ratio, value=-0.1)
    del ratio


def _projected(projector: Tensor, gradient: Tensor) -> Tensor:
    """R = G P^T for a tall matrix, P^T G for a wide one."""
    tall = gradient.shape[0] >= gradient.shape[1]
    return gradient @ projector.t() if tall else projector.t() @ gradient


def _galore(weights: dict[str, Tensor], gradients: dict[str, Tensor], states: States, rank: int) -> None:
    """Adam in the space of the r largest singular vectors (arXiv 2403.03507, algorithm 2); they are renewed in this step."""

    def vectors(gradient: Tensor) -> Tensor:
        matrix = gradient.float()
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        chosen = right[:rank] if matrix.shape[0] >= matrix.shape[1] else left[:, :rank]
        return chosen.to(gradient.dtype)

    def back(low: Tensor, projector: Tensor, shape: torch.Size) -> Tensor:
        full = low @ projector if shape[0] >= shape[1] else projector @ low
        return full * 0.25

    for name in _linear_last(weights):
        gradient = gradients[name]
        linear = name not in ROLES
        if linear:
            projector = vectors(gradient)
            gradient = _projected(projector, gradient)
        first, second = _moments(states, name, gradient)
        if linear:
            states[name][2:] = [projector]
            del projector
        first.mul_(0.9).add_(gradient)
        second.mul_(0.9).addcmul_(gradient, gradient)
        denominator = second.sqrt().add_(1e-8)
        update = first / denominator
        if linear:
            update = back(update, states[name][2], weights[name].shape)
        weights[name].add_(update, alpha=-0.1)


def _apollo(weights: dict[str, Tensor], gradients: dict[str, Tensor], states: States, rank: int) -> None:
    """Scales the gradient by what Adam does to a random projection of it (arXiv 2412.05270, algorithm 1)."""

    def random(gradient: Tensor) -> Tensor:
        matrix = gradient.float()
        rows, columns = matrix.shape
        shape = (min(rank, columns), columns) if rows >= columns else (rows, min(rank, rows))
        return (torch.randn(shape) / rank**0.5).to(gradient.dtype)

    for name in _linear_last(weights):
        gradient = gradients[name]
        linear = name not in ROLES
        if linear:
            projector = random(gradient)
            gradient = _projected(projector, gradient)
        first, second = _moments(states, name, gradient)
        if linear:
            states[name][2:] = [projector]
            del projector
        first.mul_(0.9).add_(gradient)
        second.mul_(0.9).addcmul_(gradient, gradient)
        denominator = second.sqrt().add_(1e-8)
        update = first / denominator
        if linear:
            along = 0 if gradient.shape[0] < gradient.shape[1] else 1
            factor = (torch.norm(update, dim=along) / torch.norm(gradient, dim=along)).unsqueeze(along)
            scaled = gradients[name] * factor
            scaled = scaled / 1.01
            update = scaled
        weights[name].add_(update, alpha=-0.1)


STEPS: dict[str, Step] = {"adam-mini": _adam_mini, "sophia": _sophia, "galore": _galore, "apollo": _apollo}


def _tensors(states: States) -> Iterator[Tensor]:
    for found in states.values():
        yield from found


def _measured(name: str, dtype: torch.dtype, rank: int) -> tuple[int, int]:
    """Bytes of the states' storages, and the most that the third step takes beside what is there before it."""
    torch.manual_seed(0)
    weights = {one: torch.randn(shape).to(dtype) for one, shape in SHAPES.items()}
    gradients = {one: torch.randn(shape).to(dtype) for one, shape in SHAPES.items()}
    states: States = {}
    for _ in range(2):
        STEPS[name](weights, gradients, states, rank)
    with LiveMemory() as memory:
        for one in (*weights.values(), *gradients.values(), *_tensors(states)):
            memory.count(one)
        before = memory.now
        STEPS[name](weights, gradients, states, rank)
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in _tensors(states)}
    return sum(storages.values()), memory.peak - before


COPY_IN_SVD = 4 * 200 * 96
"""Bytes of the fp32 copy of the largest matrix that the decomposition works on, inside the operator, where no storage is seen."""


@pytest.mark.parametrize("spelled", ["fp32", "bf16"])
@pytest.mark.parametrize("text", ["adam-mini", "sophia", "galore:rank=16", "galore:rank=500", "apollo:rank=16", "apollo:rank=1"])
def test_a_step_takes_what_the_algorithm_takes(text: str, spelled: str) -> None:
    name, _, rank = text.partition(":rank=")
    trained = [Trained(torch.Size(shape).numel(), spelled, 1, ROLES.get(one, "linear"), shape) for one, shape in SHAPES.items()]
    states, scratch = _measured(name, DTYPES[spelled], int(rank or 0))
    optimizer = find_optimizer(text)
    assert state_bytes(optimizer, trained) == states
    copy = COPY_IN_SVD if name == "galore" else 0
    # statistics of a row and factors of a channel are not counted: up to four numbers for each of 300 rows
    rows = 4 * 300 * 4
    found = step_scratch(optimizer, trained)
    assert scratch - rows <= found <= scratch + copy


def test_a_rank_as_large_as_the_matrix_projects_nothing_away() -> None:
    matrix = [Trained(200 * 96, "bf16", 1, "linear", (200, 96))]
    # two moments of 96 x 200 and a projector of 96 x 96, 2 bytes each
    assert state_bytes(find_optimizer("galore:rank=96"), matrix) == 2 * (2 * 96 * 200 + 96 * 96)
    assert state_bytes(find_optimizer("galore:rank=5000"), matrix) == state_bytes(find_optimizer("galore:rank=96"), matrix)


@pytest.mark.parametrize("text", ["galore:rank=0", "galore:r=4", "apollo:", "apollo:rank=x", "galore:rank=99999999999999999999"])
def test_ranks_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it like (galore|apollo):rank=128 \(1 to 65,536\)"):
        find_optimizer(text)
