"""Each component's formula with the job's numbers in it: `8,030,261,248 x 2 B`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memfit.account.checkpoints import Checkpointing, find_checkpointing, num_checkpointed
from memfit.account.layout import layout_of
from memfit.account.optimizers import Optimizer, Trained, find_optimizer
from memfit.account.overheads import FRAGMENTATION_SHARE, GATHERED_SHARE
from memfit.account.policies import trained_format
from memfit.account.ranks import groups_of
from memfit.account.resolve import runtime_of
from memfit.account.states import BLOCKWISE_BLOCK, added_tensors, gradient_bytes, trained_tensors
from memfit.job import FineTuning, Inference, Job, Training
from memfit.kernels import KernelPolicy
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import AXES
from memfit.parallel.legality import expert_counts
from memfit.precision import DTYPE_BYTES, KV_BYTES_X2

if TYPE_CHECKING:
    from memfit.account.compilation import Compiled


def _divided(text: str, parts: int, experts: int = 0) -> str:
    """`8,030,261,248 x 4 B / 8`: one device's part; `experts`: parts of the experts, where they are others."""
    if parts == 1:
        return text
    part = f"({text}) / {parts:,}" if " + " in text else f"{text} / {parts:,}"
    return part + (f" (experts / {experts:,})" if experts else "")


def _part(job: Job, compiled: Compiled, text: str, *, split: bool) -> str:
    """One device's part under the job's sharding; devices of --ep hold other experts, so fewer of them share each."""
    sharding = compiled.sharding
    others = sharding.expert_degree != sharding.degree and bool(expert_counts(job.model))
    return _divided(text, sharding.degree, sharding.expert_degree if others else 0) if split else text


def _stored(compiled: Compiled, dtype: str = "") -> KernelPolicy:
    """The kernels with the format in which a scheme keeps something, where that is not the one that operations read."""
    kernels = compiled.kernels
    dtype = dtype or compiled.sharding.stored
    return kernels._replace(precision=kernels.precision._replace(weight=dtype)) if dtype else kernels


def _weights(job: Job, compiled: Compiled) -> str:
    kernels = _stored(compiled)
    sharding = compiled.sharding
    text = _whole_weights(job, compiled, kernels)
    return _part(job, compiled, text, split=sharding.splits_weights)


def _whole_weights(job: Job, compiled: Compiled, kernels: KernelPolicy) -> str:
    element = DTYPE_BYTES[kernels.precision.stored]
    whole = job.model.facts.get("whole_parameters")
    count = f"{job.model.num_parameters:,}" + (f" (of {whole:,})" if whole else "")
    text = f"{count} x {element} B"
    if kernels.quantized is not None:
        text = f"linear layers in {kernels.quantized.name}, the rest of {count} x {element} B"
    if kernels.norm_dtype:
        text += f", norms in {kernels.norm_dtype}"
    workload = job.workload
    if not isinstance(workload, Training):
        return text
    added = added_tensors(job.model, kernels)
    for what, found in (
        (_beside(kernels), [one for one in added if one.role == "adapter"]),
        ("trained copies", [one for one in added if one.role != "adapter"]),
    ):
        text += f" + {_sum(found)} ({what})" if found else ""
    if workload.ema == "device":
        average = workload.ema_dtype or trained_format(kernels)
        text += f" + {compiled.profile.trained_parameters:,} x {DTYPE_BYTES[average]} B (a moving average of what is trained)"
    return text


def _beside(kernels: KernelPolicy) -> str:
    """What is trained beside frozen weights."""
    return "virtual tokens" if kernels.virtual_tokens else "the prefix encoder" if kernels.prefix else "adapters"


def _sum(tensors: Iterable[Trained]) -> str:
    """`262,735,872 x 2 B + 11,272,192 x 4 B`: elements by the bytes of one."""
    elements: dict[int, int] = {}
    for one in tensors:
        size = DTYPE_BYTES[one.dtype]
        elements[size] = elements.get(size, 0) + one.repeat * one.elements
    return " + ".join(f"{count:,} x {size} B" for size, count in sorted(elements.items()))


