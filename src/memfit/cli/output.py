"""Where the result goes and in which form: standard output, or a file that is replaced whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from memfit.cli.presentation import SUFFIXES, Presentation
from memfit.errors import InputError, UsageError
from memfit.report.look import Look, look_of
from memfit.report.text import plain


class Document(NamedTuple):
    """A result that can be shown in every format; each is made only when it is asked for."""

    table: Callable[[Look, bool], str]
    """From the look of the terminal and whether sources are wanted (`--explain`)."""
    data: Callable[[], Any]
    csv: Callable[[], str]
    markdown: Callable[[], str]


def chosen_format(presentation: Presentation) -> str:
    """The format: `--json`, else `--format`, else the suffix of `--output`, else the table.

    Raises:
        UsageError: two formats were asked for, or the suffix of the file names none.
    """
    if presentation.json and presentation.format not in (None, "json"):
        raise UsageError(f"--json and --format {presentation.format} contradict each other: give one of them")
    if presentation.json:
        return "json"
    if presentation.format is not None:
        return presentation.format
    if presentation.output is None or presentation.output == "-":
        return "table"
    suffix = os.path.splitext(presentation.output)[1].lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"--output {presentation.output[:200]!r}: the suffix {suffix!r} names no format; "
            f"use {', '.join(SUFFIXES)} or add --format"
        )
    return SUFFIXES[suffix]


def check_target(presentation: Presentation) -> None:
    """Find out before anything is computed that the result could not be written.

    Raises:
        UsageError: see `chosen_format`.
        InputError: the folder of the file does not exist, or the file is a folder, a device or a pipe.
    """
    chosen_format(presentation)
    path = presentation.output
    if path is None or path == "-":
        return
    if not path or "\0" in path:
        raise UsageError("--output needs the name of a file")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise InputError(f"--output: the folder {folder[:200]!r} does not exist: create it first")
    if os.path.isdir(path):
        raise InputError(f"--output: {path[:200]!r} is a folder: name a file in it")
    if not _is_file_or_new(path):
        raise InputError(f"--output: {path[:200]!r} is no regular file: use the shell's redirection ('>', '>>', '|') for it")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise InputError(f"--output: {path[:200]!r} is read-only: name another file")


_MOST_LINKS = 40
"""Links that Linux itself follows before it gives up."""


def _is_file_or_new(path: str) -> bool:
    """Whether the path names a regular file or nothing yet, and no link on the way leads through /dev or /proc.

    There a name stands for something that is open already: /dev/stdout may be a log to which `>>` appends, and to replace it by
    its name would lose what it holds.
    """
    current = path
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(os.path.abspath(current))
        current = os.path.join(os.path.realpath(folder), name)
        if current.startswith(("/dev/", "/proc/")) and not current.startswith("/dev/shm/"):
            return False
        if not os.path.islink(current):
            return not os.path.lexists(current) or stat.S_ISREG(os.lstat(current).st_mode)
        current = os.path.join(os.path.dirname(current), os.readlink(current))
    return False


def emit(document: Document, presentation: Presentation) -> None:
    """Show the document as `presentation` asks, on standard output or in its file."""
    chosen = chosen_format(presentation)
    path = presentation.output if presentation.output != "-" else None
    text = _render(document, chosen, presentation, to_file=path is not None)
    if path is None:
        write_stdout(text)
    else:
        write_file(path, text)
        if sys.stderr is not None:
            with suppress(OSError):
                print(f"memfit: wrote {plain(path)}", file=sys.stderr)


def _render(document: Document, chosen: str, presentation: Presentation, *, to_file: bool) -> str:
    if chosen == "json":
        import json

        return json.dumps(document.data(), indent=2, allow_nan=False) + "\n"
    if chosen == "csv":
        return document.csv()
    if chosen == "markdown":
        return document.markdown()
    look = look_of(None if to_file else sys.stdout, os.environ, color=presentation.color)
    return document.table(look, presentation.explain)


def write_stdout(text: str) -> None:
    """Write a result. Characters that the terminal's encoding does not have become question marks instead of an error.

    Raises:
        InputError: the system refuses (a full disk), or standard output is closed.
        BrokenPipeError: the reader is gone.
    """
    if sys.stdout is None:  # Python's sign that it was closed before the start
        raise InputError("standard output is closed: open it, or name a file with --output")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.encode(encoding, "replace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        forget_stdout()
        raise InputError(f"cannot write the result to standard output: {error.strerror or error}") from None


def forget_stdout() -> None:
    """Nobody can be reached on standard output any more: point it elsewhere, so that Python's last flush does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def write_file(path: str, text: str) -> None:
    """Write the whole file or leave the old one as it was: a new file beside it takes its place in one step.

    Raises:
        InputError: the system refuses; the message says why.
    """
    target = os.path.realpath(path)
    raw = text.encode("utf-8", "replace")
    try:
        mode = os.stat(target).st_mode if os.path.exists(target) else None
        _replace(target, raw, stat.S_IMODE(mode) if mode is not None else None)
    except OSError as error:
        raise InputError(f"--output: cannot write {path[:200]!r}: {error.strerror or error}") from None


def _replace(target: str, raw: bytes, mode: int | None) -> None:
    temporary = os.path.join(os.path.dirname(target), f".memfit-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
