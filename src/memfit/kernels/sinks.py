"""Attention with sinks: a learned score for every head joins each row before the softmax and is dropped behind it.

Source: transformers 5 models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward; sdpa has no sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.attention import has_mask, key_operand, repeat
from memfit.kernels.context import Context
from memfit.kernels.mixers import parameter_tensor
from memfit.kernels.tape import Tensor
from memfit.model.description import PAIR, Op


def sink_attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keeps the softmax with its sink column, a (s + 1) entries a token, and where each row's maximum is, 8 a.

    The product reads the softmax without its last column as it lies there, unless it is cast for that.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    grouped = heads != op.attributes["num_kv_heads"]
    values = v.dtype
    if op.attributes["num_kv_heads"] > 1:
        k, v = repeat(tape, op, k), repeat(tape, op, v)
    scores = functions.matmul(tape, tape.autocast_compute(q), tape.autocast_compute(k), PAIR, heads)
    scores = functions.unary(tape, scores)
    if op.attributes["causal"] or has_mask(context.policy, op):
        masked = tape.tensor(PAIR, heads, tape.policy.weight if tape.policy.autocast else scores.dtype)
        tape.record((scores,), (masked,), alias=True)
        scores = masked
    sinks = parameter_tensor(context, op.parameters[0])
    dtype = tape.promote(scores, sinks)
    joined, column = tape.tensor(PAIR, heads, dtype), tape.tensor(q.axis, heads, dtype)
    tape.record((scores, sinks), (joined, column))
    largest, places = tape.tensor(q.axis, heads, dtype), tape.tensor(q.axis, heads, "int64")
    tape.record((joined, column), (largest, places), saved=(places,))
    places.requires_grad = False
    shifted, shifted_column = tape.tensor(PAIR, heads, dtype), tape.tensor(q.axis, heads, dtype)
    tape.record((joined, column, largest), (shifted, shifted_column), alias=True)
    probabilities, last = tape.tensor(PAIR, heads, dtype), tape.tensor(q.axis, heads, dtype)
    tape.record((shifted, shifted_column), (probabilities, last), saved=(probabilities, last))
    for one in (scores, shifted, shifted_column):
        tape.hold(one)
    part = tape.view(probabilities, heads)
    tape.record((probabilities, last), (part,))
    weights = tape.cast(functions.dropout(context, part, op.attributes["dropout"]), values)
    tape.hold_to_the_end(weights)
    operand = key_operand(context, op, v, not context.policy.one_sequence and not grouped)
    out = functions.matmul(tape, tape.autocast_compute(weights), operand, q.axis, op.outputs[0].width)
    copied = functions.unary(tape, out)
    for one in (k, v, out):
        tape.hold(one)
    return [copied]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {"sink_attention": sink_attention}
