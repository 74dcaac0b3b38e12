"""Evaluation between steps: forward passes without autograd, and the logits that are collected over the rows.

Weights and optimizer states stay; nothing is kept for backward. Every batch's logits are joined to those before by a new tensor,
so that both are there for a moment.
Source: transformers 5 trainer.py, evaluation_loop and prediction_step; trainer_pt_utils.py, EvalLoopContainer; accelerate
utils/operations.py, ConvertOutputsToFp32.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.blocks import masks_of, shared_forms
from memfit.account.forms import INPUTS, LOGITS, TEMPORARY, ZERO, Form, as_temporary, form
from memfit.account.liveness import measure_forward
from memfit.account.profile import Moment, pruned
from memfit.account.selection import stretches
from memfit.kernels import KernelPolicy, lower
from memfit.model import ONCE, POSITION, SEQUENCE, TOKEN, Model
from memfit.model.description import TARGET_POSITION, TARGET_TOKEN
from memfit.precision import DTYPE_BYTES

ONE_ROW = {SEQUENCE: ONCE, TOKEN: POSITION, TARGET_TOKEN: TARGET_POSITION}
"""What a row takes of a tensor with one of these axes: so many units of the other."""
LABEL_BYTES = 8


class EvaluationPolicy(NamedTuple):
    """What decides an evaluation beside the kernels."""

    rows: int
    """Rows whose logits are on the device at the most."""
    joined: bool
    """They come from several batches."""
    fp32: bool
    """Outputs are converted to fp32 (accelerate under mixed precision)."""
    one_sequence: bool
    frees_gradients: bool = False
    """Gradients are accumulated over micro-batches, and freed before it begins."""


BATCH = 1
"""Which of the job's numbers the moments are evaluated at: the second, those of an evaluation batch."""


def evaluation_moments(model: Model, kernels: KernelPolicy, policy: EvaluationPolicy, resident: Form) -> tuple[Moment, ...]:
    """The largest states, for the numbers of an evaluation batch; `resident` is there all the time."""
    kernels = kernels._replace(evaluating=True, one_sequence=kernels.one_sequence and policy.one_sequence)
    collected = _collected(model, kernels, policy)
    base = resident + collected
    states = [("evaluate", f"evaluation, {where}", base + state, BATCH) for where, state in _forward(model, kernels)]
    if policy.joined:
        states.append(("evaluate", "joining collected logits", base + as_temporary(collected), BATCH))
    return tuple([moment._replace(alone=True) for moment in pruned(states)])


def _collected(model: Model, kernels: KernelPolicy, policy: EvaluationPolicy) -> Form:
    """Logits and labels of all rows; of an encoder-decoder the encoder's output too, which its outputs carry."""
    if not policy.rows:
        return ZERO
    element = 4 if policy.fp32 else DTYPE_BYTES[kernels.precision.compute]
    total = ZERO
    losses = [op for segment in model.segments for block in segment.blocks for op in block.ops if op.kind == "loss"]
    for op in losses:
        axis = ONE_ROW[op.inputs[0].axis]
        total += form(LOGITS, axis, policy.rows * op.inputs[0].width * element) + form(INPUTS, axis, policy.rows * LABEL_BYTES)
    if model.encoder_decoder:
        total += form(TEMPORARY, POSITION, policy.rows * model.hidden_size * element)
    return total


def _forward(model: Model, kernels: KernelPolicy) -> list[tuple[str, Form]]:
    """The states of every kind of block; autocast's copies of trained weights stay until the forward pass ends."""
    found = []
    tables, _ = shared_forms(model, kernels)
    masks = sum(masks_of(model, kernels))
    dtype = kernels.precision.weight
    casts, embedded, passed = ZERO, ZERO, ZERO
    outside: list[tuple[str, str, bool]] = []
    for index, segment in enumerate(model.segments):
        held = tables + (ZERO if segment.role == "head" else masks) + (embedded if segment.role == "layers" else ZERO)
        memories = []
        for place, block in enumerate(segment.blocks):
            names = stretches(model, kernels.choice)[index][-1].trained[place] if kernels.choice else None
            lowered = lower(
                block, kernels._replace(trained=names), input_requires_grad=False, input_dtype=dtype, externals=tuple(outside)
            )
            memory = measure_forward(lowered)
            if kernels.precision.by_unit:
                cast = form(TEMPORARY, ONCE, DTYPE_BYTES[dtype] * block.num_parameters)
                memory = memory._replace(forward=tuple([state + cast for state in memory.forward]))
            memories.append((block.name, memory, passed))
            dtype = memory.output_dtype
            for value in memory.provided:
                outside.append((value.name, value.dtype, False))
                passed += value.form
        repeats = 1 if segment.shared else segment.repeat
        period = sum([memory.region_casts for _, memory, _ in memories])
        before = casts + period * (repeats - 1)
        for name, memory, values in memories:
            found += [(name, before + held + values + state) for state in memory.forward]
            before += memory.region_casts
        casts += period * repeats
        if segment.role == "embedding":
            embedded = memories[-1][1].output  # the name `inputs_embeds` holds it while the layers run
        if segment.provides:
            outside.append((segment.provides, dtype, False))
            passed, dtype = passed + memories[-1][1].output, kernels.precision.weight
    return found
