"""Qwen3-Next: gated delta rules in three layers of four, gated attention in the fourth, experts with a gated shared one.

Source: transformers 5, models/qwen3_next/modeling_qwen3_next.py and configuration_qwen3_next.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import (
    EMBEDDING,
    activation_name,
    check_heads,
    gated_mlp,
    language_head,
    layer_segments,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.mixtral import check_top_k, with_active
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Value
from memfit.model.ops import mixers
from memfit.model.ops.decoders import expanded
from memfit.model.ops.moe import Experts, expert_gate, sparse_mlp
from memfit.records import Record


class Mixers(Record):
    """The dimensions of both kinds of layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    bias: bool
    dropout: float
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    activation: str


def _attention(b: BlockBuilder, x: Value, shape: Mixers) -> Value:
    """q and its gate lie side by side in one projection; the gate multiplies the context."""
    heads, head_dim = shape.heads, shape.head_dim
    fused = b.linear("self_attn.q_proj", x, 2 * heads * head_dim, bias=shape.bias)
    q, gate = b.split(fused, heads * head_dim, heads * head_dim)
    gate = expanded(b, gate, gate.width)
    q = b.rms_norm("self_attn.q_norm", q, heads=heads, offset=True)
    k = b.linear("self_attn.k_proj", x, shape.kv_heads * head_dim, bias=shape.bias)
    k = b.rms_norm("self_attn.k_norm", k, heads=shape.kv_heads, offset=True)
    v = b.linear("self_attn.v_proj", x, shape.kv_heads * head_dim, bias=shape.bias)
    q, k = b.rotary(q, k, head_dim=head_dim, rotary_dim=shape.rotary_dim)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=shape.kv_heads, dropout=shape.dropout, head_major=True)
    attended = b.linear("self_attn.o_proj", mixers.output_gate(b, context, gate), shape.hidden, bias=shape.bias, split="row")
    b.until_here(x, q, k, v, gate, context)
    return attended


def _delta(b: BlockBuilder, x: Value, shape: Mixers) -> Value:
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    x = mixers.mask_padding(b, x)
    qkvz = b.linear("linear_attn.in_proj_qkvz", x, 2 * keys + 2 * values)
    ba = b.linear("linear_attn.in_proj_ba", x, 2 * shape.value_heads)
    mixed = mixers.gated_delta(
        b,
        "linear_attn",
        qkvz,
        ba,
        shape.hidden,
        heads=shape.value_heads,
        key_heads=shape.key_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        taps=shape.taps,
        activation=shape.activation,
    )
    b.until_here(x)
    return mixed


def _kinds(config: ConfigView, num_layers: int, num_experts: int) -> list[str]:
    """Each layer's mixer and feed-forward, as "linear sparse"."""
    every = config.size("full_attention_interval", 4)
    mixing = config.layer_types(num_layers, ("linear_attention", "full_attention")) or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)
    ]
    step, dense = config.size("decoder_sparse_step", 1), config.indices("mlp_only_layers")
    sparse = [layer not in dense and num_experts > 0 and (layer + 1) % step == 0 for layer in range(num_layers)]
    return [f"{kind} {'sparse' if one else 'dense'}" for kind, one in zip(mixing, sparse, strict=True)]


def build(config: ConfigView, architecture: str) -> Description:
    """A Qwen3-Next model from its config."""
    hidden, heads = config.size("hidden_size", 2048), config.size("num_attention_heads", 16)
    head_dim = config.size("head_dim", 256)
    activation = activation_name(config, "hidden_act", "silu")
    shape = Mixers(
        hidden=hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", 2),
        head_dim=head_dim,
        rotary_dim=int(head_dim * config.rotary_share("partial_rotary_factor", 0.25)),
        bias=config.flag("attention_bias", False),
        dropout=config.probability("attention_dropout", 0.0),
        value_heads=config.size("linear_num_value_heads", 32),
        key_heads=config.size("linear_num_key_heads", 16),
        key_dim=config.size("linear_key_head_dim", 128),
        value_dim=config.size("linear_value_head_dim", 128),
        taps=config.size("linear_conv_kernel_dim", 4),
        activation=activation,
    )
    check_heads(config, heads, shape.kv_heads)
    if shape.value_heads % shape.key_heads:
        raise InputError(
            f"{config.name}: linear_num_value_heads {shape.value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.key_heads}"
        )
    experts = Experts(
        num_experts=config.count("num_experts", 512),
        top_k=config.size("num_experts_per_tok", 10),
        ffn=config.size("moe_intermediate_size", 512),
        activation=activation,
        normalised=config.flag("norm_topk_prob", True),
        fp32_scores=False,
        router_loss=config.flag("output_router_logits", False),
    )
    shared = config.size("shared_expert_intermediate_size", 512)
    ffn, vocab = config.size("intermediate_size", 5632), config.size("vocab_size", 151_936)
    config.ignore("router_aux_loss_coef")
    num_layers = config.layers("num_hidden_layers")
    kinds = _kinds(config, num_layers, experts.num_experts)
    if any(kind.endswith("sparse") for kind in kinds):
        check_top_k(config, experts.top_k, experts.num_experts)

    def layer(kind: str) -> Block:
        b = BlockBuilder("decoder layer", hidden)
        normed = b.rms_norm("input_layernorm", b.input, offset=True)
        mixed = (_attention if kind.startswith("full") else _delta)(b, normed, shape)
        x = b.add(b.input, mixed)
        normed = b.rms_norm("post_attention_layernorm", x, offset=True)
        if kind.endswith("dense"):
            down = gated_mlp(b, normed, ffn, activation)
        else:
            common = gated_mlp(b, normed, shared, activation, name="mlp.shared_expert")
            routed = sparse_mlp(b, normed, experts)
            gate = b.linear("mlp.shared_expert_gate", normed, 1, split="none")
            down = b.add(routed, expert_gate(b, common, gate))
            b.until_here(routed, common)
        b.until_here(normed)
        return b.done(b.add(x, down))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x, offset=True),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
    )
    return with_active(
        Description(
            segments=(token_embedding(EMBEDDING, vocab, hidden), *layer_segments(config, kinds, layer), head),
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=shape.kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_positions=config.size("max_position_embeddings", 32_768),
            rotary_dim=shape.rotary_dim,
            chunk=mixers.DELTA_CHUNK,
            loss=loss,
        )
    )
