"""Writes src/memfit/data/interval_widths.json: `python -m memfit.validate.widths [PATH]`.

The widths of intervals follow from the residuals of the corpus. For every row whose figure is allocated bytes, the residual is
measured - predicted as a share of the predicted working set: activations, logits and temporaries at the peak, which the
operations give. What follows from shapes and formats alone has no width.

Rows are pooled by what was run (`account.intervals.kind_of`) and, where a runtime has enough rows, by runtime. Groups of the
report count alike, however many rows they have, so that many runs of one program do not speak for all. Traced rows speak for
operations, not for a runtime on a device. A row whose working set is below 5 % of its figure says little of it and is left out;
what the last digit of a figure hides counts as nothing. A width is the smallest that holds 90 % of the weight of the residuals
on both sides together (5 % may lie beyond each end), rounded up to whole percents, at least one. `left_out_coverage` is what
the width made from all other groups would have held.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from memfit import account
from memfit.account.intervals import ANY, WORKING_SET, kind_of
from memfit.job import Job
from memfit.runtimes import DEFAULT_RUNTIME
from memfit.validate import corpus, generations, serving, sharded, traces, training
from memfit.validate.reasons import NOT_OF_THE_PEAK, contradicts
from memfit.validate.report import half_digit

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "interval_widths.json")
MINIMUM_ROWS = 16
"""Rows of a runtime below which those of all runtimes together speak for it: fewer came out too narrow for rows left out."""
BEYOND = 0.05
"""Share of the weight that may lie beyond each end."""
LEAST_PERCENT = 1
"""Rounding to the allocator's blocks."""
LEAST_SHARE_PERCENT = 5
"""Of the figure that the working set must be: below it, the allocator's remainders beside weights are all that is seen."""
TRACED = "traced"
"""In place of a runtime: no device took part."""


class Residual(NamedTuple):
    """One row: the group it belongs to, the runtime and the kind of job, and its share."""

    group: str
    runtime: str
    kind: str
    share: float


def _residual(group: str, job: Job, measured: int, rounding: int = 0, *, traced: bool = False) -> Residual | None:
    """`None` where little works, or the figure contradicts its own settings (less than what is there all the time)."""
    resolved = account.resolve(job).job
    rank = account.estimate(resolved).worst
    parts = {one.name: one.at_peak_bytes for one in rank.components}
    working = sum(parts.get(name, 0) for name in WORKING_SET)
    if 100 * working < LEAST_SHARE_PERCENT * measured or contradicts(measured, rank.peak.allocated_bytes - working):
        return None
    runtime = TRACED if traced else (resolved.overheads.runtime or DEFAULT_RUNTIME.name).partition("@")[0]
    error = measured - rank.peak.allocated_bytes
    known = max(abs(error) - rounding, 0) * (1 if error > 0 else -1)
    return Residual(group, runtime, kind_of(resolved), known / working)


def residuals() -> list[Residual]:
    """Every row of the corpus that gives allocated bytes."""
    found: list[Residual | None] = []
    for file in ("traced", "heldout_traced", "release_traced", "liger_traced"):
        rows = [row for row in corpus.rows(file) if traces.left_out(row, file) is None]
        found += [_residual(file, traces.job_of(row), row["peak"]["Total"], traced=True) for row in rows]
    for row in corpus.rows("traced_inference"):
        peak = max(row["prefill"], row.get("decode", 0))
        found.append(_residual("traced_inference", generations.job_of(row), peak, traced=True))
    for row in corpus.rows("training"):
        if training.left_out(row, "training") is None and training.METRICS.get(row["metric"]) == "allocated":
            measured, rounding = training.measured_bytes(row), half_digit(row["value"], training.UNITS[row["unit"]])
            found.append(_residual(training.group_name(row), training.job_of(row, "allocated"), measured, rounding))
    for row in corpus.rows("sharded_traced"):
        if not row["run"].get("separate"):
            found.append(_residual("sharded_traced", sharded.traced_job(row), row["peak"] + sharded.labels_of(row), traced=True))
    for row in corpus.rows("sharded_training"):
        if sharded.METRICS[row["metric"]] == "allocated":
            found.append(_residual(sharded.group_name(row), sharded.measured_job(row), sharded.measured_bytes(row)))
    for row in corpus.rows("serving"):
        if serving.left_out(row, "serving") is None and row["id"] not in NOT_OF_THE_PEAK:
            value, unit = row["other"]["peak_memory_reported"], serving.UNITS[row["other"]["peak_memory_unit"]]
            group = "generate 16-bit" if row.get("quantization") is None else "generate 4-bit"
            found.append(_residual(group, serving.job_of(row), round(value * unit), half_digit(value, unit)))
    return [one for one in found if one is not None]


