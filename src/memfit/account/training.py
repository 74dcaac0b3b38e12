"""The timeline of a training step as moments: forward, loss, backward, optimizer step; first step and steady state.

Kept activations grow through forward, the loss adds its chain, backward frees block after block while gradients grow; the step
holds gradients and its own scratch. Blocks repeat, so within a run of equal blocks only its two ends can be extreme.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.account.blocks import Conditions, Run, measure_segment, shared_forms
from memfit.account.forms import (
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATES,
    STRIDE,
    TEMPORARY,
    WEIGHTS,
    WORKSPACE,
    ZERO,
    Form,
    add,
    per_axis,
    scaled,
)
from memfit.account.liveness import Accumulation, BlockMemory
from memfit.account.profile import Moment, Profile, loading, pruned
from memfit.account.states import (
    Optimizer,
    Trained,
    gradient_bytes,
    state_bytes,
    step_scratch,
    tensors_of,
    trained_tensors,
    weight_bytes,
)
from memfit.kernels import KernelPolicy
from memfit.model import ONCE, SEQUENCE, TOKEN, Model
from memfit.precision import DTYPE_BYTES

ID_BYTES = 8
"""Token ids and labels are int64."""


class StepPolicy(NamedTuple):
    """What decides forward and backward beside the kernels."""

    checkpointed: bool
    outputs_kept: bool
    gradients_persist: bool
    """Gradients exist when forward begins: kept as zeros, or accumulated over micro-batches."""


class TrainingPolicy(NamedTuple):
    """What decides a training step beside the kernels."""

    optimizer: Optimizer
    checkpointed: bool
    outputs_kept: bool
    gradients_persist: bool
    workspace: int

    @property
    def step(self) -> StepPolicy:
        """The part that forward and backward depend on."""
        return StepPolicy(self.checkpointed, self.outputs_kept, self.gradients_persist)


def _tied(model: Model) -> frozenset[str]:
    return frozenset(
        one.tied_to for segment in model.segments for block in segment.blocks for one in block.parameters if one.tied_to
    )


class _Timeline:
    """Collects the moments of one step."""

    def __init__(self, tables: Form, mask: Form, *, checkpointed: bool) -> None:
        self.tables = tables
        self.mask = mask
        self.checkpointed = checkpointed
        self.moments: list[tuple[str, str, Form, bool]] = []

    def note(self, phase: str, where: str, base: Form, states: tuple[Form, ...]) -> None:
        self.moments += [(phase, where, add(base, state), False) for state in states]

    def forward(self, runs: list[Run]) -> tuple[list[Form], Form]:
        """Moments of forward and loss. Returns what is kept before each run, and the total."""
        kept, casts = ZERO, ZERO
        before: list[Form] = []
        seen: set[str] = set()
        for index, run in enumerate(runs):
            before.append(kept)
            kept = add(kept, _first_saves(run, seen))
            phase = "loss" if index == len(runs) - 1 and index else "forward"
            mask = self.mask if phase == "forward" or self.checkpointed else ZERO
            if phase == "forward" and index:
                mask = add(mask, self._embedded(runs))
            period_kept = add(*(run.kept(place) for place in range(len(run.blocks))))
            period_casts = add(*(one.region_casts for one in run.bare))
            kept = add(kept, scaled(period_kept, run.repeat - 1))
            casts = add(casts, scaled(period_casts, run.repeat - 1))
            for place, memory in enumerate(run.bare):
                self.note(phase, run.names[place], add(kept, casts, mask, self.tables), memory.forward)
                kept = add(kept, run.kept(place))
                casts = add(casts, memory.region_casts)
        return before, kept

    def _embedded(self, runs: list[Run]) -> Form:
        """The embedding's output, which the name `inputs_embeds` holds while the layers run, unless the first layer keeps it."""
        first = runs[1].blocks[0]
        return ZERO if self.checkpointed or first.input_saved else runs[0].blocks[-1].output

    def backward(self, runs: list[Run], before: list[Form], outputs: Form) -> None:
        """Moments of backward, in which gradients grow as activations shrink."""
        gradients = ZERO
        outside: dict[str, Form] = {}
        waiting: set[str] = set()
        mask = self.mask if self.checkpointed else ZERO
        for index in range(len(runs) - 1, -1, -1):
            run = runs[index]
            gradients = add(gradients, run.shared_gradients)
            held = ZERO if index == len(runs) - 1 else outputs
            period_kept = add(*(run.kept(place) for place in range(len(run.blocks))))
            period_gradients = add(*(one.gradients for one in run.blocks))
            for repeat in sorted({run.repeat - 1, 0}, reverse=True):
                passed = scaled(period_gradients, run.repeat - 1 - repeat)
                inside = add(before[index], scaled(period_kept, repeat))
                prefixes = [inside]
                for place in range(len(run.blocks)):
                    prefixes.append(add(prefixes[-1], run.kept(place)))
                later = ZERO
                for place in range(len(run.blocks) - 1, -1, -1):
                    memory = run.blocks[place]
                    base = add(prefixes[place], gradients, passed, later, held, mask, self.tables)
                    self._block(run, memory, base, run.names[place])
                    later = add(later, memory.gradients)
            gradients = add(gradients, scaled(period_gradients, run.repeat))
            # the gradient of what another segment provides waits until that segment's turn
            outside = dict(outside, **{name: form for one in run.blocks for name, form in one.externals_saved})
            gradients = add(gradients, *[as_temporary(form) for name, form in outside.items() if name not in waiting])
            waiting.update(outside)
            if run.provides in waiting:
                gradients = add(gradients, scaled(as_temporary(outside[run.provides]), -1))

    def _block(self, run: Run, memory: BlockMemory, base: Form, name: str) -> None:
        if not memory.backward:
            return
        if run.checkpointed:
            self.note("backward", f"recomputation of a {name}", add(base, memory.output), memory.forward)
            if not memory.input_saved:
                base = add(base, memory.input)
        self.note("backward", name, base, memory.backward)


