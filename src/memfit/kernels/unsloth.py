"""Unsloth's autograd functions: each computes several frozen products with their adapters, and keeps their common input once.

Written over in backward: the input of q, k, v and that of the MLP become their gradients; the gradient of a norm's result becomes
that of its input. Adapters with dropout, with biases beside them, or on some of a function's products only run as PEFT has them.

Source: unslothai/unsloth kernels/fast_lora.py (LoRA_QKV, LoRA_MLP, LoRA_W), rope_embedding.py, rms_layernorm.py,
cross_entropy_loss.py; unslothai/unsloth-zoo fused_losses/cross_entropy_loss.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memfit.kernels import adapters, losses
from memfit.kernels.context import Context, target_of
from memfit.kernels.liger import rms_norm, rotary
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Size, Tensor
from memfit.model.description import ONCE, Op, Parameter
from memfit.precision import DTYPE_BYTES

QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
OUTPUT = "o_proj"
GATED = ("silu", "swish", "gelu", "gelu_pytorch_tanh")


def rewritten(context: Context, ops: Sequence[Op]) -> list[Op]:
    """The projections of q, k, v as one operation, the gated MLP as another, the output projection as a third.

    The first, or the last, of an operation's parts makes its results; the others are left in their places and make nothing.
    """
    found = list(ops)
    places = {target_of(op.parameters[0]): index for index, op in enumerate(ops) if op.kind == "linear" and _fits(context, op)}
    if all(one in places for one in QKV):
        first, *rest = (places[one] for one in QKV)
        parts = [ops[places[one]] for one in QKV]
        found[first] = parts[0]._replace(
            kind="adapted_qkv",
            outputs=tuple([op.outputs[0] for op in parts]),
            parameters=tuple([op.parameters[0] for op in parts]),
        )
        for place in rest:
            found[place] = _nothing(ops[place])
    if all(one in places for one in MLP):
        gate, up, down = (places[one] for one in MLP)
        inside = range(gate, down)
        if all(ops[place].kind in ("linear", "activation", "multiply") for place in inside) and _gated(ops[gate : down + 1]):
            found[down] = ops[down]._replace(
                kind="adapted_mlp",
                inputs=ops[gate].inputs,
                parameters=tuple([ops[place].parameters[0] for place in (gate, up, down)]),
            )
            for place in inside:
                found[place] = _nothing(ops[place])
    if OUTPUT in places:
        found[places[OUTPUT]] = ops[places[OUTPUT]]._replace(kind="adapted_linear")
    return found


def _fits(context: Context, op: Op) -> bool:
    adapter = context.adapter(op.parameters[0])
    plain = adapter is not None and adapter.kind == "lora" and not context.probability(adapter.dropout)
    return plain and len(op.parameters) == 1 and context.policy.choice is None


def _gated(ops: Sequence[Op]) -> bool:
    return all(op.attributes["function"] in GATED for op in ops if op.kind == "activation")


def _nothing(op: Op) -> Op:
    return op._replace(kind="part", inputs=(), outputs=(), parameters=())


def part(context: Context, op: Op) -> list[Tensor]:
    """Its work is done by the function that it is a part of."""
    return []


def _gradients(context: Context, parameters: Sequence[Parameter]) -> tuple[tuple[int, int, str], ...]:
    """Of both factors of each adapter: made in the compute format, then cast to the adapters' own."""
    found = []
    compute = DTYPE_BYTES[context.tape.policy.compute]
    for parameter in parameters:
        adapter = context.adapter(parameter)
        assert adapter is not None
        element = DTYPE_BYTES[adapter.dtype]
        for name, shape in zip(("lora_A", "lora_B"), adapters.shapes(parameter, adapter), strict=True):
            count = prod(shape)
            copy = count * compute if element != compute else 0
            found.append((count * element, copy, f"{parameter.name}.{name}"))
    return tuple(found) if context.policy.training else ()


def _expanded(context: Context, parameters: Sequence[Parameter]) -> list[Size]:
    """The copy of one 4-bit weight that backward makes at a time; forward writes it into a buffer that is always there."""
    if not any(context.quantized(one) for one in parameters):
        return []
    return [(ONCE, max(prod(one.shape) for one in parameters) * DTYPE_BYTES[context.tape.policy.compute])]


