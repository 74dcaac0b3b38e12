"""The config view: what is not understood is refused by name, and every error names the field that is wrong."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.account import resolve
from memfit.errors import InputError, MemfitError, UnknownArchitectureError
from memfit.families import build_model
from memfit.families.view import IRRELEVANT, ConfigView
from memfit.job import Inference, Job

REQUIRED = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "stablelm", "olmo2", "granite",
                     "cohere", "starcoder2"),
                    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    "gemma3_text": ("hidden_size", "intermediate_size", "num_hidden_layers"),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "gpt_neox": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "bert": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
}  # fmt: skip
DIMENSIONS = [(family, key) for family, keys in REQUIRED.items() for key in keys]


@pytest.mark.parametrize("family", sorted(models.FAMILY_CONFIGS))
@pytest.mark.parametrize("key", ["moe_intermediate_size", "num_experts", "q_lora_rank", "extra_adapter_layers"])
def test_an_unknown_key_is_refused_by_name(family: str, key: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=key) as caught:
        models.make(models.FAMILY_CONFIGS[family], **{key: 8})
    assert "\n" not in str(caught.value)


def test_several_unknown_keys_are_named_together_and_many_are_cut() -> None:
    with pytest.raises(UnknownArchitectureError, match="alpha, beta"):
        models.make(models.LLAMA_8B, beta=1, alpha=2)
    with pytest.raises(UnknownArchitectureError, match="and more") as caught:
        models.make(models.LLAMA_8B, **{f"key{index}": 1 for index in range(1000)})
    assert len(str(caught.value)) < 700  # the names of all families are in it


def test_keys_known_not_to_change_memory_and_null_keys_pass() -> None:
    assert build_model({**models.LLAMA_8B, "unheard_of": None}, name="t", source="t").num_parameters == 8_030_261_248
    noise = {
        key: "anything"
        for key in IRRELEVANT
        if key not in ("architectures", "model_type", "dtype", "torch_dtype", "rope_parameters", "id2label")
    }
    assert models.make(models.LLAMA_8B, **noise).num_parameters == 8_030_261_248


@pytest.mark.parametrize(("family", "key"), DIMENSIONS)
def test_a_missing_dimension_is_named(family: str, key: str) -> None:
    with pytest.raises(InputError, match=key):
        models.make(models.FAMILY_CONFIGS[family], **{key: None})


@pytest.mark.parametrize(("family", "key"), DIMENSIONS)
@pytest.mark.parametrize(
    "value",
    ["4096", [4096], {"a": 1}, True, 0, -1, 1.5, float("nan"), float("inf"), -float("inf"), 10**400, 1 << 40],
    ids=["text", "list", "object", "bool", "zero", "negative", "fraction", "nan", "inf", "-inf", "enormous", "huge"],
)
def test_a_dimension_that_is_none_is_refused_by_name(family: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key) as caught:
        models.make(models.FAMILY_CONFIGS[family], **{key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_whole_number_written_as_a_float_is_one() -> None:
    assert models.make(models.LLAMA_8B, hidden_size=4096.0).num_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"num_key_value_heads": 5}, "32 attention heads are not a multiple of 5"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
        ("llama", {"hidden_size": 4100}, "hidden_size 4100 is not a multiple of num_attention_heads 32"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
        ("llama", {"hidden_act": "snake"}, "hidden_act must be one of"),
        ("llama", {"hidden_act": 3}, "hidden_act"),
        ("llama", {"attention_dropout": 1.5}, "attention_dropout must be a number from 0 to 1"),
        ("llama", {"attention_dropout": "0.1"}, "attention_dropout"),
        ("llama", {"num_hidden_layers": 1 << 17}, "num_hidden_layers"),
        ("llama", {"head_dim": -4}, "head_dim"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be a list of 28 names"),
        ("qwen2", {"layer_types": ["linear_attention"] * 28}, "layer_types"),
        ("qwen2", {"layer_types": "full_attention"}, "layer_types"),
        ("qwen2", {"layer_types": [["full_attention"]] * 28}, "layer_types"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
        ("gpt2", {"n_embd": 770}, "n_embd 770 is not a multiple of n_head 12"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"resid_pdrop": -0.1}, "resid_pdrop"),
        ("gpt_neox", {"rotary_pct": 2}, "rotary_pct"),
        ("gpt_neox", {"hidden_size": 2050}, "hidden_size 2050"),
        ("bert", {"position_embedding_type": "relative_key"}, "absolute positions"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_words(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        models.make(models.FAMILY_CONFIGS[family], **changes)


@pytest.mark.parametrize("value", ["abc", [1], {"a": 1}, float("nan"), float("inf"), -1, 7, True])
def test_a_rotary_share_within_rope_parameters_is_checked_too(value: Any) -> None:
    with pytest.raises(InputError, match="partial_rotary_factor"):
        models.make(models.PYTHIA_1B, rotary_pct=None, rope_parameters={"rope_type": "default", "partial_rotary_factor": value})


def layer_types(kinds: list[str]) -> dict[str, Any]:
    named = [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
    return {"layer_types": named, "num_hidden_layers": len(kinds), "use_sliding_window": True, "sliding_window": 4096}


def test_layers_without_a_pattern_are_read_up_to_64_runs() -> None:
    """Runs of 1, 2, 1, 2 ... layers have a period; a last or a first run of 5 breaks it."""
    runs = [kind * (1 + index % 3) for index, kind in enumerate("fs" * 32)]
    enough = models.make(models.FAMILY_CONFIGS["qwen3"], **layer_types([*"".join(runs)[:-1], *"sssss"]))
    assert len(enough.segments) == 1 + 64 + 1
    with pytest.raises(InputError, match=r"change their kind 64 times without a pattern.*at most 64 runs.*layer_types"):
        models.make(models.FAMILY_CONFIGS["qwen3"], **layer_types([*"ffff", *"".join(runs), *"f"]))


def test_a_pattern_that_repeats_is_read_at_any_depth() -> None:
    deep = models.make(models.FAMILY_CONFIGS["qwen3"], **layer_types(list("sssf" * 256)))
    assert [(len(one.blocks), one.repeat) for one in deep.segments if one.role == "layers"] == [(4, 256)]
    with pytest.raises(InputError, match="from 1 to 1,024"):
        models.make(models.FAMILY_CONFIGS["qwen3"], **layer_types(list("sssf" * 257)))


def test_the_older_and_the_newer_key_of_the_rotary_share_may_stand_together() -> None:
    both = models.make(models.PYTHIA_1B, rotary_pct=0.5, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    assert both.rotary_dim == models.make(models.PYTHIA_1B, rotary_pct=0.5).rotary_dim == 128


@pytest.mark.parametrize(
    ("name", "close"), [("lama", "llama"), ("qwen-2", "qwen2"), ("gpt-neox", "gpt_neox"), ("gemma3", "gemma2")]
)
def test_an_unknown_architecture_names_the_nearest_and_what_would_help(name: str, close: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=f"'{name}' is not known .did you mean.*'{close}'") as caught:
        models.make({**models.LLAMA_8B, "model_type": name})
    for word in ("--layers", "--hidden", "--params"):
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, ["llama"], {"a": 1}, True])
def test_a_config_without_a_model_type_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="model_type"):
        build_model({**models.LLAMA_8B, "model_type": value}, name="t", source="t")


def test_a_long_model_type_is_cut_in_the_message() -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        models.make({**models.LLAMA_8B, "model_type": "x" * 5000})
    assert len(str(caught.value)) < 700  # the names of all families are in it


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4-dq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ],
)  # fmt: skip
def test_quantised_checkpoints(quantization: dict[str, Any], found: str) -> None:
    model = models.make(models.LLAMA_8B, quantization_config=quantization)
    assert model.facts["quantization"] == found
    assert model.num_parameters == 8_030_261_248


def warned(code: str, quantization: dict[str, Any], workload: Any = None) -> str:
    """The text of a warning of an inference with this checkpoint; empty without it."""
    job = Job(model=models.make(models.LLAMA_8B, quantization_config=quantization), workload=workload or Inference())
    return dict(resolve(job).warnings).get(code, "")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 32}, "int4 in groups of 128; quantization_config also says: group_size 32"),
        ({"group_size": -1}, "group_size -1"),
        ({"modules_to_not_convert": ["visual", "mlp.gate"]}, "modules_to_not_convert visual and 1 more"),
        ({"ignore": ["re:.*self_attn.*", "lm_head"], "quant_method": "compressed-tensors",
          "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4, "group_size": 64}}}},
         "ignore re:.*self_attn.*, group_size 64"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.0*"], "group_size": None},
         "fp8 with one scale per output row; quantization_config also says: exclude_modules model.layers.0*"),
        ({"lm_head": True}, "lm_head is quantised too"),
    ],
)  # fmt: skip
def test_what_a_quantised_checkpoint_says_beside_its_format_is_named(changes: dict[str, Any], words: str) -> None:
    text = warned("quantization-details", {**GPTQ, **changes})
    assert words in text
    assert "every linear layer but the head" in text


def test_a_quantised_checkpoint_as_it_is_counted_needs_no_warning() -> None:
    for same in ({}, {"modules_to_not_convert": ["lm_head", "model.norm"]}, {"modules_to_not_convert": None}):
        assert warned("quantization-details", {**GPTQ, **same}) == ""
        assert warned("quantized-cache", {**GPTQ, **same}) == ""
    # another format was asked for: the checkpoint's own does not matter
    assert warned("quantization-details", {**GPTQ, "group_size": 32}, Inference(quantization="fp8")) == ""


def test_a_quantised_cache_of_the_checkpoint_is_named_unless_the_format_is_given() -> None:
    stated = {**GPTQ, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert "kv_cache_scheme" in warned("quantized-cache", stated)
    assert "--kv-dtype" in warned("quantized-cache", {**GPTQ, "kv_cache_quant_algo": "FP8"})
    assert warned("quantized-cache", stated, Inference(kv_dtype="fp8")) == ""


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "aqlm"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": [4]},
        {"quant_method": ["gptq"]},
        {},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 2}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": [], "num_bits": {}}}}},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "int4",
        4,
        [],
    ],
)
def test_other_quantisation_is_refused_by_name(quantization: Any) -> None:
    with pytest.raises(InputError, match="quantization_config"):
        models.make(models.LLAMA_8B, quantization_config=quantization)


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("torch.bfloat16", "bf16"), ("auto", None)],
)
def test_the_checkpoints_format(stated: Any, dtype: str | None) -> None:
    assert models.make(models.LLAMA_8B, dtype=stated).dtype == dtype
    assert models.make(models.LLAMA_8B, dtype=None, torch_dtype=stated).dtype == dtype


@pytest.mark.parametrize("stated", ["int4", "float8_e4m3fn", 7, ["bfloat16"], True])
def test_a_format_that_is_not_known_is_refused(stated: Any) -> None:
    with pytest.raises(InputError, match="torch_dtype must be one of float32"):
        models.make(models.LLAMA_8B, dtype=None, torch_dtype=stated)


@pytest.mark.parametrize(("config", "dtype"), [(models.GPT2, "fp32"), (models.BERT_BASE, "fp32"), (models.LLAMA_8B, "bf16")])
def test_a_checkpoint_whose_config_names_no_format(config: dict[str, Any], dtype: str) -> None:
    model = models.make(config, dtype=None, torch_dtype=None)
    assert resolve(Job(model=model, workload=Inference())).job.workload.weight_dtype == dtype


@pytest.mark.parametrize("stated", ["LlamaForCausalLM", [7], {"0": "LlamaForCausalLM"}])
def test_architectures_are_a_list_of_names(stated: Any) -> None:
    with pytest.raises(InputError, match="architectures must be a list"):
        models.make(models.LLAMA_8B, architectures=stated)


def test_labels_come_from_id2label_then_num_labels_then_two() -> None:
    def rows(**keys: Any) -> int:
        model = models.make(models.LLAMA_8B, head="LlamaForSequenceClassification", **keys)
        return (model.num_parameters - models.make(models.LLAMA_8B, head="LlamaModel").num_parameters) // 4096

    assert rows() == 2
    assert rows(num_labels=7) == 7
    assert rows(id2label={"0": "a", "1": "b", "2": "c"}) == 3


def test_the_view_takes_note_of_each_key_it_reads() -> None:
    view = ConfigView({"a": 1, "b": 2, "model_type": "x"}, "t")
    view.size("a")
    with pytest.raises(UnknownArchitectureError, match=r"t: b in the config of"):
        view.finish()
    view.size("b")
    view.finish()


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=10), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.sampled_from([10**400, -(10**400), [[]], {"a": {}}]),
)  # fmt: skip
READ_KEYS = sorted(
    {key for keys in REQUIRED.values() for key in keys}
    | set(
        """
        num_key_value_heads head_dim hidden_act tie_word_embeddings attention_bias mlp_bias attention_dropout sliding_window
        use_sliding_window max_window_layers layer_types max_position_embeddings n_inner n_positions activation_function
        attn_pdrop rotary_pct use_parallel_residual rope_parameters type_vocab_size position_embedding_type quantization_config
        dtype torch_dtype architectures id2label num_labels attn_logit_softcapping final_logit_softcapping hidden_activation
        model_type classifier_dropout hidden_dropout hidden_dropout_prob
        """.split()  # noqa: SIM905
    )
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(models.FAMILY_CONFIGS)),
    st.dictionaries(st.sampled_from(READ_KEYS), JUNK, min_size=1, max_size=3),
    st.sampled_from(["ForCausalLM", "ForTokenClassification", "ForSequenceClassification"]),
)
def test_a_broken_config_is_understood_or_refused_never_a_crash(family: str, changes: dict[str, Any], head: str) -> None:
    message = ""
    try:
        model = build_model({**models.FAMILY_CONFIGS[family], "architectures": ["X" + head], **changes}, name="t", source="t")
    except MemfitError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    if message:
        return
    assert model.num_parameters > 0
    assert 0 <= (model.rotary_dim or 0) <= model.head_dim


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=10), JUNK, max_size=6))
def test_anything_else_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        build_model(config, name="t", source="t")
