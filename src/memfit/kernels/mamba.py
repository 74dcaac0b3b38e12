"""Mamba's selective scan (S6), token by token as transformers' own code runs it, and in mamba-ssm's fused function.

Symbols: d channels (the inner width), N states a channel, r rank of the time step, K taps of the convolution.
Source: transformers 5 models/mamba/modeling_mamba.py, models/falcon_mamba/modeling_falcon_mamba.py;
state-spaces/mamba mamba_ssm/ops/selective_scan_interface.py, MambaInnerFn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.linear import linear
from memfit.kernels.mixers import causal_conv1d, mask_padding, parameter_tensor, product, silent, to_fp32
from memfit.kernels.modules import divided_by_rms, weight_grads
from memfit.kernels.tape import Tensor
from memfit.model.description import CHUNK, LATER_TOKEN, SEQUENCE, Op, Parameter


def mamba_mixer(context: Context, op: Op, xz: Tensor) -> list[Tensor]:
    """From the input projection's result (hidden states and gate) to the output projection's."""
    by_name = {one.name.removeprefix(op.name + "."): one for one in op.parameters}
    mixer = _fused if context.policy.fused_mixers else _plain
    return [mixer(context, op, by_name, xz)]


def _plain(context: Context, op: Op, by_name: dict[str, Parameter], xz: Tensor) -> Tensor:
    """The module's own operations: the kept tensors of d N elements a token decide.

    Keeps 4 d N (exp(A dt)), 4 d N (dt B), 4 d N (the states) and in 16 bit their copies, 2 d N, a token.
    """
    tape = context.tape
    dtype = tape.policy.weight  # that of the norm's result
    states, rank = op.attributes["states"], op.attributes["rank"]
    a_log = parameter_tensor(context, by_name["A_log"], "fp32")
    a = functions.unary(tape, functions.unary(tape, a_log, save_output=True))
    inner = xz.width // 2
    x, gate = tape.view(xz, inner), tape.view(xz, inner)
    tape.record((xz,), (x, gate))

    x = causal_conv1d(context, x, by_name["conv1d.weight"], by_name.get("conv1d.bias"), op.attributes["activation"], xz.dtype)
    if context.policy.padded:
        x = functions.unary(tape, x)
    # the transposed hidden states are copied for the product, unless there is one sequence alone
    flat = x if context.policy.one_sequence else functions.unary(tape, x)
    projected = linear(context, by_name["x_proj.weight"], None, flat)
    step, b, c = (tape.view(projected, width) for width in (rank, states, states))
    tape.record((projected,), (step, b, c))
    if op.attributes["normed"]:
        step, b, c = (tape.cast(divided_by_rms(tape, one, 1), one.dtype) for one in (step, b, c))
    step = linear(context, by_name["dt_proj.weight"], None, step)
    y = _scan(context, by_name, x, step, a, b, c)
    y = functions.multiply(tape, y, functions.unary(tape, gate, save_input=True))
    y = tape.cast(y, dtype)
    y = y if context.policy.one_sequence else functions.unary(tape, y)
    return linear(context, by_name["out_proj.weight"], by_name.get("out_proj.bias"), y)


def _scan(context: Context, by_name: dict[str, Parameter], x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t; y_t = C_t h_t + D x_t, in a loop over the tokens."""
    tape = context.tape
    dtype = x.dtype
    inner, states = x.width, b.width
    full = (x.axis, inner * states)
    shifted = tape.tensor(step.axis, step.width, step.dtype)
    tape.record((step,), (shifted,), alias=True, weight_grads=weight_grads(context, by_name["dt_proj.bias"]))
    step = functions.unary(tape, tape.autocast_fp32(shifted), save_input=True)
    decay = functions.unary(tape, product(tape, a, step, *full), save_output=True)
    into = product(tape, step, tape.cast(b, "fp32"), *full)
    update = product(tape, into, tape.cast(x, "fp32"), *full)

    outputs = tape.tensor(x.axis, inner, dtype)
    stacked = tape.tensor(x.axis, inner, dtype)
    state = tape.tensor(LATER_TOKEN, full[1], "fp32")  # each but the last is kept by the next token's product
    start = tape.tensor(SEQUENCE, full[1], dtype)
    kept = [decay, state, start]
    made = [state, start]
    if dtype != "fp32":
        copies = tape.tensor(*full, dtype)
        kept.append(copies)
        made.append(copies)
    else:  # the product with C keeps the states themselves, the last one too
        last = tape.tensor(SEQUENCE, full[1], "fp32")
        kept.append(last)
        made.append(last)
    # each token's part of the gradients of `decay` and `update` is a whole tensor of zeros with one row filled
    tape.record((decay, update, c), (outputs, *made), saved=(*kept, c), backward_scratch=[(x.axis, 4 * full[1])])
    silent(*made)
    tape.record((outputs,), (stacked,))
    y = stacked
    skip = functions.multiply(tape, x, parameter_tensor(context, by_name["D"], "fp32"))
    y = functions.add(tape, y, skip)
    for one in (shifted, step, decay, into, update, outputs):
        tape.hold(one)
    return y


def _fused(context: Context, op: Op, by_name: dict[str, Parameter], xz: Tensor) -> Tensor:
    """MambaInnerFn, from the convolution to out_proj in one function: keeps 2 d + d + r + 4 N elements a token.

    What it keeps: xz, x_proj's result, B and C apart, the scan's output before the gate, and for every 2,048 tokens 2 d N fp32
    numbers. Backward computes the convolution, the time step and the gated output again.
    """
    tape = context.tape
    policy = tape.policy
    inner, states, rank = xz.width // 2, op.attributes["states"], op.attributes["rank"]
    dtype = xz.dtype
    half = (xz.axis, xz.size[1] // 2)
    projected = tape.tensor(xz.axis, rank + 2 * states, dtype)
    b, c = (tape.tensor(xz.axis, states, dtype) for _ in range(2))
    y = tape.tensor(xz.axis, inner, dtype)
    between = tape.tensor(CHUNK, 2 * inner * states, "fp32")
    rate = parameter_tensor(context, by_name["A_log"], "fp32")
    out = tape.tensor(xz.axis, op.outputs[0].width, policy.compute if policy.autocast else dtype)
    made = [projected, b, c, y, between]
    grads: list[tuple[int, int, str]] = []
    for name, one in by_name.items():
        if name != "A_log":
            grads += weight_grads(context, one)
    scratch = [half] * 3  # the convolution's result, the time step, the gated output
    tape.record(
        (xz, rate), (out, *made), saved=(xz, rate, *made), weight_grads=tuple(grads), scratch=scratch, backward_scratch=[half] * 6
    )
    silent(*made)
    return out


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "mamba_mixer": mamba_mixer,
    "mask_padding": mask_padding,
    "to_fp32": to_fp32,
}
