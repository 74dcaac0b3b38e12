"""OPT: learned positions (two rows more than positions), biases, ReLU, LayerNorm before or after, embeddings of another width.

Source: transformers 5, models/opt/modeling_opt.py and configuration_opt.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import TOKEN, Block, BlockBuilder, Segment, SharedTensor, Value
from memfit.model.ops.decoders import norm

OFFSET = 2
"""Rows of the position table before the first position (OPTLearnedPositionalEmbedding)."""


def _layer(config: ConfigView, hidden: int, heads: int, affine: bool) -> Block:
    bias, before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    dropout, attention_dropout = config.probability("dropout", 0.1), config.probability("attention_dropout", 0.0)
    ffn, activation = config.size("ffn_dim", 3072), activation_name(config, "activation_function", "relu")

    b = BlockBuilder("decoder layer", hidden)
    x = norm(b, "self_attn_layer_norm", b.input, weight=affine, bias=affine) if before else b.input
    q = b.scale(b.linear("self_attn.q_proj", x, hidden, bias=bias))
    k = b.linear("self_attn.k_proj", x, hidden, bias=bias)
    v = b.linear("self_attn.v_proj", x, hidden, bias=bias)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=heads, dropout=attention_dropout)
    attended = b.linear("self_attn.out_proj", context, hidden, bias=bias, split="row")
    b.until_here(x, q, k, v)
    x = b.add(b.input, b.dropout(attended, dropout))
    if not before:
        x = norm(b, "self_attn_layer_norm", x, weight=affine, bias=affine)
    inner = norm(b, "final_layer_norm", x, weight=affine, bias=affine) if before else x
    inner = b.activation(activation, b.linear("fc1", inner, ffn, bias=bias))
    out = b.add(x, b.dropout(b.linear("fc2", inner, hidden, bias=bias, split="row"), dropout))
    return b.done(out if before else norm(b, "final_layer_norm", out, weight=affine, bias=affine))


def build(config: ConfigView, architecture: str) -> Description:
    """An OPT model from its config."""
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    vocab, positions = config.size("vocab_size", 50272), config.size("max_position_embeddings", 2048)
    width = config.optional_size("word_embed_proj_dim") or hidden
    affine = config.flag("layer_norm_elementwise_affine", True)
    removed = config.flag("_remove_final_layer_norm", False)
    last_norm = config.flag("do_layer_norm_before", True) and not removed
    config.probability("layerdrop", 0.0)  # skips whole layers at random: the largest step skips none
    config.ignore("init_std")

    words = "model.decoder.embed_tokens"
    b = BlockBuilder("embedding", 1)
    x = b.embedding(words, vocab, width)
    places = b.embedding("model.decoder.embed_positions", positions + OFFSET, hidden, axis=TOKEN, ids="made")
    b.provide("position embeddings", places)  # the backbone's own name for them
    if width != hidden:
        x = b.linear("model.decoder.project_in", x, hidden)
    embedding = Segment((b.done(b.add(x, places)),), role="embedding")

    def end(b: BlockBuilder, x: Value) -> Value:
        if last_norm:
            x = norm(b, "model.decoder.final_layer_norm", x, weight=affine, bias=affine)
        return x if width == hidden else b.linear("model.decoder.project_out", x, width)

    tied = config.flag("tie_word_embeddings", True)
    head, loss = language_head(config, architecture, hidden, vocab, norm=end, tied_to=words + ".weight" if tied else "")
    num_layers = config.layers("num_hidden_layers")
    return Description(
        segments=(embedding, Segment((_layer(config, hidden, heads, affine),), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        shared=(SharedTensor(TOKEN, 1, "int64"), SharedTensor(TOKEN, 1, "fp32")),  # position ids and the mask they come from
        loss=loss,
    )
