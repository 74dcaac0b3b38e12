"""Operations that single decoder families write in Python: Falcon's linear, BLOOM's GELU, GPT-J's rotary, ALiBi attention."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import Parameter, Value


def product(b: BlockBuilder, name: str, x: Value, out: int, *, bias: bool = False, split: str = "column") -> Value:
    """x @ W.T, then + b: Falcon's linear, whose weight is transposed before autocast sees it."""
    parameters = [Parameter(name + ".weight", (out, x.width), "linear", split)]
    if bias:
        parameters.append(Parameter(name + ".bias", (out,), "bias", split if split == "column" else "none"))
    return b.op("product", name, (x,), out, tuple(parameters))


def norm(b: BlockBuilder, name: str, x: Value, *, weight: bool = True, bias: bool = True) -> Value:
    """LayerNorm without bias, or without any parameter."""
    names = [part for part, there in (("weight", weight), ("bias", bias)) if there]
    return b.op("layer_norm", name, (x,), x.width, tuple([Parameter(f"{name}.{part}", (x.width,), "norm") for part in names]))


def bloom_gelu(b: BlockBuilder, x: Value) -> Value:
    """GELU by tanh as an autograd function of its own, which keeps its input alone."""
    return b.op("bloom_gelu", "gelu", (x,), x.width)


def in_place_add(b: BlockBuilder, a: Value, other: Value) -> Value:
    """a += other"""
    return b.op("in_place_add", "add", (a, other), a.width)


def indexed(b: BlockBuilder, x: Value, width: int) -> Value:
    """A part of every token by an index list, which copies it."""
    return b.op("indexed", "index", (x,), width)


def clamp(b: BlockBuilder, x: Value) -> Value:
    """Between two bounds: keeps its input."""
    return b.op("clamp", "clamp", (x,), x.width)


def interleaved_rotary(b: BlockBuilder, x: Value, *, head_dim: int, rotary_dim: int) -> Value:
    """GPT-J's rotary of every two elements: sin and cos are made anew for q and for k in each layer."""
    return b.op("interleaved_rotary", "rotary", (x,), x.width, head_dim=head_dim, rotary_dim=rotary_dim)


def attention(
    b: BlockBuilder,
    kind: str,
    q: Value,
    k: Value,
    v: Value,
    *,
    num_heads: int,
    num_kv_heads: int,
    dropout: float = 0.0,
    alibi: bool = False,
) -> Value:
    """A family's own attention module, which caches k and v as it is given them."""
    b.cache(q, k, v)
    return b.op(
        kind,
        "attention",
        (q, k, v),
        q.width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=True,
        window=None,
        softcap=False,
        dropout=dropout,
        head_major=False,
        softmax_dtype="fp32",
        alibi=alibi,
        cached=True,
    )


def expanded(b: BlockBuilder, x: Value, width: int) -> Value:
    """Heads broadcast to their groups and flattened: written out."""
    return b.op("expanded", "expand", (x,), width)
