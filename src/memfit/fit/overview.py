"""The overview: which ways of using a model fit on which hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memfit.account.estimate import Peak
from memfit.errors import MemfitError
from memfit.fit.command import command_line
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


def _up_to(positions: int | None, length: int) -> int:
    return length if positions is None else min(length, positions)


def _infer(quantization: str) -> Callable[[Model], Workload]:
    def workload(model: Model) -> Workload:
        half = model.dtype if model.dtype in ("bf16", "fp16") else "bf16"
        context = None if model.pixels else _up_to(model.max_positions, CONTEXT)
        return Inference(context=context, weight_dtype=half, quantization=quantization)

    return workload


def _finetune(method: str) -> Callable[[Model], Workload]:
    def workload(model: Model) -> Workload:
        length = None if model.pixels else _up_to(model.max_positions, SEQUENCE)
        return FineTuning(method=method, seq=length, batch=1, checkpointing="full", precision="bf16-true")

    return workload


WAYS: tuple[tuple[str, Callable[[Model], Workload]], ...] = (
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
    resolve: Callable[[Job], Job],
    estimate: EstimateFunction,
) -> Overview:
    """Every way of using the model on every cluster. A way that the model does not have is a row with its reason."""
    rows = []
    for name, workload in WAYS:
        asked = Job(model=model, workload=workload(model), overheads=overheads, headroom=headroom)
        rows.append(_row(name, asked, clusters, resolve, estimate))
    return Overview(model=model, clusters=tuple(clusters), ways=tuple(rows), headroom=headroom)


def _row(name: str, asked: Job, clusters: Sequence[Cluster], resolve: Callable[[Job], Job], estimate: EstimateFunction) -> Way:
    command, note = command_line(asked), _note(asked.workload)
    try:
        jobs = [resolve(asked.replace(cluster=cluster)) for cluster in clusters]
        peaks = [estimate(job).peak for job in jobs]
    except MemfitError as error:
        return Way(name=name, note=note, command=command, peak_bytes=None, why_not=str(error), cells=())
    cells = tuple(_cell(peak, job) for peak, job in zip(peaks, jobs, strict=True))
    return Way(name=name, note=note, command=command, peak_bytes=cells[0].peak_bytes if cells else None, why_not="", cells=cells)


def _cell(peak: Peak, job: Job) -> Cell:
    return Cell(fits=job_fits(peak, job) or "no", peak_bytes=peak.device_bytes, phase=peak.phase)


def _note(workload: Workload) -> str:
    if isinstance(workload, Inference):
        length = "" if workload.context is None else f"context {workload.context:,}, "
        return f"{length}{workload.concurrency} {'sequence' if length else 'image'}"
    length = "" if workload.seq is None else f"sequence {workload.seq:,}, "
    return f"batch {workload.batch}, {length}checkpointing {workload.checkpointing}"