def _trained(job: Job, compiled: Compiled, dtype: str = "") -> tuple[str, str]:
    """What is trained, in words, and the bytes of one element: the sum of both where formats differ, and no bytes.

    `dtype`: the format of all of it, if it is not its own.
    """
    kernels = _stored(compiled)
    tensors = trained_tensors(job.model, kernels)
    tensors = [one._replace(dtype=dtype) for one in tensors] if dtype else tensors
    what, _, element = _sum(tensors).partition(" x ")
    if " + " in element:
        return f"({what} x {element})", ""
    if kernels.train_all:
        return f"{job.model.num_parameters:,}", f" x {element}"
    if kernels.adapter is None or kernels.choice is not None:
        return f"{what} trained parameters", f" x {element}"
    rank = "" if kernels.adapter.kind == "ia3" else f" of rank {kernels.adapter.rank}"
    return f"{what} in adapters{rank}", f" x {element}"


def _gradients(job: Job, compiled: Compiled) -> str:
    workload = job.workload
    assert isinstance(workload, Training)
    sharding = compiled.sharding
    what, element = _trained(job, compiled, sharding.gradient if sharding.master else "")
    text = what + element
    if sharding.scheme:
        return "in host memory" if _gone(compiled) else _part(job, compiled, text, split=sharding.splits_gradients)
    if workload.optimizer_in_backward:
        return f"of {text}, those of one operation at a time"
    beside = {"copies": " x 2 (gradients, and DDP's buckets)", "views": " (in DDP's buckets)"}
    return text + beside.get(workload.ddp or "none", "")


def _unsummed(job: Job, compiled: Compiled, num_bytes: int) -> str:
    """Gradients beyond one for each trained tensor: a second one of a tied or accumulated tensor lives until it is added."""
    workload = job.workload
    assert isinstance(workload, Training)
    if workload.optimizer_in_backward:
        return ""
    if compiled.sharding.scheme:
        beyond = num_bytes - compiled.held_gradients
        whose = "of a unit" if (job.parallelism.pp or 1) == 1 else "of all units, added up over micro-batches,"
        return f" + {beyond:,} B {whose} before they are reduced" if beyond > 0 else ""
    copies = 2 if workload.ddp == "copies" else 1
    beyond = num_bytes - copies * gradient_bytes(trained_tensors(job.model, compiled.kernels))
    return f" + {beyond:,} B made a second time and not yet added (tied or accumulated)" if beyond > 0 else ""


def _optimizer(job: Job, compiled: Compiled) -> str:
    workload = job.workload
    assert isinstance(workload, Training)
    optimizer = compiled.optimizer or find_optimizer(workload.optimizer)
    sharding = compiled.sharding
    text = _whole_states(optimizer, *_trained(job, compiled, sharding.master), compiled)
    return _part(job, compiled, text, split=sharding.splits_states)


def _master(job: Job, compiled: Compiled) -> str:
    sharding = compiled.sharding
    if not sharding.scheme:
        size = DTYPE_BYTES[compiled.kernels.precision.master]
        return f"{compiled.profile.trained_parameters:,} x {size} B, which the optimizer updates, beside the 16-bit weights"
    what, element = _trained(job, compiled, sharding.master)
    return f"{_part(job, compiled, what + element, split=sharding.splits_states)} ({sharding.rules.title})"


def _gone(compiled: Compiled) -> bool:
    """Whether gradients leave for the host as they are reduced."""
    return compiled.sharding.offload != "none"


def _whole_states(optimizer: Optimizer, what: str, element: str, compiled: Compiled) -> str:
    fixed = optimizer.state_bytes
    if fixed is not None:
        what = what if element else f"{compiled.profile.trained_parameters:,} trained parameters"
        element = f" x {fixed} B"
    if optimizer.rule == "factored":
        return f"rows and columns of every matrix of {what}{element} ({optimizer.name})"
    if optimizer.rank:
        largest = "in fp32 all singular vectors" if optimizer.rule == "galore" and "x 4 B" in what + element else "a projector"
        return (
            f"per linear layer two moments of {optimizer.rank} x its larger dimension and {largest}, "
            f"two states for the rest of {what}{element} ({optimizer.name})"
        )
    if optimizer.rule == "adam-mini":
        return f"one state, and one number a row, of {what}{element} ({optimizer.name})"
    if optimizer.rule == "muon":
        return f"one state for layers' matrices, two for the rest of {what}{element} ({optimizer.name})"
    each = f" x ({fixed} + 4/{BLOCKWISE_BLOCK}) B" if optimizer.blockwise else element
    return f"{what} x {optimizer.states}{each} ({optimizer.name})"


