"""Laws of training and inference for every family that the corpus has: sums, monotony, checkpointing.

Deterministic: one small config of each architecture, with every attention implementation that it has.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import heart_models as models
import pytest

from memfit.account.estimate import Estimate
from memfit.families import FAMILIES, build_model
from memfit.job import Inference, Training
from memfit.model import Model
from memfit.validate import corpus

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depths")
FILES = ("kept", "traced", "heldout_kept", "heldout_traced")


@cache
def rows() -> dict[str, dict[str, Any]]:
    """The smallest config of each architecture: (batch, sequence or side, class, config)."""
    found: dict[str, dict[str, Any]] = {}
    for file in FILES:
        for row in corpus.rows(file):
            kind = str(row["config"].get("model_type"))
            if kind in FAMILIES and (kind not in found or row["batch"] * row["seq"] < found[kind]["batch"] * found[kind]["seq"]):
                found[kind] = row
    return found


def make(row: dict[str, Any], **changes: Any) -> Model:
    image = row["seq"] if row["run"].get("kind") == "img" else None
    return build_model({**row["config"], **changes}, name="test", source="test", head=row["cls"], image=image)


def deeper(row: dict[str, Any]) -> Model | None:
    """The same with two more layers of the last kind; `None` where the config lists its layers."""
    config = row["config"]
    key = next(one for one in LAYERS if config.get(one) is not None)
    if config.get("layer_types") or key == "depths":
        return None
    return make(row, **{key: config[key] + 2})


def training(of: Model, row: dict[str, Any], **changes: Any) -> Estimate:
    base: dict[str, Any] = {"batch": 2, "seq": None if of.pixels else 50, "precision": "bf16-true", "optimizer": "adamw-fused"}
    if of.encoder_decoder:
        base["target_seq"] = 30
    return models.estimate_of(of, Training(**{**base, **changes}))


def serving(of: Model, **changes: Any) -> Estimate:
    base: dict[str, Any] = {"concurrency": 2, "weight_dtype": "bf16"}
    if not of.pixels:
        base |= {"prompt": 40, "target_seq": 20} if of.encoder_decoder else {"context": 60, "prompt": 40}
    return models.estimate_of(of, Inference(**{**base, **changes}))


def check_sums(found: Estimate) -> None:
    rank = found.worst
    for phase in rank.phases:
        assert sum(phase.components.values()) == phase.allocated_bytes
        assert min(phase.components.values()) >= 0
    assert rank.peak.allocated_bytes == max(phase.allocated_bytes for phase in rank.phases)


CASES = [(kind, attention) for kind, row in sorted(rows().items()) for attention in make(row).attention_kernels or ("sdpa",)]


def test_every_family_is_tried() -> None:
    """All but those of which the corpus has no row of training."""
    assert {FAMILIES[kind] for kind in rows()} >= set(FAMILIES.values()) - {"counts"}


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_training_grows_with_what_it_is_given(kind: str, attention: str) -> None:
    row = rows()[kind]
    of = make(row)
    found = training(of, row, attention=attention)
    check_sums(found)
    peak = found.peak.allocated_bytes
    assert peak <= training(of, row, attention=attention, batch=3).peak.allocated_bytes
    if not of.pixels:
        assert peak <= training(of, row, attention=attention, seq=67).peak.allocated_bytes
        assert (
            peak
            <= training(make(row, vocab_size=row["config"]["vocab_size"] + 64), row, attention=attention).peak.allocated_bytes
        )
    more = deeper(row)
    if more is not None:
        assert peak <= training(more, row, attention=attention).peak.allocated_bytes


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_checkpointing_keeps_no_more(kind: str, attention: str) -> None:
    row = rows()[kind]
    of = make(row)
    kept = training(of, row, attention=attention).worst.kept_bytes
    full = training(of, row, attention=attention, checkpointing="full")
    check_sums(full)
    assert full.worst.kept_bytes <= kept  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_inference_grows_with_what_it_is_given(kind: str, attention: str) -> None:
    row = rows()[kind]
    of = make(row)
    found = serving(of, attention=attention)
    check_sums(found)
    peak = found.peak.allocated_bytes
    assert peak <= serving(of, attention=attention, concurrency=3).peak.allocated_bytes
    if of.encoder_decoder:
        assert peak <= serving(of, attention=attention, target_seq=29).peak.allocated_bytes
    elif not of.pixels:
        assert peak <= serving(of, attention=attention, context=77).peak.allocated_bytes
    more = deeper(row)
    if more is not None:
        assert peak <= serving(more, attention=attention).peak.allocated_bytes