def _first_saves(run: Run, seen: set[str]) -> Form:
    """Values from outside that this run's blocks are the first to save."""
    found = ZERO
    for memory in run.blocks:
        for name, form in memory.externals_saved:
            if name not in seen:
                seen.add(name)
                found = add(found, form)
    return found


def as_temporary(form: Form) -> Form:
    """The same bytes as a working tensor: the gradient of what was kept."""
    return {TEMPORARY + slot % STRIDE: value for slot, value in form.items()}


def _inputs(model: Model, kernels: KernelPolicy) -> Form:
    """Ids for every token or the pixels of every image, and labels for whatever the loss compares."""
    total: Form = (
        {INPUTS + SEQUENCE: model.pixels * DTYPE_BYTES[kernels.precision.weight]} if model.pixels else {INPUTS + TOKEN: ID_BYTES}
    )
    labels = {
        op.inputs[0].axis for segment in model.segments for block in segment.blocks for op in block.ops if op.kind == "loss"
    }
    return add(total, *[{INPUTS + axis: ID_BYTES} for axis in labels])


def _saved_inputs(model: Model, kernels: KernelPolicy) -> Form:
    """The batch's tensors that the first trained operation saves: ids by an embedding, pixels by a convolution without a cast."""
    if not kernels.train_all:
        return ZERO
    if not model.pixels:
        ids = {op.outputs[0].axis for segment in model.segments for block in segment.blocks for op in block.ops
               if op.kind == "embedding" and op.attributes["ids"] == "batch"}  # fmt: skip
        return add(*[{INPUTS + axis: ID_BYTES} for axis in ids]) if ids else ZERO
    cast = kernels.precision.autocast and kernels.precision.weight != kernels.precision.compute
    return ZERO if cast else {INPUTS + SEQUENCE: model.pixels * DTYPE_BYTES[kernels.precision.weight]}


class _Step(NamedTuple):
    """Forward and backward of a step, without what is there all the time."""

    moments: tuple[Moment, ...]
    kept: Form
    """What autograd holds at the end of forward, as saved-tensor hooks count it."""
    forward_end: Form
    backward_end: Form
    """What is left of them when backward has run: the outputs that the caller still holds."""


