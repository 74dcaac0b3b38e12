"""Norms beside the builder's own: products in fp32, norms of heads, without bias."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import Parameter, Value


def rms_norm_fp32(b: BlockBuilder, name: str, x: Value) -> Value:
    """(w * x32 / rms(x32)).to(dtype) over the whole width: the weight multiplies before the cast (OLMo 2)."""
    weight = Parameter(name + ".weight", (x.width,), "norm")
    return b.op("rms_norm_fp32", name, (x,), x.width, (weight,))


def layer_norm_fp32(b: BlockBuilder, name: str, x: Value, *, heads: int = 1) -> Value:
    """((x - mean) / std * w.float()).to(dtype) in Python, without bias; `heads`: over each head, with a weight of their own."""
    shape = (x.width,) if heads == 1 else (heads, x.width // heads)
    return b.op("layer_norm_fp32", name, (x,), x.width, (Parameter(name + ".weight", shape, "norm"),), heads=heads)


def head_layer_norm(b: BlockBuilder, name: str, x: Value, heads: int) -> Value:
    """nn.LayerNorm over each head, one weight and bias for all; the result lies head by head."""
    shape = (x.width // heads,)
    parameters = (Parameter(name + ".weight", shape, "norm"), Parameter(name + ".bias", shape, "norm"))
    return b.op("head_layer_norm", name, (x,), x.width, parameters, heads=heads)


def separate_head_norms(b: BlockBuilder, name: str, x: Value, heads: int) -> Value:
    """An nn.LayerNorm without bias of its own for every head: split, normalised one by one, joined (StableLM)."""
    shape = (x.width // heads,)
    parameters = tuple([Parameter(f"{name}.norms.{head}.weight", shape, "norm") for head in range(heads)])
    return b.op("separate_head_norms", name, (x,), x.width, parameters, heads=heads)


def slices(b: BlockBuilder, x: Value, *widths: int) -> tuple[Value, ...]:
    """Parts of a fused projection by indexing: views as after a split, but each one's gradient is a whole tensor of zeros."""
    parts = []
    for width in widths:
        parts.append(b.op("slice", "slice", (x,), width))
    return tuple(parts)
