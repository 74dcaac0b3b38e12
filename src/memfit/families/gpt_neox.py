"""GPT-NeoX and Pythia: fused query_key_value, rotary on part of each head, attention and MLP in parallel or in sequence.

The partial rotary joins its parts with `cat`, so that q lies head-major and the attention output is copied.
Source: transformers 5, models/gpt_neox/modeling_gpt_neox.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment

EMBEDDING = "gpt_neox.embed_in"


def _layer(config: ConfigView, hidden: int, heads: int, ffn: int, rotary_dim: int, hidden_dropout: float) -> Block:
    bias = config.flag("attention_bias", True)
    parallel = config.flag("use_parallel_residual", True)
    attention_dropout = config.probability("attention_dropout", 0.0)
    activation = activation_name(config, "hidden_act", "gelu")

    b = BlockBuilder("decoder layer", hidden)
    normed = b.layer_norm("input_layernorm", b.input)
    fused = b.linear("attention.query_key_value", normed, 3 * hidden, bias=bias)
    q, k, v = b.split(fused, hidden, hidden, hidden)
    q, k = b.rotary(q, k, head_dim=hidden // heads, rotary_dim=rotary_dim)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=heads, dropout=attention_dropout, head_major=True)
    attended = b.linear("attention.dense", context, hidden, bias=bias, split="row")
    b.until_here(normed, q, k, v)
    attended = b.dropout(attended, hidden_dropout)
    x = b.input if parallel else b.add(attended, b.input)

    normed = b.layer_norm("post_attention_layernorm", x)
    inner = b.activation(activation, b.linear("mlp.dense_h_to_4h", normed, ffn, bias=True))
    mixed = b.linear("mlp.dense_4h_to_h", inner, hidden, bias=True, split="row")
    b.until_here(normed)
    mixed = b.dropout(mixed, hidden_dropout)
    return b.done(b.add(b.add(mixed, attended), x) if parallel else b.add(mixed, x))


def build(config: ConfigView, architecture: str) -> Description:
    """A GPT-NeoX model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    rotary_dim = int(hidden // heads * config.rotary_share("rotary_pct", 0.25))
    dropout = config.probability("hidden_dropout", 0.0)
    num_layers = config.layers("num_hidden_layers")
    layer = _layer(config, hidden, heads, ffn, rotary_dim, dropout)
    b = BlockBuilder("embedding", 1)
    embedding = Segment((b.done(b.dropout(b.embedding(EMBEDDING, vocab, hidden), dropout)),), role="embedding")
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("gpt_neox.final_layer_norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
        head_name="embed_out",
    )
    return Description(
        segments=(embedding, Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=rotary_dim,
        loss=loss,
    )
