"""Reads the corpus that the package carries. Formats and sources: data/corpus/README.md."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

from memfit.errors import InputError
from memfit.families import build_model
from memfit.model import Model

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "corpus")


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of `data/corpus/NAME.jsonl`.

    Raises:
        InputError: this installation does not carry the file.
    """
    path = os.path.join(FOLDER, name + ".jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise InputError(f"the corpus file {name}.jsonl cannot be read ({error.strerror}): install memfit again") from None


@cache
def collection() -> dict[str, dict[str, int]]:
    """How many rows the collections have from which the measured rows were taken."""
    with open(os.path.join(FOLDER, "collection.json"), encoding="utf-8") as file:
        found: dict[str, dict[str, int]] = json.load(file)
    return found


@cache
def configs() -> dict[str, dict[str, Any]]:
    """Rows of configs.jsonl by the model's name on the Hub."""
    return {row["name"]: row for row in rows("configs")}


@cache
def model_of(name: str, changes: tuple[tuple[str, Any], ...] = (), activations: tuple[tuple[str, str], ...] = ()) -> Model:
    """The model whose config the corpus carries under this name, with keys of it changed.

    `activations`: what a program runs in place of others.
    """
    row = configs()[name]
    config, instead = {**row["config"], **dict(changes)}, dict(activations)
    for key in ("hidden_act", "activation_function"):
        if config.get(key) in instead:
            config[key] = instead[config[key]]
    return build_model(config, name=name, source="validation corpus", head=row["cls"])
