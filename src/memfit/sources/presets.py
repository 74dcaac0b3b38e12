"""Well-known models by name, so that no file and no network are needed. The data is `memfit/data/presets.json`."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from memfit.records import Record

_PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "presets.json")


class Preset(Record):
    """One model as data: its config, where that is published, and its exact number of parameters (tied ones once)."""

    name: str
    aliases: tuple[str, ...]
    hub_ids: tuple[str, ...]
    """Repositories on the Hugging Face Hub with this config; the first one is the source."""
    parameters: int
    source: str
    config: dict[str, Any]

    @property
    def hub_id(self) -> str:
        """The repository that the preset was read from."""
        return self.hub_ids[0]

    @property
    def family(self) -> str:
        """The config's `model_type`."""
        return str(self.config["model_type"])


def all_presets() -> tuple[Preset, ...]:
    """Every preset, in the order of the data file. The configs are the caller's own copies."""
    return tuple(_preset(row) for row in _rows())


def preset_names() -> tuple[str, ...]:
    """The short name of every preset, in the order of the data file."""
    return tuple(row["name"] for row in _rows())


def known_names() -> Iterator[str]:
    """Everything that `find_preset` knows: short names, aliases and Hub ids (for "did you mean")."""
    for row in _rows():
        yield row["name"]
        yield from row["aliases"]
        yield from row["hub"]


def find_preset(name: str) -> Preset | None:
    """The preset with this short name, alias or Hub id.

    Upper and lower case are the same, and so are all ways to separate words: `Llama3.1-8B`, `llama-3-1-8b` and `llama3.1:8b`
    are `llama-3.1-8b`. A Hub id matches as a whole.
    """
    lowered = name.lower()
    # The name as it stands in the data first: it needs no index of all spellings.
    row = next((row for row in _rows() if row["name"] == lowered), None) or _index().get(_key(name))
    return _preset(row) if row is not None else None


def _key(name: str) -> str:
    """What two spellings of one name have in common: `llama 3 1 8 b`. A Hub id is only lowered."""
    if "/" in name:
        return name.lower()
    return " ".join(re.findall("[a-z]+|[0-9]+", name.lower())) if re.fullmatch(r"[A-Za-z0-9 ._:-]{1,100}", name) else ""


def _preset(row: dict[str, Any]) -> Preset:
    return Preset(
        name=row["name"],
        aliases=tuple(row["aliases"]),
        hub_ids=tuple(row["hub"]),
        parameters=row["parameters"],
        source=row["source"],
        config=copy.deepcopy(row["config"]),
    )


@lru_cache(maxsize=1)
def _rows() -> list[dict[str, Any]]:
    with open(_PATH, encoding="utf-8") as file:
        rows: list[dict[str, Any]] = json.load(file)["presets"]
    return rows


@lru_cache(maxsize=1)
def _index() -> dict[str, dict[str, Any]]:
    return {_key(name): row for row in _rows() for name in (row["name"], *row["aliases"], *row["hub"])}
