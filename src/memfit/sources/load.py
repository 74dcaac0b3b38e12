"""From the MODEL argument of a command to a config: one function that decides which of the forms the text has."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, Any

from memfit.errors import InputError, UsageError, did_you_mean
from memfit.job import Assumption
from memfit.records import Record
from memfit.sources.files import os_reason, printable, read_config_file, read_config_stream
from memfit.sources.presets import find_preset, known_names
from memfit.units import format_count, parse_count

MAX_ARGUMENT = 4096
"""Longest MODEL argument, in characters: the longest path that Linux takes."""
# Patterns are texts, compiled where they are used: a preset or a file needs none of them, and start-up time counts.
_SIZE = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,2})?\s*[kKmMbBtT]|[0-9]+(?:\.[0-9]+)?[eE][+]?[0-9]{1,2}"
_MIXTURE = r"[0-9]+[xX][0-9.]+[bBmM]"
_HUB_ID = r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96})(?:@(?P<revision>[\w./-]{1,200}))?"
_HUB_URL = (
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve|raw)/(?P<revision>[\w.-]+)(?:/.*)?)?/?"
)
_NOT_READ = {
    ".safetensors": "safetensors files are not read yet; give the config.json beside it",
    ".safetensors.index.json": "the index of a checkpoint is not read; give the config.json beside it",
    ".gguf": "GGUF files are not read yet; give the config.json of the model that it was made from",
    ".yaml": "layer files (YAML) are not read yet; give a config.json, or --layers, --hidden, --heads",
    ".yml": "layer files (YAML) are not read yet; give a config.json, or --layers, --hidden, --heads",
    ".toml": "layer files (TOML) are not read yet; give a config.json, or --layers, --hidden, --heads",
    ".bin": "weight files (pickles) are never opened; give the config.json beside it",
    ".pt": "weight files (pickles) are never opened; give the config.json beside it",
    ".pth": "weight files (pickles) are never opened; give the config.json beside it",
    ".ckpt": "weight files (pickles) are never opened; give the config.json beside it",
}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".index.json")
_MAX_LISTED = 10_000


class LoadedConfig(Record):
    """A config and where it came from."""

    config: dict[str, Any]
    name: str
    """How to call the model in an answer."""
    source: str
    """In words, where the config was read from."""
    assumptions: tuple[Assumption, ...] = ()
    relative_uncertainty: float = 0.0
    """Of a model known by its size only: see `families.sizes`."""
    parameters: int | None = None
    """The count as stated, when the model is known by its size only."""


def load_config(text: str, *, stdin: IO[bytes] | IO[str] | None = None) -> LoadedConfig:
    """The config that a MODEL argument names.

    In this order: `-` (standard input); a path that exists (a config.json, or a folder with one); a preset (`llama-3.1-8b`, or
    its Hub id); a size (`7B`); a Hub id (`org/name`, `org/name@revision`, or the address of its page).

    Args:
        text: the argument.
        stdin: what `-` reads; the process's standard input if not given.

    Raises:
        InputError: what it names cannot be read.
        UsageError: it names nothing that is known.
    """
    if not text.strip():
        raise UsageError("the model is empty; name a preset (memfit models), a Hub id, a config.json or a size such as 7B")
    if len(text) > MAX_ARGUMENT or "\0" in text:
        raise UsageError(f"{printable(text, 80)} cannot name a model: it is too long or holds a null character")
    if text == "-":
        return _from_stdin(stdin)
    path = os.path.expanduser(text) if text.startswith("~") else text
    if _exists(path, text):
        return _from_path(path, text)
    preset = _from_preset(text)
    if preset is not None:
        return preset
    if _looks_like_path(text):
        raise InputError(f"{printable(text)}: no such file; give the path of a config.json or of a folder with one")
    text = text.strip()
    if re.fullmatch(_SIZE, text):
        return _from_size(text)
    url = re.fullmatch(_HUB_URL, text, re.ASCII) if "://" in text else None
    named = url or re.fullmatch(_HUB_ID, text, re.ASCII)
    if named is None:
        raise _unknown(text)
    if url is not None and url["revision"] is None:
        return _from_preset(url["repo"]) or _from_hub(url["repo"], None)
    return _from_hub(named["repo"], named["revision"])


def _from_stdin(stdin: IO[bytes] | IO[str] | None) -> LoadedConfig:
    stream: IO[bytes] | IO[str] | None = stdin if stdin is not None else getattr(sys.stdin, "buffer", sys.stdin)
    if stream is None:
        raise InputError("standard input: closed; write: memfit infer - < config.json")
    return LoadedConfig(config=read_config_stream(stream), name="standard input", source="standard input")


def _exists(path: str, text: str) -> bool:
    """Whether there is something at this path; broken and looping links count as there, to be named in the error."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return os.path.islink(path)
    except OSError as error:
        if _looks_like_path(text):
            raise InputError(f"{printable(text)}: {os_reason(error)}") from None
        return False
    # A folder such as `results/gpt2` must not hide the preset of its name: only one that holds a model counts.
    return not (os.path.isdir(path) and os.sep not in path and not _model_files(path) and find_preset(text) is not None)


