"""The one mechanism for an input of a job: declared once as the field of a record, known to every face.

A field is declared with `option(...)` on a frozen record; that declaration is all there is. From it come the command-line
options, validation with "did you mean", the JSON Schema, the docs table and the flag that an assumption names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from memfit.errors import UsageError, did_you_mean
from memfit.records import Record, annotations_of
from memfit.units import LARGEST, parse_count, parse_fraction, parse_size, parse_tokens

LONGEST_SHOWN = 60
"""Characters of what the user gave that a message repeats."""

MOST_RELEASE_PARTS = 4
"""Numbers in a release, as in 4.57.1."""

T = TypeVar("T", bound="Options")

_PARSERS: dict[str, Callable[[str], Any]] = {
    "size": parse_size,
    "count": parse_count,
    "tokens": parse_tokens,
    "fraction": parse_fraction,
}
_JSON_TYPES = {"size": "integer", "count": "integer", "tokens": "integer", "fraction": "number", "number": "number",
               "text": "string", "choice": "string", "flag": "boolean"}  # fmt: skip


_WORDS = {"tokens": "whole number", "fraction": "share"}
"""How messages call a kind, where not by its own name."""


def _shown(given: Any) -> str:
    """What was given, as a message repeats it: never long."""
    try:
        text = repr(given)
    except ValueError:  # an integer of more digits than Python prints
        return "so large a number"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if bound == int(bound) else f"{bound:g}"


class Option(Record):
    """What is known of one field. `kind` is size | count | tokens | fraction | number | text | choice | flag."""

    name: str
    kind: str
    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    """Beside `choices`: values that begin with one of these are taken too (`custom:`)."""
    versioned: str = ""
    """Whether a choice may name a release: `hf@4.57`."""
    minimum: float | None = None
    maximum: float | None = None
    aliases: tuple[str, ...] = ()
    choice_aliases: Mapping[str, str] = {}
    group: str = ""

    @property
    def flag(self) -> str:
        """The command-line spelling, `--kv-heads`."""
        return "--" + self.name.replace("_", "-")

    def parse(self, raw: Any) -> Any:
        """The value of this field from a string or a JSON value.

        Raises:
            UsageError: the value has the wrong type, is out of bounds or is not one of the choices.
        """
        if raw is None:
            return None
        if self.kind == "flag":
            return self._parse_flag(raw)
        if self.kind in ("choice", "text"):
            return self._parse_text(raw)
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise UsageError(f"{self.flag} takes a {_WORDS.get(self.kind, self.kind)}, not {_shown(raw)}")
        if isinstance(raw, str):
            value = self._parse_number(raw)
        elif isinstance(raw, float) and self.kind not in ("number", "fraction"):
            if not raw.is_integer():
                raise UsageError(f"{self.flag} takes a whole number, not {_shown(raw)}")
            value = int(raw)
        else:
            value = raw
        self._check_bounds(value)
        return value

    def _parse_flag(self, raw: Any) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in ("true", "yes", "on", "1"):
            return True
        if isinstance(raw, str) and raw.lower() in ("false", "no", "off", "0"):
            return False
        raise UsageError(f"{self.flag} takes true or false, not {_shown(raw)}")

    def _parse_text(self, raw: Any) -> str | None:
        """The text or choice; `auto` leaves a field open whose value is decided from the rest."""
        if isinstance(raw, int) and (not isinstance(raw, bool) or str(raw).lower() in self.choice_aliases):
            raw = str(raw)
        if not isinstance(raw, str):
            raise UsageError(f"{self.flag} takes a text, not {_shown(raw)}")
        text = raw.strip()
        if self.kind == "text":
            return text
        lowered = text.lower()
        if lowered == "auto" and self.default is None:
            return None
        release = ""
        if self.versioned:
            lowered, at, release = lowered.partition("@")
            release = self._release(at, release, text)
        begins, colon, rest = lowered.partition(":")
        if begins + colon in self.choice_aliases:  # an alias of a pattern
            lowered = self.choice_aliases[begins + colon] + rest
        lowered = self.choice_aliases.get(lowered, lowered)
        if lowered in self.choices and self.versioned:
            return lowered + release
        if lowered in self.choices or lowered.startswith(self.patterns):
            return lowered
        hint = did_you_mean(text[:LONGEST_SHOWN], [*self.choices, *self.patterns, *self.choice_aliases])
        taken = ", ".join([*self.choices, *[f"{one}..." for one in self.patterns]])
        raise UsageError(f"{self.flag} does not know {_shown(text)}{hint}; it takes {taken}")

    def _release(self, at: str, release: str, text: str) -> str:
        parts = release.split(".")
        numbers = all(part.isascii() and part.isdigit() and len(part) <= 6 for part in parts)
        if at and not (numbers and len(parts) <= MOST_RELEASE_PARTS):
            raise UsageError(f"{self.flag} takes a release such as {self.choices[0]}@{self.versioned}, not {_shown(text)}")
        return at + release

    def _parse_number(self, raw: str) -> float | int:
        if raw.strip().startswith("-"):
            raise UsageError(f"{self.flag} cannot be negative ({raw.strip()[:LONGEST_SHOWN]})")
        if self.kind == "number":
            try:
                return float(raw)
            except ValueError:
                raise UsageError(f"{self.flag} takes a number, not {_shown(raw)}") from None
        try:
            value: int | float = _PARSERS[self.kind](raw)
        except UsageError as error:
            raise UsageError(f"{self.flag}: {error}") from None
        return value

    def _check_bounds(self, value: float) -> None:
        if value != value:
            raise UsageError(f"{self.flag} takes a number, not {value}")
        if self.minimum is not None and value < self.minimum:
            raise UsageError(f"{self.flag} must be at least {_number(self.minimum)}, not {_shown(value)}")
        if self.kind == "fraction" and not 0 <= value < 1:
            raise UsageError(f"{self.flag} is a share: at least 0 and below 1, not {_shown(value)}")
        maximum = self.maximum if self.maximum is not None else LARGEST
        if value > maximum:
            raise UsageError(f"{self.flag} must be at most {_number(maximum)}, not {_shown(value)}")

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of this field's value."""
        schema: dict[str, Any] = {"type": _JSON_TYPES[self.kind], "description": self.help}
        if self.versioned:
            schema["pattern"] = f"^({'|'.join(self.choices)})(@[0-9]+([.][0-9]+)*)?$"
        elif self.choices and not self.patterns:
            schema["enum"] = list(self.choices)
        if self.patterns:
            schema["examples"] = [*self.choices, *[f"{one}..." for one in self.patterns]]
        if self.minimum is not None:
            schema["minimum"] = self.minimum
        if self.maximum is not None:
            schema["maximum"] = self.maximum
        if self.default is not None:
            schema["default"] = self.default
        return schema


