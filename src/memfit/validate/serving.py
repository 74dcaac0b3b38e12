"""Measured generation with Hugging Face transformers: peak allocated bytes of a prompt and 2,048 generated tokens, batch 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import account
from memfit.devices import parse_cluster
from memfit.job import Inference, Job, Overheads
from memfit.units import GiB, MiB
from memfit.validate import corpus
from memfit.validate.reasons import NO_CONFIG
from memfit.validate.report import LeftOut, Row, half_digit

QUANTIZATIONS = {None: "none", "gptq-int4": "int4", "awq": "int4", "awq-int4": "int4"}
"""A row's format -> --quantization; others (8-bit GPTQ, block-wise fp8) are no format that memfit has."""

UNITS = {"GB": GiB, "MB": MiB}
"""The script divides by powers of 1024, whatever it prints."""

ABOUT = (
    "model.generate of Qwen models, batch 1, FlashAttention, a prompt of 1 to 30,720 tokens and 2,048 new ones. The script "
    "divides by powers of 1024 and rounds, to 0.01 GiB or to 1 MiB. "
    "Weights and cache are exact; prefill's working set is modelled."
)


def left_out(row: Mapping[str, Any], file: str) -> LeftOut | None:
    """Why the row cannot be asked; `None` if it can."""
    reason, detail = _reason(row)
    return LeftOut(id=row["id"], file=file, reason=reason, detail=detail) if reason else None


def _reason(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["n_gpus"] != 1:
        return "it ran on several devices", ""
    if "config" not in row:
        return NO_CONFIG, row["model"]
    if row.get("quantization") not in QUANTIZATIONS:
        return "the weight format is not expressible", str(row.get("quantization"))
    if row["other"].get("peak_memory_unit") not in UNITS:
        return "the unit is not stated", ""
    if "on" not in row:
        return "the device is not stated", ""
    return "", ""


def job_of(row: Mapping[str, Any]) -> Job:
    """The question that the row answers."""
    run = row["other"]
    workload = Inference(
        context=run["input_len"] + run["output_len"],
        prompt=run["input_len"],
        concurrency=run["batch_size"],
        weight_dtype="bf16" if row.get("quantization") is None else "fp16",
        quantization=QUANTIZATIONS[row.get("quantization")],
        attention="flash",
        logits="last",
    )
    beside = Overheads(runtime="hf", cuda_context=0, fragmentation=0)
    return Job(model=corpus.model_of(row["config"]), workload=workload, overheads=beside, cluster=parse_cluster(row["on"]))


def compare(rows: list[dict[str, Any]], file: str) -> tuple[dict[str, list[Row]], list[LeftOut]]:
    """Rows in 16 bit and in 4 bit."""
    found: dict[str, list[Row]] = {"generate 16-bit": [], "generate 4-bit": []}
    without = []
    for row in rows:
        reason = left_out(row, file)
        if reason is not None:
            without.append(reason)
            continue
        peak = account.estimate(account.resolve(job_of(row)).job).peak
        unit, value = UNITS[row["other"]["peak_memory_unit"]], row["other"]["peak_memory_reported"]
        measured = round(value * unit)
        name = "generate 16-bit" if row.get("quantization") is None else "generate 4-bit"
        found[name].append(
            Row(
                id=row["id"],
                measured=measured,
                predicted=peak.allocated_bytes,
                relative_to=measured,
                low=peak.low_bytes,
                high=peak.high_bytes,
                rounding=half_digit(value, unit),
                source=row["source"],
            )
        )
    return found, without
