"""The autograd functions that kernels are made of: one call, one node (torch/csrc/autograd and derivatives.yaml)."""

from __future__ import annotations

from math import prod

from memfit.kernels.context import Adapter, Context
from memfit.kernels.tape import Size, Tape, Tensor
from memfit.model.description import ONCE, POSITION, TOKEN, Parameter
from memfit.precision import DTYPE_BYTES, QuantizedFormat


def unary(
    tape: Tape,
    x: Tensor,
    *,
    save_input: bool = False,
    save_output: bool = False,
    dtype: str | None = None,
    backward_scratch: int = 0,
) -> Tensor:
    """One new tensor from one; keeps its input, its result, or nothing. `backward_scratch`: copies of x beside the gradient."""
    out = tape.tensor(x.axis, x.width, dtype or x.dtype)
    saved = ([x] if save_input else []) + ([out] if save_output else [])
    scratch = [x.size] * backward_scratch
    tape.record((x,), (out,), saved=saved, backward_scratch=scratch)
    return out


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps each factor if the other needs a gradient."""
    axis, width = max((a.axis, a.width), (b.axis, b.width))
    out = tape.tensor(axis, width, tape.promote(a, b))
    saved = [one for one, other in ((a, b), (b, a)) if other.requires_grad]
    # a broadcast factor's gradient is made in full and then summed
    broadcast = (a.axis, a.width) != (b.axis, b.width)
    tape.record((a, b), (out,), saved=saved, backward_scratch=[out.size] if broadcast else ())
    return out


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """a + b: keeps nothing, and its gradient is passed on to both without a copy."""
    larger = a if (a.axis, a.width) >= (b.axis, b.width) else b
    out = tape.tensor(larger.axis, larger.width, tape.promote(a, b))
    tape.record((a, b), (out,), alias=True)
    return out


def matmul(tape: Tape, a: Tensor, b: Tensor, axis: int, width: int) -> Tensor:
    """A batched product of two activations: keeps both factors."""
    out = tape.tensor(axis, width, a.dtype)
    saved = [one for one, other in ((a, b), (b, a)) if other.requires_grad]
    tape.record((a, b), (out,), saved=saved)
    tape.name("bmm")
    return out


def dropout(context: Context, x: Tensor, stated: float) -> Tensor:
    """native_dropout on CUDA: a new tensor and a mask of one byte per element that is kept; x itself at probability 0."""
    if context.probability(stated) == 0:
        return x
    tape = context.tape
    out = tape.tensor(x.axis, x.width, x.dtype)
    mask = tape.tensor(x.axis, x.width, "bool")
    tape.record((x,), (out, mask), saved=(mask,))
    mask.requires_grad = False
    return out


def linear(context: Context, parameter: Parameter, bias: Parameter | None, x: Tensor) -> Tensor:
    """y = x W^T + b, with autocast's casts, a quantised weight or an adapter where the policy says so."""
    tape = context.tape
    adapter = context.adapter(parameter)
    quantized = context.quantized(parameter)
    out = _quantized_linear(tape, parameter, quantized, x) if quantized else _dense_linear(context, parameter, bias, x)
    return out if adapter is None else _adapted(context, parameter, adapter, x, out)


