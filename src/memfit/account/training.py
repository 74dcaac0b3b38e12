"""The timeline of a training step as moments: forward, loss, backward, optimizer step; first step and steady state.

Kept activations grow through forward, the loss adds its chain, backward frees block after block while gradients grow; the step
holds gradients and its own scratch. Blocks repeat, so within a run of equal blocks only its two ends can be extreme.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from memfit.account import prefixes
from memfit.account.blocks import Conditions, Run, masks_of, measure_segment, shared_forms
from memfit.account.checkpoints import arranged
from memfit.account.crossing import Accumulation
from memfit.account.evaluation import evaluation_moments
from memfit.account.forms import (
    INPUTS,
    TEMPORARY,
    ZERO,
    Form,
    form,
    parts,
    per_axis,
)
from memfit.account.pipelines import NOTHING, Held, as_activations, beside_of, held_of, with_others
from memfit.account.profile import Moment, Profile, loading, pruned
from memfit.account.residents import shared_cast
from memfit.account.selection import trained_parameters
from memfit.account.sharding import Sharding
from memfit.account.standing import ID_BYTES, TrainingPolicy, base_of, totals_of
from memfit.account.states import (
    scratch_per_byte,
)
from memfit.account.timeline import StepPolicy, Timeline
from memfit.account.units import Gathering, gather, unit_of
from memfit.kernels import KernelPolicy
from memfit.kernels.context import Context, target_of
from memfit.kernels.tape import Tape
from memfit.model import PAIR, SEQUENCE, Block, Model, Parameter
from memfit.model.remember import of_model
from memfit.precision import DTYPE_BYTES


def _uses_of_tied(model: Model, kernels: KernelPolicy) -> dict[str, list[tuple[int, str]]]:
    """Where each trained tied parameter is used: the segment and the kind of operation, in order of execution."""
    tied: AbstractSet[str] = model.tied
    if not tied or not (kernels.train_all or kernels.choice):
        return {}
    saved = kernels.choice.saved if kernels.choice else ()
    used = [
        (one.tied_to or one.name, (index, op.kind))
        for index, segment in enumerate(model.segments)
        for block in segment.blocks
        for op in block.ops
        for one in op.parameters
        if target_of(one) not in saved
    ]
    if kernels.choice:
        tied = tied & {one.parameter.name for one in trained_parameters(model, kernels) if not one.copied}
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in tied}
    for name, use in used:
        if name in tied:
            found[name].append(use)
    return found


def _accumulation(uses: dict[str, list[tuple[int, str]]], index: int, alone: Accumulation) -> Accumulation:
    """What becomes of gradients in this segment: those of tied parameters wait for, or are added to, other segments' ones.

    A head's gradient is a view, to which nothing is added in place: its sum with the next is a new tensor.
    """
    pending, completes, joins = set(), set(), set()
    for name, places in uses.items():
        later = [kind for place, kind in places if place > index]
        if not later:
            pending.add(name)
        elif later == ["head"]:
            completes.add(name)
        else:
            joins.add(name)
    return alone._replace(pending=frozenset(pending), completes=frozenset(completes), joins=frozenset(joins))


def _is_trained(model: Model, kernels: KernelPolicy, parameter: Parameter) -> bool:
    """Whether this parameter, a copy of it or an adapter beside it is trained."""
    adapter = Context(Tape(kernels.precision), kernels).adapter(parameter)
    return adapter is not None or any(one.parameter == parameter for one in trained_parameters(model, kernels))


def _saved_inputs(model: Model, kernels: KernelPolicy) -> Form:
    """The batch's tensors that the first trained operation saves: ids by an embedding, pixels by a convolution without a cast."""
    first = [op for block in model.segments[0].blocks for op in block.ops if op.parameters][:1]
    if model.receives:
        return ZERO
    if not kernels.train_all and not any(_is_trained(model, kernels, one) for op in first for one in op.parameters[:1]):
        return ZERO
    if not model.pixels:
        ids = {op.outputs[0].axis for segment in model.segments for block in segment.blocks for op in block.ops
               if op.kind == "embedding" and op.attributes["ids"] == "batch"}  # fmt: skip
        return sum([form(INPUTS, axis, ID_BYTES) for axis in ids])
    cast = kernels.precision.autocast and kernels.precision.weight != kernels.precision.compute
    return ZERO if cast else form(INPUTS, SEQUENCE, model.pixels * DTYPE_BYTES[kernels.precision.weight])


