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
    router: str = "router"
    """Kind of routing: router (softmax, the largest k), softmax_groups or sigmoid_groups (DeepSeek's, in fp32)."""
    clamped: bool = False
    """gpt-oss: biases, transposed weights, gate and up clamped and interleaved; a router with a bias."""
    groups: int = 0
    """Groups of experts of which the best are chosen first; 0 where all compete."""


def sparse_mlp(b: BlockBuilder, x: Value, experts: Experts, *, name: str = "mlp") -> Value:
    """Each token goes to its `top_k` experts; their outputs are summed with the router's scores as weights."""
    if experts.jitter:
        x = b.op("jitter", "jitter", (x,), x.width)
    fp32 = "fp32" if experts.router.endswith("_groups") else ""
    router = f"{name}.router" if experts.clamped else f"{name}.gate"
    gate = [Parameter(router + ".weight", (experts.num_experts, x.width), "router", dtype=fp32)]
    if experts.clamped:
        gate.append(Parameter(router + ".bias", (experts.num_experts,), "bias"))
    scores = b.op(
        experts.router,
        router,
        (x,),
        experts.top_k,
        tuple(gate),
        normalised=experts.normalised,
        fp32_scores=experts.fp32_scores,
        router_loss=experts.router_loss,
        groups=experts.groups,
    )
    b.until_here(x)
    count, inner, turn = experts.num_experts, experts.ffn, -1 if experts.clamped else 1
    parameters = [
        Parameter(f"{name}.experts.gate_up_proj", (count, *(2 * inner, x.width)[::turn]), "expert", "expert"),
        Parameter(f"{name}.experts.down_proj", (count, *(x.width, inner)[::turn]), "expert", "expert"),
    ]
    if experts.clamped:
        parameters += [
            Parameter(f"{name}.experts.gate_up_proj_bias", (count, 2 * inner), "expert", "expert"),
            Parameter(f"{name}.experts.down_proj_bias", (count, x.width), "expert", "expert"),
        ]
    out = b.op(
        "experts",
        f"{name}.experts",
        (x, scores),
        x.width,
        tuple(parameters),
        top_k=experts.top_k,
        ffn=inner,
        activation=experts.activation,
        clamped=experts.clamped,
    )
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


def expert_gate(b: BlockBuilder, x: Value, gate: Value) -> Value:
    """sigmoid(gate) * x, one number a token: how much of a shared expert is taken."""
    return b.op("expert_gate", "gate", (x, gate), x.width)
