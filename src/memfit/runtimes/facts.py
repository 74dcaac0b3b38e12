"""What is known of a runtime; every runtime's file fills one record."""

from __future__ import annotations

from typing import NamedTuple


class Runtime(NamedTuple):
    """Habits that decide memory. Versions are those whose behaviour the facts describe."""

    name: str
    version: str
    description: str
    outputs: str
    """kept | dropped: whether the loop still holds the model's outputs during backward."""
    adamw: str
    """Which implementation `adamw` means."""
    source: str
    full_embedding_states: bool = False
    """Block-wise optimizers keep 32-bit states for embeddings."""
