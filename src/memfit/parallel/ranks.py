"""The distinct ranks of a job: which part of the model each holds, and how many are like it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.model import Model
from memfit.parallel.habits import USUAL, Habits


class InFlight(NamedTuple):
    """What a pipeline stage holds for backward at the same time, at the most."""

    micro_batches: int = 1
    """Micro-batches in the chunk with the embedding or the head, and in all of it where there is one chunk."""
    chunks: int = 1
    """Micro-batches in its chunks of layers, added up."""
    of: int = 1
    """The chunks of layers that it has."""
    steps: int = 1
    """Micro-batches of a step."""


ALONE = InFlight()
"""No pipeline: one micro-batch after the other."""


class RankModel(NamedTuple):
    """Ranks that hold equal parts of the model."""

    name: str
    model: Model
    stages: int = 1
    """Pipeline stages that are like this one."""
    in_flight: InFlight = ALONE
    """Of the first of them, which holds the most."""


@lru_cache(maxsize=256)
def rank_models(
    model: Model,
    *,
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    ep: int = 1,
    habits: Habits = USUAL,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    micro_batches: int | None = None,
    split: str = "weighted",
) -> tuple[RankModel, ...]:
    """The distinct ranks, in order of their stages.

    `habits`: how the runtime splits tensors; `split`: how the layers are given to stages (`stages.layers_of_stages`);
    `micro_batches`: those of a step, `None` for as many as fill the pipeline.

    Raises:
        UsageError: a degree that the model does not allow, with the nearest ones that it does.
    """
    if tp > 1:
        from memfit.parallel.tensor import split_tensors

        model = split_tensors(model, tp, sequence=sp, habits=habits)
    if ep > 1:
        from memfit.parallel.experts import split_experts

        model = split_experts(model, ep, shared_tokens=habits.whole_experts and tp > 1)
    if pp > 1:
        from memfit.parallel.stages import stages

        return stages(model, pp, schedule=schedule, virtual_stages=virtual_stages, micro_batches=micro_batches, split=split)
    return (RankModel("0", model),)
