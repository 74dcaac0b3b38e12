"""`memfit validate`: the error tables that `memfit.validate.tables` makes, in every format.

What is expected of that room: `run()` returns an object with `groups` and `worst`, sequences of flat mappings (one row each, with
the same keys in every row), and `notes`, lines of text; `more` holds what only JSON shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from memfit.cli.output import Document
from memfit.cli.parser import Request
from memfit.errors import InputError
from memfit.report import listing
from memfit.report.listing import Field, Listing
from memfit.report.look import Look
from memfit.report.payload import SCHEMA_VERSION, json_value
from memfit.report.text import version


def validate(request: Request) -> Document:
    """Run the corpus and show the error by group, then the worst rows.

    Raises:
        InputError: this installation has no corpus to compare with.
    """
    run = getattr(import_module("memfit.validate.tables"), "run", None)
    if run is None:
        raise InputError("this installation of memfit has no validation corpus")
    found = run()
    groups, worst = list(found.groups), list(found.worst)
    data = {
        "schema_version": SCHEMA_VERSION,
        "memfit_version": version(),
        "groups": [json_value(dict(row)) for row in groups],
        "worst": [json_value(dict(row)) for row in worst],
        "notes": list(found.notes),
        **json_value(dict(getattr(found, "more", {}))),
    }
    notes = tuple(found.notes)
    tables = [_listing("Error by group", groups), _listing("The worst rows", worst, notes)]
    narrow = [tables[0], _listing("The worst rows", [_without_why(row) for row in worst], (*_reasons(worst), "", *notes))]
    return Document(
        table=lambda look, explain: _text(narrow, look),
        data=lambda: data,
        csv=lambda: listing.listing_csv(tables[0]),
        markdown=lambda: "\n".join(listing.listing_markdown(one) for one in tables),
    )


def _without_why(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "why"}


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each reason with the rows that it holds for: sentences, which a column of a terminal is too narrow for."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.get("why"):
            found.setdefault(str(row["why"]), []).append(str(row.get("row", "")))
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def _text(tables: Sequence[Listing], look: Look) -> str:
    return "\n".join(listing.listing_text(one, look) for one in tables)


_HEADINGS = {"median_percent": "median %", "p90_percent": "p90 %", "worst_percent": "worst %", "bias_percent": "bias %",
             "error_percent": "error %", "in_interval": "in 90 %", "predicted_bytes": "memfit"}  # fmt: skip
"""Short headings, so that the table is as wide as its figures."""


def _listing(title: str, rows: Sequence[Mapping[str, Any]], notes: tuple[str, ...] = ()) -> Listing:
    keys = list(rows[0]) if rows else []
    fields = tuple(
        Field(key, _HEADINGS.get(key, key.removesuffix("_bytes").replace("_", " ")), _kind(key, rows), wrap=key == "why")
        for key in keys
    )
    return Listing(title=title, fields=fields, rows=rows, data=None, notes=notes)


def _is_text(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return not all(row.get(key) is None or isinstance(row.get(key), int | float) for row in rows)


def _kind(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if _is_text(key, rows):
        return "text"
    return "bytes" if key.endswith("_bytes") else "number"
