"""The software that runs a job and its habits: facts in one row per runtime, never scattered conditions."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.runtimes.facts import Runtime
from memfit.runtimes.hf import (
    HF,
    HF_4,
    HF_4_46,
    HF_4_49,
    HF_TRAINER,
    HF_TRAINER_4,
    HF_TRAINER_4_46,
    HF_TRAINER_4_49,
    TORCH,
)
from memfit.runtimes.megatron import MEGATRON
from memfit.runtimes.torchtitan import TORCHTITAN, TORCHTITAN_0_0, TORCHTITAN_0_1
from memfit.runtimes.unsloth import UNSLOTH

RUNTIMES = {one.name: one for one in (HF, HF_TRAINER, TORCH, TORCHTITAN, MEGATRON, UNSLOTH)}
"""Runtimes by the name that `--runtime` takes, as their newest release behaves."""

EARLIER = (HF_4, HF_TRAINER_4, HF_4_49, HF_TRAINER_4_49, HF_4_46, HF_TRAINER_4_46, TORCHTITAN_0_1, TORCHTITAN_0_0)
"""How earlier releases behaved, for `name@release`: newest first within a name."""

DEFAULT_RUNTIME = HF


def find_runtime(text: str) -> Runtime:
    """The runtime of `name` or `name@release`, as that release behaves.

    Raises:
        UsageError: the release is older than all that is known of the runtime.
    """
    name, _, release = text.partition("@")
    newest = RUNTIMES[name]
    if not release:
        return newest
    asked = tuple(int(part) for part in release.split("."))
    rows = [newest, *[one for one in EARLIER if one.name == name]]
    found = next((row for row in rows if asked >= row.since), None)
    if found is None:
        first = ".".join(map(str, rows[-1].since))
        raise UsageError(f"--runtime {text}: what is known of {name} begins with release {first}")
    return found._replace(version=release)


def is_known(text: str) -> bool:
    """Whether a row of facts describes the release of `name@release`: none does of a later one than was looked at."""
    name, _, release = text.partition("@")
    row = RUNTIMES[name]
    newest = tuple(int(part) for part in row.version.split("."))
    asked = tuple(int(part) for part in release.split("."))[: len(newest)]
    return row.looked_at[: len(asked)] <= asked <= newest


__all__ = ["DEFAULT_RUNTIME", "EARLIER", "RUNTIMES", "Runtime", "find_runtime", "is_known"]
