"""A report as text, Markdown, JSON and flat rows. No arithmetic but what the report offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memfit.units import GiB, MiB
from memfit.validate.report import Group, Outcome, Report, Row

KINDS = (
    ("exact", "Exact", "The same model code, counted without a device."),
    ("traced", "Traced", "The same model code, a whole step under an ideal allocator."),
    ("measured", "Measured", "Figures that somebody published of a run on a device."),
)
WORST_ROWS = 12


def _percent(value: float, *, sign: bool = False) -> str:
    """Three digits below 1 %, two above; what rounds to nothing without a sign."""
    digits = 3 if abs(value) < 1 else 2
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def _amount(group: Group, value: int) -> str:
    """Parameters as a count, bytes in GiB (MiB below a tenth of one, bytes below a tenth of that)."""
    if group.metric == "parameters":
        return f"{value:,}"
    if abs(value) >= GiB // 10:
        return f"{value / GiB:.3f} GiB"
    return f"{value / MiB:.2f} MiB" if abs(value) >= MiB // 10 else f"{value:,} B"


def _coverage(group: Group) -> str:
    """`9 of 9`; empty without intervals."""
    found = group.coverage
    return f"{found[0]} of {found[1]}" if found else ""


GROUP_HEADINGS = ("group", "metric", "rows", "mean %", "median %", "p90 %", "worst %", "bias %", "in 90 % interval")


def _group_cells(group: Group) -> tuple[str, ...]:
    sizes = (group.mean_percent, group.median_percent, group.p90_percent, group.worst_percent)
    bias = _percent(group.bias_percent, sign=True)
    return (group.title, group.metric, str(len(group.rows)), *map(_percent, sizes), bias, _coverage(group))


ROW_HEADINGS = ("row", "measured", "memfit", "error", "error %", "why")


def _row_cells(group: Group, row: Row) -> tuple[str, ...]:
    amounts = [_amount(group, value) for value in (row.measured, row.predicted, row.error)]
    return (row.id, *amounts, _percent(row.error_percent, sign=True), row.note)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Aligned columns; those in `left` to the left, all others to the right."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        padded = [text.ljust(widths[at]) if at in left else text.rjust(widths[at]) for at, text in enumerate(row)]
        return "  ".join(padded).rstrip()

    return [line(row) for row in cells]


OUTCOME_HEADINGS = ("run", "observed", "memfit", "source")


def _num_right(report: Report) -> str:
    return f"{sum(one.right for one in report.outcomes)} of {len(report.outcomes)}"


def to_text(report: Report) -> str:
    """The table of groups, the worst rows, the runs of which only the outcome is known, and what was left out."""
    lines: list[str] = []
    for kind, title, about in KINDS:
        groups = [group for group in report.groups if group.kind == kind]
        if groups:
            lines += [f"{title}: {about}", *_table(GROUP_HEADINGS, map(_group_cells, groups), (0, 1)), ""]
    worst = report.worst[:WORST_ROWS]
    if worst:
        cells = [(group.title, *_row_cells(group, row)) for group, row in worst]
        lines += ["Worst rows", *_table(("group", *ROW_HEADINGS), cells, (0, 1, 6)), ""]
    if report.outcomes:
        runs = [(one.id, one.observed, one.predicted) for one in report.outcomes]
        lines += [f"Whether it fits: {_num_right(report)} right", *_table(OUTCOME_HEADINGS[:3], runs, (0, 1, 2)), ""]
    if report.left_out:
        reasons = [(f"{one.num_rows:,}", one.file, one.reason) for one in report.reasons]
        lines += ["Left out", *_table(("rows", "of", "why"), reasons, (1, 2)), ""]
    return "\n".join([*lines, *report.notes]) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> list[str]:
    rule = ["---" if column in left else "---:" for column in range(len(headings))]
    return [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in (headings, rule, *rows)]


SHOWN_ROWS = {"exact": 3, "traced": 3, "measured": 8}
"""Rows of each group on the page, worst first."""


def to_markdown(report: Report) -> str:
    """The sections of docs/accuracy.md: results by kind, worst rows of every group, outcomes, and what was left out."""
    lines: list[str] = []
    for kind, title, about in KINDS:
        groups = [group for group in report.groups if group.kind == kind]
        if not groups:
            continue
        lines += [f"## {title}", "", about, "", *_markdown_table(GROUP_HEADINGS, map(_group_cells, groups), (0, 1)), ""]
        for group in groups:
            lines += _group_section(group)
    if report.outcomes:
        runs = [(one.id, one.observed, one.predicted, one.source) for one in report.outcomes]
        about = f"Runs of which only the outcome is known: {_num_right(report)} right. `tight`: the device lies in the interval."
        lines += ["## Whether it fits", "", about, "", *_markdown_table(OUTCOME_HEADINGS, runs, (0, 1, 2, 3)), ""]
    if report.left_out:
        cells = [(f"{one.num_rows:,}", one.file, one.reason, ", ".join(one.details)) for one in report.reasons]
        lines += ["## Left out", "", *_markdown_table(("rows", "of", "why", "which"), cells, (1, 2, 3)), ""]
    return "\n".join(lines)


def _group_section(group: Group) -> list[str]:
    """What the group compares and its worst rows; exact groups only say that they are exact."""
    lines = [f"### {group.title}", "", group.about, ""]
    if group.num_exact == len(group.rows):
        return [*lines, f"All {len(group.rows)} rows agree to the last unit.", ""]
    shown = group.rows[: SHOWN_ROWS[group.kind]]
    return [*lines, *_markdown_table(ROW_HEADINGS, [_row_cells(group, row) for row in shown], (0, 5)), ""]


def to_json(report: Report) -> dict[str, Any]:
    """Everything: groups with statistics and rows, outcomes, what was left out."""
    return {
        "groups": [_group_json(group) for group in report.groups],
        "outcomes": [_outcome_json(one) for one in report.outcomes],
        "left_out": [
            {"file": one.file, "reason": one.reason, "details": list(one.details), "rows": one.num_rows} for one in report.reasons
        ],
        "notes": list(report.notes),
    }


def _outcome_json(one: Outcome) -> dict[str, Any]:
    return {"id": one.id, "observed": one.observed, "predicted": one.predicted, "right": one.right, "source": one.source}


def _group_json(group: Group) -> dict[str, Any]:
    coverage = group.coverage
    return {
        **group_row(group),
        "about": group.about,
        "coverage": {"in_interval": coverage[0], "of": coverage[1]} if coverage else None,
        "worst_rows_first": [_row_json(row) for row in group.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "measured": row.measured,
        "predicted": row.predicted,
        "error": row.error,
        "error_percent": row.error_percent,
        "low": row.low,
        "high": row.high,
        "in_interval": row.covered,
        "source": row.source,
        "note": row.note,
    }


def group_row(group: Group) -> dict[str, Any]:
    """The statistics of a group as one flat row, for tables and CSV."""
    return {
        "group": group.name,
        "title": group.title,
        "kind": group.kind,
        "metric": group.metric,
        "rows": len(group.rows),
        "exact_rows": group.num_exact,
        "mean_percent": group.mean_percent,
        "median_percent": group.median_percent,
        "p90_percent": group.p90_percent,
        "worst_percent": group.worst_percent,
        "bias_percent": group.bias_percent,
        "in_interval": _coverage(group),
    }
