"""What needs no measuring: the lower bound of a peak, and the search that it shortens; and how long results are kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import heart_models as models
import pytest

from memfit.account import estimate, least_bytes, resolve
from memfit.devices import parse_cluster
from memfit.fit.ladder import climb
from memfit.job import FineTuning, Inference, Job, Overheads, Training, Workload
from memfit.model import Model
from memfit.model.remember import of_model

WORKLOADS: dict[str, Workload] = {
    "train": Training(batch=2, seq=256),
    "alone": Training(batch=1, seq=64, optimizer_in_backward=True, ddp="none"),
    "zeros": Training(batch=2, seq=64, zero_grad="zeros", optimizer="adamw-loop"),
    "accumulated": Training(batch=2, seq=64, grad_accum=4, ema="device", optimizer="adafactor"),
    "evaluated": Training(batch=1, seq=64, eval_batch=64, eval_rows=512),
    "paged": Training(batch=64, seq=512, optimizer="paged-adamw-8bit", precision="bf16-true"),
    "lora": FineTuning(method="lora", batch=2, seq=256),
    "qlora": FineTuning(method="qlora", batch=16, seq=512, checkpointing="full"),
    "freeze": FineTuning(method="freeze", seq=64, unfreeze="layers:1"),
}


def resolved(workload: Workload, on: str | None = None, overheads: Overheads | None = None) -> Job:
    model = models.make(models.LLAMA_1B)
    given = Overheads() if overheads is None else overheads
    cluster = None if on is None else parse_cluster(on)
    return resolve(Job(model=model, workload=workload, overheads=given, cluster=cluster)).job


@pytest.mark.parametrize("on", [None, "4090", "2x4090", "v5p-4"])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_no_peak_is_below_its_lower_bound(workload: Workload, on: str | None) -> None:
    one = resolved(workload, on)
    assert 0 < least_bytes(one) <= estimate(one).peak.device_bytes


def test_overheads_given_by_hand_are_in_the_bound() -> None:
    one = resolved(WORKLOADS["train"], overheads=Overheads(cuda_context=10**9, fragmentation=3 * 10**9, workspace=0))
    without = resolved(WORKLOADS["train"], overheads=Overheads(cuda_context=0, fragmentation=0, workspace=0))
    assert least_bytes(one) - least_bytes(without) == 4 * 10**9


def test_where_the_step_binds_the_bound_is_the_peak_but_for_the_logits() -> None:
    """128,256 logits in 16 bits for each of 64 tokens are held by the caller, and a tenth of them is unused beside them."""
    one = resolved(Training(batch=1, seq=64))
    logits = 128256 * 2 * 64
    assert estimate(one).peak.phase == "optimizer-step"
    assert estimate(one).peak.device_bytes - least_bytes(one) == pytest.approx(logits * 1.1, abs=1)  # a tenth is rounded down


def test_inference_has_no_bound() -> None:
    assert least_bytes(resolved(Inference(context=64))) == 0


@pytest.mark.parametrize("on", [None, "6GiB", "12GiB", "24GiB", "40GiB"])
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_bound_changes_nothing_that_is_shown(workload: Workload, on: str | None) -> None:
    one = resolved(workload, on)
    current = estimate(one)
    quick, slow = climb(one, estimate, current, least_bytes), climb(one, estimate, current)
    assert (quick.best is None) == (slow.best is None)
    if slow.best is not None or on is None:  # what comes nearest is chosen among those that the bound left
        assert quick.recommendations == slow.recommendations


def test_the_bound_saves_estimates() -> None:
    one = resolved(Training(batch=2, seq=64), "6GiB")
    current = estimate(one)
    asked: dict[str, int] = {}

    def counted(how: str) -> Any:
        def counting(job: Job) -> Any:
            asked[how] = asked.get(how, 0) + 1
            return estimate(job)

        return counting

    climb(one, counted("quick"), current, least_bytes)
    climb(one, counted("slow"), current)
    assert asked["quick"] < asked["slow"]


def test_results_are_kept_on_the_model_and_go_with_it() -> None:
    calls: list[tuple[Any, ...]] = []

    @of_model(2)
    def length(model: Model, *words: str) -> list[int]:
        calls.append(words)
        return [len(word) for word in words]

    one, other = models.make(models.LLAMA_1B), models.make(models.LLAMA_1B)
    assert length(one, "a") is length(one, "a")
    assert length(other, "a") is not length(one, "a")
    assert len(calls) == 2
    length(one, "b")
    length(one, "c")  # of more than two results the oldest is forgotten
    length(one, "a")
    assert calls[2:] == [("b",), ("c",), ("a",)]
    assert one.replace(name="copy").memory == {}


def test_no_cache_keeps_a_model_alive() -> None:
    one = resolved(Training(batch=2, seq=64))
    estimate(one)
    model = weakref.ref(one.model)
    del one
    gc.collect()
    assert model() is None
