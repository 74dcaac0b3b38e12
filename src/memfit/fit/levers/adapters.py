"""Levers that train adapters beside frozen weights instead of the weights."""

from __future__ import annotations

from memfit.fit.levers.common import has_bf16, method_of
from memfit.fit.levers.lever import Lever
from memfit.job import FineTuning, Job, Training
from memfit.units import format_count


def _has_matrices(job: Job) -> bool:
    """Whether linear layers are known, to put adapters beside: not in a model of which only counts are given."""
    blocks = (block for segment in job.model.segments for block in segment.blocks)
    return any(one.role == "linear" and len(one.shape) == 2 for block in blocks for one in block.parameters)


def _adapters(job: Job, method: str) -> Job:
    """The training as a fine-tuning of adapters with the same numbers, over a base in the 16-bit format it computes in.

    Frozen fp32 weights under autocast would only be copies of what the forward pass casts to 16 bits anyway.
    """
    old = job.workload
    assert isinstance(old, Training)
    half = "fp16" if (old.precision or "").startswith("fp16") or not has_bf16(job) else "bf16"
    values = {name: getattr(old, name) for name in old.field_names}
    values |= {"method": method, "precision": f"{half}-true", "weight_dtype": half}
    return job.replace(workload=FineTuning(**values))


def _adapter_change(before: Job, after: Job) -> str:
    new = after.workload
    assert isinstance(new, FineTuning)
    name = "QLoRA" if new.method == "qlora" else "LoRA"
    base = "a 4-bit base" if new.method == "qlora" else "a frozen 16-bit base"
    return f"{name}: adapters of rank {new.lora_rank} on {new.lora_targets} over {base}"


def _lora_flags(job: Job) -> tuple[str, ...]:
    new = job.workload
    assert isinstance(new, FineTuning)
    targets = new.lora_targets if new.lora_targets == "all-linear" else new.lora_targets.split(",")
    return (f"LoraConfig(r={new.lora_rank}, target_modules={targets!r})",)


def _qlora_flags(job: Job) -> tuple[str, ...]:
    new = job.workload
    assert isinstance(new, FineTuning)
    compute = "float16" if new.weight_dtype == "fp16" else "bfloat16"
    quantised = (
        f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={new.double_quant}, '
        f"bnb_4bit_compute_dtype=torch.{compute})"
    )
    return (quantised, *_lora_flags(job))


LORA = Lever(
    name="lora",
    group="method",
    changes_task=True,
    may_add=True,  # each targeted linear keeps a copy of its input for its adapter
    why_here="the weights themselves are no longer trained",
    applies=lambda job: method_of(job) == "full" and _has_matrices(job),
    edit=lambda job: _adapters(job, "lora"),
    change=_adapter_change,
    cost=lambda before, after: (
        f"trains adapters only, the {format_count(before.model.num_parameters)} weights stay as they are: "
        "close to full fine-tuning on small data sets, not on pre-training; compute per step about a third less"
    ),
    flags=_lora_flags,
)

QLORA = Lever(
    name="qlora",
    group="method",
    changes_task=True,
    may_add=True,  # each targeted linear keeps a copy of its input for its adapter
    why_here="as LoRA, with a rounded base that is expanded again for every product",
    applies=lambda job: method_of(job) in ("full", "lora") and _has_matrices(job),
    edit=lambda job: _adapters(job, "qlora"),
    change=_adapter_change,
    # Dettmers et al. 2023 (arXiv:2305.14314): NF4 with double quantisation, 4.127 bits per weight.
    cost=lambda before, after: (
        "trains adapters only, over linear weights rounded to 4.13 bits (0.52 B): close to 16-bit LoRA in published runs; "
        "slower, as each weight is expanded to 16 bits in forward and backward; needs bitsandbytes"
    ),
    flags=_qlora_flags,
)
