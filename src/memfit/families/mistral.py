"""Mistral: Llama with a sliding window in every layer (4,096 unless the config says otherwise; null: none), never a bias.

Source: transformers 5, models/mistral/modeling_mistral.py and configuration_mistral.py.
"""

from __future__ import annotations

from memfit.families import llama
from memfit.families.description import Description
from memfit.families.view import ConfigView

DEFAULT_WINDOW = 4096


def build(config: ConfigView, architecture: str) -> Description:
    """A Mistral model from its config."""
    shape = llama.read_shape(config, attention_bias=False, default_kv_heads=8)
    window = config.optional_size("sliding_window") if config.states("sliding_window") else DEFAULT_WINDOW
    return llama.assemble(config, architecture, shape, [window] * config.layers("num_hidden_layers"))
