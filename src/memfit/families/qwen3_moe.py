"""Qwen3-MoE: Qwen3's attention; layers with a mixture of experts, or a dense MLP by `decoder_sparse_step` and `mlp_only_layers`.

Source: transformers 5, models/qwen3_moe/modeling_qwen3_moe.py and configuration_qwen3_moe.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families import llama
from memfit.families.common import layer_segments
from memfit.families.description import Description
from memfit.families.mixtral import check_top_k, with_active
from memfit.families.view import ConfigView
from memfit.model import Block
from memfit.model.ops.moe import Experts, sparse_mlp


def _sparse_layers(config: ConfigView, num_layers: int, num_experts: int) -> list[bool]:
    step = config.size("decoder_sparse_step", 1)
    dense = config.indices("mlp_only_layers")
    return [layer not in dense and num_experts > 0 and (layer + 1) % step == 0 for layer in range(num_layers)]


def build(config: ConfigView, architecture: str) -> Description:
    """A Qwen3-MoE model from its config."""
    shape = llama.read_shape(config, qk_norm=True, default_kv_heads=4)
    num_experts = config.count("num_experts" if config.has("num_experts") else "num_local_experts", 128)
    config.ignore("num_local_experts", "router_aux_loss_coef", "max_window_layers", "qkv_bias", "use_qk_norm")
    if config.count("shared_expert_intermediate_size", 0):
        raise InputError(f"{config.name}: shared experts are not supported for Qwen3-MoE")
    experts = Experts(
        num_experts=num_experts,
        top_k=config.size("num_experts_per_tok", 8),
        ffn=config.size("moe_intermediate_size", 768),
        activation=shape.activation,
        normalised=config.flag("norm_topk_prob", False),
        fp32_scores=False,
        router_loss=config.flag("output_router_logits", False),
    )
    num_layers = config.layers("num_hidden_layers")
    sparse = _sparse_layers(config, num_layers, num_experts)
    if any(sparse):
        check_top_k(config, experts.top_k, num_experts)
    window = config.size("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    config.ignore("sliding_window")

    def layer(kind: str) -> Block:
        mlp = (lambda b, x: sparse_mlp(b, x, experts)) if kind == "sparse" else None
        return llama.decoder_layer(shape, window, mlp)

    layers = layer_segments(config, ["sparse" if one else "dense" for one in sparse], layer)
    return with_active(llama.assemble(config, architecture, shape, [window] * num_layers, layers))
