"""How long the heart takes within a process: an estimate of a model seen for the first time and again, a whole answer, and
arrays.

Every figure is the least of many runs, as `timeit` advises: what the code needs when nothing else runs.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from _config import LLAMA_70B, LLAMA_405B
from _table import Figure, show

from memfit import account, fit
from memfit.account.profile import Numbers, evaluate
from memfit.devices import parse_cluster
from memfit.families import build_model
from memfit.job import FineTuning, Inference, Job, Overheads, Parallelism, Training, Workload

WORKLOADS: dict[str, Workload] = {
    "train": Training(batch=2, seq=4096),
    "finetune (QLoRA)": FineTuning(method="qlora", batch=2, seq=4096),
    "infer": Inference(context=8192, concurrency=4),
}
LAYOUTS: dict[str, tuple[Parallelism, str]] = {
    "fsdp 512": (Parallelism(fsdp=True), "hf"),
    "tp 8 x fsdp 64": (Parallelism(tp=8, fsdp=True), "hf"),
    "tp 8 x pp 8 x fsdp 8": (Parallelism(tp=8, pp=8, fsdp=True), "torchtitan"),
}
"""Of 405B parameters on 64 machines of 8 devices, with every layer recomputed."""
CLUSTER_LIMIT_MS = 30.0
NEW_LIMIT_MS, REPEATED_LIMIT_US, ANSWER_LIMIT_MS, ARRAY_LIMIT = 1.0, 50.0, 10.0, 300_000.0
SWEEP = 100_000


def seconds(prepare: Callable[[], Callable[[], object]], repeats: int) -> float:
    """The least time of what `prepare` returns."""
    least = float("inf")
    for _ in range(repeats):
        run = prepare()
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
    return least


def job_of(workload: Workload) -> Job:
    """A question about a model object that no cache has seen."""
    model = build_model(LLAMA_70B, name="llama-3.1-70b", source="benchmark")
    return Job(model=model, workload=workload, cluster=parse_cluster("h100"))


def new_estimate(workload: Workload) -> float:
    def prepare() -> Callable[[], object]:
        job = account.resolve(job_of(workload)).job
        return lambda: account.estimate(job)

    return 1e3 * seconds(prepare, 150)


def repeated_estimate(workload: Workload) -> float:
    """Other numbers for the same model, as solving for a limit asks."""
    base = account.resolve(job_of(workload)).job
    field = "concurrency" if isinstance(workload, Inference) else "batch"
    jobs = [base.replace(workload=base.workload.replace(**{field: number})) for number in range(1, 101)]
    for job in jobs:
        account.estimate(job)

    def run() -> None:
        for job in jobs:
            account.estimate(job)

    return 1e6 * seconds(lambda: run, 50) / len(jobs)


def whole_answer(workload: Workload) -> float:
    """Resolve, estimate, verdict, limits and ladder of a new model."""

    def prepare() -> Callable[[], object]:
        job = job_of(workload)
        return lambda: fit.answer(job)

    return 1e3 * seconds(prepare, 60)


def answer_over_devices(layout: Parallelism, runtime: str) -> float:
    """The same of a model on 512 devices, with every distinct rank."""

    def prepare() -> Callable[[], object]:
        job = Job(
            model=build_model(LLAMA_405B, name="llama-3.1-405b", source="benchmark"),
            workload=Training(batch=1, seq=8192, checkpointing="full"),
            cluster=parse_cluster("64x8xh100"),
            parallelism=layout,
            overheads=Overheads(runtime=runtime),
        )
        return lambda: fit.answer(job)

    return 1e3 * seconds(prepare, 20)


def array_path(workload: Workload) -> float:
    """Evaluations a second over an array of jobs that differ in their numbers."""
    import numpy as np

    compiled = account.compile_job(account.resolve(job_of(workload)).job)
    batches = np.arange(SWEEP, dtype=np.int64) % 256 + 1
    tokens = np.arange(SWEEP, dtype=np.int64) % 8192 + 1
    if isinstance(workload, Inference):
        ones = np.ones_like(tokens)

        def run() -> object:
            prompt, step = Numbers(batches, tokens, tokens), Numbers(batches, ones, tokens)
            return evaluate(compiled.profile, prompt, step, maximum=np.maximum).peak
    else:

        def run() -> object:
            return evaluate(compiled.profile, Numbers(batches, tokens, tokens), maximum=np.maximum).peak

    return SWEEP / seconds(lambda: run, 20)


def main() -> int:
    figures = []
    gc.disable()  # as timeit does; a collection in between would be counted against whoever runs then
    for name, workload in WORKLOADS.items():
        figures.append(Figure(f"{name}: new estimate, 80 layers", new_estimate(workload), NEW_LIMIT_MS, "ms"))
        figures.append(Figure(f"{name}: repeated estimate", repeated_estimate(workload), REPEATED_LIMIT_US, "us"))
        figures.append(Figure(f"{name}: whole answer", whole_answer(workload), ANSWER_LIMIT_MS, "ms"))
        figures.append(Figure(f"{name}: array path", array_path(workload), ARRAY_LIMIT, "/s", at_least=True))
        gc.collect()
    for name, (layout, runtime) in LAYOUTS.items():
        figures.append(Figure(f"405B, {name}: whole answer", answer_over_devices(layout, runtime), CLUSTER_LIMIT_MS, "ms"))
    return show(figures)


if __name__ == "__main__":
    raise SystemExit(main())
