"""Multi-head latent attention: keys and values are projected up from a latent vector, which is what the cache keeps."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import Value


def interleaved_pairs(b: BlockBuilder, q: Value, k: Value) -> tuple[Value, Value]:
    """Rotary embedding of neighbouring elements by their even and odd slices."""
    return tuple([b.op("pair_rotary", "rotary", (x,), x.width) for x in (q, k)])  # type: ignore[return-value]


def halves_rotary(b: BlockBuilder, q: Value, k: Value) -> tuple[Value, Value]:
    """Rotary embedding of the two halves of each head, joined by cat (gpt-oss)."""
    return tuple([b.op("half_rotary", "rotary", (x,), x.width) for x in (q, k)])  # type: ignore[return-value]


def complex_rotary(b: BlockBuilder, q: Value, k: Value) -> tuple[Value, Value]:
    """Rotary embedding as a product of complex numbers in fp32."""
    return tuple([b.op("complex_rotary", "rotary", (x,), x.width) for x in (q, k)])  # type: ignore[return-value]


def from_cache(b: BlockBuilder, x: Value) -> Value:
    """This layer's latents of all tokens: those in the cache and the new ones."""
    return b.op("from_cache", "cache", (x,), x.width)


def join(b: BlockBuilder, *parts: Value) -> Value:
    """Parts of every head side by side in a new tensor, head by head."""
    return b.op("join", "cat", parts, sum(part.width for part in parts))


def expand(b: BlockBuilder, expanded: Value, k_rotary: Value, heads: int, k_width: int) -> tuple[Value, Value]:
    """Keys (a new tensor: the first part of every head, and the rotary part that all heads share) and values (a view)."""
    k = b.op("latent_keys", "keys", (expanded, k_rotary), k_width, heads=heads)
    return k, b.op("latent_values", "values", (expanded,), expanded.width - k_width + heads * k_rotary.width)
