"""Measures a model's blocks under the conditions of a job, each once; equal blocks in a row become one run.

The optimizer, checkpointing and batch of a job change nothing here, so that alternatives of one job share what was measured.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.account.crossing import Accumulation, BlockMemory
from memfit.account.forms import ACTIVATIONS, GRADIENTS, TEMPORARY, ZERO, Form, form
from memfit.account.liveness import Recorded, measure_checkpointed, measure_recorded, record
from memfit.account.residents import unit_of
from memfit.account.selection import stretches
from memfit.kernels import Externals, KernelPolicy, lower
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import ONCE, PAIR, POSITION, POSITION_PAIR, Model
from memfit.model.description import CROSS_PAIR, TARGET_PAIR
from memfit.model.remember import of_model
from memfit.precision import DTYPE_BYTES


class Run(NamedTuple):
    """Equal blocks in a row: the memory of each of the period, with and without autograd, and how often the period repeats."""

    names: tuple[str, ...]
    turns: tuple[tuple[BlockMemory, ...], ...]
    """The period as its repeats meet it in backward, the last one first; further repeats are as the last entry."""
    bare: tuple[BlockMemory, ...]
    """The period as forward runs it: without autograd where it is checkpointed."""
    repeat: int
    spans: tuple[tuple[int, int], ...]
    """Checkpoints within the period: the first place of each and the one after its last."""
    role: str
    provides: str
    shared: bool
    once: Form = ZERO
    """What repeats that share their parameters keep once: autocast's copies of them."""
    settled: Form = ZERO
    """What the end of its backward adds to gradients of shared parameters: they become fp32, or are added to older ones."""
    unit: str = ""
    """The checkpointed module around it, if there is one: forward keeps that module's input only."""
    offloaded: bool = False
    """The checkpoints' inputs wait in host memory."""

    @property
    def blocks(self) -> tuple[BlockMemory, ...]:
        """The period's memory; all its turns keep the same."""
        return self.turns[0]

    def turn(self, number: int) -> tuple[BlockMemory, ...]:
        """The period as it is met after `number` others of this run in backward."""
        return self.turns[min(number, len(self.turns) - 1)]

    def gradients(self, number: int) -> Form:
        """Gradients of the first `number` turns."""
        last = len(self.turns) - 1
        if not last:
            return sum([one.gradients for one in self.turns[0]]) * number
        found = ZERO
        for turn, blocks in enumerate(self.turns):
            times = min(1, max(0, number - turn)) if turn < last else max(0, number - last)
            found += sum([one.gradients for one in blocks]) * times
        return found

    def span(self, place: int) -> tuple[int, int] | None:
        """The checkpoint that a block of the period runs under."""
        return next((one for one in self.spans if one[0] <= place < one[1]), None) if self.spans else None

    def kept(self, index: int) -> Form:
        """What one block leaves for backward: all it saves, or its checkpoint's input and what the checkpoint keeps beside.

        Casts of weights that all repeats share are not in it: see `once`.
        """
        memory, span = self.blocks[index], self.span(index)
        if span is not None:
            if not memory.output_requires_grad:
                return ZERO
            chosen = self.bare[index].kept
            return chosen if self.offloaded or index != span[0] else chosen + memory.input
        return memory.kept - memory.casts_saved if self.shared else memory.kept


def masks_of(model: Model, kernels: KernelPolicy) -> tuple[Form, ...]:
    """Masks of each stack of layers: of the only one, or of the encoder and the decoder.

    Padding reaches the decoder through its attention to the source only: no collator makes a mask of the target.
    """
    if not model.encoder_decoder:
        return (shared_forms(model, kernels)[1],)
    entry = {"eager": DTYPE_BYTES[kernels.precision.weight], "sdpa": 1}.get(kernels.attention, 0) if kernels.padded else 0
    causal = form(TEMPORARY, TARGET_PAIR, DTYPE_BYTES[kernels.precision.weight]) if kernels.attention == "eager" else ZERO
    return form(TEMPORARY, PAIR, entry), causal + form(TEMPORARY, CROSS_PAIR, entry)


