"""The JSON of an answer: the contract's keys, integers, and the published schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_answers import GIB, inference, too_large, training

import memfit
from memfit.account.estimate import CacheUse, Estimate
from memfit.fit.answer import Answer
from memfit.report import to_json

SCHEMA = json.loads((Path(memfit.__file__).parent / "data" / "answer.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

# Section by section, what other programs rely on. Written out here on purpose: a renamed key must break this test.
TOP = {
    "schema_version", "memfit_version", "notice", "model", "workload", "parallelism", "runtime",
    "device", "ranks", "peak", "host", "kv_cache", "verdict", "limits",
    "recommendations", "rule_of_thumb", "assumptions", "warnings", "verify", "next",
}  # fmt: skip
COMPONENT = {"name", "bytes", "at_peak_bytes", "low_bytes", "high_bytes", "counted_in", "basis", "formula"}
PEAK = {"phase", "allocated_bytes", "reserved_bytes", "device_bytes", "low_bytes", "high_bytes", "safe_bytes"}


@pytest.fixture(params=[training, too_large, inference], ids=["training", "too_large", "inference"])
def answer(request: pytest.FixtureRequest) -> Answer:
    made: Answer = request.param()
    return made


def test_the_schema_itself_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_answers_follow_the_schema_and_are_plain_json(answer: Answer) -> None:
    data = json.loads(json.dumps(to_json(answer), allow_nan=False))
    VALIDATOR.validate(data)
    assert data == to_json(answer)


@pytest.mark.parametrize("path", ["peak/device_bytes", "ranks", "verdict", "ranks/0/components/0/basis", "limits/batch/max"])
def test_the_schema_refuses_an_answer_without_a_promised_key(path: str) -> None:
    data: Any = to_json(training())
    *parents, last = path.split("/")
    place = data
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    del place[last]
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(data)


def test_the_schema_refuses_fractions_of_a_byte() -> None:
    data = to_json(training())
    data["ranks"][0]["components"][0]["bytes"] = 0.5
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(data)


def test_the_keys_of_the_contract_are_there() -> None:
    data = to_json(training())
    assert data.keys() >= TOP
    assert data["model"].keys() >= {"name", "family", "parameters", "active_parameters", "trainable_parameters", "source"}
    assert data["device"].keys() >= {"name", "count", "marketed_bytes", "usable_bytes"}
    rank = data["ranks"][0]
    assert rank.keys() >= {"rank", "count", "components", "phases", "forward_end", "peak"}
    assert rank["components"][0].keys() >= COMPONENT
    assert rank["phases"][0].keys() >= {"name", "allocated_bytes", "components"}
    assert rank["peak"].keys() >= PEAK
    assert data["peak"].keys() >= PEAK | {"rank"}
    assert data["limits"]["batch"].keys() >= {"max", "fixed_bytes", "bytes_per_unit", "binds", "likely"}
    assert data["recommendations"][0].keys() >= {"change", "flags", "peak_bytes", "saves_bytes", "cost", "fits"}
    assert data["verify"][0].keys() >= {"how", "command"}
    assert data["next"][0].keys() >= {"why", "command"}


def test_values_of_the_training_answer() -> None:
    data = to_json(training())
    assert data["schema_version"] == 1
    assert data["model"]["parameters"] == data["model"]["trainable_parameters"] == 2**30
    assert data["workload"] | {"kind": "train", "batch": 1, "seq": 2048, "precision": "bf16-mixed"} == data["workload"]
    assert data["runtime"] == {"name": "hf", "version": "5.24"}
    assert data["device"]["usable_bytes"] == 24 * GIB
    assert data["ranks"][0]["forward_end"] == {"kept_bytes": 6 * GIB, "allocated_bytes": 18 * GIB + (64 << 20)}
    assert data["peak"]["device_bytes"] == 19 * GIB
    assert data["verdict"]["headroom_bytes"] == 5 * GIB
    assert [one["first_step"] for one in data["ranks"][0]["phases"]] == [False, False, False, True]
    assert data["recommendations"][1]["flags"] == ["--optimizer", "adamw-8bit"]
    assert data["kv_cache"] is None


def test_components_at_the_peak_add_up_to_the_device(answer: Answer) -> None:
    data = to_json(answer)
    assert sum(one["at_peak_bytes"] for one in data["ranks"][0]["components"]) == data["peak"]["device_bytes"]


def test_without_a_device_there_is_no_verdict() -> None:
    data = to_json(inference())
    assert data["device"] is None
    assert data["verdict"] is None
    assert data["limits"]["context"]["max"] is None
    assert data["model"]["trainable_parameters"] == 0
    assert data["kv_cache"]["bytes_per_token"] == 131_072
    assert data["smallest_devices"] == [{"device": "toy-8", "count": 1}, {"device": "toy-tpu", "count": 1}]
    assert data["ranks"][0]["forward_end"] is None


def test_an_unbounded_concurrency_is_null_because_json_has_no_infinity() -> None:
    base = inference()
    cache = CacheUse(bytes_per_token=0, bytes_per_sequence=0, max_concurrency=float("inf"))
    data = to_json(inference(estimate=Estimate(ranks=base.estimate.ranks, cache=cache)))
    assert data["kv_cache"]["max_concurrency"] is None
    json.dumps(data, allow_nan=False)
