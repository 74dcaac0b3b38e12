"""How many devices of a type a job needs, spread over them in the usual way.

Training splits its states over all of them (FSDP, or the runtime's own sharding); inference shares layers within a machine
(tensor parallelism) and cuts them into stages over machines. Counts are powers of two: machines and degrees are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.account.estimate import Estimate
from memfit.account.layout import layout_of
from memfit.account.ranks import check_layout, stage_split
from memfit.errors import UsageError
from memfit.fit.answer import Recommendation
from memfit.fit.command import device_word
from memfit.fit.hardware import vendors_of
from memfit.fit.levers import Lever, levers_for
from memfit.fit.levers.spread import layout_words, with_layout
from memfit.fit.limits import EstimateFunction
from memfit.fit.verdict import cluster_text, job_fits
from memfit.job import Inference, Job
from memfit.parallel import largest_legal
from memfit.parallel.legality import pipeline_reason
from memfit.records import Record

if TYPE_CHECKING:
    from memfit.devices import Cluster, Device

CHEAP = ("fused-loss", "checkpointing")
"""Levers that leave the result as it is and that every large run takes."""
_SHARDED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and states"}

MOST_CLUSTERS = 4
"""Kinds of device that an answer without one names."""
MOST_DEVICES = 1024
"""Judgement: who needs more plans with more than one number."""
USUAL_NODE = 8
"""Devices of a machine where the catalogue does not say."""


class Spread(Record):
    """A job over enough devices."""

    job: Job
    estimate: Estimate

    @property
    def count(self) -> int:
        """Devices."""
        assert self.job.cluster is not None
        return self.job.cluster.count


def of_count(device: Device, count: int) -> Cluster:
    """So many devices of a type, in machines of the size that the catalogue gives."""
    from memfit.devices import Cluster

    nodes = -(-count // (device.devices_per_node or USUAL_NODE))
    return Cluster(device=device, count=count, nodes=nodes, reading=f"{count:,} x {device.title}")


def spread(job: Job, count: int) -> Job | None:
    """The resolved job over `count` devices of its type; `None` where the model cannot be cut so far."""
    assert job.cluster is not None
    cluster = of_count(job.cluster.device, count)
    there = job.replace(cluster=cluster)
    one = layout_of(job)
    if isinstance(job.workload, Inference):
        tp = largest_legal(job.model, count, cluster.devices_per_node)
        stages = count // tp
        reason = pipeline_reason(job.model, stages, split=stage_split(job))
        return with_layout(there, tp=tp, pp=stages) if reason is None else None
    if count % (one.tp * one.pp * one.cp) or job.workload.optimizer_in_backward:
        return None
    if count == 1:
        return there
    found = [lever for lever in levers_for(with_layout(there)) if lever.group == "sharding"]
    return found[-1].edit(with_layout(there)) if found else with_layout(there)


def enough(job: Job, estimate: EstimateFunction, more_than: int = 0) -> Spread | None:
    """The smallest power of two of devices that holds the job, spread as above; `None` if not even the most do.

    More devices never need more of each, so the exponent is bisected; a model can be cut only so far.
    """
    low, high = more_than.bit_length() - 1, MOST_DEVICES.bit_length()
    best: Spread | None = None
    while high - low > 1:
        middle = (low + high) // 2
        there = _legal(job, 1 << middle)
        if there is None:
            high = middle
            continue
        made = estimate(there)
        if job_fits(made.peak, there) == "yes":
            best, high = Spread(job=there, estimate=made), middle
        else:
            low = middle
    return best


def _legal(job: Job, count: int) -> Job | None:
    """The job over so many devices; `None` where a degree is not allowed."""
    try:
        there = spread(job, count)
        if there is not None:
            check_layout(there)
    except UsageError:
        return None
    return there


class MoreDevices(Record):
    """A number of devices that does, in words, and the job over them."""

    recommendation: Recommendation
    job: Job


def more_devices(job: Job, estimate: EstimateFunction, current: Estimate) -> tuple[MoreDevices, ...]:
    """How many devices of this type would do: for the job as it is, and with its layers recomputed where that needs fewer."""
    assert job.cluster is not None
    found = []
    cheap = [lever for lever in levers_for(job) if lever.name in CHEAP]
    fewest = 0
    for levers in ([], cheap) if cheap else ([],):
        edited = job
        for lever in levers:
            edited = lever.edit(edited)
        enough_of = enough(edited, estimate, job.cluster.count)
        if enough_of is None or (fewest and enough_of.count >= fewest):
            continue
        fewest = enough_of.count
        found.append(MoreDevices(recommendation=_recommendation(job, enough_of, levers, current), job=enough_of.job))
    return tuple(found)


def _recommendation(job: Job, found: Spread, levers: Sequence[Lever], current: Estimate) -> Recommendation:
    cluster, one = found.job.cluster, layout_of(found.job)
    assert cluster is not None
    assert job.cluster is not None
    how = layout_words(one) + (f", {_SHARDED[one.zero]} split" if one.zero else "")
    change = " + ".join([f"{cluster_text(cluster)} ({how})", *[lever.change(job, found.job) for lever in levers]])
    machines = f" in {cluster.nodes} machines" if cluster.nodes > 1 else ""
    cost = "; ".join([f"{cluster.count:,} devices{machines} instead of {job.cluster.count:,}",
                      *[lever.cost(job, found.job) for lever in levers]])  # fmt: skip
    flags = [flag for lever in levers for flag in lever.flags(found.job)]
    return Recommendation(
        change=change,
        flags=(f"--on {device_word(cluster.device.id, cluster.count)}", *_degrees(found.job), *flags),
        peak_bytes=found.estimate.peak.device_bytes,
        saves_bytes=current.peak.device_bytes - found.estimate.peak.device_bytes,
        cost=cost,
        fits="yes",
    )


def _degrees(job: Job) -> tuple[str, ...]:
    """How the command line spells a spread."""
    one = layout_of(job)
    said = [f"--{name} {value}" for name, value in (("tp", one.tp), ("pp", one.pp)) if value > 1]
    whole = one.zero == 3 and one.scheme == "fsdp2"
    return (*said, *(["--fsdp"] if whole else [f"--zero {one.zero}"] if one.zero else []))


def smallest_clusters(job: Job, estimate: EstimateFunction, most: int = MOST_CLUSTERS) -> tuple[tuple[str, int], ...]:
    """Where no single device holds a job: how many of each common GPU do, those with the least memory in total first."""
    from memfit.devices.catalogue import common_devices

    found = []
    for device in common_devices():
        if device.kind != "gpu" or device.vendor not in vendors_of(job):
            continue
        one = enough(job.replace(cluster=of_count(device, 1)), estimate, 1)
        if one is not None:
            found.append((one.count * device.usable_bytes, device.id, one.count))
    return tuple([(name, count) for _, name, count in sorted(found)[:most]])
