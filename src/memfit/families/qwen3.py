"""Qwen3 (dense): Llama with an RMSNorm on every head of q and k, and a head dimension of its own (128).

Source: transformers 5, models/qwen3/modeling_qwen3.py and configuration_qwen3.py.
"""

from __future__ import annotations

from memfit.families import llama, qwen2
from memfit.families.description import Description
from memfit.families.view import ConfigView


def build(config: ConfigView, architecture: str) -> Description:
    """A Qwen3 model from its config."""
    shape = llama.read_shape(config, qk_norm=True, default_head_dim=128, default_kv_heads=qwen2.DEFAULT_KV_HEADS)
    return llama.assemble(config, architecture, shape, qwen2.windows(config))
