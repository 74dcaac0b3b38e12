"""The rule of thumb: what a textbook factor would have said, and the two largest reasons why the estimate differs."""

from __future__ import annotations

from memfit.account.estimate import Estimate
from memfit.fit.answer import RuleOfThumb
from memfit.job import FineTuning, Inference, Job, Training
from memfit.units import format_count, format_gib

_ADAPTER_BYTES = 16
"""fp32 weight 4 + gradient 4 + AdamW 8, for each parameter of an adapter."""

_INFERENCE_BYTES = {"none": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5, "nf4": 0.5, "nf4-dq": 0.5}
_DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
_INFERENCE_EXTRA = 0.2
"""The fifth that the usual rule adds for everything but weights (EleutherAI, "Transformer Math 101": x 1.2)."""

_AGREES = 0.01
"""Share of the estimate below which the two are said to agree."""

_EVERYTHING_ELSE = "everything else"


def rule_of_thumb(job: Job, estimate: Estimate) -> RuleOfThumb:
    """The rule for this kind of job: 16 P, 8 P, 2 P + 16 A, 0.55 P + 16 A, or P x bytes x 1.2."""
    formula, parts = _rule(job, estimate)
    total = sum(parts.values())
    return RuleOfThumb(formula=formula, bytes=total, differs_because=_differences(parts, total, estimate))


def _rule(job: Job, estimate: Estimate) -> tuple[str, dict[str, int]]:
    """The rule in words and its bytes by component."""
    workload, parameters = job.workload, job.model.num_parameters
    count = format_count(parameters)
    if isinstance(workload, Inference):
        return _inference_rule(workload, parameters, count)
    if isinstance(workload, FineTuning) and workload.method != "full":
        per_weight = 0.55 if workload.method == "qlora" else 2.0
        adapters = adapter_parameters(workload, estimate)
        where = "trained" if workload.method in ("freeze", "prompt", "prefix") else "in adapters"
        trained = {"gradients": 4 * adapters, "optimizer_states": 8 * adapters}
        formula = f"{per_weight:g} B x {count} frozen + {_ADAPTER_BYTES} B x {format_count(adapters)} {where}"
        return formula, {"weights": round(per_weight * parameters) + 4 * adapters, **trained}
    return _training_rule(workload, parameters, count)


def _training_rule(workload: Training, parameters: int, count: str) -> tuple[str, dict[str, int]]:
    """AdamW: 16 B per parameter (4 weights, 4 gradients, 8 states), or 8 B when all of them are 16-bit."""
    width = 2 if workload.precision in ("bf16-true", "fp16-true") else 4
    formula = f"{4 * width} B x {count} (weights {width} + gradients {width} + AdamW {2 * width})"
    return formula, {"weights": width * parameters, "gradients": width * parameters, "optimizer_states": 2 * width * parameters}


def _inference_rule(workload: Inference, parameters: int, count: str) -> tuple[str, dict[str, int]]:
    quantised = workload.quantization or "none"
    width = _INFERENCE_BYTES[quantised] if quantised != "none" else _DTYPE_BYTES[workload.weight_dtype or "bf16"]
    weights = round(parameters * width)
    return f"{width:g} B x {count} x 1.2", {"weights": weights, _EVERYTHING_ELSE: round(weights * _INFERENCE_EXTRA)}


def adapter_parameters(workload: FineTuning, estimate: Estimate) -> int:
    """Parameters of the adapters: as the estimate counted them, else their gradients by the bytes of one."""
    if estimate.trainable_parameters is not None:
        return estimate.trainable_parameters
    gradients = next((one.bytes for one in estimate.worst.components if one.name == "gradients"), 0)
    return round(gradients / _DTYPE_BYTES[workload.lora_dtype])


def _differences(parts: dict[str, int], total: int, estimate: Estimate) -> str:
    device = estimate.peak.device_bytes
    if abs(device - total) <= device * _AGREES:
        return "they agree within 1 %"
    actual = {one.name: one.at_peak_bytes for one in estimate.worst.components}
    changes = {name: actual.get(name, 0) - parts.get(name, 0) for name in (*actual, *(one for one in parts if one not in actual))}
    largest = sorted((name for name in changes if changes[name]), key=lambda name: abs(changes[name]), reverse=True)[:2]
    reasons = [_difference(name, actual.get(name, 0), parts.get(name, 0)) for name in largest]
    return f"at {estimate.peak.phase}: " + " and ".join(reasons)


def _difference(name: str, actual: int, ruled: int) -> str:
    label = name.replace("_", " ").replace("kv ", "KV ")
    if name == _EVERYTHING_ELSE:
        return f"the rule's 20 % for everything else is {format_gib(ruled)}"
    if actual == 0:
        return f"no {label} at that moment ({format_gib(ruled)} in the rule)"
    if ruled == 0:
        return f"{label} of {format_gib(actual)} not in the rule"
    return f"{label} of {format_gib(actual)} instead of {format_gib(ruled)}"
