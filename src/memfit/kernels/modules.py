"""How Hugging Face's eager modules run: norms, rotary embedding, activations, losses, as sequences of autograd functions."""

from __future__ import annotations

from collections.abc import Callable

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import ONCE, Op, Parameter
from memfit.precision import DTYPE_BYTES


def weight_grads(context: Context, parameter: Parameter) -> tuple[tuple[int, int, str], ...]:
    """The gradient of a parameter that is trained, in its own format."""
    if not context.trained(parameter):
        return ()
    return ((parameter.num_elements * DTYPE_BYTES[context.format(parameter)], 0, parameter.name),)


def divided_by_rms(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """x32 * rsqrt(mean(x32^2) + eps): keeps x32 and the rsqrt."""
    x32 = tape.cast(x, "fp32")
    squares = functions.unary(tape, x32, save_input=True, backward_scratch=2)
    rows = tape.tensor(x.axis, heads, "fp32")
    tape.record((squares,), (rows,))
    return functions.multiply(tape, x32, functions.unary(tape, rows, save_output=True))


def rms_norm(context: Context, op: Op, x: Tensor) -> Tensor:
    """Llama: w * (x32 * rsqrt(mean(x32^2) + eps)).to(dtype); Gemma (`offset`): (n32 * (1 + w.float())).to(dtype).

    Keeps x32 (4 B), rsqrt (4 B a row), and n if w is trained: 8h + 4 in 16 bit with the output.
    Source: transformers 5 modeling_llama.py LlamaRMSNorm, modeling_gemma2.py Gemma2RMSNorm.
    """
    tape = context.tape
    (weight,) = op.parameters
    dtype = x.dtype
    normalised = divided_by_rms(tape, x, op.attributes["heads"])
    grads = weight_grads(context, weight)
    if op.attributes["offset"]:
        factor = tape.tensor(ONCE, weight.num_elements, "fp32")
        tape.record((), (factor,))
        out = tape.tensor(x.axis, x.width, "fp32")
        saved = ([normalised] if grads else []) + ([factor] if normalised.requires_grad else [])
        scratch = [normalised.size] if grads else []
        tape.record((normalised, factor), (out,), saved=saved, weight_grads=grads, backward_scratch=scratch)
        factor.requires_grad = False
        return tape.cast(out, dtype)
    held = normalised  # the name `hidden_states`, until the module returns
    normalised = tape.cast(normalised, dtype)
    stored = context.format(weight)
    out = tape.tensor(x.axis, x.width, stored if DTYPE_BYTES[stored] > DTYPE_BYTES[dtype] else dtype)
    tape.record(
        (normalised,),
        (out,),
        saved=(normalised,) if grads else (),
        weight_grads=grads,
        backward_scratch=[normalised.size] if grads else [],
    )
    tape.hold(held)
    return out


def layer_norm(context: Context, op: Op, x: Tensor) -> Tensor:
    """aten::native_layer_norm: keeps x, mean and reciprocal deviation; on autocast's fp32 list."""
    tape = context.tape
    x = tape.autocast_fp32(x)
    out = tape.tensor(x.axis, x.width, x.dtype)
    statistics = tape.tensor(x.axis, 2 * op.attributes.get("rows", 1), "fp32")
    grads = sum((weight_grads(context, one) for one in op.parameters), ())
    saved = [x, statistics]
    if tape.policy.autocast and tape.policy.weight != "fp32" and op.parameters:
        casts = tape.tensor(ONCE, sum(one.num_elements for one in op.parameters), "fp32")
        tape.record((), (casts,))
        saved.append(casts)
    tape.record(saved[::2], (out, statistics), saved=saved, weight_grads=grads)
    for one in saved[2:]:
        one.requires_grad = False
    statistics.requires_grad = False
    return out


def rotary(context: Context, op: Op, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q * cos + rotate_half(q) * sin, the same for k: keeps cos and sin only (once per forward, shared by the layers)."""
    rotary_dim = op.attributes["rotary_dim"]
    head_dim = op.attributes["head_dim"]
    tape = context.tape
    in_fp32 = op.attributes["in_fp32"]
    tables, twice = bool(in_fp32) or op.attributes["fp32_tables"], in_fp32 == "twice"
    read = [tape.cast(x, "fp32") for x in (q, k)] if in_fp32 == "named" else [q, k]
    out_q, out_k = [_rotate(tape, x, head_dim, rotary_dim, fp32_tables=tables, twice=twice) for x in read]
    if op.attributes["parts_named"] and rotary_dim is not None:
        for joined in (out_q, out_k):  # the name of the rotated part lives as long as that of the whole
            tape.companions[joined.storage] = next(node for node in tape.nodes if joined in node.outputs).inputs[0]
    if not op.attributes["cast_back"]:
        return out_q, out_k
    results = tape.cast(out_q, q.dtype), tape.cast(out_k, k.dtype)
    for x in (q, k, *read, out_q, out_k):  # names of the function and of its caller, until it returns
        tape.hold(x)
    return results


def _rotate(tape: Tape, x: Tensor, head_dim: int, rotary_dim: int | None, *, fp32_tables: bool, twice: bool) -> Tensor:
    """x cos + rotate_half(x) sin; `twice`: of `x.float()`, which both products make for themselves."""
    whole = x
    width = x.width if rotary_dim is None else x.width // head_dim * rotary_dim
    if rotary_dim is not None:
        x = _slice(tape, whole, width)
    # cos and sin come in the hidden states' format, which under autocast is that of the weights
    table = tape.policy.weight if tape.policy.autocast else x.dtype
    dtype = "fp32" if fp32_tables or "fp32" in (table, x.dtype) else x.dtype
    with_cos = functions.unary(tape, tape.cast(x, "fp32") if twice else x, dtype=dtype)
    x = tape.cast(x, "fp32") if twice else x
    rotated = tape.tensor(x.axis, width, x.dtype)
    half = (x.axis, x.size[1] // 2)
    # cat((-x2, x1)): forward negates one half; backward negates it back and fills a whole tensor of zeros for each half
    tape.record((x,), (rotated,), scratch=(half,), backward_scratch=(half, x.size))
    with_sin = functions.unary(tape, rotated, dtype=dtype)
    out = functions.add(tape, with_cos, with_sin)
    if rotary_dim is None:
        return out
    rest = _slice(tape, whole, whole.width - width)
    joined = tape.tensor(x.axis, whole.width, dtype)
    tape.record((out, rest), (joined,))
    return joined


def _slice(tape: Tape, x: Tensor, width: int) -> Tensor:
    """A part of each head: a view; its backward fills a whole tensor of zeros."""
    out = tape.view(x, width)
    tape.record((x,), (out,))
    return out


def split(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Views of a fused projection; backward joins their gradients into one tensor."""
    outputs = [context.tape.view(x, value.width) for value in op.outputs]
    context.tape.record((x,), outputs)
    return outputs


def _gelu_new(tape: Tape, x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) in Python: keeps x, tanh, 1 + tanh and 0.5 x."""
    half = functions.unary(tape, x)
    cube = functions.unary(tape, tape.autocast_fp32(x), save_input=True, backward_scratch=2)
    inner = functions.add(tape, x, functions.unary(tape, cube))
    tanh = functions.unary(tape, functions.unary(tape, inner), save_output=True)
    one_plus = tape.tensor(tanh.axis, tanh.width, tanh.dtype)
    tape.record((tanh,), (one_plus,), alias=True)
    out = functions.multiply(tape, half, one_plus)
    tape.hold(x)
    return out


def _quick_gelu(tape: Tape, x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)"""
    return functions.multiply(tape, x, functions.unary(tape, functions.unary(tape, x), save_output=True))


def _keeps_input(tape: Tape, x: Tensor) -> Tensor:
    return functions.unary(tape, x, save_input=True)


def _keeps_output(tape: Tape, x: Tensor) -> Tensor:
    return functions.unary(tape, x, save_output=True)


ACTIVATIONS: dict[str, Callable[[Tape, Tensor], Tensor]] = {
    "gelu": _keeps_input,
    "gelu_pytorch_tanh": _keeps_input,
    "silu": _keeps_input,
    "swish": _keeps_input,
    "relu": _keeps_output,
    "tanh": _keeps_output,
    "gelu_new": _gelu_new,
    "quick_gelu": _quick_gelu,
}
"""Activation functions by the name that configs use, as transformers' ACT2FN implements them."""


def activation(context: Context, op: Op, x: Tensor) -> Tensor:
    """The activation by its config name."""
    return ACTIVATIONS[op.attributes["function"]](context.tape, x)


def softcap(context: Context, op: Op, x: Tensor) -> Tensor:
    """tanh(x / c) * c: keeps the tanh."""
    tape = context.tape
    return functions.unary(tape, functions.unary(tape, functions.unary(tape, x), save_output=True))


def one_token(context: Context, op: Op, x: Tensor) -> Tensor:
    """One token of every sequence, as a view or by index; its backward fills a whole tensor of zeros."""
    axis = op.outputs[0].axis
    if op.attributes["view"]:
        out = Tensor(x.storage, axis, x.width, x.dtype, x.requires_grad)
    else:
        out = context.tape.tensor(axis, x.width, x.dtype)
    context.tape.record((x,), (out,))
    return out


def opaque(context: Context, op: Op) -> Tensor:
    """A model known by counts: one tensor of so many elements is kept, its gradient is as large."""
    tape = context.tape
    (weight,) = op.parameters
    out = tape.tensor(op.outputs[0].axis, op.outputs[0].width, tape.policy.compute)
    grads = ((weight.num_elements * DTYPE_BYTES[tape.policy.weight], 0, weight.name),) if context.trained(weight) else ()
    tape.record((), (out,), saved=(out,), weight_grads=grads)
    return out
