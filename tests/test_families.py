"""Parameters: by hand for the models everybody knows, and exactly those of the real transformers classes for many small
configs."""

from __future__ import annotations

import re
from typing import Any

import heart_models as models
import pytest
import torch_truth
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_truth import Case

from memfit.errors import UnknownArchitectureError
from memfit.families import _DEFAULT_CLASS as DEFAULT_CLASSES
from memfit.families import build_model
from memfit.model import Model

# ------------------------------------------------------------------ by hand


def test_llama_3_1_8b() -> None:
    """V h + L (h (q + 2 kv) + q h + 3 h f + 2 h) + h + V h with V 128256, h 4096, q 4096, kv 1024, f 14336, L 32."""
    model = models.make(models.LLAMA_8B)
    embedding = 128_256 * 4096
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    assert (embedding, layer) == (525_336_576, 218_112_000)
    assert model.num_parameters == 2 * embedding + 32 * layer + 4096 == 8_030_261_248
    assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim) == (32, 4096, 32, 8, 128)
    assert (model.vocab_size, model.max_positions, model.kind, model.dtype) == (128_256, 131_072, "decoder", "bf16")


def test_a_tied_head_is_counted_once() -> None:
    tied = models.make(models.LLAMA_8B, tie_word_embeddings=True)
    assert models.make(models.LLAMA_8B).num_parameters - tied.num_parameters == 128_256 * 4096


def test_gpt2() -> None:
    """V h + P h + L (12 h^2 + 13 h) + 2 h, tied."""
    expected = 50_257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert models.make(models.GPT2).num_parameters == expected == 124_439_808


def test_bert_base_with_pooler() -> None:
    """(V + P + 2) h + 2 h + L (4 h^2 + 4 h + 2 h f + f + h + 4 h) + h^2 + h."""
    layer = 4 * 768**2 + 4 * 768 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    expected = (30_522 + 512 + 2) * 768 + 2 * 768 + 12 * layer + 768**2 + 768
    assert models.make(models.BERT_BASE, head="BertModel").num_parameters == expected == 109_482_240


def test_bert_base_for_masked_lm() -> None:
    """Without pooler; the transform h^2 + h + 2 h and the bias V; the decoder is tied."""
    without_pooler = 109_482_240 - 768**2 - 768
    assert models.make(models.BERT_BASE).num_parameters == without_pooler + 768**2 + 768 + 2 * 768 + 30_522 == 109_514_298


def test_mistral_7b() -> None:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336 + 2 * 4096
    assert models.make(models.MISTRAL_7B).num_parameters == 2 * 32_000 * 4096 + 32 * layer + 4096 == 7_241_732_096


