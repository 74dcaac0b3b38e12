"""What runtimes do differently when they split tensors."""

from __future__ import annotations

from typing import NamedTuple


class Habits(NamedTuple):
    """One runtime's way; the defaults are what most do."""

    vocabulary_multiple: int = 1
    """Rows of embedding and head on each device are a multiple of it (Megatron: 128)."""
    whole_embedding: bool = False
    """The embedding is on every device, unless the head shares it."""
    whole_experts: bool = False
    """Experts are spread as expert parallelism does it, none is split."""


USUAL = Habits()
