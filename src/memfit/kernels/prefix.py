"""Prefix tuning: trained keys and values of virtual tokens, which every layer attends to before those of its own tokens.

A table, or a small table and two layers around a tanh, yields the keys and values of all layers at once. The cache object that
forward is given holds a copy of them; a layer joins its own to them, so that attention reads n + s keys for s queries.
Source: PEFT tuners/prefix_tuning/model.py (PrefixEncoder) and peft_model.py (get_prompt); transformers 5 cache_utils.py.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from memfit.kernels.adapters import factor
from memfit.kernels.context import Context, KernelPolicy, Prefix
from memfit.kernels.functions import unary
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import KEY_TOKEN, ONCE, SEQUENCE, Parameter
from memfit.precision import DTYPE_BYTES


class Encoded(NamedTuple):
    """The prefix encoder as autograd sees it: from the ids of the virtual tokens to what the cache holds of them."""

    tape: Tape
    input: Tensor
    output: Tensor


def shapes(prefix: Prefix) -> list[tuple[int, ...]]:
    """Of n tokens with w elements of keys and values each: n x w; with a projection n x d, e x d, e, w x e, w."""
    n, width, hidden = prefix.tokens, prefix.width, prefix.projection
    if not hidden:
        return [(n, width)]
    return [(n, prefix.layer_width), (hidden, prefix.layer_width), (hidden,), (width, hidden), (width,)]


def encode(policy: KernelPolicy, prefix: Prefix) -> Encoded:
    """Look-up, projection, the cast to the model's format, the cache's copies; one row for each sequence and virtual token.

    All rows of a sequence are one unit of the axis. Their gradients wait until all layers are through backward.
    """
    tape = Tape(policy.precision, grad=policy.training and not policy.evaluating)
    context = Context(tape, policy)
    n, parameters = prefix.tokens, [Parameter("prefix_encoder", one, "adapter") for one in shapes(prefix)]
    ids = tape.tensor(ONCE, n, "int64")
    x = tape.tensor(SEQUENCE, n * parameters[0].shape[1], prefix.dtype)
    grads = ((prod(parameters[0].shape) * DTYPE_BYTES[prefix.dtype], 0, "prefix_encoder.embedding"),)
    tape.record((ids,), (x,), saved=(ids,), weight_grads=grads)
    if prefix.projection:
        first, first_bias, second, second_bias = parameters[1:]
        inner = factor(context, first._replace(name="prefix_encoder.0"), prefix.dtype, x, first_bias)
        inner = unary(tape, inner, save_output=True)
        x = factor(context, second._replace(name="prefix_encoder.2"), prefix.dtype, inner, second_bias)
    x = tape.cast(x, policy.precision.weight)
    copies = tape.tensor(x.axis, x.width, x.dtype)
    tape.record((x,), (copies,), alias=True)
    return Encoded(tape, ids, copies)


def joined(context: Context, prefix: Prefix, x: Tensor) -> Tensor:
    """cat([virtual, x]): keys (or values) of the virtual and the own tokens.

    The gradient of either part is a view of that of the result. Autograd runs the latest operations first, and what made the
    virtual ones came before the model: their view keeps the result's gradient alive until all layers are through backward.
    """
    tape = context.tape
    virtual = tape.tensor(SEQUENCE, prefix.tokens * x.width, tape.policy.weight, requires_grad=tape.grad)
    out = tape.tensor(KEY_TOKEN, x.width, tape.promote(virtual, x))
    tape.record((virtual, x), (out,), alias=True, parts=True)
    if tape.grad:
        tape.waiting.append(out)
    return out
