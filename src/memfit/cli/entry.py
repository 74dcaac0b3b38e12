"""From `sys.argv` to an exit code: 0 done, 1 bad input, 2 bad usage, 130 interrupted. Never a traceback.

Only what the asked command needs is imported, so that the tool starts in a fraction of a tenth of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from memfit.cli.commands import COMMANDS, EXAMPLES, Command, command_names
from memfit.cli.output import check_target, emit, forget_stdout, write_stdout
from memfit.errors import MemfitError, UsageError, did_you_mean

_GLOBAL_FLAGS = ("--json", "--explain", "--no-color", "--no-colour", "--color", "--colour")
"""Options without a value: a command's name may follow one of them."""


def run() -> None:
    """The entry of the `memfit` script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line and return its exit code. Results go to standard output, everything else to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except MemfitError as error:
        _complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader is gone: `| head`
        forget_stdout()
        return 0
    except Exception as error:
        if os.environ.get("MEMFIT_DEBUG"):
            raise
        _complain(f"internal error: {type(error).__name__}: {error} (please report it)")
        return 1


def _complain(message: str) -> None:
    """One line on standard error, without control characters."""
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    if sys.stderr is None:  # closed; print would take standard output instead, which is for results
        return
    with suppress(OSError):
        print(f"memfit: {line[:1000]}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if not arguments:
        write_stdout(EXAMPLES)
        return 0
    command, rest = split_command(arguments)
    options = rest[: rest.index("--")] if "--" in rest else rest
    if command is None and ("-h" in options or "--help" in options):
        write_stdout(overall_help())
        return 0
    if command is None and ("--version" in options or "-V" in options):
        from memfit._version import __version__

        write_stdout(f"memfit {__version__}\n")
        return 0
    if "-h" in options or "--help" in options:
        assert command is not None
        from memfit.cli.help import command_help

        write_stdout(command_help(command, color="--no-color" not in options))
        return 0
    return _carry_out(command or command_names()["fit"], rest, named=command is not None)


def split_command(arguments: Sequence[str]) -> tuple[Command | None, list[str]]:
    """The command and the other tokens. The command's name is the first token that is one and is not an option's value;
    without one the whole line is `memfit fit ...`."""
    names = command_names()
    previous = ""
    for index, token in enumerate(arguments):
        if token == "--":
            break
        is_value = previous.startswith("--") and "=" not in previous and previous not in _GLOBAL_FLAGS
        if token in names and not is_value:
            return names[token], [*arguments[:index], *arguments[index + 1 :]]
        previous = token
    return None, list(arguments)


def _carry_out(command: Command, tokens: list[str], *, named: bool) -> int:
    from memfit.cli.parser import parse

    try:
        request = parse(command, tokens)
    except UsageError:
        if not named:
            _check_misspelt_command(tokens, certain=True)
        raise
    if not named and request.argument is not None:
        _check_misspelt_command(tokens, certain=False)
    check_target(request.presentation)
    module_name, _, function_name = command.handler.partition(":")
    module = __import__(module_name, fromlist=[function_name])
    emit(getattr(module, function_name)(request), request.presentation)
    return 0


def _check_misspelt_command(tokens: Sequence[str], *, certain: bool) -> None:
    """Refuse `memfit trian ...`. `certain`: the line could not be read as an overview either, so that a first word which is
    followed by another one must have been meant as a command.

    Raises:
        UsageError: the first token looks like a command's name.
    """
    word = tokens[0]
    if word.startswith("-") or os.path.exists(word) or any(char in word for char in "/.") or any(char.isdigit() for char in word):
        return
    names = list(command_names())
    hint = did_you_mean(word, names)
    if hint or (certain and len(tokens) > 1 and not tokens[1].startswith("-")):
        listed = hint or f"; the commands are {', '.join(command.name for command in COMMANDS)}"
        raise UsageError(f"unknown command {word[:64]!r}{listed}")


def overall_help() -> str:
    """What `memfit -h` prints: examples, then the commands."""
    width = max(len(command.name) for command in COMMANDS)
    rows = []
    for command in COMMANDS:
        aliases = f" (alias: {', '.join(command.aliases)})" if command.aliases else ""
        rows.append(f"  {command.name:<{width}}  {command.help}{aliases}")
    examples = "".join(f"  {line}\n" for line in EXAMPLES.splitlines())
    return (
        "memfit computes whether training, fine-tuning or serving a model fits in a device's memory.\n\n"
        f"examples:\n{examples}\n"
        "usage: memfit [COMMAND] [MODEL] [options]     without a command: memfit fit MODEL\n\n"
        "commands:\n" + "\n".join(rows) + "\n\n"
        "memfit COMMAND -h shows the options of a command; memfit --version prints the version.\n"
        "Exit codes: 0 done (also when it does not fit), 1 bad input, 2 bad usage, 130 interrupted.\n"
    )


def _complete() -> None:
    """Shell completion: only when the shell asks for it, for the import is slow."""
    try:
        import argcomplete
    except ImportError:
        return
    from memfit.cli.parser import completion_parser

    argcomplete.autocomplete(completion_parser(), always_complete_options=False)
