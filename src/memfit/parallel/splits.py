"""How each kind of operation runs on one of `tp` devices: one rule a kind.

A value is whole on every device, split (a share of its heads or columns), or, with sequence parallelism, split along the tokens.
A rule asks the walk for its inputs in the state that the operation needs, and says in which state its outputs are. A kind without
a rule is refused: nothing is silently counted as whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memfit.model import Op, Parameter
from memfit.parallel.pieces import ATTENTION, share

if TYPE_CHECKING:
    from memfit.parallel.tensor import Walk

WHOLE, SPLIT, ALONG_TOKENS = "whole", "split", "along the tokens"

Rule = Callable[["Walk", Op], None]


def element_wise(walk: Walk, op: Op) -> None:
    """One tensor from one or more of the same shape: in the state of its operands; a whole operand gives its part."""
    states = {walk.state(one) for one in op.inputs}
    if SPLIT in states:
        walk.emit(op, [walk.part(one) for one in op.inputs], SPLIT)
    elif ALONG_TOKENS in states:
        walk.emit(op, [walk.tokens(one) for one in op.inputs], ALONG_TOKENS)
    else:
        walk.emit(op, [walk.local(one) for one in op.inputs], WHOLE)


def norm(walk: Walk, op: Op) -> None:
    """Over the whole width: needs all of it. Over each head: a share of the heads."""
    (x,) = op.inputs
    heads = op.attributes.get("heads", 1)
    if heads > 1 and walk.state(x) == SPLIT:
        local = share(heads, walk.degree)
        parameters = tuple([_norm_of_heads(one, heads, local) for one in op.parameters])
        if op.kind == "separate_head_norms":
            parameters = op.parameters[:local]
        walk.emit(op, [walk.local(x)], SPLIT, parameters=parameters, attributes={**op.attributes, "heads": local})
    elif walk.state(x) == ALONG_TOKENS:
        walk.emit(op, [walk.local(x)], ALONG_TOKENS)
    else:
        walk.emit(op, [walk.whole(x)], WHOLE)


def _norm_of_heads(parameter: Parameter, heads: int, local: int) -> Parameter:
    shape = parameter.shape
    return parameter._replace(shape=(local, *shape[1:])) if len(shape) > 1 and shape[0] == heads else parameter


def linear(walk: Walk, op: Op) -> None:
    """By columns: reads all of x, makes a share of the outputs. By rows: reads a share, makes a summand of the whole."""
    weight, *biases = op.parameters
    (x,) = op.inputs
    (out,) = op.outputs
    rows, *width = weight.shape
    if weight.split == "column" and weight.role != "head":
        walk.needs_columns(out, op.name)
        local = walk.local_width(out) * rows // out.width
        parameters = tuple([one._replace(shape=(local, *one.shape[1:])) for one in op.parameters])
        walk.emit(op, [walk.entering(x)], SPLIT, parameters=parameters)
    elif weight.split == "row":
        read = walk.part(x)
        parameters = (weight._replace(shape=(rows, width[0] * read.width // x.width)), *biases)
        walk.summand(op, [read], parameters=parameters)
    else:
        walk.emit(op, [walk.whole(x)], WHOLE)


def head(walk: Walk, op: Op) -> None:
    """By the vocabulary; who computes the loss over whole logits gathers them."""
    local = walk.vocabulary(op.parameters[0].shape[0])
    parameters = tuple([one._replace(shape=(local, *one.shape[1:])) for one in op.parameters])
    (out,) = op.outputs
    made = walk.fresh(out, local)
    walk.record(op._replace(inputs=(walk.entering(op.inputs[0]),), outputs=(made,), parameters=parameters))
    walk.collective("gather_logits", made, out, WHOLE)


def embedding(walk: Walk, op: Op) -> None:
    """The table of tokens by its rows: each device finds its own, and the results are summed. Small tables are whole."""
    table = op.parameters[0]
    if table.split == "heads":
        local = share(table.shape[1], walk.degree)
        walk.needs(table.shape[1], "attention heads")
        walk.emit(op, [walk.local(one) for one in op.inputs], SPLIT, parameters=(table._replace(shape=(table.shape[0], local)),))
    elif walk.splits_table(table):
        local = walk.vocabulary(table.shape[0])
        walk.summand(op, [walk.local(one) for one in op.inputs], parameters=(table._replace(shape=(local, table.shape[1])),))
    else:
        walk.emit(op, [walk.local(one) for one in op.inputs], WHOLE)


def attention(walk: Walk, op: Op) -> None:
    """A share of the heads; with fewer key-value heads than devices each holds one."""
    heads, kv_heads = op.attributes["num_heads"], op.attributes["num_kv_heads"]
    walk.needs(heads, "attention heads")
    walk.needs(kv_heads, "key-value heads", repeated=True)
    local = {"num_heads": share(heads, walk.degree), "num_kv_heads": share(kv_heads, walk.degree)}
    parameters = tuple([one._replace(shape=(share(one.shape[0], walk.degree), *one.shape[1:])) for one in op.parameters])
    inputs = [walk.part(one) for one in op.inputs]
    walk.cached_heads(op, inputs)
    walk.emit(op, inputs, SPLIT, parameters=parameters, attributes={**op.attributes, **local})


def rotary(walk: Walk, op: Op) -> None:
    """Head by head: each result in the state of what it is made from."""
    states = [walk.state(one) for one in op.inputs]
    walk.emit(op, [walk.local(one) for one in op.inputs], *states)


def parts(walk: Walk, op: Op) -> None:
    """Views of a fused projection: each a share of its own columns."""
    x = op.inputs[0]
    state = walk.state(x)
    if state == ALONG_TOKENS:
        walk.emit(op, [walk.whole(x)], *[WHOLE] * len(op.outputs))
    else:
        walk.emit(op, [walk.local(x)], *[state] * len(op.outputs))


def latent_keys(walk: Walk, op: Op) -> None:
    """A share of the heads, and the rotary part that all of them share: its gradient is a summand on each device."""
    heads = op.attributes["heads"]
    expanded, k_rotary = op.inputs
    attributes = {**op.attributes, "heads": share(heads, walk.degree)}
    walk.emit(op, [walk.part(expanded), walk.entering(k_rotary)], SPLIT, attributes=attributes)


def whole(walk: Walk, op: Op) -> None:
    """Computed on every device alike."""
    walk.emit(op, [walk.whole(one) for one in op.inputs], *[WHOLE] * len(op.outputs))


def loss(walk: Walk, op: Op) -> None:
    """Of what the head made."""
    walk.emit(op, [walk.whole(one) for one in op.inputs], WHOLE)


def experts(walk: Walk, op: Op) -> None:
    """A share of every expert's width; the results are summands. Whole experts where they are spread by expert parallelism."""
    x, scores = op.inputs
    inner = op.attributes["ffn"]
    if walk.whole_experts:
        walk.summand(op, [walk.entering(x), walk.whole(scores)])
        return
    walk.needs(inner, f"columns of {op.name}")
    local = share(inner, walk.degree)
    shapes = {2 * inner: 2 * local, inner: local}
    parameters = []
    for one in op.parameters:
        count, *rest = one.shape
        if "down_proj_bias" in one.name:
            parameters.append(one)
        elif "down" in one.name:
            place = rest.index(inner) if rest[0] != rest[1] else 1
            parameters.append(one._replace(shape=(count, *[local if at == place else size for at, size in enumerate(rest)])))
        else:
            place = 0 if rest[0] == 2 * inner else 1
            parameters.append(
                one._replace(shape=(count, *[shapes[2 * inner] if at == place else d for at, d in enumerate(rest)]))
            )
    attributes = {**op.attributes, "ffn": local}
    walk.summand(op, [walk.entering(x), walk.whole(scores)], parameters=tuple(parameters), attributes=attributes)