_KEPT: dict[str, Callable[[Checkpointing, int], str]] = {
    "none": lambda one, number: "saved by the operations",
    "full": lambda one, number: "only each layer's input kept",
    "every": lambda one, number: f"of {number} layers only the input kept, the others' saved by the operations",
    "first": lambda one, number: f"of the first {number} layers only the input kept, the others' saved by the operations",
    "group": lambda one, number: f"only the inputs of {-(-number // one.layers)} groups of {one.layers} layers kept",
    "selective": lambda one, number: f"each layer's input and the results of {', '.join(one.operators)} kept",
    "parts": lambda one, number: f"saved by the operations but those within {', '.join(one.parts)}, which run again",
    "offloaded": lambda one, number: "each layer's input on the host, two of them on the device",
}
"""What is kept under each kind of checkpointing, from it and the number of layers that are recomputed."""


def _activations(job: Job, compiled: Compiled) -> str:
    b, s = compiled.numbers[0].sequences, compiled.numbers[0].tokens
    workload = job.workload
    if isinstance(workload, Inference):
        element = DTYPE_BYTES[compiled.kernels.precision.weight]
        return f"rotary tables: {s:,} positions x 2 (cos, sin) x {job.model.rotary_dim or 0} x {element} B; nothing is kept"
    checkpointing = find_checkpointing(workload.checkpointing)
    recomputed = num_checkpointed(job.model, checkpointing)
    how = _KEPT[checkpointing.kind](checkpointing, recomputed)
    many = f"{b:,} images" if job.model.pixels and not job.model.tokens_per_image else f"{b:,} x {s:,} tokens"
    return f"{_in_flight(compiled)}{many}{_shared(job)} x {job.model.num_layers} layers, {how}"


def _in_flight(compiled: Compiled) -> str:
    """How many micro-batches a pipeline stage holds at once; of an interleaved schedule their share of its layers."""
    count = compiled.in_flight
    if count.of > 1:
        return f"{count.chunks}/{count.of} micro-batches x "
    return f"{count.chunks} micro-batches x " if count.chunks > 1 else ""


def _shared(job: Job) -> str:
    """That the tokens are a device's part of longer sequences."""
    cp = job.parallelism.cp or 1
    return f" ({_sequence(job):,} / {cp})" if cp > 1 else ""


def _sequence(job: Job) -> int:
    """Tokens of a whole sequence in training."""
    assert isinstance(job.workload, Training)
    return job.workload.seq or 1


def _logits(job: Job, compiled: Compiled) -> str:
    numbers = compiled.numbers[0]
    b, s = numbers.sequences, numbers.targets if job.model.encoder_decoder else numbers.tokens
    if isinstance(job.workload, Inference) and compiled.kernels.logits_last:
        return f"{b:,} positions x {job.model.vocab_size:,} entries"
    rows = job.workload.eval_rows if isinstance(job.workload, Training) else None
    collected = f"; {rows:,} rows at evaluation" if rows else ""
    own = KERNEL_SETS[compiled.kernels.kernels].logits if compiled.kernels.loss == "eager" else ""
    made = own or _LOSSES[compiled.kernels.loss]
    entries = f"{job.model.vocab_size:,}"
    if compiled.kernels.split_logits:
        entries += f" / {layout_of(job).tp}"
    return f"{b:,} x {s:,} tokens x {entries} entries, {made}{collected}"


def _cache(job: Job, compiled: Compiled) -> str:
    workload = job.workload
    assert isinstance(workload, Inference)
    model = job.model
    per_element = KV_BYTES_X2[workload.kv_dtype or "bf16"] / 2
    if model.encoder_decoder:
        width = model.caches[0][0].elements_per_token
        decoder = sum(count for _, count in model.caches) // 2
        tokens = f"({workload.prompt or 0:,} source + {workload.target_seq or 0:,} target tokens)"
        return f"{workload.concurrency:,} x {tokens} x {decoder} layers x {width:,} x {per_element:g} B"
    layers = " + ".join(
        f"{count} layers x {cache.elements_per_token:,}" + (f" (last {cache.window:,} tokens)" if cache.window else "")
        for cache, count in model.caches
    )
    return f"{workload.concurrency:,} x {workload.context or 0:,} tokens x {layers} x {per_element:g} B"


