"""Releases of a runtime: which row is taken, and what an older release does differently."""

from __future__ import annotations

import pytest

import memfit
from memfit.errors import UsageError
from memfit.report.payload import to_json
from memfit.runtimes import EARLIER, RUNTIMES, find_runtime

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


def peak(**fields: object) -> int:
    """Device bytes of a step of the small model."""
    runtime = fields.pop("runtime", None)
    found = memfit.answer(LLAMA, {"kind": "train", "seq": 1024, **fields}, overheads={"runtime": runtime} if runtime else None)
    return found.estimate.peak.device_bytes


def test_a_release_takes_the_newest_row_that_is_not_newer() -> None:
    assert find_runtime("hf") is RUNTIMES["hf"]
    assert find_runtime("hf@5.1") == RUNTIMES["hf"]._replace(version="5.1")
    assert find_runtime("hf@4.57.1") == EARLIER[0]._replace(version="4.57.1")
    with pytest.raises(UsageError, match=r"begins with release 4\.53"):
        find_runtime("hf@4.2")


@pytest.mark.parametrize("wrong", ["hf@", "hf@x", "hf@4..5", "hf@1.2.3.4.5", "hf@-1", "hf@" + "9" * 40, "hf@٣"])
def test_a_release_is_digits_and_dots(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"--runtime takes a release such as hf@4\.57"):
        peak(runtime=wrong)


def test_transformers_4_makes_a_mask_under_checkpointing() -> None:
    # without a cache object its search for packed sequences leaves a mask, as padding would
    assert peak(checkpointing="full", runtime="hf@4.57") == peak(checkpointing="full", padding="right")
    assert peak(checkpointing="full", runtime="hf@5") == peak(checkpointing="full") < peak(checkpointing="full", padding="right")


def test_transformers_4_makes_none_with_a_cache_or_with_flash_attention_or_under_its_trainer() -> None:
    assert peak(runtime="hf@4.57") == peak()
    assert peak(checkpointing="full", attention="flash", runtime="hf@4.57") == peak(checkpointing="full", attention="flash")
    same = peak(checkpointing="full", runtime="hf-trainer")
    assert peak(checkpointing="full", runtime="hf-trainer@4.57") == same


def test_the_release_is_in_the_answer() -> None:
    found = memfit.answer(LLAMA, {"kind": "train"}, overheads={"runtime": "transformers@4.57"})
    assert to_json(found)["runtime"] == {"name": "hf", "version": "4.57"}


@pytest.mark.parametrize(("kind", "word"), [("train", "backward"), ("infer", "generate")])
def test_the_assumed_runtime_is_described_for_what_it_does(kind: str, word: str) -> None:
    found = memfit.answer(LLAMA, {"kind": kind})
    assert word in next(one.why for one in found.assumptions if one.name == "runtime")