def _saved_masks(model: Model, kernels: KernelPolicy, policy: StepPolicy, masks: tuple[Form, ...]) -> Form:
    """Masks that autograd holds: as inputs of checkpoints, or because a trained position bias was laid over them."""
    axes = model.checkpointed_masks if policy.checkpointing.recomputes else ()
    if kernels.padded and kernels.attention == "sdpa" and kernels.train_all and not policy.checkpointing.all_layers:
        biased = any(
            op.kind == "attention" and len(op.inputs) > 3
            for segment in model.segments
            for block in segment.blocks
            for op in block.ops
        )
        axes += (PAIR,) if biased else ()
    return sum([form(TEMPORARY, axis, num_bytes) for _, axis, num_bytes in parts(sum(masks)) if axis in axes])


def _inputs_require_grad(model: Model, kernels: KernelPolicy) -> bool:
    """Whether the embedding's output is made to require a gradient when checkpointing is enabled.

    transformers does so for every model that reads ids, and for all with adapters (modeling_utils.py,
    gradient_checkpointing_enable and enable_input_require_grads): gradients then flow through frozen layers as well.
    """
    return kernels.adapter is not None or not model.pixels


class _Step(NamedTuple):
    """Forward and backward of a step, without what is there all the time."""

    moments: tuple[Moment, ...]
    kept: Form
    """What autograd holds at the end of forward, as saved-tensor hooks count it."""
    forward_end: Form
    backward_end: Form
    """What is left of them when backward has run: the outputs that the caller still holds."""
    host: Form
    """Inputs of checkpoints in host memory."""
    held: Held
    """Of a pipeline stage: what one micro-batch holds between its forward and its backward."""


def _runs(model: Model, kernels: KernelPolicy, policy: StepPolicy) -> list[Run]:
    """The model's blocks in order of execution, measured."""
    uses = _uses_of_tied(model, kernels)
    runs: list[Run] = []
    checkpointing = policy.checkpointing
    if checkpointing.recomputes and model.reads_across_blocks:
        kernels = kernels._replace(checkpointed=True)
    persist = policy.gradients_persist or policy.step_scratch >= 0  # a gradient is gone when its parameter has taken it
    if policy.sharding.splits_gradients:
        persist = False  # what is added to older ones is a device's part, when all of a unit's are reduced
    precision = kernels.precision
    widened = DTYPE_BYTES[precision.master] // DTYPE_BYTES[precision.weight] if precision.by_unit else 1
    alone = Accumulation(persist, step_scratch=policy.step_scratch, widened=widened)
    conditions = Conditions(kernels, alone, policy.outputs_kept, False, kernels.precision.weight)
    for index, segment in enumerate(model.segments):
        shares = bool(uses) and segment.role in ("embedding", "head")
        accumulation = _accumulation(uses, index, alone) if shares else alone
        if accumulation is not conditions.accumulation:
            conditions = conditions._replace(accumulation=accumulation)
        checkpointed = checkpointing.recomputes and segment.role == "layers"
        if (checkpointed and _inputs_require_grad(model, kernels)) or (kernels.virtual_tokens and segment.role == "layers"):
            conditions = conditions._replace(requires_grad=True)
        found, conditions = measure_segment(
            model,
            index,
            conditions,
            checkpointed=checkpointed,
            operators=checkpointing.operators,
            once=not checkpointing.all_layers,
        )
        if policy.sharding.scheme:
            found = tuple([_as_units(run, segment.blocks, kernels, policy.sharding) for run in found])
        if checkpointed and checkpointing.kind == "offloaded":
            found = tuple([run._replace(offloaded=True) for run in found])
        # modules around the layers are checkpointed beside them only where every layer is
        runs += [run._replace(unit=segment.unit) for run in found] if segment.unit and checkpointing.kind == "full" else found
    return arranged(runs, checkpointing)


def _as_units(run: Run, blocks: tuple[Block, ...], kernels: KernelPolicy, sharding: Sharding) -> Run:
    """The run whose memory says what is gathered and reduced for each block."""
    turns = tuple(
        [
            tuple(
                [one._replace(sharded=unit_of(block, one, kernels, sharding)) for one, block in zip(period, blocks, strict=True)]
            )
            for period in run.turns
        ]
    )
    bare = tuple([one._replace(sharded=met.sharded) for one, met in zip(run.bare, turns[0], strict=True)])
    return run._replace(turns=turns, bare=bare)


def _host(runs: list[Run]) -> Form:
    """Inputs of checkpoints that wait in host memory."""
    return sum([run.blocks[start].input * run.repeat for run in runs if run.offloaded for start, _ in run.spans])


