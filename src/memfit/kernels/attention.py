"""Attention kernels: what each keeps for backward, its layout and its scratch.

Which one runs is torch's choice for `sdpa`: flash for 16 bit without a mask (grouped heads native, head dimension up to 256),
memory-efficient otherwise, and the math path for grouped heads that neither takes (fp32).
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; transformers 5 integrations/sdpa_attention.py.
"""

from __future__ import annotations

from memfit.kernels import functions, prefix, ring
from memfit.kernels.cache import caches
from memfit.kernels.context import Context, KernelPolicy
from memfit.kernels.sets import KERNEL_SETS
from memfit.kernels.tape import Size, Tape, Tensor
from memfit.model.description import (
    CROSS_PAIR,
    CROSS_POSITION_PAIR,
    KEY_TOKEN,
    PAIR,
    POSITION_PAIR,
    TARGET_PAIR,
    TARGET_TOKEN,
    TOKEN,
    Op,
)

FLASH_MAX_HEAD_DIM = 256


def attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """The attention of one layer under the implementation in force; the output is what the output projection reads."""
    implementation = context.policy.attention
    tape = context.tape
    if implementation == "eager":
        return _eager(context, op, q, k, v, bias)
    if bias is not None:
        return _biased_efficient(context, op, q, k, v, bias)
    given = (k, v)
    q, k, v = (tape.autocast_compute(one) for one in (q, k, v))
    kernel = chosen(context.policy, op, q.dtype)
    if kernel == "flash":
        return _flash(context, op, q, k, v)
    if kernel == "flash-wide":
        return _flash_wide(context, op, q, k, v)
    if kernel == "flash-unpadded":
        return _flash_padded(context, op, q, k, v)
    if kernel == "math":
        return _math(context, op, q, k, v)
    masked = has_mask(context.policy, op)
    return _memory_efficient(context, op, q, k, v, masked, cast=(k is not given[0], v is not given[1]))


def chosen(policy: KernelPolicy, op: Op, dtype: str) -> str:
    """The kernel that computes the attention `op` on operands of `dtype`.

    eager | flash | flash-wide | flash-unpadded | math | memory-efficient.

    FlashAttention's own package takes what it is given, without its padding. `sdpa` is torch's choice among its kernels, by mask,
    format, head dimension, heads and compute capability.
    """
    if policy.attention == "eager":
        return "eager"
    heads = op.attributes["num_heads"]
    unequal = op.inputs[2].width * heads != op.inputs[0].width * op.attributes["num_kv_heads"]
    if policy.attention == "flash":
        return "flash-wide" if unequal else "flash-unpadded" if policy.padded else "flash"
    masked = has_mask(policy, op)
    fits = op.inputs[0].width // heads <= FLASH_MAX_HEAD_DIM
    if not masked and not unequal and fits and dtype in ("bf16", "fp16") and _flash_capable(policy):
        return "flash"
    grouped = op.attributes["num_kv_heads"] != heads
    return "math" if grouped and not masked and fits else "memory-efficient"


