"""Phi-3, 3.5 and Phi-4-mini: Llama with fused qkv and gate_up, dropout after both halves, a window in every layer if it has one.

The rotary joins its parts by `cat`, so that q lies head by head and the attention output is copied.
Source: transformers 5, models/phi3/modeling_phi3.py and configuration_phi3.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import EMBEDDING, activation_name, check_heads, head_dimension, language_head, token_embedding
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment
from memfit.model.ops.norms import slices


def build(config: ConfigView, architecture: str) -> Description:
    """A Phi-3 model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    check_heads(config, heads, kv_heads)
    head_dim = head_dimension(config, hidden, heads)
    rotary_dim = int(head_dim * config.rotary_share("partial_rotary_factor", 1.0))
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    window = config.optional_size("sliding_window")
    activation = activation_name(config, "hidden_act", "silu")
    attention_dropout = config.probability("attention_dropout", 0.0)
    dropout = config.probability("resid_pdrop", 0.0)
    # read by no class of transformers 5: the embedding has no dropout, and there is one long-context switch
    config.probability("embd_pdrop", 0.0)
    for key in ("original_max_position_embeddings", "full_attn_mod", "interpolate_factor"):
        config.has(key)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if config.flag(key, False):
            raise InputError(f"{config.name}: {key} is not supported for Phi-3, whose class has no biases")

    b = BlockBuilder("decoder layer", hidden)
    x = b.rms_norm("input_layernorm", b.input)
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    qkv = b.linear("self_attn.qkv_proj", x, q_width + 2 * kv_width)
    q, k, v = slices(b, qkv, q_width, kv_width, kv_width)
    q, k = b.rotary(q, k, head_dim=head_dim, rotary_dim=rotary_dim)
    context = b.attention(
        q, k, v, num_heads=heads, num_kv_heads=kv_heads, window=window, dropout=attention_dropout, head_major=True
    )
    attended = b.linear("self_attn.o_proj", context, hidden, split="row")
    b.until_here(x, q, k, v)
    x = b.add(b.input, b.dropout(attended, dropout))
    b.until_here(attended)

    normed = b.rms_norm("post_attention_layernorm", x)
    gate, up = b.split(b.linear("mlp.gate_up_proj", normed, 2 * ffn), ffn, ffn)
    down = b.linear("mlp.down_proj", b.multiply(up, b.activation(activation, gate)), hidden, split="row")
    b.until_here(normed, gate)
    out = b.add(x, b.dropout(down, dropout))
    b.until_here(down)
    layer = b.done(out)

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
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
        max_positions=config.size("max_position_embeddings", 4096),
        rotary_dim=rotary_dim,
        loss=loss,
    )
