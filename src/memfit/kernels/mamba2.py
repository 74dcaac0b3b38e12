"""Mamba-2's scan by chunks (SSD), as transformers' own code runs it.

Symbols: H heads of p channels, N states a channel, G groups of heads that share B and C, c tokens a chunk. All inside is in fp32.
Source: transformers 5 models/mamba2/modeling_mamba2.py, mamba2_chunk_scan and MambaRMSNormGated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.linear import linear
from memfit.kernels.mixers import batched, causal_conv1d, padded, parameter_tensor, product, silent, turned
from memfit.kernels.modules import divided_by_rms, weight_grads
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import CHUNK, ONCE, ONLY_CHUNK, SEQUENCE, Op, Parameter


def mamba2_mixer(context: Context, op: Op, projected: Tensor) -> list[Tensor]:
    """From the input projection's result (gate, hidden states with B and C, time step) to the output projection's."""
    tape = context.tape
    by_name = {one.name.removeprefix(op.name + "."): one for one in op.parameters}
    heads, states, groups = op.attributes["heads"], op.attributes["states"], op.attributes["groups"]
    inner = heads * op.attributes["head_dim"]
    if context.policy.fused_mixers:
        return [_fused(context, op, by_name, projected)]
    gate, x, step = (tape.view(projected, width) for width in (inner, inner + 2 * groups * states, heads))
    tape.record((projected,), (gate, x, step))
    x = causal_conv1d(
        context, x, by_name["conv1d.weight"], by_name.get("conv1d.bias"), op.attributes["activation"], projected.dtype
    )
    if context.policy.padded:
        x = functions.unary(tape, x)
    x, b, c = (tape.view(x, width) for width in (inner, groups * states, groups * states))
    y = _scan(context, op, by_name, x, b, c, step)
    normed = _gated_norm(context, by_name["norm.weight"], y, gate, groups)
    normed = tape.cast(normed, tape.policy.weight)  # that of the layer's input
    return [linear(context, by_name["out_proj.weight"], by_name.get("out_proj.bias"), normed)]


def _fused(context: Context, op: Op, by_name: dict[str, Parameter], projected: Tensor) -> Tensor:
    """mamba_split_conv1d_scan_combined: keeps its input, the scan's output before gate and norm, and a number a group.

    Backward computes the convolution, each chunk's state and its c x c scores again.
    Source: state-spaces/mamba mamba_ssm/ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn.
    """
    tape = context.tape
    policy = tape.policy
    heads, states, groups, chunk = (op.attributes[key] for key in ("heads", "states", "groups", "chunk"))
    inner = heads * op.attributes["head_dim"]
    y = tape.tensor(projected.axis, inner, projected.dtype)
    rows = tape.tensor(projected.axis, groups, "fp32")
    rate = parameter_tensor(context, by_name["A_log"], "fp32")
    out = tape.tensor(projected.axis, op.outputs[0].width, policy.compute if policy.autocast else projected.dtype)
    grads: list[tuple[int, int, str]] = []
    for name, one in by_name.items():
        if name != "A_log":
            grads += weight_grads(context, one)
    element = projected.size[1] // projected.width
    convolved = (projected.axis, (inner + 2 * groups * states) * element)
    passing = [convolved, y.size, (CHUNK, 4 * states * inner), (CHUNK, 4 * groups * chunk * chunk)]
    tape.record(
        (projected, rate),
        (out, y, rows),
        saved=(projected, rate, y, rows),
        weight_grads=tuple(grads),
        scratch=passing,
        backward_scratch=[*passing, convolved, (CHUNK, 4 * states * inner)],
    )
    silent(y, rows)
    return out


def _scan(context: Context, op: Op, by_name: dict[str, Parameter], x: Tensor, b: Tensor, c: Tensor, step: Tensor) -> Tensor:
    """Within chunks by c x c matrices for every head, between them by p x N states: keeps three matrices, four copies of B and C,
    four of x, and three of the states."""
    tape = context.tape
    heads, states, chunk = op.attributes["heads"], op.attributes["states"], op.attributes["chunk"]
    rate = functions.unary(tape, parameter_tensor(context, by_name["A_log"], "fp32"), save_output=True)
    rate = functions.unary(tape, rate)
    shifted = tape.tensor(step.axis, step.width, step.dtype)
    tape.record((step,), (shifted,), alias=True, weight_grads=weight_grads(context, by_name["dt_bias"]))
    step = functions.unary(tape, tape.autocast_fp32(shifted), save_input=True)
    step = functions.unary(tape, step, save_input=True)

    x = tape.cast(x, "fp32")
    b, c = (_repeated(tape, tape.cast(one, "fp32"), heads * states) for one in (b, c))
    skip = padded(tape, x, chunk)
    skip = product(tape, parameter_tensor(context, by_name["D"]), skip, CHUNK, skip.width)
    step32 = tape.cast(step, "fp32")
    x = functions.multiply(tape, x, step32)
    decay = product(tape, rate, tape.cast(step, "fp32"), step.axis, heads)
    x, decay, b, c = (padded(tape, one, chunk) for one in (x, decay, b, c))
    cumulated = functions.unary(tape, decay)

    square = heads * chunk * chunk
    lower = functions.unary(tape, _segment_sum(tape, decay, chunk, CHUNK, square), save_output=True)
    alone = context.policy.one_sequence  # one chunk of one sequence is turned by a view
    scores = batched(tape, turned(tape, c), turned(tape, b, view_of_one=alone), square)
    scores = functions.multiply(tape, scores, lower)
    diagonal = batched(tape, turned(tape, scores), turned(tape, x), x.width)
    left = functions.unary(tape, functions.unary(tape, cumulated), save_output=True)
    decayed = functions.multiply(tape, b, left)
    own = _own_states(tape, decayed, x, states * x.width // chunk)
    entering = _between(context, cumulated, own, heads)
    passed = batched(tape, turned(tape, c, view_of_one=alone), entering, x.width)
    passed = functions.multiply(tape, passed, functions.unary(tape, cumulated, save_output=True))
    y = functions.add(tape, functions.add(tape, diagonal, passed), skip)
    for one in (x, b, c, decay, cumulated, lower, scores, diagonal, left, decayed, own, entering, passed, skip):
        tape.hold(one)
    return y


def _own_states(tape: Tape, decayed: Tensor, x: Tensor, width: int) -> Tensor:
    """B decayed and x, turned for the product: both copied, but x not where there is one chunk and no cast."""
    return batched(tape, turned(tape, decayed), turned(tape, x, view_of_one=True), width)


def _repeated(tape: Tape, x: Tensor, width: int) -> Tensor:
    """B or C for every head of its group: written out."""
    out = tape.tensor(x.axis, width, x.dtype)
    tape.record((x,), (out,))
    return out


def _segment_sum(tape: Tape, x: Tensor, side: int, axis: int, width: int) -> Tensor:
    """Sums between every two positions of a chunk: two masks are kept, three matrices pass."""
    for _ in range(2):
        mask = tape.tensor(ONCE, side * side, "bool")
        masked = tape.tensor(axis, width, "fp32")
        tape.record((x, mask), (masked,), saved=(mask,), scratch=[masked.size])
        silent(mask)
        x = masked
    return x


def _between(context: Context, cumulated: Tensor, own: Tensor, heads: int) -> Tensor:
    """The state that enters every chunk: a product of all chunks' own states (and one of zeros) with their decays.

    The decays are (n + 1)^2 numbers a head: counted as 3 n + 1, which is exact for one chunk and next to nothing for more.
    """
    tape = context.tape
    states = _and_one(tape, own.width, own.dtype)
    tape.record((own,), states)
    decays = (tape.tensor(CHUNK, 3 * heads, "fp32"), tape.tensor(SEQUENCE, heads, "fp32"))
    tape.record((cumulated,), decays, saved=decays)
    if tape.policy.autocast and tape.policy.compute != "fp32":
        compute = tape.policy.compute
        copies = (tape.tensor(CHUNK, 3 * heads, compute), tape.tensor(SEQUENCE, heads, compute))
        tape.record(decays, copies)
        turned = _and_one(tape, own.width, compute)
        tape.record(states, turned)
        decays, states = copies, turned
    result = _and_one(tape, own.width, states[0].dtype)
    tape.record((*states, *decays), result, saved=(*states, *decays))
    # all but the last: a copy, or where there is one chunk a view of the two
    entering, other = tape.tensor(CHUNK, own.width, states[0].dtype), tape.tensor(ONLY_CHUNK, own.width, states[0].dtype)
    tape.record(result, (entering, other), saved=(other,))
    silent(other)
    return entering


def _and_one(tape: Tape, width: int, dtype: str) -> tuple[Tensor, Tensor]:
    """One state a chunk, and one more a sequence."""
    return tape.tensor(CHUNK, width, dtype), tape.tensor(SEQUENCE, width, dtype)


def _gated_norm(context: Context, weight: Parameter, x: Tensor, gate: Tensor, groups: int) -> Tensor:
    """w * (y / rms(y)) with y = x silu(gate.float()), over each group, in the scan's fp32."""
    tape = context.tape
    dtype = x.dtype
    gate = functions.unary(tape, tape.cast(gate, "fp32"), save_input=True)
    gated = tape.tensor(gate.axis, gate.width, "fp32")
    saved = [one for one, other in ((x, gate), (gate, x)) if other.requires_grad]
    tape.record((x, gate), (gated,), saved=saved)
    normalised = tape.cast(divided_by_rms(tape, gated, groups), dtype)
    grads = weight_grads(context, weight)
    out = tape.tensor(gate.axis, gate.width, tape.policy.weight if tape.policy.weight == "fp32" else dtype)
    scratch = [normalised.size] if grads else []
    tape.record((normalised,), (out,), saved=(normalised,) if grads else (), weight_grads=grads, backward_scratch=scratch)
    return out


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {"mamba2_mixer": mamba2_mixer}
