"""Bytes, counts and their spelling. Integers of bytes inside, GiB at the edge.

The rule for sizes: `KiB MiB GiB TiB` and the bare letters `K M G T` are powers of 1024; `KB MB GB TB` are powers of 1000.
The rule for tokens: `k` is 1024 (a 128k context is 131,072 tokens). The rule for counts: `k M B T` are powers of 1000.
"""

from __future__ import annotations

import re

from memfit.errors import UsageError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": KiB, "kib": KiB, "kb": 10**3,
    "m": MiB, "mib": MiB, "mb": 10**6,
    "g": GiB, "gib": GiB, "gb": 10**9,
    "t": TiB, "tib": TiB, "tb": 10**12,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_TOKEN_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

_QUANTITY = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,2})?|\.[0-9]+)\s*([A-Za-z]*)\s*$")
LARGEST = 1 << 60
"""No size, count or token number above this is taken: it is a typing error, and products must stay within 64 bits."""


def _parse(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = _QUANTITY.match(text) if len(text) <= 64 else None
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"cannot read {text[:64]!r} as {what}: write it like {example}")
    digits = match.group(1).replace("_", "").replace(",", "")
    value = int(digits) * factor if digits.isdigit() else _whole(float(digits) * factor, factor, text, what, example)
    if value > LARGEST:
        raise UsageError(f"{text.strip()!r} is too large for {what}: write it like {example}")
    return value


def _whole(value: float, factor: int, text: str, what: str, example: str) -> int:
    """A fraction of a unit is rounded to whole bytes or elements; a fraction without a unit is a mistake."""
    if value > LARGEST:
        raise UsageError(f"{text.strip()[:64]!r} is too large for {what}: write it like {example}")
    if factor == 1 and not value.is_integer():
        raise UsageError(f"{text.strip()[:64]!r} is not a whole number: write {what} like {example}")
    return round(value)


def parse_size(text: str) -> int:
    """Bytes from `80GB`, `24GiB`, `24G`, `24576MiB` or a plain number of bytes. Raises `UsageError`."""
    return _parse(text, _SIZE_UNITS, "a size", "24GiB, 80GB or 512MiB")


def parse_count(text: str) -> int:
    """A count from `7B`, `7e9`, `350M` or a plain number; `k M B T` are powers of 1000. Raises `UsageError`."""
    return _parse(text, _COUNT_UNITS, "a count", "7B, 350M or 7e9")


def parse_tokens(text: str) -> int:
    """Tokens from `8192`, `128k` (= 131,072) or `1M` (= 1,048,576). Raises `UsageError`."""
    return _parse(text, _TOKEN_UNITS, "a whole number", "8, 8192 or 128k")


def parse_fraction(text: str) -> float:
    """A share from `10%` or `0.1`. Raises `UsageError` outside [0, 1)."""
    stripped = text.strip()
    try:
        value = float(stripped[:-1]) / 100 if stripped.endswith("%") else float(stripped)
    except ValueError:
        raise UsageError(f"cannot read {text[:60]!r} as a share: write it like 10% or 0.1") from None
    if not 0 <= value < 1:
        raise UsageError(f"a share must be at least 0 and below 1 (100%), not {text[:60]!r}")
    return value


def format_gib(num_bytes: int, digits: int = 2) -> str:
    """`15.96 GiB`; below 0.01 GiB in MiB or KiB so that a small number does not print as zero."""
    if num_bytes and abs(num_bytes) < GiB // 100:
        if abs(num_bytes) < MiB // 100:
            return f"{num_bytes / KiB:.{digits}f} KiB"
        return f"{num_bytes / MiB:.{digits}f} MiB"
    return f"{num_bytes / GiB:.{digits}f} GiB"


def format_count(count: int) -> str:
    """`8.03B`, `125M`, `4,096`."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= factor:
            return f"{count / factor:.2f}{letter}"
    return f"{count:,}"
