"""Mamba-2: as Mamba, with heads, groups that share B and C, a scan by chunks and a gated norm.

Source: transformers 5, models/mamba2/modeling_mamba2.py and configuration_mamba2.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.mamba import close, describe, mixer_sizes, residual_block
from memfit.families.view import ConfigView
from memfit.model.ops.mixers import chunked_state_space


def build(config: ConfigView, architecture: str) -> Description:
    """A Mamba-2 model from its config."""
    hidden, inner = mixer_sizes(config, 4096)
    heads, head_dim = config.size("num_heads", 128), config.size("head_dim", 64)
    if heads * head_dim != inner:
        raise InputError(f"{config.name}: num_heads {heads} x head_dim {head_dim} must be expand x hidden_size, {inner}")
    groups, states = config.size("n_groups", 8), config.size("state_size", 128)
    if heads % groups:
        raise InputError(f"{config.name}: num_heads {heads} is not a multiple of n_groups {groups}")
    bias = config.flag("use_bias", False)
    chunk = config.size("chunk_size", 256)
    config.ignore("time_step_rank", "time_step_limit", "norm_before_gate", "rms_norm")

    b, x = residual_block(hidden)
    projected = b.linear("mixer.in_proj", x, 2 * inner + 2 * groups * states + heads, bias=bias)
    mixed = chunked_state_space(
        b,
        "mixer",
        projected,
        hidden,
        heads=heads,
        head_dim=head_dim,
        states=states,
        groups=groups,
        taps=config.size("conv_kernel", 4),
        chunk=chunk,
        activation=activation_name(config, "hidden_act", "silu"),
        bias=bias,
        conv_bias=config.flag("use_conv_bias", True),
    )
    layer = close(b, mixed, config.flag("residual_in_fp32", True))
    return describe(config, architecture, layer, hidden, vocab=32_768, tied=False, chunk=chunk)
