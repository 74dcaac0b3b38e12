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
    inference: str = "transformers models under generate()"
    """How it runs a model that is not trained."""
    full_embedding_states: bool = False
    """Block-wise optimizers keep 32-bit states for embeddings."""
    trainer: bool = False
    """Whether TrainingArguments configure it, or the user's own loop."""
    mask_without_cache: bool = False
    """sdpa gets a mask whenever the caller passes none and there is no cache object, as under checkpointing."""
    since: tuple[int, ...] = (0,)
    """The first release that behaves like this."""