def cached(context: Context, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The cache's first update: `cat` with nothing copies keys and values; attention reads the copies, the outputs hold them.

    Source: transformers 4.57 and 5 cache_utils.py, DynamicLayer.update. In 4.57 the empty values have the keys' format, to which
    `cat` then promotes.
    """
    tape = context.tape
    copies = []
    for one in (k, v):
        if context.policy.prefix is not None:
            out = prefix.joined(context, context.policy.prefix, one)
        else:
            dtype = tape.promote(k, one) if context.policy.cache == "keys" else one.dtype
            out = tape.tensor(one.axis, one.width, dtype)
            tape.record((one,), (out,), alias=True)
        tape.returned.append(out)
        copies.append(out)
    return copies[0], copies[1]


def has_mask(policy: KernelPolicy, op: Op) -> bool:
    """A mask is passed when the batch is padded, a window is not longer than the sequence, or queries are fewer than keys."""
    target = op.inputs[0].axis == TARGET_TOKEN and op.inputs[1].axis == TARGET_TOKEN  # padding reaches the source only
    if (policy.padded and not target) or op.attributes["window"] in policy.binding_windows:
        return True
    return policy.causal_mask and bool(op.attributes["causal"])


def _flash_capable(policy: KernelPolicy) -> bool:
    """PyTorch's flash kernel needs compute capability 8.0."""
    capability = policy.device_capability
    return capability is None or capability >= (8, 0)


def pair_axis(q: Tensor, k: Tensor) -> int:
    """The axis of scores between queries and keys."""
    if q.axis == TARGET_TOKEN:
        return TARGET_PAIR if k.axis == TARGET_TOKEN else CROSS_PAIR
    return PAIR


def _output(tape: Tape, op: Op, q: Tensor, v: Tensor) -> Tensor:
    """Width of v for every query head; `v` may be repeated already."""
    return tape.tensor(q.axis, op.outputs[0].width, v.dtype)


def _contiguous(tape: Tape, x: Tensor) -> Tensor:
    """`.transpose(1, 2).contiguous()` of a head-major tensor: a copy."""
    return functions.unary(tape, x)


def _flash(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keeps q, k, v, the output and the log-sum-exp (4 B a head and token); grouped heads are native.

    Backward: an fp32 accumulator of dq, the row sums, and dk, dv for every query head when heads are grouped.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    out = _output(tape, op, q, v)
    lse = tape.tensor(q.axis, heads, "fp32")
    scratch: list[Size] = [(q.axis, 4 * q.width), (q.axis, 4 * heads)]
    if op.attributes["num_kv_heads"] != heads:
        expanded = (k.width + v.width) * heads // op.attributes["num_kv_heads"]
        scratch.append((k.axis, 2 * expanded))
    forward, backward = ring.scratch(context.policy.ring, q, k, v, heads)
    tape.record((q, k, v), (out, lse), saved=(q, k, v, out, lse), scratch=forward, backward_scratch=scratch + backward)
    tape.name("attention")
    lse.requires_grad = False
    return _contiguous(tape, out) if _head_major(context, op) else out


def _head_major(context: Context, op: Op) -> bool:
    """Whether q and k come from a `cat`, which lays them head by head."""
    return bool(op.attributes["head_major"]) and not KERNEL_SETS[context.policy.kernels].rotary_in_place


def _flash_wide(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values narrower than keys (latent attention) are padded with zeros to the same width, and the result is cropped.

    Source: transformers 5 integrations/flash_attention.py.
    """
    tape = context.tape
    wide = tape.tensor(v.axis, k.width, v.dtype)
    tape.record((v,), (wide,))
    if context.policy.padded:
        q, k, wide = (functions.unary(tape, one) for one in (q, k, wide))
    heads = op.attributes["num_heads"]
    out, lse = tape.tensor(q.axis, q.width, v.dtype), tape.tensor(q.axis, heads, "fp32")
    scratch: list[Size] = [(q.axis, 4 * q.width), (q.axis, 4 * heads)]
    forward, backward = ring.scratch(context.policy.ring, q, k, wide, heads)
    tape.record((q, k, wide), (out, lse), saved=(q, k, wide, out, lse), scratch=forward, backward_scratch=scratch + backward)
    lse.requires_grad = False
    cropped = _output(tape, op, q, v)
    tape.record((out,), (cropped,))
    return cropped


def _flash_padded(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention with a padding mask: q, k, v are copied without the padding, the output is scattered back.

    Source: transformers 5 modeling_flash_attention_utils.py, unpad_input and pad_input.
    """
    tape = context.tape
    packed = [functions.unary(tape, one) for one in (q, k, v)]
    return functions.unary(tape, _flash(context, op, *packed))


def repeat(tape: Tape, op: Op, x: Tensor, *, single_is_view: bool = False) -> Tensor:
    """repeat_kv: every key-value head copied for its group of query heads; x itself where there is nothing to repeat.

    `single_is_view`: where the product takes a strided operand, the expansion of a single head stays a view.
    """
    heads, kv_heads = op.attributes["num_heads"], op.attributes["num_kv_heads"]
    if heads == kv_heads or (kv_heads == 1 and single_is_view):
        return x
    axis = KEY_TOKEN if x.axis == TOKEN and op.inputs[0].axis == TOKEN else x.axis
    out = tape.tensor(axis, x.width // kv_heads * heads, x.dtype)
    tape.record((x,), (out,))
    return out


def key_operand(context: Context, op: Op, x: Tensor, strided: bool) -> Tensor:
    """What eager's product reads of keys or values: repeated ones, or a single head, which the product or a cast writes out."""
    tape = context.tape
    if op.attributes["num_kv_heads"] != 1 or op.attributes["num_heads"] == 1:
        return _operand(tape, x, strided)
    cast = tape.autocast_compute(x)
    return repeat(tape, op, cast, single_is_view=context.policy.one_sequence and cast is x)


def _memory_efficient(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, masked: bool, cast: tuple[bool, bool]) -> Tensor:
    """Keeps q, repeated k and v, the output, the log-sum-exp and, if there is one, an additive mask made for each layer.

    The expansion of a single key-value head is a view, unless autocast's `cast` of it writes it out.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    if not context.policy.decoding:
        k, v = repeat(tape, op, k, single_is_view=not cast[0]), repeat(tape, op, v, single_is_view=not cast[1])
    out = _output(tape, op, q, v)
    lse = tape.tensor(q.axis, heads, "fp32")
    saved = [q, k, v, out, lse]
    if masked:
        mask = tape.tensor(pair_axis(q, k), 1, q.dtype)
        tape.record((), (mask,))
        saved.append(mask)
    forward, backward = ring.scratch(context.policy.ring, q, k, v, heads)
    tape.record(saved[:3] + saved[5:], (out, lse), saved=saved, scratch=forward, backward_scratch=backward)
    tape.name("attention")
    for one in (lse, *saved[5:]):
        one.requires_grad = False
    return out


def _biased_efficient(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The memory-efficient kernel with a position bias as its mask, which every layer keeps in a contiguous copy of its own.

    A causal or a padding mask is laid over it first; padding gives it a batch dimension. Its gradient is made for every sequence
    and head, then summed over the sequences.
    Source: transformers 5 integrations/sdpa_attention.py, create_position_bias_mask.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    padded = has_mask(context.policy, op)
    pair = pair_axis(q, k)
    if padded or op.attributes["causal"]:
        causal = tape.tensor(bias.axis, 1, "bool")
        masked = tape.tensor(pair if padded else bias.axis, bias.width, bias.dtype)
        # a causal mask is made in each layer; the padding mask is shared by all, and counted with the masks
        tape.record((bias,) if padded else (causal, bias), (masked,), saved=() if padded else (causal,))
        bias = masked
    if bias.axis not in (CROSS_POSITION_PAIR, CROSS_PAIR):  # zeros are contiguous already, a looked-up bias lies heads last
        bias = functions.unary(tape, bias)
    q, k, v, bias = (tape.autocast_compute(one) for one in (q, k, v, bias))
    expanded = Tensor(bias.storage, pair, bias.width, bias.dtype, bias.requires_grad)
    if bias.axis != pair:
        tape.record((bias,), (expanded,))
    out = _output(tape, op, q, v)
    lse = tape.tensor(q.axis, heads, "fp32")
    tape.record((q, k, v, expanded), (out, lse), saved=(q, k, v, out, lse, bias))
    tape.name("attention")
    lse.requires_grad = False
    return out


def _math(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sdpa's fallback: scaled q and k, repeated k and v, the full score matrix, all in fp32; keeps the softmax.

    16-bit operands are cast first (torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp is off by default). The mask is added
    in place, and _safe_softmax looks for rows that are masked altogether with one byte a score.

    Source: aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    dtype = v.dtype
    casts = [tape.cast(one, "fp32") for one in (q, k, v)]
    q = functions.unary(tape, casts[0])
    k, v = repeat(tape, op, casts[1]), repeat(tape, op, casts[2])
    scores = functions.matmul(tape, q, functions.unary(tape, k), pair_axis(q, k), heads)
    masked = has_mask(context.policy, op)
    names = [q, k, v, *casts]
    if op.attributes["causal"] or masked:
        mask = tape.tensor(pair_axis(q, k) if masked else POSITION_PAIR, 1, q.dtype)
        tape.record((), (mask,))
        names.append(mask)
        added = tape.view(scores, scores.width)
        tape.record((scores, mask), (added,), alias=True)
        scores = added
    probabilities = safe_softmax(tape, scores)
    probabilities = functions.dropout(context, probabilities, op.attributes["dropout"])
    out = tape.cast(functions.matmul(tape, probabilities, v, q.axis, op.outputs[0].width), dtype)
    for one in names:  # of the C++ function, until it returns
        tape.hold(one)
    return _contiguous(tape, out)


def safe_softmax(tape: Tape, scores: Tensor) -> Tensor:
    """aten::_safe_softmax: keeps its result, needs one byte a score beside it."""
    out = tape.tensor(scores.axis, scores.width, scores.dtype)
    tape.record((scores,), (out,), saved=(out,), scratch=[(scores.axis, scores.width)])
    return out


def _eager(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Two matrix products around a softmax over the full score matrix.

    Keeps the softmax (fp32 where the model asks for it) and the 16-bit probabilities: 6 a s in 16 bit, 4 a s in fp32; dropout
    adds its mask and its result. Batched products copy head-strided operands (not at a batch of one), the copy is kept.
    """
    tape = context.tape
    heads = op.attributes["num_heads"]
    dtype = op.attributes["softmax_dtype"]
    grouped = heads != op.attributes["num_kv_heads"]
    value_dtype = v.dtype
    if op.attributes["num_kv_heads"] > 1:
        k, v = repeat(tape, op, k), repeat(tape, op, v)
    strided = not context.policy.one_sequence
    pair = pair_axis(q, k)
    contiguous = grouped or caches(context, op)  # repeated ones, or what the cache returns
    strided_heads = strided and not _head_major(context, op)
    read_q, read_k = _operand(tape, q, strided_heads), key_operand(context, op, k, strided_heads and not contiguous)
    scores = functions.matmul(tape, read_q, read_k, pair, heads)
    scores = functions.unary(tape, scores)
    if bias is not None:
        scores = functions.add(tape, scores, bias)
    if op.attributes["softcap"]:
        scores = functions.unary(tape, functions.unary(tape, functions.unary(tape, scores), save_output=True))
    if op.attributes["causal"] or has_mask(context.policy, op):
        masked = tape.tensor(pair, heads, scores.dtype)
        tape.record((scores,), (masked,), alias=True)
        scores = masked
    upcast = tape.cast(scores, "fp32") if dtype == "fp32" else tape.autocast_fp32(scores)
    probabilities = functions.unary(tape, upcast, save_output=True)
    probabilities = tape.cast(probabilities, value_dtype)
    # the name `attn_weights` holds the scores until it is given the probabilities, and those until the layer is done
    tape.hold(scores)
    probabilities = functions.dropout(context, probabilities, op.attributes["dropout"])
    tape.hold_to_the_end(probabilities)
    operand = key_operand(context, op, v, strided and not contiguous)
    out = functions.matmul(tape, tape.autocast_compute(probabilities), operand, q.axis, op.outputs[0].width)
    copied = _contiguous(tape, out)
    for one in (k, v, out):
        tape.hold(one)
    return copied


def _operand(tape: Tape, x: Tensor, strided: bool) -> Tensor:
    """What a batched product reads: in the compute format, and copied when its heads are strided (a cache's are not)."""
    strided = strided and not tape.in_cache(x)
    x = tape.autocast_compute(x)
    return functions.unary(tape, x) if strided else x