def shared_forms(model: Model, kernels: KernelPolicy) -> tuple[Form, Form]:
    """Tensors that all layers share: rotary tables, and the masks that the backbone makes once.

    Full and sliding layers have a mask each. For eager it is a tensor in the weights' format with a batch dimension, for sdpa
    1 byte an entry, expanded over the batch unless padding differs; sdpa needs none where nothing is padded and no window binds,
    FlashAttention never.
    """
    dtype = DTYPE_BYTES[kernels.precision.weight]
    table = model.rotary_tables * (model.rotary_dim or 0) * (4 if model.rotary_fp32 else dtype)
    tables = ZERO if KERNEL_SETS[kernels.kernels].table_buffer else form(ACTIVATIONS, POSITION, 2 * table)
    kinds = model.attention_windows or {None}
    if model.mask == "own":
        masks, entry = 0, 0
    elif kernels.attention == "eager":
        all_kinds = model.kind == "decoder" or kernels.padded
        masks, entry = len(kinds) if all_kinds else len(kinds.intersection(kernels.binding_windows)), dtype
    elif kernels.attention == "sdpa":
        all_kinds = kernels.padded or model.mask == "always" or kernels.prefix is not None
        masks, entry = len(kinds) if all_kinds else len(kinds.intersection(kernels.binding_windows)), 1
    else:
        masks, entry = 0, 0
    axis = PAIR if kernels.padded or kernels.attention == "eager" else POSITION_PAIR
    saved, passing = _backbone_tensors(model, kernels)
    return tables + saved, form(TEMPORARY, axis, masks * entry) + passing


def _backbone_tensors(model: Model, kernels: KernelPolicy) -> tuple[Form, Form]:
    """The model's own shared tensors: those that attention keeps as they are, and those that only the backbone holds."""
    saved, passing = ZERO, ZERO
    casts = kernels.precision.autocast and kernels.precision.weight != kernels.precision.compute
    for one in model.shared:
        if kernels.attention in one.kernels:
            num_bytes = one.width * DTYPE_BYTES[one.dtype or kernels.precision.weight]
            if one.saved and not (casts and one.dtype is None):
                saved += form(ACTIVATIONS, one.axis, num_bytes)
            else:
                passing += form(TEMPORARY, one.axis, num_bytes)
    return saved, passing


@lru_cache(maxsize=256)
def relevant(kernels: KernelPolicy, role: str, quantizable: bool) -> KernelPolicy:
    """The policy without what a part of the model does not depend on, so that jobs that differ only there share its measure."""
    if role == "layers":
        return kernels._replace(loss="eager", loss_chunks=8, logits_last=False, generating=False)
    same = kernels._replace(
        attention="sdpa",
        padded=False,
        binding_windows=(),
        device_capability=None,
        attention_copies=False,
        one_sequence=False,
        cache="",
        decoding=False,
        kv_dtype="",
        filled=False,
        causal_mask=False,
        prefix=None,
        ring=None,
    )
    if not quantizable:
        same = same._replace(quantized=None)
    return same if role == "head" else same._replace(loss="eager", logits_last=False, generating=False)


@of_model(256)
def quantizable(model: Model, index: int) -> bool:
    """Whether a segment has weights that a quantised format would change."""
    return any(one.role == "linear" for block in model.segments[index].blocks for one in block.parameters)


class Conditions(NamedTuple):
    """What one block's memory depends on beside the block: a key for what was measured before."""

    kernels: KernelPolicy
    accumulation: Accumulation
    outputs_kept: bool
    requires_grad: bool
    dtype: str
    externals: Externals = ()


def _measured(model: Model, segment: int, place: int, conditions: Conditions) -> BlockMemory:
    """A block that autograd records. The optimizer and checkpointing of the job change nothing here.

    Remembered by block: pipeline stages are models of their own with the same blocks.
    """
    block = model.segments[segment].blocks[place]
    by_unit = conditions.kernels.precision.by_unit
    key = (id(block), conditions, model.tied if by_unit else None)
    found = model.memory_of_blocks.get(key)
    if found is None:
        memory = _measure(model, segment, place, conditions)
        if by_unit:
            memory = memory._replace(unit=unit_of(model, block, conditions.kernels, conditions.accumulation))
        found = model.memory_of_blocks[key] = (block, memory)  # the block stays, so that no other gets its id
    return found[1]