def test_qwen2_has_biases_on_q_k_and_v() -> None:
    layer = 3584 * (3584 + 2 * 512) + (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18_944 + 2 * 3584
    assert models.make(models.QWEN2_7B).num_parameters == 2 * 152_064 * 3584 + 28 * layer + 3584 == 7_615_616_512


def test_qwen3_has_a_norm_on_every_head_of_q_and_k() -> None:
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 2 * 128 + 3 * 4096 * 12_288 + 2 * 4096
    assert models.make(models.QWEN3_8B).num_parameters == 2 * 151_936 * 4096 + 36 * layer + 4096 == 8_190_735_360


def test_gemma2_has_four_norms_a_layer_and_a_head_dimension_of_its_own() -> None:
    layer = 2304 * (2048 + 2 * 1024) + 2048 * 2304 + 3 * 2304 * 9216 + 4 * 2304
    assert models.make(models.GEMMA2_2B).num_parameters == 256_000 * 2304 + 26 * layer + 2304 == 2_614_341_888


def test_pythia_1b() -> None:
    """12 h^2 + 13 h a layer, as in GPT-2; untied."""
    assert (
        models.make(models.PYTHIA_1B).num_parameters
        == 2 * 50_304 * 2048 + 16 * (12 * 2048**2 + 13 * 2048) + 2 * 2048
        == 1_011_781_632
    )


# ------------------------------------------------------------------ against the real classes

PREFIX = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "bert": "Bert",
}
DECODER_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
HEADS = {
    **dict.fromkeys(PREFIX, DECODER_HEADS),
    "gpt2": ("Model", "LMHeadModel", "ForSequenceClassification", "ForTokenClassification"),
    "bert": ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
}
FLAGS = {
    "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans()},
    "mistral": {"sliding_window": st.sampled_from([None, 4, 4096])},
    "qwen2": {"use_sliding_window": st.booleans(), "sliding_window": st.just(4), "max_window_layers": st.integers(0, 4)},
    "qwen3": {"attention_bias": st.booleans()},
    "gemma2": {"attention_bias": st.booleans(), "sliding_window": st.just(4)},
    "gpt_neox": {
        "attention_bias": st.booleans(),
        "use_parallel_residual": st.booleans(),
        "rotary_pct": st.sampled_from([0.25, 0.5, 1.0]),
    },
    "bert": {"type_vocab_size": st.integers(1, 4)},
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A real class of a family with a small config: grouped heads, head dimensions, biases, ties, labels, heads."""
    family = draw(st.sampled_from(sorted(PREFIX)))
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads, layers = kv_heads * groups, draw(st.integers(1, 4))
    width = draw(st.sampled_from([4, 6, 8]))
    hidden, ffn, vocab, positions = heads * width, draw(st.integers(3, 90)), draw(st.integers(10, 200)), draw(st.integers(4, 80))
    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "num_labels": draw(st.integers(1, 5)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 0,
    }
    if family == "gpt2":
        own = {
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": layers,
            "n_positions": positions,
            "n_inner": draw(st.sampled_from([None, ffn])),
        }
    else:
        own = {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "intermediate_size": ffn,
            "max_position_embeddings": positions,
        }
    if family not in ("gpt2", "gpt_neox", "bert"):
        own |= {
            "num_key_value_heads": kv_heads,
            "head_dim": draw(st.sampled_from([4, 8, 12])),
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    own |= {key: draw(strategy) for key, strategy in FLAGS.get(family, {}).items()}
    config = transformers.CONFIG_MAPPING[family](**shared, **own)
    return Case(getattr(transformers, PREFIX[family] + draw(st.sampled_from(HEADS[family]))), config)


def described(case: Case) -> Model:
    return build_model(case.config.to_dict(), name="test", source="test", head=case.head)


@settings(max_examples=120, deadline=None)
@given(cases())
def test_parameters_are_those_of_the_real_class(case: Case) -> None:
    assert described(case).num_parameters == torch_truth.count_parameters(case)


@pytest.mark.parametrize(("family", "head"), [(family, head) for family, heads in HEADS.items() for head in heads])
def test_every_head_of_every_family(family: str, head: str) -> None:
    config = transformers.CONFIG_MAPPING[family](
        num_labels=5, **({"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2})
    )
    case = Case(getattr(transformers, PREFIX[family] + head), config)
    assert described(case).num_parameters == torch_truth.count_parameters(case)


@pytest.mark.parametrize("family", sorted(models.FAMILY_CONFIGS))
def test_the_class_that_architectures_names_is_described(family: str) -> None:
    config = models.FAMILY_CONFIGS[family]
    prefix = re.split("For|LMHead", DEFAULT_CLASSES[family])[0]
    bare = models.make({**config, "architectures": [prefix + "Model"]})
    assert bare.architecture == prefix + "Model"
    assert bare.loss is None
    headed = models.make({**config, "architectures": [prefix + "ForSequenceClassification"], "num_labels": 7})
    assert headed.loss == "classification"
    assert headed.num_parameters - bare.num_parameters == 7 * bare.hidden_size + (7 if family == "bert" else 0)


def test_the_head_option_wins_over_architectures() -> None:
    assert models.make(models.LLAMA_8B, head="LlamaModel").num_parameters == 8_030_261_248 - 128_256 * 4096


def test_without_architectures_the_usual_head_is_assumed_and_said() -> None:
    model = models.make(models.LLAMA_8B, architectures=None)
    assert model.architecture == "LlamaForCausalLM"
    assert [(one.name, one.value, one.flag) for one in model.assumptions] == [("head", "LlamaForCausalLM", "--head")]
    assert models.make(models.LLAMA_8B).assumptions == ()


@pytest.mark.parametrize("head", ["LlamaForCausalLLM", "LlamaForImageGeneration", "BertForPreTraning", "GPT2DoubleHeadsModel"])
def test_an_unknown_head_is_refused(head: str) -> None:
    family = "bert" if head.startswith("Bert") else "gpt2" if head.startswith("GPT2") else "llama"
    with pytest.raises(UnknownArchitectureError, match=head):
        models.make(models.FAMILY_CONFIGS[family], head=head)


# ------------------------------------------------------------------ layers, windows, caches


def test_sliding_windows() -> None:
    assert models.make(models.MISTRAL_7B).windows == (4096,)
    assert models.make({**models.MISTRAL_7B, "sliding_window": None}).windows == (4096,)  # the helper leaves the key out
    assert build_model({**models.MISTRAL_7B, "sliding_window": None}, name="t", source="t").windows == ()
    assert models.make(models.LLAMA_8B).windows == ()
    assert models.make(models.GEMMA2_2B).windows == (4096,)


def test_gemma2_alternates_between_windowed_and_full_layers() -> None:
    caches = models.make(models.GEMMA2_2B).caches
    assert [(cache.elements_per_token, cache.window, layers) for cache, layers in caches] == [(2048, 4096, 13), (2048, None, 13)]
    odd = models.make(models.GEMMA2_2B, num_hidden_layers=3).caches
    assert sum(layers for cache, layers in odd if cache.window) == 2
    assert sum(layers for cache, layers in odd if not cache.window) == 1


def test_qwen2_slides_only_when_told_and_from_max_window_layers_on() -> None:
    window = {"sliding_window": 1024, "max_window_layers": 20}
    assert models.make(models.QWEN2_7B, **window).windows == ()
    sliding = models.make(models.QWEN2_7B, use_sliding_window=True, **window).caches
    assert [(cache.window, layers) for cache, layers in sliding] == [(None, 20), (1024, 8)]


def test_layer_types_decide_which_layers_slide() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = models.make(models.QWEN2_7B, num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=512)
    assert sum(layers for cache, layers in model.caches if cache.window == 512) == 2
    assert model.num_layers == sum(layers for _, layers in model.caches) == 4


@pytest.mark.parametrize("family", sorted(models.FAMILY_CONFIGS))
def test_every_layer_is_there_once(family: str) -> None:
    model = models.make(models.FAMILY_CONFIGS[family])
    layers = sum(segment.repeat * len(segment.blocks) for segment in model.segments if segment.role == "layers")
    assert layers == model.num_layers
    roles = [segment.role for segment in model.segments]
    assert (roles[0], roles[-1]) == ("embedding", "head")
    assert bool(model.caches) == (model.kind == "decoder")


@pytest.mark.parametrize("family", sorted(models.FAMILY_CONFIGS))
def test_a_layer_more_adds_the_parameters_of_one_layer(family: str) -> None:
    config = models.FAMILY_CONFIGS[family]
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    counts = [models.make(config, **{key: layers}).num_parameters for layers in (3, 4, 5, 80)]
    layer = counts[1] - counts[0]
    assert counts[2] - counts[1] == layer
    assert counts[3] - counts[0] == 77 * layer
