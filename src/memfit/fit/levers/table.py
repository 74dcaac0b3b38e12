"""Which levers a job has, in order of cost."""

from __future__ import annotations

from memfit.account.refusals import refusal
from memfit.account.resolve import runtime_of
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
    runtime = runtime_of(job)
    applying = tuple(lever for lever in table if lever.applies(job))
    if not (runtime.only or runtime.methods):
        return applying
    spelling = dict(runtime.spelling)
    possible = [lever for lever in applying if not refusal(runtime, lever.edit(job).workload)]
    return tuple([_spelled(lever, spelling[lever.name]) if lever.name in spelling else lever for lever in possible])


def _spelled(lever: Lever, texts: tuple[str, ...]) -> Lever:
    """The lever with flags as its runtime spells them."""

    def flags(job: Job) -> tuple[str, ...]:
        values = {name: getattr(job.workload, name) for name in job.workload.field_names}
        return tuple([text.format(**values) for text in texts])

    return lever.replace(flags=flags)
