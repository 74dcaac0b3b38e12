"""The argument parser of one command, made from the field registry: an option is written in `memfit.job` and nowhere else."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memfit.cli.commands import COMMANDS, MODEL_HELP, Command, classes_of
from memfit.cli.presentation import Presentation
from memfit.errors import UsageError, did_you_mean
from memfit.options import Option, build, options_of

GROUP_TITLES = {
    "workload": "workload", "precision": "precision", "optimizer": "optimizer", "adapters": "adapters", "cache": "cache",
    "activations": "activations", "kernels": "kernels", "parallelism": "parallelism", "hardware": "hardware",
    "runtime": "runtime", "overhead": "overhead, by hand", "model": "model by size or dimensions", "output": "output",
}  # fmt: skip
"""Titles of the registry's groups in the order of the help text; a group that is not named here follows under its own name."""

_EXAMPLES = {"size": ", a size such as 24GiB", "count": ", a count such as 7B", "tokens": ", a whole number such as 4096 or 8k",
             "fraction": ", a share such as 10%", "number": ", a number"}  # fmt: skip
_METAVARS = {"size": "BYTES", "count": "N", "tokens": "N", "fraction": "SHARE", "number": "X", "text": "TEXT"}


class Request(NamedTuple):
    """A command line that was understood: the raw values are still to be parsed by the fields they belong to."""

    command: Command
    argument: str | None
    values: Mapping[str, Any]
    presentation: Presentation = Presentation()

    def build(self, cls: type[Any]) -> Any:
        """An instance of one of the command's classes from the options that were given."""
        own = options_of(cls)
        return build(cls, {name: value for name, value in self.values.items() if name in own})

    def given(self, cls: type[Any]) -> list[str]:
        """The flags of this class that were given, as the user would write them."""
        return [one.flag for name, one in options_of(cls).items() if self.values.get(name) is not None]


def command_options(command: Command) -> list[Option]:
    """All options of a command, in the order of their groups."""
    options = [one for cls in classes_of(command) for one in options_of(cls).values()]
    order = list(GROUP_TITLES)
    return sorted(options, key=lambda one: order.index(one.group) if one.group in order else len(order))


def option_strings(option: Option) -> list[str]:
    """`--batch`, then its aliases."""
    return [option.flag, *("--" + alias.replace("_", "-") for alias in option.aliases)]


def negative_strings(option: Option) -> list[str]:
    """`--no-gated`: the spellings that turn a flag off; none for a flag that is off unless given."""
    if option.kind != "flag" or option.default is False:
        return []
    return ["--no-" + name[2:] for name in option_strings(option)]


def describe(option: Option, default_text: str = "") -> str:
    """The help text of an option: what it is, its choices, its unit and its default."""
    notes = []
    if option.choices:
        notes.append(", ".join(option.choices))
    if option.unit:
        notes.append(option.unit)
    if option.default is not None and option.kind != "flag":
        notes.append(f"default {option.default:g}" if isinstance(option.default, float) else f"default {option.default}")
    notes.extend([default_text] if default_text else [])
    return option.help + (f" ({'; '.join(notes)})" if notes else "")


def metavar(option: Option) -> str:
    """What stands for the value in the help text."""
    return option.name.upper().replace("_", "-") if option.kind == "choice" else _METAVARS.get(option.kind, "VALUE")


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option], *, with_help: bool) -> None:
    """Add the options to the parser, in groups when a help text is wanted. Values stay strings: their fields parse them."""
    groups: dict[str, Any] = {}
    for option in options:
        where: Any = parser
        if with_help:
            title = GROUP_TITLES.get(option.group, option.group or "options")
            where = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        names, off = option_strings(option), negative_strings(option)
        if with_help:
            # One spelling at the margin, the others in the text: a dozen of them would hide what the option does.
            also = f"; also {', '.join(names[1:])}" if len(names) > 1 else ""
            text = (describe(option) + also).replace("%", "%%")
            if option.kind == "flag":
                where.add_argument(names[0], *off[:1], dest=option.name, action="store_true", help=text)
            else:
                where.add_argument(names[0], dest=option.name, metavar=metavar(option), help=text)
        elif option.kind != "flag":
            where.add_argument(*names, dest=option.name)
        else:
            where.add_argument(*names, dest=option.name, action="store_const", const=True)
            if off:
                where.add_argument(*off, dest=option.name, action="store_const", const=False)


