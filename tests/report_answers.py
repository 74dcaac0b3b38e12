"""Answers built by hand, whose bytes a reader can add up, for the tests of `memfit.report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memfit.account.estimate import CacheUse, Component, Estimate, Peak, Phase, Rank
from memfit.devices import Cluster, Device
from memfit.fit.answer import Answer, Kernel, Limit, Recommendation, RuleOfThumb, Step, Verdict, Warning
from memfit.job import Assumption, Inference, Job, Overheads, Training

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """The attributes of a model that a report shows."""

    name: str = "toy-1b"
    family: str = "toy"
    architecture: str = "ToyForCausalLM"
    source: str = "by hand"
    num_parameters: int = 1_073_741_824  # 2^30, so that bytes per parameter are GiB
    facts: dict[str, Any] = field(default_factory=dict)


DEVICE = Device(id="toy-24", name="Toy 24GB", vendor="toy", kind="gpu", marketed_bytes=24 * GIB, usable_bytes=24 * GIB,
                usable_basis="assumed", usable_source="by hand")  # fmt: skip


def component(name: str, largest: int, at_peak: int, basis: str, formula: str, source: str = "") -> Component:
    """A component without uncertainty."""
    return Component(name=name, bytes=largest, at_peak_bytes=at_peak, low_bytes=largest, high_bytes=largest, basis=basis,
                     formula=formula, source=source)  # fmt: skip


def training(**changes: Any) -> Answer:
    """Full training in bf16 that fits 24 GiB: the optimizer step binds with 4 + 4 + 8 + 2 GiB and 64 MiB allocated."""
    components = (
        component("optimizer_states", 8 * GIB, 8 * GIB, "exact", "1,073,741,824 x 2 x 4 B (adamw)", "torch.optim.AdamW"),
        component("activations", 6 * GIB, 0, "modelled", "1 x 2,048 tokens x 3 MiB"),
        component("weights", 4 * GIB, 4 * GIB, "exact", "1,073,741,824 x 4 B"),
        component("gradients", 4 * GIB, 4 * GIB, "exact", "1,073,741,824 x 4 B"),
        component("temporary", 2 * GIB, 2 * GIB, "modelled", "foreach copies of the largest bucket | half of the gradients"),
        component("workspace", 64 * MIB, 64 * MIB, "exact", "2 x 32 MiB", "measured on one card"),
        component("kv_cache", 0, 0, "exact", "0"),
        component("context", GIB // 2, GIB // 2, "assumed", "driver context"),
        component("fragmentation", 448 * MIB, 448 * MIB, "assumed", "reserved beyond what tensors use"),
    )
    allocated = 18 * GIB + 64 * MIB
    peak = Peak(
        phase="optimizer-step",
        allocated_bytes=allocated,
        reserved_bytes=allocated + 448 * MIB,
        device_bytes=19 * GIB,
        low_bytes=18 * GIB,
        high_bytes=20 * GIB,
        safe_bytes=21 * GIB,
        where="optimizer",
    )
    fixed = {"weights": 4 * GIB, "workspace": 64 * MIB}
    phases = (
        Phase(name="load", allocated_bytes=4 * GIB, components={"weights": 4 * GIB}),
        Phase(name="forward", allocated_bytes=18 * GIB + 64 * MIB,
              components={**fixed, "optimizer_states": 8 * GIB, "activations": 6 * GIB}),
        Phase(name="optimizer-step", allocated_bytes=allocated,
              components={**fixed, "optimizer_states": 8 * GIB, "gradients": 4 * GIB, "temporary": 2 * GIB}),
        Phase(name="forward", allocated_bytes=10 * GIB + 64 * MIB, components={**fixed, "activations": 6 * GIB}, first_step=True),
    )  # fmt: skip
    rank = Rank(
        rank="0",
        count=1,
        components=components,
        phases=phases,
        peak=peak,
        kept_bytes=6 * GIB,
        forward_end_bytes=18 * GIB + 64 * MIB,
        backward_end_bytes=16 * GIB + 64 * MIB,
    )
    job = Job(
        model=FakeModel(),  # type: ignore[arg-type]
        workload=Training(batch=1, seq=2048, precision="bf16-mixed", weight_dtype="fp32", outputs="kept", dropout=0.0),
        overheads=Overheads(runtime="hf"),
        cluster=Cluster(device=DEVICE, reading="1 x Toy 24GB, 24.00 GiB usable"),
        headroom=0.1,
    )
    values: dict[str, Any] = {
        "job": job,
        "estimate": Estimate(ranks=(rank,)),
        "verdict": Verdict(fits="yes", headroom_bytes=5 * GIB, summary="FITS: 19.00 of 24.00 GiB (79 %) on 1x Toy 24GB"),
        "limits": {
            "batch": Limit(max=1, likely=2, fixed_bytes=12 * GIB, bytes_per_unit=6 * GIB, binds="forward"),
            "seq": Limit(max=3072, likely=4000, fixed_bytes=12 * GIB, bytes_per_unit=3 * MIB, binds="forward"),
        },
        "recommendations": (
            Recommendation(change="fused AdamW kernel", flags=("torch.optim.AdamW(..., fused=True)",), peak_bytes=17 * GIB,
                           saves_bytes=2 * GIB, cost="none", fits="yes"),
            Recommendation(change="8-bit AdamW", flags=("--optimizer", "adamw-8bit"), peak_bytes=13 * GIB, saves_bytes=6 * GIB,
                           cost="states rounded to 8 bits", fits="yes"),
        ),
        "rule_of_thumb": RuleOfThumb(formula="16 B x 1.07B", bytes=16 * GIB,
                                     differs_because="temporary of 2 GiB is not in the rule"),
        "assumptions": (
            Assumption(name="precision", value="bf16-mixed", why="the usual mixed precision", flag="--precision"),
            Assumption(name="seq", value=2048, why="the longest batch binds", flag="--seq"),
            Assumption(name="tie", value=False, why="the config says so"),
        ),
        "kernels": (
            Kernel(computes="modules", name="eager", why="as they are", source="modelling code"),
            Kernel(computes="attention", name="memory-efficient", why="a padding mask is passed", layers=12, costs_bytes=GIB),
        ),
        "warnings": (Warning(code="first-step", text="the first step peaks lower"),),
        "verify": (Step(why="after two steps", command="python: print(torch.cuda.max_memory_allocated())"),),
        "next": (Step(why="use the room", command="memfit train toy-1b --batch 1"),),
    }  # fmt: skip
    return Answer(**{**values, **changes})


def too_large(**changes: Any) -> Answer:
    """The same training on 16 GiB: short by 3 GiB."""
    base = training()
    small = Device(id="toy-16", name="Toy 16GB", vendor="toy", kind="gpu", marketed_bytes=16 * GIB, usable_bytes=16 * GIB,
                   usable_basis="assumed", usable_source="by hand")  # fmt: skip
    job = Job(model=base.job.model, workload=base.job.workload, overheads=base.job.overheads, cluster=Cluster(device=small))
    verdict = Verdict(fits="no", headroom_bytes=-3 * GIB, summary="short by 3.00 GiB on 1x Toy 16GB")
    fused, eight_bit = base.recommendations
    fused = Recommendation(
        change=fused.change, flags=fused.flags, peak_bytes=17 * GIB, saves_bytes=2 * GIB, cost="none", fits="no"
    )
    return training(**{"job": job, "verdict": verdict, "recommendations": (fused, eight_bit), **changes})


def inference(**changes: Any) -> Answer:
    """Inference without a device: 2 GiB of weights, 1 GiB of cache, half a GiB of context."""
    components = (
        component("weights", 2 * GIB, 2 * GIB, "exact", "1,073,741,824 x 2 B"),
        component("kv_cache", GIB, GIB, "exact", "8,192 tokens x 128 KiB"),
        component("context", GIB // 2, GIB // 2, "assumed", "driver context"),
    )
    peak = Peak(phase="prefill", allocated_bytes=3 * GIB, reserved_bytes=3 * GIB, device_bytes=3 * GIB + GIB // 2,
                low_bytes=3 * GIB, high_bytes=4 * GIB, safe_bytes=4 * GIB)  # fmt: skip
    phases = (
        Phase(name="load", allocated_bytes=2 * GIB, components={"weights": 2 * GIB}),
        Phase(name="prefill", allocated_bytes=3 * GIB, components={"weights": 2 * GIB, "kv_cache": GIB}),
    )
    rank = Rank(rank="0", count=1, components=components, phases=phases, peak=peak)
    job = Job(
        model=FakeModel(),  # type: ignore[arg-type]
        workload=Inference(context=8192, prompt=8192, weight_dtype="bf16", quantization="none", kv_dtype="bf16"),
        overheads=Overheads(runtime="hf"),
    )
    values: dict[str, Any] = {
        "job": job,
        "estimate": Estimate(ranks=(rank,), cache=CacheUse(bytes_per_token=128 * 1024, bytes_per_sequence=GIB)),
        "verdict": None,
        "limits": {"context": Limit(max=None, likely=None, fixed_bytes=2 * GIB, bytes_per_unit=128 * 1024, binds="prefill")},
        "recommendations": (),
        "rule_of_thumb": None,
        "assumptions": (),
        "warnings": (),
        "verify": (),
        "next": (),
        "smallest_devices": (("toy-8", 1), ("toy-tpu", 1)),
    }
    return Answer(**{**values, **changes})
