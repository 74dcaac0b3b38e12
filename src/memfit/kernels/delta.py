"""The gated delta rule by chunks, as transformers' own code runs it, and the gates around it.

Symbols: H value heads, k and v the widths of a key and a value head, c tokens a chunk. All inside is in fp32.
Source: transformers 5 models/qwen3_next/modeling_qwen3_next.py, torch_chunk_gated_delta_rule, Qwen3NextGatedDeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.linear import linear
from memfit.kernels.mixers import batched, causal_conv1d, padded, parameter_tensor, product, silent
from memfit.kernels.modules import divided_by_rms, weight_grads
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import CHUNK, CHUNK_OF_SEVERAL, LATER_CHUNK, ONCE, Op, Parameter


def gated_delta(context: Context, op: Op, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
    """From the two input projections' results to the output projection's."""
    tape = context.tape
    by_name = {one.name.removeprefix(op.name + "."): one for one in op.parameters}
    heads, key_heads = op.attributes["heads"], op.attributes["key_heads"]
    k_width, v_width = op.attributes["key_dim"] * key_heads, op.attributes["value_dim"] * heads
    q, k, v, z = (tape.view(qkvz, width) for width in (k_width, k_width, v_width, v_width))
    tape.record((qkvz,), (q, k, v, z))
    b, a = tape.view(ba, heads), tape.view(ba, heads)
    tape.record((ba,), (b, a))
    # the parts lie interleaved by key heads: reshaping copies them, unless each of those has one value head
    v, q, k = (functions.unary(tape, one) for one in (v, q, k))
    if heads != key_heads:
        z, b, a = (functions.unary(tape, one) for one in (z, b, a))
    mixed = tape.tensor(q.axis, 2 * k_width + v_width, q.dtype)
    tape.record((q, k, v), (mixed,))
    kept = (q, k, v)
    mixed = causal_conv1d(context, mixed, by_name["conv1d.weight"], None, op.attributes["activation"], mixed.dtype)
    for one in kept:
        tape.hold(one)
    q, k, v = (tape.view(mixed, width) for width in (k_width, k_width, v_width))
    tape.record((mixed,), (q, k, v))
    beta = functions.unary(tape, b, save_output=True)
    decay = _decay(context, by_name, a)
    rule = _fused_rule if context.policy.fused_mixers else _rule
    core = rule(context, op, q, k, v, beta, decay)
    normed = _gated_norm(context, by_name["norm.weight"], core, z, heads)
    for one in (qkvz, ba, z, b, a, beta, decay, mixed):
        tape.hold(one)
    return [linear(context, by_name["out_proj.weight"], None, normed)]


def _decay(context: Context, by_name: dict[str, Parameter], a: Tensor) -> Tensor:
    """-exp(A) softplus(a + dt), in fp32."""
    tape = context.tape
    rate = functions.unary(tape, parameter_tensor(context, by_name["A_log"], "fp32"), save_output=True)
    rate = functions.unary(tape, rate)
    a32 = tape.cast(a, "fp32")
    shifted = tape.tensor(a.axis, a.width, "fp32")
    tape.record((a32,), (shifted,), alias=True, weight_grads=weight_grads(context, by_name["dt_bias"]))
    return product(tape, rate, functions.unary(tape, shifted, save_input=True), a.axis, a.width)


def _normalised(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """x / |x| of each head: keeps x and the reciprocals."""
    squares = functions.unary(tape, x, save_input=True, backward_scratch=2)
    rows = tape.tensor(x.axis, heads, "fp32")
    tape.record((squares,), (rows,))
    return functions.multiply(tape, x, functions.unary(tape, rows, save_output=True))


def _rule(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Within a chunk by products of c x c matrices, from chunk to chunk by a k x v state: five c x c matrices a head are kept."""
    tape = context.tape
    given = q.dtype
    heads, chunk = op.attributes["heads"], op.attributes["chunk"]
    k_width = heads * op.attributes["key_dim"]
    if op.attributes["key_heads"] != heads:
        repeated = [tape.tensor(one.axis, k_width, one.dtype) for one in (q, k)]
        for one, out in zip((q, k), repeated, strict=True):
            tape.record((one,), (out,))
        q, k = repeated
    q, k, v, beta, decay = (tape.cast(one, "fp32") for one in (q, k, v, beta, decay))
    q, k = _normalised(tape, q, heads), _normalised(tape, k, heads)
    q = functions.unary(tape, q)
    q, k, v, beta, decay = (padded(tape, one, chunk) for one in (q, k, v, beta, decay))
    v_beta, k_beta = functions.multiply(tape, v, beta), functions.multiply(tape, k, beta)
    cumulated = functions.unary(tape, decay)

    square = heads * chunk * chunk
    pairs = tape.tensor(CHUNK, square, "fp32")
    tape.record((cumulated,), (pairs,))
    mask = tape.tensor(ONCE, chunk * chunk, "bool")
    masked = tape.tensor(CHUNK, square, "fp32")
    tape.record((pairs, mask), (masked,), saved=(mask,))
    silent(mask)
    pairs = functions.unary(tape, masked, save_output=True)
    system = functions.multiply(tape, batched(tape, k_beta, k, square), pairs)
    within = functions.multiply(tape, batched(tape, q, k, square), pairs)
    decayed = functions.multiply(tape, k_beta, functions.unary(tape, cumulated, save_output=True))
    values, cumulated_k = _solve(tape, system, v_beta), _solve(tape, system, decayed)
    core = tape.tensor(CHUNK, values.width, "fp32")
    tape.record((), (core,))
    q_decayed = functions.multiply(tape, q, functions.unary(tape, cumulated, save_output=True))
    left = functions.unary(tape, functions.unary(tape, cumulated), save_output=True)
    k_decayed = functions.multiply(tape, k, left)
    last = tape.tensor(CHUNK, heads, "fp32")
    tape.record((cumulated,), (last,))
    step = functions.unary(tape, last, save_output=True)
    _scan(tape, op, values, cumulated_k, q_decayed, k_decayed, within, step, core)
    for one in (
        v_beta,
        k_beta,
        cumulated,
        pairs,
        system,
        within,
        decayed,
        values,
        cumulated_k,
        q_decayed,
        k_decayed,
        v,
        k,
        beta,
        decay,
    ):
        tape.hold(one)
    out = tape.tensor(op.inputs[0].axis, heads * op.attributes["value_dim"], given)  # padding is cut off
    tape.record((core,), (out,))
    tape.hold(core)
    return out


