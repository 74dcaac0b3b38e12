"""Levers of training and fine-tuning on one device, cheapest first."""

from __future__ import annotations

from collections.abc import Callable

from memfit.account.checkpoints import find_checkpointing
from memfit.account.layout import layout_of
from memfit.fit.levers.adapters import LORA, QLORA
from memfit.fit.levers.common import ATTENTION, MIXER_KERNELS, has_bf16, is_trainer, method_of, training_of
from memfit.fit.levers.lever import Lever, with_workload
from memfit.fit.levers.spread import FSDP, OFFLOAD_OPTIMIZER, OFFLOAD_PARAMS, PIPELINE, SEQUENCE, TENSOR, ZERO_1, ZERO_2
from memfit.job import FineTuning, Job
from memfit.options import options_of
from memfit.precision import DTYPE_BYTES
from memfit.units import format_gib

_WITH_32_BIT_STATES = ("adamw", "adamw-foreach", "adamw-loop", "adamw-fused")

_WITH_8_BIT_STATES = ("adamw-8bit", "paged-adamw-8bit")

_STATE_BYTES_8_BIT = 2 + 8 / 256
"""Two states of one byte and two fp32 scales per block of 256 (bitsandbytes, optim/optimizer.py: blocksize 256)."""


def _spell(trainer: str, code: str) -> Callable[[Job], tuple[str, ...]]:
    """Flags that are one HF Trainer argument or one line of a training loop."""
    return lambda job: (trainer if is_trainer(job) else code,)


# --- fused optimizer


def _fused_adamw_flags(job: Job) -> tuple[str, ...]:
    return ("--optim adamw_torch_fused",) if is_trainer(job) else ("torch.optim.AdamW(..., fused=True)",)


FUSED_ADAMW = Lever(
    name="adamw-fused",
    group="optimizer",
    free=True,
    why_here="the same arithmetic in one kernel: nothing is lost",
    applies=lambda job: training_of(job).optimizer in ("adamw", "adamw-foreach", "adamw-loop"),
    edit=lambda job: with_workload(job, optimizer="adamw-fused"),
    change=lambda before, after: f"fused AdamW kernel instead of {training_of(before).optimizer}",
    cost=lambda before, after: "none: the same update in one kernel, without the temporary copies of the foreach form",
    flags=_fused_adamw_flags,
)

# --- fused loss


def _adapts_head(job: Job) -> bool:
    """An adapter on the head would not be used: the fused loss reads the head's weight itself."""
    return isinstance(job.workload, FineTuning) and "lm_head" in job.workload.lora_targets.split(",")


def _fused_loss_cost(before: Job, after: Job) -> str:
    vocabulary = before.model.vocab_size
    return (
        f"none in quality, about the same speed: a token's {vocabulary:,} logits are made chunk by chunk; needs the Liger kernels"
    )


FUSED_LOSS = Lever(
    name="fused-loss",
    group="loss",
    free=True,
    why_here="the same loss and gradients; a dependency to install",
    applies=lambda job: training_of(job).loss not in ("fused", "cut") and job.model.loss == "causal-lm" and not _adapts_head(job),
    edit=lambda job: with_workload(job, loss="fused"),
    change=lambda before, after: "loss fused with the head, logits never stored",
    cost=_fused_loss_cost,
    flags=lambda job: ("--use_liger_kernel true",) if is_trainer(job) else ("LigerFusedLinearCrossEntropyLoss()",),
)

# --- evaluation


def _collects(job: Job) -> bool:
    workload = training_of(job)
    return bool(workload.eval_batch and workload.eval_rows) and workload.eval_accumulation is None


EVAL_ACCUMULATION = Lever(
    name="eval-accumulation",
    group="evaluation",
    why_here="training is as before; each evaluation batch is copied to the host",
    applies=_collects,
    edit=lambda job: with_workload(job, eval_accumulation=1),
    change=lambda before, after: "collected logits moved to the host after every evaluation batch",
    cost=lambda before, after: (
        f"the logits of {training_of(before).eval_rows or 0:,} rows in host memory, and the time to copy them; "
        "or return less with preprocess_logits_for_metrics"
    ),
    flags=_spell("--eval_accumulation_steps 1", "outputs.append(logits.cpu())"),
)

