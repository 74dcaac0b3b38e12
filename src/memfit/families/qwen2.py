"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; a window only if `use_sliding_window`, from layer `max_window_layers` on.

Source: transformers 5, models/qwen2/modeling_qwen2.py and configuration_qwen2.py.
"""

from __future__ import annotations

from memfit.families import llama
from memfit.families.description import Description
from memfit.families.view import ConfigView

DEFAULT_KV_HEADS = 32
"""What the config class takes when the key is missing."""


def windows(config: ConfigView) -> list[int | None]:
    """Each layer's window, from `layer_types` or the older keys."""
    num_layers = config.layers("num_hidden_layers")
    window = config.optional_size("sliding_window")
    sliding = config.flag("use_sliding_window", False)
    first = config.count("max_window_layers", 28)
    types = config.layer_types(num_layers)
    if window is None or not sliding:
        return [None] * num_layers
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    return [window if layer >= first else None for layer in range(num_layers)]


def build(config: ConfigView, architecture: str) -> Description:
    """A Qwen2 model from its config."""
    shape = llama.read_shape(config, attention_bias=True, output_bias=False, default_kv_heads=DEFAULT_KV_HEADS)
    return llama.assemble(config, architecture, shape, windows(config))
