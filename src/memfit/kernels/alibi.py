"""Attention modules of single families: BLOOM, Falcon, GPT-J and MPT compute it in their own Python.

Source: transformers 5, models/{bloom,falcon,gptj,mpt}/modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import attention as usual
from memfit.kernels import functions
from memfit.kernels.cache import caches
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import PAIR, Op


def _operand(tape: Tape, x: Tensor, *, copied: bool) -> Tensor:
    """What a batched product reads: in the compute format, and a copy when its heads are strided (a cache's are not)."""
    copied = copied and not tape.in_cache(x)
    x = tape.autocast_compute(x)
    return functions.unary(tape, x) if copied else x


def _previous_weights(context: Context, heads: int, dtype: str) -> None:
    """The backbone's loop holds the tuple that the last block returned, its attention weights with it.

    In training they are kept for backward anyway.
    """
    if not context.policy.training:
        before = context.tape.tensor(PAIR, heads, dtype)
        context.tape.record((), (before,))
        context.tape.hold_to_the_end(before)


def _plus_mask(context: Context, scores: Tensor) -> Tensor:
    """scores + mask, which is in the hidden states' format."""
    tape = context.tape
    dtype = "fp32" if tape.policy.autocast and tape.policy.weight == "fp32" else scores.dtype
    out = tape.tensor(PAIR, scores.width, dtype)
    tape.record((scores,), (out,), alias=True)
    return out


def _context(context: Context, op: Op, probabilities: Tensor, v: Tensor, *, copied: bool) -> Tensor:
    """probabilities v, and the heads merged, which copies."""
    tape = context.tape
    operand = _operand(tape, v, copied=copied)
    out = functions.matmul(tape, tape.autocast_compute(probabilities), operand, op.inputs[0].axis, op.outputs[0].width)
    merged = functions.unary(tape, out)
    tape.hold(out)
    return merged


def bloom(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """baddbmm(alibi, q, k), mask, softmax in fp32, product. `reshape` copies q, k and v unless the batch is one sequence."""
    tape = context.tape
    heads = op.attributes["num_heads"]
    copied = not context.policy.one_sequence
    _previous_weights(context, heads, q.dtype)
    q = _operand(tape, q, copied=copied)
    k, v = (_operand(tape, one, copied=copied and not caches(context, op)) for one in (k, v))
    scores = functions.matmul(tape, q, k, PAIR, heads)
    masked = _plus_mask(context, scores)
    probabilities = functions.unary(tape, tape.cast(masked, "fp32"), save_output=True)
    probabilities = tape.cast(probabilities, q.dtype)
    tape.hold(scores)
    for one in (masked,):
        tape.hold_to_the_end(one)
    dropped = functions.dropout(context, probabilities, op.attributes["dropout"])
    tape.hold_to_the_end(dropped)
    merged = _context(context, op, dropped, v, copied=False)
    for one in (q, k, v, scores, masked):
        tape.hold(one)
    return merged


def mpt(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q k^T * scale + alibi (fp32 whatever the weights are), masked_fill, softmax in fp32, product."""
    tape = context.tape
    heads = op.attributes["num_heads"]
    copied = not context.policy.one_sequence
    apart = copied and not caches(context, op)
    _previous_weights(context, heads, v.dtype)
    left, right = _operand(tape, q, copied=copied), _operand(tape, k, copied=apart)
    scores = functions.matmul(tape, left, right, PAIR, heads)
    scores = functions.unary(tape, scores)
    biased = tape.tensor(PAIR, heads, "fp32")
    tape.record((scores,), (biased,), alias=True)
    filled = functions.unary(tape, biased)
    probabilities = tape.cast(functions.unary(tape, filled, save_output=True), v.dtype)
    dropped = functions.dropout(context, probabilities, op.attributes["dropout"])
    tape.hold_to_the_end(dropped)
    merged = _context(context, op, dropped, v, copied=apart)
    tape.hold(filled)
    return merged


def gptj(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eager computes the scores of fp32 copies of q and k; other implementations are the usual ones."""
    if context.policy.attention != "eager":
        return usual.attention(context, op, q, k, v)
    tape = context.tape
    heads = op.attributes["num_heads"]
    copied = not context.policy.one_sequence
    apart = copied and not caches(context, op)
    value_dtype = v.dtype
    left = _operand(tape, tape.cast(q, "fp32"), copied=copied)
    right = _operand(tape, tape.cast(k, "fp32"), copied=apart)
    scores = functions.matmul(tape, left, right, PAIR, heads)
    scores = functions.unary(tape, scores)
    masked = _plus_mask(context, scores)
    probabilities = functions.unary(tape, tape.autocast_fp32(masked), save_output=True)
    probabilities = tape.cast(probabilities, value_dtype)
    tape.hold(masked)
    dropped = functions.dropout(context, probabilities, op.attributes["dropout"])
    tape.hold_to_the_end(dropped)
    return _context(context, op, dropped, v, copied=apart)


def falcon(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sdpa always with a mask; a single key-value head is not repeated, which no fused kernel takes: the math path.

    Source: aten/src/ATen/native/transformers/sdp_utils_cpp.h, check_batch_size_and_num_heads_dense.
    """
    attributes = op.attributes
    if context.policy.attention == "eager":
        return _falcon_eager(context, op, q, k, v)
    if context.policy.attention == "flash":
        return usual.attention(context, op, q, k, v)
    tape = context.tape
    q, k, v = (tape.autocast_compute(one) for one in (q, k, v))
    if attributes["num_kv_heads"] != attributes["num_heads"]:
        return _single_head_math(context, op, q, k, v)
    out, lse = tape.tensor(q.axis, q.width, v.dtype), tape.tensor(q.axis, attributes["num_heads"], "fp32")
    saved = [q, k, v, out, lse]
    casts = tape.policy.autocast and tape.policy.weight != tape.policy.compute
    if not attributes["alibi"] or casts:  # otherwise the backbone's bias with the mask in it is kept as it is, once
        mask = tape.tensor(PAIR, attributes["num_heads"] if attributes["alibi"] else 1, q.dtype)
        tape.record((), (mask,))
        saved.append(mask)
    tape.record(saved[:3] + saved[5:], (out, lse), saved=saved)
    tape.name("attention")
    for one in saved[4:]:
        one.requires_grad = False
    return out


def _single_head_math(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sdpa's fallback in fp32, one key-value head expanded by the products."""
    tape = context.tape
    heads = op.attributes["num_heads"]
    dtype = v.dtype
    casts = [tape.cast(one, "fp32") for one in (q, k, v)]
    q, k, v = functions.unary(tape, casts[0]), functions.unary(tape, casts[1]), casts[2]
    one_sequence = context.policy.one_sequence
    if not one_sequence:
        k = _expanded(tape, k, heads)
    given = op.attributes["alibi"]  # the backbone's own mask is read as it is
    mask = tape.tensor(PAIR, 1, "fp32") if not given else None
    scores = functions.matmul(tape, q, k, PAIR, heads)
    masked = tape.view(scores, scores.width)
    if mask is not None:
        tape.record((), (mask,))
    tape.record((scores,) if mask is None else (scores, mask), (masked,), alias=True)
    probabilities = usual.safe_softmax(tape, masked)
    dropped = functions.dropout(context, probabilities, op.attributes["dropout"] if op.attributes["alibi"] else 0.0)
    if not one_sequence:
        v = _expanded(tape, v, heads)
    out = tape.cast(functions.matmul(tape, dropped, v, q.axis, op.outputs[0].width), dtype)
    for one in (q, *casts, *(() if mask is None else (mask,))):  # names of the C++ function, until it returns
        tape.hold(one)
    return functions.unary(tape, out)


def _expanded(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """One head written out for all query heads."""
    out = tape.tensor(x.axis, x.width * heads, x.dtype)
    tape.record((x,), (out,))
    return out


def _falcon_eager(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax is in the hidden states' format; with ALiBi the scores are cast to fp32 before the bias."""
    tape = context.tape
    attributes = op.attributes
    heads = attributes["num_heads"]
    copied = not context.policy.one_sequence
    hidden_dtype = tape.policy.weight if tape.policy.autocast else q.dtype
    _previous_weights(context, heads, hidden_dtype)
    single = attributes["num_kv_heads"] != heads
    if single:
        k, v = (tape.autocast_compute(one) for one in (k, v))
        if copied:
            k = _expanded(tape, k, heads)
    left = _operand(tape, q, copied=copied)
    apart = copied and not single and not caches(context, op)
    right = _operand(tape, k, copied=apart)
    scores = functions.matmul(tape, left, right, PAIR, heads)
    names = [scores]
    if attributes["alibi"]:
        scores = tape.cast(scores, "fp32")
        logits = tape.tensor(PAIR, heads, "fp32")
        tape.record((scores,), (logits,), alias=True)
        names += [scores, logits]
        scores = logits
    masked = _plus_mask(context, scores)
    probabilities = functions.unary(tape, tape.cast(masked, hidden_dtype), save_output=True)
    tape.hold(masked)  # the argument of softmax, which casts it inside
    if not attributes["alibi"]:
        tape.hold(names[0])
        names = []
    dropped = functions.dropout(context, probabilities, attributes["dropout"] if attributes["alibi"] else 0.0)
    tape.hold_to_the_end(dropped)
    if single and copied:
        v = _expanded(tape, v, heads)
    merged = _context(context, op, dropped, v, copied=apart)
    for one in names:
        tape.hold(one)
    return merged


def _one(kernel: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
    return lambda context, op, *inputs: [kernel(context, op, *inputs)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "bloom_attention": _one(bloom),
    "falcon_attention": _one(falcon),
    "gptj_attention": _one(gptj),
    "mpt_attention": _one(mpt),
}
