"""Levers that training and inference share, and what levers ask of a job."""

from __future__ import annotations

from memfit.account.resolve import runtime_of
from memfit.fit.levers.lever import Lever, with_workload
from memfit.job import FineTuning, Job, Training


def training_of(job: Job) -> Training:
    """The workload of a training job."""
    assert isinstance(job.workload, Training)
    return job.workload


def is_trainer(job: Job) -> bool:
    """Whether changes are spelled as arguments of HF Trainer."""
    return runtime_of(job).trainer


def method_of(job: Job) -> str:
    """What a training job trains: full, or the method of a fine-tuning."""
    return job.workload.method if isinstance(job.workload, FineTuning) else "full"


def has_bf16(job: Job) -> bool:
    """Whether the device computes in bf16; assumed when that is not known."""
    if job.cluster is None:
        return True
    native = job.cluster.device.native_dtypes
    return not native or "bf16" in native


_SPELLING = {"sdpa": "sdpa", "flash": "flash_attention_2"}
FLASH_CAPABILITY = (8, 0)


def _fused(job: Job) -> str | None:
    """sdpa where the architecture has it, else FlashAttention where it and the device have it."""
    if "sdpa" in job.model.attention_kernels:
        return "sdpa"
    capability = job.cluster.device.compute_capability if job.cluster else FLASH_CAPABILITY
    runs = capability is None or capability >= FLASH_CAPABILITY
    return "flash" if "flash" in job.model.attention_kernels and runs else None


ATTENTION = Lever(
    name="sdpa",
    group="attention",
    free=True,
    why_here="the same arithmetic in one kernel, and faster: nothing is lost",
    applies=lambda job: job.workload.attention == "eager" and _fused(job) is not None,
    edit=lambda job: with_workload(job, attention=_fused(job)),
    change=lambda before, after: f"fused attention ({after.workload.attention}) instead of eager",
    cost=lambda before, after: (
        "none: the score matrices of eager attention are never stored, and it is faster"
        + ("; needs flash-attn" if after.workload.attention == "flash" else "")
    ),
    flags=lambda job: (f'attn_implementation="{_SPELLING[job.workload.attention]}"',),
)


def _packages(job: Job) -> str:
    """The packages whose kernels transformers takes when they are installed."""
    return "flash-linear-attention" if job.model.caches else "mamba-ssm"


MIXER_KERNELS = Lever(
    name="mixer-kernels",
    group="mixers",
    free=True,
    why_here="fused kernels for the same recurrence, and far faster: nothing is lost, they have to be installed",
    applies=lambda job: job.workload.mixer_kernels == "torch" and bool(job.model.states),
    edit=lambda job: with_workload(job, mixer_kernels="fused"),
    change=lambda before, after: f"fused kernels for scans ({_packages(after)}, causal-conv1d)",
    cost=lambda before, after: "none: transformers' own scans store what the kernels keep on the chip, and are far slower",
    flags=lambda job: (f"pip install {_packages(job)} causal-conv1d",),
)
