"""Megatron's modules as autograd functions, with Transformer Engine's fused attention or its own core attention.

Per layer of a GPT with f = 4h, dropout and core attention of its own: s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022), and
16 s b of the norms' statistics. Transformer Engine keeps the same but for the scores: a log-sum-exp of 4 a s b in their place.

Source: NVIDIA/Megatron-LM core/transformer/dot_product_attention.py, core/fusions, core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

from memfit.kernels import attention as kernels_of_attention
from memfit.kernels import functions, modules
from memfit.kernels.context import Context
from memfit.kernels.liger import handed_on
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Tape, Tensor
from memfit.kernels.torchtitan import rms_norm
from memfit.model.description import ONCE, Op

FUSED_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
"""What bias_gelu_fusion computes in one function."""


def rotary(context: Context, op: Op, q: Tensor, k: Tensor) -> list[Tensor]:
    """One kernel for q and one for k: the results are new, their inputs are not kept (fused_apply_rotary_pos_emb).

    Core attention of its own reads v as a part of the fused projection, which then stays whole unless heads are repeated.
    Transformer Engine copies v out of it (get_qkv_layout).
    """
    whole = context.policy.attention == "eager" and q.width == k.width
    return [functions.unary(context.tape, one, save_input=whole) for one in (q, k)]


def activation(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Bias and GELU in one function, which keeps the product's result alone; other functions run as torch has them."""
    if op.attributes["function"] in FUSED_ACTIVATIONS:
        return [functions.unary(context.tape, x, save_input=True)]
    return [modules.activation(context, op, x)]


def gated_product(context: Context, op: Op, gate: Tensor, up: Tensor) -> list[Tensor]:
    """SwiGLUFunction: keeps gate and up, which are one tensor, and runs the activation again."""
    out = context.tape.tensor(gate.axis, gate.width, gate.dtype)
    context.tape.record((gate, up), (out,), saved=(gate, up))
    return [out]


def attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The attention in force; as a part that is recomputed it keeps q, k and v only.

    Transformer Engine's FlashAttention, which it takes below compute capability 9.0, wants batches first: its result is kept, and
    the copy with tokens first as the input of the product that follows (attention/dot_product_attention/backends.py).
    """
    tape = context.tape
    start = len(tape.nodes)
    if context.policy.attention == "eager":
        out = _core_attention(context, op, q, k, v)
    elif context.policy.attention_copies:
        read = [functions.unary(tape, one) for one in (q, k, v)]
        out = functions.unary(tape, kernels_of_attention.attention(context, op, *read))
    else:
        out = kernels_of_attention.attention(context, op, q, k, v)
    if "core_attn" in context.policy.recomputed:
        tape.collapse(start, (q, k, v), out)
    return [out]


def _core_attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """baddbmm, scale-mask-softmax in one kernel, dropout, bmm: keeps the probabilities, dropout's mask and its result.

    2 + 1 + 2 bytes a score; the softmax's gradient is written over that of its result. The name of the scores stays until the
    function returns. With grouped heads keys and values are repeated.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    k, v = kernels_of_attention.repeat(tape, op, k), kernels_of_attention.repeat(tape, op, v)
    pair = kernels_of_attention.pair_axis(q, k)
    scores = functions.matmul(tape, q, k, pair, heads)
    probabilities = tape.tensor(pair, heads, scores.dtype)
    tape.record((scores,), (probabilities,), saved=(probabilities,), alias=True)
    dropped = functions.dropout(context, probabilities, op.attributes["dropout"])
    out = functions.matmul(tape, dropped, v, q.axis, op.outputs[0].width)
    copied = functions.unary(tape, out)
    for one in (scores, dropped, out, k, v):
        tape.hold(one)
    return copied


def cross_entropy(context: Context, op: Op, logits: Tensor) -> list[Tensor]:
    """Vocab-parallel cross-entropy: an fp32 copy becomes its softmax in place, and the softmax the gradient.

    Forward 2V + 4V a token; keeps 4V, a mask and an index; backward 4V, and 2V for the gradient of the 16-bit logits.
    """
    tape: Tape = context.tape
    softmax = tape.cast(logits, "fp32")
    mask, index = tape.tensor(logits.axis, 1, "bool"), tape.tensor(logits.axis, 1, "int64")
    value = tape.tensor(ONCE, 1, "fp32")
    tape.record((softmax,), (value, mask, index), saved=(softmax, mask, index))
    tape.nodes[-1].handed = (softmax.storage,)
    mask.requires_grad = index.requires_grad = False
    tape.hold(logits)
    return [value]


KERNELS: Kernels = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "activation": activation,
    "gated_product": gated_product,
    "handed_on": handed_on,
    "attention": attention,
    "eager loss": cross_entropy,
}
