"""How far a component may be off: shares below and above, at 90 %, with the basis that the answer states.

Exact rows follow from shapes and formats; modelled ones were compared with traced runs (docs/accuracy.md); assumed ones were not.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple


class Width(NamedTuple):
    """Percent below and above the expected value, and how the value was made."""

    below: int
    above: int
    basis: str


WIDTHS = {
    "weights": Width(0, 0, "exact"),
    "gradients": Width(0, 0, "exact"),
    "master_weights": Width(0, 0, "exact"),
    "optimizer_states": Width(0, 0, "exact"),
    "kv_cache": Width(0, 0, "exact"),
    "inputs": Width(0, 0, "exact"),
    "activations": Width(2, 2, "modelled"),
    "logits": Width(2, 2, "modelled"),
    "temporary": Width(15, 15, "modelled"),
}
"""By component; context, workspace and fragmentation carry their own bounds (`account.overheads`)."""

SAFE_OVER_HIGH_PERCENT = 142
"""The one-sided 99 % bound lies 2.326 / 1.645 times as far out as the two-sided 90 % bound (normal errors)."""


def bounds(name: str, value: int, model_uncertainty: float) -> tuple[int, int]:
    """Low and high of one component; an uncertain model widens all that follow from it."""
    width = WIDTHS[name]
    extra = round(model_uncertainty * 100)
    return value - value * min(width.below + extra, 100) // 100, value + value * (width.above + extra) // 100


def combine(expected: int, parts: list[tuple[int, int, int]], correlated: int = 0) -> tuple[int, int, int]:
    """Low, high and safe of a sum of components (value, low, high): independent errors add in squares, others plainly."""
    below = isqrt(sum((value - low) ** 2 for value, low, _ in parts)) + correlated
    above = isqrt(sum((high - value) ** 2 for value, _, high in parts)) + correlated
    return max(expected - below, 0), expected + above, expected + above * SAFE_OVER_HIGH_PERCENT // 100
