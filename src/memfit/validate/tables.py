"""The report as flat rows: what the command line shows as tables, CSV and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.validate.report import Group, Report, Row
from memfit.validate.runner import run as run_corpus
from memfit.validate.text import WORST_ROWS, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Groups and worst rows, each with the same keys in every row; lines of text; and what only JSON shows."""

    groups: Sequence[Mapping[str, Any]]
    worst: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    more: Mapping[str, Any]


def _rounded(value: float, digits: int) -> float:
    """Rounded, without a negative zero."""
    return round(value, digits) + 0.0


def group_row(group: Group) -> dict[str, Any]:
    """One group: errors in percent, rounded to what a reader can use."""
    coverage = group.coverage
    return {
        "group": group.name,
        "metric": group.metric,
        "rows": len(group.rows),
        "median_percent": _rounded(group.median_percent, 4),
        "p90_percent": _rounded(group.p90_percent, 4),
        "worst_percent": _rounded(group.worst_percent, 4),
        "bias_percent": _rounded(group.bias_percent, 4),
        "in_interval": f"{coverage[0]} of {coverage[1]}" if coverage else None,
    }


def worst_row(group: Group, row: Row) -> dict[str, Any]:
    """One row with its group; parameters are counts, not bytes, and never among the worst unless wrong."""
    return {
        "group": group.name,
        "row": row.id,
        "measured_bytes": row.measured,
        "predicted_bytes": row.predicted,
        "error_percent": _rounded(row.error_percent, 2),
        "why": row.note,
    }


def tables_of(report: Report) -> Tables:
    """The flat form of a report."""
    right = sum(one.right for one in report.outcomes)
    notes = [*report.notes]
    if report.outcomes:
        notes.append(f"Of {len(report.outcomes)} runs of which only the outcome is known, {right} verdicts are right.")
    notes += [f"Left out: {one.num_rows:,} of {one.file}: {one.reason}" for one in report.reasons]
    full = to_json(report)
    return Tables(
        groups=[group_row(one) for one in report.groups],
        worst=[worst_row(group, row) for group, row in report.worst[:WORST_ROWS]],
        notes=notes,
        more={"rows_by_group": full["groups"], "outcomes": full["outcomes"], "left_out": full["left_out"]},
    )


def run() -> Tables:
    """Compare memfit with the whole corpus."""
    return tables_of(run_corpus())
