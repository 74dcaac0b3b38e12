"""Gemma 1: Llama with RMSNorm as 1 + w in fp32, scaled embeddings, a head dimension of its own and a tied head.

Source: transformers 5, models/gemma/modeling_gemma.py and configuration_gemma.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    check_heads,
    gated_mlp,
    language_head,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment


def causal_only(config: ConfigView) -> None:
    """Refuse bidirectional attention, which gets masks that causal attention does not need."""
    if config.flag("use_bidirectional_attention", False):
        raise InputError(f"{config.name}: use_bidirectional_attention is not supported for {config.text('model_type', '')}")


def build(config: ConfigView, architecture: str) -> Description:
    """A Gemma model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", 16)
    check_heads(config, heads, kv_heads)
    head_dim = config.size("head_dim", 256)
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    config.text("hidden_activation", "")  # of later configs; the class reads hidden_act
    activation = activation_name(config, "hidden_act", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    causal_only(config)

    b = BlockBuilder("decoder layer", hidden)
    x = b.rms_norm("input_layernorm", b.input, offset=True)
    q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
    q, k = b.rotary(q, k, head_dim=head_dim)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=config.probability("attention_dropout", 0.0))
    attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
    b.until_here(x, q, k, v)
    x = b.add(b.input, attended)
    normed = b.rms_norm("post_attention_layernorm", x, offset=True)
    down = gated_mlp(b, normed, ffn, activation)
    b.until_here(normed)
    layer = b.done(b.add(x, down))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x, offset=True),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", True) else "",
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
        max_positions=config.size("max_position_embeddings", 8192),
        rotary_dim=head_dim,
        loss=loss,
    )
