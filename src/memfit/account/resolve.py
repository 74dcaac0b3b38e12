"""Fills in what a job does not say, and lists every decision as an assumption with the flag that changes it."""

from __future__ import annotations

from typing import NamedTuple

from memfit.account import finetuning, lengths, overheads
from memfit.account.choices import Choices, resolve_checkpointing, resolve_step
from memfit.account.context import check_context
from memfit.account.layout import layout_of, layout_warnings, resolve_parallelism
from memfit.account.pipelines import resolve_micro_batches
from memfit.account.ranks import check_layout, groups_of
from memfit.account.refusals import as_meant, check_runtime
from memfit.account.sharding import SCHEMES
from memfit.account.unused import unused
from memfit.errors import UsageError
from memfit.job import DTYPES, Assumption, FineTuning, Inference, Job, Training, Workload
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import Model
from memfit.precision import MIXED_SCHEMES, training_policy
from memfit.runtimes import DEFAULT_RUNTIME, RUNTIMES, Runtime, find_runtime, is_known
from memfit.units import format_count, format_gib

TYPICAL_SEQUENCE = 4096
_DEFAULTS_WORTH_SAYING = {
    "batch": "one sequence at a time",
    "concurrency": "one sequence at a time",
    "checkpointing": "nothing is recomputed",
    "optimizer": "torch.optim.AdamW",
    "padding": "no attention mask; any padding switches the attention kernel and costs memory",
    "logits": "what generation needs",
    "lora_rank": "PEFT examples' rank",
    "lora_targets": "every linear layer but the head, as QLoRA does",
}


FROZEN_BASE = (*finetuning.ADAPTER_METHODS, "prompt", "prefix")
"""Methods that leave all weights as they are."""


class Resolved(NamedTuple):
    """A job with every `None` filled in, what was assumed for it, and warnings as (code, text)."""

    job: Job
    assumptions: tuple[Assumption, ...]
    warnings: tuple[tuple[str, str], ...]


def runtime_of(job: Job) -> Runtime:
    """The runtime that the job names, or the default."""
    return find_runtime(job.overheads.runtime) if job.overheads.runtime else DEFAULT_RUNTIME


def resolve(job: Job) -> Resolved:
    """The job with every open field decided.

    Raises:
        UsageError: fields that contradict each other or the model.
    """
    workload = job.workload
    choices = Choices(workload)
    choices.assumptions += job.model.assumptions
    runtime = runtime_of(job)
    parallelism = resolve_parallelism(job, runtime, choices)
    job = job.replace(parallelism=parallelism) if parallelism is not job.parallelism else job
    if isinstance(workload, Inference):
        check_runtime(runtime, workload)
        _resolve_inference(job, workload, choices)
    else:
        check_runtime(runtime, as_meant(runtime, workload))
        _resolve_training(job, workload, choices)
    _resolve_attention(job, workload, choices)
    _resolve_mixers(job, workload, choices)
    for field, why in _DEFAULTS_WORTH_SAYING.items():
        if (
            field in choices.options
            and field not in choices.changes
            and getattr(workload, field) == choices.options[field].default
        ):
            choices.assumptions.append(
                Assumption(name=field, value=getattr(workload, field), why=why, flag=choices.options[field].flag)
            )
    resolved = workload.replace(**choices.changes)
    if isinstance(resolved, Training):
        training_policy(str(resolved.precision), resolved.weight_dtype, runtime.mixed)
    choices.warnings += unused(job.model, workload, resolved)
    _warn_of_release(job, choices)
    filled = job.replace(workload=resolved, parallelism=parallelism)
    check_layout(filled)
    choices.warnings += layout_warnings(filled)
    _warn_of_size(job, choices)
    _assume_overheads(filled, choices)
    _warn_of_devices(job, choices)
    return Resolved(filled, tuple(choices.assumptions), tuple(choices.warnings))


