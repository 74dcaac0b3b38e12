"""What a runtime does not do, from the facts of its record."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.job import FineTuning, Training, Workload
from memfit.precision import MIXED_SCHEMES
from memfit.runtimes import Runtime


def as_meant(runtime: Runtime, workload: Training) -> Training:
    """With `selective` as the runtime means it."""
    meant = workload.checkpointing == "selective" and runtime.selective
    return workload.replace(checkpointing=f"selective:{runtime.selective}") if meant else workload


def refusal(runtime: Runtime, workload: Workload) -> str:
    """Why a runtime does not run a workload, whose fields may still be open; empty if it does."""
    method = workload.method if isinstance(workload, FineTuning) else workload.kind
    if runtime.methods and method not in runtime.methods:
        names = {"train": "full training", "infer": "inference"}
        known = ", ".join("memfit train" if one == "train" else f"--method {one}" for one in runtime.methods)
        return f"{names.get(method, f'--method {method}')} is not counted, only {known}; --runtime hf counts all"
    scheme = MIXED_SCHEMES[runtime.mixed].precisions
    for field, known_values in (*runtime.only, ("kernels", runtime.kernel_sets), *((("precision", scheme),) if scheme else ())):
        value = getattr(workload, field, None)
        if isinstance(value, bool):
            if str(value) not in known_values:
                return f"--{field.replace('_', '-')} is not counted"
        elif value is not None and value not in known_values and value.partition(":")[0] not in known_values:
            return f"--{field.replace('_', '-')} {value[:60]} is not among what it has: {', '.join(known_values)}"
    return ""


def check_runtime(runtime: Runtime, workload: Workload) -> None:
    """Refuse what a runtime does not do.

    Raises:
        UsageError: with what it does instead.
    """
    text = refusal(runtime, workload)
    if text:
        raise UsageError(f"--runtime {runtime.name}: {text}")
