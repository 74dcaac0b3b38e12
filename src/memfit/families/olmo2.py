"""OLMo 2: norms after attention and after the MLP in place of before, norms over all of q and all of k, weights applied in fp32.

The rotary tables stay in fp32, so that rotated q and k are made in fp32 and cast back.
Source: transformers 5, models/olmo2/modeling_olmo2.py and configuration_olmo2.py.
"""

from __future__ import annotations

from memfit.families.common import (
    EMBEDDING,
    activation_name,
    decoder_sizes,
    gated_mlp,
    language_head,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment
from memfit.model.ops.norms import rms_norm_fp32


def build(config: ConfigView, architecture: str) -> Description:
    """An OLMo 2 model from its config."""
    hidden, heads, kv_heads, head_dim, ffn, vocab = decoder_sizes(config)
    bias = config.flag("attention_bias", False)
    dropout = config.probability("attention_dropout", 0.0)
    activation = activation_name(config, "hidden_act", "silu")

    b = BlockBuilder("decoder layer", hidden)
    q = rms_norm_fp32(b, "self_attn.q_norm", b.linear("self_attn.q_proj", b.input, heads * head_dim, bias=bias))
    k = rms_norm_fp32(b, "self_attn.k_norm", b.linear("self_attn.k_proj", b.input, kv_heads * head_dim, bias=bias))
    v = b.linear("self_attn.v_proj", b.input, kv_heads * head_dim, bias=bias)
    q, k = b.rotary(q, k, head_dim=head_dim, fp32_tables=True, cast_back=True)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=dropout)
    attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
    b.until_here(q, k, v)
    x = b.add(b.input, rms_norm_fp32(b, "post_attention_layernorm", attended))
    layer = b.done(b.add(x, rms_norm_fp32(b, "post_feedforward_layernorm", gated_mlp(b, x, ffn, activation))))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: rms_norm_fp32(b, "model.norm", x),
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
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=head_dim,
        rotary_fp32=True,
        loss=loss,
    )
