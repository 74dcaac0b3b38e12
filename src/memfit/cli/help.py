"""The help text of one command. Colour (rich-argparse) only on a terminal, and imported only there."""

from __future__ import annotations

import argparse
import os
import sys

from memfit.cli.commands import Command
from memfit.report.look import look_of


def command_help(command: Command, *, color: bool = True) -> str:
    """What `memfit COMMAND -h` prints, for the standard output of this process."""
    from memfit.cli.parser import help_parser

    look = look_of(sys.stdout, os.environ, color=color)
    return help_parser(command, _formatter(look.color, min(look.width, 120))).format_help()


def _formatter(color: bool, width: int) -> type[argparse.HelpFormatter]:
    base: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter
    if color:
        try:
            from rich_argparse import RawDescriptionRichHelpFormatter
        except ImportError:
            pass
        else:
            base = RawDescriptionRichHelpFormatter

    class Formatter(base):  # type: ignore[misc, valid-type]
        # Brackets in our texts are words, not rich markup.
        text_markup = False
        help_markup = False

        def __init__(self, prog: str) -> None:
            super().__init__(prog, width=width, max_help_position=30)

    return Formatter
