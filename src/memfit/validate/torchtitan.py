"""torchtitan's published benchmarks: reserved memory, the largest of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import account
from memfit.devices import parse_cluster
from memfit.job import Job, Overheads, Parallelism, Training
from memfit.units import GiB
from memfit.validate import corpus
from memfit.validate.report import Row, half_digit

ABOUT = (
    "Llama 3.1 on H100 96GB and H200 under torchtitan, the largest reserved memory of all ranks. What the tables leave open is "
    "taken from the repository at their commit: as many micro-batches as pipeline stages, two model chunks under the interleaved "
    "schedule, the loss of December 2024 not compiled. Float8 linear layers are counted in bf16."
)
RELEASES = {"torchtitan 2024-12": "torchtitan@0.0.2", "torchtitan e7c0cae": "torchtitan@0.1"}
CHUNKS = 2


def job_of(row: Mapping[str, Any]) -> Job:
    """The question that a row answers."""
    stages, framework = row["pp"], row["framework"]
    interleaved = "Interleaved" in framework
    workload = Training(
        batch=max(1, row["micro_batch"] // stages),
        seq=row["seq_len"],
        grad_accum=stages,
        precision="bf16-mixed",
        checkpointing=row["activation_checkpointing"].split()[0],
        kernels="compile" if "compile" in framework else None,
    )
    layout = Parallelism(
        fsdp=True,
        tp=row["tp"],
        pp=stages,
        cp=row["cp"],
        schedule="interleaved" if interleaved else "1f1b",
        virtual_stages=CHUNKS if interleaved else 1,
    )
    device = "h200" if "H200" in row["device"] else "h100"
    return Job(
        model=corpus.model_of(row["config"]),
        workload=workload,
        overheads=Overheads(runtime=RELEASES[framework.split(";")[0].split(",")[0]], cuda_context=0, communication=0),
        cluster=parse_cluster(f"{row['n_devices']}x{device}"),
        parallelism=layout,
        headroom=0.0,
    )


def rows(found: list[dict[str, Any]]) -> list[Row]:
    """Comparisons of reserved memory."""
    made = []
    for row in found:
        peak = account.estimate(account.resolve(job_of(row)).job).peak
        measured = round(float(row["value"]) * GiB)
        made.append(
            Row(
                id=row["id"],
                measured=measured,
                predicted=peak.reserved_bytes,
                relative_to=measured,
                low=peak.low_bytes,
                high=peak.high_bytes,
                rounding=half_digit(row["value"], GiB),
                source=row["source"],
            )
        )
    return made
