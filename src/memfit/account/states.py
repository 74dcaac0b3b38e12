"""Bytes of weights, gradients and optimizer states, tensor by tensor.

Every function takes the model's parameters with the number of times that each occurs; nothing follows from a total count alone,
because small tensors, embeddings and quantised matrices follow other rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from memfit.account.optimizers import Optimizer, Trained
from memfit.account.rules import SCRATCH, STATES, is_projected
from memfit.account.selection import trained_parameters
from memfit.kernels import KernelPolicy, prefix
from memfit.kernels.adapters import shapes
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape
from memfit.model import Model, Parameter
from memfit.model.remember import of_model
from memfit.precision import DTYPE_BYTES

BLOCKWISE_MINIMUM = 4096
"""bitsandbytes keeps 32-bit states for tensors with fewer elements (optim/optimizer.py, min_8bit_size)."""
BLOCKWISE_BLOCK = 256
"""Elements that share an fp32 scale in an 8-bit state (optim/optimizer.py, blocksize 256)."""


QUANTIZE_EXPERTS = ("fp8", "int4", "mxfp4")
"""Formats of checkpoints that hold every expert's matrices quantised (fp8, GPTQ, AWQ). Bitsandbytes, whose formats the others
are, replaces linear layers only (transformers integrations/bitsandbytes.py)."""


class Tensors(NamedTuple):
    """A parameter of the model and how often it occurs."""

    parameter: Parameter
    repeat: int


@of_model(64)
def tensors_of(model: Model) -> tuple[Tensors, ...]:
    """Every tensor of the model once (tied ones are one tensor), with its repeat count."""
    return tuple(
        [
            Tensors(parameter, 1 if segment.shared else segment.repeat)
            for segment in model.segments
            for block in segment.blocks
            for op in block.ops
            for parameter in op.parameters
            if not parameter.tied_to
        ]
    )


def weight_bytes(tensors: Iterable[Tensors], policy: KernelPolicy) -> int:
    """Stored weights: elements x bytes of the format, or the quantised format's bytes for linear layers' matrices."""
    weight = DTYPE_BYTES[policy.precision.stored]
    total = 0
    for parameter, repeat in tensors:
        quantized = policy.quantized
        linear = parameter.role == "linear" and len(parameter.shape) == 2
        expert = parameter.role == "expert" and len(parameter.shape) == 3
        if quantized is not None and linear and not quantized.experts_only:
            total += repeat * quantized.weight_bytes(*parameter.shape)
        elif quantized is not None and expert and quantized.name in QUANTIZE_EXPERTS:
            total += repeat * parameter.shape[0] * quantized.weight_bytes(*parameter.shape[1:])
        else:
            dtype = parameter.dtype or (policy.norm_dtype if parameter.role == "norm" else None)
            total += repeat * parameter.num_elements * (DTYPE_BYTES[dtype] if dtype else weight)
    return total


def buffer_bytes(model: Model, policy: KernelPolicy) -> int:
    """Untrained tensors: those of a format of their own, and those in the weights' format."""
    return model.buffer_bytes + model.buffer_elements * DTYPE_BYTES[policy.precision.stored]


def adapters(tensors: Iterable[Tensors], policy: KernelPolicy) -> list[Trained]:
    """What is trained beside each targeted weight: of LoRA the two factors, rank x in and out x rank."""
    if policy.adapter is None:
        return []
    context = Context(Tape(policy.precision), policy)
    found = []
    for parameter, repeat in tensors:
        adapter = context.adapter(parameter)
        if adapter is not None:
            found += [Trained(prod(one), adapter.dtype, repeat, "adapter", one) for one in shapes(parameter, adapter)]
    return found


def added_tensors(model: Model, policy: KernelPolicy) -> list[Trained]:
    """What training puts beside the model: adapters, virtual tokens, trained copies of modules."""
    found = []
    if policy.adapter is not None:
        every = [
            Tensors(one, 1 if segment.shared else segment.repeat)
            for segment in model.segments
            for block in segment.blocks
            for one in block.parameters
        ]
        found = adapters(every, policy)
    if policy.virtual_tokens:
        shape = (policy.virtual_tokens, model.hidden_size)
        found.append(Trained(prod(shape), policy.virtual_dtype, 1, "adapter", shape))
    if policy.prefix is not None:
        found += [Trained(prod(one), policy.prefix.dtype, 1, "adapter", one) for one in prefix.shapes(policy.prefix)]
    return found + [one for one, copied in _own(model, policy) if copied]


