"""Tensor and sequence parallelism: a model as one of `tp` devices holds it."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.model import Model


def split_tensors(model: Model, tp: int, *, sequence: bool) -> Model:
    """Raises `UsageError`: not there yet."""
    raise UsageError(f"--tp {tp}: {model.family} cannot be split yet")
