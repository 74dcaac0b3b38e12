"""A plain list of rows (devices, models) in every format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memfit.report.csv import write_rows
from memfit.report.look import Look
from memfit.report.markdown import escape, table
from memfit.report.text import plain, show_bytes, show_value
from memfit.units import format_count


class Field(NamedTuple):
    """A column: its key in the rows, its heading, and what it holds: text | bytes | count | number | rate."""

    key: str
    title: str
    kind: str = "text"
    wrap: bool = False
    in_table: bool = True
    """Whether the column is shown to readers; CSV has all columns."""


class Listing(NamedTuple):
    """Rows under one title. `data` is the JSON object, which may say more than the columns."""

    title: str
    fields: tuple[Field, ...]
    rows: Sequence[Mapping[str, Any]]
    data: Any
    notes: tuple[str, ...] = ()


def show(kind: str, value: Any) -> str:
    """A cell for readers: GiB, billions, TB/s."""
    if value is None:
        return ""
    if kind == "bytes":
        return show_bytes(value)
    if kind == "count":
        return format_count(value)
    if kind == "rate":
        return f"{value / 10**9:,.0f} GB/s"
    if kind == "number":
        return f"{value:.4g}" if isinstance(value, float) else f"{value}"
    if isinstance(value, list | tuple):
        return ", ".join(show_value(one) for one in value)
    return show_value(value)


def listing_json(listing: Listing) -> Any:
    """The JSON object of the listing."""
    return listing.data


def listing_csv(listing: Listing) -> str:
    """All columns with raw values: bytes as integers."""
    header = [field.key for field in listing.fields]
    return write_rows(header, [[_raw(row.get(field.key)) for field in listing.fields] for row in listing.rows])


def _raw(value: Any) -> Any:
    return ", ".join(str(one) for one in value) if isinstance(value, list | tuple) else value


def _shown(listing: Listing) -> list[Field]:
    return [field for field in listing.fields if field.in_table]


def listing_markdown(listing: Listing) -> str:
    """The title, the table and the notes."""
    fields = _shown(listing)
    rows = [[escape(show(field.kind, row.get(field.key))) for field in fields] for row in listing.rows]
    align = "".join("l" if field.kind == "text" else "r" for field in fields)
    parts = [f"**{escape(listing.title)}**", table([field.title for field in fields], rows, align)]
    parts += [escape(note) for note in listing.notes]
    return "\n\n".join(parts) + "\n"


def listing_text(listing: Listing, look: Look) -> str:
    """The listing for a terminal of this look."""
    from rich.text import Text

    from memfit.report import rich_text

    fields = _shown(listing)
    columns = [rich_text.Column(field.title, number=field.kind != "text", wrap=field.wrap) for field in fields]
    made = rich_text.table(columns, look)
    for row in listing.rows:
        made.add_row(*(rich_text.cell(show(field.kind, row.get(field.key))) for field in fields))
    notes = [Text(plain(note)) for note in listing.notes]
    return rich_text.to_text([Text(plain(listing.title), style="bold"), made, *notes], look)