def _columns(parameter: Parameter, x: Tensor) -> int:
    """Elements of x W^T for each unit of x's axis: an image has many rows of in_features elements, a token has one."""
    return max(1, x.width // parameter.shape[1]) * parameter.shape[0]


def _dense_linear(context: Context, parameter: Parameter, bias: Parameter | None, x: Tensor) -> Tensor:
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
    out = tape.tensor(x.axis, _columns(parameter, x), dtype)
    saved = ([x] if trained else []) + ([copy] if copy is not None and x.requires_grad else [])
    count = prod(parameter.shape)
    weight_grads: list[tuple[int, int, str]] = []
    if trained:
        copy_bytes = count * DTYPE_BYTES[policy.compute] if copy is not None else 0
        weight_grads.append((count * DTYPE_BYTES[policy.weight], copy_bytes, parameter.tied_to or parameter.name))
        if bias is not None:
            weight_grads.append((bias.num_elements * DTYPE_BYTES[policy.weight], 0, bias.name))
    inputs = (x,) if copy is None else (x, copy)
    tape.record(inputs, (out,), saved=saved, weight_grads=tuple(weight_grads), view_gradient=True)
    tape.name("mm" if bias is None else "addmm")
    if copy is not None:
        copy.requires_grad = False
    return out


def _quantized_linear(tape: Tape, parameter: Parameter, quantized: QuantizedFormat, x: Tensor) -> Tensor:
    """A frozen 4- or 8-bit weight: no input is kept; a 16-bit copy of the weight lives during the product, both ways.

    The input is cast to the compute format and the result back to the input's (bitsandbytes nn/modules.py, Linear4bit.forward).
    """
    given = x.dtype
    x = tape.cast(x, tape.policy.compute)
    out = tape.tensor(x.axis, _columns(parameter, x), x.dtype)
    scratch: list[Size] = []
    if quantized.dequantized:
        scratch.append((ONCE, prod(parameter.shape) * DTYPE_BYTES[tape.policy.compute]))
    tape.record((x,), (out,), scratch=scratch, backward_scratch=scratch, view_gradient=True)
    tape.name("mm")
    return tape.cast(out, given)


def _adapted(context: Context, parameter: Parameter, adapter: Adapter, x: Tensor, base: Tensor) -> Tensor:
    """PEFT's LoRA layer: result + B(A(dropout(x.to(A.dtype)))) * scaling, cast back to the result's format."""
    tape = context.tape
    out_features, in_features = parameter.shape
    x = tape.cast(x, adapter.dtype)
    x = dropout(context, x, adapter.dropout)
    low = _adapter_linear(
        context, Parameter(parameter.name + ".lora_A", (adapter.rank, in_features), "adapter"), adapter.dtype, x
    )
    high = _adapter_linear(
        context, Parameter(parameter.name + ".lora_B", (out_features, adapter.rank), "adapter"), adapter.dtype, low
    )
    scaled = unary(tape, high)
    total = add(tape, base, scaled)
    return tape.cast(total, base.dtype)


def _adapter_linear(context: Context, parameter: Parameter, dtype: str, x: Tensor) -> Tensor:
    """One factor of an adapter: always trained."""
    tape = context.tape
    trained = context.policy.training
    x = tape.autocast_compute(x)
    copy = tape.weight_cast(parameter, dtype, trained)
    out = tape.tensor(x.axis, _columns(parameter, x), x.dtype)
    saved = ([x] if trained else []) + ([copy] if copy is not None and x.requires_grad else [])
    size = prod(parameter.shape) * DTYPE_BYTES[dtype]
    copy_bytes = prod(parameter.shape) * DTYPE_BYTES[tape.policy.compute] if copy is not None else 0
    weight_grads = ((size, copy_bytes, parameter.name),) if trained else ()
    tape.record((x,) if copy is None else (x, copy), (out,), saved=saved, weight_grads=weight_grads, view_gradient=True)
    tape.name("mm")
    if copy is not None:
        copy.requires_grad = False
    return out


def embedding(context: Context, parameter: Parameter, ids: Tensor, axis: int, source: str) -> Tensor:
    """Rows of a table: keeps the ids; the gradient is dense, as large as the table. Autocast leaves it alone."""
    tape = context.tape
    if context.policy.kv_cache and source == "positions":
        axis = TOKEN  # generate() makes position ids for every sequence
    out = tape.tensor(axis, parameter.shape[1], tape.policy.weight)
    trained = context.trained(parameter)
    grads = (
        ((prod(parameter.shape) * DTYPE_BYTES[tape.policy.weight], 0, parameter.tied_to or parameter.name),) if trained else ()
    )
    saved = [ids]
    if source != "batch":
        # positions are made for one sequence and expanded; a buffer is there anyway
        made = {"positions": POSITION, "made": axis}.get(source)
        saved = [] if made is None else [tape.tensor(made, 1, "int64")]
    tape.record(saved, (out,), saved=saved, weight_grads=grads)
    for one in saved:
        one.requires_grad = False
    return out
