"""Mixture of experts: a router, and experts whose weights are one three-dimensional tensor a projection.

Such a tensor is no linear layer: bitsandbytes does not quantise it, and adapters do not target it. Its role is `expert`.
"""

from __future__ import annotations

from collections.abc import Iterable

from memfit.model.builder import BlockBuilder
from memfit.model.description import Parameter, Segment, Value
from memfit.records import Record


class Experts(Record):
    """The dimensions of a sparse layer."""

    num_experts: int
    top_k: int
    ffn: int
    activation: str
    normalised: bool
    """The chosen scores are divided by their sum."""
    fp32_scores: bool
    """The scores stay in fp32; otherwise they are cast to the router logits' format."""
    router_loss: bool = False
    """A load-balancing loss is computed from every layer's router logits."""
    jitter: bool = False
    """The input is multiplied by noise in training."""


def sparse_mlp(b: BlockBuilder, x: Value, experts: Experts, *, name: str = "mlp") -> Value:
    """Each token goes to its `top_k` experts; their outputs are summed with the router's scores as weights."""
    if experts.jitter:
        x = b.op("jitter", "jitter", (x,), x.width)
    gate = Parameter(f"{name}.gate.weight", (experts.num_experts, x.width), "router")
    scores = b.op(
        "router",
        f"{name}.gate",
        (x,),
        experts.top_k,
        (gate,),
        normalised=experts.normalised,
        fp32_scores=experts.fp32_scores,
        router_loss=experts.router_loss,
    )
    b.until_here(x)
    up = Parameter(f"{name}.experts.gate_up_proj", (experts.num_experts, 2 * experts.ffn, x.width), "expert", "expert")
    down = Parameter(f"{name}.experts.down_proj", (experts.num_experts, x.width, experts.ffn), "expert", "expert")
    out = b.op("experts", f"{name}.experts", (x, scores), x.width, (up, down), top_k=experts.top_k, activation=experts.activation)
    b.until_here(x, scores)
    return out


def active_parameters(segments: Iterable[Segment]) -> int:
    """Parameters that one token passes: of every layer's experts only `top_k`."""
    total = 0
    for segment in segments:
        for block in segment.blocks:
            for op in block.ops:
                for one in op.parameters:
                    elements = one.num_elements
                    if one.role == "expert":
                        elements = elements // one.shape[0] * min(op.attributes["top_k"], one.shape[0])
                    total += elements * (1 if segment.shared else segment.repeat)
    return total
