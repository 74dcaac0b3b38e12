"""From a resolved job to what decides its profile: which kernels run, which optimizer, what the runtime's habits change."""

from __future__ import annotations

from typing import Any

from memfit.account import finetuning, overheads
from memfit.account.checkpoints import find_checkpointing
from memfit.account.evaluation import EvaluationPolicy
from memfit.account.layout import layout_of
from memfit.account.optimizers import Optimizer, find_optimizer
from memfit.account.overheads import Overhead
from memfit.account.resolve import runtime_of
from memfit.account.sharding import SCHEMES, UNSHARDED, Formats, Sharding, formats_of
from memfit.account.standing import TrainingPolicy
from memfit.job import FineTuning, Inference, Job, Training
from memfit.kernels import KernelPolicy
from memfit.kernels.ring import Ring
from memfit.kernels.sets import KERNEL_SETS, KernelSet
from memfit.precision import QUANTIZED, PrecisionPolicy, training_policy
from memfit.runtimes import Runtime
from memfit.runtimes.pipelines import PIPELINES


def optimizer_of(job: Job, workload: Training) -> Optimizer:
    """The optimizer with the runtime's habits: which implementation `adamw` means, what embeddings keep."""
    runtime, scheme = runtime_of(job), SCHEMES.get(layout_of(job).scheme)
    adamw = (scheme.adamw if scheme else "") or runtime.adamw
    optimizer = find_optimizer(adamw if workload.optimizer == "adamw" else workload.optimizer)
    return optimizer._replace(full_embeddings=True) if optimizer.blockwise and runtime.full_embedding_states else optimizer


def workspace_of(job: Job, *, training: bool) -> Overhead:
    """Library workspaces: as given, or the device's own."""
    given = job.overheads.workspace
    if given is not None:
        return Overhead(given, given, given, "given by hand")
    return overheads.workspace(job.cluster.device if job.cluster else None, training=training)


def _capability(job: Job) -> tuple[int, int] | None:
    """Only an old device's capability changes kernels; `None` for all others keeps their profiles shared."""
    capability = job.cluster.device.compute_capability if job.cluster else None
    return capability if capability is not None and capability < (8, 0) else None


def _copies(job: Job, kernel_set: KernelSet) -> bool:
    """Whether fused attention runs on a device on which it copies; without a device it does not."""
    capability = job.cluster.device.compute_capability if job.cluster else None
    return kernel_set.copies_below is not None and capability is not None and capability < kernel_set.copies_below


def _caches(job: Job, workload: Training) -> bool:
    """Whether forward builds a cache object: checkpointing switches it off, and encoders have none."""
    if finetuning.virtual_keys(workload):
        return True  # it is what holds them
    if workload.use_cache != "on" or workload.checkpointing != "none":
        return False
    model = job.model
    return (model.kind == "decoder" or model.encoder_decoder) and model.family not in runtime_of(job).uncached


def _loss(job: Job, workload: Training) -> str:
    """The loss as the kernel set computes it."""
    if workload.loss == "eager":
        if job.model.family in KERNEL_SETS[workload.kernels or "eager"].plain_loss:
            return "in-place"
        if workload.kernels == "compile" and not runtime_of(job).compiles_loss:
            return "uncompiled"
    return workload.loss or "eager"


