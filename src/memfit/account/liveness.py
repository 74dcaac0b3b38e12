"""Replays a block's tape forward and backward and notes the largest states of memory, as PyTorch's engine would pass them.

Sizes are kept per component and axis, so that a state is an affine form in the run's numbers. Of the states within a block only
those are noted that no other noted state exceeds on every axis: the maximum over them is exact for any numbers.

The engine's rules (torch/csrc/autograd/engine.cpp, input_buffer.cpp, functions/accumulate_grad.h):
- while a node runs, its saved tensors, the gradients of its outputs and the gradients it makes are alive together;
- a second gradient for the same tensor is added in place if nothing else holds the first and it is no view, else into a new;
- the gradient of a parameter without one is stolen, with one it is added in place and freed.
"""

from __future__ import annotations

from operator import le
from typing import NamedTuple

from memfit.account.crossing import Accumulation, BlockMemory, Provided, Read
from memfit.account.forms import ACTIVATIONS, GRADIENTS, LOGITS, STRIDE, TEMPORARY, ZERO, Form
from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Node, Size, Tensor
from memfit.model.description import ONCE, TARGET_POSITION

_ROOM = 13
"""Entries per component within a state: the axes, rounded up."""
_ACTIVATIONS, _TEMPORARY, _LOGITS, _GRADIENTS = range(0, 4 * _ROOM, _ROOM)
_SLOTS = [component + axis for component in (ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS) for axis in range(_ROOM)]
"""The slot of a form that each entry of a state stands for."""
_ENTRIES = {slot: entry for entry, slot in enumerate(_SLOTS)}


class _Memory:
    """A running state, and those of its states that no other exceeds on every axis."""

    __slots__ = ("grown", "noted", "now", "total")

    def __init__(self, room: int, start: Form = ZERO) -> None:
        self.now = [0] * len(_SLOTS)
        self.total = [0] * room
        for slot, num_bytes in start.items():
            self.now[_ENTRIES[slot]] += num_bytes
            self.total[slot % STRIDE] += num_bytes
        self.noted: list[tuple[list[int], list[int]]] = []
        self.grown = True
        """Whether anything was taken since the last note: a state that only shrank cannot be new."""

    def take(self, component: int, size: Size) -> None:
        axis, num_bytes = size
        self.now[component + axis] += num_bytes
        self.total[axis] += num_bytes
        self.grown = True

    def free(self, component: int, size: Size) -> None:
        axis, num_bytes = size
        self.now[component + axis] -= num_bytes
        self.total[axis] -= num_bytes

    def note(self) -> None:
        if not self.grown:
            return
        self.grown = False
        total = self.total
        for other, _ in self.noted:
            if all(map(le, total, other)):
                return
        self.noted = [pair for pair in self.noted if not all(map(le, pair[0], total))]
        self.noted.append((total.copy(), self.now.copy()))

    def peaks(self) -> tuple[Form, ...]:
        return tuple([{slot: value for slot, value in zip(_SLOTS, state, strict=True) if value} for _, state in self.noted])


class _Plan(NamedTuple):
    """When each storage of a tape begins and ends in forward, and what backward needs of it; lists by storage or by node."""

    born: list[list[int]]
    dies: list[list[int]]
    saved: list[int]
    """How many nodes save each storage."""
    components: list[int]
    room: int
    """How many axes its states have: fewer are compared sooner."""


