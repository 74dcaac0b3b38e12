"""The moments of forward and backward, run by run: what is kept, what waits, what names and outputs hold."""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.blocks import Run
from memfit.account.checkpoints import Checkpointing
from memfit.account.crossing import BlockMemory, Unit
from memfit.account.forms import ZERO, Form, as_temporary
from memfit.account.sharding import UNSHARDED, Sharding


class StepPolicy(NamedTuple):
    """What decides forward and backward beside the kernels."""

    checkpointing: Checkpointing
    outputs_kept: bool
    gradients_persist: bool
    """Gradients exist when forward begins: kept as zeros, accumulated over micro-batches, or views of DDP's buckets."""
    step_scratch: int = -1
    """See `Accumulation`."""
    keeps_sent: bool = False
    """A pipeline stage's output stays until its micro-batch's backward is through."""
    early_stop: bool = True
    """A checkpoint that runs again stops at the last tensor that backward needs."""
    sharding: Sharding = UNSHARDED


class _Outside(NamedTuple):
    """A value that one run provides and later ones read: the encoder's output, a position bias that layers share."""

    form: Form
    provider: int
    first: int
    last: int
    """The first and the last run that read it."""
    saved: bool
    """A node, or a checkpoint of a layer that reads it, keeps it for backward; once, however many do."""
    returned: bool
    """One of the model's outputs."""
    leaf: bool
    """Its gradient stays on it when its provider is through backward, and both as long as the graph."""


def _outside_values(runs: list[Run]) -> dict[str, _Outside]:
    """Values from outside by name, with the places of those who read them."""
    found: dict[str, _Outside] = {}
    provided: dict[str, _Outside] = {}
    for index, run in enumerate(runs):
        for place, memory in enumerate(run.blocks):
            checkpointed = run.span(place) is not None
            for read in memory.read:
                one = found.get(read.name, provided[read.name]._replace(first=index))
                # what its provider keeps as well is counted there
                kept = bool(one.form) and (read.saved or checkpointed)
                found[read.name] = one._replace(last=index, saved=one.saved or kept, form=read.form if kept else one.form)
            for value in memory.provided:
                form = ZERO if value.saved and not checkpointed else value.form
                provided[value.name] = _Outside(form, index, index, index, saved=False, returned=False, leaf=value.leaf)
        if run.provides:
            form = run.blocks[-1].output
            provided[run.provides] = _Outside(form, index, index, index, saved=False, returned=True, leaf=False)
    return found


