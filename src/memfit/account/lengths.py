"""How long the texts of an inference job are, where the job does not say: prompt, context, source and target."""

from __future__ import annotations

from typing import Any, Protocol

from memfit.errors import UsageError
from memfit.job import Inference
from memfit.model import Model

TYPICAL_CONTEXT = 8192


class Choices(Protocol):
    """Where decisions are collected (`account.resolve`)."""

    changes: dict[str, Any]

    def assume(self, field: str, value: Any, why: str) -> None:
        """Decide a field, and list it as an assumption."""


def resolve_lengths(model: Model, workload: Inference, choices: Choices) -> None:
    """Context and prompt of text."""
    longest = model.max_positions or TYPICAL_CONTEXT
    context = workload.context
    if context is None:
        context = (
            min(longest, TYPICAL_CONTEXT) if workload.prompt is None else max(min(longest, TYPICAL_CONTEXT), workload.prompt)
        )
        choices.assume("context", context, f"the model's maximum is {longest:,}")
    if workload.prompt is None:
        choices.assume("prompt", context, "the worst case: prompts as long as the context, processed at once")
    elif workload.prompt > context:
        raise UsageError(
            f"--prompt {workload.prompt} is longer than --context {context}, which counts prompt and generated tokens together"
        )


def resolve_source_and_target(model: Model, workload: Inference, choices: Choices) -> None:
    """An encoder-decoder reads the prompt as its source and answers with a target; the context is both together."""
    longest = model.max_positions or TYPICAL_CONTEXT
    given, source, target = workload.context, workload.prompt, workload.target_seq
    if source is None and given is not None and target is not None and target < given:
        source = given - target
        choices.assume("prompt", source, "the source: what the context leaves beside the target")
    elif source is None:
        source = given or min(longest, TYPICAL_CONTEXT)
        choices.assume(
            "prompt", source, "the source: " + ("as long as the context" if given else f"the model's maximum is {longest:,}")
        )
    if target is None:
        if given is not None and given > source:
            target, why = given - source, "what the context leaves beside the source"
        else:
            target, why = source, "as long as the source"
        choices.assume("target_seq", target, why)
    if given is None:
        choices.changes["context"] = source + target


def check_cache(model: Model, workload: Inference) -> None:
    """A target needs an encoder; chunks and buffers need a cache; FlashAttention unpads a buffer, which is not counted."""
    if workload.target_seq is not None and not model.encoder_decoder:
        raise UsageError(f"--target-seq: {model.family} has no target of its own: --context counts prompt and answer together")
    if workload.prefill_chunk is not None and (model.encoder_decoder or not model.caches):
        raise UsageError(f"--prefill-chunk: {model.family} keeps no cache of its prompt: the encoder reads it at once")
    if workload.cache == "static":
        if model.encoder_decoder or not model.caches:
            raise UsageError(f"--cache static: not counted for {model.family}: use dynamic")
        if workload.attention == "flash":
            raise UsageError("--cache static with --attention flash: its copies of the buffers are not counted: use sdpa")
        if workload.prefill_chunk is not None and model.windows:
            raise UsageError("--cache static with --prefill-chunk: not counted for sliding windows: use --cache dynamic")
