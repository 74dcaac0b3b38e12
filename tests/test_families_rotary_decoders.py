"""Gemma 1 and 3, Phi, Phi-3, StableLM, OLMo 2, Granite, Cohere and StarCoder2: parameters and caches by hand and against the real
classes, kept bytes of their own operations by hand, whole training steps of tiny real models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heart_models as models
import pytest
import torch_truth
import transformers as T
from hypothesis import given, settings
from hypothesis import strategies as st
from test_account_peaks import check, step_of
from torch_truth import Case

from memfit.account.forms import Form, per_axis
from memfit.account.liveness import Accumulation, measure
from memfit.errors import InputError, UnknownArchitectureError
from memfit.families import build_model
from memfit.job import Inference
from memfit.kernels import KernelPolicy, lower
from memfit.model import BlockBuilder, Value
from memfit.model.ops import norms
from memfit.precision import training_policy

# ------------------------------------------------------------------ by hand

GATED = {  # h (q + 2 kv) + q h + 3 h f
    "gemma": 2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 16384,
    "gemma3": 1152 * (1024 + 2 * 256) + 1024 * 1152 + 3 * 1152 * 6912,
    "phi3": 3072 * (3072 + 2 * 1024) + 3072 * 3072 + 3 * 3072 * 8192,
    "stablelm": 4 * 2048 * 2048 + 3 * 2048 * 5632,
    "olmo2": 4 * 5120 * 5120 + 3 * 5120 * 13824,
    "granite": 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12800,
    "cohere": 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336,
}
BY_HAND: list[tuple[dict[str, Any], int, int]] = [
    # config, parameters by the formula, parameters as published
    (models.GEMMA_2B, 256000 * 2048 + 18 * (GATED["gemma"] + 2 * 2048) + 2048, 2_506_172_416),
    (models.GEMMA3_1B, 262144 * 1152 + 26 * (GATED["gemma3"] + 4 * 1152 + 2 * 256) + 1152, 999_885_952),
    # one LayerNorm a layer, biases everywhere, also of the head
    (
        models.PHI_2,
        2 * 51200 * 2560 + 51200 + 32 * (4 * (2560**2 + 2560) + 2 * 2560 * 10240 + 10240 + 3 * 2560) + 2 * 2560,
        2_779_683_840,
    ),
    (models.PHI_4_MINI, 200064 * 3072 + 32 * (GATED["phi3"] + 2 * 3072) + 3072, 3_836_021_760),
    (models.STABLELM_2, 2 * 100352 * 2048 + 24 * (GATED["stablelm"] + 3 * 2048 + 4 * 2048) + 2 * 2048, 1_644_515_328),
    (models.OLMO2_13B, 2 * 100352 * 5120 + 40 * (GATED["olmo2"] + 4 * 5120) + 5120, 13_716_198_400),
    (models.GRANITE_8B, 49155 * 4096 + 40 * (GATED["granite"] + 2 * 4096) + 4096, 8_170_848_256),
    (models.AYA_8B, 256000 * 4096 + 32 * (GATED["cohere"] + 4096) + 4096, 8_028_033_024),
    (
        models.STARCODER2_3B,
        49152 * 3072
        + 30 * (3072 * (3072 + 2 * 256) + 3072**2 + 2 * 3072 * 12288 + (3072 + 2 * 256) + 3072 + 12288 + 3072 + 4 * 3072)
        + 2 * 3072,
        3_030_371_328,
    ),
]


@pytest.mark.parametrize(("config", "formula", "published"), BY_HAND, ids=[one[0]["model_type"] for one in BY_HAND])
def test_parameters_of_published_models(config: dict[str, Any], formula: int, published: int) -> None:
    assert models.make(config).num_parameters == formula == published


@pytest.mark.parametrize(("config", "elements", "windows"), [
    (models.GEMMA_2B, 2 * 256, {None: 18}),
    (models.GEMMA3_1B, 2 * 256, {512: 22, None: 4}),
    (models.PHI_2, 2 * 2560, {None: 32}),
    (models.PHI_4_MINI, 2 * 1024, {262144: 32}),
    (models.STABLELM_2, 2 * 2048, {None: 24}),
    (models.OLMO2_13B, 2 * 5120, {None: 40}),
    (models.GRANITE_8B, 2 * 1024, {None: 40}),
    (models.AYA_8B, 2 * 1024, {None: 32}),
    (models.STARCODER2_3B, 2 * 256, {4096: 30}),
], ids=[one[0]["model_type"] for one in BY_HAND])  # fmt: skip
def test_caches(config: dict[str, Any], elements: int, windows: dict[int | None, int]) -> None:
    model = models.make(config)
    found: dict[int | None, int] = {}
    for cache, layers in model.caches:
        assert cache.elements_per_token == elements
        found[cache.window] = found.get(cache.window, 0) + layers
    assert found == windows
    rank = models.rank_of(model, Inference(context=1000, weight_dtype="bf16"))
    tokens = sum(min(1000, window or 1000) * layers for window, layers in windows.items())
    decoding = models.phase(rank, "decode", "kv_cache")
    assert decoding == 2 * elements * tokens


def test_gemma3_slides_in_five_of_six_layers_and_has_two_rotary_tables() -> None:
    model = models.make(models.GEMMA3_1B)
    assert (model.rotary_dim, model.rotary_tables, model.buffer_bytes) == (256, 2, 2 * 4 * 256)
    only_sliding = models.make(models.GEMMA3_1B, num_hidden_layers=5)
    assert only_sliding.rotary_tables == 1
    assert models.make(models.GEMMA3_1B, sliding_window_pattern=2).caches[0][1] == 13
    listed = models.make(models.GEMMA3_1B, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    assert [cache.window for cache, _ in listed.caches] == [None, 512]


def test_gemma3_text_configs_leave_out_what_the_class_takes_anyway() -> None:
    """As in the text_config of google/gemma-3-4b-it: 8 heads, 4 key-value heads of 256, a vocabulary of 262,208."""
    model = build_model(
        {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
         "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}, name="t", source="t",
    )  # fmt: skip
    layer = 2560 * (2048 + 2 * 1024) + 2048 * 2560 + 3 * 2560 * 10240 + 4 * 2560 + 2 * 256
    assert model.num_parameters == 262_208 * 2560 + 34 * layer + 2560 == 3_880_263_168


@pytest.mark.parametrize(
    ("config", "rotary"), [(models.PHI_2, 32), (models.PHI_4_MINI, 96), (models.STABLELM_2, 16), (models.AYA_8B, 128)]
)
def test_rotary_share(config: dict[str, Any], rotary: int) -> None:
    assert models.make(config).rotary_dim == rotary


@pytest.mark.parametrize(("config", "changes"), [
    (models.GEMMA_2B, {"use_bidirectional_attention": True}),
    (models.GEMMA3_1B, {"use_bidirectional_attention": True}),
    (models.PHI_4_MINI, {"mlp_bias": True}),
    (models.PHI_4_MINI, {"attention_bias": True}),
    (models.STABLELM_2, {"hidden_size": 2047}),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        models.make(config, **changes)


def test_heads_of_one_class_are_not_given_to_another() -> None:
    with pytest.raises(UnknownArchitectureError, match="StableLmForImageGeneration"):
        models.make(models.STABLELM_2, head="StableLmForImageGeneration")


# ------------------------------------------------------------------ kept bytes of operations, by hand


def kept_per_token(record: Callable[[BlockBuilder], Value], precision: str = "bf16-true", *, weight: str | None = None,
                   train_all: bool = True) -> tuple[int, int]:  # fmt: skip
    """Bytes that a block of width 64 keeps for each token, its input included if it is saved; and bytes once."""
    b = BlockBuilder("test", 64)
    block = b.done(record(b))
    policy = KernelPolicy(precision=training_policy(precision, weight), train_all=train_all)
    lowered = lower(block, policy, input_requires_grad=True, input_dtype=policy.precision.weight)
    kept = measure(lowered, accumulation=Accumulation(), outputs_kept=False, is_last=False).kept
    once = bytes_on_axis(kept, 0)
    return sum(num_bytes for _, num_bytes in per_axis(kept)) - once, once


def bytes_on_axis(form: Form, axis: int) -> int:
    return dict(per_axis(form)).get(axis, 0)


def test_olmo2_norm_keeps_x_and_the_normalised_x_in_fp32() -> None:
    """x32 4h, rsqrt 4, normalised 4h; with a frozen weight no normalised x. In fp32 x is not copied."""
    assert kept_per_token(lambda b: norms.rms_norm_fp32(b, "n", b.input)) == (8 * 64 + 4, 0)
    assert kept_per_token(lambda b: norms.rms_norm_fp32(b, "n", b.input), train_all=False) == (4 * 64 + 4, 0)
    assert kept_per_token(lambda b: norms.rms_norm_fp32(b, "n", b.input), "32-true") == (8 * 64 + 4, 0)


def test_cohere_norm_keeps_the_centred_x_twice() -> None:
    """x - mean 4h for the square, x - mean 4h and rsqrt 4 for the product, normalised 4h; once: the weight in fp32."""
    assert kept_per_token(lambda b: norms.layer_norm_fp32(b, "n", b.input)) == (12 * 64 + 4, 4 * 64)
    assert kept_per_token(lambda b: norms.layer_norm_fp32(b, "n", b.input, heads=4)) == (12 * 64 + 4 * 4, 4 * 64)
    assert kept_per_token(lambda b: norms.layer_norm_fp32(b, "n", b.input), "32-true") == (12 * 64 + 4, 0)


def test_norms_of_heads_keep_the_projection_and_two_statistics_a_head() -> None:
    """2h and 8 B a head; under autocast over fp32 weights in fp32; over 16-bit weights a cast of them as well."""
    for record in (norms.head_layer_norm, norms.separate_head_norms):
        assert kept_per_token(lambda b, one=record: one(b, "n", b.input, 4)) == (2 * 64 + 8 * 4, 0)  # type: ignore[misc]
        assert kept_per_token(lambda b, one=record: one(b, "n", b.input, 4), "bf16-mixed", weight="fp32") == (4 * 64 + 8 * 4, 0)  # type: ignore[misc]
    one_weight = kept_per_token(lambda b: norms.head_layer_norm(b, "n", b.input, 4), "bf16-mixed", weight="bf16")
    many = kept_per_token(lambda b: norms.separate_head_norms(b, "n", b.input, 4), "bf16-mixed", weight="bf16")
    assert one_weight == (4 * 64 + 8 * 4, 4 * 2 * 16)
    assert many == (4 * 64 + 8 * 4, 4 * 64)


def test_slices_of_a_fused_projection_share_its_storage() -> None:
    def record(b: BlockBuilder) -> Value:
        gate, up = norms.slices(b, b.input, 32, 32)
        return b.multiply(gate, up)

    assert kept_per_token(record) == (2 * 64, 0)


# ------------------------------------------------------------------ against the real classes

CLASSIFIERS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
FLAG = st.booleans()
SHARES = st.sampled_from([0.25, 0.5, 1.0])
FAMILIES: dict[str, tuple[str, tuple[str, ...], dict[str, st.SearchStrategy[Any]]]] = {
    "gemma": ("Gemma", CLASSIFIERS, {"head_dim": st.sampled_from([4, 12]), "attention_bias": FLAG}),
    "gemma3_text": (
        "Gemma3",
        ("TextModel", "ForCausalLM", "TextForSequenceClassification"),
        {"head_dim": st.sampled_from([4, 12]), "attention_bias": FLAG, "sliding_window": st.just(8)},
    ),
    "phi": ("Phi", CLASSIFIERS, {"qk_layernorm": FLAG, "hidden_act": st.sampled_from(["gelu_new", "relu"])}),
    "phi3": ("Phi3", CLASSIFIERS, {"sliding_window": st.sampled_from([None, 8])}),
    "stablelm": ("StableLm", CLASSIFIERS, {"use_qkv_bias": FLAG, "qk_layernorm": FLAG, "use_parallel_residual": FLAG}),
    "olmo2": ("Olmo2", CLASSIFIERS[:3], {"attention_bias": FLAG}),
    "granite": ("Granite", CLASSIFIERS[:2], {"attention_bias": FLAG, "mlp_bias": FLAG}),
    "cohere": ("Cohere", CLASSIFIERS[:2], {"attention_bias": FLAG, "use_qk_norm": FLAG}),
    "starcoder2": ("Starcoder2", CLASSIFIERS, {"use_bias": FLAG, "sliding_window": st.sampled_from([None, 8])}),
}


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    prefix, heads_of, flags = FAMILIES[family]
    kv_heads, groups, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 8]))
    own = {key: draw(strategy) for key, strategy in flags.items()}
    if family in ("phi", "stablelm"):
        share = draw(SHARES)
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = T.CONFIG_MAPPING[family](
        vocab_size=draw(st.integers(10, 200)),
        hidden_size=kv_heads * groups * width,
        intermediate_size=draw(st.integers(3, 90)),
        num_hidden_layers=draw(st.sampled_from([1, 2, 7])),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32,
        tie_word_embeddings=draw(FLAG),
        num_labels=draw(st.integers(1, 5)),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **own,
    )
    return Case(getattr(T, prefix + draw(st.sampled_from(heads_of))), config)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_parameters_are_those_of_the_real_class(family: str, data: st.DataObject) -> None:
    case = data.draw(cases(family))
    described = build_model(case.config.to_dict(), name="test", source="test", head=case.head)
    assert described.num_parameters == torch_truth.count_parameters(case)


@pytest.mark.parametrize(("family", "head"), [(family, head) for family, (_, heads, _) in FAMILIES.items() for head in heads])
def test_every_head_with_the_defaults_of_its_config_class(family: str, head: str) -> None:
    config = T.CONFIG_MAPPING[family](num_hidden_layers=2, num_labels=5)
    case = Case(getattr(T, FAMILIES[family][0] + head), config)
    stated = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "id2label"}
    short = {key: value for key, value in config.to_dict().items() if key in stated}
    described = build_model({**short, "model_type": family}, name="test", source="test", head=case.head)
    assert described.num_parameters == torch_truth.count_parameters(case)


def tiny(cls: type[T.PretrainedConfig], **changes: Any) -> T.PretrainedConfig:
    return cls(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FLASH = {"precision": "bf16-true", "attention": "sdpa", "optimizer": "sgd"}
EAGER = {"precision": "32-true", "attention": "eager", "optimizer": "sgd"}
CHECKPOINTED = {"precision": "bf16-true", "attention": "eager", "optimizer": "sgd", "checkpointing": "full"}
STEPS: list[tuple[Case, dict[str, str]]] = [
    (Case(T.GemmaForCausalLM, tiny(T.GemmaConfig, head_dim=16)), CHECKPOINTED),
    (Case(T.Gemma3ForCausalLM, tiny(T.Gemma3TextConfig, head_dim=16, sliding_window_pattern=2)), EAGER),
    (Case(T.PhiForCausalLM, tiny(T.PhiConfig)), FLASH),
    (Case(T.PhiForCausalLM, tiny(T.PhiConfig, qk_layernorm=True)), EAGER),
    (Case(T.Phi3ForCausalLM, tiny(T.Phi3Config, rope_parameters=dict(HALF))), FLASH),
    (Case(T.StableLmForCausalLM, tiny(T.StableLmConfig)), FLASH),
    (Case(T.StableLmForCausalLM, tiny(T.StableLmConfig, qk_layernorm=True, use_parallel_residual=True)), EAGER),
    (Case(T.Olmo2ForCausalLM, tiny(T.Olmo2Config)), CHECKPOINTED),
    (Case(T.GraniteForCausalLM, tiny(T.GraniteConfig, embedding_multiplier=12.0)), FLASH),
    (Case(T.CohereForCausalLM, tiny(T.CohereConfig)), FLASH),
    (Case(T.CohereForCausalLM, tiny(T.CohereConfig, use_qk_norm=True)), CHECKPOINTED),
    (Case(T.Starcoder2ForCausalLM, tiny(T.Starcoder2Config)), FLASH),
]


@pytest.mark.parametrize(
    ("case", "how"), STEPS, ids=[f"{case.config.model_type} {number}" for number, (case, _) in enumerate(STEPS)]
)
def test_a_training_step(case: Case, how: dict[str, str]) -> None:
    check(*step_of(case, 2, 40, **how), peak=0.005)


@pytest.mark.parametrize(("case", "how"), [
    (Case(T.CohereForCausalLM, tiny(T.CohereConfig, use_qk_norm=True)), {**FLASH, "checkpointing": "full"}),
    (Case(T.Olmo2ForCausalLM, tiny(T.Olmo2Config)), {**FLASH, "checkpointing": "full"}),
    (Case(T.GemmaForCausalLM, tiny(T.GemmaConfig, head_dim=16)), {**FLASH, "checkpointing": "full"}),
], ids=["cohere", "olmo2", "gemma"])  # fmt: skip
def test_a_forward_without_autograd(case: Case, how: dict[str, str]) -> None:
    """Under checkpoints a layer runs as in inference: its largest state shows what names hold."""
    case.config.vocab_size = 16
    truth, rank, _ = step_of(case, 2, 40, **how)
    assert max(models.phase(rank, one) for one in ("forward", "loss")) == pytest.approx(truth.forward, rel=0.005)
