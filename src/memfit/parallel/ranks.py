"""The distinct ranks of a job: which part of the model each holds, and how many are like it."""

from __future__ import annotations

from typing import NamedTuple

from memfit.model import Model
from memfit.model.remember import of_model
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


class Degrees(NamedTuple):
    """Into how many parts a model is cut, and how."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    ep: int = 1
    habits: Habits = USUAL
    """How the runtime splits tensors."""
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batches: int | None = None
    """Those of a step; `None` for as many as fill the pipeline."""
    split: str = "weighted"
    """How the layers are given to stages (`stages.layers_of_stages`)."""


@of_model(64)
def rank_models(model: Model, degrees: Degrees) -> tuple[RankModel, ...]:
    """The distinct ranks, in order of their stages.

    Raises:
        UsageError: a degree that the model does not allow, with the nearest ones that it does.
    """
    part = _within_layers(model, degrees._replace(pp=1, schedule="1f1b", virtual_stages=1, micro_batches=None))
    if degrees.pp > 1:
        from memfit.parallel.stages import stages

        return stages(
            part,
            degrees.pp,
            schedule=degrees.schedule,
            virtual_stages=degrees.virtual_stages,
            micro_batches=degrees.micro_batches,
            split=degrees.split,
        )
    return (RankModel("0", part),)


@of_model(64)
def _within_layers(model: Model, degrees: Degrees) -> Model:
    """Every layer cut by tensor and expert parallelism; the same for however many stages follow."""
    if degrees.tp > 1:
        from memfit.parallel.tensor import split_tensors

        model = split_tensors(model, degrees.tp, sequence=degrees.sp, habits=degrees.habits)
    if degrees.ep > 1:
        from memfit.parallel.experts import split_experts

        model = split_experts(model, degrees.ep, shared_tokens=degrees.habits.whole_experts and degrees.tp > 1)
    return model
