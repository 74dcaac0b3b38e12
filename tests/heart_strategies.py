"""Any small model, any workload: hypothesis strategies for the laws of the account."""

from __future__ import annotations

from functools import cache
from typing import Any

import heart_models as models
from hypothesis import strategies as st

from memfit.account.estimate import Estimate
from memfit.job import FineTuning, Inference, Training
from memfit.model import Model
from memfit.options import options_of

DECODERS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "stablelm", "olmo2", "granite",
    "cohere", "starcoder2", "gpt2", "gpt_neox",
)  # fmt: skip
OPTIMIZERS = (
    "adamw",
    "adamw-fused",
    "adamw-loop",
    "adamw-8bit",
    "paged-adamw-8bit",
    "sgd",
    "sgd-momentum",
    "adam-mini",
    "galore:rank=8",
    "apollo",
    "custom:states=3,bytes=4",
)
CHECKPOINTING = ("none", "full", "first:2", "group:3", "selective", "selective:mm,attention", "offloaded")
LAYERS = {"gpt2": "n_layer"}
_GATED = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000}
_PLAIN = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1000}
SHRUNK: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "mistral": {**_GATED, "sliding_window": 64},
    "qwen2": {**_GATED, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
    "qwen3": _GATED,
    "gemma": {**_GATED, "num_key_value_heads": 1, "head_dim": 32},
    "gemma2": {**_GATED, "sliding_window": 64},
    "gemma3_text": {**_GATED, "sliding_window": 64, "sliding_window_pattern": 2},
    "phi": _PLAIN,
    "phi3": {**_GATED, "sliding_window": 64},
    "stablelm": {**_GATED, "qk_layernorm": True},
    "olmo2": _GATED,
    "granite": _GATED,
    "cohere": {**_GATED, "use_qk_norm": True},
    "starcoder2": {**_PLAIN, "num_key_value_heads": 2, "sliding_window": 64},
    "gpt2": {"n_embd": 256, "n_head": 8, "vocab_size": 1000},
    "gpt_neox": _PLAIN,
    "bert": _PLAIN,
}


@cache
def model(family: str, layers: int = 4, tied: bool | None = None) -> Model:
    """A small model of each family; the same object each time, so that its profiles are compiled once."""
    changes: dict[str, Any] = {**SHRUNK[family], LAYERS.get(family, "num_hidden_layers"): layers}
    if tied is not None:
        changes["tie_word_embeddings"] = tied
    return models.make(models.FAMILY_CONFIGS[family], **changes)


@cache
def larger_vocabulary(family: str) -> Model:
    """As `model`, with 1,500 entries instead of 1,000."""
    return models.make(models.FAMILY_CONFIGS[family], **{**SHRUNK[family], "num_hidden_layers": 4, "vocab_size": 1500})


MODELS = st.builds(model, st.sampled_from([*DECODERS, "bert"]), st.sampled_from([1, 4]))
DECODER_MODELS = st.builds(model, st.sampled_from(DECODERS), st.sampled_from([1, 4]))
SEQUENCES = st.integers(1, 512)
BATCHES = st.integers(1, 64)
PRECISION = st.sampled_from(
    [("bf16-true", None), ("32-true", None), ("bf16-mixed", "fp32"), ("bf16-mixed", "bf16"), ("fp16-mixed", None)]
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Any training or fine-tuning."""
    precision, weight_dtype = draw(PRECISION)
    settings: dict[str, Any] = {
        "batch": draw(BATCHES),
        "seq": draw(SEQUENCES),
        "precision": precision,
        "weight_dtype": weight_dtype,
        "padding": draw(st.sampled_from(["none", "right"])),
        "optimizer": draw(st.sampled_from(OPTIMIZERS)),
        "attention": draw(st.sampled_from(["sdpa", "flash", "eager"])),
        "checkpointing": draw(st.sampled_from(CHECKPOINTING)),
        "loss": draw(st.sampled_from(["eager", "fused"])),
        "outputs": draw(st.sampled_from(["kept", "dropped"])),
        "zero_grad": draw(st.sampled_from(["none", "zeros"])),
        "grad_accum": draw(st.sampled_from([1, 4])),
        "dropout": draw(st.sampled_from([None, 0.0, 0.1])),
    }
    method = draw(st.sampled_from([None, None, "full", "lora", "qlora"]))
    if method is None:
        return Training(**settings)
    if method == "qlora":
        settings |= {"precision": "bf16-true", "weight_dtype": None}
    return FineTuning(
        method=method,
        lora_rank=draw(st.integers(1, 64)),
        lora_dtype=draw(st.sampled_from(["fp32", "bf16"])),
        lora_dropout=draw(st.sampled_from([0.0, 0.1])),
        double_quant=draw(st.booleans()),
        **settings,
    )


@st.composite
def inferences(draw: st.DrawFn) -> Inference:
    """Any inference."""
    context = draw(st.integers(1, 512))
    return Inference(
        context=context,
        prompt=draw(st.integers(1, context)),
        concurrency=draw(BATCHES),
        weight_dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        logits=draw(st.sampled_from(["last", "all"])),
        quantization=draw(st.sampled_from(["none", "int8", "fp8", "int4", "nf4", "nf4-dq"])),
        kv_dtype=draw(st.sampled_from(["fp32", "bf16", "fp8", "int8", "int4"])),
        attention=draw(st.sampled_from(["sdpa", "flash", "eager"])),
    )


WORKLOADS = st.one_of(trainings(), inferences())
DEVICES = st.sampled_from([None, "4090", "h100", "v100-16gb", "2xa100-80gb", "m4-max-64", "24GiB"])


def estimated(of: Model, workload: Any, **overheads: int) -> Estimate:
    return models.estimate_of(of, workload, **overheads)


def peak(of: Model, workload: Any) -> int:
    return estimated(of, workload).peak.device_bytes


def changed(workload: Any, **values: Any) -> Any:
    return type(workload)(**{**{name: getattr(workload, name) for name in options_of(type(workload))}, **values})
