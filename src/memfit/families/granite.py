"""Granite (dense): Llama whose embeddings, residual branches and logits are multiplied by numbers.

Each product is a tensor of its own, even where the number is 1; the scores' multiplier takes the place of 1 / sqrt(d).
Source: transformers 5, models/granite/modeling_granite.py and configuration_granite.py.
"""

from __future__ import annotations

from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    decoder_sizes,
    gated_mlp,
    language_head,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment


def build(config: ConfigView, architecture: str) -> Description:
    """A Granite model from its config."""
    hidden, heads, kv_heads, head_dim, ffn, vocab = decoder_sizes(config)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    dropout = config.probability("attention_dropout", 0.0)
    activation = activation_name(config, "hidden_act", "silu")
    for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):
        config.has(key)  # any number takes the same memory

    b = BlockBuilder("decoder layer", hidden)
    x = b.rms_norm("input_layernorm", b.input)
    q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
    q, k = b.rotary(q, k, head_dim=head_dim)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=dropout)
    attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
    b.until_here(x, q, k, v)
    x = b.add(b.input, b.scale(attended))
    b.until_here(attended)
    normed = b.rms_norm("post_attention_layernorm", x)
    down = gated_mlp(b, normed, ffn, activation, bias=mlp_bias)
    b.until_here(normed)
    out = b.add(x, b.scale(down))
    b.until_here(down)
    layer = b.done(out)

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
        scaled=True,
    )
    num_layers = config.layers("num_hidden_layers")
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden, scaled=True), Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=head_dim,
        loss=loss,
    )
