"""BLOOM: ALiBi in place of positions, a LayerNorm after the embedding, a fused query_key_value, attention in its own Python.

Source: transformers 5, models/bloom/modeling_bloom.py and configuration_bloom.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import KEY_TOKEN, Block, BlockBuilder, Segment, SharedTensor
from memfit.model.ops import decoders as ops

WORDS = "transformer.word_embeddings"
NOTES = (
    "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "unk_token_id",
    "attention_softmax_in_fp32", "seq_length", "n_inner", "bias_dropout_add_fusion",
)  # fmt: skip
"""Keys of published configs that the class does not read."""


def _layer(hidden: int, heads: int, after_norm: bool, dropout: float, attention_dropout: float) -> Block:
    b = BlockBuilder("decoder layer", hidden)
    normed = b.layer_norm("input_layernorm", b.input)
    q, k, v = b.split(b.linear("self_attention.query_key_value", normed, 3 * hidden, bias=True), hidden, hidden, hidden)
    context = ops.attention(b, "bloom_attention", q, k, v, num_heads=heads, num_kv_heads=heads, dropout=attention_dropout)
    attended = b.linear("self_attention.dense", context, hidden, bias=True, split="row")
    b.until_here(q, k, v, context)
    x = b.add(normed if after_norm else b.input, b.dropout(attended, dropout))
    b.until_here(normed)
    normed = b.layer_norm("post_attention_layernorm", x)
    inner = ops.bloom_gelu(b, b.linear("mlp.dense_h_to_4h", normed, 4 * hidden, bias=True))
    mixed = b.linear("mlp.dense_4h_to_h", inner, hidden, bias=True, split="row")
    out = b.add(normed if after_norm else x, b.dropout(mixed, dropout))
    b.until_here(normed, x, inner, mixed)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A BLOOM model from its config."""
    hidden = config.size("n_embed" if config.has("n_embed") else "hidden_size", 64)
    heads = config.size("num_attention_heads" if config.has("num_attention_heads") else "n_head", 8)
    num_layers = config.layers("num_hidden_layers" if config.has("num_hidden_layers") else "n_layer")
    config.ignore("hidden_size", "n_head", "n_layer")
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of n_head {heads}")
    if config.flag("slow_but_exact", False) and config.size("pretraining_tp", 1) > 1:
        raise InputError(f"{config.name}: slow_but_exact with pretraining_tp above 1 is not supported for BLOOM")
    config.ignore(*NOTES)
    vocab = config.size("vocab_size", 250880)
    layer = _layer(
        hidden,
        heads,
        config.flag("apply_residual_connection_post_layernorm", False),
        config.probability("hidden_dropout", 0.0),
        config.probability("attention_dropout", 0.0),
    )
    b = BlockBuilder("embedding", 1)
    embedding = Segment(
        (b.done(b.layer_norm("transformer.word_embeddings_layernorm", b.embedding(WORDS, vocab, hidden))),), role="embedding"
    )
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("transformer.ln_f", x),
        tied_to=WORDS + ".weight" if config.flag("tie_word_embeddings", True) else "",
        token_upcast=False,
    )
    return Description(
        segments=(embedding, Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=None,
        shared=(SharedTensor(KEY_TOKEN, heads, per_head=True),),  # the slopes times the positions, in the hidden states' format
        loss=loss,
        attention_kernels=("eager",),
    )
