"""What blocks take beside their operations where weights are gathered and gradients reduced unit by unit.

A unit's weights are gathered before it runs and freed after it; its gradients are reduced when its backward is through. So a
block takes more while it runs (its own weights, the next unit's on their way, the last unit's reduce buffer), and leaves less
behind (one device's part of its gradients). The passes here write that into the blocks' memory; the timeline replays it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.account.blocks import Run
from memfit.account.crossing import BlockMemory
from memfit.account.forms import GRADIENTS, TEMPORARY, ZERO, Form, form, per_axis
from memfit.account.sharding import Sharding
from memfit.account.shards import divisor, share
from memfit.account.states import Tensors, adapters, weight_bytes
from memfit.kernels import KernelPolicy
from memfit.model import ONCE, Block
from memfit.model.description import Parameter
from memfit.precision import DTYPE_BYTES


class Unit(NamedTuple):
    """The weights of one block, or of all blocks that are gathered together, in bytes."""

    gathered: int = 0
    """In the format that operations read, with the padding that makes all parts equal."""
    largest: int = 0
    """Of the largest tensor."""
    linear: int = 0
    """Of matrices whose product keeps them for backward."""
    made: int = 0
    """Gradients as autograd makes them."""
    reduced: int = 0
    """Gradients in the format in which they are reduced."""
    part: int = 0
    """One device's part of them, in the format that the optimizer finds."""
    output: int = 0
    """One device's part in the format in which they are reduced, where that is another tensor."""

    def __add__(self, other: Unit) -> Unit:  # type: ignore[override]
        """Two blocks that are gathered together."""
        added = [one + two for one, two in zip(self, other, strict=True)]
        return Unit(*added)._replace(largest=max(self.largest, other.largest))


NOTHING = Unit()


def _padded(parameter: Parameter, sharding: Sharding) -> tuple[int, ...]:
    """The shape with equal parts: n x ceil(d0 / n) rows."""
    parts = divisor(parameter.role, sharding)
    part = share(parameter.shape, parts, flat=sharding.rules.flat)
    return (part[0] * parts, *part[1:])


def _gathered(block: Block, kernels: KernelPolicy, sharding: Sharding) -> tuple[int, int, int]:
    """Bytes of a block's weights when they are gathered, of the largest, and of those that products keep."""
    total, largest, linear = 0, 0, 0
    for parameter in block.parameters:
        if parameter.tied_to:
            continue
        padded = weight_bytes((Tensors(parameter._replace(shape=_padded(parameter, sharding)), 1),), kernels)
        total, largest = total + padded, max(largest, padded)
        if len(parameter.shape) > 1 and parameter.role in ("linear", "head"):
            linear += padded
    added = adapters([Tensors(one, 1) for one in block.parameters], kernels)
    return total + sum([one.repeat * one.num_bytes for one in added]), largest, linear