def _fused_rule(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """chunk_gated_delta_rule: keeps normalised q and k, v, beta, the summed decay and c numbers a head and token.

    Backward computes w, u, the states and the corrected values again.
    Source: fla-org/flash-linear-attention fla/ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction.
    """
    tape = context.tape
    heads, chunk = op.attributes["heads"], op.attributes["chunk"]
    q_norm, k_norm = (tape.tensor(one.axis, one.width, one.dtype) for one in (q, k))
    rows = tape.tensor(q.axis, 2 * op.attributes["key_heads"], "fp32")
    summed = tape.tensor(q.axis, heads, "fp32")
    inverse = tape.tensor(q.axis, heads * chunk, q.dtype)
    out = tape.tensor(q.axis, v.width, v.dtype)
    state = (CHUNK, heads * op.attributes["key_dim"] * op.attributes["value_dim"] * v.size[1] // v.width)
    passing = [(q.axis, heads * op.attributes["key_dim"] * q.size[1] // q.width), v.size, v.size, state]
    made = (q_norm, k_norm, rows, summed, inverse)
    tape.record(
        (q, k, v, beta, decay),
        (out, *made),
        saved=(*made, v, beta),
        scratch=passing,
        backward_scratch=[*passing, *passing],
    )
    silent(*made)
    return out


def _solve(tape: Tape, system: Tensor, right: Tensor) -> Tensor:
    """torch.linalg.solve_triangular: keeps the matrix and the solution."""
    out = tape.tensor(CHUNK, right.width, "fp32")
    tape.record((system, right), (out,), saved=(system, out), backward_scratch=[out.size])
    return out


def _scan(
    tape: Tape,
    op: Op,
    values: Tensor,
    cumulated_k: Tensor,
    q: Tensor,
    k: Tensor,
    within: Tensor,
    step: Tensor,
    core: Tensor,
) -> None:
    """For every chunk: v' = v - k S; out = q S + within v'; S = S decay + k^T v'.

    Keeps every chunk's v' and S, and the operands of its products: as they are, or in autocast's copies of each chunk. What
    multiplies the first chunk's S, zeros, is not kept, nor what only makes the S behind the last chunk. Each chunk's part of a
    gradient is a whole tensor of zeros.
    """
    heads = op.attributes["heads"]
    state = tape.tensor(CHUNK, heads * op.attributes["key_dim"] * op.attributes["value_dim"], "fp32")
    new_values = tape.tensor(CHUNK, values.width, "fp32")
    made = [state, new_values]
    saved = [step, cumulated_k]
    if tape.policy.autocast and tape.policy.compute != "fp32":
        compute = tape.policy.compute
        for one in (cumulated_k, q, k, new_values):  # of all chunks but one
            made.append(tape.tensor(LATER_CHUNK, one.width, compute))
        for one in (within, state, state, new_values):
            made.append(tape.tensor(CHUNK, one.width, compute))
        made.append(tape.tensor(LATER_CHUNK, state.width, "fp32"))
        saved += made[2:]
    else:
        several = tape.tensor(CHUNK_OF_SEVERAL, q.width + k.width, "fp32")  # where there is a second chunk
        made.append(several)
        saved += [state, new_values, within, several]
    inputs = (values, cumulated_k, q, k, within, step)
    tape.record((*inputs, core), (core, *made), saved=saved, backward_scratch=[within.size])
    silent(*made)


def _gated_norm(context: Context, weight: Parameter, x: Tensor, gate: Tensor, heads: int) -> Tensor:
    """(w * (x / rms(x)).to(dtype) * silu(gate.float())).to(dtype), over each head."""
    tape = context.tape
    dtype = x.dtype
    normalised = tape.cast(divided_by_rms(tape, x, heads), dtype)
    grads = weight_grads(context, weight)
    scaled_dtype = "fp32" if "fp32" in (tape.policy.weight, dtype) else dtype
    scaled = tape.tensor(x.axis, x.width, scaled_dtype)
    scratch = [normalised.size] if grads else []
    tape.record((normalised,), (scaled,), saved=(normalised,) if grads else (), weight_grads=grads, backward_scratch=scratch)
    act = functions.unary(tape, tape.cast(gate, "fp32"), save_input=True)
    return tape.cast(functions.multiply(tape, scaled, act), dtype)


def output_gate(context: Context, op: Op, x: Tensor, gate: Tensor) -> list[Tensor]:
    """x * sigmoid(gate), where gate is a part of each head of a projection and was copied by a reshape."""
    tape = context.tape
    return [functions.multiply(tape, x, functions.unary(tape, gate, save_output=True))]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {"gated_delta": gated_delta, "output_gate": output_gate}
