"""Reads the documentation: its blocks, commands, shown output, checks and sums; runs commands; updates shown output.

`python tests/doc_pages.py` rewrites what the pages show of commands' output. How pages are written is said in test_docs.py.
"""

from __future__ import annotations

import difflib
import io
import itertools
import json
import operator
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from memfit.cli import main
from memfit.sources import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FORMULAS = [page for page in PAGES if page.parent.name == "formulas" and page.name != "README.md"]

EXAMPLES = [page for page in PAGES if page.parent.name == "examples" and page.name != "README.md"]

NOT_RUN = {
    "memfit infer HuggingFaceTB/SmolLM2-1.7B-Instruct@main": "reads the Hub: a revision is never answered from a preset",
}
"""Commands that name something on the Hub: they need the network."""


class Fence(NamedTuple):
    """A fenced block: its language, its lines, the number of its first line, and the comment right before it."""

    language: str
    lines: list[str]
    number: int
    comment: str
    follows: bool
    """Only blank lines stand between it and the block before."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(text: str) -> list[Fence]:
    found: list[Fence] = []
    opened: tuple[str, int, list[str]] | None = None
    comment, only_blank = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if opened is None and stripped.startswith("```"):
            opened = (stripped.removeprefix("```"), number + 1, [])
        elif opened is not None and stripped == "```":
            language, start, lines = opened
            found.append(Fence(language, lines, start, comment, only_blank and bool(found)))
            opened, comment, only_blank = None, "", True
        elif opened is not None:
            opened[2].append(line)
        elif stripped:
            only_blank = False
            comment = stripped if stripped.startswith("<!--") else ""
    assert opened is None, "a fence is not closed"
    return found


def with_output(text: str) -> Iterator[tuple[Fence, Fence | None]]:
    """Every block with the `text` block right after it, which shows what it prints."""
    blocks: list[Fence | None] = [*fences(text), None]
    for block, following in itertools.pairwise(blocks):
        assert block is not None
        shown = following if following is not None and following.language == "text" and following.follows else None
        yield block, shown


def prose(text: str) -> list[str]:
    """The lines outside fences."""
    inside, kept = False, []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return kept


class Command(NamedTuple):
    page: Path
    number: int
    text: str
    shown: Fence | None


def commands(page: Path) -> list[Command]:
    found: list[Command] = []
    for block, shown in with_output(page.read_text(encoding="utf-8")):
        if block.language != "console":
            continue
        joined = textwrap.dedent("\n".join(block.lines)).replace("\\\n", " ")
        here = [" ".join(re.split(r"\s#\s", line)[0].split()) for line in joined.splitlines() if line.startswith("memfit ")]
        found += [Command(page, block.number, text, None) for text in here[:-1]]
        found += [Command(page, block.number, text, shown) for text in here[-1:]]
    return found


def run(text: str) -> tuple[int, str]:
    """Carry out one line: a memfit command, maybe with `< FILE` or `| jq FILTER` after it. Returns exit code and output."""
    line, _, filter_text = text.partition(" | jq ")
    words = shlex.split(line)
    stdin = sys.stdin
    if "<" in words:
        at = words.index("<")
        sys.stdin = io.TextIOWrapper(io.BytesIO(Path(words[at + 1]).read_bytes()), encoding="utf-8")
        words = words[:at]
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with redirect_stdout(output):
            code = main(words[1:])
    finally:
        sys.stdin = stdin
    output.flush()
    printed = output.buffer.getvalue().decode("utf-8")
    if filter_text:
        printed = "\n".join(picked(json.loads(printed), shlex.split(filter_text)[-1])) + "\n"
    return code, printed


def picked(data: Any, path: str) -> list[str]:
    """What `jq -r PATH` prints, for paths of keys, indexes and `[]`."""
    values = [data]
    for key, index in re.findall(r"\.(\w+)|\[(\d*)\]", path):
        if key:
            values = [one[key] for one in values]
        else:
            values = [one[int(index)] for one in values] if index else [item for one in values for item in one]
    return [one if isinstance(one, str) else json.dumps(one) for one in values]


def plain(line: str) -> str:
    return " ".join(line.split())


def missing_lines(shown: Sequence[str], printed: str) -> list[str]:
    """The shown lines that do not occur in the output, or not in this order."""
    rest = iter([plain(line) for line in printed.splitlines()])
    wanted = [plain(line) for line in shown if plain(line) not in ("", "...")]
    return [line for line in wanted if line not in rest]


def lay_out(folder: Path) -> None:
    """The files that the examples read: a config.json, and a folder with one."""
    config = json.dumps(load_config("llama-3.1-8b").config)
    (folder / "my-model").mkdir()
    for path in (folder / "config.json", folder / "my-model" / "config.json"):
        path.write_text(config, encoding="utf-8")


_CHECK = re.compile(r"<!-- check: (.*?) -->")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def checks(page: Path) -> Iterator[tuple[str, str, str]]:
    """The number, the expression and the place of every check."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        for match in _CHECK.finditer(line):
            before = _NUMBER.findall(_CHECK.sub("", line[: match.start()]))
            assert before, f"{name_of(page)}:{number}: no number before the check"
            yield before[-1].replace(",", ""), match.group(1), f"{name_of(page)}:{number}"