# --- smaller micro-batch


def _divisor_at_most(whole: int, value: int) -> int:
    """The largest divisor of `whole` that is at most `value` (at least 1)."""
    best, candidate = 1, 1
    while candidate * candidate <= whole:
        if whole % candidate == 0:
            best = max([best, *(one for one in (candidate, whole // candidate) if one <= value)])
        candidate += 1
    return best


def _accumulable(job: Job) -> bool:
    """Whether the whole global batch may be accumulated: gradients live until the step, and the field takes no more micro-batches
    than it states."""
    workload = training_of(job)
    most = options_of(type(workload))["grad_accum"].maximum or 0
    return not workload.optimizer_in_backward and workload.batch * workload.grad_accum <= most


def _micro_batch(job: Job, value: int) -> Job:
    """The micro-batch cut to a divisor of itself, accumulation multiplied: the global batch stays exactly the same."""
    old = training_of(job)
    batch = _divisor_at_most(old.batch, value)
    return with_workload(job, batch=batch, grad_accum=old.grad_accum * (old.batch // batch))


def _micro_batch_cost(before: Job, after: Job) -> str:
    old, new = training_of(before), training_of(after)
    tokens = new.batch * (new.seq or 1)
    if before.model.pixels:
        return (
            f"same global batch of {old.batch * old.grad_accum:,} images in {new.grad_accum:,} micro-batches of {new.batch:,}: "
            f"lower throughput; batch norm, if there is any, sees {new.batch:,} images"
        )
    return (
        f"same global batch of {old.batch * old.grad_accum:,} sequences in {new.grad_accum:,} micro-batches of {new.batch:,}: "
        f"lower throughput, as each kernel sees {tokens:,} tokens instead of {old.batch * (old.seq or 1):,}"
    )


def _micro_batch_change(before: Job, after: Job) -> str:
    new = training_of(after)
    return f"micro-batch {new.batch:,} with {new.grad_accum:,} accumulation steps"


def _micro_batch_flags(job: Job) -> tuple[str, ...]:
    new = training_of(job)
    if is_trainer(job):
        return (f"--per_device_train_batch_size {new.batch}", f"--gradient_accumulation_steps {new.grad_accum}")
    return (f"batch_size={new.batch}", f"optimizer.step() every {new.grad_accum} micro-batches")


MICRO_BATCH = Lever(
    name="micro-batch",
    group="micro-batch",
    why_here="the same gradients; smaller kernels use the device less well",
    applies=lambda job: training_of(job).batch > 1 and _accumulable(job),
    edit=lambda job: _micro_batch(job, 1),
    edit_to=_micro_batch,
    value=lambda job: training_of(job).batch,
    change=_micro_batch_change,
    cost=_micro_batch_cost,
    flags=_micro_batch_flags,
)

# --- checkpointing


def _recomputes(job: Job) -> bool:
    """Whether layers can run again: not where a prefix stands in a cache object, which checkpointing does without."""
    return method_of(job) != "prefix"


def _selective_flags(job: Job) -> tuple[str, ...]:
    kept = "context_fn=partial(create_selective_checkpoint_contexts, policy)"
    if is_trainer(job):
        return ("--gradient_checkpointing true", f"gradient_checkpointing_kwargs=dict(use_reentrant=False, {kept})")
    return (f"model.gradient_checkpointing_enable(dict(use_reentrant=False, {kept}))",)


SELECTIVE = Lever(
    name="selective-checkpointing",
    group="checkpointing",
    why_here="the same gradients; at most a sixth more compute, always",
    applies=lambda job: training_of(job).checkpointing == "none" and job.model.loss is not None and _recomputes(job),
    edit=lambda job: with_workload(job, checkpointing="selective"),
    change=lambda before, after: "selective checkpointing: attention and every second matrix product kept",
    # Half of the products of one more forward pass; forward : backward = 1 : 2, so 3 units become at most 3.5.
    cost=lambda before, after: (
        "up to 17 % more compute: half of the matrix products of each layer's forward run twice; needs a policy of a few lines"
    ),
    flags=_selective_flags,
)

CHECKPOINTING = Lever(
    name="checkpointing",
    group="checkpointing",
    why_here="the same gradients; a third more compute, always",
    applies=lambda job: (
        find_checkpointing(training_of(job).checkpointing).kind in ("none", "selective", "every", "first") and _recomputes(job)
    ),
    edit=lambda job: with_workload(job, checkpointing="full"),
    change=lambda before, after: "activation checkpointing of every layer",
    # Chen et al. 2016 (arXiv:1604.06174): one more forward pass; forward : backward = 1 : 2, so 3 units become 4.
    cost=lambda before, after: (
        "about 33 % more compute: each layer's forward runs twice (8 instead of 6 FLOPs per parameter and token)"
    ),
    flags=_spell("--gradient_checkpointing true", "model.gradient_checkpointing_enable()"),
)


def _inputs_of_layers(job: Job) -> int:
    """Bytes of the inputs of all layers, in the format of the hidden states."""
    workload, model = training_of(job), job.model
    width = DTYPE_BYTES[workload.weight_dtype or "fp32"]
    return model.num_layers * model.hidden_size * width * workload.batch * (workload.seq or 1)


OFFLOADED = Lever(
    name="offloaded-checkpointing",
    group="checkpointing",
    why_here="as checkpointing, and each layer's input over the host bus and back",
    applies=lambda job: (
        training_of(job).checkpointing != "offloaded"
        and bool(job.model.hidden_size)
        and not job.model.pixels
        and _recomputes(job)
    ),
    edit=lambda job: with_workload(job, checkpointing="offloaded"),
    change=lambda before, after: "activation checkpointing with each layer's input in host memory",
    cost=lambda before, after: (
        f"about 33 % more compute, and {format_gib(_inputs_of_layers(after))} of layers' inputs to host memory and back "
        "in every micro-batch; a few percent slower where the copies overlap with compute"
    ),
    # checkpoint() hands its inputs to autograd, whose hooks move them (torch/utils/checkpoint.py, _NoopSaveInputs)
    flags=lambda job: (
        ('use_gradient_checkpointing="unsloth"',)
        if is_trainer(job)
        else ("model.gradient_checkpointing_enable()", "with torch.autograd.graph.save_on_cpu(pin_memory=True)")
    ),
)

# --- optimizer in backward


def _steps_at_once(job: Job) -> bool:
    """Whether every gradient is final when it arrives; a larger micro-batch leaves the choice of accumulating to its lever."""
    workload = training_of(job)
    if workload.precision == "fp16-mixed":
        return False  # GradScaler looks at all gradients before a step
    final = workload.grad_accum == 1 and workload.zero_grad == "none" and not workload.clip_grad
    alone = workload.ddp in (None, "none") and workload.batch == 1 and not layout_of(job).zero
    return final and alone and not workload.optimizer_in_backward and not is_trainer(job) and method_of(job) == "full"


OPTIMIZER_IN_BACKWARD = Lever(
    name="optimizer-in-backward",
    group="optimizer-in-backward",
    why_here="the same update and the same compute; no clipping and no accumulation any more",
    applies=_steps_at_once,
    edit=lambda job: with_workload(job, optimizer_in_backward=True),
    change=lambda before, after: "optimizer step within backward, each gradient freed at once",
    cost=lambda before, after: (
        "the same update in a step per parameter, a few percent slower; gradients cannot be clipped by their global norm, "
        "accumulated or read after backward"
    ),
    flags=lambda job: ("parameter.register_post_accumulate_grad_hook(step)  # for each parameter, with an optimizer of its own",),
)

# --- 8-bit optimizers


def _states_8_bit(job: Job) -> int:
    return round(job.model.num_parameters * _STATE_BYTES_8_BIT)


def _wants_8_bit(job: Job) -> bool:
    # Adapters are a few thousandths of the parameters: their states are not what fills the device.
    return training_of(job).optimizer in _WITH_32_BIT_STATES and method_of(job) == "full"


def _adamw_8bit_flags(job: Job) -> tuple[str, ...]:
    if layout_of(job).scheme == "fsdp2":  # bitsandbytes' kernels do not take DTensors (bitsandbytes#1633); torchao's states do
        return ("--optim adamw_torch_8bit  # torchao",) if is_trainer(job) else ("torchao.optim.AdamW8bit(...)",)
    return _spell("--optim adamw_bnb_8bit", "bitsandbytes.optim.AdamW8bit(...)")(job)


ADAMW_8BIT = Lever(
    name="adamw-8bit",
    group="optimizer",
    why_here="no slower; the states are rounded, which published runs do not notice",
    applies=_wants_8_bit,
    edit=lambda job: with_workload(job, optimizer="adamw-8bit"),
    change=lambda before, after: "8-bit AdamW",
    # Dettmers et al. 2022 (arXiv:2110.02861): 8-bit states match 32-bit ones over a range of tasks.
    cost=lambda before, after: (
        "states rounded to 8 bits, 2.03 B per parameter: final loss as with 32 bits in published runs; needs bitsandbytes, "
        "under FSDP2 torchao"
    ),
    flags=_adamw_8bit_flags,
)

PAGED_ADAMW_8BIT = Lever(
    name="paged-adamw-8bit",
    group="optimizer",
    why_here="as 8-bit AdamW, and slower when pages move to the host",
    applies=lambda job: method_of(job) == "full" and training_of(job).optimizer in (*_WITH_32_BIT_STATES, "adamw-8bit"),
    edit=lambda job: with_workload(job, optimizer="paged-adamw-8bit"),
    change=lambda before, after: "paged 8-bit AdamW",
    cost=lambda before, after: (
        "8-bit states that the driver moves to host memory under pressure: "
        f"up to {format_gib(_states_8_bit(before))} there, and as much over the host bus and back each step; needs bitsandbytes"
    ),
    flags=_spell("--optim paged_adamw_8bit", "bitsandbytes.optim.PagedAdamW8bit(...)"),
)

ADAFACTOR = Lever(
    name="adafactor",
    group="optimizer",
    why_here="another optimizer: its step size has to be tuned anew",
    applies=lambda job: method_of(job) == "full" and training_of(job).optimizer in (*_WITH_32_BIT_STATES, *_WITH_8_BIT_STATES),
    edit=lambda job: with_workload(job, optimizer="adafactor"),
    change=lambda before, after: "Adafactor",
    # Shazeer and Stern 2018 (arXiv:1804.04235): rows and columns of the second moment, no first moment.
    cost=lambda before, after: (
        "second moments as row and column means, no first moment: less than 1 % of Adam's states; converges otherwise than "
        "AdamW, tune the learning rate"
    ),
    flags=_spell("--optim adafactor", "torch.optim.Adafactor(...)"),
)

# --- pure 16-bit weights


def _wants_bf16_true(job: Job) -> bool:
    workload = training_of(job)
    mixed_over_fp32 = workload.precision == "bf16-mixed" and workload.weight_dtype in (None, "fp32")
    return (mixed_over_fp32 or workload.precision == "32-true") and method_of(job) == "full" and has_bf16(job)


def _bf16_true_flags(job: Job) -> tuple[str, ...]:
    cast = "model = model.to(torch.bfloat16)"
    return (cast, "--bf16 false") if is_trainer(job) else (cast, "no torch.autocast")


BF16_TRUE = Lever(
    name="bf16-true",
    group="precision",
    why_here="everything is still trained; small updates are lost to rounding",
    applies=_wants_bf16_true,
    edit=lambda job: with_workload(job, precision="bf16-true", weight_dtype="bf16"),
    change=lambda before, after: "weights, gradients and states in bf16",
    cost=lambda before, after: (
        "8 instead of 16 B per parameter under AdamW; updates below 1/256 of a weight are rounded away: "
        "prefer a larger learning rate or stochastic rounding, and compare the loss"
    ),
    flags=_bf16_true_flags,
)

TRAINING_LEVERS = (
    ATTENTION, MIXER_KERNELS, FUSED_ADAMW, FUSED_LOSS, EVAL_ACCUMULATION, ZERO_1, ZERO_2, FSDP, MICRO_BATCH,
    OPTIMIZER_IN_BACKWARD, SELECTIVE, CHECKPOINTING, OFFLOADED, SEQUENCE, *TENSOR, ADAMW_8BIT, PAGED_ADAMW_8BIT, ADAFACTOR,
    OFFLOAD_OPTIMIZER, *PIPELINE, BF16_TRUE, OFFLOAD_PARAMS, LORA, QLORA,
)  # fmt: skip
