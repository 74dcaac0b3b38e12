"""Architecture families: one file each, pure: a config's keys -> Model. Looked up by `model_type`, imported when named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from memfit.errors import InputError, UnknownArchitectureError, UsageError, did_you_mean
from memfit.families.view import ConfigView
from memfit.job import Assumption
from memfit.model import Model
from memfit.model.builder import BlockBuilder
from memfit.model.description import SEQUENCE, Segment

FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi",
    "phi3": "phi3",
    "stablelm": "stablelm",
    "olmo2": "olmo2",
    "granite": "granite",
    "cohere": "cohere",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "opt": "opt",
    "bloom": "bloom",
    "falcon": "falcon",
    "gptj": "gptj",
    "mpt": "mpt",
    "gpt_bigcode": "gpt_bigcode",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
    "qwen3_next": "qwen3_next",
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "distilbert": "distilbert",
    "electra": "electra",
    "albert": "albert",
    "modernbert": "modernbert",
    "t5": "t5",
    "mt5": "t5",
    "umt5": "t5",
    "bart": "bart",
    "vit": "vit",
    "dinov2": "dinov2",
    "swin": "swin",
    "convnext": "convnext",
    "resnet": "resnet",
    "segformer": "segformer",
}
"""model_type of a config -> the file of this package that describes it."""

_DEFAULT_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere": "CohereForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "gptj": "GPTJForCausalLM",
    "mpt": "MptForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForPreTraining",
    "albert": "AlbertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "resnet": "ResNetForImageClassification",
    "segformer": "SegformerForImageClassification",
}


def build_model(config: Mapping[str, Any], *, name: str, source: str, head: str | None = None, image: int | None = None) -> Model:
    """The model that a Hugging Face config describes.

    Args:
        config: the parsed config.json.
        name: how to call it in messages and answers.
        source: where it was read from.
        head: class with the head, in place of the config's `architectures`.
        image: side of the images in pixels, in place of the config's.

    Raises:
        UnknownArchitectureError: no family for the `model_type`, an unknown head, or keys that are not understood.
        InputError: a dimension that is missing or makes no sense.
        UsageError: `image` for a model that reads none.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{name}: the config has no model_type; it must name an architecture that `memfit models` lists")
    family = FAMILIES.get(model_type)
    if family is None:
        shown = model_type if len(model_type) <= 60 else model_type[:57] + "..."
        raise UnknownArchitectureError(
            f"{name}: architecture {shown!r} is not known{did_you_mean(shown, FAMILIES)}; `memfit models` lists those that are. "
            "Give it by dimensions (--layers --hidden --heads --ffn --vocab), or by counts (--params --activation-elements)"
        )
    view = ConfigView(config, name, image=image)
    assumptions: list[Assumption] = []
    architecture = head or _stated_class(config, name)
    if architecture is None:
        architecture = _DEFAULT_CLASS[model_type]
        assumptions.append(Assumption(name="head", value=architecture, why="the config names no architectures", flag="--head"))
    described = import_module(f"memfit.families.{family}").build(view, architecture)
    assumptions += view.assumptions
    if image is not None and not described.pixels:
        raise UsageError(f"{name}: {model_type} reads no images, so --image has no meaning: leave it out")
    dtype, facts = view.dtype(), _quantization_facts(view)
    view.finish()
    return Model(
        name=name,
        family=family,
        architecture=architecture,
        source=source,
        kind=described.kind,
        segments=described.segments,
        num_layers=described.num_layers,
        hidden_size=described.hidden_size,
        num_heads=described.num_heads,
        num_kv_heads=described.num_kv_heads,
        head_dim=described.head_dim,
        vocab_size=described.vocab_size,
        max_positions=described.max_positions,
        hard_position_limit=described.hard_position_limit,
        dtype=dtype,
        loss=described.loss,
        attention_kernels=described.attention_kernels,
        encoder_decoder=described.encoder_decoder,
        buffer_elements=described.buffer_elements,
        checkpointed_masks=described.checkpointed_masks,
        pixels=described.pixels,
        tokens_per_image=described.tokens_per_image,
        checkpoints_layers=described.checkpoints_layers,
        rotary_dim=described.rotary_dim,
        rotary_tables=described.rotary_tables,
        rotary_fp32=described.rotary_fp32,
        mask=described.mask,
        one_sequence_differs=described.one_sequence_differs,
        shared=described.shared,
        chunk=described.chunk,
        buffer_bytes=4 * (described.rotary_dim or 0) * described.rotary_tables + described.buffer_bytes,
        assumptions=tuple(assumptions),
        facts={**described.facts, **facts, "published_dtype": described.published_dtype},
    )


def _quantization_facts(view: ConfigView) -> dict[str, Any]:
    """What the config says of a quantised checkpoint: its format, and what is not followed, to be warned of."""
    found = {
        "quantization": view.quantization(),
        "quantization_details": view.quantization_details(),
        "quantization_cache": view.quantization_cache(),
    }
    return {key: value for key, value in found.items() if value}


def _stated_class(config: Mapping[str, Any], name: str) -> str | None:
    stated = config.get("architectures")
    if not stated:
        return None
    if not (isinstance(stated, list) and isinstance(stated[0], str)):
        raise InputError(f'{name}: architectures must be a list of class names, as in ["LlamaForCausalLM"]')
    return stated[0][:120]


def from_counts(params: int, activation_elements: int) -> Model:
    """A model known only by its number of parameters and of elements kept for backward per sequence."""
    b = BlockBuilder("model", 1, SEQUENCE)
    block = b.done(b.opaque("parameters", params=params, elements=activation_elements))
    why = "given as a count; which operations keep it is not known"
    return Model(
        name=f"{params:,} parameters",
        family="counts",
        architecture="counts",
        source="command line",
        kind="decoder",
        segments=(Segment((block,)),),
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        loss=None,
        relative_uncertainty=0.3,
        assumptions=(
            Assumption(name="activations", value=activation_elements, why=why, flag="--activation-elements"),
            Assumption(name="parameters", value=params, why="given as a count", flag="--params"),
        ),
    )
