"""Attention with a learned sink for every head."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import Parameter, Value


def sink_attention(
    b: BlockBuilder,
    q: Value,
    k: Value,
    v: Value,
    *,
    num_heads: int,
    num_kv_heads: int,
    dropout: float,
    window: int | None,
    name: str = "self_attn",
) -> Value:
    """softmax(cat(q k^T / sqrt(d), sink)) without its last column, times v."""
    b.cache(q, k, v, window)
    return b.op(
        "sink_attention",
        "attention",
        (q, k, v),
        q.width,
        (Parameter(f"{name}.sinks", (num_heads,), "vector"),),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=True,
        window=window,
        dropout=dropout,
        cached=True,
    )
