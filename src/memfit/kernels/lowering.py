"""From a block's operations to a tape: the table from operation to implementation, and the walk over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from memfit.kernels import attention, cache, functions, linear, losses, modules, sets
from memfit.kernels.context import Context, KernelPolicy
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import SEQUENCE, TARGET_TOKEN, TOKEN, Block, Op


class Lowered(NamedTuple):
    """A block as autograd sees it."""

    tape: Tape
    input: Tensor
    output: Tensor
    logits: Tensor | None
    """What the caller still holds as the model's output."""
    externals: tuple[tuple[str, Tensor], ...] = ()
    """Tensors from outside, which take no memory of the block's own."""
    provided: tuple[tuple[str, Tensor], ...] = ()
    """Tensors that later blocks read."""
    input_held: bool = True
    """The caller's name for the hidden states still holds the block's input; after the last layer no name does."""


def _one(result: Tensor) -> list[Tensor]:
    return [result]


_KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "rms_norm": lambda context, op, x: _one(modules.rms_norm(context, op, x)),
    "layer_norm": lambda context, op, x: _one(modules.layer_norm(context, op, x)),
    "rotary": modules.rotary,
    "attention": lambda context, op, q, k, v, *bias: _one(attention.attention(context, op, q, k, v, *bias)),
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


_LIBRARIES: dict[str, str] = {
    **dict.fromkeys(("t5_norm", "zero_bias", "weight_format", "clamp_fp16", "add_buffer", "mean_pool"), "seq2seq"),
    **dict.fromkeys(
        (
            "pixels",
            "conv2d",
            "batch_norm",
            "max_pool",
            "average_pool",
            "image_copy",
            "upsample",
            "add_in_place",
            "drop_path",
            "layer_scale",
            "class_token",
            "unused_parameter",
            "position_table",
            "mean_of_patches",
            "relative_bias",
            "shift_mask",
            "merge_patches",
            "concatenate_maps",
            "image_attention",
        ),
        "vision",
    ),
    **dict.fromkeys(("group_norm", "windowed_average", "activation_in_place"), "feature_maps"),
    **dict.fromkeys(("sink_attention",), "sinks"),
    **dict.fromkeys(("bloom_attention", "falcon_attention", "gptj_attention", "mpt_attention"), "alibi"),
    **dict.fromkeys(("bloom_gelu", "clamp", "expanded", "in_place_add", "indexed", "interleaved_rotary", "product"), "decoders"),
    **dict.fromkeys(("router", "experts", "jitter"), "experts"),
    **dict.fromkeys(("softmax_groups", "sigmoid_groups", "softmax_of_best", "expert_gate"), "routers"),
    **dict.fromkeys(
        ("pair_rotary", "half_rotary", "complex_rotary", "from_cache", "join", "latent_keys", "latent_values"), "latent"
    ),
    **dict.fromkeys(("mamba_mixer", "mask_padding", "to_fp32"), "mamba"),
    "mamba2_mixer": "mamba2",
    "receive": "stages",
    **dict.fromkeys(("gated_delta", "output_gate"), "delta"),
    **dict.fromkeys(
        ("enter_split", "all_reduce", "reduce_scatter", "gather_tokens", "gather_columns", "gather_logits", "own_part"),
        "collectives",
    ),
    **dict.fromkeys(("rms_norm_fp32", "layer_norm_fp32", "head_layer_norm", "separate_head_norms", "slice"), "norms"),
}
"""Operations of whole areas (convolutions, experts, state spaces): kind -> module of this package, whose `KERNELS` are loaded on
first use, so that a model pays for what it has."""


def _kernel(kind: str) -> Callable[..., Sequence[Tensor]]:
    _KERNELS.update(import_module(f"memfit.kernels.{_LIBRARIES[kind]}").KERNELS)
    return _KERNELS[kind]


READS_THE_BATCH = ("embedding", "opaque", "patches", "pixels", "receive")
"""Kinds of operation that, first in a block, read ids or pixels, or what another device sends."""

Externals = tuple[tuple[str, str, bool], ...]
"""For each value that an earlier segment provides: its name, format, and whether it needs a gradient."""


