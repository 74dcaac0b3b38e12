"""Of which equal units a value's columns consist: heads of attention, key-value heads, single columns.

Read backward from the operations that know it. A device holds its share of each piece, and at least one unit: with fewer
key-value heads than devices every device projects, rotates and caches one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.model import Block, Op

Pieces = tuple[tuple[int, int], ...]
"""(columns, units) of the parts side by side."""

ATTENTION = ("attention", "sink_attention", "bloom_attention", "falcon_attention", "gptj_attention", "mpt_attention")
"""Kinds of operation that read queries, keys and values of several heads."""
FUSED = ("split", "slice", "indexed")
"""Kinds of operation that take parts of a fused projection."""


def share(units: int, degree: int) -> int:
    """Units on one of `degree` devices: at least one."""
    return max(1, units // degree)


def local_columns(pieces: Pieces, degree: int) -> int:
    """Columns on one of `degree` devices."""
    return sum([columns // units * share(units, degree) for columns, units in pieces])


def _of_attention(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    heads, kv_heads = op.attributes["num_heads"], op.attributes["num_kv_heads"]
    q, k, v, *bias = op.inputs
    return [((q.width, heads),), *[((one.width, kv_heads),) for one in (k, v)], *[((one.width, heads),) for one in bias]]


def _same(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    found = known.get(op.outputs[0].id)
    return [found if found and sum(one[0] for one in found) == x.width else () for x in op.inputs]


def _each(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    return [known.get(out.id, ()) for out in op.outputs]


def _joined(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    found = known.get(op.outputs[0].id, ())
    return [((x.width, found[0][1]),) if len(found) == 1 else () for x in op.inputs]


def _of_heads(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    (x,) = op.inputs
    return [((x.width, op.attributes["heads"]),) if op.attributes.get("heads", 1) > 1 else ()]


def _expanded(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    """Heads broadcast to their groups: the units of the narrow value are as wide as those of the wide one."""
    (x,) = op.inputs
    found = known.get(op.outputs[0].id, ())
    return [((x.width, max(1, x.width * found[0][1] // found[0][0])),) if len(found) == 1 else ()]


def _latent(op: Op, known: dict[int, Pieces]) -> list[Pieces]:
    return [((op.inputs[0].width, op.attributes["heads"]),), ()]


_READ: dict[str, Callable[[Op, dict[int, Pieces]], list[Pieces]]] = {
    **dict.fromkeys(ATTENTION, _of_attention),
    **dict.fromkeys(("rotary",), _each),
    **dict.fromkeys(
        ("pair_rotary", "half_rotary", "complex_rotary", "interleaved_rotary", "clamp", "scale", "multiply", "add"), _same
    ),
    **dict.fromkeys(("rms_norm", "layer_norm_fp32", "head_layer_norm", "separate_head_norms"), _of_heads),
    "join": _joined,
    "expanded": _expanded,
    "latent_keys": _latent,
}  # fmt: skip


def pieces_of(block: Block) -> dict[int, Pieces]:
    """The pieces of each value that some operation says something of; parts of a fused projection in their order."""
    found: dict[int, Pieces] = {}
    for op in reversed(block.ops):
        if op.kind in FUSED:
            parts = [found.get(out.id) or ((out.width, out.width),) for out in op.outputs]
            source = op.inputs[0].id
            found[source] = (*[piece for part in parts for piece in part], *found.get(source, ()))
        elif op.kind in _READ:
            for x, pieces in zip(op.inputs, _READ[op.kind](op, found), strict=True):
                if pieces:
                    found.setdefault(x.id, pieces)
    values = [one for op in block.ops for one in op.outputs if one.id in found]
    return {one.id: found[one.id] for one in values if sum([columns for columns, _ in found[one.id]]) == one.width}