def _normalise(token: str) -> str:
    """`--per_device_train_batch_size=4` as `--per-device-train-batch-size=4`: people paste the flags of training scripts."""
    if not token.startswith("--") or "_" not in token:
        return token
    name, equals, value = token.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_option(token: str, command: Command, options: Sequence[Option]) -> UsageError:
    name = token.partition("=")[0]
    known = [text for one in options for text in (*option_strings(one), *negative_strings(one))]
    hint = did_you_mean(name, [*known, "--help"])
    for other in COMMANDS if not hint else ():
        elsewhere = [text for one in command_options(other) for text in option_strings(one)]
        if name in elsewhere:
            hint = f"; it is an option of 'memfit {other.name}'"
            break
    return UsageError(f"unknown option {name[:64]!r} for 'memfit {command.name}'{hint}; see memfit {command.name} -h")


def _missing_value(error: argparse.ArgumentError, options: Sequence[Option]) -> UsageError:
    names = (error.argument_name or "").split("/")
    option = next((one for one in options if one.flag in names or f"--no-{one.flag[2:]}" in names), None)
    if option is not None and option.kind != "flag":
        takes = f": {', '.join(option.choices)}" if option.choices else _EXAMPLES.get(option.kind, "")
        return UsageError(f"{option.flag} needs a value{takes}")
    return UsageError(f"{names[0]} takes no value")


class _NoHelp(argparse.HelpFormatter):
    """argparse makes a formatter for every argument that is added, and each asks for the size of the terminal. Not this one."""

    def __init__(self, prog: str) -> None:
        pass

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return ""


def parse(command: Command, tokens: Sequence[str]) -> Request:
    """Read the tokens after the command's name. The positional argument may stand anywhere among them.

    Raises:
        UsageError: an unknown option, a missing value, or more than one positional argument.
    """
    options = command_options(command)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, formatter_class=_NoHelp)
    add_options(parser, options, with_help=False)
    end = list(tokens).index("--") if "--" in tokens else len(tokens)
    try:
        space, rest = parser.parse_known_args([_normalise(token) for token in tokens[:end]])
    except argparse.ArgumentError as error:
        raise _missing_value(error, options) from None
    for token in rest:
        if token.startswith("-") and token != "-":
            raise _unknown_option(token, command, options)
    words = [*rest, *tokens[end + 1 :]]
    if any(not word.strip() for word in words):
        raise UsageError(f"an empty {command.argument or 'argument'} was given to 'memfit {command.name}'")
    allowed = 1 if command.argument else 0
    if len(words) > allowed:
        what = f"one {command.argument}" if allowed else "no argument beside its options"
        raise UsageError(f"unexpected argument {words[allowed][:64]!r}: 'memfit {command.name}' takes {what}")
    values = {name: value for name, value in vars(space).items() if value is not None}
    shown = options_of(Presentation)
    presentation = build(Presentation, {name: value for name, value in values.items() if name in shown})
    return Request(
        command=command,
        argument=words[0] if words else None,
        values={name: value for name, value in values.items() if name not in shown},
        presentation=presentation,
    )


def help_parser(command: Command, formatter: type[argparse.HelpFormatter]) -> argparse.ArgumentParser:
    """A parser that exists to print the help of one command: what it does, examples, usage, options by group."""
    width = max(len(line) for line, _ in command.examples)
    examples = "\n".join(f"  {line:<{width}}  {what}" for line, what in command.examples)
    names = " ".join(part for part in ("memfit", command.name, f"[{command.argument}]" if command.argument else "") if part)
    aliases = f" (alias: {', '.join(command.aliases)})" if command.aliases else ""
    lines = [command.help + aliases, "", "examples:", examples, "", f"usage: {names} [options]"]
    if command.argument == "MODEL":
        lines += ["", MODEL_HELP]
    parser = argparse.ArgumentParser(
        prog=f"memfit {command.name}",
        usage=argparse.SUPPRESS,
        description="\n".join(lines),
        formatter_class=formatter,
        add_help=False,
    )
    add_options(parser, command_options(command), with_help=True)
    return parser


def completion_parser() -> argparse.ArgumentParser:
    """The parser of all commands at once, which only shell completion needs."""
    parser = argparse.ArgumentParser(prog="memfit", allow_abbrev=False)
    commands = parser.add_subparsers()
    for command in COMMANDS:
        sub = commands.add_parser(command.name, aliases=list(command.aliases), help=command.help, allow_abbrev=False)
        if command.argument:
            sub.add_argument(command.argument.lower(), nargs="?")
        options = command_options(command)
        add_options(sub, options, with_help=False)
        choices = {one.name: one.choices for one in options if one.choices}
        for action in sub._actions:
            if action.dest in choices and action.option_strings:
                action.choices = list(choices[action.dest])
    return parser