def lower(
    block: Block, policy: KernelPolicy, *, input_requires_grad: bool, input_dtype: str, externals: Externals = ()
) -> Lowered:
    """Run a block's operations symbolically under a policy and record what autograd would."""
    tape = Tape(policy.precision, grad=policy.training and not policy.evaluating)
    context = Context(tape, policy)
    # ids and pixels are counted with the batch's inputs, not with the block
    reads_batch = bool(block.ops) and block.ops[0].kind in READS_THE_BATCH
    make = tape.outside if reads_batch else tape.tensor
    x = make(block.input.axis, block.input.width, input_dtype, input_requires_grad and policy.training)
    values: dict[int, Tensor] = {0: x}
    known = {name: (dtype, requires) for name, dtype, requires in externals}
    outside = tuple([(name, tape.outside(value.axis, value.width, *known[name])) for name, value in block.externals])
    for (_, value), (_, tensor) in zip(block.externals, outside, strict=True):
        values[value.id] = tensor
    logits: Tensor | None = None
    results: Sequence[Tensor]
    output = x
    head: Op | None = None
    ends: list[int] = []
    nodes = tape.nodes
    fused = False
    replaced = sets.kernels_of(policy.kernels)
    gated = sets.KERNEL_SETS[policy.kernels].gated
    with_head = sets.with_head_of(policy.kernels, policy.loss) if policy.training and not policy.evaluating else None
    between: list[Op] = []
    rewriter = sets.rewriter_of(policy.kernels)
    ops = block.ops if rewriter is None else rewriter(context, block.ops)
    for op in sets.with_gated_products(ops, gated) if gated else ops:
        kind = op.kind
        if policy.kv_cache and op.attributes.get("cached"):
            # the names of keys and values are given what the cache returns
            k, v = op.inputs[1:3]
            values[k.id], values[v.id] = cache.stored(context, op, values[k.id], values[v.id])
        inputs = [values[value.id] for value in op.inputs]
        if kind == "head":
            head = op
            fused = with_head is not None
        if policy.filled and _of_the_source(block, op):
            results = [tape.outside(value.axis, value.width, inputs[0].dtype) for value in op.outputs]
        elif kind == "loss":
            if not policy.training:
                ends.append(len(nodes) - 1)
                continue
            if head is not None and with_head is not None:
                results = [with_head(context, op, head, between, inputs[0])]
                logits = tape.whole_logits
            else:
                logits = inputs[0]
                plain = op.attributes["function"] == "cross-entropy" and not policy.evaluating
                kernel = replaced.get(f"{policy.loss} loss") if plain else None
                if kernel is None and plain and policy.split_logits:
                    from memfit.kernels.collectives import split_cross_entropy as kernel
                results = list(kernel(context, op, logits)) if kernel else [losses.loss(context, op, logits)]
        elif fused:
            between += [op] if kind in {"scale", "softcap"} else []
            results = inputs[:1]
        elif kind in {"linear", "head"}:
            bias = op.parameters[1] if len(op.parameters) > 1 else None
            read = _last_position(tape, inputs[0]) if kind == "head" and policy.logits_last else inputs[0]
            results = [linear.linear(context, op.parameters[0], bias, read)]
            if kind == "head":
                tape.first_logits = results[0].storage
        elif kind == "embedding":
            results = [linear.embedding(context, op.parameters[0], inputs[0], op.outputs[0].axis, op.attributes["ids"])]
        else:
            if policy.cache and op.attributes.get("cached"):
                inputs[1:3] = attention.cached(context, *inputs[1:3])
                values.update(zip([value.id for value in op.inputs[1:3]], inputs[1:3], strict=True))  # under the same names
            results = (replaced.get(kind) or _KERNELS.get(kind) or _kernel(kind))(context, op, *inputs)
        for value, result in zip(op.outputs, results, strict=True):
            values[value.id] = output = result
        ends.append(len(nodes) - 1)
    for value_id, index in block.holds:
        tape.hold(values[value_id], ends[index])
    if head is not None and policy.generating:
        output = _sampled(tape, output)
    held = head is None and not reads_batch and block.input_held
    provided = tuple([(name, values[value.id]) for name, value in block.provides])
    return Lowered(tape, x, values.get(block.output.id, output), logits, outside, provided, input_held=held)


def _of_the_source(block: Block, op: Op) -> bool:
    """Whether a decoder's layer projects the encoder's output: the cache holds the result."""
    return op.kind == "linear" and block.input.axis == TARGET_TOKEN and op.inputs[0].axis == TOKEN


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
