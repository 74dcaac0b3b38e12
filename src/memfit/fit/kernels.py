"""Which kernels are in force, and why: what the answer says beside its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from memfit.account import kernel_policy
from memfit.account.resolve import runtime_of
from memfit.fit.answer import Kernel
from memfit.fit.limits import EstimateFunction
from memfit.job import Job, Training, Workload
from memfit.kernels import KernelPolicy
from memfit.kernels.attention import chosen, has_mask
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import Model, Op

HOPPER = (9, 0)

KERNELS = {
    "eager": "eager: two matrix products around a softmax",
    "flash": "FlashAttention",
    "flash-unpadded": "FlashAttention over the tokens without their padding (varlen)",
    "flash-wide": "FlashAttention with values padded to the keys' width",
    "math": "sdpa's math path: the score matrix is kept",
    "memory-efficient": "sdpa's memory-efficient kernel",
}

MIXERS = {
    "torch": "transformers' own scans, which store what fused kernels keep on the chip",
    "fused": "mamba-ssm's or flash-linear-attention's kernels, with causal-conv1d",
}

LOSSES = {
    "uncompiled": "torch.compile takes the layers alone: the loss stays eager, logits upcast to fp32",
    "eager": "the model's own, logits upcast to fp32",
    "chunked": "with the head, chunk by chunk: each chunk's log-softmax is kept, no logits",
    "chunked-output": "over chunks of whole logits, which the loop holds",
    "cut": "cut cross-entropy: logits exist in the kernel's tiles only",
    "fused": "with the head, chunk by chunk: logits are not stored",
    "in-place": "logits upcast to fp32, their gradient written over them",
}


def kernels_in_force(job: Job, estimate: EstimateFunction, device_bytes: int) -> tuple[Kernel, ...]:
    """The kernels of a resolved job, whose device peak is `device_bytes`: the modules, each kind of attention, the loss."""
    workload, model = job.workload, job.model
    policy = kernel_policy(job)
    found: list[Kernel] = []
    if isinstance(workload, Training):
        one = KERNEL_SETS[policy.kernels]
        runtime = runtime_of(job)
        found.append(Kernel(computes="modules", name=one.name, why=one.description, source=one.source or runtime.source))
    found += _attention(job, policy, estimate, device_bytes)
    if model.states:
        name = workload.mixer_kernels
        found.append(Kernel(computes="mixers", name=name, why=MIXERS[name]))
    if isinstance(workload, Training) and model.loss is not None:
        compiled = policy.kernels == "compile" and policy.loss == "eager"
        own = KERNEL_SETS[policy.kernels]
        brought = own.why_loss if policy.loss == own.loss else ""
        why = "one compiled kernel: logits stay in their own format" if compiled else brought or LOSSES[policy.loss]
        found.append(Kernel(computes="loss", name=policy.loss, why=why))
    return tuple(found)


def _attention(job: Job, policy: KernelPolicy, estimate: EstimateFunction, device_bytes: int) -> Iterator[Kernel]:
    """One line for each kernel that computes attention, with the number of layers that it computes."""
    layers: dict[tuple[str, str, int], int] = {}
    for op, repeat in _operations(job.model):
        if op.kind == "attention":
            key = _kernel(job, policy, op)
            layers[key] = layers.get(key, 0) + repeat
        elif op.kind.endswith("attention"):
            key = ("own", "the family's own modules compute it", 0)
            layers[key] = layers.get(key, 0) + repeat
    for (name, why, window), count in layers.items():
        cost = _cost_of_mask(job, estimate, device_bytes) if name == "memory-efficient" and not window else None
        own = why.startswith(KERNEL_SETS[policy.kernels].why_attention or " ")
        text = f"{KERNELS[name]}: {why}" if name in KERNELS and not own else why
        yield Kernel(computes="attention", name=name, why=text, layers=count, costs_bytes=cost)


def _operations(model: Model) -> Iterator[tuple[Op, int]]:
    for segment in model.segments:
        for block in segment.blocks:
            for op in block.ops:
                yield op, segment.repeat


def _kernel(job: Job, policy: KernelPolicy, op: Op) -> tuple[str, str, int]:
    """The kernel of one attention, why it is that one, and the window that makes its mask."""
    dtype = policy.precision.compute
    name = chosen(policy, op, dtype)
    own = KERNEL_SETS[policy.kernels]
    if policy.attention in dict(own.attention).values():
        again = "; it runs again in backward" if policy.recomputed else ""
        return name, own.why_attention + again, 0
    if name == "eager":
        return name, "as asked for, or the only one that the model has", 0
    if policy.attention == "flash":
        packed = getattr(job.workload, "padding", "none") == "packed"
        varlen = "; packed sequences need no mask: it is told where they begin (varlen)" if packed else ""
        return name, "as asked for" + ("; unpadding copies queries, keys and values" if policy.padded else varlen), 0
    if not has_mask(policy, op):
        return name, _without_mask(job, policy, op, name, dtype), 0
    if _padded(job.workload):
        why = "packed sequences need a mask" if job.workload.padding == "packed" else "a padding mask is passed"
        return name, f"{why}; keys and values are repeated, and each layer keeps a mask", 0
    window = op.attributes["window"]
    if window in policy.binding_windows:
        return name, f"the window of {window:,} is not longer than the sequence, so a mask is passed", window
    runtime = runtime_of(job)
    return name, f"{runtime.name} {runtime.version} makes a mask where neither a mask nor a cache object is passed", 0


def _without_mask(job: Job, policy: KernelPolicy, op: Op, name: str, dtype: str) -> str:
    """Why torch takes this kernel where there is no mask."""
    capability = job.cluster.device.compute_capability if job.cluster is not None else None
    if name == "flash":
        cudnn = ", or cuDNN's kernel, which recent torch prefers and which keeps the same tensors"
        return f"{dtype}, no mask" + (cudnn if capability is not None and capability >= HOPPER else "")
    if policy.device_capability is not None and dtype in ("bf16", "fp16"):
        return "compute capability {}.{} has no FlashAttention in torch".format(*policy.device_capability)
    if name == "math":
        return f"grouped heads in {dtype}, which no fused kernel takes"
    return f"{dtype}, heads of {op.inputs[0].width // op.attributes['num_heads']}, no mask"


def _padded(workload: Workload) -> TypeGuard[Training]:
    return isinstance(workload, Training) and workload.padding != "none"


def _cost_of_mask(job: Job, estimate: EstimateFunction, device_bytes: int) -> int | None:
    """Device bytes that the mask costs: the same job without padding, or with the cache object that avoids the mask."""
    workload = job.workload
    if not isinstance(workload, Training):
        return None
    if _padded(workload):
        other = job.replace(workload=workload.replace(padding="none"))
    elif runtime_of(job).mask_without_cache:
        other = job.replace(overheads=job.overheads.replace(runtime=runtime_of(job).name))
    else:
        return None
    return device_bytes - estimate(other).peak.device_bytes
