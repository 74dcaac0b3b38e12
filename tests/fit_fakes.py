"""A model, devices and an estimate whose bytes a reader can work out in the head, for the tests of `memfit.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.account.estimate import Component, Estimate, Peak, Phase, Rank
from memfit.devices import Cluster, Device
from memfit.job import FineTuning, Inference, Job, Overheads, Training
from memfit.model import Model
from memfit.model.description import TOKEN, Block, CacheSpec, Op, Parameter, Segment, Value

PARAMETERS = 1_000_000


def model(**changes: Any) -> Model:
    """A decoder of a million parameters with 4,096 positions that it was trained for."""
    read, made = Value(0, TOKEN, 1000), Value(1, TOKEN, 1000)
    weight = Op("linear", "all", (read,), (made,), (Parameter("all.weight", (1000, 1000), "linear"),))
    block = Block("block", read, made, (weight,), (CacheSpec(100),))
    values: dict[str, Any] = {
        "name": "tiny", "family": "llama", "architecture": "LlamaForCausalLM", "source": "by hand", "kind": "decoder",
        "segments": (Segment((block,)),), "num_layers": 1, "hidden_size": 1000, "num_heads": 1, "num_kv_heads": 1,
        "head_dim": 1000, "vocab_size": 1000, "max_positions": 4096,
    }  # fmt: skip
    return Model(**{**values, **changes})


def cluster(usable: int, count: int = 1, **changes: Any) -> Cluster:
    """`count` devices with this many usable bytes."""
    values: dict[str, Any] = {
        "id": "toy-1", "name": "Toy 1GB", "vendor": "nvidia", "kind": "gpu", "marketed_bytes": usable, "usable_bytes": usable,
        "usable_basis": "measured", "usable_source": "by hand", "compute_capability": (9, 0),
    }  # fmt: skip
    return Cluster(device=Device(**{**values, **changes}), count=count, reading="toy")


_NUMBERS = {"batch": 4, "seq": 1024, "outputs": "kept", "dropout": 0.0}


def training_job(usable: int | None = None, *, headroom: float = 0.0, of: Model | None = None, **workload: Any) -> Job:
    """A resolved training job; `usable` bytes on its device."""
    values: dict[str, Any] = {**_NUMBERS, "precision": "bf16-mixed", "weight_dtype": "fp32"}
    work = Training(**{**values, **workload})
    return _job(of, work, usable, headroom)


def finetuning_job(usable: int | None = None, *, headroom: float = 0.0, of: Model | None = None, **workload: Any) -> Job:
    """A resolved fine-tuning job."""
    values: dict[str, Any] = {**_NUMBERS, "precision": "bf16-true", "weight_dtype": "bf16"}
    return _job(of, FineTuning(**{**values, **workload}), usable, headroom)


def inference_job(usable: int | None = None, *, headroom: float = 0.0, of: Model | None = None, **workload: Any) -> Job:
    """A resolved inference job."""
    values: dict[str, Any] = {
        "context": 2048, "prompt": 2048, "concurrency": 8, "weight_dtype": "bf16", "quantization": "none", "kv_dtype": "bf16",
    }  # fmt: skip
    return _job(of, Inference(**{**values, **workload}), usable, headroom)


def _job(of: Model | None, work: Any, usable: int | None, headroom: float) -> Job:
    where = None if usable is None else cluster(usable)
    return Job(model=of or model(), workload=work, overheads=Overheads(runtime="hf"), cluster=where, headroom=headroom)


def peak(device: int, *, low: int | None = None, safe: int | None = None, phase: str = "backward") -> Peak:
    """A peak without uncertainty unless it is given."""
    low, safe = device if low is None else low, device if safe is None else safe
    same = {"allocated_bytes": device, "reserved_bytes": device, "device_bytes": device}
    return Peak(phase=phase, **same, low_bytes=low, high_bytes=safe, safe_bytes=safe)


def alone(of: Peak) -> Estimate:
    """One rank with this peak and nothing else."""
    return Estimate(ranks=(Rank(rank="all", count=1, components=(), phases=(), peak=of),))


def estimate_of(phases: dict[str, dict[str, int]]) -> Estimate:
    """Exact: the phases' components as given, the largest phase binds."""
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    binding = max(totals, key=lambda name: totals[name])
    names = sorted({name for parts in phases.values() for name in parts})
    components = []
    for name in names:
        most = max(parts.get(name, 0) for parts in phases.values())
        at_peak = phases[binding].get(name, 0)
        interval = {"low_bytes": most, "high_bytes": most}
        components.append(Component(name=name, bytes=most, at_peak_bytes=at_peak, **interval, basis="exact", formula="by hand"))
    return Estimate(
        ranks=(
            Rank(
                rank="all",
                count=1,
                components=tuple(components),
                phases=tuple(Phase(name=name, allocated_bytes=totals[name], components=phases[name]) for name in phases),
                peak=peak(totals[binding], phase=binding),
            ),
        )
    )


