"""The rules by which optimizers keep states of another size than the parameter, and need scratch tensor by tensor.

A tensor of m x n elements (m rows) of e bytes; k = min(m, n); r the rank of a projection, at most k.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.account.optimizers import Optimizer, Trained
from memfit.precision import DTYPE_BYTES


def is_projected(one: Trained) -> bool:
    """Whether GaLore and APOLLO project its gradient: matrices of linear layers, but not the head's."""
    return one.role in ("linear", "adapter") and len(one.shape) == 2


def _factored(optimizer: Optimizer, one: Trained) -> int:
    """Adafactor: rows + columns of the last two dimensions, for each of the leading ones; a vector has a state of its size."""
    if len(one.shape) < 2:
        return one.elements
    rows, columns = one.shape[-2:]
    return one.elements // (rows * columns) * (rows + columns)


def _muon(optimizer: Optimizer, one: Trained) -> int:
    """Muon keeps one momentum for a layer's matrix; AdamW keeps two states for everything else."""
    return one.elements if one.role in ("linear", "adapter") and len(one.shape) == 2 else 2 * one.elements


def _adam_mini(optimizer: Optimizer, one: Trained) -> int:
    """A first moment as large as the parameter; a second one for each row of a matrix, one for a norm, in full for a bias.

    Queries and keys have one for each head instead, fewer than their rows: less than 0.1 % of the states, counted by row.
    """
    if one.role == "bias":
        return 2 * one.elements
    return one.elements + (one.elements // one.shape[-1] if len(one.shape) > 1 else 1)


def _low_rank(optimizer: Optimizer, one: Trained) -> tuple[int, int, int]:
    """(r, k, the larger dimension) of a projected matrix."""
    small, large = sorted(one.shape)
    return min(optimizer.rank, small), small, large


def _galore(optimizer: Optimizer, one: Trained) -> int:
    """Two moments of r x max(m, n), and the projector: r k, of fp32 parameters k^2, as it is a view of all singular vectors."""
    if not is_projected(one):
        return 2 * one.elements
    rank, small, large = _low_rank(optimizer, one)
    return 2 * rank * large + small * (small if one.dtype == "fp32" else rank)


def _apollo(optimizer: Optimizer, one: Trained) -> int:
    """Two moments of r x max(m, n), and a random projector of r k."""
    if not is_projected(one):
        return 2 * one.elements
    rank, small, large = _low_rank(optimizer, one)
    return 2 * rank * large + rank * small


STATES: dict[str, Callable[[Optimizer, Trained], int]] = {
    "factored": _factored,
    "muon": _muon,
    "adam-mini": _adam_mini,
    "galore": _galore,
    "apollo": _apollo,
}
"""Elements of all states of a tensor, where they are not as large as it."""


def _bytes(one: Trained | None) -> int:
    return one.num_bytes if one else 0


def _loop_scratch(optimizer: Optimizer, before: Trained | None, one: Trained) -> int:
    """The root and the denominator of one tensor, beside the denominator of the one before, whose name is still bound."""
    return _bytes(before) + 2 * one.num_bytes


def _sophia_scratch(optimizer: Optimizer, before: Trained | None, one: Trained) -> int:
    """|m|, the scaled Hessian with epsilon and their ratio, beside the ratio of the tensor before."""
    return _bytes(before) + 3 * one.num_bytes


def _adam_mini_scratch(optimizer: Optimizer, before: Trained | None, one: Trained) -> int:
    """The squared gradient beside the update of the tensor before, or the update and its negation."""
    return one.num_bytes + max(_bytes(before), one.num_bytes)


def _dense_adam_scratch(before: Trained | None, one: Trained) -> int:
    """denom = sqrt(v) + eps and m / denom, beside those of the tensor before until their names are bound anew."""
    return max(2 * _bytes(before) + one.num_bytes, _bytes(before) + 2 * one.num_bytes)


def _left(optimizer: Optimizer, before: Trained | None) -> int:
    """What names still hold of the step of the tensor before: its denominator and its update, projected back."""
    if before is None:
        return 0
    if not is_projected(before):
        return 2 * before.num_bytes
    rank, _, large = _low_rank(optimizer, before)
    return before.num_bytes + rank * large * DTYPE_BYTES[before.dtype]


def _galore_scratch(optimizer: Optimizer, before: Trained | None, one: Trained) -> int:
    """The step that renews a projector: the gradient in fp32, the copy that the decomposition works on, U and V^T; or the update.

    4 (3 m n + k^2) bytes and the projector's 16-bit copy, in fp32 one m n less; the solver's own workspace is not counted.
    """
    if not is_projected(one):
        return _dense_adam_scratch(before, one)
    rank, small, large = _low_rank(optimizer, one)
    half = one.dtype != "fp32"
    renewed = 4 * ((2 + half) * one.elements + small * small) + (2 * rank * small if half else 0)
    return max(_left(optimizer, before) + renewed, 2 * one.num_bytes + 3 * rank * large * DTYPE_BYTES[one.dtype])


def _apollo_scratch(optimizer: Optimizer, before: Trained | None, one: Trained) -> int:
    """The scaled gradient and its limited form, or, where the projector is renewed, the gradient in fp32 (of 16 bit)."""
    if not is_projected(one):
        return _dense_adam_scratch(before, one)
    rank, small, large = _low_rank(optimizer, one)
    renewed = (4 * one.elements if one.dtype != "fp32" else 0) + 8 * rank * small
    update = 2 * one.num_bytes + 3 * rank * large * DTYPE_BYTES[one.dtype]
    return max(_left(optimizer, before) + renewed, _bytes(before) + 2 * one.num_bytes, update)


SCRATCH: dict[str, Callable[[Optimizer, Trained | None, Trained], int]] = {
    "loop": _loop_scratch,
    "sophia": _sophia_scratch,
    "adam-mini": _adam_mini_scratch,
    "galore": _galore_scratch,
    "apollo": _apollo_scratch,
}
"""Bytes that the step of one tensor needs after that of another."""
