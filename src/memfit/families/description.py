"""What a family returns: the parts of a `Model` that follow from the config's dimensions."""

from __future__ import annotations

from memfit.model import Segment
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
    rotary_dim: int | None = None
    buffer_bytes: int = 0
    loss: str | None = "causal-lm"
    published_dtype: str = "bf16"
    """Format of the family's checkpoints whose config names none: those older than the key are fp32."""
    attention_kernels: tuple[str, ...] = ("flash", "sdpa", "eager")