def peak_only(device_bytes: Callable[[Job], int]) -> Callable[[Job], Estimate]:
    """An estimate function of one phase whose peak is `device_bytes(job)`."""
    return lambda job: estimate_of({"backward": {"activations": device_bytes(job)}})


STATES = {"adamw": 8, "adamw-foreach": 8, "adamw-fused": 8, "adamw-loop": 8, "adamw-8bit": 2, "paged-adamw-8bit": 0,
          "adafactor": 0, "sgd": 0}  # fmt: skip


def toy(job: Job) -> Estimate:
    """An account with round numbers, of the kind `memfit.account` gives.

    Training, P a million: weights and gradients 4 B each (2 B in bf16-true), states 8 B (halved in bf16-true; 8-bit 2, paged 0);
    foreach doubles the weights in the step. LoRA: 16-bit base, 1 % trained at 16 B. QLoRA: half a byte of base.
    Activations 1,000 B a token (with checkpointing 100, selective 900, offloaded 90), logits 500 B a token (0 when fused).
    Inference: 2, 1, 0.5 B a weight; cache 2 B (1 in fp8) x 100 a token.
    """
    work = job.workload
    if isinstance(work, Inference):
        weights = {"none": 2_000_000, "int8": 1_000_000, "int4": 500_000}[work.quantization or "none"]
        cache = {"bf16": 200, "fp8": 100}[work.kv_dtype or "bf16"] * (work.context or 1) * work.concurrency
        working = 50 * (work.prompt or 1)
        return estimate_of({"prefill": {"weights": weights, "kv_cache": cache, "activations": working}})
    tokens = work.batch * (work.seq or 1)
    activations = tokens * {"none": 1000, "selective": 900, "full": 100, "offloaded": 90}[work.checkpointing]
    if work.padding == "right":
        activations *= 2
    logits = 0 if work.loss == "fused" else tokens * 500
    method = work.method if isinstance(work, FineTuning) else "full"
    if method == "full":
        width = 2 if work.precision == "bf16-true" else 4
        weights, gradients = width * PARAMETERS, width * PARAMETERS
        per = STATES[work.optimizer]
        states = per * PARAMETERS * (width // 2) // 2 if per == 8 else per * PARAMETERS
    else:
        weights = {"lora": 2 * PARAMETERS, "qlora": PARAMETERS // 2}[method] + PARAMETERS // 25
        gradients, states = PARAMETERS // 25, 2 * PARAMETERS // 25
    scratch = weights if work.optimizer in ("adamw", "adamw-foreach") and method == "full" else 0
    always = {"weights": weights, "gradients": gradients, "optimizer_states": states}
    return estimate_of(
        {
            "backward": {**always, "activations": activations, "logits": logits},
            "optimizer-step": {**always, "temporary": scratch},
        }
    )
