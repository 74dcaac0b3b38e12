"""The overview: which ways of using a model fit on which hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memfit.account import Resolved
from memfit.account.layout import layout_of
from memfit.errors import MemfitError
from memfit.fit.answer import Warning
from memfit.fit.command import command_line
from memfit.fit.devices import enough, spread
from memfit.fit.levers.spread import layout_words
from memfit.fit.limits import EstimateFunction
from memfit.fit.verdict import job_fits
from memfit.job import FineTuning, Inference, Job, Overheads, Workload
from memfit.records import Record

if TYPE_CHECKING:
    from memfit.devices import Cluster
    from memfit.model import Model

CONTEXT = 8192
"""Tokens of one sequence when serving, where the model has as many positions: a long prompt with its answer."""
SEQUENCE = 2048
"""Tokens of one sequence when fine-tuning, where the model has as many positions: what instruction data is usually cut to."""


class Cell(Record):
    """One way of using the model on one cluster."""

    fits: str
    """yes | tight | no"""
    peak_bytes: int
    phase: str
    layout: str = ""
    """How the work is spread over several devices: `tp 8`, `dp-shard 8`."""
    devices: int | None = None
    """How many of these devices hold it: those asked where it fits, else the next power of two that does; `None`: not even the
    most that are looked at."""


class Way(Record):
    """One row: a way of using the model, the peak on the first cluster and a verdict on each."""

    name: str
    note: str
    """Its numbers in words."""
    command: str
    """The command that answers it in full, without a device."""
    peak_bytes: int | None
    """On the first cluster (other devices differ by their context and kernels); `None` where the model cannot be used so."""
    why_not: str
    """The reason, where it cannot."""
    cells: tuple[Cell, ...]


class Overview(Record):
    """A matrix: ways of using the model by clusters, in the order of `clusters`."""

    model: Model
    clusters: tuple[Cluster, ...]
    ways: tuple[Way, ...]
    headroom: float
    warnings: tuple[Warning, ...] = ()
    """What to know of the devices and of the model, each once."""


def _up_to(positions: int | None, length: int) -> int:
    return length if positions is None else min(length, positions)


def _has_bf16(cluster: Cluster | None) -> bool:
    native = cluster.device.native_dtypes if cluster else ()
    return not native or "bf16" in native


def _has_fp16(cluster: Cluster | None) -> bool:
    return cluster is None or cluster.device.kind != "tpu" or "fp16" in cluster.device.native_dtypes


MakeWorkload = Callable[["Model", "Cluster | None"], Workload]


def _infer(quantization: str) -> MakeWorkload:
    def workload(model: Model, cluster: Cluster | None) -> Workload:
        half = model.dtype if model.dtype in ("bf16", "fp16") else "bf16"
        half = half if _has_bf16(cluster) else "fp16"
        half = half if _has_fp16(cluster) else "bf16"
        context = None if model.pixels else _up_to(model.max_positions, CONTEXT)
        return Inference(context=context, weight_dtype=half, quantization=quantization)

    return workload


def _finetune(method: str) -> MakeWorkload:
    def workload(model: Model, cluster: Cluster | None) -> Workload:
        length = None if model.pixels else _up_to(model.max_positions, SEQUENCE)
        full = method == "full"
        # Gradient scaling, without which fp16 loses gradients, needs fp32 weights (torch.amp.GradScaler refuses fp16 ones).
        without = "fp16-mixed" if full else "fp16-true"
        precision = "bf16-true" if _has_bf16(cluster) else without
        optimizer = "adamw-fused" if full else "adamw"  # the same update without the copies of the foreach form
        return FineTuning(method=method, seq=length, batch=1, checkpointing="full", precision=precision, optimizer=optimizer)

    return workload


WAYS: tuple[tuple[str, MakeWorkload], ...] = (
    ("inference, 16-bit", _infer("none")),
    ("inference, 8-bit", _infer("int8")),
    ("inference, 4-bit", _infer("int4")),
    ("QLoRA", _finetune("qlora")),
    ("LoRA", _finetune("lora")),
    ("full fine-tuning", _finetune("full")),
)
"""The rows: name and workload, from least to most demanding within inference and training."""


def overview(
    model: Model,
    clusters: Sequence[Cluster],
    *,
    overheads: Overheads,
    headroom: float,
    resolve: Callable[[Job], Resolved],
    estimate: EstimateFunction,
) -> Overview:
    """Every way of using the model on every cluster. A way that the model does not have is a row with its reason."""
    rows = []
    found: dict[tuple[str, str], None] = {}

    def resolved(job: Job) -> Job:
        filled = resolve(job)
        found.update(dict.fromkeys(filled.warnings))
        return filled.job

    for name, make in WAYS:
        given = Job(model=model, workload=make(model, None), overheads=overheads, headroom=headroom)
        asked = [given.replace(workload=make(model, cluster)) for cluster in clusters]
        rows.append(_row(name, given, asked, clusters, resolved, estimate))
    warnings = tuple(Warning(code=code, text=text) for code, text in found)
    return Overview(model=model, clusters=tuple(clusters), ways=tuple(rows), headroom=headroom, warnings=warnings)


def _row(
    name: str, given: Job, asked: Sequence[Job], clusters: Sequence[Cluster], resolve: Callable[[Job], Job],
    estimate: EstimateFunction,
) -> Way:  # fmt: skip
    """One way. Its command is that of the devices where they agree on it, else `given`, which names no device."""
    same = asked[0] if asked and all(one.workload == asked[0].workload for one in asked) else given
    command, note = command_line(same), _note(same.workload)
    try:
        jobs = [resolve(job.replace(cluster=cluster)) for job, cluster in zip(asked, clusters, strict=True)]
        judged = [_judged(job, estimate) for job in jobs]
    except MemfitError as error:
        return Way(name=name, note=note, command=command, peak_bytes=None, why_not=str(error), cells=())
    if len(judged) == 1 and judged[0][0] is not jobs[0]:
        command = command_line(same, judged[0][0], resolved=jobs[0])
    cells = tuple([cell for _, cell in judged])
    return Way(name=name, note=note, command=command, peak_bytes=cells[0].peak_bytes if cells else None, why_not="", cells=cells)


def _judged(job: Job, estimate: EstimateFunction) -> tuple[Job, Cell]:
    """The verdict with the states split over the devices where replicas do not fit, and how many of them would do.

    The job is the one that was judged: as it came, or split.
    """
    assert job.cluster is not None
    peak = estimate(job).peak
    if job_fits(peak, job) != "yes" and job.cluster.count > 1:
        split = spread(job, job.cluster.count)
        smaller = None if split is None else estimate(split).peak
        if split is not None and smaller is not None and smaller.device_bytes < peak.device_bytes:
            job, peak = split, smaller
    fits = job_fits(peak, job) or "no"
    count = job.cluster.count if job.cluster else 1
    more = None if fits == "yes" else enough(job, estimate, count)
    devices = count if fits == "yes" else more.count if more else None
    layout = layout_words(layout_of(job))
    return job, Cell(fits=fits, peak_bytes=peak.device_bytes, phase=peak.phase, layout=layout, devices=devices)


def _note(workload: Workload) -> str:
    if isinstance(workload, Inference):
        length = "" if workload.context is None else f"context {workload.context:,}, "
        return f"{length}{workload.concurrency} {'sequence' if length else 'image'}"
    length = "" if workload.seq is None else f"sequence {workload.seq:,}, "
    fused = ", fused AdamW" if workload.optimizer == "adamw-fused" else ""
    return f"batch {workload.batch}, {length}checkpointing {workload.checkpointing}{fused}"
