"""The distinct ranks of a job, each as a job about the part of the model that it holds."""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.layout import Layout, layout_of
from memfit.job import ALL_OPEN, Inference, Job, Training
from memfit.parallel import ALONE, Degrees, InFlight, rank_models
from memfit.parallel.habits import Habits
from memfit.runtimes import DEFAULT_RUNTIME, find_runtime
from memfit.runtimes.pipelines import PIPELINES


class RankJob(NamedTuple):
    """Ranks with equal memory: the job with the model that each of them holds."""

    name: str
    devices: int
    job: Job
    in_flight: InFlight = ALONE
    """What it holds for backward at the same time, in a pipeline."""


def rank_jobs(job: Job) -> tuple[RankJob, ...]:
    """The distinct ranks of a resolved job. One device, and replicas of it, are one rank.

    Raises:
        UsageError: degrees that the model does not allow.
    """
    layout = layout_of(job)
    devices = job.cluster.count if job.cluster else layout.devices
    if layout.tp == layout.pp == layout.ep == 1:
        return (RankJob("0", devices, job),)
    workload = job.workload
    micro_batches = workload.grad_accum if isinstance(workload, Training) and workload.grad_accum > 1 else None
    degrees = Degrees(
        tp=layout.tp,
        sp=layout.sp,
        pp=layout.pp,
        ep=layout.ep,
        habits=_habits(job, layout),
        schedule="inference" if isinstance(workload, Inference) else layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batches=micro_batches,
        split=stage_split(job),
    )
    found = rank_models(job.model, degrees)
    per_stage = devices // layout.pp
    return tuple([RankJob(one.name, one.stages * per_stage, job.replace(model=one.model), one.in_flight) for one in found])


def stage_split(job: Job) -> str:
    """How layers are given to pipeline stages: as the job says, or as its runtime does."""
    runtime = find_runtime(job.overheads.runtime) if job.overheads.runtime else DEFAULT_RUNTIME
    return job.parallelism.stage_layers or PIPELINES[runtime.pipeline].split


def _habits(job: Job, layout: Layout) -> Habits:
    """How the runtime splits tensors. Engines spread whole experts over the devices that share the other layers."""
    runtime = find_runtime(job.overheads.runtime) if job.overheads.runtime else DEFAULT_RUNTIME
    return Habits(
        vocabulary_multiple=runtime.vocabulary_multiple,
        whole_embedding=runtime.whole_embedding,
        whole_experts=isinstance(job.workload, Inference) and layout.ep > 1,
    )


def check_layout(job: Job) -> None:
    """Raises what `rank_jobs` raises."""
    rank_jobs(job)


def groups_of(job: Job) -> tuple[int, ...]:
    """Sizes of the groups of devices that a rank communicates in."""
    if job.parallelism is ALL_OPEN:
        return ()
    one = layout_of(job)
    data = one.dp_replicate * one.dp_shard * one.cp if isinstance(job.workload, Training) else 1
    split = (one.dp_replicate, one.shards) if one.zero and one.dp_replicate > 1 else (data,)
    return tuple(size for size in (one.tp, one.pp, one.cp, one.ep, *split) if size > 1)