def _plan(lowered: Lowered, *, grad: bool) -> _Plan:
    tape = lowered.tape
    sizes, first, last = tape.sizes, tape.first, tape.last
    saved = [0] * len(sizes)
    if grad:
        for node in tape.nodes:
            for storage in node.saved:
                saved[storage] += 1
    casts = {one.storage for one in tape.cached_casts.values()}
    stays = {lowered.output.storage, *casts, *[one.storage for _, one in lowered.provided]}
    if lowered.logits is not None:
        stays.add(lowered.logits.storage)
    source = lowered.input.storage
    if lowered.input_held:
        stays.add(source)
    first_logits = len(sizes) if tape.first_logits is None else tape.first_logits
    last_node = len(tape.nodes) - 1
    born: list[list[int]] = [[] for _ in tape.nodes]
    dies: list[list[int]] = [[] for _ in tape.nodes]
    components = [_TEMPORARY] * len(sizes)
    for storage, begins in enumerate(first):
        if storage >= first_logits and sizes[storage][0] != ONCE:
            components[storage] = _LOGITS
        elif saved[storage] and storage not in casts:
            components[storage] = _ACTIVATIONS
        if begins < 0:
            continue
        if storage != source:
            born[begins].append(storage)
        if not saved[storage] and storage not in stays:
            ends = max(last[storage], tape.held.get(storage, 0))
            dies[min(ends, last_node)].append(storage)
    room = TARGET_POSITION if all(axis < TARGET_POSITION for axis, _ in sizes) else _ROOM
    return _Plan(born, dies, saved, components, room)


def _forward(lowered: Lowered, plan: _Plan) -> tuple[Form, ...]:
    """The largest states while a block runs forward."""
    sizes, components = lowered.tape.sizes, plan.components
    memory = _Memory(plan.room)
    now, total = memory.now, memory.total
    memory.take(components[lowered.input.storage], sizes[lowered.input.storage])
    memory.note()
    for node, born, dies in zip(lowered.tape.nodes, plan.born, plan.dies, strict=True):
        for storage in born:
            axis, num_bytes = sizes[storage]
            now[components[storage] + axis] += num_bytes
            total[axis] += num_bytes
            memory.grown = True
        if node.scratch:
            for size in node.scratch:
                memory.take(_TEMPORARY, size)
            memory.note()
            for size in node.scratch:
                memory.free(_TEMPORARY, size)
        elif dies:  # a state that the next node only adds to need not be noted
            memory.note()
        for storage in dies:
            axis, num_bytes = sizes[storage]
            now[components[storage] + axis] -= num_bytes
            total[axis] -= num_bytes
    memory.note()
    return memory.peaks()


class _Gradient:
    """The gradient of a tensor on its way: how many hold it."""

    __slots__ = ("component", "holders", "size", "view")

    def __init__(self, size: Size, component: int, *, view: bool = False) -> None:
        self.size = size
        self.component = component
        self.holders = 1
        self.view = view


