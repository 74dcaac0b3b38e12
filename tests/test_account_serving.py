"""The KV cache and the working set of inference, worked out by hand from counts and formats."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest

from memfit.account import Resolved, resolve
from memfit.devices import Cluster, find_device
from memfit.job import FineTuning, Inference, Job, Training

GiB = 1 << 30
PARAMETERS = 8_030_261_248
BUFFERS = 1024
"""Rotary frequencies and the like: less than this."""


def llama() -> Any:
    return models.make(models.LLAMA_8B)


# ------------------------------------------------------------------ KV cache


def cache(config: dict[str, Any], **settings: Any) -> Any:
    return models.estimate_of(models.make(config), Inference(**settings)).cache


def test_the_cache_of_llama_3_1_8b_is_a_gib_at_8192_tokens() -> None:
    """32 layers x (K + V) x 8 heads x 128 x 2 B = 131,072 B a token."""
    found = cache(models.LLAMA_8B, context=8192, weight_dtype="bf16")
    assert (found.bytes_per_token, found.bytes_per_sequence) == (131_072, 1_073_741_824)


@pytest.mark.parametrize(
    ("kv_dtype", "share"), [("fp32", 2.0), ("bf16", 1.0), ("fp16", 1.0), ("fp8", 0.5), ("int8", 0.5), ("int4", 0.25)]
)
def test_formats_of_the_cache(kv_dtype: str, share: float) -> None:
    assert cache(models.LLAMA_8B, context=8192, kv_dtype=kv_dtype).bytes_per_sequence == share * GiB


def test_the_cache_follows_concurrency_and_not_the_weights_quantisation() -> None:
    rank = models.rank_of(llama(), Inference(context=8192, concurrency=7, weight_dtype="bf16", quantization="int4"))
    assert models.component(rank, "kv_cache") == 7 * GiB


def test_multi_head_and_multi_query_caches() -> None:
    per_token = 32 * 2 * 128 * 2
    for kv_heads in (32, 8, 1):
        config = {**models.LLAMA_8B, "num_key_value_heads": kv_heads}
        assert cache(config, context=100, weight_dtype="bf16").bytes_per_sequence == 100 * per_token * kv_heads


def test_a_sliding_window_caps_the_cache() -> None:
    for context, tokens in ((1000, 1000), (4096, 4096), (4097, 4096), (32_768, 4096)):
        assert cache(models.MISTRAL_7B, context=context, weight_dtype="bf16").bytes_per_sequence == 131_072 * tokens
    # per token: what the last one adds
    assert cache(models.MISTRAL_7B, context=4096, weight_dtype="bf16").bytes_per_token == 131_072
    assert cache(models.MISTRAL_7B, context=4097, weight_dtype="bf16").bytes_per_token == 0


def test_alternating_layers_cap_half_of_the_cache() -> None:
    """Gemma-2-2B: 26 layers x 2 x 4 heads x 256 x 2 B, of which 13 keep 4,096 tokens at most."""
    layer = 2 * 4 * 256 * 2
    found = cache(models.GEMMA2_2B, context=8192, weight_dtype="bf16")
    assert found.bytes_per_sequence == layer * (13 * 8192 + 13 * 4096)
    assert found.bytes_per_token == 13 * layer


def test_an_encoder_has_no_cache() -> None:
    found = models.estimate_of(models.make(models.BERT_BASE), Inference(context=512))
    assert found.cache is None
    assert models.component(found.worst, "kv_cache") == 0


# ------------------------------------------------------------------ inference


def test_the_logits_of_a_prompt() -> None:
    """generate() computes the last position's and copies them to fp32: 2V + 4V a sequence; all positions are 2V a token.

    One narrow layer under a large vocabulary, so that prefill is largest at its end.
    """
    vocab = 1_000_000
    model = models.make(
        models.LLAMA_1B,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=1,
        vocab_size=vocab,
    )
    last = models.rank_of(model, Inference(context=16, concurrency=3, weight_dtype="bf16"))
    assert models.phase(last, "prefill", "logits") == 3 * 6 * vocab
    every = models.rank_of(model, Inference(context=16, concurrency=3, weight_dtype="bf16", logits="all"))
    assert models.phase(every, "prefill", "logits") == pytest.approx(3 * (16 * 2 + 4) * vocab)


def test_decoding_holds_the_cache_of_the_whole_context_and_prefill_works_on_the_prompt() -> None:
    rank = models.rank_of(llama(), Inference(context=8192, prompt=512, concurrency=4, weight_dtype="bf16"))
    assert {one.name for one in rank.phases} == {"load", "prefill", "decode"}
    assert models.phase(rank, "decode", "kv_cache") == 4 * GiB
    assert models.phase(rank, "load") == pytest.approx(2 * PARAMETERS, abs=BUFFERS)
    longer = models.rank_of(llama(), Inference(context=8192, prompt=1024, concurrency=4, weight_dtype="bf16"))
    work, more = (
        models.phase(one, "prefill") - 2 * PARAMETERS - models.phase(one, "prefill", "kv_cache") for one in (rank, longer)
    )
    assert more == pytest.approx(2 * work, rel=0.02)


def test_inference_keeps_nothing_for_backward() -> None:
    rank = models.rank_of(llama(), Inference(context=4096, weight_dtype="bf16"))
    assert rank.kept_bytes is None
    assert rank.forward_end_bytes is None
    for name in ("gradients", "optimizer_states"):
        assert models.component(rank, name) == 0
    assert models.component(rank, "activations") in (0, 2 * 128 * 4096 * 2)  # rotary tables alone


def test_the_working_set_of_prefill_does_not_grow_with_layers() -> None:
    def working(layers: int) -> int:
        model = models.make(models.LLAMA_8B, num_hidden_layers=layers)
        rank = models.rank_of(model, Inference(context=2048, weight_dtype="bf16"))
        return models.phase(rank, "prefill") - models.component(rank, "weights") - models.component(rank, "kv_cache")

    assert working(2) == working(64)


def test_prefill_holds_the_whole_prompt_in_sliding_layers() -> None:
    """transformers crops the cache by a view: 131,072 B for each of 8,192 tokens until decoding starts, then for 4,096."""
    found = models.estimate_of(models.make(models.MISTRAL_7B), Inference(context=8192, weight_dtype="bf16"))
    held = {phase.name: phase.components.get("kv_cache", 0) for phase in found.worst.phases}
    assert (held["prefill"], held["decode"]) == (131_072 * 8192, 131_072 * 4096)


def _resolved(workload: Inference | Training, device: str | None) -> Resolved:
    where = Cluster(device=find_device(device), reading=device) if device else None
    return resolve(Job(model=llama(), workload=workload, cluster=where))


@pytest.mark.parametrize(
    ("workload", "device", "codes"),
    [
        (Inference(quantization="fp8"), "a100-sxm-80gb", {"no-fp8"}),
        (Inference(kv_dtype="fp8"), "a100-sxm-80gb", {"no-fp8"}),
        (Inference(quantization="fp8", kv_dtype="fp8"), "rtx-4090", set()),
        (Inference(weight_dtype="bf16"), "t4", {"no-bf16"}),
        (Inference(kv_dtype="bf16"), "t4", {"no-bf16"}),
        (Inference(), "t4", set()),  # fp16 was chosen for it
        (Training(precision="bf16-mixed"), "v100-sxm2-16gb", {"no-bf16"}),
        (Training(precision="fp16-mixed", weight_dtype="bf16"), "v100-sxm2-16gb", {"no-bf16"}),
        (Training(), "v100-sxm2-16gb", set()),
        (Training(precision="bf16-mixed"), "a100-sxm-80gb", set()),
        (Inference(quantization="fp8", weight_dtype="bf16"), "m4-max-64gb", {"other-runtime"}),  # its formats are not known
        (Inference(quantization="fp8", weight_dtype="bf16"), None, set()),
        (Inference(weight_dtype="fp16"), "tpu-v5e", {"no-fp16", "other-runtime"}),
        (Inference(), "tpu-v5e", {"other-runtime"}),
    ],
)
def test_formats_that_a_device_does_not_compute_in_are_named(
    workload: Inference | Training, device: str | None, codes: set[str]
) -> None:
    assert {code for code, _ in _resolved(workload, device).warnings} == codes


def test_equal_prompts_are_an_assumption_where_there_are_several() -> None:
    def padding(concurrency: int) -> list[object]:
        return [one.value for one in _resolved(Inference(concurrency=concurrency), None).assumptions if one.name == "padding"]

    assert (padding(1), padding(2)) == ([], ["none"])


def test_the_formula_of_activations_is_that_of_the_rotary_tables() -> None:
    """8,192 positions x 2 tables x 128 x 2 B = 4 MiB."""
    rank = models.rank_of(llama(), Inference(context=8192, weight_dtype="bf16"))
    found = next(one for one in rank.components if one.name == "activations")
    assert found.bytes == 8192 * 2 * 128 * 2
    assert found.formula == "rotary tables: 8,192 positions x 2 (cos, sin) x 128 x 2 B; nothing is kept"


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"weight_dtype": "fp16"}, "fp16-true"),
        ({"weight_dtype": "fp32"}, "bf16-mixed"),
        ({"method": "full", "weight_dtype": "bf16"}, "bf16-mixed"),
        ({}, "bf16-true"),
    ],
)
def test_the_precision_of_fine_tuning_follows_a_stated_weight_format(given: dict[str, str], precision: str) -> None:
    job = resolve(Job(model=llama(), workload=FineTuning(**given))).job  # type: ignore[arg-type]
    assert isinstance(job.workload, FineTuning)
    assert job.workload.precision == precision
