"""Falcon: the old decoder (one key-value head, or all) and the new one (groups), rotary or ALiBi, parallel or in sequence.

Its linears multiply by the transposed weight; sdpa always gets a mask; keys and values of the new decoder are written out for
every query head before attention and cached so.
Source: transformers 5, models/falcon/modeling_falcon.py and configuration_falcon.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, check_heads, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import KEY_TOKEN, PAIR, POSITION, Block, BlockBuilder, Segment, SharedTensor, Value
from memfit.model.ops import decoders as ops
from memfit.records import Record

WORDS = "transformer.word_embeddings"


class _Shape(Record):
    """What its kinds differ in."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    activation: str
    new: bool
    multi_query: bool
    parallel: bool
    norms: int
    bias: bool
    alibi: bool
    dropout: float
    attention_dropout: float


def _read(config: ConfigView) -> _Shape:
    hidden = config.size("n_embed" if config.has("n_embed") else "hidden_size", 4544)
    heads = config.size("num_attention_heads" if config.has("num_attention_heads") else "n_head", 71)
    config.ignore("hidden_size", "n_head", "n_layer")
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    new = config.flag("new_decoder_architecture", False)
    kv_heads = config.size("num_kv_heads", heads)
    check_heads(config, heads, kv_heads)
    multi_query = config.flag("multi_query", True) and not new
    return _Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if new else 1 if multi_query else heads,
        ffn=config.optional_size("ffn_hidden_size") or 4 * hidden,
        activation=activation_name(config, "activation", "gelu"),
        new=new,
        multi_query=multi_query,
        parallel=config.flag("parallel_attn", True),
        norms=config.size("num_ln_in_parallel_attn", 2 if new else 1),
        bias=config.flag("bias", False),
        alibi=config.flag("alibi", False),
        dropout=config.probability("hidden_dropout", 0.0),
        attention_dropout=config.probability("attention_dropout", 0.0),
    )


def _query_key_value(b: BlockBuilder, shape: _Shape, x: Value) -> tuple[Value, tuple[Value, Value, Value]]:
    """The fused projection and its parts: views, or copies where a single head is picked by an index list."""
    head_dim = shape.hidden // shape.heads
    kv_width = shape.kv_heads * head_dim
    fused = ops.product(b, "self_attention.query_key_value", x, shape.hidden + 2 * kv_width, bias=shape.bias)
    if not shape.new and not shape.multi_query:
        q, k, v = b.split(fused, shape.hidden, shape.hidden, shape.hidden)
    else:
        (q,) = b.split(fused, shape.hidden)
        k, v = ops.indexed(b, fused, kv_width), ops.indexed(b, fused, kv_width)
        if shape.new:
            q = ops.expanded(b, q, shape.hidden)
            k, v = ops.expanded(b, k, shape.hidden), ops.expanded(b, v, shape.hidden)
    return fused, (q, k, v)


def _layer(shape: _Shape) -> Block:
    b = BlockBuilder("decoder layer", shape.hidden)
    two = shape.new and shape.norms == 2
    normed = b.layer_norm("ln_attn" if two else "input_layernorm", b.input)
    second = b.layer_norm("ln_mlp", b.input) if two else normed
    fused, (q, k, v) = _query_key_value(b, shape, normed)
    if not shape.alibi:
        q, k = b.rotary(q, k, head_dim=shape.hidden // shape.heads)
    context = ops.attention(
        b,
        "falcon_attention",
        q,
        k,
        v,
        num_heads=shape.heads,
        num_kv_heads=1 if shape.multi_query else shape.heads,
        dropout=shape.attention_dropout,
        alibi=shape.alibi,
    )
    attended = ops.product(b, "self_attention.dense", context, shape.hidden, bias=shape.bias, split="row")
    b.until_here(fused, q, k, v)
    residual = b.input
    if not shape.new and not shape.parallel:
        residual = b.add(b.input, b.dropout(attended, shape.attention_dropout))
        second = b.layer_norm("post_attention_layernorm", residual)
    inner = b.activation(shape.activation, ops.product(b, "mlp.dense_h_to_4h", second, shape.ffn, bias=shape.bias))
    mixed = ops.product(b, "mlp.dense_4h_to_h", inner, shape.hidden, bias=shape.bias, split="row")
    if shape.new or shape.parallel:
        mixed = ops.in_place_add(b, mixed, attended)
    out = b.add(residual, b.dropout(mixed, shape.dropout))
    b.until_here(normed, second, attended, mixed)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A Falcon model from its config."""
    shape = _read(config)
    if shape.new and not shape.parallel:
        raise InputError(f"{config.name}: the new decoder architecture needs parallel_attn for Falcon")
    config.flag("apply_residual_connection_post_layernorm", False)  # the class does not read it
    num_layers = config.layers("num_hidden_layers" if config.has("num_hidden_layers") else "n_layer")
    vocab, heads, hidden = config.size("vocab_size", 65024), shape.heads, shape.hidden
    b = BlockBuilder("embedding", 1)
    embedding = Segment((b.done(b.embedding(WORDS, vocab, hidden)),), role="embedding")
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("transformer.ln_f", x),
        tied_to=WORDS + ".weight" if config.flag("tie_word_embeddings", True) else "",
        token_upcast=False,
    )
    bias = (
        SharedTensor(POSITION, 2 * (hidden // heads)),  # rotary tables that no layer reads
        SharedTensor(KEY_TOKEN, heads, per_head=True),
        SharedTensor(
            PAIR, heads, saved=not shape.multi_query, kernels=("sdpa",), per_head=True
        ),  # the math path does not keep it
        SharedTensor(PAIR, heads, kernels=("eager",), per_head=True),
    )
    return Description(
        segments=(embedding, Segment((_layer(shape),), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads if shape.new else shape.kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 2048),
        rotary_dim=None if shape.alibi else hidden // heads,
        buffer_bytes=4 * (hidden // heads) if shape.alibi else 0,  # the frequencies are there all the same
        mask="own" if shape.alibi else "always",
        one_sequence_differs=shape.multi_query,
        shared=bias if shape.alibi else (),
        loss=loss,
        attention_kernels=("sdpa", "eager") if shape.alibi else ("flash", "sdpa", "eager"),
    )
