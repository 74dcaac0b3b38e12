"""OPT, BLOOM, Falcon, GPT-J, MPT, GPT-BigCode, Mixtral and Qwen3-MoE: parameters of the real classes, kept bytes of real tiny
models, active parameters by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch_truth
import transformers
from torch_truth import Case

import memfit
from memfit.account.states import tensors_of, weight_bytes
from memfit.errors import InputError, UnknownArchitectureError
from memfit.families import build_model
from memfit.kernels import KernelPolicy
from memfit.kernels.context import ALL_LINEAR, Adapter, Context
from memfit.kernels.tape import Tape
from memfit.model import Model
from memfit.precision import QUANTIZED, training_policy
from memfit.report import to_json

SMALL: dict[str, dict[str, Any]] = {
    "opt": {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 2, "ffn_dim": 50, "num_attention_heads": 4,
            "max_position_embeddings": 40, "dropout": 0.0},
    "bloom": {"vocab_size": 90, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gptj": {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "rotary_dim": 4},
    "mpt": {"vocab_size": 90, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 40},
    "gpt_bigcode": {"vocab_size": 90, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "attn_pdrop": 0.0,
                    "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 6,
                  "num_experts_per_tok": 2},
}  # fmt: skip
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "opt": [
        {},
        {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"word_embed_proj_dim": 16, "tie_word_embeddings": False},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    "bloom": [{}, {"tie_word_embeddings": False}, {"apply_residual_connection_post_layernorm": True}],
    "falcon": [
        *(
            {"multi_query": multi, "parallel_attn": parallel, "bias": parallel, "alibi": alibi}
            for multi, parallel, alibi in product((True, False), repeat=3)
        ),
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
        {"ffn_hidden_size": 50, "tie_word_embeddings": False},
    ],
    "gptj": [{}, {"tie_word_embeddings": True}, {"n_inner": 50, "rotary_dim": 8}],
    "mpt": [{}, {"tie_word_embeddings": False}, {"attn_config": {"clip_qkv": 6.0}}],
    "gpt_bigcode": [{}, {"multi_query": False}, {"n_inner": 50, "tie_word_embeddings": False}],
    "mixtral": [{}, {"head_dim": 12, "num_experts_per_tok": 1, "tie_word_embeddings": True}, {"output_router_logits": True}],
    "qwen3_moe": [
        {},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        {"mlp_only_layers": [0, 1, 2, 3], "attention_bias": True},
        {"norm_topk_prob": True, "tie_word_embeddings": True},
    ],
}
PREFIX = {
    "opt": "OPT", "bloom": "Bloom", "falcon": "Falcon", "gptj": "GPTJ", "mpt": "Mpt", "gpt_bigcode": "GPTBigCode",
    "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
CASES = [(family, settings) for family, variants in VARIANTS.items() for settings in variants]
NO_TOKEN_HEAD = ("opt", "gptj")


def real(family: str, settings: dict[str, Any], head: str = "ForCausalLM") -> Case:
    config = transformers.CONFIG_MAPPING[family](**{**SMALL[family], "pad_token_id": 0, **settings})
    return Case(getattr(transformers, PREFIX[family] + head), config)


def described(case: Case) -> Model:
    return build_model(case.config.to_dict(), name="test", source="test", head=case.head)


def make(family: str, **settings: Any) -> Model:
    return build_model({"model_type": family, **SMALL[family], **settings}, name="test", source="test")


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_parameters_are_those_of_the_real_class(family: str, settings: dict[str, Any]) -> None:
    case = real(family, settings)
    assert described(case).num_parameters == torch_truth.count_parameters(case)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_other_heads(family: str, head: str) -> None:
    if head != "ForTokenClassification" or family not in NO_TOKEN_HEAD:
        case = real(family, {"num_labels": 3}, head)
        assert described(case).num_parameters == torch_truth.count_parameters(case)


@pytest.mark.parametrize(("family", "settings"), [case for case in CASES if case[0] not in ("mixtral", "qwen3_moe")])
def test_kept_bytes_are_those_of_the_real_model(family: str, settings: dict[str, Any]) -> None:
    """Eager attention in fp32 on the CPU, to the byte but for one number of the loss."""
    case = real(family, settings)
    model = torch_truth.make_model(case, "32-true", "eager")
    inputs = torch_truth.make_inputs(case, batch=2, seq=24)
    job = memfit.Training(batch=2, seq=24, precision="32-true", attention="eager")
    ours = memfit.estimate(case.config.to_dict() | {"architectures": [case.head]}, job).worst.kept_bytes
    assert ours is not None
    assert abs(torch_truth.kept_bytes(model, inputs) - ours) <= 4


# ------------------------------------------------------------------ experts

MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip


def test_mixtral_8x7b_in_all_and_active() -> None:
    """2 V h + h + L (q, k, v, o + router + E x 3 h f + 2 h); of the E = 8 experts a token passes 2."""
    outside = 2 * 32_000 * 4096 + 4096
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096
    expert = 3 * 4096 * 14_336
    model = build_model(MIXTRAL_8X7B, name="test", source="test")
    assert model.num_parameters == outside + 32 * (layer + 8 * expert) == 46_702_792_704
    assert model.facts["active_parameters"] == outside + 32 * (layer + 2 * expert) == 12_879_925_248


def test_the_answer_names_the_active_parameters() -> None:
    answer = memfit.answer(MIXTRAL_8X7B, memfit.Inference(), on="h200")
    assert to_json(answer)["model"]["active_parameters"] == 12_879_925_248


def test_experts_are_neither_quantised_nor_adapted() -> None:
    """E x (2 f h + h f) stay in bf16; q, k, v and o are quantised; the router is a parameter of its own, too."""
    policy = KernelPolicy(
        precision=training_policy("bf16-true", None),
        quantized=QUANTIZED["nf4"],
        adapter=Adapter(4, "fp32", 0.0),
        adapter_targets=(ALL_LINEAR,),
    )
    tensors = tensors_of(make("mixtral"))
    experts = [one for one in tensors if one.parameter.role == "expert"]
    assert sum(one.repeat * one.parameter.num_elements for one in experts) == 2 * 4 * 3 * 32 * 24
    assert weight_bytes(experts, policy) == 2 * 2 * 4 * 3 * 32 * 24
    context = Context(Tape(policy.precision), policy)
    adapted = {one.parameter.name for one in tensors if context.adapter(one.parameter)}
    assert adapted == {f"self_attn.{name}_proj.weight" for name in "qkvo"}


def test_a_checkpoint_in_fp8_has_its_experts_in_fp8() -> None:
    """A byte an element and an fp32 scale a row: 2 layers x 4 experts x (2 f + h) rows. LLM.int8() and nf4 leave them at 2 B."""
    experts = [one for one in tensors_of(make("mixtral")) if one.parameter.role == "expert"]
    elements = 2 * 4 * 3 * 32 * 24
    policy = KernelPolicy(precision=training_policy("bf16-true", None), quantized=QUANTIZED["fp8"])
    assert weight_bytes(experts, policy) == elements + 4 * 2 * 4 * (2 * 24 + 32)
    assert weight_bytes(experts, policy._replace(quantized=QUANTIZED["int8"])) == 2 * elements


def test_qwen3_moe_has_dense_layers_where_the_config_says() -> None:
    """Layers 1 and 3 are sparse by the step of 2; 1 is taken out by the list."""
    model = make("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1])
    roles = [
        any(one.role == "expert" for one in block.parameters)
        for segment in model.segments
        if segment.role == "layers"
        for _ in range(segment.repeat)
        for block in segment.blocks
    ]
    assert roles == [False, False, False, True]


# ------------------------------------------------------------------ caches and refusals


def test_falcon_caches_what_attention_reads() -> None:
    """One head of k and of v; or, in the new decoder, every query head's, since they are written out before the cache."""
    assert make("falcon").caches[0][0].elements_per_token == 2 * 8
    assert make("falcon", multi_query=False).caches[0][0].elements_per_token == 2 * 32
    assert make("falcon", new_decoder_architecture=True, num_kv_heads=2).caches[0][0].elements_per_token == 2 * 32


def test_bloom_and_mpt_know_eager_attention_only() -> None:
    assert make("bloom").attention_kernels == make("mpt").attention_kernels == ("eager",)
    assert make("falcon", alibi=True).attention_kernels == ("sdpa", "eager")


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False, "num_kv_heads": 2}, "parallel_attn"),
        ("gptj", {"rotary_dim": 16}, "rotary_dim"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared experts"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("mpt", {"attn_config": [1]}, "attn_config"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention"),
        ("bloom", {"n_head": 7}, "n_head"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(family, **settings)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UnknownArchitectureError, match="second_router"):
        make("mixtral", second_router=True)
