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
    "recurrent_state": Width(0, 0, "exact"),
    "inputs": Width(0, 0, "exact"),
    "activations": Width(2, 2, "modelled"),
    "logits": Width(2, 2, "modelled"),
    "temporary": Width(15, 15, "modelled"),
}
"""By component; context, workspace and fragmentation carry their own bounds (`account.overheads`)."""

EXACT = frozenset(name for name, width in WIDTHS.items() if not (width.below or width.above))
"""Components that add nothing to the error of a sum, unless the model itself is uncertain."""

ADAPTER_WIDTHS = {False: (5, 20), True: (5, 60)}
"""Percent below and above for activations, logits and temporaries beside adapters, over a 16-bit and over a quantised base.

Published LoRA and QLoRA runs differ in what their programs do beside the model: copies of shifted logits, the upcast of norms and
head for k-bit training, inputs kept by older 4-bit kernels. The residuals stand in docs/accuracy.md.
"""

SAFE_OVER_HIGH_PERCENT = 142
"""The one-sided 99 % bound lies 2.326 / 1.645 times as far out as the two-sided 90 % bound (normal errors)."""


FROM_THE_COUNT = ("weights", "gradients", "master_weights", "optimizer_states")
"""Components that follow from the number of parameters alone."""
COUNT_CERTAINTY = 5
"""How much surer a stated number of parameters is than dimensions typical for it: models sold as 70B have 68.98B to 72.7B."""


def bounds(
    name: str,
    value: int,
    model_uncertainty: float,
    adapters: bool | None = None,
    kernels: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Low and high of one component; an uncertain model widens all that follow from it.

    `adapters`: `None` without, else whether their base is quantised. `kernels`: the least widths of a kernel set that no run was
    compared with.
    """
    width = WIDTHS[name]
    below, above = width.below, width.above
    if adapters is not None and width.basis == "modelled":
        below, above = ADAPTER_WIDTHS[adapters]
    if kernels is not None and width.basis == "modelled":
        below, above = max(below, kernels[0]), max(above, kernels[1])
    if model_uncertainty:
        extra = round(model_uncertainty * 100 / (COUNT_CERTAINTY if name in FROM_THE_COUNT else 1))
        below, above = min(below + extra, 100), above + extra
    return value - value * below // 100, value + value * above // 100


def combine(expected: int, parts: list[tuple[int, int, int]], *, certain_model: bool) -> tuple[int, int, int]:
    """Low, high and safe of a sum of components (value, low, high).

    Errors of components are independent and add in squares, unless the model itself is uncertain: then they go together.
    """
    if certain_model:
        below = isqrt(sum([(value - low) ** 2 for value, low, _ in parts]))
        above = isqrt(sum([(high - value) ** 2 for value, _, high in parts]))
    else:
        below = sum([value - low for value, low, _ in parts])
        above = sum([high - value for value, _, high in parts])
    return max(expected - below, 0), expected + above, expected + above * SAFE_OVER_HIGH_PERCENT // 100
