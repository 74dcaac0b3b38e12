"""Prefix tuning within a step: the encoder that makes the virtual tokens' keys and values, before all layers and after them."""

from __future__ import annotations

from memfit.account.blocks import Run
from memfit.account.crossing import Accumulation, BlockMemory
from memfit.account.forms import TEMPORARY, ZERO, Form, form
from memfit.account.liveness import measure
from memfit.account.timeline import Timeline
from memfit.kernels import KernelPolicy, Lowered
from memfit.kernels.prefix import encode
from memfit.model import SEQUENCE
from memfit.precision import DTYPE_BYTES

WHERE = "prefix encoder"


def encoder(kernels: KernelPolicy, accumulation: Accumulation) -> BlockMemory | None:
    """What the prefix encoder takes; `None` without one."""
    if kernels.prefix is None:
        return None
    encoded = encode(kernels, kernels.prefix)
    lowered = Lowered(encoded.tape, encoded.input, encoded.output, None)
    return measure(lowered, accumulation=accumulation, outputs_kept=False, is_last=False)


def note(timeline: Timeline, memory: BlockMemory, kernels: KernelPolicy, runs: list[Run], base: Form) -> None:
    """Moments of the encoder: before the layers, and when all of them are through backward.

    Then every layer's gradients of its keys and values are there, in which those of the virtual ones lie. They are stacked layer
    by layer, joined to one tensor, and go through the encoder. `base`: what is held beside, without what the encoder keeps.
    """
    assert kernels.prefix is not None
    timeline.note("forward", WHERE, ZERO, memory.forward)
    gradients, waiting = ZERO, ZERO
    for run in runs:
        gradients += run.gradients(run.repeat)
        waiting += sum([one.waiting for one in run.blocks]) * run.repeat
    element = DTYPE_BYTES[kernels.precision.weight]
    one_layer = form(TEMPORARY, SEQUENCE, kernels.prefix.tokens * 2 * kernels.prefix.layer_width * element)
    timeline.note("backward", WHERE, base + gradients + memory.kept, (one_layer,))
    others = gradients - waiting
    timeline.note("backward", WHERE, base + others + memory.kept, (2 * memory.output,))
    timeline.note("backward", WHERE, base + others, memory.backward)
