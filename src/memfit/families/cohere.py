"""Cohere (Command R, Aya 23): one LayerNorm a layer in fp32 without bias, attention and gated MLP in parallel, scaled logits.

q and k are rotated in fp32 and cast back.

Source: transformers 5, models/cohere/modeling_cohere.py and configuration_cohere.py.
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
from memfit.model.ops.norms import layer_norm_fp32


def build(config: ConfigView, architecture: str) -> Description:
    """A Cohere model from its config."""
    hidden, heads, kv_heads, head_dim, ffn, vocab = decoder_sizes(config)
    bias = config.flag("attention_bias", False)
    dropout = config.probability("attention_dropout", 0.0)
    activation = activation_name(config, "hidden_act", "silu")
    config.has("logit_scale")  # any number takes the same memory

    b = BlockBuilder("decoder layer", hidden)
    normed = layer_norm_fp32(b, "input_layernorm", b.input)
    q, k, v = attention_projections(b, normed, heads * head_dim, kv_heads * head_dim, bias=bias)
    if config.flag("use_qk_norm", False):
        q = layer_norm_fp32(b, "self_attn.q_norm", q, heads=heads)
        k = layer_norm_fp32(b, "self_attn.k_norm", k, heads=kv_heads)
    q, k = b.rotary(q, k, head_dim=head_dim, in_fp32="named", cast_back=True)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=dropout)
    attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
    b.until_here(q, k, v)
    mixed = gated_mlp(b, normed, ffn, activation)
    out = b.add(b.add(b.input, attended), mixed)
    b.until_here(normed, attended, mixed)
    layer = b.done(out)

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: layer_norm_fp32(b, "model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", True) else "",
        scaled=True,
    )
    num_layers = config.layers("num_hidden_layers")
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden), Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 8192),
        rotary_dim=head_dim,
        loss=loss,
    )