def unit_of(block: Block, memory: BlockMemory, kernels: KernelPolicy, sharding: Sharding) -> Unit:
    """The unit that a block alone is. Its gradients are what the operations leave, so that frozen weights have none."""
    gathered, largest, linear = _gathered(block, kernels, sharding)
    made = sum([num_bytes for axis, num_bytes in per_axis(memory.gradients) if axis == ONCE])
    element = DTYPE_BYTES[kernels.adapter.dtype if kernels.adapter is not None else kernels.precision.weight]
    elements = made // element
    stored = DTYPE_BYTES[kernels.adapter.dtype] if kernels.adapter is not None else DTYPE_BYTES[sharding.stored]
    if sharding.rules.master:
        stored = DTYPE_BYTES[sharding.gradient]
    reduced = DTYPE_BYTES[sharding.reduced]
    parts = sharding.degree
    return Unit(
        gathered,
        largest,
        linear,
        made,
        elements * reduced,
        -(-elements // parts) * stored,
        -(-elements // parts) * reduced if reduced != stored else 0,
    )


class _Place(NamedTuple):
    """A block of a run that is a unit of its own."""

    run: int
    place: int


class Gathering(NamedTuple):
    """What the passes made of the runs."""

    runs: list[Run]
    constant: Form = ZERO
    """What their states hold of it all the time: weights that stay gathered, gradients that wait unsharded."""
    kept: Form = ZERO
    """What forward leaves gathered, which saved-tensor hooks do not count."""


def gather(runs: list[Run], sharding: Sharding, *, persist: bool) -> Gathering:
    """The runs with what gathering and reducing add. Their memory says what unit each block is (`BlockMemory.sharded`).

    `persist`: a device's part of the gradients exists before; what is reduced is added to it and freed.
    """
    return _PASSES[sharding.scheme](runs, sharding, persist)


def _temporary(num_bytes: int) -> Form:
    return form(TEMPORARY, ONCE, num_bytes)


def _more(states: tuple[Form, ...], added: Form) -> tuple[Form, ...]:
    return tuple([state + added for state in states]) if added else states


def _kept_by(memory: BlockMemory, num_bytes: int) -> BlockMemory:
    return memory._replace(kept=memory.kept + _temporary(num_bytes)) if num_bytes else memory


def _ran(memory: BlockMemory, forward: Form) -> BlockMemory:
    """A block as forward meets it."""
    return memory._replace(forward=_more(memory.forward, forward))


def _met(memory: BlockMemory, bare: BlockMemory, backward: Form, gradients: Form, after: tuple[Form, ...]) -> BlockMemory:
    """A block as backward meets it: run forward again, if it is, and backward; `after`: states when its gradients are reduced."""
    base = memory.input + memory.outputs
    return memory._replace(
        forward=_more(memory.forward, backward),
        recomputed=_more(bare.recomputed, backward),
        backward=(*_more(memory.backward, backward), *[base + one for one in after]) if memory.backward else (),
        gradients=gradients,
    )


def _map(
    runs: list[Run],
    forward: Callable[[int, int, BlockMemory], BlockMemory],
    backward: Callable[[int, int, int, BlockMemory, BlockMemory], BlockMemory],
) -> list[Run]:
    """Runs with both passes applied: `forward(run, place, memory)`, `backward(run, turn, place, memory, bare)`.

    A run of layers has two turns at least: the layer that backward meets first has no reduce buffer beside it.
    """
    found = []
    for index, run in enumerate(runs):
        turns = run.turns
        if run.role == "layers" and run.repeat > 1 and len(turns) == 1:
            turns = (turns[0], turns[0])
        met = tuple(
            [
                tuple([backward(index, turn, place, memory, run.bare[place]) for place, memory in enumerate(period)])
                for turn, period in enumerate(turns)
            ]
        )
        bare = tuple([forward(index, place, memory) for place, memory in enumerate(run.bare)])
        found.append(run._replace(turns=met, bare=bare))
    return found


def _first_apart(runs: list[Run]) -> list[Run]:
    """The first layers as a run of their own: backward meets them last, with nothing left to fetch ahead."""
    place = next((index for index, run in enumerate(runs) if run.role == "layers"), None)
    if place is None or runs[place].repeat == 1 or runs[place].shared:
        return runs
    run = runs[place]
    first = run._replace(turns=run.turns[-1:], repeat=1)
    return [*runs[:place], first, run._replace(repeat=run.repeat - 1, once=ZERO, settled=ZERO), *runs[place + 1 :]]


class _Fsdp:
    """FSDP2 and FSDP1: layers are units, what is outside them is the root, or the embedding and the head are units as well.

    Forward:  FSDP2 holds the gathered flat tensor of a unit until the next unit's is copied out, beside the copy: 2 U. FSDP1's
              gathered flat tensor is what operations read: U.
    Backward: U, the previous unit's gathered flat tensor (prefetched), and the last reduce-scatter's input.
    After:    gradients as made, the reduce-scatter's input and output, of which one device's part stays.
    """

    def __init__(self, runs: list[Run], sharding: Sharding, persist: bool) -> None:
        runs = _first_apart(runs)
        self.runs, self.sharding, self.persist = runs, sharding, persist
        self.copies = sharding.scheme == "fsdp2"
        self.layers = [_Place(index, place) for index, run in enumerate(runs) if run.role == "layers"
                       for place in range(len(run.names))]  # fmt: skip
        self.order = {one: number for number, one in enumerate(self.layers)}
        self.stays = sharding.stage == 2 or sharding.resident
        self.tails = self._apart()
        others = [(index, memory.sharded) for index, run in enumerate(runs) if run.role != "layers" for memory in run.blocks]
        self.root = sum([unit or NOTHING for index, unit in others if index not in self.tails], NOTHING)
        self.all_layers = sum([self._unit(one).gathered * runs[one.run].repeat for one in self.layers])
        self.constant = self._constant()

    def _constant(self) -> Form:
        found = _temporary(self.root.gathered) + (_temporary(self.all_layers) if self.sharding.resident else ZERO)
        if self.sharding.unsynced:
            waits = self.root.reduced + sum([self._unit(one).reduced * self.runs[one.run].repeat for one in self.layers])
            found += form(GRADIENTS, ONCE, waits + sum([self._of_run(index).reduced for index in self.tails]))
        return found

    def _apart(self) -> frozenset[int]:
        """The runs outside the layers that are units of their own: embedding and head, if there is one of each."""
        outside = [(index, run.role) for index, run in enumerate(self.runs) if run.role != "layers"]
        if not self.sharding.separate or sorted(role for _, role in outside) != ["embedding", "head"]:
            return frozenset()
        return frozenset([index for index, _ in outside])

    def _unit(self, one: _Place) -> Unit:
        return self.runs[one.run].blocks[one.place].sharded or NOTHING

    def _of_run(self, index: int) -> Unit:
        return sum([memory.sharded or NOTHING for memory in self.runs[index].blocks], NOTHING)

    def _before(self, one: _Place) -> Unit:
        """The unit that runs before, whose weights backward fetches ahead."""
        run = self.runs[one.run]
        if one.place:
            return self._unit(_Place(one.run, one.place - 1))
        if run.repeat > 1:
            return self._unit(_Place(one.run, len(run.names) - 1))
        number = self.order[one]
        if number:
            return self._unit(self.layers[number - 1])
        return self._of_run(0) if 0 in self.tails else NOTHING

    def _after(self, one: _Place, turn: int) -> Unit:
        """The unit that runs after, whose gradients are on their way when this one's backward runs."""
        run = self.runs[one.run]
        if one.place + 1 < len(run.names):
            return self._unit(_Place(one.run, one.place + 1))
        if turn:
            return self._unit(_Place(one.run, 0))
        number = self.order[one] + 1
        if number < len(self.layers):
            return self._unit(self.layers[number])
        return NOTHING  # the root is reduced last; of a head that is a unit, only the norm's gradient is on its way

    def gathering(self) -> Gathering:
        """The runs with both passes applied."""
        stays = self.all_layers if self.stays and not self.sharding.resident else 0
        head = self._of_run(len(self.runs) - 1).gathered if self.tails else 0
        runs = _map(self.runs, self._forward, self._backward)
        return Gathering(runs, self.constant + _temporary(head), _temporary(stays))

    def _forward(self, index: int, place: int, memory: BlockMemory) -> BlockMemory:
        run, constant = self.runs[index], self.constant
        if run.role == "layers":
            own = 0 if self.sharding.resident else (memory.sharded or NOTHING).gathered
            ran = _ran(memory, constant + _temporary(2 * own if self.copies else own))
            return _kept_by(ran, own) if self.stays else ran
        if index in self.tails:
            own = self._of_run(index).gathered
            return _ran(memory, constant + _temporary(2 * own if self.copies and index == 0 else own))
        if not self.copies or self.sharding.resident or not self.layers:
            return _ran(memory, constant)
        if index == len(self.runs) - 1:  # the last unit's gathered tensor is freed when the root's forward ends
            return _ran(memory, constant + _temporary(self._unit(self.layers[-1]).gathered))
        ran = _ran(memory, constant + _temporary(self.root.gathered))
        fetched = self._unit(self.layers[0]).gathered + self.root.gathered
        return ran._replace(forward=(*ran.forward, memory.output + constant + _temporary(fetched)))

    def _backward(self, index: int, turn: int, place: int, memory: BlockMemory, bare: BlockMemory) -> BlockMemory:
        run, unit = self.runs[index], memory.sharded or NOTHING
        if run.role == "layers":
            one = _Place(index, place)
            ahead = 0 if self.stays else self._before(one).gathered
            weights = 0 if self.sharding.resident else unit.gathered
            waits = self._after(one, turn).reduced if self.copies else 0
            if self.stays and not run.spans:
                memory = _kept_by(memory, weights)
            return self._met(memory, bare, weights + ahead + waits, self._left(unit), self._reduced(unit, ahead))
        last = index == len(self.runs) - 1
        fetched = self._unit(self.layers[-1]).gathered if last and self.layers and not self.stays else 0
        waits = self._unit(self.layers[0]).reduced if not index and self.layers and self.copies else 0
        if index in self.tails:
            return self._tail(index, place, memory, bare, fetched, waits)
        if index or place:
            return self._met(memory, bare, fetched, memory.gradients, ())
        # the root's gradients wait for the end of backward; its weights are freed before they are reduced
        root = self.root
        if not root.made:
            return self._met(memory, bare, waits, memory.gradients, ())
        begun = form(GRADIENTS, ONCE, root.made - unit.made)
        other = self.runs[-1].blocks[-1].sharded or NOTHING
        states = self._reduced(root, 0, other.made or unit.made) if self.copies else self._reduced(root, 0)
        after = tuple([one - begun - _temporary(root.gathered) for one in states])
        return self._met(memory, bare, waits, memory.gradients, after)

    def _tail(self, index: int, place: int, memory: BlockMemory, bare: BlockMemory, fetched: int, waits: int) -> BlockMemory:
        """A block of the embedding or the head, where these are units of their own.

        FSDP2 meets the norm after the product of the head, which is in the same unit: it gathers the unit anew.
        """
        whole = self._of_run(index)
        if place:  # the run is one unit, which is reduced when its first block is through
            return self._met(memory, bare, whole.gathered + waits, memory.gradients, ())
        begun = form(GRADIENTS, ONCE, whole.made - (memory.sharded or NOTHING).made)
        states = list(self._reduced(whole, 0, whole.made))
        if index and whole.made and self.copies:
            again = whole.gathered + max(whole.gathered, fetched)
            states.append(form(GRADIENTS, ONCE, whole.part) + _temporary(whole.reduced + again))
        after = tuple([one - begun for one in states])
        return self._met(memory, bare, whole.gathered + waits, self._left(whole) - begun, after)

    def _met(self, memory: BlockMemory, bare: BlockMemory, extra: int, left: Form, after: tuple[Form, ...]) -> BlockMemory:
        return _met(memory, bare, self.constant + _temporary(extra), left, tuple([self.constant + one for one in after]))

    def _left(self, unit: Unit) -> Form:
        """What stays of a unit's gradients: one device's part, unless it is added to an older one."""
        return ZERO if self.sharding.offload == "params" or self.persist else form(GRADIENTS, ONCE, unit.part)

    def _reduced(self, unit: Unit, ahead: int, named: int = 0) -> tuple[Form, ...]:
        """States while a unit's gradients are reduced; its weights are freed before.

        `named`: bytes of the unit's last gradient, which a name still holds when the others are freed (a norm's, in layers).
        """
        if not unit.made:
            return ()
        other = _temporary(ahead)
        if self.copies:
            return (
                form(GRADIENTS, ONCE, unit.made) + _temporary(unit.reduced) + other,
                form(GRADIENTS, ONCE, unit.part + named) + _temporary(unit.reduced + unit.output) + other,
            )
        # autograd splits a flat tensor: the gradients of its parts are joined before the whole is reduced
        joined = _temporary(unit.made + unit.gathered) + form(GRADIENTS, ONCE, unit.made) + other
        cast = unit.reduced if unit.reduced != unit.made else 0
        return joined, form(GRADIENTS, ONCE, unit.made + unit.part) + _temporary(cast + unit.output) + other


class _DeepSpeed:
    """ZeRO's buffers: gathered weights up to a limit, the bucket in which gradients are reduced, the largest tensor apart.

    Stage 3 fetches ahead until `live` elements are gathered, one tensor more at the most; the tensors of one fetch are there
    twice while they are copied out of it. Gradients go into the bucket; one that is larger is reduced by itself, in a copy.
    """

    def __init__(self, runs: list[Run], sharding: Sharding, persist: bool) -> None:
        self.runs, self.sharding, self.persist = runs, sharding, persist
        units = [memory.sharded or NOTHING for run in runs for memory in run.blocks]
        self.element = DTYPE_BYTES[sharding.stored]
        self.largest = max([one.largest for one in units], default=0)
        total = sum([(memory.sharded or NOTHING).gathered * run.repeat for run in runs for memory in run.blocks])
        live = sharding.buckets.live * self.element
        fetched = max(self.largest, sharding.buckets.prefetch * self.element)
        self.live = min(total, live + self.largest) + min(total, fetched) if sharding.stage == 3 else 0
        made = sum([(memory.sharded or NOTHING).made * run.repeat for run in runs for memory in run.blocks])
        self.parts = -(-made // sharding.degree)
        self.bucket = sharding.buckets.reduce * self.element

    def gathering(self) -> Gathering:
        """The runs with both passes applied."""
        return Gathering(_map(self.runs, self._forward, self._backward), _temporary(self.live))

    def _saves(self, memory: BlockMemory) -> int:
        """Gathered weights that autograd keeps: torch's linear saves the tensor, whatever becomes of the parameter."""
        kept = self.sharding.stage == 3 and not self.sharding.zero_init
        return (memory.sharded or NOTHING).linear if kept else 0

    def _forward(self, index: int, place: int, memory: BlockMemory) -> BlockMemory:
        ran = _ran(memory, _temporary(self.live))
        return ran if self.runs[index].span(place) is not None else _kept_by(ran, self._saves(memory))

    def _backward(self, index: int, turn: int, place: int, memory: BlockMemory, bare: BlockMemory) -> BlockMemory:
        sharding, unit = self.sharding, memory.sharded or NOTHING
        saved = self._saves(memory)
        beside = _temporary(self.live + (self.bucket if sharding.stage < 3 else 0))
        if sharding.stage == 2 and sharding.offload == "none" and not self.persist:
            beside += form(GRADIENTS, ONCE, self.parts)
        after: tuple[Form, ...] = ()
        if unit.largest > self.bucket and unit.made:
            alone = form(GRADIENTS, ONCE, unit.largest) + _temporary(unit.largest)
            if sharding.offload != "none" and sharding.stage < 3:  # its norm, in fp64, of what lies in one device's part
                alone += _temporary(8 * (min(unit.largest, self.parts) // self.element))
            after = (beside + alone,)
        left = memory.gradients if sharding.stage < 2 else ZERO
        return _met(_kept_by(memory, saved), bare, beside + _temporary(saved), left, after)


_PASSES: dict[str, Callable[[list[Run], Sharding, bool], Gathering]] = {
    "fsdp2": lambda runs, sharding, persist: _Fsdp(runs, sharding, persist).gathering(),
    "fsdp1": lambda runs, sharding, persist: _Fsdp(runs, sharding, persist).gathering(),
    "deepspeed": lambda runs, sharding, persist: _DeepSpeed(runs, sharding, persist).gathering(),
    "megatron": lambda runs, sharding, persist: Gathering(runs),
}
"""What each scheme adds to the blocks of a step."""