def _weights(rows: Sequence[Residual]) -> list[tuple[float, float]]:
    """(share, weight) with every group of equal weight."""
    sizes: dict[str, int] = {}
    for one in rows:
        sizes[one.group] = sizes.get(one.group, 0) + 1
    return [(one.share, 1 / sizes[one.group] / len(sizes)) for one in rows]


def quantile(weighted: Iterable[tuple[float, float]], beyond: float) -> float:
    """The largest value that has no more than `beyond` of the weight above it."""
    above = 0.0
    for value, weight in sorted(weighted, reverse=True):
        above += weight
        if above > beyond + 1e-9:
            return value
    raise ValueError("a quantile needs at least one value")


def width(rows: Sequence[Residual]) -> tuple[int, int]:
    """Percent of the working set below and above."""
    weighted = _weights(rows)
    above = quantile(weighted, BEYOND)
    below = quantile([(-share, weight) for share, weight in weighted], BEYOND)
    return tuple(max(LEAST_PERCENT, ceil(100 * one - 1e-6)) for one in (below, above))  # type: ignore[return-value]


def coverage(rows: Sequence[Residual], below: int, above: int) -> float:
    """Share of the rows within."""
    return sum(-below <= 100 * one.share <= above for one in rows) / len(rows)


def left_out_coverage(rows: Sequence[Residual]) -> float | None:
    """Share of the rows within the width that all other groups give; `None` with one group."""
    groups = sorted({one.group for one in rows})
    if len(groups) < 2:
        return None
    inside = 0.0
    for group in groups:
        mine = [one for one in rows if one.group == group]
        inside += len(mine) * coverage(mine, *width([one for one in rows if one.group != group]))
    return inside / len(rows)


def _entry(runtime: str, kind: str, rows: Sequence[Residual]) -> dict[str, Any]:
    below, above = width(rows)
    outside = left_out_coverage(rows)
    return {
        "runtime": runtime,
        "kind": kind,
        "below": below,
        "above": above,
        "rows": len(rows),
        "groups": sorted({one.group for one in rows}),
        "coverage": round(coverage(rows, below, above), 3),
        "left_out_coverage": None if outside is None else round(outside, 3),
    }


def table(rows: Sequence[Residual]) -> list[dict[str, Any]]:
    """One entry for every kind, and for every runtime with rows enough of its own."""
    found = []
    for kind in sorted({one.kind for one in rows}):
        mine = [one for one in rows if one.kind == kind]
        found.append(_entry(ANY, kind, mine))
        for runtime in sorted({one.runtime for one in mine} - {TRACED}):
            own = [one for one in mine if one.runtime == runtime]
            if MINIMUM_ROWS <= len(own) < len(mine):
                found.append(_entry(runtime, kind, own))
    return found


def text(widths: Sequence[Mapping[str, Any]]) -> str:
    """The file."""
    source = "residuals of the validation corpus, as a share of activations, logits and temporaries at the peak"
    lines = ",\n".join("  " + json.dumps(one) for one in widths)
    head = f'"made_by": "python -m memfit.validate.widths",\n "source": "{source}"'
    return f'{{\n {head},\n "minimum_rows": {MINIMUM_ROWS},\n "widths": [\n{lines}\n ]\n}}\n'


def main(arguments: Sequence[str]) -> int:
    """Write the file to the path given, or to its place in the package."""
    path = arguments[0] if arguments else PATH
    made = text(table(residuals()))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(made)
    sys.stderr.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
