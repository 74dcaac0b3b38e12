"""How far a component may be off: shares below and above, at 90 %, with the basis that the answer states.

Exact rows follow from shapes and formats. What operations take while they run was compared with traced and measured runs; the
widths come from those residuals, as data (`memfit.validate.widths` makes the file, docs/accuracy.md shows it).
"""

from __future__ import annotations

import json
import os
from functools import cache, lru_cache
from math import isqrt
from typing import NamedTuple

from memfit.job import FineTuning, Inference, Job
from memfit.runtimes import DEFAULT_RUNTIME

_DATA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "interval_widths.json")


class Width(NamedTuple):
    """Percent below and above the expected value, and how the value was made."""

    below: int
    above: int
    basis: str


WORKING_SET = ("activations", "logits", "temporary")
"""Components that come from the operations: one residual speaks for all of them, so their errors go together."""

WIDTHS = {
    name: Width(0, 0, "exact")
    for name in ("weights", "gradients", "master_weights", "optimizer_states", "kv_cache", "recurrent_state", "inputs")
}
"""Components without a width; context, workspace and fragmentation carry their own bounds (`account.overheads`)."""

EXACT = frozenset(WIDTHS)
"""Components that add nothing to the error of a sum, unless the model itself is uncertain."""

UNKNOWN = Width(15, 60, "modelled")
"""For a kind of job of which no run is known: as wide as the widest that are."""

ANY = "*"


@cache
def _measured() -> dict[tuple[str, str], Width]:
    """(runtime, kind) -> width, from the data file."""
    with open(_DATA, encoding="utf-8") as file:
        rows = json.load(file)["widths"]
    return {(row["runtime"], row["kind"]): Width(row["below"], row["above"], "modelled") for row in rows}


def kind_of(job: Job) -> str:
    """What residuals are pooled by: train | sharded-train | adapters | quantized-adapters | inference | quantized-inference."""
    workload = job.workload
    if isinstance(workload, Inference):
        return "inference" if workload.quantization in (None, "none") else "quantized-inference"
    if isinstance(workload, FineTuning) and workload.method != "full":
        return "quantized-adapters" if workload.method == "qlora" else "adapters"
    return "sharded-train" if job.parallelism.zero else "train"


def working_width(job: Job, least: tuple[int, int] | None = None) -> Width:
    """The width of the working set of a job: its runtime's own where enough runs are known, else that of all runtimes.

    `least`: percent below and above of a kernel set that no run was compared with.
    """
    return _width(job.overheads.runtime or DEFAULT_RUNTIME.name, kind_of(job), least)


@lru_cache(maxsize=256)
def _width(runtime: str, kind: str, least: tuple[int, int] | None) -> Width:
    known = _measured()
    found = known.get((runtime.partition("@")[0], kind)) or known.get((ANY, kind)) or UNKNOWN
    return found if least is None else Width(max(found.below, least[0]), max(found.above, least[1]), found.basis)


SAFE_OVER_HIGH_PERCENT = 142
"""The one-sided 99 % bound lies 2.326 / 1.645 times as far out as the two-sided 90 % bound (normal errors)."""


FROM_THE_COUNT = ("weights", "gradients", "master_weights", "optimizer_states")
"""Components that follow from the number of parameters alone."""
COUNT_CERTAINTY = 5
"""How much surer a stated number of parameters is than dimensions typical for it: models sold as 70B have 68.98B to 72.7B."""


def bounds(name: str, value: int, model_uncertainty: float, working: Width) -> tuple[int, int]:
    """Low and high of one component; `working`: the width of what operations take. An uncertain model widens all."""
    below, above, _ = WIDTHS.get(name, working)
    if model_uncertainty:
        extra = round(model_uncertainty * 100 / (COUNT_CERTAINTY if name in FROM_THE_COUNT else 1))
        below, above = min(below + extra, 100), above + extra
    return value - value * below // 100, value + value * above // 100


def combine(expected: int, parts: list[tuple[int, int, int]], *, certain_model: bool) -> tuple[int, int, int]:
    """Low, high and safe of a sum of components (value, low, high).

    Errors of components are independent and add in squares, unless the model itself is uncertain: then they go together.
    """
    below = above = 0
    for value, low, high in parts:
        under, over = value - low, high - value
        below += under * under if certain_model else under
        above += over * over if certain_model else over
    if certain_model:
        below, above = isqrt(below), isqrt(above)
    return max(expected - below, 0), expected + above, expected + above * SAFE_OVER_HIGH_PERCENT // 100