class _Backward:
    """Replays the nodes in reverse from a state in which everything kept is alive."""

    def __init__(self, lowered: Lowered, plan: _Plan, start: Form, *, stays: int | None, accumulation: Accumulation) -> None:
        self.sizes = lowered.tape.sizes
        self.nodes = lowered.tape.nodes
        first = lowered.tape.first_logits
        self.first_logits = len(self.sizes) if first is None else first
        self.memory = _Memory(plan.room, start)
        self.saved = plan.saved.copy()
        self.components = plan.components
        self.stays = stays
        self.accumulation = accumulation
        self.pending: dict[int, _Gradient] = {}
        for name, one in (*lowered.externals, *lowered.provided):
            if name in accumulation.waiting and one.requires_grad:
                self.pending[id(one)] = _Gradient(one.size, _TEMPORARY)
                self.memory.take(_TEMPORARY, one.size)

    def run(self, output: Tensor, seed: Size) -> tuple[Form, ...]:
        """From the gradient of the block's output to that of its input."""
        memory, pending, sizes = self.memory, self.pending, self.sizes
        now, total, saved, components = memory.now, memory.total, self.saved, self.components
        if id(output) not in pending:
            pending[id(output)] = _Gradient(seed, _TEMPORARY)
            memory.take(_TEMPORARY, seed)
        memory.note()
        for node in reversed(self.nodes):
            arrived = [pending.pop(id(one)) for one in node.outputs if id(one) in pending]
            made = self._gradients(node, arrived) if arrived else ()
            for storage in node.saved:
                saved[storage] -= 1
                if saved[storage] == 0 and storage != self.stays:
                    axis, num_bytes = sizes[storage]
                    now[components[storage] + axis] -= num_bytes
                    total[axis] -= num_bytes
            for gradient in arrived:
                gradient.holders -= 1
                if gradient.holders == 0:
                    memory.free(gradient.component, gradient.size)
            if arrived and node.weight_grads:
                self._add_shared(node)
            for one, gradient in made:
                earlier = pending.get(id(one))
                if earlier is None:
                    pending[id(one)] = gradient
                else:
                    self._accumulate(one, earlier, gradient)
        return memory.peaks()

    def _gradients(self, node: Node, arrived: list[_Gradient]) -> list[tuple[Tensor, _Gradient]]:
        """The node runs: all that it makes and needs is there at once."""
        memory = self.memory
        made: list[tuple[Tensor, _Gradient]] = []
        for one in node.inputs:
            if not one.requires_grad:
                continue
            if node.alias and one.dtype == node.outputs[0].dtype and one.size == node.outputs[0].size:
                gradient = arrived[0]
                gradient.holders += 1
            else:
                component = _LOGITS if one.storage >= self.first_logits else _TEMPORARY
                gradient = _Gradient(one.size, component, view=node.view_gradient)
                memory.take(component, one.size)
            made.append((one, gradient))
        for num_bytes, copy_bytes, _ in node.weight_grads:
            memory.take(_GRADIENTS, (ONCE, self._waiting(num_bytes, copy_bytes)))
            if copy_bytes and not self.accumulation.repeated:
                memory.take(_TEMPORARY, (ONCE, copy_bytes))
        if node.handed >= 0:
            memory.free(self.components[node.handed], self.sizes[node.handed])
            self.saved[node.handed] = 0  # not to be freed once more
        for size in node.backward_scratch:
            memory.take(_TEMPORARY, size)
        memory.note()
        for size in node.backward_scratch:
            memory.free(_TEMPORARY, size)
        if node.weight_grads:
            self._settle(node)
        return made

    def _waiting(self, num_bytes: int, copy_bytes: int) -> int:
        """A gradient's bytes when it is made; those of repeated layers wait in the compute format, before the cast."""
        return copy_bytes if copy_bytes and self.accumulation.repeated else num_bytes

    def _settle(self, node: Node) -> None:
        """Copies in the compute format are gone; a gradient that was added to an earlier one as well."""
        for num_bytes, copy_bytes, name in node.weight_grads:
            if self.accumulation.repeated:
                continue
            if copy_bytes:
                self.memory.free(_TEMPORARY, (ONCE, copy_bytes))
            if self.accumulation.persist and not self.accumulation.shares(name) and name not in self.accumulation.pending:
                self.memory.free(_GRADIENTS, (ONCE, num_bytes))

    def _add_shared(self, node: Node) -> None:
        """The sum of a shared parameter's first two gradients is a new tensor (the waiting one is a view); one of three stays.

        A third is added to the sum in place.
        """
        for num_bytes, copy_bytes, name in node.weight_grads:
            if not self.accumulation.shares(name):
                continue
            size = (ONCE, self._waiting(num_bytes, copy_bytes))
            if name in self.accumulation.completes or self.accumulation.repeated == "second":
                self.memory.take(_TEMPORARY, size)
                self.memory.note()
                self.memory.free(_TEMPORARY, size)
            self.memory.free(_GRADIENTS, size)

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self.memory.free(gradient.component, gradient.size)

    def _accumulate(self, tensor: Tensor, earlier: _Gradient, gradient: _Gradient) -> None:
        """A second gradient of one tensor arrives."""
        if earlier.holders == 1 and not earlier.view:
            self._drop(gradient)
            return
        total = _Gradient(earlier.size, earlier.component)
        self.memory.take(total.component, total.size)
        self.memory.note()
        self._drop(gradient)
        self._drop(earlier)
        self.pending[id(tensor)] = total


def measure_forward(lowered: Lowered) -> BlockMemory:
    """A block that runs without autograd: nothing is kept."""
    plan = _plan(lowered, grad=False)
    return _block_memory(lowered, plan, _forward(lowered, plan), ZERO, ZERO, ())


