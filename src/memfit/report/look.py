"""What the terminal can show: width, colour, and characters beyond ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TextIO

DEFAULT_WIDTH = 100
NARROWEST, WIDEST = 60, 400
"""Below 60 columns the numbers themselves would have to be cut: a line that the terminal wraps is better."""


class Look(NamedTuple):
    """The three things a rendering depends on."""

    width: int = DEFAULT_WIDTH
    color: bool = False
    unicode: bool = True


def look_of(stream: TextIO | None, environ: Mapping[str, str], *, color: bool = True) -> Look:
    """The look for a stream; `None` is a file in UTF-8.

    Colour: never with `color=False` (`--no-color`) or `NO_COLOR`; else always with `FORCE_COLOR`; else on a terminal that is
    not `TERM=dumb`. Width: `COLUMNS`, else the terminal's, else 100.
    """
    is_terminal = False
    if stream is not None:
        try:
            is_terminal = stream.isatty()
        except ValueError:  # closed
            is_terminal = False
    return Look(
        width=_width(stream if is_terminal else None, environ),
        color=color and stream is not None and _wants_color(is_terminal, environ),
        unicode=stream is None or _is_unicode(getattr(stream, "encoding", None)),
    )


def _wants_color(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0") or environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return is_terminal and environ.get("TERM", "") != "dumb"


def _is_unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").replace("_", "").startswith("utf")


def _width(terminal: TextIO | None, environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 6 and int(columns) > 0:
        width = int(columns)
    else:
        width = DEFAULT_WIDTH
        if terminal is not None:
            import os

            try:
                width = os.get_terminal_size(terminal.fileno()).columns or DEFAULT_WIDTH
            except (OSError, ValueError):
                width = DEFAULT_WIDTH
    return max(NARROWEST, min(width, WIDEST))
