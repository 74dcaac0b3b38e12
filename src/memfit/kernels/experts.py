"""Router and experts as transformers runs them on CUDA (experts implementation `grouped_mm`): sort, grouped products, combine.

Symbols: k experts a token, E experts, h hidden, f width of an expert. The grouped product is on none of autocast's lists: it runs
in the weights' format.
Source: transformers 5 integrations/moe.py, grouped_mm_experts_forward, and models/{mixtral,qwen3_moe}/modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions, linear
from memfit.kernels.collectives import exchange
from memfit.kernels.context import Context
from memfit.kernels.modules import ACTIVATIONS, weight_grads
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import ONCE, Op, Parameter
from memfit.precision import DTYPE_BYTES


def jitter(context: Context, op: Op, x: Tensor) -> Tensor:
    """x *= noise, in place; keeps the noise."""
    if not context.policy.training:
        return x
    tape = context.tape
    noise = tape.tensor(x.axis, x.width, x.dtype)
    tape.record((), (noise,))
    out = tape.view(x, x.width)
    tape.record((x, noise), (out,), saved=(noise,))
    noise.requires_grad = False
    return out


def router(context: Context, op: Op, x: Tensor) -> Tensor:
    """softmax(x W^T) in fp32, the largest k, their scores: keeps the softmax (4 E) and the indices (8 k).

    Normalised: also the scores before the division in place (4 k) and their sum (4).
    """
    tape = context.tape
    (weight,) = op.parameters
    logits = linear.linear(context, weight, None, x)
    probabilities = functions.unary(tape, tape.cast(logits, "fp32"), save_output=True)
    if op.attributes["router_loss"] and context.policy.training:
        _router_loss(tape, logits)
    top_k = op.outputs[0].width
    scores, indices = tape.tensor(x.axis, top_k, "fp32"), tape.tensor(x.axis, top_k, "int64")
    tape.record((probabilities,), (scores, indices), saved=(indices,))
    indices.requires_grad = False
    tape.hold_to_the_end(indices)
    if op.attributes["normalised"]:
        total = tape.tensor(x.axis, 1, "fp32")
        tape.record((scores,), (total,))
        before = tape.tensor(x.axis, top_k, "fp32")
        divided = tape.view(scores, top_k)
        tape.record((scores, total), (divided,), saved=(before, total))
        tape.hold(before)
        scores = divided
    tape.hold(logits)
    return scores if op.attributes["fp32_scores"] else tape.cast(scores, logits.dtype)


def _router_loss(tape: Tape, logits: Tensor) -> None:
    """The outputs hold every layer's logits; the load-balancing loss keeps a softmax of them."""
    probabilities = tape.tensor(logits.axis, logits.width, logits.dtype)
    loss = tape.tensor(ONCE, 1, "fp32")
    tape.record((logits,), (probabilities,), saved=(probabilities,))
    tape.record((probabilities,), (loss,))
    tape.hold_to_the_end(logits)


def _grouped(context: Context, weight: Parameter, x: Tensor, width: int, offsets: Tensor) -> Tensor:
    """One product for all experts: keeps its input if W is trained, and the offsets."""
    tape = context.tape
    x = tape.cast(x, tape.policy.weight)
    out = tape.tensor(x.axis, width, x.dtype)
    trained = context.trained(weight)
    grads = ((weight.num_elements * DTYPE_BYTES[tape.policy.weight], 0, weight.name),) if trained else ()
    tape.record((x,), (out,), saved=(x, offsets) if trained else (offsets,), weight_grads=grads)
    return out


def _gather(tape: Tape, x: Tensor, width: int, index: Tensor) -> Tensor:
    """x[index]: a copy; keeps the index."""
    out = tape.tensor(x.axis, width, x.dtype)
    tape.record((x, index), (out,), saved=(index,))
    index.requires_grad = False
    return out


def _add_bias(context: Context, bias: Parameter, x: Tensor, expert_ids: Tensor) -> Tensor:
    """x += bias[expert of the row]: the rows are gathered first; keeps the ids."""
    tape = context.tape
    rows = tape.tensor(x.axis, x.width, tape.policy.weight)
    tape.record((expert_ids,), (rows,), saved=(expert_ids,), weight_grads=weight_grads(context, bias))
    expert_ids.requires_grad = False
    out = tape.view(x, x.width)
    tape.record((x, rows), (out,), alias=True)
    tape.hold_to_the_end(rows)
    return out


