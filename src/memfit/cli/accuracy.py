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
    tables = [_listing("Error by group", groups), _listing("The worst rows", worst, tuple(found.notes))]
    return Document(
        table=lambda look, explain: _text(tables, look),
        data=lambda: data,
        csv=lambda: listing.listing_csv(tables[0]),
        markdown=lambda: "\n".join(listing.listing_markdown(one) for one in tables),
    )


def _text(tables: Sequence[Listing], look: Look) -> str:
    return "\n".join(listing.listing_text(one, look) for one in tables)


def _listing(title: str, rows: Sequence[Mapping[str, Any]], notes: tuple[str, ...] = ()) -> Listing:
    keys = list(rows[0]) if rows else []
    fields = tuple(
        Field(key, key.removesuffix("_bytes").replace("_", " "), _kind(key, rows), wrap=_is_text(key, rows)) for key in keys
    )
    return Listing(title=title, fields=fields, rows=rows, data=None, notes=notes)


def _is_text(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return not all(row.get(key) is None or isinstance(row.get(key), int | float) for row in rows)


def _kind(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if _is_text(key, rows):
        return "text"
    return "bytes" if key.endswith("_bytes") else "number"
