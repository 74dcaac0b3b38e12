"""How the operations of convolutional networks run in eager PyTorch, beside those of `kernels.vision`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels.context import Context
from memfit.kernels.modules import weight_grads
from memfit.kernels.tape import Tensor
from memfit.model.description import ONCE, Op

KEEPS_ITS_INPUT = ("silu",)
"""Activation functions whose derivative needs the input: in place, they keep a copy of it."""


def group_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """aten::native_group_norm: keeps x, mean and reciprocal deviation of each group in the format of x; on autocast's fp32 list.

    Source: aten/src/ATen/native/group_norm.cpp; torch/csrc/autograd derivatives.yaml, native_group_norm.
    """
    tape = context.tape
    x = tape.autocast_fp32(x)
    out = tape.tensor(x.axis, x.width, x.dtype)
    statistics = tape.tensor(x.axis, 2 * op.attributes["groups"], x.dtype)
    saved = [x, statistics]
    if tape.policy.autocast and tape.policy.weight != "fp32":
        casts = tape.tensor(ONCE, sum(one.num_elements for one in op.parameters), "fp32")
        tape.record((), (casts,))
        saved.append(casts)
    grads = sum((weight_grads(context, one) for one in op.parameters), ())
    tape.record((x, *saved[2:]), (out, statistics), saved=saved, weight_grads=grads)
    for one in saved[1:]:
        one.requires_grad = False
    return [out]


def windowed_average(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """avg_pool and adaptive_avg_pool keep their input, although backward needs only its shape."""
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    tape.record((x,), (out,), saved=(x,))
    return [out]


def activation_in_place(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """The result takes the storage of x and is kept; where the derivative needs x, a copy of x is kept instead."""
    tape = context.tape
    out = tape.view(x, x.width)
    if op.attributes["function"] in KEEPS_ITS_INPUT:
        before = tape.tensor(x.axis, x.width, x.dtype)
        tape.record((x,), (before, out), saved=(before,))
        before.requires_grad = False
    else:
        tape.record((x,), (out,), saved=(out,))
    return [out]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "group_norm": group_norm,
    "windowed_average": windowed_average,
    "activation_in_place": activation_in_place,
}
"""Kind of operation -> implementation."""