def _low_rank(context: Context, parameter: Parameter, x: Tensor) -> Size:
    """x A^T, or the gradient's product with B: rank numbers a token."""
    adapter = context.adapter(parameter)
    assert adapter is not None
    return x.axis, adapter.rank * DTYPE_BYTES[x.dtype]


def adapted_qkv(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """LoRA_QKV: keeps x once; its gradient is written over it."""
    tape = context.tape
    outputs = [tape.tensor(x.axis, adapters.columns(one, x), x.dtype) for one in op.parameters]
    low = _low_rank(context, op.parameters[0], x)
    scratch = [low, *_expanded(context, op.parameters)]
    grads = _gradients(context, op.parameters)
    tape.record((x,), outputs, saved=(x,), weight_grads=grads, scratch=(low,), backward_scratch=scratch)
    tape.nodes[-1].handed = (x.storage,)
    return outputs


def adapted_mlp(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """LoRA_MLP: keeps x and the results of gate and up, 2h + 4f in 16 bit; their product is made again, over the gradient.

    In backward the gradients of gate and up are written over them, and that of x over x.
    """
    tape = context.tape
    gate_weight, up_weight, down_weight = op.parameters
    gate, up = (tape.tensor(x.axis, adapters.columns(one, x), x.dtype) for one in (gate_weight, up_weight))
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    low = _low_rank(context, down_weight, x)
    scratch = [gate.size, low, *_expanded(context, op.parameters)]
    grads = _gradients(context, op.parameters)
    tape.record(
        (x,), (out, gate, up), saved=(x, gate, up), weight_grads=grads, scratch=(gate.size, low), backward_scratch=scratch
    )
    tape.nodes[-1].handed = (x.storage,)
    gate.requires_grad = up.requires_grad = False
    return [out]


def adapted_linear(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """LoRA_W: keeps x."""
    tape = context.tape
    (weight,) = op.parameters
    out = tape.tensor(x.axis, adapters.columns(weight, x), x.dtype)
    low = _low_rank(context, weight, x)
    scratch = [low, *_expanded(context, op.parameters)]
    grads = _gradients(context, op.parameters)
    tape.record((x,), (out,), saved=(x,), weight_grads=grads, scratch=(low,), backward_scratch=scratch)
    return [out]


def fused_loss(context: Context, op: Op, head: Op, between: Sequence[Op], x: Tensor) -> Tensor:
    """unsloth_fused_ce_loss: chunk by chunk the logits, the loss and the gradient of x, in one compiled function.

    A chunk's logits and their gradient take 2V + 2V a token. The gradient of x is multiplied by the loss's into a new tensor.
    """
    if context.trained(head.parameters[0]):
        return losses.fused_cross_entropy(context, op, head, between, x)
    tape = context.tape
    value, grad_x = tape.tensor(ONCE, 1, "fp32"), tape.tensor(x.axis, x.width, x.dtype)
    element = DTYPE_BYTES[tape.policy.compute]
    chunk = -(-2 * element * head.parameters[0].shape[0] // context.policy.loss_chunks)
    tape.record((x,), (value, grad_x), saved=(grad_x,) if x.requires_grad else (), scratch=((x.axis, chunk),))
    grad_x.requires_grad = False
    return value


def cross_entropy(context: Context, op: Op, logits: Tensor) -> list[Tensor]:
    """Fast_CrossEntropyLoss (UNSLOTH_RETURN_LOGITS=1): keeps the logits as they are; their gradient is written over them."""
    tape = context.tape
    rows, labels = tape.tensor(logits.axis, 1, "fp32"), tape.tensor(logits.axis, 1, "int64")
    value = tape.tensor(ONCE, 1, "fp32")
    tape.record((logits, labels), (value, rows), saved=(logits, rows, labels))
    tape.nodes[-1].handed = (logits.storage,)
    rows.requires_grad = labels.requires_grad = False
    return [value]


KERNELS: Kernels = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "part": part,
    "adapted_qkv": adapted_qkv,
    "adapted_mlp": adapted_mlp,
    "adapted_linear": adapted_linear,
    "eager loss": cross_entropy,
}
WITH_HEAD = {"fused": fused_loss}
"""Its own forms of losses that make the logits themselves."""
