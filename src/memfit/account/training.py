"""The timeline of a training step as moments: forward, loss, backward, optimizer step; first step and steady state.

Kept activations grow through forward, the loss adds its chain, backward frees block after block while gradients grow; the step
holds gradients and its own scratch. Blocks repeat, so within a run of equal blocks only its two ends can be extreme.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.forms import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATES,
    TEMPORARY,
    WEIGHTS,
    WORKSPACE,
    ZERO,
    Form,
    add,
    per_axis,
    scaled,
)
from memfit.account.liveness import Accumulation, BlockMemory, measure, measure_forward
from memfit.account.profile import Profile, pruned
from memfit.account.states import Optimizer, gradient_bytes, state_bytes, step_scratch, tensors_of, trained_tensors, weight_bytes
from memfit.kernels import KernelPolicy, lower
from memfit.model import ONCE, PAIR, POSITION, POSITION_PAIR, TOKEN, Block, Model, Segment
from memfit.precision import DTYPE_BYTES

ID_BYTES = 8
"""Token ids and labels are int64."""


class TrainingPolicy(NamedTuple):
    """What decides a training step beside the kernels."""

    optimizer: Optimizer
    checkpointed: bool
    outputs_kept: bool
    gradients_persist: bool
    """Gradients exist when forward begins: kept as zeros, or accumulated over micro-batches."""
    workspace: int


class _Run(NamedTuple):
    """Equal blocks in a row: the memory of each of the period, with and without autograd, and how often the period repeats."""

    names: tuple[str, ...]
    blocks: tuple[BlockMemory, ...]
    bare: tuple[BlockMemory, ...]
    repeat: int
    checkpointed: bool

    def kept(self, index: int) -> Form:
        """What one block leaves for backward: all it saves, or only its input when checkpointed."""
        return self.blocks[index].input if self.checkpointed else self.blocks[index].kept


def shared_forms(model: Model, kernels: KernelPolicy) -> tuple[Form, Form]:
    """Tensors that all layers share: rotary tables, and the mask that the backbone makes once (1 byte, for eager the format)."""
    dtype = DTYPE_BYTES[kernels.precision.weight]
    tables = {ACTIVATIONS + POSITION: 2 * model.rotary_dim * dtype} if model.rotary_dim else ZERO
    axis = PAIR if kernels.padded else POSITION_PAIR
    if kernels.attention == "eager":
        return tables, {TEMPORARY + axis: dtype} if model.kind == "decoder" or kernels.padded else ZERO
    if kernels.attention == "sdpa" and (kernels.padded or kernels.binding_windows):
        return tables, {TEMPORARY + axis: 1}
    return tables, ZERO


def _measure_segment(
    segment: Segment, kernels: KernelPolicy, policy: TrainingPolicy, requires: bool, dtype: str, accumulation: Accumulation
) -> tuple[list[_Run], bool, str]:
    """The runs of a segment: one, or two when its first period sees an input that needs no gradient or has another format."""
    runs: list[_Run] = []
    left = segment.repeat
    checkpointed = policy.checkpointed and segment.role == "layers"
    while left:
        before = (requires, dtype)
        blocks, bare = [], []
        for block in segment.blocks:
            memory, without = _measure_block(block, kernels, policy, requires, dtype, accumulation, segment.role, checkpointed)
            blocks.append(memory)
            bare.append(without)
            requires, dtype = memory.output_requires_grad, memory.output_dtype
        count = left if before == (requires, dtype) else 1
        runs.append(_Run(tuple(block.name for block in segment.blocks), tuple(blocks), tuple(bare), count, checkpointed))
        left -= count
    return runs, requires, dtype


def _measure_block(
    block: Block,
    kernels: KernelPolicy,
    policy: TrainingPolicy,
    requires: bool,
    dtype: str,
    accumulation: Accumulation,
    role: str,
    checkpointed: bool,
) -> tuple[BlockMemory, BlockMemory]:
    lowered = lower(block, kernels, input_requires_grad=requires, input_dtype=dtype)
    memory = measure(lowered, accumulation=accumulation, outputs_kept=policy.outputs_kept, is_last=role == "head")
    if not checkpointed:
        return memory, memory
    return memory, measure_forward(lowered)


def _tied(model: Model) -> frozenset[str]:
    return frozenset(
        one.tied_to for segment in model.segments for block in segment.blocks for one in block.parameters if one.tied_to
    )


class _Timeline:
    """Collects the moments of one step."""

    def __init__(self, statics: Form, mask: Form, *, checkpointed: bool) -> None:
        self.statics = statics
        self.mask = mask
        self.checkpointed = checkpointed
        self.moments: list[tuple[str, str, Form, bool]] = []

    def note(self, phase: str, where: str, *parts: Form) -> None:
        self.moments.append((phase, where, add(self.statics, *parts), False))

    def forward(self, runs: list[_Run]) -> tuple[list[Form], Form]:
        """Moments of forward and loss. Returns what is kept before each run, and the total."""
        kept, casts = ZERO, ZERO
        before: list[Form] = []
        for index, run in enumerate(runs):
            before.append(kept)
            phase = "loss" if index == len(runs) - 1 and index else "forward"
            mask = self.mask if phase == "forward" or self.checkpointed else ZERO
            period_kept = add(*(run.kept(place) for place in range(len(run.blocks))))
            period_casts = add(*(one.region_casts for one in run.bare))
            kept = add(kept, scaled(period_kept, run.repeat - 1))
            casts = add(casts, scaled(period_casts, run.repeat - 1))
            for place, memory in enumerate(run.bare):
                for state in memory.forward:
                    self.note(phase, run.names[place], kept, casts, state, mask)
                kept = add(kept, run.kept(place))
                casts = add(casts, memory.region_casts)
        return before, kept

    def backward(self, runs: list[_Run], before: list[Form], outputs: Form) -> None:
        """Moments of backward, in which gradients grow as activations shrink."""
        gradients = ZERO
        mask = self.mask if self.checkpointed else ZERO
        for index in range(len(runs) - 1, -1, -1):
            run = runs[index]
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
                    base = add(prefixes[place], gradients, passed, later, held, mask)
                    self._block(run, memory, base, run.names[place])
                    later = add(later, memory.gradients)
            gradients = add(gradients, scaled(period_gradients, run.repeat))

    def _block(self, run: _Run, memory: BlockMemory, base: Form, name: str) -> None:
        if not memory.backward:
            return
        if run.checkpointed:
            for state in memory.forward:
                self.note("backward", f"recomputation of a {name}", base, state, memory.output)
            if not memory.input_saved:
                base = add(base, memory.input)
        for state in memory.backward:
            self.note("backward", name, base, state)


def _inputs(model: Model) -> Form:
    """Ids for every token, and labels for whatever the loss compares: every token, or every sequence."""
    labels = {
        op.inputs[0].axis for segment in model.segments for block in segment.blocks for op in block.ops if op.kind == "loss"
    }
    return add({INPUTS + TOKEN: ID_BYTES}, *[{INPUTS + axis: ID_BYTES} for axis in labels])


def compile_training(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    """The profile of a training step."""
    tensors = tensors_of(model)
    trained = trained_tensors(tensors, kernels)
    tied = _tied(model)
    runs: list[_Run] = []
    requires, dtype = False, kernels.precision.weight
    for segment in model.segments:
        accumulation = Accumulation(
            policy.gradients_persist,
            tied if segment.role == "head" else frozenset(),
            tied if segment.role == "embedding" else frozenset(),
        )
        found, requires, dtype = _measure_segment(segment, kernels, policy, requires, dtype, accumulation)
        if segment.role == "embedding" and policy.checkpointed and kernels.adapter is not None:
            requires = True  # enable_input_require_grads, without which a checkpointed adapter gets no gradient
        runs += found

    gradients: Form = {GRADIENTS + ONCE: gradient_bytes(trained)}
    states = state_bytes(policy.optimizer, trained)
    adapters = sum(one.repeat * one.elements * DTYPE_BYTES[one.dtype] for one in trained if one.role == "adapter")
    weights: Form = {WEIGHTS + ONCE: weight_bytes(tensors, kernels) + adapters + model.buffer_bytes}
    statics = {
        **weights,
        OPTIMIZER_STATES + ONCE: 0 if policy.optimizer.paged else states,
        **_inputs(model),
        WORKSPACE + ONCE: policy.workspace,
        **(gradients if policy.gradients_persist else ZERO),
    }
    tables, mask = shared_forms(model, kernels)
    timeline = _Timeline(add(statics, tables), mask, checkpointed=policy.checkpointed)
    before, kept = timeline.forward(runs)
    last = runs[-1].blocks[-1]
    timeline.backward(runs, before, last.outputs)
    held = ZERO if policy.gradients_persist else gradients
    scratch: Form = {TEMPORARY + ONCE: step_scratch(policy.optimizer, trained)}
    moments = [
        ("load", "weights", weights, False),
        *timeline.moments,
        ("optimizer-step", "optimizer", add(statics, held, last.outputs, scratch), False),
    ]
    # a trained embedding saves the ids, which are counted with the inputs
    ids: Form = {INPUTS + TOKEN: ID_BYTES} if kernels.train_all else ZERO
    return Profile(
        moments=pruned(moments),
        kept=per_axis(add(kept, ZERO if policy.checkpointed else tables, ids)),
        forward_end=per_axis(add(statics, kept, last.outputs_held, tables, mask if policy.checkpointed else ZERO)),
        backward_end=per_axis(add(statics, held, last.outputs)),
        lazy_states=statics[OPTIMIZER_STATES + ONCE],
    )