def _warn_of_release(job: Job, choices: Choices) -> None:
    """A release that no row of facts describes is counted as the nearest one that does."""
    runtime, text = runtime_of(job), job.overheads.runtime or ""
    if "@" in text and not is_known(text):
        nearest = RUNTIMES[runtime.name].version
        choices.warnings.append(
            ("unknown-release", f"--runtime {text[:60]}: nothing is known of this release: counted as {runtime.name} {nearest}")
        )


def _resolve_training(job: Job, workload: Training, choices: Choices) -> None:
    model, runtime = job.model, runtime_of(job)
    if model.family == "counts" and isinstance(workload, FineTuning) and workload.method != "full":
        raise UsageError(
            f"--method {workload.method} needs the layers' shapes, which counts do not give: name a model or its dimensions"
        )
    if model.pixels:
        _resolve_images(model, workload, choices)
    elif workload.seq is None:
        longest = model.max_positions or TYPICAL_SEQUENCE
        choices.assume(
            "seq", min(longest, TYPICAL_SEQUENCE), f"the model's maximum is {longest:,}; the longest batch of the run binds"
        )
    if model.encoder_decoder and workload.target_seq is None:
        length = choices.changes.get("seq", workload.seq)
        choices.assume("target_seq", length, "as long as the source")
    resolve_checkpointing(model, runtime, workload, choices)
    resolve_micro_batches(job.parallelism, workload, choices)
    check_context(job, workload, choices)
    resolve_step(job, runtime, workload, choices)
    if workload.eval_batch is None and (workload.eval_rows or workload.eval_accumulation):
        raise UsageError("--eval-rows and --eval-accumulation belong to an evaluation: say its batch with --eval-batch")
    if workload.eval_batch is not None and not workload.eval_rows:
        why = "only losses are collected; with compute_metrics the logits of all rows are: --eval-rows"
        choices.assumptions.append(Assumption(name="eval_rows", value=0, why=why, flag="--eval-rows"))
    if workload.outputs is None:
        choices.assume("outputs", runtime.outputs, f"what a {runtime.name} loop does")
    _resolve_kernels(model, runtime, workload, choices)
    if workload.use_cache is None:
        choices.changes["use_cache"] = runtime.use_cache
        if runtime.mask_without_cache and model.kind == "decoder" and workload.checkpointing == "none":
            why = "config.use_cache=False, as training scripts set it; left on, sdpa gets no mask but keys and values are copied"
            choices.assume("use_cache", runtime.use_cache, why)
    precision = workload.precision
    if precision is None:
        half = "fp16" if _lacks_bf16(job) else "bf16"
        adapters = isinstance(workload, FineTuning) and workload.method in FROZEN_BASE and workload.weight_dtype != "fp32"
        half = (workload.weight_dtype or half) if adapters else half
        precision = f"{half}-true" if adapters else f"{half}-mixed"
        why = (
            "frozen weights in 16 bit, as PEFT loads them"
            if adapters
            else f"autocast over {workload.weight_dtype or 'fp32'} weights, the usual mixed precision"
        )
        why = MIXED_SCHEMES[runtime.mixed].why or why
        choices.assume("precision", precision, why + (" (this device has no bf16)" if _lacks_bf16(job) else ""))
        if precision == "fp16-mixed" and workload.optimizer_in_backward:
            raise UsageError(
                "--optimizer-in-backward steps before GradScaler has looked at all gradients of fp16-mixed, the default on a "
                "device without bf16: use --precision 32-true"
            )
    policy = training_policy(precision, workload.weight_dtype, runtime.mixed)
    scheme = SCHEMES.get(layout_of(job).scheme)
    if workload.weight_dtype is None:
        if scheme is not None and policy.autocast:
            kept = policy.compute if scheme.master else policy.weight
            why = f"with fp32 masters, as {scheme.title} has them" if scheme.master else "sharded; gathered for each layer"
            choices.assume("weight_dtype", kept, why)
        elif policy.autocast:
            choices.assume("weight_dtype", policy.weight, "autocast over fp32 weights keeps the optimizer exact")
        else:
            choices.changes["weight_dtype"] = policy.stored
    if isinstance(workload, FineTuning) and workload.method == "qlora" and policy.weight == "fp32" and not policy.autocast:
        raise UsageError("--method qlora computes in 16 bit: use --precision bf16-true")
    if isinstance(workload, FineTuning) and model.family != "counts":
        finetuning.resolve(model, workload, runtime, choices)
    if model.loss is None and model.family != "counts":
        choices.warnings.append(
            ("no-loss", f"{model.architecture} has no head, so no loss is counted; name the trained class with --head")
        )
    if "quantization" in model.facts:
        choices.warnings.append(
            (
                "quantized-checkpoint",
                f"the checkpoint is {model.facts['quantization']}; training is counted on weights in {policy.weight}",
            )
        )


