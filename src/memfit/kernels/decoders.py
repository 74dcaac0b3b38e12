"""How single decoder families' own Python functions run.

Source: transformers 5, models/falcon/modeling_falcon.py FalconLinear, models/bloom/modeling_bloom.py GeLUFunction,
models/gptj/modeling_gptj.py apply_rotary_pos_emb, models/mpt/modeling_mpt.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions, linear
from memfit.kernels.context import Context
from memfit.kernels.modules import weight_grads
from memfit.kernels.tape import Tensor
from memfit.model.description import ONCE, POSITION, Op


def product(context: Context, op: Op, x: Tensor) -> Tensor:
    """x @ W.T + b. The bias is added apart; under autocast in the weights' format. `W.T` is no leaf: its cast is not cached."""
    tape = context.tape
    weight = op.parameters[0]
    out = linear.linear(context, weight, None, x)
    tape.cached_casts.pop(weight.name, None)
    if len(op.parameters) == 1:
        return out
    total = tape.tensor(out.axis, out.width, tape.policy.weight if tape.policy.autocast else out.dtype)
    tape.record((out,), (total,), alias=True, weight_grads=weight_grads(context, op.parameters[1]))
    return total


def bloom_gelu(context: Context, op: Op, x: Tensor) -> Tensor:
    """Forward of x * 0.5 * (1 + tanh(0.8 x (1 + 0.04 x x))) without autograd; backward computes the tanh again.

    At most three temporaries as large as x are alive beside x forward, four backward beside the two gradients.
    """
    out = context.tape.tensor(x.axis, x.width, x.dtype)
    context.tape.record((x,), (out,), saved=(x,), scratch=[x.size, x.size], backward_scratch=[x.size] * 4)
    return out


def in_place_add(context: Context, op: Op, a: Tensor, other: Tensor) -> Tensor:
    """The sum takes the storage of a."""
    out = context.tape.view(a, a.width)
    context.tape.record((a, other), (out,), alias=True)
    return out


def indexed(context: Context, op: Op, x: Tensor) -> Tensor:
    """Advanced indexing copies, keeps its index (one int64), and in backward fills a whole tensor of zeros."""
    tape = context.tape
    part = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    index = tape.tensor(ONCE, 1, "int64")
    tape.record((x, index), (part,), saved=(index,))
    index.requires_grad = False
    return part


def expanded(context: Context, op: Op, x: Tensor) -> Tensor:
    """A copy; the gradients of a group are summed in backward."""
    out = context.tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    context.tape.record((x,), (out,))
    return out


def clamp(context: Context, op: Op, x: Tensor) -> Tensor:
    """Keeps its input; backward makes a mask."""
    return functions.unary(context.tape, x, save_input=True)


def interleaved_rotary(context: Context, op: Op, x: Tensor) -> Tensor:
    """x * cos + rotate_every_two(x) * sin on the first elements of each head: keeps its own sin and cos."""
    tape = context.tape
    head_dim, rotary_dim = op.attributes["head_dim"], op.attributes["rotary_dim"]
    table_dtype = tape.policy.weight if tape.policy.autocast else x.dtype
    whole, width = x, x.width // head_dim * rotary_dim
    rest = None
    part = tape.view(whole, width)
    tape.record((whole,), (part,))
    rest = tape.view(whole, whole.width - width)
    tape.record((whole,), (rest,))
    sin, cos = (tape.tensor(POSITION, rotary_dim, table_dtype) for _ in range(2))
    tape.record((), (sin, cos))
    dtype = tape.promote(part, sin)
    with_cos = tape.tensor(part.axis, width, dtype)
    tape.record((part, cos), (with_cos,), saved=(cos,))
    rotated = tape.tensor(part.axis, width, part.dtype)
    half = (part.axis, part.size[1] // 2)
    tape.record((part,), (rotated,), scratch=(half,), backward_scratch=(half, part.size))
    with_sin = tape.tensor(part.axis, width, dtype)
    tape.record((rotated, sin), (with_sin,), saved=(sin,))
    for one in (sin, cos):
        one.requires_grad = False
    out = functions.add(tape, with_cos, with_sin)
    joined = tape.tensor(whole.axis, whole.width, tape.promote(out, rest))
    tape.record((out, rest), (joined,))
    return joined


def _one(kernel: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
    return lambda context, op, *inputs: [kernel(context, op, *inputs)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "product": _one(product),
    "bloom_gelu": _one(bloom_gelu),
    "in_place_add": _one(in_place_add),
    "indexed": _one(indexed),
    "expanded": _one(expanded),
    "clamp": _one(clamp),
    "interleaved_rotary": _one(interleaved_rotary),
}
