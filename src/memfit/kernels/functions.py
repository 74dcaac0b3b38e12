"""The autograd functions that kernels are made of: one call, one node (torch/csrc/autograd and derivatives.yaml)."""

from __future__ import annotations

from memfit.kernels.context import Context
from memfit.kernels.tape import Size, Tape, Tensor


def unary(
    tape: Tape,
    x: Tensor,
    *,
    save_input: bool = False,
    save_output: bool = False,
    dtype: str | None = None,
    backward_scratch: int = 0,
) -> Tensor:
    """One new tensor from one; keeps its input, its result, or nothing. `backward_scratch`: copies of x beside the gradient."""
    out = tape.tensor(x.axis, x.width, dtype or x.dtype)
    saved = (x,) * save_input + (out,) * save_output
    tape.record((x,), (out,), saved=saved, backward_scratch=(x.size,) * backward_scratch)
    return out


def _in_full(x: Tensor, out: Tensor) -> list[Size]:
    """What a factor's gradient takes beside itself before it is cast or summed: it is made in the product's format and shape.

    Casts and sums come when the gradients of both factors are there, and the product's own is gone.
    """
    if not x.requires_grad or x.size == out.size:
        return []
    if (x.axis, x.width) == (out.axis, out.width):
        return [(out.axis, out.size[1] - x.size[1])]
    return [out.size]


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps each factor if the other needs a gradient."""
    axis, width = max((a.axis, a.width), (b.axis, b.width))
    out = tape.tensor(axis, width, tape.promote(a, b))
    saved = [one for one, other in ((a, b), (b, a)) if other.requires_grad]
    tape.record((a, b), (out,), saved=saved, backward_scratch=[size for one in (a, b) for size in _in_full(one, out)])
    return out


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b: keeps nothing, and its gradient is passed on to both without a copy."""
    larger = a if (a.axis, a.width) >= (b.axis, b.width) else b
    out = tape.tensor(larger.axis, larger.width, tape.promote(a, b))
    tape.record((a, b), (out,), alias=True)
    return out


def matmul(tape: Tape, a: Tensor, b: Tensor, axis: int, width: int) -> Tensor:
    """A batched product of two activations: keeps both factors."""
    out = tape.tensor(axis, width, a.dtype)
    saved = [one for one, other in ((a, b), (b, a)) if other.requires_grad]
    tape.record((a, b), (out,), saved=saved)
    tape.name("bmm")
    return out


def dropout(context: Context, x: Tensor, stated: float) -> Tensor:
    """native_dropout on CUDA: a new tensor and a mask of one byte per element that is kept; x itself at probability 0."""
    if context.probability(stated) == 0:
        return x
    tape = context.tape
    out = tape.tensor(x.axis, x.width, x.dtype)
    mask = tape.tensor(x.axis, x.width, "bool")
    tape.record((x,), (out, mask), saved=(mask,))
    mask.requires_grad = False
    return out
