"""What the terminal faces share: tables, headings, bars, and the rendering to text. Imports rich: import it late."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memfit.report.look import Look
from memfit.report.text import plain, visible

_RULES = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
_RULES_UNICODE = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")
_EIGHTHS = " ▏▎▍▌▋▊▉"

VERDICT_STYLES = {"yes": "bold green", "tight": "bold yellow", "no": "bold red"}


class Column(NamedTuple):
    """A column: its heading, whether its cells are numbers (set to the right), and whether its cells may be wrapped."""

    title: str
    number: bool = False
    wrap: bool = False
    narrowest: int = 10
    """Of a column that may be wrapped."""


def table(columns: Sequence[Column], look: Look) -> Table:
    """An empty table with rules between its sections and no frame."""
    made = Table(
        box=_RULES_UNICODE if look.unicode else _RULES,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
        border_style="dim",
    )
    for one in columns:
        made.add_column(
            one.title,
            justify="right" if one.number else "left",
            no_wrap=not one.wrap,
            overflow="fold",
            min_width=one.narrowest if one.wrap else None,
        )
    return made


def bar(part: int, whole: int, width: int, look: Look) -> str:
    """A bar of at most `width` characters for part / whole; something that is there never shows as nothing."""
    if whole <= 0 or part <= 0:
        return ""
    eighths = max(1, min(round(8 * width * part / whole), 8 * width))
    if not look.unicode:
        return "#" * max(1, round(eighths / 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def cell(text: object, style: str = "") -> Text:
    """Text of a cell, cleaned; never read as markup."""
    return Text(plain(text), style=style)


def heading(title: str) -> Text:
    """The title of a section."""
    return Text(title, style="bold cyan")


def bullet(text: str, look: Look, style: str = "") -> RenderableType:
    """A line with a mark before it; further lines are indented below its text."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    grid.add_row("•" if look.unicode else "-", Text("\n".join(plain(line) for line in text.split("\n")), style=style))
    return grid


class CommandLine:
    """A command, never broken: half of a command cannot be pasted, and a terminal folds it by itself."""

    def __init__(self, command: str, before: str = "    ") -> None:
        self.text = before + plain(command)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(self.text)
        yield Segment.line()


def indented(body: RenderableType) -> RenderableType:
    """A part moved two columns to the right."""
    return Padding(body, (0, 0, 0, 2))


class _Clean:
    """A part whose text cannot steer the terminal, whatever it was made from: the last gate before it is written."""

    def __init__(self, part: RenderableType) -> None:
        self.part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.part, options):
            yield segment._replace(text=visible(segment.text, keep="\n"))


def to_text(parts: Iterable[RenderableType], look: Look) -> str:
    """The parts below each other as text, without trailing blanks; colour codes only if the look has colour."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=look.width,
        height=100,
        force_terminal=look.color,
        color_system="standard" if look.color else None,
        no_color=not look.color,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )
    for part in parts:
        console.print(_Clean(part), crop=False)
    lines = [line.rstrip() for line in stream.getvalue().split("\n")]
    return "\n".join(lines).rstrip("\n") + "\n"