def _runs(model: Model, kernels: KernelPolicy, policy: StepPolicy) -> list[Run]:
    """The model's blocks in order of execution, measured."""
    tied, none = _tied(model), frozenset[str]()
    runs: list[Run] = []
    conditions = Conditions(kernels, Accumulation(), policy.outputs_kept, False, kernels.precision.weight)
    for index, segment in enumerate(model.segments):
        pending = tied if segment.role == "head" else none
        persists = policy.gradients_persist or segment.shared
        completes = tied if segment.role == "embedding" else none
        conditions = conditions._replace(accumulation=Accumulation(persists, pending, completes))
        checkpointed = policy.checkpointed and segment.role == "layers"
        if checkpointed and kernels.adapter is not None:
            # enable_input_require_grads, without which a checkpointed adapter gets no gradient
            conditions = conditions._replace(requires_grad=True)
        found, conditions = measure_segment(
            model, index, conditions, checkpointed=checkpointed, gradients_persist=policy.gradients_persist
        )
        runs += found
    return runs


@lru_cache(maxsize=256)
def _step(model: Model, kernels: KernelPolicy, policy: StepPolicy) -> _Step:
    """Shared by all jobs that differ only in the optimizer or the workspace."""
    runs = _runs(model, kernels, policy)
    tables, mask = shared_forms(model, kernels)
    timeline = _Timeline(tables, mask, checkpointed=policy.checkpointed)
    before, kept = timeline.forward(runs)
    last = runs[-1].blocks[-1]
    timeline.backward(runs, before, last.outputs)
    leaf = ZERO
    if policy.checkpointed and kernels.adapter is not None and len(runs) > 1:
        # the embedding's output is then a leaf: it and its gradient live until the outputs are dropped
        leaf = scaled(runs[0].blocks[-1].output, 2)
    return _Step(
        moments=pruned(timeline.moments),
        kept=add(kept, ZERO if policy.checkpointed else tables, _saved_inputs(model, kernels)),
        forward_end=add(kept, last.outputs_held, tables, mask if policy.checkpointed else ZERO),
        backward_end=add(last.outputs, leaf),
    )


class _Totals(NamedTuple):
    """Weights, trained tensors and inputs of a model under its kernels."""

    weights: Form
    trained: list[Trained]
    gradients: Form
    inputs: Form


@lru_cache(maxsize=256)
def _totals(model: Model, kernels: KernelPolicy) -> _Totals:
    tensors = tensors_of(model)
    trained = trained_tensors(tensors, kernels)
    adapters = sum(one.repeat * one.elements * DTYPE_BYTES[one.dtype] for one in trained if one.role == "adapter")
    weights = weight_bytes(tensors, kernels) + adapters + model.buffer_bytes
    return _Totals({WEIGHTS + ONCE: weights}, trained, {GRADIENTS + ONCE: gradient_bytes(trained)}, _inputs(model, kernels))


def resident_bytes(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> int:
    """Weights, optimizer states and gradients: what an optimizer step holds at the least."""
    totals = _totals(model, kernels)
    states = 0 if policy.optimizer.paged else state_bytes(policy.optimizer, totals.trained)
    return totals.weights[WEIGHTS + ONCE] + totals.gradients[GRADIENTS + ONCE] + states


def compile_training(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    """The profile of a training step."""
    step = _step(model, kernels, policy.step)
    totals = _totals(model, kernels)
    states = 0 if policy.optimizer.paged else state_bytes(policy.optimizer, totals.trained)
    statics = {
        **totals.weights,
        **totals.inputs,
        OPTIMIZER_STATES + ONCE: states,
        WORKSPACE + ONCE: policy.workspace,
        **(totals.gradients if policy.gradients_persist else ZERO),
    }
    held = ZERO if policy.gradients_persist else totals.gradients
    scratch: Form = {TEMPORARY + ONCE: step_scratch(policy.optimizer, totals.trained)}
    update = add(held, step.backward_end, scratch)
    return Profile(
        moments=(loading(totals.weights), *step.moments, Moment("optimizer-step", "optimizer", update, per_axis(update))),
        statics=statics,
        static_total=per_axis(statics),
        kept=per_axis(step.kept),
        forward_end=per_axis(add(statics, step.forward_end)),
        backward_end=per_axis(add(statics, held, step.backward_end)),
        lazy_states=states,
        trained_parameters=sum(one.repeat * one.elements for one in totals.trained),
    )
