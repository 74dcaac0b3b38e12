"""What sequence mixers share: parameters that enter element-wise operations, broadcast products, the causal convolution.

Source: transformers 5 models/mamba/modeling_mamba.py; what runs where mamba-ssm, causal-conv1d and flash-linear-attention are not
installed.
"""

from __future__ import annotations

from math import prod

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.modules import ACTIVATIONS, weight_grads
from memfit.kernels.tape import Size, Tape, Tensor
from memfit.model.description import CHUNK, CHUNK_OF_SEVERAL, ONCE, SEQUENCE, Op, Parameter


def parameter_tensor(context: Context, parameter: Parameter, dtype: str | None = None) -> Tensor:
    """A parameter as an operand, cast to `dtype` (`parameter.float()`), or in its own storage, which is counted as weights."""
    tape = context.tape
    weight = tape.policy.weight
    width = prod(parameter.shape)
    cast = dtype is not None and dtype != weight
    made = tape.tensor(ONCE, width, dtype or weight) if cast else tape.outside(ONCE, width, weight)
    tape.record((), (made,), weight_grads=weight_grads(context, parameter))
    return made


def product(tape: Tape, a: Tensor, b: Tensor, axis: int, width: int) -> Tensor:
    """a * b, both broadcast to `width` elements of `axis`: keeps each factor if the other needs a gradient.

    The gradient of a factor that is broadcast is made in full, then summed; those of both are there before either is summed.
    """
    out = tape.tensor(axis, width, tape.promote(a, b))
    saved = [one for one, other in ((a, b), (b, a)) if other.requires_grad]
    scratch: list[Size] = [out.size for one in (a, b) if one.requires_grad and (one.axis, one.width) != (axis, width)]
    tape.record((a, b), (out,), saved=saved, backward_scratch=scratch)
    return out


def padded(tape: Tape, x: Tensor, chunk: int) -> Tensor:
    """F.pad to whole chunks: a copy, also where there is nothing to pad."""
    out = tape.tensor(CHUNK, chunk * x.width, x.dtype)
    tape.record((x,), (out,))
    return out


def batched(tape: Tape, a: Tensor, b: Tensor, width: int) -> Tensor:
    """A product of two activations within each chunk, in the compute format."""
    return functions.matmul(tape, tape.autocast_compute(a), tape.autocast_compute(b), CHUNK, width)


def turned(tape: Tape, x: Tensor, *, view_of_one: bool = False) -> Tensor:
    """An operand whose dimensions einsum turns: a copy in the compute format.

    `view_of_one`: where there is one chunk, a view of what another operation keeps, if it is not cast.
    """
    cast = tape.autocast_compute(x)
    if not view_of_one or cast is not x:
        return functions.unary(tape, cast)
    out = tape.tensor(CHUNK_OF_SEVERAL, x.width, x.dtype)
    tape.record((x,), (out,))
    return out


def silent(*tensors: Tensor | None) -> None:
    """Made in an operation that others get a gradient from: these get none."""
    for one in tensors:
        if one is not None:
            one.requires_grad = False


def mask_padding(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """x times the batch's mask, where there is one; the mask is an input of the model and counted there."""
    return [functions.unary(context.tape, x)] if context.policy.padded else [x]


def to_fp32(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """`x.float()`"""
    return [context.tape.cast(x, "fp32")]


def causal_conv1d(context: Context, x: Tensor, weight: Parameter, bias: Parameter | None, activation: str, dtype: str) -> Tensor:
    """act(conv1d(x, padded by K - 1)[..., :s]).to(dtype), one filter of K taps a channel: keeps x and the padded result.

    K - 1 positions of each sequence are computed too many and stay in the storage of the result.
    """
    tape = context.tape
    policy = tape.policy
    trained = context.trained(weight)
    x = tape.autocast_compute(tape.cast(x, policy.weight))
    copy = tape.weight_cast(weight, policy.weight, trained)
    out_dtype = policy.compute if policy.autocast else policy.weight
    out = tape.tensor(x.axis, x.width, out_dtype)
    taps = 1 if context.policy.fused_mixers else weight.shape[-1]
    tail = tape.tensor(SEQUENCE, x.width * (taps - 1), out_dtype)
    saved = [x] if copy is None else [x, copy]  # whichever of them needs a gradient
    grads = weight_grads(context, weight) + (() if bias is None else weight_grads(context, bias))
    tape.record((x,) if copy is None else (x, copy), (out, tail), saved=saved, weight_grads=grads)
    silent(copy)
    part = tape.view(out, out.width)
    tape.record((out, tail), (part,))
    if context.policy.fused_mixers:  # causal-conv1d pads nothing, and applies the activation itself
        return tape.cast(part, dtype)
    act = ACTIVATIONS[activation](tape, part)
    if tail.requires_grad:  # what the activation keeps is a part of the padded result
        tape.nodes[-1].saved = (*tape.nodes[-1].saved, tail.storage)
        tape.last[tail.storage] = len(tape.nodes) - 1
    return tape.cast(act, dtype)