def mamba_mixer(walk: Walk, op: Op) -> None:
    """A share of the channels: x_proj and out_proj by rows, all else by channels; x_proj's sum is small and made in place."""
    (xz,) = op.inputs
    inner = xz.width // 2
    walk.needs(inner, "channels of the mixer")
    local = share(inner, walk.degree)
    parameters = tuple(
        [
            one
            if one.name.endswith("out_proj.bias")
            else one._replace(shape=tuple([local if d == inner else d for d in one.shape]))
            for one in op.parameters
        ]
    )
    walk.keeps_share_of_state = True
    walk.summand(op, [walk.part(xz)], parameters=parameters)


def zero_bias(walk: Walk, op: Op) -> None:
    """A number for each of the local heads."""
    walk.emit(op, [walk.local(op.inputs[0])], SPLIT)


SPLITS: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "activation", "scale", "softcap", "dropout", "clamp", "bloom_gelu", "weight_format", "clamp_fp16", "to_fp32",
            "multiply", "add", "in_place_add", "output_gate", "mask_padding", "join", "drop_path", "layer_scale",
            "add_in_place", "jitter",
        ),
        element_wise,
    ),
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "rms_norm_fp32", "layer_norm_fp32", "head_layer_norm", "separate_head_norms", "t5_norm"), norm
    ),
    **dict.fromkeys(("linear", "product"), linear),
    **dict.fromkeys(ATTENTION, attention),
    **dict.fromkeys(("rotary", "pair_rotary", "half_rotary", "complex_rotary", "interleaved_rotary"), rotary),
    **dict.fromkeys(("split", "slice", "indexed", "expanded", "latent_values", "from_cache"), parts),
    **dict.fromkeys(
        (
            "router", "softmax_groups", "sigmoid_groups", "softmax_of_best", "one_token", "mean_pool", "pixels", "class_token",
            "position_table", "mean_of_patches", "unused_parameter", "add_buffer", "expert_gate",
        ),
        whole,
    ),
    "head": head,
    "embedding": embedding,
    "latent_keys": latent_keys,
    "loss": loss,
    "experts": experts,
    "mamba_mixer": mamba_mixer,
    "zero_bias": zero_bias,
}  # fmt: skip
"""Kind of operation -> how one device of several runs it."""
