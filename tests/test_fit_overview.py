"""The overview over the toy account: cells by hand, and a way that a model does not have."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable

import pytest
from fit_fakes import cluster, model, toy

from memfit import api
from memfit.account import Resolved
from memfit.cli import main
from memfit.devices import Cluster
from memfit.errors import UsageError
from memfit.fit.overview import Overview, overview
from memfit.job import FineTuning, Inference, Job, Overheads


def _resolve(job: Job) -> Resolved:
    work = job.workload
    if isinstance(work, Inference):
        changes = {
            "prompt": work.context,
            "quantization": work.quantization or "none",
            "kv_dtype": "bf16",
            "weight_dtype": "bf16",
        }
    else:
        changes = {"weight_dtype": "bf16", "outputs": "kept"}
    count = job.cluster.count if job.cluster else 1
    warnings = (("replicated", f"{count} replicas"),) if count > 1 else ()
    return Resolved(dataclasses.replace(job, workload=dataclasses.replace(work, **changes)), (), warnings)


def _refuse_adapters(job: Job) -> Resolved:
    if isinstance(job.workload, FineTuning) and job.workload.method != "full":
        raise UsageError("no linear layers")
    return _resolve(job)


def _ask(resolve: Callable[[Job], Resolved] = _resolve, on: list[Cluster] | None = None) -> Overview:
    where = [cluster(2_500_000), cluster(8_000_000)] if on is None else on
    return overview(model(), where, overheads=Overheads(), headroom=0.0, resolve=resolve, estimate=toy)


def test_cells_by_hand() -> None:
    # Inference, context 4,096 (all that the model has): weights + 200 B and 50 B a token = weights + 1,024,000.
    # Training, 2,048 tokens, checkpointing: base + 2,048 x 600 = base + 1,228,800.
    found = {way.name: [(cell.peak_bytes, cell.fits) for cell in way.cells] for way in _ask().ways}
    assert found == {
        "inference, 16-bit": [(3_024_000, "no"), (3_024_000, "yes")],
        "inference, 8-bit": [(2_024_000, "yes"), (2_024_000, "yes")],
        "inference, 4-bit": [(1_524_000, "yes"), (1_524_000, "yes")],
        "QLoRA": [(660_000 + 1_228_800, "yes"), (660_000 + 1_228_800, "yes")],
        "LoRA": [(2_160_000 + 1_228_800, "no"), (2_160_000 + 1_228_800, "yes")],
        # 2 + 2 + 4 MB; the fused optimizer's step needs no scratch
        "full fine-tuning": [(8_000_000 + 1_228_800, "no"), (8_000_000 + 1_228_800, "no")],
    }


def test_commands_ask_the_same() -> None:
    commands = {way.name: way.command for way in _ask().ways}
    assert commands["inference, 4-bit"] == "memfit infer tiny --context 4096 --weight-dtype bf16 --quantization int4 --headroom 0"
    assert commands["QLoRA"].startswith(
        "memfit finetune tiny --seq 2048 --precision bf16-true --checkpointing full --method qlora"
    )


def test_a_way_that_the_model_does_not_have_is_a_row_with_its_reason() -> None:
    ways = {way.name: way for way in _ask(_refuse_adapters).ways}
    assert (ways["LoRA"].peak_bytes, ways["LoRA"].cells, ways["LoRA"].why_not) == (None, (), "no linear layers")
    assert ways["full fine-tuning"].cells


def test_each_warning_is_there_once() -> None:
    assert _ask().warnings == ()
    found = _ask(on=[cluster(8_000_000, count=2), cluster(8_000_000), cluster(9_000_000, count=4)]).warnings
    assert [(one.code, one.text) for one in found] == [("replicated", "2 replicas"), ("replicated", "4 replicas")]


def test_full_fine_tuning_takes_the_optimizer_that_costs_nothing() -> None:
    commands = {way.name: way.command for way in _ask().ways}
    assert "--optimizer adamw-fused" in commands["full fine-tuning"]
    assert "--optimizer" not in commands["LoRA"]


def test_a_device_without_bf16_is_asked_about_in_fp16() -> None:
    old = cluster(8_000_000, native_dtypes=("fp16",))
    commands = [way.command for way in _ask(on=[old]).ways]
    assert not [one for one in commands if "bf16" in one]
    assert [one for one in commands if "--method full" in one and "--precision fp16-mixed" in one]
    assert len([one for one in commands if "--precision fp16-true" in one]) == 2
    # beside one that has it, the command is that of most devices
    both = [way.command for way in _ask(on=[old, cluster(8_000_000)]).ways]
    assert len([one for one in both if "--precision bf16-true" in one]) == 3


@pytest.mark.parametrize(
    ("name", "devices"), [("llama-3.1-70b", "8xh100"), ("llama-3.1-405b", "16xh100"), ("llama-2-7b", "2x4090")]
)
def test_the_command_of_a_way_asks_what_was_judged(name: str, devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it was split over the devices because replicas do not fit."""
    for way in api.overview(name, devices).ways:
        assert main([*shlex.split(way.command)[1:], "--on", devices, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["peak"]["device_bytes"] == way.peak_bytes, way.command