def _gated(tape: Tape, op: Op, gate_up: Tensor) -> Tensor:
    """act(gate) * up: keeps both and act(gate)."""
    gate, up = (tape.view(gate_up, gate_up.width // 2) for _ in range(2))
    tape.record((gate_up,), (gate, up))
    return functions.multiply(tape, ACTIVATIONS[op.attributes["activation"]](tape, gate), up)


def _clamped_glu(tape: Tape, op: Op, gate_up: Tensor) -> Tensor:
    """(clamp(up) + 1) * g sigmoid(alpha g) with g = clamp(gate), of interleaved columns: keeps gate and up, g, the sigmoid, and
    the two factors.

    Source: transformers 5 modeling_gpt_oss.py, GptOssExperts._apply_gate.
    """
    width = gate_up.width // 2
    clamped = []
    for _ in range(2):
        part = tape.view(gate_up, width)
        tape.record((gate_up,), (part,))
        clamped.append(functions.unary(tape, part, save_input=True))
    gate, up = clamped
    glu = functions.multiply(tape, gate, functions.unary(tape, functions.unary(tape, gate), save_output=True))
    raised = tape.tensor(up.axis, width, up.dtype)
    tape.record((up,), (raised,), alias=True)
    out = functions.multiply(tape, raised, glu)
    for one in (gate, up, glu):
        tape.hold(one)
    return out


def _sorted_again(context: Context, x: Tensor, rows: int) -> Tensor:
    """What an all-to-all brought lies by device: its rows are copied into the order of the local experts, and back."""
    index = context.tape.tensor(x.axis, rows, "int64")
    context.tape.record((), (index,))
    return _gather(context.tape, x, x.width, index)


def experts(context: Context, op: Op, x: Tensor, scores: Tensor) -> Tensor:
    """Keeps the permuted input and the down product (k h each), gate and up, act(gate), its product with up (4 k f), scores."""
    tape = context.tape
    up_weight, down_weight, *biases = op.parameters
    top_k, hidden, ffn = op.attributes["top_k"], x.width, op.attributes["ffn"]
    parts = op.attributes.get("parts", 1)
    rows_hidden, rows_ffn = -(-top_k * hidden // parts), -(-top_k * ffn // parts)
    sorted_ids, permutation, tokens, inverse = (tape.tensor(x.axis, top_k, "int64") for _ in range(4))
    tape.record((), (sorted_ids, permutation))
    tape.record((), (tokens,))
    permuted = _gather(tape, x, rows_hidden, tokens)
    spread = op.attributes.get("ep") and parts == 1
    if spread:
        permuted = _sorted_again(context, exchange(context, permuted), top_k)
    weights = _gather(tape, scores, top_k, permutation)
    offsets = tape.tensor(ONCE, up_weight.shape[0], "int32")
    tape.record((), (offsets,))

    gate_up = _grouped(context, up_weight, permuted, 2 * rows_ffn, offsets)
    if biases:
        gate_up = _add_bias(context, biases[0], gate_up, sorted_ids)
    inner = (_clamped_glu if op.attributes["clamped"] else _gated)(tape, op, gate_up)
    down = _grouped(context, down_weight, inner, rows_hidden, offsets)
    if biases:
        down = _add_bias(context, biases[1], down, sorted_ids)
    if spread:
        down = exchange(context, _sorted_again(context, down, top_k))
    weighted = functions.multiply(tape, down, weights)
    tape.record((), (inverse,))
    restored = _gather(tape, weighted, rows_hidden, inverse)
    total = tape.tensor(x.axis, hidden, restored.dtype)
    # backward: the sum's gradient is expanded, and the view of it is a copy
    tape.record((restored,), (total,))
    out = tape.cast(total, x.dtype)
    for one in (permuted, sorted_ids, permutation, weights, offsets, down, restored, inverse, total):
        tape.hold(one)
    return out


def _one(kernel: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
    return lambda context, op, *inputs: [kernel(context, op, *inputs)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "jitter": _one(jitter),
    "router": _one(router),
    "experts": _one(experts),
}