def _resolve_kernels(model: Model, runtime: Runtime, workload: Training, choices: Choices) -> None:
    """The kernel set, what the runtime brings where the job does not say, and the loss that comes with it.

    Raises:
        UsageError: a set without kernels for this family.
    """
    name = workload.kernels
    if name is None:
        name = choices.changes["kernels"] = runtime.kernels
    found = KERNEL_SETS[name]
    for one, flag in ((found, f"--kernels {name}"), (KERNEL_SETS[runtime.kernels], f"--runtime {runtime.name}")):
        if one.families is not None and model.family not in one.families:
            chosen = flag if workload.kernels or one is not found else f"--runtime {runtime.name}"
            raise UsageError(f"{chosen} is not counted for {model.family}, only for {', '.join(one.families)}: leave it out")
    if workload.loss in ("fused", "cut") and model.loss in ("masked-lm", "seq2seq-lm"):
        choices.changes["loss"] = "eager"
        text = f"--loss {workload.loss} changes nothing here: Liger and cut cross-entropy replace the loss of causal models only"
        choices.warnings.append(("loss-unused", text))
    if workload.padding == "packed" and not found.packs:
        raise UsageError(f"--kernels {name} has no attention for --padding packed; --kernels te has")
    own = dict(found.attention).get(workload.attention)
    if own is not None and own != workload.attention:
        choices.assume("attention", own, found.why_attention)
    if workload.loss is None:
        fused = found.loss == "fused" and model.loss == "causal-lm" and model.family not in found.plain_loss
        why = f"{name} kernels compute it with the head" if fused else "the model's own loss, logits upcast to fp32"
        choices.assume("loss", "fused" if fused else "eager", why)


def _resolve_images(model: Model, workload: Training, choices: Choices) -> None:
    """Images have their own length, tokens of the image or none at all, and no padding."""
    choices.changes["seq"] = model.tokens_per_image
    choices.changes["padding"] = "none"


def _lacks_bf16(job: Job) -> bool:
    native = job.cluster.device.native_dtypes if job.cluster else ()
    return bool(native) and "bf16" not in native


def _lacks_fp16(job: Job) -> bool:
    """Of TPUs alone: the formats listed for other devices are those with a published rate."""
    return job.cluster is not None and job.cluster.device.kind == "tpu" and "fp16" not in job.cluster.device.native_dtypes


def _resolve_inference(job: Job, workload: Inference, choices: Choices) -> None:
    model = job.model
    if model.pixels:
        choices.changes["context"] = choices.changes["prompt"] = model.tokens_per_image
    elif model.encoder_decoder:
        lengths.resolve_source_and_target(model, workload, choices)
    else:
        lengths.resolve_lengths(model, workload, choices)
    lengths.check_cache(model, workload)
    dtype = workload.weight_dtype
    if dtype is None:
        dtype = model.dtype if model.dtype in DTYPES else model.facts.get("published_dtype", "bf16")
        usual = f"the usual format of {model.family} checkpoints: the model names none"
        why = "the checkpoint's format" if model.dtype == dtype else usual
        if dtype == "bf16" and _lacks_bf16(job):
            dtype, why = "fp16", "this device has no bf16"
        elif dtype == "fp16" and _lacks_fp16(job):
            dtype, why = "bf16", "this device has no fp16"
        choices.assume("weight_dtype", dtype, why)
    if workload.kv_dtype is None:
        choices.assume("kv_dtype", dtype, "the cache follows the weights' format")
    if workload.quantization is None:
        stated = model.facts.get("quantization")
        choices.assume(
            "quantization",
            stated or "none",
            "the checkpoint's quantization_config" if stated else "no quantization_config in the config",
        )
    if workload.concurrency > 1:
        why = "prompts of equal length: padding adds a mask for every sequence and takes another attention kernel"
        choices.assumptions.append(Assumption(name="padding", value="none", why=why))
    _warn_of_quantization(job, workload, choices)


