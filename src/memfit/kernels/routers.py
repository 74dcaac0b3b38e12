"""DeepSeek's routers: scores in fp32, the best groups of experts first, then the best experts within them.

What only finds the indices (the groups' scores, the corrected scores) has no gradient that reaches it and is freed at once.
Source: transformers 5 models/deepseek_v2/modeling_deepseek_v2.py, models/deepseek_v3/modeling_deepseek_v3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.linear import linear
from memfit.kernels.modules import weight_grads
from memfit.kernels.tape import Tensor
from memfit.model.description import Op


def _logits(context: Context, op: Op, x: Tensor) -> Tensor:
    """linear(x.float(), W) with W in fp32, whatever the other weights have; autocast casts both back."""
    tape = context.tape
    (weight,) = op.parameters
    trained = context.trained(weight)
    x = tape.autocast_compute(tape.cast(x, "fp32"))
    copy = tape.weight_cast(weight, "fp32", trained)
    out = tape.tensor(x.axis, weight.shape[0], x.dtype)
    saved = ([x] if trained else []) + ([copy] if copy is not None and x.requires_grad else [])
    copied = copy.size[1] if copy is not None else 0
    grads = tuple([(num_bytes, copied, name) for num_bytes, _, name in weight_grads(context, weight)])
    tape.record((x,) if copy is None else (x, copy), (out,), saved=saved, weight_grads=grads, view_gradient=True)
    if copy is not None:
        copy.requires_grad = False
    return out


def _chosen(context: Context, op: Op, scores: Tensor, *, gathered: bool) -> Tensor:
    """The k best scores, by topk itself or gathered by its indices: keeps the indices (8 k), the second also the scores."""
    tape = context.tape
    top_k = op.outputs[0].width
    chosen, indices = tape.tensor(scores.axis, top_k, scores.dtype), tape.tensor(scores.axis, top_k, "int64")
    tape.record((scores,), (chosen, indices), saved=(indices, scores) if gathered else (indices,))
    indices.requires_grad = False
    tape.hold_to_the_end(indices)
    return chosen


def softmax_groups(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """DeepSeek-V2: softmax (kept: 4 E); scores outside the best groups become 0 (kept: a mask, 1 E)."""
    tape = context.tape
    logits = _logits(context, op, x)
    scores = functions.unary(tape, tape.cast(logits, "fp32"), save_output=True)
    if op.attributes["groups"]:
        mask = tape.tensor(scores.axis, scores.width, "bool")
        masked = tape.tensor(scores.axis, scores.width, scores.dtype)
        tape.record((scores, mask), (masked,), saved=(mask,))
        mask.requires_grad = False
        tape.hold_to_the_end(mask)
        scores = masked
    tape.hold_to_the_end(logits)
    return [functions.unary(tape, _chosen(context, op, scores, gathered=False))]


def sigmoid_groups(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """DeepSeek-V3: sigmoid (kept: 4 E); a correction bias and the groups decide the indices only; the scores are normalised."""
    tape = context.tape
    logits = _logits(context, op, x)
    scores = functions.unary(tape, logits, save_output=True)
    corrected = tape.tensor(scores.axis, scores.width, "fp32")
    score_mask = tape.tensor(scores.axis, scores.width, "fp32")
    masked = tape.tensor(scores.axis, scores.width, "fp32")
    tape.record((), (corrected,))
    tape.record((), (score_mask,))
    tape.record((), (masked,))
    for one in (corrected, score_mask, masked):
        tape.hold_to_the_end(one)
    chosen = _chosen(context, op, scores, gathered=True)
    if op.attributes["normalised"]:
        total = tape.tensor(chosen.axis, 1, chosen.dtype)
        tape.record((chosen,), (total,))
        before = tape.tensor(chosen.axis, chosen.width, chosen.dtype)
        divided = tape.view(chosen, chosen.width)
        tape.record((chosen, total), (divided,), saved=(before, total))
        chosen = divided
    return [functions.unary(tape, chosen)]


def softmax_of_best(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """gpt-oss: the k largest of x W^T + b, then a softmax of those alone: keeps the indices and the softmax."""
    tape = context.tape
    logits = linear(context, op.parameters[0], op.parameters[1], x)
    tape.hold_to_the_end(logits)
    return [functions.unary(tape, _chosen(context, op, logits, gathered=False), save_output=True)]


def expert_gate(context: Context, op: Op, x: Tensor, gate: Tensor) -> list[Tensor]:
    """sigmoid(gate) * x, one number a token: keeps the sigmoid and x."""
    tape = context.tape
    return [functions.multiply(tape, functions.unary(tape, gate, save_output=True), x)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "softmax_groups": softmax_groups,
    "sigmoid_groups": sigmoid_groups,
    "softmax_of_best": softmax_of_best,
    "expert_gate": expert_gate,
}
