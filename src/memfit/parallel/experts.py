"""Expert parallelism: a model as one of `ep` devices holds it."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.model import Model


def split_experts(model: Model, ep: int) -> Model:
    """Raises `UsageError`: not there yet."""
    raise UsageError(f"--ep {ep}: {model.family} cannot be split yet")