def _measure(model: Model, segment: int, place: int, conditions: Conditions) -> BlockMemory:
    recorded = _recorded(
        model, segment, place, conditions.kernels, conditions.requires_grad, conditions.dtype, conditions.externals
    )
    is_last = model.segments[segment].role == "head"
    return measure_recorded(recorded, accumulation=conditions.accumulation, outputs_kept=conditions.outputs_kept, is_last=is_last)


def _measured_bare(
    model: Model,
    segment: int,
    place: int,
    kernels: KernelPolicy,
    requires_grad: bool,
    dtype: str,
    externals: Externals,
    operators: tuple[str, ...],
) -> BlockMemory:
    """A block whose forward runs without autograd: under a checkpoint, which keeps the outputs of some operators."""
    block = model.segments[segment].blocks[place]
    key = (id(block), kernels, requires_grad, dtype, externals, operators)
    found = model.memory_of_blocks.get(key)
    if found is None:
        recorded = _recorded(model, segment, place, kernels, requires_grad, dtype, externals)
        memory = measure_checkpointed(recorded, recorded.lowered.tape.outputs_of(operators))
        found = model.memory_of_blocks[key] = (block, memory)
    return found[1]


def _bare(model: Model, index: int, place: int, met: Conditions, operators: tuple[str, ...]) -> BlockMemory:
    """The same under the conditions that matter: nothing becomes of gradients in a forward pass."""
    place = _same(model, index, place)
    return _measured_bare(model, index, place, met.kernels, met.requires_grad, met.dtype, met.externals, operators)


@of_model(8)
def _recorded(
    model: Model, segment: int, place: int, kernels: KernelPolicy, requires_grad: bool, dtype: str, externals: Externals
) -> Recorded:
    """Few are remembered: a tape takes more room than what is measured of it, and is asked for again soon or not at all."""
    block = model.segments[segment].blocks[place]
    return record(lower(block, kernels, input_requires_grad=requires_grad, input_dtype=dtype, externals=externals))


def _waiting(model: Model, index: int, place: int, *, first: bool) -> frozenset[str]:
    """Values from outside whose gradient was begun before this block's turn in backward."""
    segments = model.segments
    users = [block for segment in segments[index + 1 :] for block in segment.blocks]
    users += segments[index].blocks if not first else segments[index].blocks[place + 1 :]
    return frozenset([name for block in users for name, _ in block.externals])


def _turn(model: Model, index: int, place: int, conditions: Conditions, turn: int) -> BlockMemory:
    """A block of the period that is met after `turn` others of its segment in backward."""
    shared = model.segments[index].shared
    if shared or model.reads_across_blocks:
        repeated = ("first", "second", "later")[min(turn, 2)] if shared else ""
        waiting = _waiting(model, index, place, first=turn == 0) if model.reads_across_blocks else frozenset()
        accumulation = conditions.accumulation._replace(repeated=repeated, waiting=waiting)
        conditions = conditions._replace(accumulation=accumulation)
    return _measured(model, index, _same(model, index, place), conditions)


def _same(model: Model, index: int, place: int) -> int:
    """The first place of the period with this very block, so that it is measured once."""
    blocks = model.segments[index].blocks
    return next(number for number, block in enumerate(blocks) if block is blocks[place])


class _Segment(NamedTuple):
    """What a segment was measured as, and what it hands on."""

    runs: tuple[Run, ...]
    requires_grad: bool
    dtype: str
    provided: Externals


def measure_segment(
    model: Model, index: int, given: Conditions, *, checkpointed: bool, operators: tuple[str, ...] = (), once: bool = True
) -> tuple[tuple[Run, ...], Conditions]:
    """The runs of a segment: one, or two when its first period meets other conditions than the rest (no gradient, a format).

    `operators`: those whose outputs a checkpoint keeps. `once`: repeats that share parameters keep autocast's copies of them.

    Returns them and the conditions that the next segment meets.
    """
    segment = model.segments[index]
    kept = given.outputs_kept and (segment.role == "head" or bool(given.kernels.cache))
    kernels = relevant(given.kernels, segment.role, quantizable(model, index))
    conditions = Conditions(kernels, given.accumulation, kept, given.requires_grad, given.dtype, given.externals)
    # what plays no part in it is left out of the key
    found = _segment(model, index, conditions, checkpointed, operators if checkpointed else (), once and segment.shared)
    requires_grad, dtype, externals = found.requires_grad, found.dtype, (*given.externals, *found.provided)
    if segment.provides:
        externals += ((segment.provides, dtype, requires_grad),)
        requires_grad, dtype = False, given.kernels.precision.weight
    return found.runs, Conditions(given.kernels, given.accumulation, given.outputs_kept, requires_grad, dtype, externals)


