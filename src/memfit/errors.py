"""The two kinds of error a user sees: bad input (exit code 1) and bad usage (exit code 2).

Every message says what is wrong, where (file, line or field) and what to do about it, in one line.
A job that does not fit is not an error: it is an answer.
"""

from __future__ import annotations

from collections.abc import Iterable


class MemfitError(Exception):
    """Base of every error that memfit raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class InputError(MemfitError):
    """Something that was read (a file, a config, a Hub answer) cannot be used."""


class UnknownArchitectureError(InputError):
    """A config that names an architecture for which no family exists, or keys that its family does not understand."""


class UsageError(MemfitError):
    """An option, a name or a value that the user gave cannot be used."""

    exit_code = 2


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """Text to append to an error: ` (did you mean 'a' or 'b'?)`, or the empty string if nothing is close."""
    import difflib  # only when an error is made: every start would pay for it

    names = sorted(set(known))
    lowered = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), list(lowered), n=limit, cutoff=0.6)
    if not close:
        return ""
    return " (did you mean " + " or ".join(repr(lowered[name]) for name in close) + "?)"
