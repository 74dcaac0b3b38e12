"""Matrix products with weights and look-ups in tables: dense, quantised, and what is trained beside them."""

from __future__ import annotations

from math import prod

from memfit.kernels import adapters
from memfit.kernels.context import Context
from memfit.kernels.sets import KERNEL_SETS
from memfit.kernels.tape import Size, Tape, Tensor
from memfit.model.description import ONCE, POSITION, TOKEN, Parameter
from memfit.precision import DTYPE_BYTES, QuantizedFormat

Gradients = tuple[tuple[int, int, str], ...]


def linear(context: Context, parameter: Parameter, bias: Parameter | None, x: Tensor) -> Tensor:
    """y = x W^T + b, with autocast's casts, a quantised weight or an adapter where the policy says so."""
    adapter = context.adapter(parameter)
    if adapter is not None and adapter.kind == "ia3":
        return adapters.scaled_by_vector(context, parameter, adapter, x, lambda read: _product(context, parameter, bias, read))
    out = _product(context, parameter, bias, x)
    return out if adapter is None else adapters.low_rank(context, parameter, adapter, x, out, has_bias=bias is not None)


def _product(context: Context, parameter: Parameter, bias: Parameter | None, x: Tensor) -> Tensor:
    quantized = context.quantized(parameter)
    return _quantized(context, parameter, bias, quantized, x) if quantized else _dense(context, parameter, bias, x)


def _bias_gradient(context: Context, bias: Parameter | None) -> Gradients:
    if bias is None or not context.trained(bias):
        return ()
    return ((bias.num_elements * DTYPE_BYTES[context.tape.policy.weight], 0, bias.name),)


def _dense(context: Context, parameter: Parameter, bias: Parameter | None, x: Tensor) -> Tensor:
    """Keeps its input if W is trained, autocast's copy of W if x needs a gradient."""
    tape = context.tape
    policy = tape.policy
    trained = context.trained(parameter)
    copy = None
    dtype = x.dtype
    if policy.autocast:
        x = tape.autocast_compute(x)
        copy = tape.weight_cast(parameter, policy.weight, trained)
        dtype = policy.compute
    out = tape.tensor(x.axis, adapters.columns(parameter, x), dtype)
    part = tape.regathered.get(x.storage)
    saved = ([part or x] if trained else []) + ([copy] if copy is not None and x.requires_grad else [])
    count = prod(parameter.shape)
    weight_grads: Gradients = ()
    if trained:
        copy_bytes = count * DTYPE_BYTES[policy.compute] if copy is not None else 0
        num_bytes = 0 if KERNEL_SETS[context.policy.kernels].gradient_placeholders else count * DTYPE_BYTES[policy.weight]
        weight_grads = ((num_bytes, copy_bytes, context.gradient_name(parameter)),)
    weight_grads += _bias_gradient(context, bias)
    inputs = (x,) if copy is None else (x, copy)
    again = (x.size,) if part is not None and trained else ()
    tape.record(inputs, (out,), saved=saved, weight_grads=weight_grads, backward_scratch=again, view_gradient=True)
    tape.name("mm" if bias is None else "addmm")
    if copy is not None:
        copy.requires_grad = False
    return out


def _quantized(context: Context, parameter: Parameter, bias: Parameter | None, quantized: QuantizedFormat, x: Tensor) -> Tensor:
    """A frozen 4- or 8-bit weight; a 16-bit copy of the weight lives during the product, both ways.

    No input is kept, except by earlier releases (`keeps_input`). The input is cast to the compute format and the result back to
    the input's (bitsandbytes nn/modules.py, Linear4bit.forward).
    """
    tape = context.tape
    given = x.dtype
    x = tape.cast(x, tape.policy.compute)
    out = tape.tensor(x.axis, adapters.columns(parameter, x), x.dtype)
    scratch: list[Size] = []
    if quantized.dequantized:
        scratch.append((ONCE, prod(parameter.shape) * DTYPE_BYTES[tape.policy.compute]))
    tape.record(
        (x,),
        (out,),
        saved=(x,) if quantized.keeps_input else (),
        weight_grads=_bias_gradient(context, bias),
        scratch=scratch,
        backward_scratch=scratch,
        view_gradient=True,
    )
    tape.name("mm")
    return tape.cast(out, given)


def embedding(context: Context, parameter: Parameter, ids: Tensor, axis: int, source: str) -> Tensor:
    """Rows of a table: keeps the ids; the gradient is dense, as large as the table. Autocast leaves it alone."""
    tape: Tape = context.tape
    if context.policy.kv_cache and source == "positions":
        axis = TOKEN  # generate() makes position ids for every sequence
    out = tape.tensor(axis, parameter.shape[1], tape.policy.weight)
    grads: Gradients = ()
    if context.trained(parameter):
        grads = ((prod(parameter.shape) * DTYPE_BYTES[tape.policy.weight], 0, context.gradient_name(parameter)),)
    read = [ids]
    if source != "batch":
        # positions are made for one sequence and expanded; a buffer is there anyway
        made = {"positions": POSITION, "made": axis}.get(source)
        read = [] if made is None else [tape.tensor(made, 1, "int64")]
    tape.record(read, (out,), saved=read, weight_grads=grads)
    for one in read:
        one.requires_grad = False
    adapter = context.adapter(parameter)
    return out if adapter is None else adapters.on_embedding(context, parameter, adapter, read, out)
