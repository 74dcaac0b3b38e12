"""Exact rows: bytes that autograd keeps (fake tensors on CUDA's dispatch path) and traced steps (an ideal allocator)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit import account
from memfit.account.estimate import Rank
from memfit.families import FAMILIES, build_model
from memfit.job import FineTuning, Job, Overheads, Training
from memfit.validate.report import LeftOut, Row

PRECISIONS = {
    "bf16": ("bf16-true", None),
    "fp16": ("fp16-true", None),
    "fp32": ("32-true", None),
    "amp": ("bf16-mixed", "fp32"),
    "fp16_amp": ("fp16-mixed", "fp32"),
    "bf16_amp": ("bf16-mixed", "bf16"),
}
"""`precision` of a row -> (--precision, --weight-dtype)"""
OPTIMIZERS = {
    "adamw_fused": "adamw-fused",
    "adamw_foreach": "adamw-foreach",
    "adamw_loop": "adamw-loop",
    "sgd": "sgd",
    "sgdm": "sgd-momentum",
}
DEFAULT_RANK = 16
NOTHING_BESIDE_TENSORS = Overheads(workspace=0, cuda_context=0, fragmentation=0)
"""Fake tensors have no libraries, no driver and no allocator beside them."""


def job_of(row: Mapping[str, Any]) -> Job:
    """The question that the row answers: batch, sequence and settings as its run had them, outputs kept until the step ends."""
    run = row["run"]
    precision, weight_dtype = PRECISIONS[run.get("precision", "bf16")]
    settings: dict[str, Any] = {
        "batch": row["batch"],
        "seq": row["seq"],
        "target_seq": run.get("target"),
        "padding": "right" if run.get("pad") else "none",
        "precision": precision,
        "weight_dtype": weight_dtype,
        "optimizer": OPTIMIZERS[run.get("opt", "adamw_fused")],
        "attention": run.get("attn", "sdpa"),
        "checkpointing": {True: "full", False: "none"}.get(run.get("ckpt", False), run.get("ckpt")),
        "optimizer_in_backward": run.get("in_backward", False),
        "outputs": "kept",
        "kernels": run.get("kernels", "eager"),
        "use_cache": "on" if run.get("cache") else "off",
    }
    overheads = NOTHING_BESIDE_TENSORS.replace(runtime=run.get("runtime"))
    image = row["seq"] if run.get("kind") == "img" else None
    model = build_model(row["config"], name=row["id"], source="validation corpus", head=row["cls"], image=image)
    lora = run.get("lora")
    if lora is None:
        return Job(model=model, workload=Training(**settings), overheads=overheads)
    adapters = FineTuning(
        method="lora",
        lora_rank=lora.get("r", DEFAULT_RANK),
        lora_targets=",".join(lora["targets"]),
        lora_dtype="fp32" if lora.get("fp32", True) else "bf16",
        lora_dropout=lora.get("dropout", 0.0),
        **settings,
    )
    return Job(model=model, workload=adapters, overheads=overheads)


NOT_YET = "not expressible yet: another architecture"


def left_out(row: Mapping[str, Any], file: str) -> LeftOut | None:
    """Why the row cannot be asked yet; `None` if it can."""
    model_type = str(row["config"].get("model_type"))
    return None if model_type in FAMILIES else LeftOut(id=row["id"], file=file, reason=NOT_YET, detail=model_type)


def _rank(row: Mapping[str, Any]) -> Rank:
    return account.estimate(account.resolve(job_of(row)).job).ranks[0]


def kept_rows(rows: list[dict[str, Any]], file: str) -> tuple[list[Row], list[LeftOut]]:
    """`kept_bytes` of every row that can be asked."""
    found, without = [], []
    for row in rows:
        reason = left_out(row, file)
        if reason is not None:
            without.append(reason)
            continue
        measured = row["kept_bytes"]
        predicted = _rank(row).kept_bytes or 0
        found.append(Row(id=row["id"], measured=measured, predicted=predicted, relative_to=measured, source=row["made_with"]))
    return found, without


MOMENTS = ("peak", "forward end", "backward end")


def traced_rows(rows: list[dict[str, Any]], file: str) -> tuple[dict[str, list[Row]], list[LeftOut]]:
    """Peak, forward end and backward end of every row that can be asked, by the names in `MOMENTS`.

    The error is a share of what is neither parameters nor optimizer states at that moment: those two are exact by counting and
    would only make the error look small.
    """
    found: dict[str, list[Row]] = {name: [] for name in MOMENTS}
    without = []
    for row in rows:
        reason = left_out(row, file)
        if reason is not None:
            without.append(reason)
            continue
        rank = _rank(row)
        static = row["after_fwd"]["Parameter"] + row["after_fwd"]["Optstate"]
        pairs = (
            ("peak", row["peak"]["Total"], rank.peak.allocated_bytes, (rank.peak.low_bytes, rank.peak.high_bytes)),
            ("forward end", row["after_fwd"]["Total"], rank.forward_end_bytes or 0, (None, None)),
            ("backward end", row["after_bwd"]["Total"], rank.backward_end_bytes or 0, (None, None)),
        )
        for name, measured, predicted, (low, high) in pairs:
            found[name].append(
                Row(
                    id=row["id"],
                    measured=measured,
                    predicted=predicted,
                    relative_to=measured - static,
                    low=low,
                    high=high,
                    source=row["made_with"],
                )
            )
    return found, without