def _chunks(job: Job, workload: Training, seq: int) -> int:
    """Chunks of a chunked loss: as said, or as many as keep a kernel set's own within its bytes of fp32 logits."""
    limit = KERNEL_SETS[workload.kernels or "eager"].chunk_bytes
    if not limit or workload.loss != "fused":
        return workload.loss_chunks
    logits = 4 * job.model.vocab_size * workload.batch * seq
    return 1 if logits <= limit else -(-logits // (4 * limit)) * 4


def _masked(workload: Training) -> bool:
    """Whether batches bring a mask: padding does, packing does unless FlashAttention is told where the sequences begin."""
    return workload.padding == "right" or (workload.padding == "packed" and workload.attention != "flash")


def _masked_by_runtime(job: Job, workload: Training) -> bool:
    """Whether the runtime makes a mask although nothing is padded."""
    if workload.attention != "sdpa":
        return False
    runtime, model = runtime_of(job), job.model
    looks = runtime.mask_without_cache and model.kind == "decoder" and model.family not in runtime.own_masks
    return looks and not _caches(job, workload)


def _causal_buffers(job: Job) -> int:
    """L P^2: a boolean triangle over all positions in every layer, where the release's modelling code has them."""
    model = job.model
    return model.num_layers * (model.max_positions or 0) ** 2 if model.family in runtime_of(job).causal_buffers else 0


MOST_REMEMBERED = 256
"""Policies that are remembered of a model."""


def training_policies(job: Job, workload: Training) -> tuple[KernelPolicy, TrainingPolicy]:
    """What decides the kernels and the step of a training job: the same for most batches and lengths, so it is remembered."""
    known = job.model.memory.setdefault("policies", {})
    beside = (job.overheads, job.parallelism, job.cluster)  # they are kept with what was found, so that no other gets their id
    key = (type(workload), *map(id, beside), *_without_numbers(job, workload))
    found = known.get(key)
    if found is None:
        if len(known) >= MOST_REMEMBERED:
            known.clear()
        found = known[key] = (beside, _training_policies(job, workload))
    policies: tuple[KernelPolicy, TrainingPolicy] = found[1]
    return policies


def _without_numbers(job: Job, workload: Training) -> tuple[Any, ...]:
    """The fields of a workload, with what its batch and its length decide in place of these two."""
    batch, seq = workload.batch, workload.seq or 1
    windows = job.model.windows
    if windows:
        keys = seq + finetuning.virtual_tokens(workload) + finetuning.virtual_keys(workload)
        windows = tuple([window for window in windows if window <= keys])
    chunks = (batch, seq) if KERNEL_SETS[workload.kernels or "eager"].chunk_bytes else ()
    fields = {**workload.__dict__, "batch": batch == 1, "seq": (windows, chunks), "target_seq": None}
    return tuple(fields.values())


def _training_policies(job: Job, workload: Training) -> tuple[KernelPolicy, TrainingPolicy]:
    keys = (workload.seq or 1) + finetuning.virtual_tokens(workload) + finetuning.virtual_keys(workload)
    runtime, kernel_set = runtime_of(job), KERNEL_SETS[workload.kernels or "eager"]
    mixed = "fsdp2" if _casts_units_alone(job, workload) else runtime.mixed
    precision = training_policy(workload.precision or "bf16-mixed", workload.weight_dtype, mixed)
    formats = _formats(job, precision)
    if formats is not None:
        precision = formats.kernels
    checkpointing = find_checkpointing(workload.checkpointing)
    windows = job.model.windows
    kernels = KernelPolicy(
        **finetuning.fields(job.model, workload, precision),
        attention=workload.attention,
        loss=_loss(job, workload),
        loss_chunks=_chunks(job, workload, (workload.seq or 1) + finetuning.virtual_tokens(workload)),
        loss_upcast=workload.loss_upcast,
        shifted=runtime.shifted_logits and job.model.loss == "causal-lm",
        kernels=kernel_set.name,
        norms_apart=job.model.family in kernel_set.apart,
        padded=(_masked(workload) and not runtime.ignores_padding) or _masked_by_runtime(job, workload),
        recomputed=checkpointing.parts,
        repeated_heads=runtime.repeated_heads,
        attention_copies=_copies(job, kernel_set),
        binding_windows=tuple([window for window in windows if window <= keys]) if windows else (),
        dropout=workload.dropout,
        one_sequence=workload.batch == 1 and (workload.attention == "eager" or job.model.one_sequence_differs),
        device_capability=_capability(job),
        fused_mixers=workload.mixer_kernels == "fused",
        cache=runtime.cache_format if _caches(job, workload) else "",
        ring=_ring(job),
        **_split(job, runtime),
    )
    staged = (job.parallelism.pp or 1) > 1
    accumulates = workload.grad_accum > 1 or staged  # a pipeline is filled with micro-batches
    policy = TrainingPolicy(
        optimizer=optimizer_of(job, workload),
        checkpointing=checkpointing,
        outputs_kept=workload.outputs == "kept",
        gradients_persist=workload.zero_grad == "zeros" or accumulates or runtime.gradient_buffer,
        workspace=workspace_of(job, training=True).bytes,
        buffers=_causal_buffers(job),
        in_backward=workload.optimizer_in_backward,
        buckets=workload.ddp or "none",
        ema=(workload.ema_dtype or trained_format(kernels)) if workload.ema == "device" else "",
        evaluation=_evaluation(job, workload),
        sharding=_sharding(job, workload, formats),
        pipeline=PIPELINES[runtime.pipeline] if staged else None,
        early_stop=runtime.early_stop,
        batch_tensors=runtime.batch_tensors,
    )
    return kernels, policy


def _ring(job: Job) -> Ring | None:
    """Context parallelism, as the runtime's attention does it."""
    degree = job.parallelism.cp or 1
    return Ring(runtime_of(job).context_parallel, degree) if degree > 1 else None


def _split(job: Job, runtime: Runtime) -> dict[str, Any]:
    """What the runtime does where devices share the layers; nothing where they do not, so that profiles are shared."""
    one = layout_of(job)
    if one.tp == 1:
        return {}
    return {"collectives": runtime.collectives, "regathers": runtime.regathers, "split_logits": runtime.split_logits}


def _formats(job: Job, precision: PrecisionPolicy) -> Formats | None:
    """What the precision means under the job's scheme; `None` where there is none, and where nothing is left to gather from."""
    one = layout_of(job)
    scheme = SCHEMES.get(one.scheme)
    if scheme is None or (scheme.gathers and one.shards == 1):
        return None
    return formats_of(scheme, precision, trainer=runtime_of(job).trainer)


def _casts_units_alone(job: Job, workload: Training) -> bool:
    """FSDP over a single device: fp32 weights that nobody shares, and of each unit a copy in bf16 while it runs."""
    one = layout_of(job)
    scheme = SCHEMES.get(one.scheme)
    frozen = isinstance(workload, FineTuning) and workload.method != "full"
    over_fp32 = workload.precision in (None, "bf16-mixed") and workload.weight_dtype in (None, "fp32")
    return scheme is not None and scheme.gathers and one.shards == 1 and over_fp32 and not frozen


def _sharding(job: Job, workload: Training, formats: Formats | None) -> Sharding:
    """How the states are split over data-parallel devices."""
    one = layout_of(job)
    if formats is None or (one.shards == 1 and not formats.master):
        return UNSHARDED
    runtime, gathers = runtime_of(job), SCHEMES[one.scheme].gathers
    accumulates = workload.grad_accum > 1 and runtime.trainer
    return Sharding(
        one.scheme,
        one.zero,
        one.shards,
        one.dp_replicate,
        max(1, one.shards // one.ep),
        one.offload,
        formats.stored,
        formats.reduced,
        formats.gradient,
        formats.master,
        resident=gathers and one.pp > 1,
        unsynced=gathers and (accumulates or one.pp > 1),
        separate=runtime.separate_units,
        zero_init=job.parallelism.zero_init,
    )


def _evaluation(job: Job, workload: Training) -> EvaluationPolicy | None:
    """The evaluation between steps; `None` if none was asked for."""
    if workload.eval_batch is None:
        return None
    rows = workload.eval_rows or 0
    if rows and workload.eval_accumulation:
        rows = min(rows, workload.eval_batch * workload.eval_accumulation)
    return EvaluationPolicy(
        rows=rows,
        joined=rows > workload.eval_batch,
        fp32=str(workload.precision).endswith("-mixed") and runtime_of(job).trainer,
        one_sequence=workload.eval_batch == 1,
        frees_gradients=workload.grad_accum > 1 and workload.zero_grad == "none",
    )


def trained_format(kernels: KernelPolicy) -> str:
    """The format of what is trained."""
    return kernels.adapter.dtype if kernels.adapter else kernels.precision.updated


def kernel_policy(job: Job) -> KernelPolicy:
    """What decides the kernels of a resolved job; nothing is compiled for it."""
    if isinstance(job.workload, Inference):
        return inference_kernels(job, job.workload)
    return training_policies(job, job.workload)[0]


def inference_kernels(job: Job, workload: Inference) -> KernelPolicy:
    """What decides the kernels of a serving job."""
    dtype = workload.weight_dtype or "bf16"
    prompt = workload.prompt or 1
    quantization = workload.quantization or "none"
    return KernelPolicy(
        precision=PrecisionPolicy(dtype, dtype, dtype, False),
        attention=workload.attention,
        training=False,
        train_all=False,
        binding_windows=tuple(window for window in job.model.windows if window <= prompt),
        one_sequence=workload.concurrency == 1 and (workload.attention == "eager" or job.model.one_sequence_differs),
        quantized=None if quantization == "none" else QUANTIZED[quantization],
        device_capability=_capability(job),
        fused_mixers=workload.mixer_kernels == "fused",
        logits_last=workload.logits == "last" and job.model.kind == "decoder",
        generating=job.model.loss in ("causal-lm", "seq2seq-lm"),
    )
