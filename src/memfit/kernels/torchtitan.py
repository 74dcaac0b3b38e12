"""torchtitan's modules as autograd functions: torch's fused RMSNorm, rotary embedding of complex numbers.

Source: pytorch/torchtitan v0.2.2 models/llama3/model/model.py, models/qwen3/model/model.py.
"""

from __future__ import annotations

from memfit.kernels import attention as kernels_of_attention
from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.modules import weight_grads
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Tensor
from memfit.model.description import Op


def rms_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """nn.RMSNorm: aten::_fused_rms_norm keeps x and 1 / rms(x), 4 B a row.

    Source: torch 2.13 tools/autograd/derivatives.yaml, _fused_rms_norm.
    """
    tape = context.tape
    out = tape.tensor(x.axis, x.width, x.dtype)
    factor = tape.tensor(x.axis, op.attributes.get("heads", 1), "fp32")
    tape.record((x,), (out, factor), saved=(x, factor), weight_grads=weight_grads(context, op.parameters[0]))
    factor.requires_grad = False
    return [out]


def rotary(context: Context, op: Op, q: Tensor, k: Tensor) -> list[Tensor]:
    """(x.float() as complex numbers) * e^(i m theta), cast back: keeps the factors only, which are a buffer.

    The fp32 copies and products of q and k are names of the function until it returns.
    """
    tape = context.tape
    made, names = [], []
    for one in (q, k):
        upcast = tape.cast(one, "fp32")
        product = functions.unary(tape, upcast)
        names += [upcast, product]
        made.append(product)
    results = [tape.cast(product, one.dtype) for product, one in zip(made, (q, k), strict=True)]
    for one in (*names, q, k):
        tape.hold(one)
    return results


def attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """sdpa with grouped heads; releases before 0.2.2 repeat keys and values for every query head first."""
    if context.policy.repeated_heads:
        k, v = kernels_of_attention.repeat(context.tape, op, k), kernels_of_attention.repeat(context.tape, op, v)
        op = op._replace(attributes={**op.attributes, "num_kv_heads": op.attributes["num_heads"]})
    return [kernels_of_attention.attention(context, op, q, k, v)]


KERNELS: Kernels = {"rms_norm": rms_norm, "rotary": rotary, "attention": attention}
