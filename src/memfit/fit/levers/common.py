"""Levers that training and inference share."""

from __future__ import annotations

from memfit.fit.levers.lever import Lever, with_workload

ATTENTION = Lever(
    name="sdpa",
    group="attention",
    free=True,
    why_here="the same arithmetic in one kernel, and faster: nothing is lost",
    applies=lambda job: job.workload.attention == "eager" and "sdpa" in job.model.attention_kernels,
    edit=lambda job: with_workload(job, attention="sdpa"),
    change=lambda before, after: "fused attention (sdpa) instead of eager",
    cost=lambda before, after: "none: the score matrices of eager attention are never stored, and it is faster",
    flags=lambda job: ('attn_implementation="sdpa"',),
)
