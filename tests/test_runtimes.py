"""Releases of a runtime: which row is taken, and what an older release does differently."""

from __future__ import annotations

import pytest

import memfit
from memfit.account.estimate import Rank
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
    with pytest.raises(UsageError, match=r"begins with release 4\.46"):
        find_runtime("hf@4.2")


@pytest.mark.parametrize("wrong", ["hf@", "hf@x", "hf@4..5", "hf@1.2.3.4.5", "hf@-1", "hf@" + "9" * 40, "hf@٣"])
def test_a_release_is_digits_and_dots(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"--runtime takes a release such as hf@4\.57"):
        peak(runtime=wrong)


def test_transformers_4_makes_a_mask_where_there_is_no_cache_object() -> None:
    # its search for packed sequences leaves a mask, as padding would
    for checkpointing in ("none", "full"):
        masked = peak(checkpointing=checkpointing, padding="right")
        assert peak(checkpointing=checkpointing, runtime="hf@4.57") == masked
        assert peak(checkpointing=checkpointing, runtime="hf@5") == peak(checkpointing=checkpointing) < masked


def test_transformers_4_makes_none_with_flash_attention_or_under_its_trainer() -> None:
    assert peak(checkpointing="full", attention="flash", runtime="hf@4.57") == peak(checkpointing="full", attention="flash")
    same = peak(checkpointing="full", runtime="hf-trainer")
    assert peak(checkpointing="full", runtime="hf-trainer@4.57") == same


TOKENS, LAYERS, HIDDEN, KV = 1024, 2, 256, 128


def rank(runtime: str = "hf@4.57", config: dict[str, object] = LLAMA, **fields: object) -> Rank:
    """The only rank of a step of the small model in bf16."""
    workload = {"kind": "train", "seq": TOKENS, "precision": "bf16-true", **fields}
    return memfit.answer(config, workload, overheads={"runtime": runtime}).estimate.ranks[0]


def test_a_cache_object_avoids_the_mask_and_keeps_keys_and_values_until_the_outputs_go() -> None:
    plain, cached = rank("hf"), rank(use_cache="on")
    # FlashAttention saves the cache's copies in the place of the projections', so that nothing more is kept ...
    assert cached.kept_bytes == plain.kept_bytes
    assert cached.forward_end_bytes == plain.forward_end_bytes
    # ... but they stay when backward has run: k and v of two layers, 2 B each
    assert cached.backward_end_bytes == plain.backward_end_bytes + TOKENS * LAYERS * 2 * 2 * KV
    dropped = rank(use_cache="on", outputs="dropped")
    assert dropped.backward_end_bytes == rank("hf", outputs="dropped").backward_end_bytes


def test_eager_attention_repeats_grouped_heads_of_a_cache_which_holds_its_own_beside_them() -> None:
    plain, cached = rank("hf", attention="eager"), rank(use_cache="on", attention="eager")
    assert cached.kept_bytes == plain.kept_bytes
    assert cached.forward_end_bytes == plain.forward_end_bytes + TOKENS * LAYERS * 2 * 2 * KV


def test_checkpointing_switches_the_cache_off_and_gemma_2_never_builds_one() -> None:
    assert rank(use_cache="on", checkpointing="full").backward_end_bytes == rank(checkpointing="full").backward_end_bytes
    gemma = {**LLAMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 64, "sliding_window": 4096}
    assert rank(config=gemma, use_cache="on").backward_end_bytes == rank(config=gemma).backward_end_bytes


GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 1000, "n_embd": 256, "n_layer": 2, "n_head": 4,
    "n_positions": 1024,
}  # fmt: skip


def test_gpt_2_had_a_triangle_of_booleans_in_every_layer() -> None:
    weights = {}
    for runtime in ("hf", "hf@4.57"):
        parts = rank(runtime, GPT2).components
        weights[runtime] = next(one.bytes for one in parts if one.name == "weights")
    assert weights["hf@4.57"] == weights["hf"] + 2 * 1024 * 1024


def loss_peak(runtime: str, **fields: object) -> int:
    """Allocated bytes while the loss of frozen weights with one small adapter runs forward."""
    lora = {"kind": "finetune", "method": "lora", "lora_targets": "q_proj", "lora_rank": 1, "checkpointing": "full", **fields}
    phases = memfit.answer(LLAMA, {**lora, "seq": TOKENS}, overheads={"runtime": runtime}).estimate.ranks[0].phases
    return next(one.allocated_bytes for one in phases if one.name == "loss" and not one.first_step)


def test_releases_before_4_49_copied_the_logits_in_fp32_to_shift_them() -> None:
    # 2V + 4V + 4V before, and one copy of 4V more
    assert loss_peak("hf-trainer@4.48") == loss_peak("hf-trainer@4.49") + TOKENS * 4 * 1000
    assert loss_peak("hf-trainer@4.49") == loss_peak("hf-trainer")
    fused = {runtime: loss_peak(runtime, loss="fused") for runtime in ("hf-trainer@4.48", "hf-trainer")}
    assert fused["hf-trainer@4.48"] == fused["hf-trainer"]


def test_the_search_for_packed_sequences_came_with_4_53() -> None:
    before, after = (peak(checkpointing="full", runtime=release) for release in ("hf@4.52", "hf@4.53"))
    assert before == peak(checkpointing="full") < after


def test_families_without_sdpa_in_transformers_4_run_eager() -> None:
    gptj = {**GPT2, "model_type": "gptj", "architectures": ["GPTJForCausalLM"], "rotary_dim": 32}
    found = memfit.answer(gptj, {"kind": "train"}, overheads={"runtime": "hf@4.57"})
    assert found.job.workload.attention == "eager"
    assert "no sdpa for gptj" in next(one.why for one in found.assumptions if one.name == "attention")
    assert memfit.answer(gptj, {"kind": "train"}).job.workload.attention == "sdpa"


def test_the_release_is_in_the_answer() -> None:
    found = memfit.answer(LLAMA, {"kind": "train"}, overheads={"runtime": "transformers@4.57"})
    assert to_json(found)["runtime"] == {"name": "hf", "version": "4.57"}


@pytest.mark.parametrize(("kind", "word"), [("train", "backward"), ("infer", "generate")])
def test_the_assumed_runtime_is_described_for_what_it_does(kind: str, word: str) -> None:
    found = memfit.answer(LLAMA, {"kind": kind})
    assert word in next(one.why for one in found.assumptions if one.name == "runtime")
