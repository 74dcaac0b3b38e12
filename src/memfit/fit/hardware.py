"""Which devices of the catalogue hold a job as it is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from memfit.account.layout import layout_of
from memfit.fit.limits import EstimateFunction
from memfit.fit.verdict import allowed_bytes, job_fits
from memfit.job import Job

if TYPE_CHECKING:
    from memfit.devices import Device

MOST_DEVICES = 5
KERNEL_SLACK = 0.9
"""Judgement: another device's kernels and context change a peak by less than a tenth; smaller devices are not looked at."""


def smallest_devices(job: Job, estimate: EstimateFunction, peak_bytes: int, most: int = MOST_DEVICES) -> tuple[Device, ...]:
    """The smallest devices by usable memory whose verdict on the job is `yes`, one of them doing the whole work.

    Only GPUs: what the runtimes of memfit allocate elsewhere is not known.
    """
    found = []
    vendors = vendors_of(job)
    for device in _candidates():
        if device.vendor not in vendors:
            continue
        if allowed_bytes(device.usable_bytes, job.headroom) < peak_bytes * KERNEL_SLACK:
            continue
        there = on_device(job, device)
        if job_fits(estimate(there).peak, there) == "yes":
            found.append(device)
            if len(found) == most:
                break
    return tuple(found)


def vendors_of(job: Job) -> tuple[str, ...]:
    """Whose GPUs run the job as it is counted: bitsandbytes needs CUDA, and who asks about NVIDIA is not told to change."""
    workload = job.workload
    quantised = getattr(workload, "method", "") == "qlora" or "8bit" in getattr(workload, "optimizer", "")
    quantised = quantised or getattr(workload, "quantization", None) in ("int8", "nf4", "nf4-dq")
    asked = job.cluster.device.vendor if job.cluster else ""
    return ("nvidia",) if quantised or asked == "nvidia" else ("nvidia", "amd")


def on_device(job: Job, device: Device) -> Job:
    """The same job on one or, if it names several, as many of another device."""
    from memfit.devices import Cluster

    if job.cluster is not None:
        return job.replace(cluster=job.cluster.replace(device=device))
    count = layout_of(job).devices
    nodes = -(-count // (device.devices_per_node or count))
    return job.replace(cluster=Cluster(device=device, count=count, nodes=nodes, reading=f"{count:,} x {device.title}"))


@functools.cache
def _candidates() -> tuple[Device, ...]:
    from memfit.devices import all_devices

    gpus = (one for one in all_devices() if one.kind == "gpu")
    return tuple(sorted(gpus, key=lambda one: (one.usable_bytes, one.id)))
