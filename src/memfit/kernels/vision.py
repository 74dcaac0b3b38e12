"""How the operations of image models run in eager PyTorch: convolutions, norms, pooling, attention within windows.

Workspaces of cuDNN are not counted: they depend on the algorithm that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import attention, functions
from memfit.kernels.context import Context
from memfit.kernels.tape import Tensor
from memfit.model.description import ONCE, POSITION, SEQUENCE, Op
from memfit.precision import DTYPE_BYTES

LSE_MULTIPLE = 32
"""The memory-efficient kernel's log-sum-exp is padded to a multiple of so many queries (attention.cu, kAlignLSE)."""


def _gradients(context: Context, op: Op, copied: bool = False) -> tuple[tuple[int, int, str], ...]:
    """(bytes, bytes of a copy in the compute format, name) of each parameter of the operation, if it is trained."""
    policy = context.tape.policy
    return tuple(
        (
            one.num_elements * DTYPE_BYTES[policy.weight],
            one.num_elements * DTYPE_BYTES[policy.compute] if copied else 0,
            one.tied_to or one.name,
        )
        for one in op.parameters
        if one.role != "unused" and context.trained(one)
    )


def conv2d(context: Context, op: Op, x: Tensor) -> Tensor:
    """aten::convolution: saves its input and its weight whatever needs a gradient; under autocast the casts of both.

    Source: tools/autograd/derivatives.yaml, convolution.
    """
    tape = context.tape
    policy = tape.policy
    weight = op.parameters[0]
    x = tape.autocast_compute(x)
    copy = tape.weight_cast(weight, policy.weight, context.trained(weight))
    out = tape.tensor(SEQUENCE, op.outputs[0].width, policy.compute if policy.autocast else x.dtype)
    inputs = (x,) if copy is None else (x, copy)
    tape.record(inputs, (out,), saved=inputs, weight_grads=_gradients(context, op, copy is not None))
    tape.name("convolution")
    if copy is not None:
        copy.requires_grad = False
    return out


def batch_norm(context: Context, op: Op, x: Tensor) -> Tensor:
    """cudnn_batch_norm: keeps its input, the batch's mean and its reciprocal deviation in fp32; on no list of autocast."""
    tape = context.tape
    out = tape.tensor(x.axis, x.width, x.dtype)
    statistics = tape.tensor(ONCE, 2 * op.parameters[0].num_elements, "fp32")
    tape.record((x,), (out, statistics), saved=(x, statistics), weight_grads=_gradients(context, op))
    statistics.requires_grad = False
    return out


def max_pool(context: Context, op: Op, x: Tensor) -> Tensor:
    """max_pool2d_with_indices: keeps its input and the place of each maximum, int64."""
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    indices = tape.tensor(x.axis, op.outputs[0].width, "int64")
    tape.record((x,), (out, indices), saved=(x, indices))
    indices.requires_grad = False
    return out


def resized(context: Context, op: Op, x: Tensor) -> Tensor:
    """A new tensor of the output's axis and width; keeps nothing."""
    out = context.tape.tensor(op.outputs[0].axis, op.outputs[0].width, x.dtype)
    context.tape.record((x,), (out,))
    return out


def average(context: Context, op: Op, x: Tensor) -> Tensor:
    """mean over places: keeps nothing; its backward divides an expanded gradient into a whole one."""
    return resized(context, op, x)


def add_in_place(context: Context, op: Op, a: Tensor, b: Tensor) -> Tensor:
    """The sum takes the storage of a."""
    out = context.tape.view(a, a.width)
    context.tape.record((a, b), (out,), alias=True)
    return out


def drop_path(context: Context, op: Op, x: Tensor) -> Tensor:
    """x.div(keep) * mask: a mask of one number a sample is kept. The module is an identity where its probability is 0."""
    stated = op.attributes["probability"]
    if not stated or context.probability(stated) == 0:
        return x
    tape = context.tape
    divided = functions.unary(tape, x)
    mask = tape.tensor(SEQUENCE, 1, x.dtype)
    tape.record((), (mask,))
    out = tape.tensor(x.axis, x.width, x.dtype)
    tape.record((divided, mask), (out,), saved=(mask,))
    mask.requires_grad = False
    tape.hold(x)
    return out


