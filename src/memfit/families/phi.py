"""Phi 1, 1.5 and 2: one LayerNorm a layer, attention and a plain MLP in parallel, rotary on part of each head, biases everywhere.

The parts of a head are joined by `cat`, so that q lies head by head and the attention output is copied.
Source: transformers 5, models/phi/modeling_phi.py and configuration_phi.py.
"""

from __future__ import annotations

from memfit.families.common import EMBEDDING, activation_name, attention_projections, check_heads, head_dimension, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment
from memfit.model.ops.norms import head_layer_norm


def build(config: ConfigView, architecture: str) -> Description:
    """A Phi model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    check_heads(config, heads, kv_heads)
    head_dim = head_dimension(config, hidden, heads)
    rotary_dim = int(head_dim * config.rotary_share("partial_rotary_factor", 0.5))
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    activation = activation_name(config, "hidden_act", "gelu_new")
    attention_dropout = config.probability("attention_dropout", 0.0)
    dropout = config.probability("resid_pdrop", 0.0)

    b = BlockBuilder("embedding", 1)
    x = b.dropout(b.embedding(EMBEDDING, vocab, hidden), config.probability("embd_pdrop", 0.0))
    embedding = Segment((b.done(x),), role="embedding")

    b = BlockBuilder("decoder layer", hidden)
    normed = b.layer_norm("input_layernorm", b.input)
    q, k, v = attention_projections(b, normed, heads * head_dim, kv_heads * head_dim, bias=True)
    if config.flag("qk_layernorm", False):
        q = head_layer_norm(b, "self_attn.q_layernorm", q, heads)
        k = head_layer_norm(b, "self_attn.k_layernorm", k, kv_heads)
    whole = (q, k)  # the parts that are not rotated are views of them
    q, k = b.rotary(q, k, head_dim=head_dim, rotary_dim=rotary_dim, parts_named=True)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=attention_dropout, head_major=True)
    attended = b.linear("self_attn.dense", context, hidden, bias=True, split="row")
    b.until_here(q, k, v, *whole)
    attended = b.dropout(attended, dropout)

    inner = b.activation(activation, b.linear("mlp.fc1", normed, ffn, bias=True))
    mixed = b.dropout(b.linear("mlp.fc2", inner, hidden, bias=True, split="row"), dropout)
    total = b.add(b.add(attended, mixed), b.input)
    b.until_here(normed, attended, mixed)
    layer = b.done(total)

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("model.final_layernorm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
        bias=True,
    )
    num_layers = config.layers("num_hidden_layers")
    return Description(
        segments=(embedding, Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=rotary_dim,
        loss=loss,
    )
