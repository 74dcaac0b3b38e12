"""From a block's operations to a tape: the table from operation to implementation, and the walk over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memfit.kernels import attention, functions, modules
from memfit.kernels.context import Context, KernelPolicy
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import SEQUENCE, Block, Op


class Lowered(NamedTuple):
    """A block as autograd sees it."""

    tape: Tape
    input: Tensor
    output: Tensor
    logits: Tensor | None
    """What the caller still holds as the model's output."""
    input_held: bool = True
    """The caller's name for the hidden states still holds the block's input; after the last layer no name does."""


def _one(result: Tensor) -> list[Tensor]:
    return [result]


_KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "rms_norm": lambda context, op, x: _one(modules.rms_norm(context, op, x)),
    "layer_norm": lambda context, op, x: _one(modules.layer_norm(context, op, x)),
    "rotary": modules.rotary,
    "attention": lambda context, op, q, k, v: _one(attention.attention(context, op, q, k, v)),
    "split": modules.split,
    "activation": lambda context, op, x: _one(modules.activation(context, op, x)),
    "softcap": lambda context, op, x: _one(modules.softcap(context, op, x)),
    "multiply": lambda context, op, a, b: _one(functions.multiply(context.tape, a, b)),
    "add": lambda context, op, a, b: _one(functions.add(context.tape, a, b)),
    "scale": lambda context, op, x: _one(functions.unary(context.tape, x)),
    "dropout": lambda context, op, x: _one(functions.dropout(context, x, op.attributes["probability"])),
    "one_token": lambda context, op, x: _one(modules.one_token(context, op, x)),
    "opaque": lambda context, op, x: _one(modules.opaque(context, op)),
}
"""Hugging Face's eager implementations by kind of operation."""


def _linear(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    weight = op.parameters[0]
    bias = op.parameters[1] if len(op.parameters) > 1 else None
    return [functions.linear(context, weight, bias, x)]


def lower(block: Block, policy: KernelPolicy, *, input_requires_grad: bool, input_dtype: str) -> Lowered:
    """Run a block's operations symbolically under a policy and record what autograd would."""
    tape = Tape(policy.precision, grad=policy.training)
    context = Context(tape, policy)
    # ids are counted with the batch's inputs, not with the block
    reads_ids = bool(block.ops) and block.ops[0].kind in ("embedding", "opaque")
    x = tape.tensor(block.input.axis, 0 if reads_ids else block.input.width, input_dtype, input_requires_grad and policy.training)
    values: dict[int, Tensor] = {0: x}
    logits: Tensor | None = None
    output = x
    head: Op | None = None
    ends: list[int] = []
    for op in block.ops:
        inputs = [values[value.id] for value in op.inputs]
        if op.kind == "head":
            head = op
        fused = head is not None and policy.loss == "fused" and policy.training
        if op.kind == "loss":
            if not policy.training:
                ends.append(len(tape.nodes) - 1)
                continue
            if fused and head is not None:
                results = [modules.fused_cross_entropy(context, op, head.parameters[0], inputs[0])]
            else:
                logits = inputs[0]
                results = [modules.cross_entropy(context, op, logits)]
        elif fused:
            results = inputs[:1]
        elif op.kind in ("linear", "head"):
            bias = op.parameters[1] if len(op.parameters) > 1 else None
            read = _last_position(tape, inputs[0]) if op.kind == "head" and policy.logits_last else inputs[0]
            results = [functions.linear(context, op.parameters[0], bias, read)]
        elif op.kind == "embedding":
            results = [functions.embedding(context, op.parameters[0], inputs[0], op.outputs[0].axis, op.attributes["ids"])]
        else:
            results = list(_KERNELS[op.kind](context, op, *inputs))
        if op.kind == "head" and not fused:
            tape.first_logits = results[0].storage
        for value, result in zip(op.outputs, results, strict=True):
            values[value.id] = output = result
        ends.append(len(tape.nodes) - 1)
    for value_id, index in block.holds:
        tape.hold(values[value_id], ends[index])
    if head is not None and policy.generating:
        output = _sampled(tape, output)
    return Lowered(tape, x, values.get(block.output.id, output), logits, input_held=head is None and not reads_ids)


def _last_position(tape: Tape, x: Tensor) -> Tensor:
    """A view of the last token of every sequence (`logits_to_keep=1`)."""
    out = Tensor(x.storage, SEQUENCE, x.width, x.dtype, x.requires_grad)
    tape.record((x,), (out,))
    return out


def _sampled(tape: Tape, logits: Tensor) -> Tensor:
    """generate() copies the last position's logits to fp32 (transformers 5 generation/utils.py)."""
    out = tape.tensor(SEQUENCE, logits.width, "fp32")
    tape.record((logits,), (out,))
    return out
