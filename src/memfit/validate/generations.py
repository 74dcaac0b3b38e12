"""Traced inference: prefill and decoding of real classes under fake tensors on CUDA's dispatch path, an ideal allocator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import account
from memfit.families import FAMILIES, build_model
from memfit.job import Inference, Job
from memfit.validate.report import LeftOut, Row
from memfit.validate.traces import NOT_YET, NOTHING_BESIDE_TENSORS

PHASES = ("prefill", "decode")
ABOUT = (
    "The real Hugging Face class under fake tensors on CUDA's dispatch path, run as generate() runs it: prefill, whole or in "
    "chunks, then decoding steps over a DynamicCache or a StaticCache; encoders and image models run once, an encoder-decoder "
    "encodes and its decoder starts (torch 2.14, transformers 5.24). The error is a share of what is not weights."
)


def job_of(row: Mapping[str, Any]) -> Job:
    """The question that the row answers."""
    run = row["run"]
    kind = run.get("kind", "clm")
    settings: dict[str, Any] = {
        "concurrency": row["batch"],
        "weight_dtype": run.get("precision", "bf16"),
        "attention": run.get("attn", "sdpa"),
        "logits": run.get("logits", "last"),
        "cache": run.get("cache", "dynamic"),
        "prefill_chunk": run.get("chunk"),
    }
    if kind == "s2s":
        settings |= {"prompt": row["seq"], "target_seq": run["target"]}
    elif kind == "enc":
        settings["context"] = row["seq"]
    elif kind == "clm":
        settings |= {"prompt": row["seq"], "context": run["context"]}
    image = row["seq"] if kind == "img" else None
    model = build_model(row["config"], name=row["id"], source="validation corpus", head=row["cls"], image=image)
    return Job(model=model, workload=Inference(**settings), overheads=NOTHING_BESIDE_TENSORS)


def compare(rows: list[dict[str, Any]], file: str) -> tuple[dict[str, list[Row]], list[LeftOut]]:
    """The peak of each phase of every row."""
    found: dict[str, list[Row]] = {phase: [] for phase in PHASES}
    without = []
    for row in rows:
        model_type = str(row["config"].get("model_type"))
        if model_type not in FAMILIES:
            without.append(LeftOut(id=row["id"], file=file, reason=NOT_YET, detail=model_type))
            continue
        estimated = {one.name: one.allocated_bytes for one in account.estimate(account.resolve(job_of(row)).job).worst.phases}
        for phase in PHASES:
            if phase in row:
                measured = row[phase]
                found[phase].append(
                    Row(
                        id=row["id"],
                        measured=measured,
                        predicted=estimated[phase],
                        relative_to=measured - row["weights"],
                        source=row["made_with"],
                    )
                )
    return found, without