_ARITHMETIC = re.compile(r"^\s*([\d(][\d,.\s()x+/-]*)\s=\s([\d,.]+)(?:\s.*)?$")
_OPERATORS: dict[str, Callable[[Decimal, Decimal], Decimal]] = {
    "+": operator.add, "-": operator.sub, "x": operator.mul, "/": operator.truediv,
}  # fmt: skip


def calculated(text: str) -> Decimal:
    """The value of a sum of products with brackets; `x` multiplies."""
    tokens = re.findall(r"[\d.,]+|[()x+/-]", text)

    def atom() -> Decimal:
        token = tokens.pop(0)
        if token != "(":
            return Decimal(token.replace(",", ""))
        value = level(("+", "-"))
        assert tokens.pop(0) == ")"
        return value

    def level(wanted: tuple[str, ...]) -> Decimal:
        value = level(("x", "/")) if "+" in wanted else atom()
        while tokens and tokens[0] in wanted:
            symbol = tokens.pop(0)
            value = _OPERATORS[symbol](value, level(("x", "/")) if "+" in wanted else atom())
        return value

    return level(("+", "-"))


def sums() -> list[tuple[str, str, str]]:
    """Every line of a `text` block on a page of ours that is a calculation with its result."""
    found = []
    for page in (*FORMULAS, *EXAMPLES, ROOT / "docs" / "concepts.md", ROOT / "docs" / "faq.md"):
        for block in fences(page.read_text(encoding="utf-8")):
            for offset, line in enumerate(block.lines if block.language == "text" else []):
                match = _ARITHMETIC.match(line)
                if match and any(symbol in match.group(1) for symbol in "x+-/"):
                    found.append((match.group(1), match.group(2), f"{name_of(page)}:{block.number + offset}"))
    return found


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def updated_lines(shown: Sequence[str], printed: str) -> list[str]:
    """Each shown line that is not printed any more, replaced by the printed line that is most like it."""
    real = {plain(line): line.rstrip() for line in printed.splitlines()}
    margin = " " * min((len(line) - len(line.lstrip()) for line in shown if line.strip()), default=0)
    made = []
    for line in shown:
        close = difflib.get_close_matches(plain(line), list(real), n=1, cutoff=0.5)
        unchanged = plain(line) in ("", "...") or plain(line) in real or not close
        made.append(line if unchanged else margin + real[close[0]])
    return made


def update() -> None:
    """Rewrite the `text` blocks of all pages from what the commands print now."""
    os.environ.update(COLUMNS="100", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        os.chdir(folder)
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            lines = text.splitlines()
            for command in commands(page):
                if command.shown is not None and command.text not in NOT_RUN:
                    start = command.shown.number - 1
                    fresh = updated_lines(command.shown.lines, run(command.text)[1])
                    lines[start : start + len(fresh)] = fresh
            if "\n".join(lines) + "\n" != text:
                page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.chdir(ROOT)


if __name__ == "__main__":
    update()
