"""Training on several devices: traced steps under `fully_shard`, and measured runs under DeepSpeed's ZeRO.

What a row leaves open is taken from the program's own scripts, never from the measured value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import account
from memfit.account.estimate import Rank
from memfit.devices import parse_cluster
from memfit.job import Job, Overheads, Parallelism, Training
from memfit.units import GiB, MiB
from memfit.validate import corpus
from memfit.validate.report import Row, half_digit

UNITS = {"MiB": MiB, "GiB": GiB}
METRICS = {"peak_active": "allocated", "peak_reserved": "reserved"}
MODEL = "meta-llama/Meta-Llama-3.1-8B"
"""Llama 3 8B has its dimensions; only the scaling of its rotary frequencies differs."""

TRACED_ABOUT = (
    "The first of n devices under fully_shard, in a process group that moves nothing: PyTorch's FSDPMemTracker over fake "
    "tensors, an ideal allocator without libraries. Weights gathered unit by unit and buffers of reduced gradients are in the "
    "figures."
)
ZERO_ABOUT = (
    "Llama 3 8B under the Trainer and DeepSpeed in fp16, DeepSpeed's own defaults (reduce bucket 5e8, at most 1e9 gathered "
    "parameters), the largest of all ranks. The model was loaded before DeepSpeed knew of it, so that torch's linear layers "
    "keep the weights that ZeRO-3 gathers (`--zero-init false`). The device is not stated: A100 80GB. Transformers of that "
    "time upcast the logits within the model, so that none wait in 16 bit: asked with `hf-trainer@4.52`, whose loss is the "
    "nearest in size."
)
LIGER_ABOUT = (
    "The same runs with Liger's kernels of mid-2024. The newest release is counted, whose kernels keep less: what is left grows "
    "with the batch."
)
OFFLOAD_ABOUT = (
    "Llama 3.1 8B in bf16 under ZeRO-3 with the optimizer on the host, Liger's fused loss and FlashAttention, 8,192 to 262,144 "
    "tokens on each of 8 devices; the largest of all ranks."
)


def traced_job(row: Mapping[str, Any]) -> Job:
    """The question that a traced row answers."""
    run = row["run"]
    workload = Training(
        batch=row["batch"],
        seq=row["seq"],
        precision="bf16-mixed" if run.get("mixed", True) else "bf16-true",
        optimizer="sgd",
        checkpointing="full" if run.get("ckpt") else "none",
    )
    layout = Parallelism(
        zero=3 if run.get("reshard", True) else 2, dp_shard=row["n"], dp_replicate=run.get("replicas", 1), sharding="fsdp2"
    )
    nothing = Overheads(runtime="hf", workspace=0, cuda_context=0, fragmentation=0, communication=0)
    return Job(model=corpus.model_of(row["config"]), workload=workload, overheads=nothing, parallelism=layout, headroom=0.0)


def labels_of(row: Mapping[str, Any]) -> int:
    """Bytes of labels, which are a tensor of their own in memfit's reference step; the tracer passes the ids again."""
    return int(row["batch"] * row["seq"] * 8)


MOMENTS = {"peak": "peak", "after_fwd": "after forward", "after_bwd": "after backward"}


def traced_rows(rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Comparisons by moment. Rows whose embedding and head are units of their own (torchtitan) need its runtime."""
    found: dict[str, list[Row]] = {moment: [] for moment in MOMENTS.values()}
    for row in rows:
        if row["run"].get("separate"):
            continue
        rank = account.estimate(account.resolve(traced_job(row)).job).worst
        labels = labels_of(row)
        predicted = (rank.peak.allocated_bytes, rank.forward_end_bytes or 0, rank.backward_end_bytes or 0)
        for (key, moment), value in zip(MOMENTS.items(), predicted, strict=True):
            found[moment].append(
                Row(id=row["id"], measured=row[key], predicted=value - labels, relative_to=row[key], source=row["made_with"])
            )
    return found


def _is_new(row: Mapping[str, Any]) -> bool:
    return "transformers 5" in row["framework"]


def _has_liger(row: Mapping[str, Any]) -> bool:
    return "iger" in row["framework"]


def measured_job(row: Mapping[str, Any]) -> Job:
    """The question that a measured row answers. What the metric does not count is set to nothing."""
    new, reserved = _is_new(row), row["metric"] == "peak_reserved"
    workload = Training(
        batch=row["micro_batch"],
        seq=row["seq_len"],
        precision="bf16-mixed" if new else "fp16-mixed",
        checkpointing="full" if row["activation_checkpointing"] == "on" else "none",
        kernels="liger" if _has_liger(row) else "eager",
        attention="flash" if new else "sdpa",
    )
    layout = Parallelism(
        zero=row["zero_stage"],
        sharding="deepspeed",
        offload="optimizer" if "offload" in row["optimizer"] else "none",
        zero_init=new,
    )
    overheads = Overheads(
        runtime="hf-trainer" if new else "hf-trainer@4.52",
        cuda_context=0,
        communication=0,
        fragmentation=None if reserved else 0,
    )
    model = corpus.model_of(MODEL)
    return Job(
        model=model, workload=workload, overheads=overheads, cluster=parse_cluster(row["on"]), parallelism=layout, headroom=0.0
    )


def group_name(row: Mapping[str, Any]) -> str:
    """`deepspeed zero-3 allocated` ..."""
    what = "offload" if _is_new(row) else "liger" if _has_liger(row) else f"zero-{row['zero_stage']}"
    return f"deepspeed {what} {METRICS[row['metric']]}"


GROUPS = {
    f"deepspeed {what} {metric}": (f"{title}, {metric}", metric, about)
    for what, title, about in (
        ("zero-2", "DeepSpeed ZeRO-2, optimizer on the host", ZERO_ABOUT),
        ("zero-3", "DeepSpeed ZeRO-3", ZERO_ABOUT),
        ("liger", "DeepSpeed ZeRO-2 and 3 with Liger", LIGER_ABOUT),
        ("offload", "DeepSpeed ZeRO-3, long sequences", OFFLOAD_ABOUT),
    )
    for metric in METRICS.values()
}
"""Title, metric and description of every group of measured rows."""


def measured_bytes(row: Mapping[str, Any]) -> int:
    """The stated value in bytes."""
    return round(float(row["value"]) * UNITS[row["unit"]])


def _value(rank: Rank, metric: str) -> int:
    return rank.peak.allocated_bytes if metric == "allocated" else rank.peak.reserved_bytes


def measured_rows(rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Comparisons by group."""
    found: dict[str, list[Row]] = {name: [] for name in GROUPS}
    for row in rows:
        rank = account.estimate(account.resolve(measured_job(row)).job).worst
        measured = measured_bytes(row)
        found[group_name(row)].append(
            Row(
                id=row["id"],
                measured=measured,
                predicted=_value(rank, METRICS[row["metric"]]),
                relative_to=measured,
                low=rank.peak.low_bytes,
                high=rank.peak.high_bytes,
                rounding=half_digit(row["value"], UNITS[row["unit"]]),
                source=row["source"],
            )
        )
    return found