class Timeline:
    """Collects the moments of one step."""

    def __init__(self, runs: list[Run], tables: Form, masks: tuple[Form, ...], policy: StepPolicy, *, masks_saved: bool) -> None:
        self.runs = runs
        self.tables = tables
        self.checkpointed = policy.checkpointing.recomputes
        self.masks_stay = self.checkpointed or masks_saved
        self.outputs_kept, self.early_stop = policy.outputs_kept, policy.early_stop
        self.outside = _outside_values(runs)
        self.kept = [[run.kept(place) for place in range(len(run.names))] for run in runs]
        """By run: what each block of its period leaves for backward."""
        self.masks = self._masks(masks)
        self.moments: list[tuple[str, str, Form, bool]] = []

    def _masks(self, masks: tuple[Form, ...]) -> list[Form]:
        """The masks that live during each run: of its stack; under checkpoints also those of the stacks before it."""
        found, stack = [], -1
        for run in self.runs:
            stack = min(stack + (run.role == "embedding" or stack < 0), len(masks) - 1)
            found.append(sum(masks[: stack + 1]) if self.masks_stay else masks[stack])
        return found

    def note(self, phase: str, where: str, base: Form, states: tuple[Form, ...]) -> None:
        self.moments += [(phase, where, base + state, False) for state in states]

    def outside_kept(self) -> Form:
        """What is kept for backward of values from outside."""
        return sum([one.form for one in self.outside.values() if one.saved])

    def cache(self, *, beside_kept: bool = False) -> Form:
        """Keys and values in the cache object that the caller holds with the model's outputs."""
        if not self.outputs_kept:
            return ZERO
        parts = 1 if beside_kept else 2
        return sum([sum(memory.returned[:parts]) * run.repeat for run in self.runs for memory in run.blocks])

    def returned(self, *, beside_kept: bool = False) -> Form:
        """Values from outside that the caller holds as the model's outputs."""
        if not self.outside:
            return ZERO
        held = [one for one in self.outside.values() if one.returned and self.outputs_kept]
        return sum([one.form for one in held if not (beside_kept and one.saved)])

    def _outside_forward(self, index: int) -> Form:
        """Values from outside that are alive while this run runs forward: kept, returned at the end, or bound to a name."""
        if not self.outside:
            return ZERO
        values = self.outside.values()
        return sum([one.form for one in values if one.provider < index and (one.saved or one.returned or index <= one.last)])

    def _outside_backward(self, index: int) -> Form:
        """Values from outside that are alive while this run runs backward."""
        if not self.outside:
            return ZERO
        values = self.outside.values()
        held = [
            one.form for one in values if (one.saved and index >= one.first) or (one.returned and self.outputs_kept) or one.leaf
        ]
        return sum(held) + sum([one.form for one in values if one.leaf and index < one.provider])

    def leaves(self) -> Form:
        """Leaves from outside and their gradients, which the graph holds when backward has run."""
        return 2 * sum([one.form for one in self.outside.values() if one.leaf])

    def forward(self) -> tuple[list[Form], Form]:
        """Moments of forward and loss. Returns what is kept before each run, and the total."""
        kept, casts, embedded, recomputed = ZERO, ZERO, ZERO, ZERO
        before: list[Form] = []
        for index, run in enumerate(self.runs):
            kept += run.once
            enters = not index or run.unit != self.runs[index - 1].unit
            recomputed = ZERO if enters else recomputed
            before.append(kept + recomputed)
            phase = "loss" if run.role == "head" and index == len(self.runs) - 1 and index else "forward"
            if index and run.role != "embedding":
                held = self.masks[index] + embedded if phase == "forward" else self.masks[index] if self.masks_stay else ZERO
            else:
                held = self.masks[index] if phase == "forward" or self.masks_stay else ZERO
            held += self._outside_forward(index) + self.tables
            period_kept = sum(self.kept[index])
            if run.unit:
                source = self.kept[index][0] if enters else ZERO
                self._nested(run, phase, kept + casts + held, source)
                kept, recomputed = kept + source, recomputed + period_kept * run.repeat - source
                casts += sum([one.region_casts for one in run.bare]) * run.repeat
                continue
            period_casts = sum([one.region_casts + one.returned[0] for one in run.bare])
            kept += period_kept * (run.repeat - 1)
            casts += period_casts * (run.repeat - 1)
            for place, memory in enumerate(run.bare):
                base = kept + casts + held + _in_transit(run, memory)
                unit = run.blocks[place].unit
                if unit is not None:
                    base += unit.weights
                    self.note(phase, f"cast of a {run.names[place]}'s weights", base + memory.input, (unit.casting,))
                self.note(phase, run.names[place], base, memory.forward)
                kept += self.kept[index][place]
                casts += memory.region_casts + memory.returned[0]
            if run.role == "receive":
                kept += self.received()  # the pipeline holds it until its gradient is sent back
            elif run.role == "embedding" or not index:
                embedded = self._embedded(index)
        return before, kept

    def received(self) -> Form:
        """The hidden states that a pipeline stage received, unless its first layer keeps them itself."""
        if self.runs[0].role != "receive" or not self._embedded(0):
            return ZERO
        return self.runs[1].blocks[0].input

    def _nested(self, run: Run, phase: str, base: Form, source: Form) -> None:
        """Moments of layers within a checkpointed module: forward keeps `source`, the module's input, where they begin with it.

        What they keep themselves is there from the module's recomputation on.
        """
        for place, memory in enumerate(run.bare):
            first = run.repeat == 1 and place == 0
            self.note(phase, run.names[place], base if first else base + source, memory.forward)

    def _embedded(self, index: int) -> Form:
        """The embedding's output, which the name `inputs_embeds` holds while the layers run, unless the first layer keeps it."""
        if index + 1 == len(self.runs):
            return ZERO
        following = self.runs[index + 1]
        if self.checkpointed and not following.offloaded and (following.span(0) or following.role != "layers"):
            return ZERO
        if following.span(0) is None and following.blocks[0].input_saved:
            return ZERO
        return self.runs[index].blocks[-1].output

    def backward(self, before: list[Form], outputs: Form) -> None:
        """Moments of backward, in which gradients grow as activations shrink."""
        grown = ZERO  # gradients, and keys and values that only the cache still holds
        cache = self.cache(beside_kept=True)
        waiting: dict[str, Form] = {}
        reducing = ZERO  # the input of the last unit's reduction
        for index in range(len(self.runs) - 1, -1, -1):
            run = self.runs[index]
            waiting.pop(run.provides, None)  # it is the gradient from which this run's backward begins
            held = self.tables + self._outside_backward(index)
            held += ZERO if index == len(self.runs) - 1 and run.role == "head" else outputs
            held += self.masks[index] if self.masks_stay else ZERO
            held += cache
            released = [memory.returned[1] if self.outputs_kept else ZERO for memory in run.blocks]
            period_released = sum(released)
            period_kept = sum(self.kept[index])
            turns = {0, run.repeat - 1, *range(min(len(run.turns), run.repeat))}
            for turn in sorted(turns):
                inside = before[index] + period_kept * (run.repeat - 1 - turn)
                prefixes = [inside]
                for kept in self.kept[index]:
                    prefixes.append(prefixes[-1] + kept)
                later = grown + run.gradients(turn) + period_released * turn
                blocks = run.turn(turn)
                for place in range(len(blocks) - 1, -1, -1):
                    memory = blocks[place]
                    span = run.span(place)
                    base = prefixes[place if span is None else span[0]] + later + held
                    unit = memory.unit
                    cast = ZERO if unit is None else unit.weights + reducing
                    self._block(run, blocks, place, base + cast, waiting)
                    if unit is not None:
                        self._reduce(run, place, base, cast, memory, unit)
                        reducing = unit.reduced or reducing
                    later += memory.gradients + released[place]
                    if memory.read:
                        waiting.update({one.name: as_temporary(one.form) for one in memory.read if one.requires_grad})
                    for value in memory.provided:
                        waiting.pop(value.name, None)
            grown += run.gradients(run.repeat) + run.settled + period_released * run.repeat

    def _block(self, run: Run, blocks: tuple[BlockMemory, ...], place: int, base: Form, waiting: dict[str, Form]) -> None:
        memory, span = blocks[place], run.span(place)
        if not memory.backward:
            return
        if span is not None:
            if place + 1 == span[1]:
                self._recomputation(run, blocks, span, base + memory.output + sum(waiting.values()))
            base += _recomputed(run, blocks, span[0], place) + run.bare[place].unclaimed
        if waiting:
            # those that it reads or provides are counted in its own states
            own = {one.name for one in memory.read} | {one.name for one in memory.provided}
            base += sum([form for one, form in waiting.items() if one not in own])
        self.note("backward", run.names[place], base, memory.backward)

    def _reduce(self, run: Run, place: int, base: Form, cast: Form, memory: BlockMemory, unit: Unit) -> None:
        """Before a unit's backward its weights are cast again; after it, when they are gone, its gradients are reduced."""
        before = base + cast + memory.output + run.kept(place)
        self.note("backward", f"cast of a {run.names[place]}'s weights", before, (unit.casting,))
        self.note("backward", f"reduction of gradients: {run.names[place]}", base + as_temporary(memory.input), unit.reducing)

    def _recomputation(self, run: Run, blocks: tuple[BlockMemory, ...], span: tuple[int, int], base: Form) -> None:
        """A checkpoint's blocks run forward again, one after the other, and keep what autograd saves."""
        for place in range(*span):
            memory = blocks[place]
            before = _recomputed(run, blocks, span[0], place) if place > span[0] else _in_transit(run, memory)
            bare = run.bare[place]
            again = place + 1 == span[1] and (self.early_stop or bare.kept)
            states = (memory.recomputed or bare.recomputed) if again else memory.forward
            self.note("backward", f"recomputation of a {run.names[place]}", base + before, states)


def _recomputed(run: Run, blocks: tuple[BlockMemory, ...], start: int, place: int) -> Form:
    """What a checkpoint that begins at `start` holds when the blocks before `place` have run again: its input, all they save."""
    first = blocks[start]
    source = ZERO if first.input_saved else first.input
    return source + _in_transit(run, first) + sum([one.kept for one in blocks[start:place]])


def _in_transit(run: Run, memory: BlockMemory) -> Form:
    """One more checkpoint's input on its way to the host or back, while the next one is at work."""
    return memory.input if run.offloaded else ZERO
