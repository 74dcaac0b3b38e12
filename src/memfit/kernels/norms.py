"""Norms beside RMSNorm and LayerNorm as libraries have them: products in fp32, norms of heads; and slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions, modules
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import ONCE, Op


def _times_weight(context: Context, op: Op, normalised: Tensor, factor: Tensor | None) -> Tensor:
    """The product in fp32 with a weight, or with its fp32 copy: keeps what is normalised, and the copy."""
    tape = context.tape
    (weight,) = op.parameters
    grads = modules.weight_grads(context, weight)
    out = tape.tensor(normalised.axis, normalised.width, "fp32")
    saved = ([normalised] if grads else []) + ([factor] if factor is not None and normalised.requires_grad else [])
    inputs = (normalised,) if factor is None else (normalised, factor)
    scratch = [normalised.size] if grads else []
    tape.record(inputs, (out,), saved=saved, weight_grads=grads, backward_scratch=scratch)
    if factor is not None:
        factor.requires_grad = False
    return out


def rms_norm_fp32(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """(w * x32 * rsqrt(mean(x32^2) + eps)).to(dtype): keeps x32, the rsqrt and the normalised x, all in fp32.

    Source: transformers 5 modeling_olmo2.py Olmo2RMSNorm.
    """
    tape = context.tape
    normalised = modules.divided_by_rms(tape, x, 1)
    product = _times_weight(context, op, normalised, None)
    out = tape.cast(product, x.dtype)
    tape.hold(normalised)  # the name `hidden_states`, until the module returns
    return [out]


def layer_norm_fp32(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Keeps x32 - mean twice (once for its square, once for the product), the rsqrt, the normalised x and the fp32 weight.

    Source: transformers 5 modeling_cohere.py CohereLayerNorm.
    """
    tape = context.tape
    heads = op.attributes["heads"]
    x32 = tape.cast(x, "fp32")
    mean = _rows(tape, x32, heads)
    squares = functions.unary(tape, functions.add(tape, x32, mean), save_input=True, backward_scratch=2)
    variance = _rows(tape, squares, heads)
    centred = functions.add(tape, x32, mean)
    normalised = functions.multiply(tape, centred, functions.unary(tape, variance, save_output=True))
    for one in (x32, mean, variance):
        tape.hold(one)
    factor = None
    if tape.policy.weight != "fp32":
        factor = tape.tensor(ONCE, op.parameters[0].num_elements, "fp32")
        tape.record((), (factor,))
    product = _times_weight(context, op, normalised, factor)
    tape.hold(normalised)
    out = tape.cast(product, x.dtype)
    tape.hold(product)
    return [out]


def _rows(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """The mean over each head, or over the whole width: one number a head; saves nothing."""
    out = tape.tensor(x.axis, heads, x.dtype)
    tape.record((x,), (out,))
    return out


def _native(context: Context, op: Op, x: Tensor, statistics: int, elements: int) -> Tensor:
    """aten::native_layer_norm: keeps x and its statistics; in fp32 under autocast, which casts 16-bit weights each time."""
    tape = context.tape
    x = tape.autocast_fp32(x)
    out = tape.tensor(x.axis, x.width, x.dtype)
    rows = tape.tensor(x.axis, statistics, "fp32")
    saved = [x, rows]
    if tape.policy.autocast and tape.policy.weight != "fp32":
        casts = tape.tensor(ONCE, elements, "fp32")
        tape.record((), (casts,))
        saved.append(casts)
    grads = sum((modules.weight_grads(context, one) for one in op.parameters), ())
    tape.record(saved[::2], (out, rows), saved=saved, weight_grads=grads)
    for one in saved[1:]:
        one.requires_grad = False
    return out


def head_layer_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """One LayerNorm over every head of a strided view: keeps the projection, and two statistics a head."""
    return [_native(context, op, x, 2 * op.attributes["heads"], sum(one.num_elements for one in op.parameters))]


def separate_head_norms(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Split, a LayerNorm for each head, cat: keeps the projection and two statistics a head; the joined result is a new tensor.

    Source: transformers 5 modeling_stablelm.py StableLmLayerNormPerHead.
    """
    tape = context.tape
    parts = tape.view(x, x.width)
    tape.record((x,), (parts,))
    normalised = _native(context, op, parts, 2 * op.attributes["heads"], x.width)
    joined = tape.tensor(x.axis, x.width, normalised.dtype)
    tape.record((normalised,), (joined,), alias=True)
    return [joined]


def slice_of(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """A view by indexing; its backward fills a whole tensor of zeros."""
    out = context.tape.view(x, op.outputs[0].width)
    context.tape.record((x,), (out,))
    return [out]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "rms_norm_fp32": rms_norm_fp32,
    "layer_norm_fp32": layer_norm_fp32,
    "head_layer_norm": head_layer_norm,
    "separate_head_norms": separate_head_norms,
    "slice": slice_of,
}
