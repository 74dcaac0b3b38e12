"""Which levers a job has, in order of cost."""

from __future__ import annotations

from memfit.fit.levers.inference import INFERENCE_LEVERS
from memfit.fit.levers.lever import Lever
from memfit.fit.levers.training import TRAINING_LEVERS
from memfit.job import Inference, Job

LEVERS: dict[str, tuple[Lever, ...]] = {
    "train": TRAINING_LEVERS,
    "finetune": TRAINING_LEVERS,
    "infer": INFERENCE_LEVERS,
}
"""By kind of workload; cheapest first: what costs nothing, then throughput, then quality or function."""


def levers_for(job: Job) -> tuple[Lever, ...]:
    """The levers that apply to a job, cheapest first."""
    table = LEVERS["infer" if isinstance(job.workload, Inference) else "train"]
    return tuple(lever for lever in table if lever.applies(job))
