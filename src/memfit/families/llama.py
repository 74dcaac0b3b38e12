"""Llama and the many models that use its class (Yi, SmolLM, TinyLlama, DeepSeek-LLM, Vicuna ...).

x = x + o(attention(rope(q), rope(k), v)); x = x + down(silu(gate(x)) * up(x)), RMSNorm before each.
Source: transformers 5, models/llama/modeling_llama.py.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    check_heads,
    gated_mlp,
    head_dimension,
    language_head,
    layer_segments,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment, Value
from memfit.records import Record


class Shape(Record):
    """The dimensions of one layer and what its kind may vary."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    activation: str
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_dropout: float = 0.0
    window: int | None = None


def read_shape(
    config: ConfigView,
    *,
    attention_bias: bool | None = None,
    output_bias: bool | None = None,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
) -> Shape:
    """The dimensions from the config; families state what their class fixes."""
    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default_kv_heads or heads)
    check_heads(config, heads, kv_heads)
    bias = config.flag("attention_bias", False) if attention_bias is None else attention_bias
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dimension(config, hidden, heads, default_head_dim),
        ffn=config.size("intermediate_size"),
        activation=activation_name(config, "hidden_act", "silu"),
        attention_bias=bias,
        output_bias=bias if output_bias is None else output_bias,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=qk_norm,
        attention_dropout=config.probability("attention_dropout", 0.0),
    )


def _dense(shape: Shape) -> Callable[[BlockBuilder, Value], Value]:
    return lambda b, x: gated_mlp(b, x, shape.ffn, shape.activation, bias=shape.mlp_bias)


def decoder_layer(shape: Shape, window: int | None = None, mlp: Callable[[BlockBuilder, Value], Value] | None = None) -> Block:
    """One layer; a window limits how far back its attention looks and what its cache keeps; `mlp` in place of the gated one."""
    b = BlockBuilder("decoder layer", shape.hidden)
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    x = b.rms_norm("input_layernorm", b.input)
    q, k, v = attention_projections(b, x, q_width, kv_width, bias=shape.attention_bias)
    if shape.qk_norm:
        q = b.rms_norm("self_attn.q_norm", q, heads=shape.heads)
        k = b.rms_norm("self_attn.k_norm", k, heads=shape.kv_heads)
    q, k = b.rotary(q, k, head_dim=shape.head_dim)
    context = b.attention(
        q, k, v, num_heads=shape.heads, num_kv_heads=shape.kv_heads, window=window, dropout=shape.attention_dropout
    )
    attended = b.linear("self_attn.o_proj", context, shape.hidden, bias=shape.output_bias, split="row")
    b.until_here(x, q, k, v)
    x = b.add(b.input, attended)

    normed = b.rms_norm("post_attention_layernorm", x)
    down = (mlp or _dense(shape))(b, normed)
    b.until_here(normed)
    return b.done(b.add(x, down))


def assemble(
    config: ConfigView,
    architecture: str,
    shape: Shape,
    windows: list[int | None],
    layers: tuple[Segment, ...] | None = None,
) -> Description:
    """Embedding, layers and head; `windows` gives each layer's sliding window; `layers` in place of Llama's own."""
    vocab = config.size("vocab_size")
    tied = config.flag("tie_word_embeddings", False)
    kinds = ["full" if window is None else f"sliding {window}" for window in windows]
    by_kind = dict(zip(kinds, windows, strict=True))
    head, loss = language_head(
        config,
        architecture,
        shape.hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if tied else "",
    )
    return Description(
        segments=(
            token_embedding(EMBEDDING, vocab, shape.hidden),
            *(layers or layer_segments(config, kinds, lambda kind: decoder_layer(shape, by_kind[kind]))),
            head,
        ),
        num_layers=len(windows),
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=shape.head_dim,
        loss=loss,
    )


def build(config: ConfigView, architecture: str) -> Description:
    """A Llama model from its config."""
    shape = read_shape(config)
    return assemble(config, architecture, shape, [None] * config.layers("num_hidden_layers"))
