"""memfit computes, before anyone rents an accelerator, whether a machine-learning workload fits in its memory.

    >>> import memfit
    >>> print(memfit.answer("llama-3.1-8b", memfit.Inference(context=8192), on="4090").verdict.summary)  # doctest: +SKIP

The names below are imported when they are first used, so that `import memfit` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit._version import __version__

if TYPE_CHECKING:
    from memfit.api import answer, estimate, load_model, overview
    from memfit.errors import InputError, MemfitError, UsageError
    from memfit.fit.answer import Answer
    from memfit.job import FineTuning, Inference, Training

__all__ = [
    "Answer", "FineTuning", "Inference", "InputError", "MemfitError", "Training", "UsageError", "__version__", "answer",
    "estimate", "load_model", "overview",
]  # fmt: skip

_HOMES = {
    "answer": "memfit.api",
    "estimate": "memfit.api",
    "load_model": "memfit.api",
    "overview": "memfit.api",
    "Answer": "memfit.fit.answer",
    "InputError": "memfit.errors",
    "MemfitError": "memfit.errors",
    "UsageError": "memfit.errors",
    "Training": "memfit.job",
    "FineTuning": "memfit.job",
    "Inference": "memfit.job",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
