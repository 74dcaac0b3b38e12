"""The tables of docs/cli.md, made from the field registry: `python -m memfit.cli.docs docs/cli.md` brings the file up to date.

The text between the markers of a section is replaced, the rest of the file is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from memfit.cli.commands import COMMANDS
from memfit.cli.parser import GROUP_TITLES, negative_strings, option_strings
from memfit.cli.presentation import Presentation
from memfit.errors import InputError
from memfit.job import Dimensions, FineTuning, Hardware, Inference, Overheads, Parallelism, Training
from memfit.options import Option, options_of
from memfit.report.markdown import code, escape, table

SECTIONS: dict[str, tuple[str, ...]] = {
    "commands": (),
    "training": ("Training",),
    "finetuning": ("FineTuning",),
    "inference": ("Inference",),
    "parallelism": ("Parallelism",),
    "hardware": ("Hardware", "Overheads"),
    "model": ("Dimensions",),
    "output": ("Presentation",),
}
_CLASSES: dict[str, type] = {
    cls.__name__: cls for cls in (Training, FineTuning, Inference, Hardware, Overheads, Parallelism, Dimensions, Presentation)
}


def section_text(name: str) -> str:
    """The generated text of one section."""
    if name == "commands":
        return _commands()
    options = [one for cls in SECTIONS[name] for one in options_of(_CLASSES[cls]).values()]
    if name == "finetuning":
        # What fine-tuning shares with training stands there.
        shared = options_of(Training)
        options = [one for one in options if one.name not in shared]
    return _options(options)


def _commands() -> str:
    rows = []
    for command in COMMANDS:
        names = ", ".join(code(f"memfit {name}") for name in (command.name, *command.aliases))
        rows.append([names, escape(command.help), "<br>".join(code(line) for line, _ in command.examples)])
    return table(["command", "what it answers", "examples"], rows, "lll")


def _options(options: Sequence[Option]) -> str:
    order = list(GROUP_TITLES)
    ranked = sorted(options, key=lambda one: order.index(one.group) if one.group in order else len(order))
    rows = [[_spellings([one.flag, *negative_strings(one)[:1]]), _values(one), _default(one), escape(one.help),
             _spellings(option_strings(one)[1:])] for one in ranked]  # fmt: skip
    return table(["option", "value", "default", "what it says", "also accepted"], rows, "lllll")


def _spellings(flags: Iterable[str]) -> str:
    return ", ".join(code(flag) for flag in flags)


def _values(one: Option) -> str:
    if one.choices:
        more = "".join([f", {code(pattern + '...')}" for pattern in one.patterns])
        return ", ".join(code(choice) for choice in one.choices) + more
    words = {"size": "size (`24GiB`)", "count": "count (`7B`)", "tokens": "whole number (`128k`)", "fraction": "share (`10%`)",
             "number": "number", "text": "text", "flag": "flag"}  # fmt: skip
    return words[one.kind]


def _default(one: Option) -> str:
    if one.default is None or (one.kind == "flag" and one.default is False):
        return ""
    if isinstance(one.default, bool):
        return "on"
    return code(f"{one.default:g}" if isinstance(one.default, float) else one.default)


def updated(text: str) -> str:
    """The file with every section made anew.

    Raises:
        InputError: the markers of a section are missing.
    """
    for name in SECTIONS:
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not found or not found_end:
            raise InputError(f"the markers of the section {name!r} are missing: {begin.strip()} ... {end}")
        text = f"{head}{begin}\n{section_text(name)}\n\n{end}{tail}"
    return text


def main(path: str) -> None:
    """Bring the file at `path` up to date."""
    with open(path, encoding="utf-8") as stream:
        text = stream.read()
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(updated(text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/cli.md")
