"""Pipeline stages: a model as each stage holds it."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.model import Model
from memfit.parallel.ranks import RankModel


def stages(model: Model, pp: int, *, schedule: str, virtual_stages: int, micro_batches: int | None) -> tuple[RankModel, ...]:
    """Raises `UsageError`: not there yet."""
    raise UsageError(f"--pp {pp}: {model.family} cannot be split yet")
