"""Mixtral: Mistral's attention with a mixture of experts in every layer.

Source: transformers 5, models/mixtral/modeling_mixtral.py and configuration_mixtral.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families import llama
from memfit.families.common import layer_segments
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model.ops.moe import Experts, active_parameters, sparse_mlp


def check_top_k(config: ConfigView, top_k: int, num_experts: int) -> None:
    """A token cannot go to more experts than there are."""
    if top_k > num_experts:
        raise InputError(f"{config.name}: num_experts_per_tok {top_k} is more than the {num_experts} experts")


def with_active(described: Description) -> Description:
    """The description with the number of parameters that one token passes."""
    return described.replace(facts={"active_parameters": active_parameters(described.segments)})


def build(config: ConfigView, architecture: str) -> Description:
    """A Mixtral model from its config."""
    shape = llama.read_shape(config, attention_bias=False, default_kv_heads=8)
    experts = Experts(
        num_experts=config.size("num_local_experts", 8),
        top_k=config.size("num_experts_per_tok", 2),
        ffn=shape.ffn,
        activation=shape.activation,
        normalised=True,
        fp32_scores=True,
        router_loss=config.flag("output_router_logits", False),
        jitter=config.number("router_jitter_noise", 0.0) > 0,
    )
    check_top_k(config, experts.top_k, experts.num_experts)
    config.ignore("router_aux_loss_coef")
    window = config.optional_size("sliding_window")
    windows = [window] * config.layers("num_hidden_layers")
    layers = layer_segments(
        config, ["sparse"] * len(windows), lambda _: llama.decoder_layer(shape, window, lambda b, x: sparse_mlp(b, x, experts))
    )
    return with_active(llama.assemble(config, architecture, shape, windows, layers))
