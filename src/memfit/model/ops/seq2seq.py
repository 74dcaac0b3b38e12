"""Operations of encoder-decoders and of encoders beside BERT's."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import SEQUENCE, Parameter, Value


def t5_norm(b: BlockBuilder, name: str, x: Value) -> Value:
    """w x / rms(x), whose mean square alone is computed in fp32 (T5LayerNorm)."""
    return b.op("t5_norm", name, (x,), x.width, (Parameter(name + ".weight", (x.width,), "norm"),))


def plain_layer_norm(b: BlockBuilder, name: str, x: Value) -> Value:
    """LayerNorm without a bias."""
    return b.op("layer_norm", name, (x,), x.width, (Parameter(name + ".weight", (x.width,), "norm"),))


def position_bias(b: BlockBuilder, name: str, buckets: int, heads: int, axis: int) -> Value:
    """A learned number for every head and bucket of distances, looked up for every pair of positions."""
    return b.embedding(name, buckets, heads, axis=axis, ids="made", split="heads")


def zero_bias(b: BlockBuilder, q: Value, heads: int, axis: int, *, leaf: bool) -> Value:
    """Zeros of a position bias' shape; `leaf`: which require a gradient under checkpoints."""
    return b.op("zero_bias", "zeros", (q,), heads, axis=axis, leaf=leaf)


def weight_format(b: BlockBuilder, x: Value) -> Value:
    """x in the format of the next linear's weight."""
    return b.op("weight_format", "to", (x,), x.width)


def clamp_fp16(b: BlockBuilder, x: Value) -> Value:
    """Clamps against overflow where the hidden states are fp16."""
    return b.op("clamp_fp16", "clamp", (x,), x.width)


def add_buffer(b: BlockBuilder, x: Value) -> Value:
    """x plus an untrained row."""
    return b.op("add_buffer", "add", (x,), x.width)


def mean_pool(b: BlockBuilder, x: Value) -> Value:
    """The mean of each sequence's tokens."""
    return b.op("mean_pool", "mean", (x,), x.width, axis=SEQUENCE)