_COUNTED_AS = {
    "mxfp4": "in its experts alone, in blocks of 32",
    "int4": "in groups of 128",
    "nf4": "in blocks of 64",
    "nf4-dq": "in blocks of 64",
}


def _warn_of_quantization(job: Job, workload: Inference, choices: Choices) -> None:
    """What the checkpoint's quantization_config says beside the format, and what is counted in its place."""
    facts = job.model.facts
    stated, details = facts.get("quantization"), facts.get("quantization_details", ())
    if details and workload.quantization in (None, stated):
        how = _COUNTED_AS.get(str(stated), "with one scale per output row")
        text = (
            f"every linear layer but the head is counted as {stated} {how}; quantization_config also says: {', '.join(details)}"
        )
        choices.warnings.append(("quantization-details", text))
    cache = facts.get("quantization_cache", ())
    if cache and workload.kv_dtype is None:
        text = f"the cache is counted in the weights' format; quantization_config says {', '.join(cache)}: set --kv-dtype"
        choices.warnings.append(("quantized-cache", text))


def _why_not(model: Model) -> str:
    """Why an attention implementation is not supported."""
    if any(op.kind == "sink_attention" for segment in model.segments for block in segment.blocks for op in block.ops):
        return "(its attention has sinks)"
    return "(a bias is added to the scores)" if model.pixels or model.reads_across_blocks else "(soft-capped scores)"


def _resolve_attention(job: Job, workload: Workload, choices: Choices) -> None:
    model = job.model
    if not model.attention_kernels:
        return
    if "attention" in choices.changes:
        return
    if workload.attention not in model.attention_kernels:
        why = f"{model.family} does not support {workload.attention} {_why_not(model)}; it falls back to eager"
        choices.assume("attention", "eager", why)
    elif workload.attention == "sdpa" and model.family in runtime_of(job).no_sdpa:
        runtime = runtime_of(job)
        why = f"{runtime.name} {runtime.version} has no sdpa for {model.family}"
        choices.assume("attention", "eager", why)
    elif workload.attention == "sdpa":
        choices.assumptions.append(
            Assumption(
                name="attention",
                value="sdpa",
                why="the default; torch picks the kernel by mask, format and device",
                flag="--attention",
            )
        )
    capability = job.cluster.device.compute_capability if job.cluster else None
    if workload.attention == "flash" and capability is not None and capability < (8, 0):
        choices.warnings.append(
            (
                "flash-unsupported",
                "FlashAttention 2 needs compute capability 8.0; this device has {}.{}: use --attention sdpa".format(*capability),
            )
        )


def _resolve_mixers(job: Job, workload: Workload, choices: Choices) -> None:
    """Which kernels its scans run in is worth saying for models that have some."""
    if not job.model.states:
        if workload.mixer_kernels != "torch":
            text = f"{job.model.family} has no state spaces or gated delta rules: --mixer-kernels changes nothing"
            choices.warnings.append(("mixer-kernels-unused", text))
        return
    if workload.mixer_kernels == "torch":
        why = (
            "transformers' own code, which runs where mamba-ssm, causal-conv1d or flash-linear-attention are not installed; "
            "their fused kernels keep far less"
        )
        choices.assumptions.append(Assumption(name="mixer_kernels", value="torch", why=why, flag="--mixer-kernels"))
    elif isinstance(workload, Training) and isinstance(workload, FineTuning) and workload.method != "full":
        text = "the fused function of Mamba reads the weights of out_proj and x_proj directly: adapters on them have no effect"
        if any(
            op.kind in ("mamba_mixer", "mamba2_mixer") for one in job.model.segments for block in one.blocks for op in block.ops
        ):
            choices.warnings.append(("adapters-bypassed", text))