def _looks_like_path(text: str) -> bool:
    if "://" in text:
        return False
    if text.startswith(("./", "../", "/", "~")) or text.lower().endswith((".json", *_NOT_READ)):
        return True
    return text.partition("@")[0].count("/") > 1  # a revision may have slashes: org/name@refs/pr/1


def _from_path(path: str, text: str) -> LoadedConfig:
    shown = printable(text)
    if os.path.isdir(path):
        path = _config_in(path, shown)
        shown = printable(os.path.join(text, "config.json"))
    else:
        _refuse_suffix(path, shown)
    return LoadedConfig(config=read_config_file(path, shown), name=_name_of(path), source=shown)


def _config_in(folder: str, shown: str) -> str:
    """The config.json of a folder.

    Raises:
        InputError: there is none; the message says what the folder does hold.
    """
    path = os.path.join(folder, "config.json")
    if os.path.lexists(path):
        return path
    names = _model_files(folder)
    if "model_index.json" in names:
        raise InputError(f"{shown}: a pipeline of the diffusers library, and diffusion models are not read yet")
    if "adapter_config.json" in names:
        raise InputError(f"{shown}: an adapter (PEFT) without a config.json; give its base model")
    if "params.json" in names:
        what = "has params.json (the original format) but no config.json"
        raise InputError(f"{shown}: {what}; give the folder of its Hugging Face version")
    if names:
        raise InputError(f"{shown}: has weights but no config.json, which says how they are used; put the model's own there")
    raise InputError(f"{shown}: a folder without config.json; give the folder of a model or the path of its config.json")


def _model_files(folder: str) -> list[str]:
    """Names in a folder that say that it holds a model: a config, weights or the files of other formats."""
    known = ("config.json", "model_index.json", "adapter_config.json", "params.json")
    found: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= _MAX_LISTED:
                    break
                if entry.name in known or entry.name.endswith(_WEIGHTS):
                    found.append(entry.name)
    except OSError as error:
        raise InputError(f"{printable(folder)}: {os_reason(error)}") from None
    return found


def _refuse_suffix(path: str, shown: str) -> None:
    lowered = path.lower()
    for suffix in sorted(_NOT_READ, key=len, reverse=True):
        if lowered.endswith(suffix):
            raise InputError(f"{shown}: {_NOT_READ[suffix]}")


def _name_of(path: str) -> str:
    """What to call the model of a file: its Hub id in the Hub's cache, the folder of a config.json, else the file's own name."""
    from memfit.sources.hub import name_in_cache

    full = os.path.abspath(path)
    stem = os.path.splitext(os.path.basename(full))[0]
    folder = os.path.basename(os.path.dirname(full))
    return printable(name_in_cache(full) or (folder if stem == "config" and folder else stem), 100)


def _from_preset(text: str) -> LoadedConfig | None:
    preset = find_preset(text.strip())
    if preset is None:
        return None
    return LoadedConfig(config=preset.config, name=preset.name, source=f"preset {preset.name}: {preset.source}")


def _from_size(text: str) -> LoadedConfig:
    from memfit.families.sizes import config_for_size

    params = parse_count(text)
    sized = config_for_size(params)
    return LoadedConfig(
        config=sized.config,
        name=f"a {text} model",
        source=f"typical dimensions for {format_count(params)} parameters",
        assumptions=sized.assumptions,
        relative_uncertainty=sized.relative_uncertainty,
        parameters=params,
    )


def _from_hub(repo_id: str, revision: str | None) -> LoadedConfig:
    from memfit.sources.hub import read_hub_config

    found = read_hub_config(repo_id, revision)
    return LoadedConfig(config=found.config, name=f"{repo_id}@{revision}" if revision else repo_id, source=found.source)


def _unknown(text: str) -> UsageError:
    shown = printable(text, 80)
    if re.fullmatch(_MIXTURE, text):
        return UsageError(f"{shown}: a mixture of experts has no typical dimensions; give its config.json or its Hub id")
    if re.fullmatch(r"[0-9][0-9_,]*(?:\.[0-9]+)?", text):
        return UsageError(f"{shown}: a size needs a unit; write 7B for seven billion parameters, 350M for 350 million")
    if "://" in text:
        return UsageError(f"{shown}: only models on huggingface.co are read by address; download its config.json, give the path")
    hint = did_you_mean(text[:100], known_names())
    known = "name a preset (memfit models lists them), a Hub id (org/name), a config.json or its folder, or a size such as 7B"
    return UsageError(f"unknown model '{shown}'{hint}; {known}")
