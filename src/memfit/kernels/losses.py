"""Losses: over whole logits, over logits in chunks, and those that make the logits themselves, chunk by chunk or never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from memfit.kernels import functions, modules
from memfit.kernels.context import Context
from memfit.kernels.tape import Size, Tensor
from memfit.model.description import ONCE, TOKEN, Op
from memfit.precision import DTYPE_BYTES


def loss(context: Context, op: Op, logits: Tensor) -> Tensor:
    """The loss of an operation over whole logits."""
    function = op.attributes["function"]
    if function != "cross-entropy":
        return _element_wise(context, logits)
    return _cross_entropy(context, op, logits, context.tape.tensor(logits.axis, 1, "int64"))


def _element_wise(context: Context, logits: Tensor) -> Tensor:
    """mse_loss and binary_cross_entropy_with_logits: keep the logits and the labels, which are as many numbers.

    Both are on autocast's fp32 list. Source: torch derivatives.yaml; transformers 5 ForSequenceClassificationLoss.
    """
    tape = context.tape
    logits = tape.autocast_fp32(logits)
    labels = tape.tensor(logits.axis, logits.width, "fp32")
    value = tape.tensor(ONCE, 1, "fp32")
    tape.record((logits, labels), (value,), saved=(logits, labels))
    labels.requires_grad = False
    return value


def _cross_entropy(context: Context, op: Op, logits: Tensor, labels: Tensor, waiting: Sequence[Size] = ()) -> Tensor:
    """logits.float(), log_softmax, nll_loss, as ForCausalLMLoss and nn.CrossEntropyLoss run: keeps the log-softmax in fp32.

    16-bit logits: forward peak 2V + 4V + 4V a token, forward end 2V + 4V while the outputs are referenced. `waiting`: what is
    there during its backward beside its own. Releases that shift the logits instead of the labels copy them in fp32: 4V more.
    Source: transformers 5 loss/loss_utils.py.
    """
    tape = context.tape
    upcasts = op.attributes["upcast"] if context.policy.loss_upcast is None else context.policy.loss_upcast
    upcast = tape.cast(logits, "fp32") if upcasts else logits
    if context.policy.shifted and upcasts:
        # `logits[..., :-1, :].contiguous()`: a copy, whose backward is added into a tensor of zeros; the names stay
        shifted = functions.unary(tape, upcast, backward_scratch=1)
        tape.hold_to_the_end(logits)
        tape.hold_to_the_end(upcast)
        upcast = shifted
    log_probs = tape.tensor(upcast.axis, upcast.width, upcast.dtype)
    tape.record((upcast,), (log_probs,), saved=(log_probs,), backward_scratch=waiting)
    # without the upcast, autocast leaves log_softmax in 16 bit and casts its result for nll_loss
    log_probs = tape.autocast_fp32(log_probs)
    value = tape.tensor(ONCE, 2, "fp32")
    tape.record((log_probs, labels), (value,), saved=(log_probs, labels, value), backward_scratch=waiting)
    tape.hold(upcast)
    return value


def _split(context: Context, x: Tensor, chunks: int) -> list[Tensor]:
    """Views of equal parts of the tokens; backward joins their gradients."""
    pieces = [context.tape.view(x, -(-x.width // chunks)) for _ in range(chunks)]
    context.tape.record((x,), pieces)
    return pieces


def _summed(context: Context, values: Sequence[Tensor]) -> Tensor:
    total = context.tape.tensor(ONCE, 1, "fp32")
    context.tape.record(values, (total,), alias=True)
    return total


def chunked_cross_entropy(
    context: Context, op: Op, head: Op, between: Sequence[Op], x: Tensor, *, outputs_first: bool = False
) -> Tensor:
    """Head and loss for one chunk of the tokens after the other: keeps each chunk's log-softmax, 4V a token, but no logits.

    With n chunks: forward peak 4V + (2V + 4V) / n a token, backward peak 4V + 8V / n (16 bit). `outputs_first`: the head makes
    all chunks, 2V a token, which the caller holds, before the first loss. The head's gradients of two chunks are views, so their
    sum is a new tensor, to which those of the others are added in place.
    Source: torchtune modules/loss, LinearCrossEntropyLoss (not compiled) and CEWithChunkedOutputLoss.
    """
    tape = context.tape
    weight = head.parameters[0]
    chunks, width = context.policy.loss_chunks, -(-weight.shape[0] // context.policy.loss_chunks)
    x = tape.autocast_compute(x)
    copy = tape.weight_cast(weight, tape.policy.weight, context.trained(weight))
    dtype = tape.policy.compute if tape.policy.autocast else x.dtype
    whole = tape.tensor(x.axis, width * chunks, dtype) if outputs_first else None
    labels = tape.tensor(x.axis, 1, "int64")
    values, made = [], []
    for number, piece in enumerate(_split(context, x, chunks)):
        logits = tape.view(whole, width) if whole else tape.tensor(x.axis, width, dtype)
        if tape.first_logits is None:
            tape.first_logits = logits.storage
        waiting = _chunk_of_head(context, head, piece, copy, logits, (number, chunks - 1 - number))
        for one in between:
            logits = modules.softcap(context, one, logits) if one.kind == "softcap" else functions.unary(tape, logits)
        made.append(logits)
        if not outputs_first:
            values.append(_cross_entropy(context, op, logits, labels, waiting))
            tape.hold(logits)
    if whole is not None:
        values = [_cross_entropy(context, op, one, labels) for one in made]
        tape.whole_logits = whole
    return _summed(context, values)


def _chunk_of_head(
    context: Context, head: Op, piece: Tensor, copy: Tensor | None, logits: Tensor, place: tuple[int, int]
) -> list[Size]:
    """The head's product for one chunk, with `place` = (chunks before, after) it. Returns what waits during its loss's backward.

    Backward takes the chunks from the last to the first; the first one's node hands the sum of the gradients to the parameter.
    """
    tape, policy = context.tape, context.tape.policy
    weight = head.parameters[0]
    trained = context.trained(weight)
    before, after = place
    count = prod(weight.shape)
    num_bytes = count * DTYPE_BYTES[policy.weight]
    copy_bytes = count * DTYPE_BYTES[policy.compute] if copy is not None else 0
    grads = [] if before or not trained else [(num_bytes, copy_bytes, context.gradient_name(weight))]
    for bias in head.parameters[1:2] if not before else ():
        grads += [(bias.num_elements * DTYPE_BYTES[policy.weight], 0, bias.name)] if context.trained(bias) else []
    beside = _accumulating(after, before) * (copy_bytes or num_bytes) if trained else 0
    saved = ([piece] if trained else []) + ([copy] if copy is not None and piece.requires_grad else [])
    tape.record(
        (piece,) if copy is None else (piece, copy),
        (logits,),
        saved=saved,
        weight_grads=tuple(grads),
        backward_scratch=[(ONCE, beside)] if beside else (),
        view_gradient=True,
    )
    if copy is not None:
        copy.requires_grad = False
    return [(ONCE, copy_bytes or num_bytes)] if trained and after else []


def _accumulating(later: int, number: int) -> int:
    """Gradients of the head beside a chunk's node that are alive while it runs, `later` chunks having run before it.

    The node of the first chunk makes one more, which is counted with it.
    """
    if later == 0:
        return 1 if number else 0
    alive = 3 if later == 1 else 2  # the waiting one, the new one and, out of place, their sum
    return alive if number else alive - 1


def fused_cross_entropy(context: Context, op: Op, head: Op, between: Sequence[Op], x: Tensor) -> Tensor:
    """The head and the loss in one function (Liger): gradients of x and W are made in forward, chunk by chunk.

    A chunk has next_power_of_2(T / ceil(V / h)) tokens, so its logits take between 1 and 2 times 2 h bytes a token in 16 bit;
    the upper bound is counted. Both gradients have the format of what they belong to: fp32 under autocast over fp32 weights.
    Source: linkedin/Liger-Kernel ops/fused_linear_cross_entropy.py.
    """
    tape = context.tape
    weight = head.parameters[0]
    trained = context.trained(weight)
    copy = tape.weight_cast(weight, tape.policy.weight, trained)
    value = tape.tensor(ONCE, 1, "fp32")
    grad_x = tape.tensor(x.axis, x.width, x.dtype)
    saved = [grad_x] if x.requires_grad else []
    outputs = [value, grad_x]
    scratch: list[Size] = [(TOKEN, 2 * x.width * DTYPE_BYTES[tape.policy.compute])]
    grads: tuple[tuple[int, int, str], ...] = ()
    if trained:
        elements = weight.shape[0] * weight.shape[1]
        grad_w = tape.tensor(ONCE, elements, tape.policy.weight)
        outputs.append(grad_w)
        saved.append(grad_w)
        # each chunk's product is made in the compute format, and cast to fp32 before it is added
        scratch.append((ONCE, elements * DTYPE_BYTES[tape.policy.compute]))
        if tape.policy.compute != "fp32":
            scratch.append((ONCE, elements * DTYPE_BYTES["fp32"]))
        grads = ((grad_w.size[1], 0, context.gradient_name(weight)),)
    inputs = (x,) if copy is None else (x, copy)
    tape.record(inputs, outputs, saved=saved, weight_grads=grads, scratch=scratch)
    if trained:
        tape.nodes[-1].handed = (outputs[-1].storage,)
    for one in outputs[1:]:
        one.requires_grad = False
    if copy is not None:
        copy.requires_grad = False
    return value


def cut_cross_entropy(context: Context, op: Op, head: Op, between: Sequence[Op], x: Tensor) -> Tensor:
    """The logits exist in the kernel's tiles only: keeps the head's input, the log-sum-exp and the index of each valid token.

    Backward makes the logits once more, tile by tile, and both gradients in the format of what they belong to.
    Source: apple/ml-cross-entropy cut_cross_entropy/cce.py, LinearCrossEntropyFunction.
    """
    tape = context.tape
    weight = head.parameters[0]
    trained = context.trained(weight)
    x = tape.autocast_compute(x)
    copy = tape.weight_cast(weight, tape.policy.weight, trained)
    sums = tape.tensor(x.axis, 1, "fp32")
    valid = tape.tensor(x.axis, 1, "int64")
    mean = tape.tensor(ONCE, weight.shape[0], "fp32")
    value = tape.tensor(ONCE, 1, "fp32")
    count = prod(weight.shape)
    copy_bytes = count * DTYPE_BYTES[tape.policy.compute] if copy is not None else 0
    grads = ((count * DTYPE_BYTES[tape.policy.weight], copy_bytes, context.gradient_name(weight)),) if trained else ()
    saved = [x, sums, valid, mean, *([copy] if copy is not None else [])]
    tape.record(
        (x,) if copy is None else (x, copy),
        (value, sums, valid, mean),
        saved=saved,
        weight_grads=grads,
        backward_scratch=[(ONCE, 8 * weight.shape[0])],
    )
    for one in (sums, valid, mean, *([copy] if copy is not None else [])):
        one.requires_grad = False
    return value


WITH_HEAD: dict[str, Callable[[Context, Op, Op, Sequence[Op], Tensor], Tensor]] = {
    "fused": fused_cross_entropy,
    "chunked": chunked_cross_entropy,
    "chunked-output": partial(chunked_cross_entropy, outputs_first=True),
    "cut": cut_cross_entropy,
}
"""Losses that make the logits themselves, by the name of --loss."""
