"""Liger's kernels as autograd functions: what each keeps, and what it writes over.

Source: linkedin/Liger-Kernel 0.8, src/liger_kernel/ops/{rms_norm,rope,swiglu,geglu}.py.
"""

from __future__ import annotations

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.modules import weight_grads
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import ONCE, Op

MULTIPROCESSORS = 132
"""Rows of the partial weight gradients: one for each multiprocessor of the device (132 on an H100, 108 on an A100)."""


def _part_of_another(tape: Tape, x: Tensor) -> bool:
    """A view of a fused projection: not contiguous, so that a kernel's `.contiguous()` copies it."""
    return tape.sizes[x.storage] != x.size


def _contiguous(tape: Tape, x: Tensor) -> Tensor:
    return functions.unary(tape, x) if _part_of_another(tape, x) else x


def rms_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """w x / rms(x), for Gemma (1 + w): keeps x itself and 1 / rms(x), 4 B a row.

    Backward writes the gradient of x over that of the result, or into a tensor of its own; it sums dw from one fp32 row for each
    multiprocessor.
    """
    tape = context.tape
    x = _contiguous(tape, x)
    out = tape.tensor(x.axis, x.width, x.dtype)
    factor = tape.tensor(x.axis, op.attributes.get("heads", 1), "fp32")
    grads = weight_grads(context, op.parameters[0])
    scratch = [(ONCE, 4 * MULTIPROCESSORS * op.parameters[0].num_elements)] if grads else []
    tape.record(
        (x,),
        (out, factor),
        saved=(x, factor),
        weight_grads=grads,
        backward_scratch=scratch,
        alias=not context.policy.norms_apart,
    )
    factor.requires_grad = False
    return [out]


def rotary(context: Context, op: Op, q: Tensor, k: Tensor) -> list[Tensor]:
    """In place, forward and backward: q and k stay in the projections' tensors; a part of a fused projection is copied first."""
    tape = context.tape
    results = []
    for given in (q, k):
        one = _contiguous(tape, given)
        out = tape.view(one, one.width)
        # eager attention makes gradients head by head, which `.contiguous()` copies
        tape.record((one,), (out,), alias=context.policy.attention != "eager")
        results.append(out)
    return results


def gated_product(context: Context, op: Op, gate: Tensor, up: Tensor) -> list[Tensor]:
    """silu(gate) * up or gelu(gate) * up: keeps gate and up; backward writes their gradients over them."""
    tape = context.tape
    gate, up = _contiguous(tape, gate), _contiguous(tape, up)
    out = tape.tensor(gate.axis, gate.width, gate.dtype)
    tape.record((gate, up), (out,), saved=(gate, up))
    tape.nodes[-1].handed = (gate.storage, up.storage)
    return [out]


def handed_on(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """The activation is part of the product that follows."""
    return [x]


def cross_entropy(context: Context, op: Op, logits: Tensor) -> list[Tensor]:
    """logits.float(), whose gradient forward writes over it: kept, and handed on in backward.

    Source: linkedin/Liger-Kernel 0.8 ops/cross_entropy.py.
    """
    tape = context.tape
    upcast = tape.cast(logits, "fp32") if op.attributes["upcast"] else logits
    labels = tape.tensor(logits.axis, 1, "int64")
    value = tape.tensor(ONCE, 1, "fp32")
    tape.record((upcast, labels), (value,), saved=(upcast,))
    tape.nodes[-1].handed = (upcast.storage,)
    return [value]


KERNELS: Kernels = {
    "rms_norm": rms_norm,
    "rms_norm_fp32": rms_norm,
    "rotary": rotary,
    "gated_product": gated_product,
    "handed_on": handed_on,
    "in-place loss": cross_entropy,
}