@of_model(256)
def _segment(
    model: Model, index: int, conditions: Conditions, checkpointed: bool, operators: tuple[str, ...], once: bool
) -> _Segment:
    """See `measure_segment`; a job's alternatives share the segments that they do not change."""
    segment, given = model.segments[index], conditions
    places = range(len(segment.blocks))
    kinds_of_turns = 3 if segment.shared else 2 if any(block.externals for block in segment.blocks) else 1
    alike = kinds_of_turns == 1 and not model.reads_across_blocks
    provided: list[tuple[str, str, bool]] = []
    runs: list[Run] = []
    choice = conditions.kernels.choice
    parts = list(stretches(model, choice)[index]) if choice else []
    left = segment.repeat
    while left:
        met = []
        memories = []
        begun = conditions
        for place in places:
            asked = conditions
            if parts:
                asked = conditions._replace(kernels=conditions.kernels._replace(trained=parts[0].trained[place]))
            met.append(asked)
            memory = _turn(model, index, place, asked, 0)
            memories.append(memory)
            provided = [(one.name, one.dtype, one.requires_grad) for one in memory.provided] + provided
            becomes = (memory.output_requires_grad, memory.output_dtype)
            if becomes != (conditions.requires_grad, conditions.dtype):
                conditions = conditions._replace(requires_grad=becomes[0], dtype=becomes[1])
        alike_left = parts[0].repeat if parts else left
        count = alike_left if begun is conditions else 1
        left -= count
        if parts:
            parts = parts[1:] if count == alike_left else [parts[0]._replace(repeat=alike_left - count), *parts[1:]]
        period = tuple(memories)
        met_in_backward = (
            (period,)
            if alike
            else tuple(
                [
                    tuple([_turn(model, index, place, met[place], turn) for place in places])
                    for turn in range(left, left + min(count, kinds_of_turns))
                ]
            )
        )
        runs.append(
            Run(
                tuple([block.name for block in segment.blocks]),
                met_in_backward,
                tuple([_bare(model, index, place, met[place], operators) for place in places])
                if checkpointed
                else met_in_backward[0],
                count,
                tuple([(place, place + 1) for place in places]) if checkpointed else (),
                segment.role,
                segment.provides,
                segment.shared,
                _casts(model, index, met) if segment.shared and not runs and once else ZERO,
                _settled(model, index, given, met) if segment.shared and not runs else ZERO,
            )
        )
    return _Segment(tuple(runs), conditions.requires_grad, conditions.dtype, tuple(provided))


def _casts(model: Model, index: int, met: list[Conditions]) -> Form:
    """Autocast's copies of a period's weights that nodes save."""
    return sum([_turn(model, index, place, conditions, 0).casts_saved for place, conditions in enumerate(met)])


def _settled(model: Model, index: int, given: Conditions, met: list[Conditions]) -> Form:
    """Shared parameters: their gradients in the parameters' format, or nothing if older ones exist, less those that waited."""
    waited = [_turn(model, index, place, conditions, 0).gradients for place, conditions in enumerate(met)]
    blocks = model.segments[index].blocks
    format_bytes = DTYPE_BYTES[given.kernels.precision.weight]
    if not given.kernels.train_all and not given.kernels.choice:
        return ZERO
    own = [
        one.num_elements
        for block, conditions in zip(blocks, met, strict=True)
        for one in block.parameters
        if conditions.kernels.trained is None or one.name in conditions.kernels.trained
    ]
    full = form(GRADIENTS, ONCE, sum(own) * format_bytes)
    return (ZERO if given.accumulation.persist else full) - sum(waited)
