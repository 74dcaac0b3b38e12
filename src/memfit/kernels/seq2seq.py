"""Operations of encoder-decoders and of encoders beside BERT's: T5's norm and casts, untrained biases, mean pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.modules import weight_grads
from memfit.kernels.tape import Tensor
from memfit.model.description import Op


def t5_norm(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """w * (x * rsqrt(mean(x32^2) + eps)).to(w's format): only the mean is of an fp32 copy, so x itself is kept beside x32.

    Source: transformers 5 modeling_t5.py T5LayerNorm.
    """
    tape = context.tape
    (weight,) = op.parameters
    squares = functions.unary(tape, tape.cast(x, "fp32"), save_input=True, backward_scratch=2)
    rows = tape.tensor(x.axis, 1, "fp32")
    tape.record((squares,), (rows,))
    normalised = functions.multiply(tape, x, functions.unary(tape, rows, save_output=True))
    if tape.policy.weight != "fp32":
        normalised = tape.cast(normalised, tape.policy.weight)
    grads = weight_grads(context, weight)
    out = tape.tensor(x.axis, x.width, normalised.dtype)
    tape.record(
        (normalised,),
        (out,),
        saved=(normalised,) if grads else (),
        weight_grads=grads,
        backward_scratch=[normalised.size] if grads else [],
    )
    return [out]


def zero_bias(context: Context, op: Op, q: Tensor) -> Sequence[Tensor]:
    """Zeros in place of a position bias, in the queries' format; under checkpoints T5 asks for their gradient."""
    out = context.tape.tensor(op.outputs[0].axis, op.outputs[0].width, q.dtype)
    context.tape.record((), (out,))
    out.requires_grad = op.attributes["leaf"] and context.policy.checkpointed and context.policy.training
    return [out]


def weight_format(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """`x.to(weight.dtype)`: under autocast back to fp32, which the product that follows undoes with a new copy."""
    return [context.tape.cast(x, context.tape.policy.weight)]


def clamp_fp16(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """torch.clamp against overflow, only in fp16: keeps its input."""
    return [functions.unary(context.tape, x, save_input=True) if x.dtype == "fp16" else x]


def add_buffer(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """x plus an untrained tensor in the weights' format, which under autocast makes the sum fp32."""
    tape = context.tape
    weight = tape.policy.weight
    out = tape.tensor(x.axis, x.width, "fp32" if "fp32" in (weight, x.dtype) else x.dtype)
    tape.record((x,), (out,), alias=True)
    return [out]


def mean_pool(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """The mean over the real tokens of each sequence: x times the mask, summed, divided by their number."""
    tape = context.tape
    masked = functions.unary(tape, x)
    out = tape.tensor(op.outputs[0].axis, x.width, x.dtype)
    tape.record((masked,), (out,))
    return [functions.unary(tape, out)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "t5_norm": t5_norm,
    "zero_bias": zero_bias,
    "weight_format": weight_format,
    "clamp_fp16": clamp_fp16,
    "add_buffer": add_buffer,
    "mean_pool": mean_pool,
}
"""Kind of operation -> its implementation."""