def measure(lowered: Lowered, *, accumulation: Accumulation, outputs_kept: bool, is_last: bool) -> BlockMemory:
    """Forward and backward of one block.

    Args:
        lowered: the block's tape.
        accumulation: what becomes of parameters' gradients.
        outputs_kept: the caller still holds the model's outputs during backward.
        is_last: the block ends in the loss: its backward starts from a scalar.
    """
    plan = _plan(lowered, grad=True)
    sizes = lowered.tape.sizes
    kept: Form = {}
    for storage, times in enumerate(plan.saved):
        if times:
            axis, num_bytes = sizes[storage]
            slot = _SLOTS[plan.components[storage] + axis]
            kept[slot] = kept.get(slot, 0) + num_bytes
    outputs, held = ZERO, ZERO
    logits = lowered.logits if outputs_kept else None
    if logits is not None:
        axis, num_bytes = sizes[logits.storage]
        outputs = {_SLOTS[plan.components[logits.storage] + axis]: num_bytes}
        held = ZERO if plan.saved[logits.storage] else outputs
    backward: tuple[Form, ...] = ()
    if lowered.output.requires_grad:
        start = dict(kept)
        for slot, num_bytes in held.items():
            start[slot] = start.get(slot, 0) + num_bytes
        replay = _Backward(lowered, plan, start, stays=logits.storage if logits else None, accumulation=accumulation)
        backward = replay.run(lowered.output, (ONCE, 4) if is_last else lowered.output.size)
    memory = _block_memory(lowered, plan, _forward(lowered, plan), kept, held, backward)
    return memory._replace(outputs=outputs, gradients=_gradients(lowered, accumulation))


def _gradients(lowered: Lowered, accumulation: Accumulation) -> Form:
    total = 0
    for node in lowered.tape.nodes:
        for num_bytes, copy_bytes, name in node.weight_grads:
            if accumulation.repeated == "first":
                total += copy_bytes or num_bytes
            elif name in accumulation.pending or not (accumulation.persist or accumulation.repeated or accumulation.shares(name)):
                total += num_bytes
    return {GRADIENTS + ONCE: total} if total else ZERO


def _is_leaf(lowered: Lowered, tensor: Tensor) -> bool:
    makers = [node for node in lowered.tape.nodes if any(one is tensor for one in node.outputs)]
    return not any(node.weight_grads or any(one.requires_grad for one in node.inputs) for node in makers)


def _block_memory(
    lowered: Lowered, plan: _Plan, forward: tuple[Form, ...], kept: Form, held: Form, backward: tuple[Form, ...]
) -> BlockMemory:
    sizes = lowered.tape.sizes
    made = lowered.tape.cached_casts.values()
    casts = sum(sizes[one.storage][1] for one in made if not plan.saved[one.storage])
    saved_casts = sum(sizes[one.storage][1] for one in made if plan.saved[one.storage])
    return BlockMemory(
        kept=kept,
        region_casts={TEMPORARY + ONCE: casts} if casts else ZERO,
        forward=forward,
        backward=backward,
        gradients=ZERO,
        input={ACTIVATIONS + lowered.input.axis: sizes[lowered.input.storage][1]},
        input_saved=bool(plan.saved[lowered.input.storage]),
        output={TEMPORARY + lowered.output.axis: lowered.output.size[1]},
        outputs_held=held,
        outputs=held,
        output_dtype=lowered.output.dtype,
        output_requires_grad=lowered.output.requires_grad,
        casts_saved={TEMPORARY + ONCE: saved_casts} if saved_casts else ZERO,
        read=tuple(
            [
                Read(name, {ACTIVATIONS + one.axis: one.size[1]}, bool(plan.saved[one.storage]), one.requires_grad)
                for name, one in lowered.externals
            ]
        ),
        provided=tuple(
            [
                Provided(
                    name,
                    {TEMPORARY + one.axis: one.size[1]},
                    bool(plan.saved[one.storage]),
                    one.dtype,
                    one.requires_grad,
                    one.requires_grad and _is_leaf(lowered, one),
                )
                for name, one in lowered.provided
            ]
        ),
    )
