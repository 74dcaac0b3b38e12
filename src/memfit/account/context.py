"""Context parallelism: c devices share the tokens of each sequence, s / c each, and hold the same weights."""

from __future__ import annotations

from memfit.account.choices import Choices
from memfit.account.pipelines import virtual_method
from memfit.errors import UsageError
from memfit.job import Job, Parallelism, Training

PARTS = 2
"""Of the sequence for each device, one from the front and one from the back: under a causal mask all then have the same work."""


def local_tokens(seq: int, given: Parallelism) -> int:
    """Tokens of each sequence on one device: ceil(s / c)."""
    return -(-seq // (given.cp or 1))


def check_context(job: Job, workload: Training, choices: Choices) -> None:
    """Raises `UsageError` for what the attention of a ring cannot do, with the nearest sequences that divide."""
    cp = job.parallelism.cp or 1
    if cp == 1:
        return
    seq = choices.changes.get("seq", workload.seq) or 1
    reason = _reason(job, workload, seq)
    if reason is not None:
        raise UsageError(f"--cp {cp}: {reason}")
    step = PARTS * cp
    if seq % step:
        below, above = seq // step * step, -(-seq // step) * step
        degrees = [str(one) for one in range(cp - 1, 1, -1) if seq % (PARTS * one) == 0][:1]
        degrees += [str(one) for one in range(cp + 1, 4 * cp) if seq % (PARTS * one) == 0][:1]
        other = f", or {' or '.join([f'--cp {one}' for one in degrees])}" if degrees else ""
        lengths = " or ".join([f"--seq {one}" for one in (below, above) if one])
        raise UsageError(
            f"--cp {cp}: {seq:,} tokens do not divide into {PARTS} x {cp} equal parts (each device gets one from the front and "
            f"one from the back of a sequence): take {lengths}{other}"
        )


def _reason(job: Job, workload: Training, seq: int) -> str | None:
    """Why the sequence cannot be shared."""
    model = job.model
    if model.encoder_decoder:
        return f"{model.family} has a source and a target, of which only one sequence would be shared"
    if model.pixels:
        return "images have a fixed number of tokens, which are not shared"
    if model.states:
        return f"layers of {model.family} carry a state from token to token, which devices would have to wait for"
    if not model.attention_kernels or model.family == "counts":
        return f"nothing is known of the attention of {model.family}"
    if workload.attention == "eager" or workload.attention not in model.attention_kernels:
        return "eager attention needs all keys at once: take --attention flash or sdpa"
    if workload.padding != "none":
        return f"--padding {workload.padding} needs a mask, which the attention of a ring does not take: leave it out"
    if workload.attention == "sdpa" and any(window <= seq for window in model.windows):
        return "sdpa needs a mask for sliding windows, which the attention of a ring does not take: take --attention flash"
    if workload.precision == "32-true":
        return "the attention of a ring runs in 16 bit: take --precision bf16-mixed"
    if virtual := virtual_method(workload):
        return f"--method {virtual} trains tokens that every device would have to see"
    if workload.eval_batch is not None:
        return "--eval-batch is an evaluation on one device"
    return None