@of_model(256)
def _step(model: Model, kernels: KernelPolicy, policy: StepPolicy) -> _Step:
    """Shared by all jobs that differ only in the optimizer or the workspace."""
    runs = _runs(model, kernels, policy)
    gathering = Gathering(runs)
    if policy.sharding.scheme:
        gathering = gather(runs, policy.sharding, persist=policy.gradients_persist)
        runs = gathering.runs
    tables, _ = shared_forms(model, kernels)
    if not any(memory.output_requires_grad for run in runs if run.role != "head" for memory in run.blocks):
        tables = ZERO  # a frozen backbone keeps nothing of them
    backbone, alone = tables, Accumulation(policy.gradients_persist or policy.step_scratch >= 0, step_scratch=policy.step_scratch)
    prefix = prefixes.encoder(kernels, alone)
    if prefix is not None:
        tables += prefix.kept  # alive until backward is through, as the tables are
    masks = masks_of(model, kernels)
    saved_masks = _saved_masks(model, kernels, policy, masks)
    cast = shared_cast(model, kernels)
    timeline = Timeline(runs, tables + cast, masks, policy, masks_saved=bool(saved_masks))
    before, kept = timeline.forward()
    last = runs[-1].blocks[-1]
    staged = model.receives or model.sends
    sent = as_activations(last.output) if model.sends and policy.keeps_sent else ZERO
    timeline.backward(before, last.outputs + sent)
    if prefix is not None:
        prefixes.note(timeline, prefix, kernels, runs, backbone + last.outputs + timeline.cache())
    kept += timeline.outside_kept()
    leaf = ZERO
    frozen_inputs = len(runs) > 1 and not runs[0].blocks[-1].output_requires_grad
    if policy.checkpointing.recomputes and frozen_inputs and _inputs_require_grad(model, kernels):
        # the embedding's output is then a leaf: it and its gradient live until the outputs are dropped
        leaf = 2 * runs[0].blocks[-1].output
    return _Step(
        moments=pruned(timeline.moments),
        kept=kept
        - gathering.kept
        + (ZERO if policy.checkpointing.all_layers else tables)
        + saved_masks
        + _saved_inputs(model, kernels),
        forward_end=kept
        + gathering.constant
        + last.outputs_held
        + sent
        + (ZERO if last.unit is None else last.unit.weights)  # the last unit is not resharded before its backward
        + timeline.returned(beside_kept=True)
        + timeline.cache(beside_kept=True)
        + tables
        + cast
        + (sum(masks) if timeline.masks_stay else ZERO),
        backward_end=last.outputs + timeline.returned() + timeline.cache() + timeline.leaves() + leaf,
        host=_host(runs),
        held=held_of(timeline, saved_masks + (ZERO if policy.checkpointing.all_layers else tables)) if staged else NOTHING,
    )


def _optimizer_step(update: Form) -> Moment:
    return Moment("optimizer-step", "optimizer", update, per_axis(update))


def compile_least(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    """A profile that nothing was measured for: the optimizer step alone, without the outputs that the caller may still hold.

    No value of it exceeds the whole profile's peak.
    """
    base = base_of(model, kernels, policy)
    return Profile(moments=(_optimizer_step(base.update),), statics=base.statics, static_total=per_axis(base.statics))


def compile_training(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    """The profile of a training step."""
    base = base_of(model, kernels, policy)
    scratch = scratch_per_byte(policy.optimizer, totals_of(model, kernels).trained) if policy.in_backward else -1
    # gradients of buffers that are there all the time are added to what is there
    persist = policy.gradients_persist or policy.buckets == "views" or policy.sharding.gradients_stand
    keeps_sent = policy.pipeline is not None and policy.pipeline.keeps_sent
    outputs_kept = policy.outputs_kept or keeps_sent  # the last stage's are its logits
    of_step = StepPolicy(policy.checkpointing, outputs_kept, persist, scratch, keeps_sent, policy.early_stop, policy.sharding)
    step = _step(model, kernels, of_step)
    statics, update = base.statics, base.update + step.backward_end
    others, beside_end, step_moments = ZERO, ZERO, step.moments
    if policy.pipeline is not None:
        inputs = totals_of(model, kernels).inputs
        beside = beside_of(model, policy.pipeline, policy.in_flight, step.held, inputs, returned=policy.outputs_kept)
        statics += beside.always
        update += beside.between_steps
        others, beside_end, step_moments = beside.held, beside.forward, with_others(step.moments, beside)
    moments = (loading(base.weights), *step_moments, _optimizer_step(update))
    if policy.evaluation is not None:
        frees = policy.evaluation.frees_gradients and policy.buckets == "none"
        resident = statics - base.standing if frees else statics
        moments += evaluation_moments(model, kernels, policy.evaluation, resident)
    return Profile(
        moments=moments,
        statics=statics,
        static_total=per_axis(statics),
        kept=per_axis(step.kept + others),
        forward_end=per_axis(statics + step.forward_end + beside_end),
        backward_end=per_axis(statics + base.held + step.backward_end),
        lazy_states=base.states,
        lazy_phases=("forward", "loss") if policy.in_backward else ("forward", "loss", "backward"),
        host=per_axis(step.host),
        trained_parameters=base.parameters,
    )
