"""What is there beside weights and states: casts of weights while they are used, and buffers of kernel sets."""

from __future__ import annotations

from math import prod

from memfit.account.crossing import Accumulation, Unit
from memfit.account.forms import GRADIENTS, TEMPORARY, WEIGHTS, ZERO, Form, form
from memfit.kernels import KernelPolicy
from memfit.kernels.context import Context
from memfit.kernels.sets import KERNEL_SETS
from memfit.kernels.tape import Tape
from memfit.model import ONCE, PAIR, POSITION, Block, Model
from memfit.precision import DTYPE_BYTES


def unit_of(model: Model, block: Block, kernels: KernelPolicy, accumulation: Accumulation) -> Unit:
    """The block as a unit of FSDP2. A tensor that blocks share is cast all along: see `shared_cast`."""
    precision, parameters = kernels.precision, block.parameters
    cast, full = DTYPE_BYTES[precision.weight], DTYPE_BYTES[precision.master]
    context = Context(Tape(precision), kernels)
    trained = sum([
        prod(one.shape) for one in parameters
        if one.role != "unused" and context.trained(one) and context.gradient_name(one) not in accumulation.pending
    ])  # fmt: skip
    reduced = form(TEMPORARY, ONCE, full * trained)
    own = [one.num_elements for one in parameters if one.name not in model.tied]
    return Unit(
        weights=form(TEMPORARY, ONCE, cast * sum(own)),
        casting=form(TEMPORARY, ONCE, cast * max(own, default=0)),
        reducing=(
            (form(GRADIENTS, ONCE, cast * trained) + reduced, form(GRADIENTS, ONCE, full * trained) + 2 * reduced)
            if trained
            else ()
        ),
        reduced=reduced,
    )


def shared_cast(model: Model, kernels: KernelPolicy) -> Form:
    """The cast of tensors that blocks share (a tied embedding), whose unit stays as it is from forward to the end of backward.

    Source: pytorch/torchtitan distributed/fsdp.py, apply_fsdp_to_decoder with weight tying.
    """
    if not (kernels.precision.by_unit and model.tied):
        return ZERO
    tied = {
        one.name: one.num_elements
        for segment in model.segments
        for block in segment.blocks
        for one in block.parameters
        if one.name in model.tied
    }
    return form(TEMPORARY, ONCE, DTYPE_BYTES[kernels.precision.weight] * sum(tied.values()))


def buffers_of(model: Model, kernels: KernelPolicy) -> Form:
    """What a kernel set has all the time.

    Rotary tables of every position, 4 B for each element of a head; a buffer of the size of the scores, which eager attention's
    product writes; what stands for gradients that the products add to a buffer themselves; a buffer of the largest linear layer,
    into which 4-bit weights are expanded.
    """
    one, found = KERNEL_SETS[kernels.kernels], ZERO
    if one.table_buffer:
        found += form(WEIGHTS, POSITION, 4 * (model.rotary_dim or 0))
    if one.score_buffer and kernels.attention == "eager":
        found += form(TEMPORARY, PAIR, model.num_heads * DTYPE_BYTES[kernels.precision.weight])
    if one.gradient_placeholders:
        # the weights of one layer of each kind, and the head's
        blocks = {id(block): block for segment in model.segments for block in segment.blocks}.values()
        count = sum([prod(weight.shape) for block in blocks for weight in block.parameters if weight.role in ("linear", "head")])
        found += form(TEMPORARY, ONCE, count * DTYPE_BYTES[kernels.precision.weight])
    if one.weight_buffer and kernels.quantized is not None:
        linear = [
            weight.num_elements
            for segment in model.segments
            for block in segment.blocks
            for weight in block.parameters
            if weight.role == "linear"
        ]
        found += form(TEMPORARY, ONCE, max(linear, default=0) * DTYPE_BYTES[kernels.precision.compute])
    return found
