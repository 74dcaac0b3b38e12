"""An answer as CSV: one row per rank and component, then the rank's three totals. Also plain listings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from memfit.report.text import plain

if TYPE_CHECKING:
    from memfit.fit.answer import Answer

COLUMNS = ("model", "rank", "count", "component", "bytes", "at_peak_bytes", "low_bytes", "high_bytes", "counted_in", "basis",
           "formula")  # fmt: skip

_FORMULA_STARTS = ("=", "+", "-", "@")


def guard(value: Any) -> Any:
    """A cell that a spreadsheet shows as text: what it would take for a formula gets a leading apostrophe. Numbers stay."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    text = plain(value)
    return "'" + text if text.startswith(_FORMULA_STARTS) else text


def write_rows(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV text with `\\n` line ends; every cell guarded."""
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([guard(cell) for cell in row])
    return stream.getvalue()


def to_csv(answer: Answer) -> str:
    """The components of every rank in bytes, and the totals `allocated`, `reserved` and `device` at the peak."""
    name = answer.job.model.name
    rows: list[Sequence[Any]] = []
    for rank in answer.estimate.ranks:
        for one in rank.components:
            rows.append((name, rank.rank, rank.count, one.name, one.bytes, one.at_peak_bytes, one.low_bytes, one.high_bytes,
                         one.counted_in, one.basis, one.formula))  # fmt: skip
        peak = rank.peak
        for total, size in (("allocated", peak.allocated_bytes), ("reserved", peak.reserved_bytes)):
            rows.append((name, rank.rank, rank.count, f"total_{total}", size, size, None, None, total, "", f"at {peak.phase}"))
        rows.append((name, rank.rank, rank.count, "total_device", peak.device_bytes, peak.device_bytes, peak.low_bytes,
                     peak.high_bytes, "device", "", f"at {peak.phase}"))  # fmt: skip
    return write_rows(COLUMNS, rows)
