"""What a family returns: the parts of a `Model` that follow from the config's dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.model import Segment, SharedTensor
from memfit.records import Record


class Description(Record):
    """See the fields of the same names in `memfit.model.Model`."""

    segments: tuple[Segment, ...]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    kind: str = "decoder"
    hard_position_limit: bool = False
    encoder_decoder: bool = False
    pixels: int = 0
    tokens_per_image: int | None = None
    checkpoints_layers: bool = True
    rotary_dim: int | None = None
    rotary_tables: int = 1
    rotary_fp32: bool = False
    mask: str = "usual"
    one_sequence_differs: bool = False
    shared: tuple[SharedTensor, ...] = ()
    chunk: int = 0
    facts: Mapping[str, Any] = {}
    buffer_bytes: int = 0
    buffer_elements: int = 0
    checkpointed_masks: tuple[int, ...] = ()
    loss: str | None = "causal-lm"
    published_dtype: str = "bf16"
    """Format of the family's checkpoints whose config names none: those older than the key are fp32."""
    attention_kernels: tuple[str, ...] = ("flash", "sdpa", "eager")
