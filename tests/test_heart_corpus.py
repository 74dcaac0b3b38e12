"""The exact rows of the corpus: kept bytes on CUDA's dispatch path, and traced steps of full-size models, against the account.

These rows were made with the real transformers classes under fake tensors (see the corpus' README). What they cover and the
CPU cannot:
autocast, CUDA's attention kernels, padding, LoRA at full size. `memfit validate` prints the same; here it has to stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heart_models as models
import pytest

import memfit
from memfit.families import FAMILIES
from memfit.job import FineTuning, Training
from memfit.precision import DTYPE_BYTES
from memfit.validate.traces import OPTIMIZERS, PRECISIONS

CORPUS = Path(memfit.__file__).parent / "data" / "corpus"


def rows(name: str) -> list[Any]:
    found = [json.loads(line) for line in (CORPUS / name).read_text().splitlines() if line.strip()]
    return [pytest.param(row, id=row["id"]) for row in found if row["config"].get("model_type") in FAMILIES]


def rank_of(row: dict[str, Any]) -> Any:
    run = row["run"]
    precision, weight_dtype = PRECISIONS[run.get("precision", "bf16")]
    settings: dict[str, Any] = {
        "batch": row["batch"],
        "seq": row["seq"],
        "precision": precision,
        "weight_dtype": weight_dtype,
        "padding": "right" if run.get("pad") else "none",
        "optimizer": OPTIMIZERS[run.get("opt", "adamw_fused")],
        "attention": run.get("attn", "sdpa"),
        "checkpointing": {True: "full", False: "none"}.get(run.get("ckpt", False), run.get("ckpt")),
        "optimizer_in_backward": run.get("in_backward", False),
        "outputs": "kept",
    }
    workload: Training = Training(**settings)
    if lora := run.get("lora"):
        workload = FineTuning(
            method="lora",
            lora_rank=lora.get("r", 16),
            lora_targets=",".join(lora["targets"]),
            lora_dtype="fp32" if lora.get("fp32", True) else "bf16",
            lora_dropout=lora.get("dropout", 0.0),
            **settings,
        )
    return models.estimate_of(models.make(row["config"], head=row["cls"]), workload)


def adapters_of(row: dict[str, Any]) -> int:
    return row["trainable"] if row["run"].get("lora") else 0


def masks_of_ones(row: dict[str, Any]) -> int:
    """BART's decoder is given a mask of ones, which a real run recognises and drops; under fake tensors every layer keeps one.

    L b t t elements in the compute format, with as many target as source tokens; eager makes one mask either way.
    """
    if row["config"]["model_type"] != "bart" or row["run"].get("attn") == "eager":
        return 0
    element = 4 if row["run"].get("precision") == "fp32" else 2
    return row["config"]["decoder_layers"] * row["batch"] * row["seq"] ** 2 * element


@pytest.mark.parametrize("row", rows("kept.jsonl"))
def test_kept_bytes(row: dict[str, Any]) -> None:
    model = models.make(row["config"], head=row["cls"])
    assert model.num_parameters + adapters_of(row) == row["params"]
    assert rank_of(row).worst.kept_bytes == pytest.approx(row["kept_bytes"] - masks_of_ones(row), rel=0.001)


@pytest.mark.parametrize("row", rows("traced.jsonl"))
def test_traced_steps(row: dict[str, Any]) -> None:
    """As a share of what is neither parameters nor optimizer states, which are not the question."""
    rank = rank_of(row).worst
    static = row["after_fwd"]["Parameter"] + row["after_fwd"]["Optstate"]
    for found, truth in (
        (rank.peak.allocated_bytes, row["peak"]["Total"] - masks_of_ones(row)),
        (rank.forward_end_bytes, row["after_fwd"]["Total"] - masks_of_ones(row)),
        (rank.backward_end_bytes, row["after_bwd"]["Total"]),
    ):
        assert abs(found - truth) <= 0.01 * (truth - static)


@pytest.mark.parametrize("row", rows("traced.jsonl"))
def test_traced_weights_and_states(row: dict[str, Any]) -> None:
    rank = rank_of(row).worst
    element = DTYPE_BYTES[{"bf16": "bf16", "fp32": "fp32"}[row["run"].get("precision", "bf16")]]
    states = models.component(rank, "optimizer_states")
    assert models.component(rank, "weights") == pytest.approx(element * row["params"] + row["peak"]["Buffer"], rel=1e-5)
    # MemTracker rounds each tensor, also each step counter of 4 B, up to 512 B
    assert states == pytest.approx(row["after_fwd"]["Optstate"], rel=1e-3, abs=512 * 1000)
