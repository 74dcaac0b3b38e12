"""Bounded reading of a `config.json`: a file from outside is hostile until it has been parsed.

Every refusal is one line that names the file (and the line where there is one) and says what to do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import IO, Any, NoReturn

from memfit.errors import InputError

MAX_CONFIG_BYTES = 4 << 20
"""The largest config.json read: the largest ones published are below 1 MiB (long lists of labels or of quantised modules)."""
MAX_DEPTH = 64
"""The deepest nesting of objects and arrays that is read; published configs stay below 10."""
MAX_DIGITS = 100
"""The longest whole number that is read, in digits; `int` itself refuses more than 4,300."""

_BRACKET = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]'
"""A whole string (or one that never ends), so that brackets in it do not count, or a bracket."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def printable(text: str, limit: int = 200) -> str:
    """The text as it can be shown in one line: control characters escaped, undecodable bytes escaped, the middle cut out."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)
    return shown if len(shown) <= limit else f"{shown[: limit // 2]}...{shown[-limit // 2 :]}"


def read_config_file(path: str, shown: str | None = None) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file; symbolic links are followed.
        shown: how errors name it; the path itself if not given.

    Raises:
        InputError: it cannot be read, is not a regular file, is too large, or is not a JSON object.
    """
    name = shown if shown is not None else printable(path)
    return parse_config(_read_bounded(path, name), name)


def read_config_stream(stream: IO[bytes] | IO[str]) -> dict[str, Any]:
    """The JSON object on standard input.

    Raises:
        InputError: it is a terminal, empty, too large, or not a JSON object.
    """
    name = "standard input"
    if stream.isatty():
        raise InputError(f"{name}: a terminal, nothing is piped into it; write: memfit infer - < config.json")
    data = stream.read(MAX_CONFIG_BYTES + 1)
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogateescape")
    if len(data) > MAX_CONFIG_BYTES:
        _refuse_size(name, None)
    return parse_config(data, name)


def parse_config(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `data`; `name` says in errors where it came from. With duplicate keys the last one wins.

    Infinity and NaN are read as Python's json writes them: Mamba-2's configs hold `"time_step_limit": [0.0, Infinity]`. Where a
    dimension is one of them, the family's view of the config refuses it by name.

    Raises:
        InputError: it is not UTF-8, not JSON, not an object, nested too deep, or holds absurd numbers.
    """
    text = _decode(data, name)
    if not text.strip():
        raise InputError(f"{name}: empty; give a config.json")
    _check_depth(text, name)

    def whole_number(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            line = text.count("\n", 0, text.find(digits)) + 1
            raise InputError(f"{name}, line {line}: a whole number of {len(digits):,} digits; at most {MAX_DIGITS} are read")
        return int(digits)

    def fraction(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            line = text.count("\n", 0, text.find(digits)) + 1
            raise InputError(f"{name}, line {line}: the number {digits[:40]} is too large")
        return value

    try:
        value = json.loads(text, parse_int=whole_number, parse_float=fraction)
    except json.JSONDecodeError as error:
        cut = ", it ends too early" if error.pos >= len(text.rstrip()) else ""
        raise InputError(f"{name}, line {error.lineno}, column {error.colno}: not JSON{cut} ({error.msg})") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deep; at most {MAX_DEPTH} levels are read") from None
    if not isinstance(value, dict):
        raise InputError(f"{name}: holds a JSON {_json_kind(value)}, not an object; give a config.json")
    _refuse_other_files(value, name)
    return value


def _read_bounded(path: str, name: str) -> bytes:
    """The bytes of a regular file, at most `MAX_CONFIG_BYTES` of them read; never waits for a pipe or a device."""
    try:
        # Before opening: to open a device can have effects, and to open a pipe waits for its writer.
        _require_regular(os.stat(path), name)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _require_regular(status, name)  # again: the name may point elsewhere by now
            if status.st_size > MAX_CONFIG_BYTES:
                _refuse_size(name, status.st_size)
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(f"{name}: {os_reason(error)}") from None
    if len(data) > MAX_CONFIG_BYTES:
        _refuse_size(name, None)
    return data


def os_reason(error: OSError) -> str:
    """What the operating system's error means, and what to do."""
    if error.errno == errno.ELOOP:
        return "its symbolic links form a loop; give the path of the file itself"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "no such file"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not readable for this user (permission denied)"
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long for a file"
    return f"cannot be read ({error.strerror or type(error).__name__})"


def _require_regular(status: os.stat_result, name: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((text for test, text in _KINDS if test(status.st_mode)), "no regular file")
    hint = "a file, or - to read standard input" if kind in ("a named pipe", "a device") else "the path of a config.json"
    raise InputError(f"{name}: {kind}, not a file; give {hint}")


def _refuse_size(name: str, size: int | None) -> NoReturn:
    has = f"{size:,} bytes" if size is not None else "more"
    raise InputError(f"{name}: {has}, but a config.json has at most {MAX_CONFIG_BYTES:,} bytes (4 MiB); is it the right file?")


def _decode(data: bytes, name: str) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{name}: UTF-16 text; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name}, line {line}: not UTF-8 text (byte 0x{data[error.start]:02x}); give a config.json") from None


def _check_depth(text: str, name: str) -> None:
    depth = 0
    for found in re.finditer(_BRACKET, text, re.DOTALL):
        char = found.group()[0]
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                line = text.count("\n", 0, found.start()) + 1
                raise InputError(f"{name}, line {line}: nested too deep; at most {MAX_DEPTH} levels are read")
        elif char in "]}":
            depth -= 1


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number")


def _refuse_other_files(value: dict[str, Any], name: str) -> None:
    """Other JSON files that lie beside a config.json, recognised by their keys, so that the error says which one to give."""
    if "model_type" in value or "architectures" in value:
        return
    if "weight_map" in value:
        what = "the index of a checkpoint's weight files; give the config.json beside it"
    elif "peft_type" in value:
        base = value.get("base_model_name_or_path")
        beside = f" ({printable(base, 100)})" if isinstance(base, str) and base else ""
        what = f"the config of an adapter (PEFT), not of a model; give its base model{beside}"
    elif "_diffusers_version" in value or "_class_name" in value:
        what = "a config of the diffusers library; diffusion models are not read yet"
    elif "n_layers" in value and "dim" in value:
        what = "a params.json of the original release; give the config.json of the Hugging Face version of the model"
    elif "tokenizer_class" in value and "hidden_size" not in value:
        what = "the config of a tokenizer; give the config.json beside it"
    else:
        return
    raise InputError(f"{name}: {what}")
