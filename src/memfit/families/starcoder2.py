"""StarCoder2: grouped heads, rotary, LayerNorm with bias, a plain MLP with biases, a sliding window, dropout in four places.

Source: transformers 5, models/starcoder2/modeling_starcoder2.py and configuration_starcoder2.py.
"""

from __future__ import annotations

from memfit.families.common import EMBEDDING, activation_name, attention_projections, check_heads, head_dimension, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment


def build(config: ConfigView, architecture: str) -> Description:
    """A StarCoder2 model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", 2)
    check_heads(config, heads, kv_heads)
    head_dim = head_dimension(config, hidden, heads)
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    window = config.optional_size("sliding_window")
    bias = config.flag("use_bias", True)
    activation = activation_name(config, "hidden_act", "gelu_pytorch_tanh")
    attention_dropout = config.probability("attention_dropout", 0.0)
    dropout = config.probability("residual_dropout", 0.0)
    config.has("norm_epsilon")  # a constant of the norm

    b = BlockBuilder("embedding", 1)
    x = b.dropout(b.embedding(EMBEDDING, vocab, hidden), config.probability("embedding_dropout", 0.0))
    embedding = Segment((b.done(x),), role="embedding")

    b = BlockBuilder("decoder layer", hidden)
    x = b.layer_norm("input_layernorm", b.input)
    q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
    q, k = b.rotary(q, k, head_dim=head_dim)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, window=window, dropout=attention_dropout)
    attended = b.dropout(b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row"), dropout)
    b.until_here(x, q, k, v)
    x = b.add(b.input, attended)
    normed = b.layer_norm("post_attention_layernorm", x)
    inner = b.linear("mlp.c_fc", normed, ffn, bias=bias)
    mixed = b.dropout(b.linear("mlp.c_proj", b.activation(activation, inner), hidden, bias=bias, split="row"), dropout)
    b.until_here(normed)
    layer = b.done(b.add(x, mixed))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", True) else "",
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
        max_positions=config.size("max_position_embeddings", 4096),
        rotary_dim=head_dim,
        loss=loss,
    )
