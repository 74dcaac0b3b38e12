"""Gemma 2: four norms a layer (1 + w, in fp32), soft-capped scores and logits, layers alternating between window and full.

Source: transformers 5, models/gemma2/modeling_gemma2.py. Soft-capping rules out sdpa: eager or FlashAttention.
"""

from __future__ import annotations

from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    check_heads,
    head_dimension,
    language_head,
    layer_segments,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder


def build(config: ConfigView, architecture: str) -> Description:
    """A Gemma 2 model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", 4)
    check_heads(config, heads, kv_heads)
    head_dim = head_dimension(config, hidden, heads, 256)
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    config.text("hidden_act", "")
    activation = activation_name(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    dropout = config.probability("attention_dropout", 0.0)
    window = config.size("sliding_window", 4096)
    score_cap = config.cap("attn_logit_softcapping", True)
    logit_cap = config.cap("final_logit_softcapping", True)
    num_layers = config.layers("num_hidden_layers")
    types = config.layer_types(num_layers) or [
        "sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(num_layers)
    ]

    def layer(kind: str) -> Block:
        b = BlockBuilder("decoder layer", hidden)
        x = b.rms_norm("input_layernorm", b.input, offset=True)
        q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
        q, k = b.rotary(q, k, head_dim=head_dim)
        context = b.attention(
            q,
            k,
            v,
            num_heads=heads,
            num_kv_heads=kv_heads,
            softcap=score_cap,
            dropout=dropout,
            window=window if kind == "sliding_attention" else None,
        )
        attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
        b.until_here(x, q, k, v)
        x = b.add(b.input, b.rms_norm("post_attention_layernorm", attended, offset=True))

        normed = b.rms_norm("pre_feedforward_layernorm", x, offset=True)
        gate = b.activation(activation, b.linear("mlp.gate_proj", normed, ffn))
        down = b.linear("mlp.down_proj", b.multiply(gate, b.linear("mlp.up_proj", normed, ffn)), hidden, split="row")
        b.until_here(normed)
        return b.done(b.add(x, b.rms_norm("post_feedforward_layernorm", down, offset=True)))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x, offset=True),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", True) else "",
        softcap=logit_cap,
    )
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden, scaled=True), *layer_segments(config, types, layer), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 8192),
        rotary_dim=head_dim,
        loss=loss,
        attention_kernels=("flash", "eager") if score_cap else ("flash", "sdpa", "eager"),
    )