def _assume_overheads(job: Job, choices: Choices) -> None:
    given = job.overheads
    device = job.cluster.device if job.cluster else None
    if given.runtime is None:
        trains = isinstance(job.workload, Training)
        how = DEFAULT_RUNTIME.description if trains else DEFAULT_RUNTIME.inference
        choices.assumptions.append(Assumption(name="runtime", value=DEFAULT_RUNTIME.name, why=how, flag="--runtime"))
    if given.workspace is None:
        found = overheads.workspace(device, training=isinstance(job.workload, Training))
        choices.assumptions.append(
            Assumption(name="workspace", value=format_gib(found.bytes), why=found.source, flag="--workspace")
        )
    if given.communication is None and layout_of(job).devices > 1:
        found = overheads.communication(device, groups_of(job))
        choices.assumptions.append(
            Assumption(name="communication", value=format_gib(found.bytes), why=found.source, flag="--communication")
        )
    if given.cuda_context is None:
        found = overheads.context(device)
        choices.assumptions.append(
            Assumption(name="context memory", value=format_gib(found.bytes), why=found.source, flag="--cuda-context")
        )
    if given.fragmentation is None:
        gathers = layout_of(job).gathers_apart
        share = (overheads.GATHERED_SHARE if gathers else overheads.FRAGMENTATION_SHARE)[1]
        choices.assumptions.append(
            Assumption(
                name="fragmentation",
                value=f"{share} % of what comes and goes",
                why=overheads.GATHERED_SOURCE if gathers else overheads.FRAGMENTATION_SOURCE,
                flag="--fragmentation",
            )
        )


def _warn_of_size(job: Job, choices: Choices) -> None:
    """A stated number of parameters that the stated dimensions do not make."""
    model = job.model
    if model.stated_parameters is None:
        return
    from memfit.families.sizes import COUNT_TOLERANCE

    off = model.num_parameters / model.stated_parameters - 1
    if abs(off) > COUNT_TOLERANCE:
        made, stated = format_count(model.num_parameters), format_count(model.stated_parameters)
        text = f"the dimensions make {made} parameters, not the {stated} stated ({off:+.0%}): the dimensions are counted"
        choices.warnings.append(("size-mismatch", text))


def _warn_of_devices(job: Job, choices: Choices) -> None:
    cluster = job.cluster
    if cluster is None:
        return
    _warn_of_formats(job, choices)
    if cluster.device.kind in ("tpu", "unified", "npu"):
        differ = {"google": "XLA fuses, schedules and pads to tiles instead"}.get(cluster.device.vendor)
        differ = differ or f"on {cluster.device.vendor} they differ"
        choices.warnings.append(("other-runtime", f"kernels are counted as PyTorch on CUDA runs them; {differ}"))


def _warn_of_formats(job: Job, choices: Choices) -> None:
    """Formats that the device's units do not compute in. The bytes stay as counted; that it runs is not said."""
    workload, cluster = job.workload, job.cluster
    assert cluster is not None
    native = cluster.device.native_dtypes
    if not native:
        return
    fields = ("precision", "weight_dtype", "quantization", "kv_dtype")
    used = [str(getattr(workload, name, None)).removesuffix("-true").removesuffix("-mixed") for name in fields]
    if "bf16" in used and "bf16" not in native:
        instead = "--weight-dtype fp16" if isinstance(workload, Inference) else "--precision fp16-mixed"
        text = f"{cluster.device.title} has no bf16: torch emulates it slowly and some kernels refuse it; use {instead}"
        choices.warnings.append(("no-bf16", text))
    if "fp16" in used and _lacks_fp16(job):
        instead = "--weight-dtype bf16" if isinstance(workload, Inference) else "--precision bf16-mixed"
        choices.warnings.append(("no-fp16", f"{cluster.device.title} has no fp16 units: use {instead}, of the same size"))
    if "fp8" in used and "fp8" not in native:
        text = f"{cluster.device.title} has no fp8 units: an engine may store it as counted, but computes in 16 bits"
        choices.warnings.append(("no-fp8", text))