class Options(Record):
    """A record whose fields are inputs: each is declared with `option(...)` and keeps what that says."""

    options: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls) -> None:
        declared = dict(cls.options)
        for name in annotations_of(cls):
            given = cls.__dict__.get(name)
            if isinstance(given, _Declaration):
                declared[name] = Option(name=name, default=given.default, **given.metadata)
                setattr(cls, name, given.default)
        cls.options = declared
        super().__init_subclass__()


class _Declaration:
    """What `option(...)` was called with, until the class that declares it is complete."""

    __slots__ = ("default", "metadata")

    def __init__(self, default: Any, metadata: dict[str, Any]) -> None:
        self.default = default
        self.metadata = metadata


def option(default: Any, help: str, *, kind: str, **metadata: Any) -> Any:
    """The declaration of a field that is an input of a job. See `Option` for the metadata."""
    return _Declaration(default, {"kind": kind, "help": help, **metadata})


def options_of(cls: type[Options]) -> dict[str, Option]:
    """The options that a class declares, by field name, in order of declaration."""
    return cls.options


def build(cls: type[T], values: Mapping[str, Any], *, known_elsewhere: Iterable[str] = ()) -> T:
    """An instance of `cls` from raw values by field name (underscores or hyphens; aliases are accepted).

    Raises:
        UsageError: a name that neither `cls` nor `known_elsewhere` knows, or a value that its field refuses.
    """
    options = options_of(cls)
    names = {alias.replace("-", "_"): name for name, one in options.items() for alias in one.aliases}
    others = set(known_elsewhere)
    parsed: dict[str, Any] = {}
    if not isinstance(values, Mapping):
        raise UsageError(f"options are given by name in a mapping, not as {_shown(values)}")
    for raw_name, raw in values.items():
        if not isinstance(raw_name, str):
            raise UsageError(f"the name of an option is a text, not {_shown(raw_name)}")
        name = raw_name.replace("-", "_")
        name = names.get(name, name)
        if name not in options:
            if name in others:
                continue
            hint = did_you_mean(name[:LONGEST_SHOWN], [*options, *others])
            raise UsageError(f"unknown option {_shown(raw_name)}{hint}")
        if raw is not None:
            parsed[name] = options[name].parse(raw)
    return cls(**parsed)


def checked(given: T) -> T:
    """The same values, each read as its field reads it: what was built by hand is checked like what was typed.

    Raises:
        UsageError: a value that its field refuses.
    """
    return build(type(given), {name: getattr(given, name) for name in options_of(type(given))})


def json_schema(cls: type[Options], title: str) -> dict[str, Any]:
    """The JSON Schema of an object with the fields of `cls`, all optional, none unknown."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": {name: one.json_schema() for name, one in options_of(cls).items()},
        "additionalProperties": False,
    }
