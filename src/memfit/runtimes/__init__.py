"""The software that runs a job and its habits: facts in one row per runtime, never scattered conditions."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime
from memfit.runtimes.hf import HF, HF_TRAINER, TORCH

RUNTIMES = {one.name: one for one in (HF, HF_TRAINER, TORCH)}
"""Runtimes by the name that `--runtime` takes."""

DEFAULT_RUNTIME = HF

__all__ = ["DEFAULT_RUNTIME", "RUNTIMES", "Runtime"]
