"""Decisions on a job as they are made, and those on checkpointing and on the optimizer's step."""

from __future__ import annotations

from typing import Any

from memfit.account.checkpoints import find_checkpointing, num_checkpointed
from memfit.errors import UsageError
from memfit.job import Assumption, Job, Training, Workload
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import Model
from memfit.options import options_of
from memfit.runtimes import Runtime


class Choices:
    """Collects assumptions and warnings."""

    def __init__(self, workload: Workload) -> None:
        self.options = options_of(type(workload))
        self.changes: dict[str, Any] = {}
        self.assumptions: list[Assumption] = []
        self.warnings: list[tuple[str, str]] = []

    def assume(self, field: str, value: Any, why: str) -> None:
        self.changes[field] = value
        self.assumptions.append(Assumption(name=field, value=value, why=why, flag=self.options[field].flag))


def resolve_checkpointing(model: Model, runtime: Runtime, workload: Training, choices: Choices) -> None:
    """What the runtime means by `selective`; checkpointing that does nothing, or that transformers has no switch for."""
    text = workload.checkpointing
    if text == "none" and runtime.advice:
        choices.assume("checkpointing", "none", f"nothing is recomputed; {runtime.advice}")
    if text == "selective" and runtime.selective:
        text = choices.changes["checkpointing"] = f"selective:{runtime.selective}"
    checkpointing = find_checkpointing(text)
    able = KERNEL_SETS[workload.kernels or runtime.kernels].recomputes
    for part in checkpointing.parts:
        if part not in able:
            raise UsageError(f"--checkpointing {text}: {runtime.name} has no switch for it; --runtime megatron has")
    if not checkpointing.recomputes:
        return
    if not num_checkpointed(model, checkpointing):
        text = "the model has no layers to recompute"
        if checkpointing.kind == "every":
            text = f"{model.name} has fewer than {checkpointing.layers:,} layers, so nothing would be recomputed"
        raise UsageError(f"--checkpointing {workload.checkpointing[:60]}: {text}")
    if not model.checkpoints_layers:
        choices.warnings.append(
            (
                "checkpointing-by-hand",
                f"transformers' {model.architecture} has no gradient_checkpointing_enable: "
                "counted as if each block were wrapped in torch.utils.checkpoint",
            )
        )


def resolve_step(job: Job, runtime: Runtime, workload: Training, choices: Choices) -> None:
    """DDP over several devices; an optimizer that steps within backward needs every gradient to be final when it arrives."""
    layout = job.parallelism
    own_buffer = layout.sharding == "megatron"  # in which replicas' gradients are reduced as they are
    # devices that share a sequence hold the same weights, and add up their gradients as replicas do
    several = (layout.dp_replicate or 1) * (layout.cp or 1) > 1 and not layout.zero and not own_buffer
    if workload.ddp is None and runtime.mixed != "autocast":
        choices.changes["ddp"] = "none"  # it reduces its own gradients where they are
    elif workload.ddp is None:
        choices.changes["ddp"] = "copies" if several else "none"
        if several:
            why = "whole replicas are kept equal by DistributedDataParallel, whose buckets are copies of the gradients"
            choices.assume("ddp", "copies", why)
    elif workload.ddp != "none" and layout.zero:
        raise UsageError(
            f"--ddp {workload.ddp}: --zero {layout.zero} has buffers of its own for gradients: leave out one of them"
        )
    elif workload.ddp != "none" and job.cluster is not None and not several:
        raise UsageError(f"--ddp {workload.ddp}: one device has nobody to share gradients with; name several: --on 2x...")
    if workload.ema_dtype is not None and workload.ema == "none":
        raise UsageError(f"--ema-dtype {workload.ema_dtype} needs --ema device or --ema host")
    if not workload.optimizer_in_backward:
        return
    conflicts = {
        "--precision fp16-mixed (GradScaler looks at all gradients before a step)": workload.precision == "fp16-mixed",
        f"--grad-accum {workload.grad_accum}": workload.grad_accum > 1,
        f"--clip-grad {workload.clip_grad}": bool(workload.clip_grad),
        "--zero-grad zeros": workload.zero_grad == "zeros",
        f"--zero {layout.zero}": bool(layout.zero),
        f"--ddp {choices.changes.get('ddp', workload.ddp)}": choices.changes.get("ddp", workload.ddp) != "none",
    }
    given = [flag for flag, conflict in conflicts.items() if conflict]
    if given:
        raise UsageError(
            f"--optimizer-in-backward steps on each gradient as it arrives and frees it: it excludes {' and '.join(given)}"
        )
