"""What is trained beside frozen weights, as PEFT's layers compute it: LoRA, DoRA, (IA)3."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from memfit.kernels.context import Adapter, Context, target_of
from memfit.kernels.functions import add, dropout, multiply, unary
from memfit.kernels.tape import Size, Tensor
from memfit.model.description import ONCE, Parameter
from memfit.precision import DTYPE_BYTES


def columns(parameter: Parameter, x: Tensor) -> int:
    """Elements of x W^T for each unit of x's axis: an image has many rows of in_features elements, a token has one."""
    return max(1, x.width // parameter.shape[1]) * parameter.shape[0]


def shapes(parameter: Parameter, adapter: Adapter) -> list[tuple[int, ...]]:
    """Shapes of what is trained beside a weight.

    LoRA: r x in and out x r (of a table of V rows: r x V and h x r). DoRA: a magnitude for each of the out outputs as well.
    (IA)3: one vector, as long as what it scales.
    """
    rows, width = parameter.shape
    if adapter.kind == "ia3":
        return [(1, width if target_of(parameter) in adapter.scales_input else rows)]
    if parameter.role == "embedding":
        rows, width = width, rows
    pair: list[tuple[int, ...]] = [(adapter.rank, width), (rows, adapter.rank)]
    return [*pair, (rows,)] if adapter.kind == "dora" else pair


def low_rank(context: Context, parameter: Parameter, adapter: Adapter, x: Tensor, base: Tensor, *, has_bias: bool) -> Tensor:
    """result + B(A(dropout(x.to(A.dtype)))) * scaling, cast back to the result's format.

    Under autocast PEFT's 4-bit layers leave the input to autocast (tuners/lora/bnb.py); its others cast it first.
    """
    tape = context.tape
    if not (context.quantized(parameter) and tape.policy.autocast):
        x = tape.cast(x, adapter.dtype)
    x = dropout(context, x, adapter.dropout)
    if adapter.kind == "dora":
        total = add(tape, base, _dora(context, parameter, adapter, x, base, has_bias))
    else:
        rows, width = parameter.shape
        low = factor(context, Parameter(parameter.name + ".lora_A", (adapter.rank, width), "adapter"), adapter.dtype, x)
        high = factor(context, Parameter(parameter.name + ".lora_B", (rows, adapter.rank), "adapter"), adapter.dtype, low)
        total = add(tape, base, unary(tape, high))
    return tape.cast(total, base.dtype)


def _dora(context: Context, parameter: Parameter, adapter: Adapter, x: Tensor, base: Tensor, has_bias: bool) -> Tensor:
    """(m / |W + s B A| - 1) * base + m / |W + s B A| * B(A(x)) * s: keeps the base's result and B's beside what LoRA keeps.

    For the norm, W is expanded in the adapters' format, and B A is computed from an identity matrix of in x in, which its graph
    holds. These live as long as the layer's forward; the scaled B A and its sum with W only until the norm is there. With
    dropout, the base's product is computed once more from the dropped-out input: that keeps the copy of W for backward.
    Source: PEFT tuners/lora/dora.py, DoraLinearLayer.forward; tuners/lora/variants.py, DoraLinearVariant.
    """
    tape = context.tape
    rows, width = parameter.shape
    rank, trained = adapter.rank, context.policy.training
    weight = tape.tensor(ONCE, rows * width, adapter.dtype)
    if adapter.dtype == tape.policy.weight and not context.quantized(parameter):
        weight = tape.outside(ONCE, rows * width, adapter.dtype)  # W itself
    product = tape.tensor(ONCE, width * (width + rank + rows), adapter.dtype)
    matrix: Size = (ONCE, rows * width * DTYPE_BYTES[adapter.dtype])
    tape.record((), (weight, product), scratch=[matrix, matrix])
    norm = tape.tensor(ONCE, rows, adapter.dtype)
    scale = tape.tensor(ONCE, rows, adapter.dtype)
    grads = ((rows * DTYPE_BYTES[adapter.dtype], 0, parameter.name + ".magnitude"),) if trained else ()
    tape.record((norm,), (scale,), saved=(norm,), weight_grads=grads)
    norm.requires_grad = False
    low = factor(context, Parameter(parameter.name + ".lora_A", (rank, width), "adapter"), adapter.dtype, x)
    high = factor(context, Parameter(parameter.name + ".lora_B", (rows, rank), "adapter"), adapter.dtype, low)
    if context.probability(adapter.dropout):
        x = tape.autocast_compute(x)
        base = tape.tensor(x.axis, columns(parameter, x), x.dtype)
        tape.record((x, weight), (base,), saved=(weight,) if x.requires_grad else (), view_gradient=True)
        weight.requires_grad = False
    elif has_bias:
        base = unary(tape, base)
    less_one = tape.tensor(ONCE, rows, adapter.dtype)
    tape.record((scale,), (less_one,), alias=True)
    first = multiply(tape, less_one, base)
    out = add(tape, first, unary(tape, multiply(tape, scale, high)))
    for one in (weight, product, high, base):  # names of the layer's forward
        tape.hold(one)
    return out


def factor(context: Context, parameter: Parameter, dtype: str, x: Tensor, bias: Parameter | None = None) -> Tensor:
    """A linear layer beside the model's, such as one factor of a pair: always trained, in a format of its own."""
    tape = context.tape
    trained = context.policy.training
    x = tape.autocast_compute(x)
    copy = tape.weight_cast(parameter, dtype, trained)
    out = tape.tensor(x.axis, columns(parameter, x), x.dtype)
    saved = ([x] if trained else []) + ([copy] if copy is not None and x.requires_grad else [])
    size = prod(parameter.shape) * DTYPE_BYTES[dtype]
    copy_bytes = prod(parameter.shape) * DTYPE_BYTES[tape.policy.compute] if copy is not None else 0
    weight_grads: tuple[tuple[int, int, str], ...] = ((size, copy_bytes, parameter.name),) if trained else ()
    if trained and bias is not None:
        weight_grads += ((bias.num_elements * DTYPE_BYTES[dtype], 0, parameter.name + ".bias"),)
    tape.record((x,) if copy is None else (x, copy), (out,), saved=saved, weight_grads=weight_grads, view_gradient=True)
    tape.name("mm")
    if copy is not None:
        copy.requires_grad = False
    return out


def on_embedding(context: Context, parameter: Parameter, adapter: Adapter, ids: list[Tensor], base: Tensor) -> Tensor:
    """result + (embedding(ids, A^T) @ B^T) * scaling, cast back: keeps the ids and A's rows; A's gradient is dense, r x V.

    Source: PEFT tuners/lora/layer.py, Embedding.forward.
    """
    tape = context.tape
    rank, element = adapter.rank, DTYPE_BYTES[adapter.dtype]
    trained = context.policy.training
    low = tape.tensor(base.axis, rank, adapter.dtype)
    grads = ((rank * parameter.shape[0] * element, 0, parameter.name + ".lora_embedding_A"),) if trained else ()
    tape.record(ids, (low,), saved=ids, weight_grads=grads)
    for one in ids:
        one.requires_grad = False
    name = parameter.name + ".lora_embedding_B"
    high = factor(context, Parameter(name, (parameter.shape[1], rank), "adapter"), adapter.dtype, low)
    return tape.cast(add(tape, base, unary(tape, high)), base.dtype)


def scaled_by_vector(
    context: Context, parameter: Parameter, adapter: Adapter, x: Tensor, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """(IA)3: base(x * l) of a feed-forward layer, base(x) * l of any other; keeps what is scaled.

    Source: PEFT tuners/ia3/layer.py, Linear.forward.
    """
    tape = context.tape
    scales_input = target_of(parameter) in adapter.scales_input
    trained = context.policy.training
    count = shapes(parameter, adapter)[0][1]
    scale = tape.tensor(ONCE, count, adapter.dtype, requires_grad=trained)
    grads = ((count * DTYPE_BYTES[adapter.dtype], 0, parameter.name + ".ia3_l"),) if trained else ()
    # 1 * vector: a tensor of its own
    tape.record((), (scale,), weight_grads=grads)
    given = x.dtype
    if scales_input:
        return product(tape.cast(multiply(tape, tape.cast(x, adapter.dtype), scale), given))
    out = product(x)
    return tape.cast(multiply(tape, out, scale), out.dtype)
