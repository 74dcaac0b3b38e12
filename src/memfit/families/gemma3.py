"""Gemma 3 text: Gemma 2's four norms, norms of q and k in place of soft-capped scores, five sliding layers to one full layer.

Sliding and full layers have rotary tables of their own. `attn_logit_softcapping` is read by the class but never applied.
Source: transformers 5, models/gemma3/modeling_gemma3.py and configuration_gemma3.py.
"""

from __future__ import annotations

from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    check_heads,
    gated_mlp,
    language_head,
    layer_segments,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.gemma import causal_only
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder

DEFAULT_VOCABULARY = 262_208


def _layer_types(config: ConfigView, num_layers: int) -> list[str]:
    """`layer_types`, or every n-th layer full with n = `sliding_window_pattern`, 6 unless the config says otherwise."""
    pattern = config.size("sliding_window_pattern", 6)
    config.optional_size("_sliding_window_pattern")  # how transformers 5 writes what `layer_types` says already
    return config.layer_types(num_layers) or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)
    ]


def build(config: ConfigView, architecture: str) -> Description:
    """A Gemma 3 text model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", 8)
    kv_heads = config.size("num_key_value_heads", 4)
    check_heads(config, heads, kv_heads)
    head_dim = config.size("head_dim", 256)
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size", DEFAULT_VOCABULARY)
    config.text("hidden_act", "")
    activation = activation_name(config, "hidden_activation", "gelu_pytorch_tanh")
    bias = config.flag("attention_bias", False)
    dropout = config.probability("attention_dropout", 0.0)
    window = config.optional_size("sliding_window") if config.states("sliding_window") else 4096
    config.cap("attn_logit_softcapping", False)
    config.has("rope_local_base_freq")  # a constant of the sliding layers' tables
    causal_only(config)
    num_layers = config.layers("num_hidden_layers")
    types = _layer_types(config, num_layers)

    def layer(kind: str) -> Block:
        b = BlockBuilder("decoder layer", hidden)
        x = b.rms_norm("input_layernorm", b.input, offset=True)
        q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
        q = b.rms_norm("self_attn.q_norm", q, heads=heads, offset=True)
        k = b.rms_norm("self_attn.k_norm", k, heads=kv_heads, offset=True)
        q, k = b.rotary(q, k, head_dim=head_dim)
        context = b.attention(
            q,
            k,
            v,
            num_heads=heads,
            num_kv_heads=kv_heads,
            dropout=dropout,
            window=window if kind == "sliding_attention" else None,
        )
        attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
        b.until_here(x, q, k, v)
        x = b.add(b.input, b.rms_norm("post_attention_layernorm", attended, offset=True))

        normed = b.rms_norm("pre_feedforward_layernorm", x, offset=True)
        down = gated_mlp(b, normed, ffn, activation)
        b.until_here(normed)
        return b.done(b.add(x, b.rms_norm("post_feedforward_layernorm", down, offset=True)))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x, offset=True),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", True) else "",
        softcap=config.cap("final_logit_softcapping", False),
    )
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden, scaled=True), *layer_segments(config, types, layer), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 131_072),
        rotary_dim=head_dim,
        rotary_tables=len(set(types)),
        loss=loss,
    )
