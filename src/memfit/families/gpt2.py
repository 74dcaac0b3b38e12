"""GPT-2: learned positions, LayerNorm with bias, a fused c_attn, GELU in Python (gelu_new), dropout in four places.

Source: transformers 5, models/gpt2/modeling_gpt2.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import POSITION, Block, BlockBuilder, Segment


def _embedding(vocab: int, positions: int, hidden: int, dropout: float) -> Segment:
    b = BlockBuilder("embedding", 1)
    words = b.embedding("transformer.wte", vocab, hidden)
    places = b.embedding("transformer.wpe", positions, hidden, axis=POSITION, ids="positions")
    b.provide("position embeddings", places)  # the backbone's own name for them
    x = b.add(words, places)
    return Segment((b.done(b.dropout(x, dropout)),), role="embedding")


def _layer(hidden: int, heads: int, inner: int, activation: str, attention_dropout: float, residual_dropout: float) -> Block:
    b = BlockBuilder("decoder layer", hidden)
    x = b.layer_norm("ln_1", b.input)
    q, k, v = b.split(b.linear("attn.c_attn", x, 3 * hidden, bias=True), hidden, hidden, hidden)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=heads, dropout=attention_dropout, softmax_dtype=None)
    attended = b.dropout(b.linear("attn.c_proj", context, hidden, bias=True, split="row"), residual_dropout)
    b.until_here(x, q, k, v)
    x = b.add(attended, b.input)

    normed = b.layer_norm("ln_2", x)
    inner_states = b.activation(activation, b.linear("mlp.c_fc", normed, inner, bias=True))
    mixed = b.dropout(b.linear("mlp.c_proj", inner_states, hidden, bias=True, split="row"), residual_dropout)
    b.until_here(normed)
    out = b.add(x, mixed)
    b.until_here(attended)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A GPT-2 model from its config."""
    hidden, heads, num_layers = config.size("n_embd"), config.size("n_head"), config.layers("n_layer")
    if hidden % heads:
        raise InputError(f"{config.name}: n_embd {hidden} is not a multiple of n_head {heads}")
    for key in ("add_cross_attention", "reorder_and_upcast_attn"):
        if config.flag(key, False):
            raise InputError(f"{config.name}: {key} is not supported for GPT-2")
    vocab, positions = config.size("vocab_size"), config.size("n_positions", 1024)
    inner = config.optional_size("n_inner") or 4 * hidden
    dropouts = {key: config.probability(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    layer = _layer(
        hidden,
        heads,
        inner,
        activation_name(config, "activation_function", "gelu_new"),
        dropouts["attn_pdrop"],
        dropouts["resid_pdrop"],
    )
    tied = config.flag("tie_word_embeddings", True)
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("transformer.ln_f", x),
        tied_to="transformer.wte.weight" if tied else "",
        token_upcast=False,
    )
    return Description(
        segments=(_embedding(vocab, positions, hidden, dropouts["embd_pdrop"]), Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        published_dtype="fp32",
        loss=loss,
    )