def layer_scale(context: Context, op: Op, x: Tensor) -> Tensor:
    """x * w: keeps x if w is trained; backward makes both products in full."""
    tape = context.tape
    grads = _gradients(context, op)
    out = tape.tensor(x.axis, x.width, tape.policy.weight if DTYPE_BYTES[tape.policy.weight] > DTYPE_BYTES[x.dtype] else x.dtype)
    scratch = [out.size] if grads else []
    if out.dtype != x.dtype:
        scratch.append(out.size)  # the product before it is cast to the format of x
    tape.record((x,), (out,), saved=(x,) if grads else (), weight_grads=grads, backward_scratch=scratch)
    return out


def class_token(context: Context, op: Op, x: Tensor) -> Tensor:
    """torch.cat((token.expand, patches)): promoted to the wider format under autocast."""
    tape = context.tape
    if DTYPE_BYTES[tape.policy.weight] > DTYPE_BYTES[x.dtype]:
        x = tape.cast(x, tape.policy.weight)
    out = tape.tensor(op.outputs[0].axis, op.outputs[0].width, x.dtype)
    tape.record((x,), (out,), weight_grads=_gradients(context, op))
    return out


def unused(context: Context, op: Op, x: Tensor) -> Tensor:
    """Nothing runs."""
    return x


def positions(context: Context, op: Op, x: Tensor) -> Tensor:
    """x + table; resized bicubically in fp32, cast and joined with the class token's row where the image has another size."""
    tape = context.tape
    weight = tape.policy.weight
    grads = _gradients(context, op)
    if op.attributes["interpolated"]:
        wide = tape.tensor(POSITION, op.attributes["channels"], "fp32")
        tape.record((), (wide,), weight_grads=grads)
        table = functions.unary(tape, tape.cast(wide, weight))
        return functions.add(tape, x, table)
    out = tape.tensor(x.axis, x.width, weight if DTYPE_BYTES[weight] > DTYPE_BYTES[x.dtype] else x.dtype)
    tape.record((x,), (out,), alias=True, weight_grads=grads)
    return out


def mean_of_patches(context: Context, op: Op, x: Tensor) -> Tensor:
    """cat((x[:, 0], x[:, 1:].mean(1))): the gradients of both parts are filled into whole tensors of zeros."""
    tape = context.tape
    first = Tensor(x.storage, SEQUENCE, x.width, x.dtype, x.requires_grad)
    tape.record((x,), (first,))
    rest = tape.view(x, x.width)
    tape.record((x,), (rest,))
    mean = tape.tensor(SEQUENCE, x.width, x.dtype)
    tape.record((rest,), (mean,))
    out = tape.tensor(SEQUENCE, 2 * x.width, x.dtype)
    tape.record((first, mean), (out,))
    return out


def relative_bias(context: Context, op: Op) -> Tensor:
    """table[index], permuted and copied; the index is a buffer."""
    tape = context.tape
    found = tape.tensor(ONCE, op.outputs[0].width, tape.policy.weight)
    tape.record((), (found,), weight_grads=_gradients(context, op))
    return functions.unary(tape, found)


def shift_mask(context: Context, op: Op, bias: Tensor, normed: Tensor) -> Tensor:
    """The mask, copied for every image in the format of the normed states, plus the bias of each head.

    The block holds the mask of one image, attention its copy and the bias as long as their sum.
    """
    tape = context.tape
    single = tape.tensor(ONCE, op.attributes["mask"], normed.dtype)
    tape.record((), (single,))
    tape.hold_to_the_end(single)
    mask = single
    if not context.policy.one_sequence:  # of one image it is a view
        mask = tape.tensor(SEQUENCE, op.attributes["mask"], normed.dtype)
        tape.record((single,), (mask,))
    out = tape.tensor(SEQUENCE, op.outputs[0].width, tape.promote(bias, mask))
    tape.record((bias, mask), (out,), alias=True)
    tape.companions[out.storage] = mask
    tape.companions[mask.storage] = bias
    return out