def _state(job: Job, compiled: Compiled) -> str:
    workload = job.workload
    assert isinstance(workload, Inference)
    element = DTYPE_BYTES[compiled.kernels.precision.weight]
    layers = " + ".join(
        f"{count} layers x ({state.convolution:,} x {element} B + {state.recurrence:,} x 4 B)"
        for state, count in job.model.states
    )
    return f"{workload.concurrency:,} sequences x {layers}, whatever the context"


def _temporary(job: Job, compiled: Compiled) -> str:
    """What the binding phase needs beside: named where it is one thing."""
    workload = job.workload
    if isinstance(workload, Training):
        optimizer = compiled.optimizer or find_optimizer(workload.optimizer)
        if compiled.sharding.gathers:
            return "weights gathered unit by unit, buffers in which gradients are reduced, and working tensors of the operation"
        if compiled.sharding.scheme == "deepspeed":
            return "the reduce bucket and fp32 gradients of the step, and working tensors of the operation that runs at the peak"
        if optimizer.foreach_tensors:
            return "working tensors of the operation that runs; in the step a copy of what is trained (foreach)"
    if isinstance(workload, Inference):
        return "hidden states, masks and working tensors of the operation that runs at the peak"
    return "working tensors of the operation that runs at the peak"


def _inputs(job: Job, compiled: Compiled) -> str:
    b, s = compiled.numbers[0].sequences, compiled.numbers[0].tokens
    labels = " and labels" if isinstance(job.workload, Training | FineTuning) else ""
    if job.model.pixels:
        return f"{b:,} x {job.model.pixels:,} pixels x {DTYPE_BYTES[compiled.kernels.precision.weight]} B{labels}"
    if isinstance(job.workload, Inference) and job.model.caches:
        return f"{b:,} x {job.workload.context or s:,} ids" + ("" if job.model.encoder_decoder else " and positions") + " x 8 B"
    beside = [f" + {size} B for each {AXES[axis]}" for axis, size in runtime_of(job).batch_tensors] if labels else []
    return f"{b:,} x {s:,} ids{labels} x 8 B" + "".join(beside) + _evaluated_inputs(job)


def _evaluated_inputs(job: Job) -> str:
    workload = job.workload
    if not isinstance(workload, Training) or workload.eval_batch is None:
        return ""
    rows = f", and the labels of {workload.eval_rows:,} rows" if workload.eval_rows else ""
    return f"; at evaluation those of {workload.eval_batch:,} sequences{rows}"


_LOSSES = {
    "uncompiled": "their fp32 copies and gradients",
    "eager": "their fp32 copies and gradients",
    "in-place": "their fp32 copies, which become their gradients",
    "chunked-output": "their log-softmax in fp32, gradients in chunks",
    "chunked": "their log-softmax in fp32, chunk by chunk",
    "fused": "a chunk at a time",
    "cut": "in the kernel's tiles only",
}
"""What a loss makes of the logits."""


def _unused_share(job: Job) -> int:
    return (GATHERED_SHARE if layout_of(job).gathers_apart else FRAGMENTATION_SHARE)[1]


_FORMULAS: dict[str, Callable[[Job, Compiled], str]] = {
    "weights": _weights,
    "master_weights": _master,
    "gradients": _gradients,
    "optimizer_states": _optimizer,
    "activations": _activations,
    "logits": _logits,
    "kv_cache": _cache,
    "recurrent_state": _state,
    "inputs": _inputs,
    "temporary": _temporary,
    "workspace": lambda job, compiled: "cuBLAS, one per thread",
    "communication": lambda job, compiled: f"NCCL communicators of {', '.join(map(str, groups_of(job)))} devices",
    "context": lambda job, compiled: "driver context with loaded kernels",
    "fragmentation": lambda job, compiled: (
        f"{_unused_share(job)} % of what comes and goes" if job.overheads.fragmentation is None else "given by hand"
    ),
}


def formula(name: str, job: Job, compiled: Compiled, num_bytes: int) -> str:
    """The formula of one component, whose largest value is `num_bytes`, in words and numbers."""
    text = _FORMULAS[name](job, compiled)
    return text + _unsummed(job, compiled, num_bytes) if name == "gradients" else text