def _own(model: Model, policy: KernelPolicy) -> list[tuple[Trained, bool]]:
    """The model's own parameters that are chosen, and whether it is a copy of it that is trained."""
    context, master = Context(Tape(policy.precision), policy), policy.precision.master
    return [
        (Trained(prod(one.shape), master or context.format(one), repeat, one.role, one.shape), copied)
        for one, repeat, copied in trained_parameters(model, policy)
    ]


def trained_tensors(model: Model, policy: KernelPolicy) -> list[Trained]:
    """Everything that gets a gradient."""
    if not policy.train_all:
        return added_tensors(model, policy) + [one for one, copied in _own(model, policy) if not copied]
    dtype = policy.precision.updated
    return [
        Trained(one.num_elements, one.dtype or dtype, repeat, one.role, one.shape)
        for one, repeat in tensors_of(model)
        if one.role != "unused"
    ]


def master_bytes(trained: Iterable[Trained], policy: KernelPolicy) -> int:
    """Copies in full precision of what is trained, beside the weights: elements x bytes of their format."""
    precision = policy.precision
    element = DTYPE_BYTES[precision.master] if precision.beside else 0
    return sum(one.repeat * one.elements for one in trained) * element


def gradient_bytes(trained: Iterable[Trained]) -> int:
    """A gradient has its parameter's size and format."""
    return sum(one.repeat * one.elements * DTYPE_BYTES[one.dtype] for one in trained)


def state_bytes(optimizer: Optimizer, trained: Iterable[Trained]) -> int:
    """Optimizer states: states x elements x bytes; block-wise 8 bit adds 4 bytes per 256 elements and spares small tensors.

    2 (1 + 4/256) = 2.03125 bytes per parameter for two 8-bit states.
    """
    total = 0
    for one in trained:
        element = DTYPE_BYTES[one.dtype] if optimizer.state_bytes is None else optimizer.state_bytes
        if optimizer.rule != "dense":
            total += one.repeat * element * STATES[optimizer.rule](optimizer, one)
            continue
        if optimizer.blockwise:
            if one.elements < BLOCKWISE_MINIMUM or (optimizer.full_embeddings and one.role == "embedding"):
                per_state = 4 * one.elements
            else:
                per_state = one.elements * element + 4 * -(-one.elements // BLOCKWISE_BLOCK)
        else:
            per_state = one.elements * element
        total += one.repeat * optimizer.states * per_state
    return total


def step_scratch(optimizer: Optimizer, trained: list[Trained]) -> int:
    """Temporaries of a step: as many lists of all parameters, or copies of the largest tensor, as the implementation makes.

    One that goes tensor by tensor still holds some of the one before: the maximum is over neighbours, in the order of the model
    (what is projected to a low rank in a group of its own, the last). Equal neighbours occur where a block repeats one.
    """
    if optimizer.foreach_tensors:
        return optimizer.foreach_tensors * gradient_bytes(trained)
    if optimizer.paged:
        return max((state_bytes(optimizer, [one._replace(repeat=1)]) for one in trained), default=0)
    if optimizer.scratch:
        scratch = SCRATCH[optimizer.scratch]
        ordered = sorted(trained, key=is_projected) if optimizer.rank else trained
        return max((scratch(optimizer, before, one) for before, one in zip([None, *ordered], ordered, strict=False)), default=0)
    return max((_largest_scratch(optimizer, one) for one in trained), default=0)


def _largest_scratch(optimizer: Optimizer, one: Trained) -> int:
    return one.elements * optimizer.largest_scratch[DTYPE_BYTES[one.dtype] // 4]


def scratch_per_byte(optimizer: Optimizer, trained: Iterable[Trained]) -> int:
    """Scratch of a step over one tensor alone, for each byte of it, rounded up: the most of all tensors but the smallest."""
    return max((-(-_alone(optimizer, one) // one.num_bytes) for one in trained if one.elements >= BLOCKWISE_MINIMUM), default=0)


def _alone(optimizer: Optimizer, one: Trained) -> int:
    one = one._replace(repeat=1)
    if optimizer.foreach_tensors:
        return optimizer.foreach_tensors * one.num_bytes
    if optimizer.paged:
        return state_bytes(optimizer, [one])
    return SCRATCH[optimizer.scratch](optimizer, None, one) if optimizer.scratch else _largest_scratch(optimizer, one)
