"""Attention whose keys and values go round among the devices that share a sequence (context parallelism).

Each device has s / c tokens of every sequence: q, k and v of these are kept, as on one device. Attention to the others' keys runs
block by block, and the blocks' results are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.kernels.tape import Size, Tensor


class Ring(NamedTuple):
    """Over how many devices, and whose implementation it is."""

    implementation: str
    """allgather | p2p"""
    degree: int


class _Implementation(NamedTuple):
    """What a token takes while attention runs, beside what one device would: (degree, bytes of q, of k and v, heads) -> bytes."""

    forward: Callable[[int, int, int, int], int]
    backward: Callable[[int, int, int, int], int]
    source: str


_IMPLEMENTATIONS = {
    "allgather": _Implementation(
        # everybody's k and v, which torch gathers at once; a block's result and the merged one in fp32, and their difference, its
        # product and the new merged one, beside the block's result in 16 bit; the log-sum-exps likewise
        forward=lambda c, q, kv, heads: c * kv + 8 * q + 12 * heads,
        # the gathered k and v, and one joined; dq, dk and dv in fp32, of the last block and the one before in 16 bit; dk and dv
        # joined, and received from the neighbour; less the gradients that remain
        backward=lambda c, q, kv, heads: (c + 8) * kv + 3 * q,
        source="torch 2.13 distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention",
    ),
    "p2p": _Implementation(
        # k and v of every step stay in a list, as do the results of all steps
        forward=lambda c, q, kv, heads: c * kv + (c - 1) * q + 4 * heads * c,
        # two buffers of k and v with their gradients; dq of a step and dk and dv of a step
        backward=lambda c, q, kv, heads: 4 * kv + q + kv,
        source="TransformerEngine pytorch context_parallel.py, AttnFuncWithCPAndKVP2P",
    ),
}
"""By `Ring.implementation`; torchtitan's default is torch's allgather, Megatron's TransformerEngine's p2p."""


def scratch(ring: Ring | None, q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[list[Size], list[Size]]:
    """What attention needs in forward and in backward for the others' keys and values; nothing without a ring."""
    if ring is None:
        return [], []
    how = _IMPLEMENTATIONS[ring.implementation]
    sizes = (ring.degree, q.size[1], k.size[1] + v.size[1], heads)
    return [(q.axis, how.forward(*sizes))], [(q.axis, how.backward(*sizes))]