def merge_patches(context: Context, op: Op, x: Tensor) -> Tensor:
    """cat of four strided slices; each slice's backward fills a whole tensor of zeros by way of one half as large."""
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    half = (x.axis, x.size[1] // 2)
    tape.record((x,), (out,), backward_scratch=(x.size, half))
    return out


def concatenate(context: Context, op: Op, *parts: Tensor) -> Tensor:
    """torch.cat, in the widest format under autocast; its backward hands out views."""
    tape = context.tape
    dtype = tape.promote(*parts)
    parts = tuple(tape.cast(one, dtype) for one in parts)
    out = tape.tensor(SEQUENCE, op.outputs[0].width, dtype)
    tape.record(parts, (out,))
    return out


def image_attention(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention within groups: eager, or what sdpa chooses. A bias or fp32 rules out flash: then the memory-efficient kernel."""
    if context.policy.attention == "eager":
        return _eager(context, op, q, k, v, bias)
    tape = context.tape
    read = [tape.autocast_compute(one) for one in ((q, k, v) if bias is None else (q, k, v, bias))]
    if bias is None and read[0].dtype != "fp32":
        return attention.attention(context, op, *read)
    rows = op.attributes["num_heads"]
    queries = op.attributes["queries"]
    lse = tape.tensor(q.axis, rows // queries * -(-queries // LSE_MULTIPLE) * LSE_MULTIPLE, "fp32")
    out = tape.tensor(q.axis, op.outputs[0].width, read[2].dtype)
    tape.record(read, (out, lse), saved=(*read, out, lse))
    tape.name("attention")
    lse.requires_grad = False
    return out


def _eager(context: Context, op: Op, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T scale + bias, fp32).to(q.dtype) v, as `eager_attention_forward` of Swin and SegFormer.

    Keeps the fp32 softmax and, in 16 bit, the cast that the second product reads. Products copy operands whose heads are
    strided: not a single head, not one group of one image.
    """
    tape = context.tape
    single = op.attributes["groups"] == 1 and context.policy.one_sequence
    strided = not op.attributes["single_head"] and not single
    dtype = v.dtype
    scores = functions.matmul(
        tape, _operand(context, q, strided), _operand(context, k, strided), SEQUENCE, op.attributes["scores"]
    )
    scores = functions.unary(tape, scores)
    if bias is not None:
        scores = functions.add(tape, scores, bias)
    probabilities = functions.unary(tape, tape.cast(scores, "fp32"), save_output=True)
    probabilities = tape.cast(probabilities, dtype)
    tape.hold(scores)
    probabilities = functions.dropout(context, probabilities, op.attributes["dropout"])
    tape.hold_to_the_end(probabilities)
    if op.attributes["returned"]:
        tape.lingering.append(probabilities)
    out = functions.matmul(tape, tape.autocast_compute(probabilities), _operand(context, v, strided), q.axis, op.outputs[0].width)
    copied = out if op.attributes["single_head"] else functions.unary(tape, out)
    for one in (q, k, v, out, *(() if bias is None else (bias,))):
        tape.hold(one)
    return copied


def _operand(context: Context, x: Tensor, strided: bool) -> Tensor:
    """What a batched product reads: in the compute format, and copied when its heads are strided."""
    x = context.tape.autocast_compute(x)
    return functions.unary(context.tape, x) if strided else x


def _one(kernel: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
    return lambda context, op, *inputs: [kernel(context, op, *inputs)]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "conv2d": _one(conv2d),
    "pixels": _one(conv2d),
    "batch_norm": _one(batch_norm),
    "max_pool": _one(max_pool),
    "average_pool": _one(average),
    "image_copy": _one(resized),
    "upsample": _one(resized),
    "add_in_place": _one(add_in_place),
    "drop_path": _one(drop_path),
    "layer_scale": _one(layer_scale),
    "class_token": _one(class_token),
    "unused_parameter": _one(unused),
    "position_table": _one(positions),
    "mean_of_patches": _one(mean_of_patches),
    "relative_bias": _one(relative_bias),
    "shift_mask": _one(shift_mask),
    "merge_patches": _one(merge_patches),
    "concatenate_maps": _one(concatenate),
    "image_attention": _one(image_attention),
}
"""Kind of operation -> implementation."""
