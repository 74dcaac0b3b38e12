"""Replays a block's tape forward and backward and notes the largest states of memory, as PyTorch's engine would pass them.

Sizes are kept per component and axis, so that a state is an affine form in the run's numbers. Of the states within a block only
those are noted that no other noted state exceeds on every axis: the maximum over them is exact for any numbers.

The engine's rules (torch/csrc/autograd/engine.cpp, input_buffer.cpp, functions/accumulate_grad.h):
- while a node runs, its saved tensors, the gradients of its outputs and the gradients it makes are alive together;
- a second gradient for the same tensor is added in place if nothing else holds the first and it is no view, else into a new;
- the gradient of a parameter without one is stolen, with one it is added in place and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from memfit.account.crossing import Accumulation, BlockMemory, Provided, Read
from memfit.account.forms import ACTIVATIONS, GRADIENTS, KV_CACHE, LOGITS, TEMPORARY, UNITS, ZERO, Form, form, largest
from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Node, Size, Tensor
from memfit.model.description import ONCE

_TEMPORARY_BYTE, _GRADIENT_BYTE = UNITS[TEMPORARY][ONCE], UNITS[GRADIENTS][ONCE]
_ACTIVATIONS, _TEMPORARY, _LOGITS, _KV_CACHE = [UNITS[one] for one in (ACTIVATIONS, TEMPORARY, LOGITS, KV_CACHE)]


def _scratch(sizes: Sequence[Size]) -> Form:
    """What a node needs while it runs."""
    total = 0
    for axis, num_bytes in sizes:
        total += num_bytes * _TEMPORARY[axis]
    return total


class _Plan(NamedTuple):
    """When each storage of a tape begins and ends in forward, and what backward needs of it; lists by storage or by node."""

    born: list[Form]
    """What each node's forward adds to the state."""
    dies: list[Form]
    """What is freed after it."""
    saved: list[int]
    """How many nodes save each storage."""
    storages: list[Form]
    """What each storage takes."""


def _plan(lowered: Lowered, *, grad: bool, chosen: frozenset[int] = frozenset(), again: bool = False) -> _Plan:
    """`chosen`: storages that a checkpoint keeps; when it runs `again` they are there from the start, and go like all others."""
    tape = lowered.tape
    sizes, first, last, held = tape.sizes, tape.first, tape.last, tape.held
    saved = [0] * len(sizes)
    if grad:
        for node in tape.nodes:
            for storage in node.saved:
                saved[storage] += 1
    if not again:
        for storage in chosen:
            saved[storage] += 1
    casts = {one.storage for one in tape.cached_casts.values()}
    source = lowered.input.storage
    returned, cached = {one.storage for one in tape.returned}, tape.cached
    stays = {lowered.output.storage, *casts, *returned, *cached, *[one.storage for _, one in lowered.provided]}
    if lowered.logits is not None:
        stays.add(lowered.logits.storage)
    if lowered.input_held:
        stays.add(source)
    first_logits = len(sizes) if tape.first_logits is None else tape.first_logits
    last_node = len(tape.nodes) - 1
    born, dies = [0] * len(tape.nodes), [0] * len(tape.nodes)
    storages: list[Form] = []
    for storage, ((axis, num_bytes), begins, ends, times) in enumerate(zip(sizes, first, last, saved, strict=True)):
        if storage in cached:
            unit = _KV_CACHE
        elif storage >= first_logits and axis != ONCE:
            unit = _LOGITS
        elif (times and storage not in casts) or storage in returned:
            unit = _ACTIVATIONS
        else:
            unit = _TEMPORARY
        takes = num_bytes * unit[axis]
        storages.append(takes)
        if begins < 0:
            continue
        if storage != source and not (again and storage in chosen):
            born[begins] += takes
        if not times and storage not in stays:
            dies[min(max(ends, held[storage]), last_node) if storage in held else ends] += takes
    return _Plan(born, dies, saved, storages)


def _forward(lowered: Lowered, plan: _Plan, there: frozenset[int] = frozenset()) -> tuple[tuple[Form, ...], tuple[Form, ...]]:
    """The largest states while a block runs forward, and those until the last tensor that backward needs has been saved.

    There a recomputation stops (torch/utils/checkpoint.py, set_checkpoint_early_stop): before the operation runs that saves its
    inputs last, so that what would only make the block's output is not made. `there`: storages that exist when it begins,
    beside its input.
    """
    nodes, first = lowered.tape.nodes, lowered.tape.first
    stop = next((index for index in range(len(nodes) - 1, -1, -1) if nodes[index].saved), -1)
    if stop >= 0 and any(first[storage] == stop for storage in nodes[stop].saved):
        stop = -1  # it saves what it makes
    needed: tuple[Form, ...] | None = None
    now = plan.storages[lowered.input.storage] + sum([plan.storages[storage] for storage in there])
    states = [now]
    for index, (node, born, dies) in enumerate(zip(nodes, plan.born, plan.dies, strict=True)):
        if index == stop:
            needed = largest([*states, now])
            states = [*needed]  # the others are reached by these, so they play no part in all of forward either
        now += born
        if node.scratch:
            states.append(now + _scratch(node.scratch))
        elif dies:  # a state that the next node only adds to need not be noted
            states.append(now)
        now -= dies
    states.append(now)
    found = largest(states)
    return found, found if needed is None else needed


class _Gradient:
    """The gradient of a tensor on its way: how many hold it."""

    __slots__ = ("holders", "takes", "view")

    def __init__(self, takes: Form, view: bool) -> None:
        self.takes = takes
        self.holders = 1
        self.view = view


class _Backward:
    """Replays the nodes in reverse from a state in which everything kept is alive."""

    def __init__(self, lowered: Lowered, plan: _Plan, start: Form, *, stays: frozenset[int], accumulation: Accumulation) -> None:
        self.nodes = lowered.tape.nodes
        first = lowered.tape.first_logits
        self.first_logits = len(plan.storages) if first is None else first
        self.now = start
        self.states: list[Form] = []
        self.saved = plan.saved.copy()
        self.storages = plan.storages
        self.stays = stays
        self.accumulation = accumulation
        self.shares = bool(accumulation.completes or accumulation.joins or accumulation.repeated)
        self.steps = accumulation.step_scratch >= 0
        self.pending: dict[Tensor, _Gradient] = {}
        for name, one in (*lowered.externals, *lowered.provided):
            if name in accumulation.waiting and one.requires_grad:
                self._arrive(one, one.size)

    def _arrive(self, tensor: Tensor, size: Size) -> None:
        """The gradient that another block made."""
        axis, num_bytes = size
        gradient = self.pending[tensor] = _Gradient(num_bytes * _TEMPORARY[axis], False)
        self.now += gradient.takes

    def run(self, output: Tensor, seed: Size) -> tuple[Form, ...]:
        """From the gradient of the block's output to that of its input."""
        pending, saved, storages, stays = self.pending, self.saved, self.storages, self.stays
        if output not in pending:
            self._arrive(output, seed)
        self.states.append(self.now)
        for node in reversed(self.nodes):
            arrived = []
            for one in node.outputs:
                if one in pending:
                    arrived.append(pending.pop(one))
            made = self._gradients(node, arrived) if arrived else ()
            now = self.now
            for storage in node.saved:
                saved[storage] -= 1
                if saved[storage] == 0 and storage not in stays:
                    now -= storages[storage]
            for gradient in arrived:
                gradient.holders -= 1
                if gradient.holders == 0:
                    now -= gradient.takes
            self.now = now
            if arrived and node.weight_grads:
                if self.shares:
                    self._add_shared(node)
                if self.steps:
                    self._step(node)
            for one, gradient in made:
                earlier = pending.get(one)
                if earlier is None:
                    pending[one] = gradient
                else:
                    self._accumulate(one, earlier, gradient)
        return largest(self.states)

    def _gradients(self, node: Node, arrived: list[_Gradient]) -> list[tuple[Tensor, _Gradient]]:
        """The node runs: all that it makes and needs is there at once."""
        made: list[tuple[Tensor, _Gradient]] = []
        now, first_logits, view = self.now, self.first_logits, node.view_gradient
        passed = node.outputs[0] if node.alias else None
        for one in node.inputs:
            if not one.requires_grad:
                continue
            size = one.size
            if passed is not None and (size == passed.size or node.parts) and one.dtype == passed.dtype:
                gradient = arrived[0]
                gradient.holders += 1
            else:
                axis, num_bytes = size
                takes = num_bytes * (_TEMPORARY if one.storage < first_logits else _LOGITS)[axis]
                now += takes
                gradient = _Gradient(takes, view)
            made.append((one, gradient))
        settled = 0
        if node.weight_grads:
            there, settled = self._weight_gradients(node)
            now += there
        for storage in node.handed:
            if self.saved[storage] == 1:  # not if another node keeps it as well, nor once more
                now -= self.storages[storage]
                self.saved[storage] = 0
        self.states.append(now + _scratch(node.backward_scratch) if node.backward_scratch else now)
        self.now = now - settled
        return made

    def _weight_gradients(self, node: Node) -> tuple[int, int]:
        """What a node's parameters' gradients add while it runs, and what of it is gone when it has run.

        Copies in the compute format are gone then; a gradient that was added to an earlier one as well.
        """
        accumulation = self.accumulation
        there = settled = 0
        for num_bytes, copy_bytes, name in node.weight_grads:
            there += self._waiting(num_bytes, copy_bytes) * _GRADIENT_BYTE
            if accumulation.repeated:
                continue
            if copy_bytes:
                copy = copy_bytes * _TEMPORARY_BYTE
                there += copy
                settled += copy
            if accumulation.persist and not accumulation.shares(name) and name not in accumulation.pending:
                settled += num_bytes * _GRADIENT_BYTE
        return there, settled

    def _waiting(self, num_bytes: int, copy_bytes: int) -> int:
        """A gradient's bytes when it is made; those of repeated layers wait in the compute format, before the cast."""
        return copy_bytes if copy_bytes and self.accumulation.repeated else num_bytes

    def _add_shared(self, node: Node) -> None:
        """The sum of a shared parameter's first two gradients is a new tensor (the waiting one is a view); one of three stays.

        A third is added to the sum in place.
        """
        for num_bytes, copy_bytes, name in node.weight_grads:
            if not self.accumulation.shares(name):
                continue
            waiting = self._waiting(num_bytes, copy_bytes)
            if name in self.accumulation.completes or self.accumulation.repeated == "second":
                self.states.append(self.now + waiting * _TEMPORARY_BYTE)
            self.now -= waiting * _GRADIENT_BYTE

    def _step(self, node: Node) -> None:
        """The optimizer updates the node's parameters one after the other, their gradients, counted as freed, still there.

        Of a shared parameter it is the waiting one, to which the others were added.
        """
        accumulation = self.accumulation
        final = [(num_bytes, name) for num_bytes, _, name in node.weight_grads if name not in accumulation.pending]
        if not final:
            return
        gradients = sum([num_bytes for num_bytes, name in final if not accumulation.shares(name)])
        scratch = accumulation.step_scratch * max(final)[0]
        self.states.append(self.now + gradients * _GRADIENT_BYTE + scratch * _TEMPORARY_BYTE)

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self.now -= gradient.takes

    def _accumulate(self, tensor: Tensor, earlier: _Gradient, gradient: _Gradient) -> None:
        """A second gradient of one tensor arrives."""
        if earlier.holders == 1 and not earlier.view:
            self._drop(gradient)
            return
        total = _Gradient(earlier.takes, False)
        self.now += total.takes
        self.states.append(self.now)
        self._drop(gradient)
        self._drop(earlier)
        self.pending[tensor] = total


@lru_cache(maxsize=16)
def _recorded(lowered: Lowered) -> tuple[_Plan, BlockMemory]:
    """What a block takes whatever becomes of its gradients."""
    plan = _plan(lowered, grad=True)
    kept = sum([takes for takes, times in zip(plan.storages, plan.saved, strict=True) if times])
    return plan, _block_memory(lowered, plan, kept)


def measure_forward(lowered: Lowered, chosen: frozenset[int] = frozenset()) -> BlockMemory:
    """A block that runs without autograd: nothing is kept but the storages that a checkpoint has `chosen`."""
    plan = _plan(lowered, grad=False, chosen=chosen)
    memory = _block_memory(lowered, plan, sum([plan.storages[storage] for storage in chosen]))
    if not chosen:
        return memory
    again = _plan(lowered, grad=True, chosen=chosen, again=True)
    return memory._replace(recomputed=_forward(lowered, again, chosen)[0], unclaimed=_unclaimed(lowered, plan, chosen))


def _unclaimed(lowered: Lowered, plan: _Plan, chosen: frozenset[int]) -> Form:
    """Chosen storages that stay until backward is through: recomputation ends where the last saved tensor is there.

    A node saves its inputs before it runs and its results after (torch/utils/checkpoint.py, early_stop).
    """
    nodes = lowered.tape.nodes
    last = max((index for index, node in enumerate(nodes) if node.saved), default=0)
    reached = {one.storage for node in nodes[:last] for one in node.outputs} | set(nodes[last].saved)
    return sum([plan.storages[storage] for storage in chosen if storage not in reached])


def measure(lowered: Lowered, *, accumulation: Accumulation, outputs_kept: bool, is_last: bool) -> BlockMemory:
    """Forward and backward of one block.

    Args:
        lowered: the block's tape.
        accumulation: what becomes of parameters' gradients.
        outputs_kept: the caller still holds the model's outputs during backward.
        is_last: the block ends in the loss: its backward starts from a scalar.
    """
    plan, memory = _recorded(lowered)
    outputs, held = ZERO, ZERO
    logits = lowered.logits if outputs_kept else None
    if logits is not None:
        outputs = plan.storages[logits.storage]
        held = ZERO if plan.saved[logits.storage] else outputs
    backward: tuple[Form, ...] = ()
    if lowered.output.requires_grad:
        stays = frozenset([one.storage for one in ([logits] if logits else [])])
        if outputs_kept:
            stays |= {one.storage for one in lowered.tape.returned}
        replay = _Backward(lowered, plan, memory.kept + held, stays=stays, accumulation=accumulation)
        backward = replay.run(lowered.output, (ONCE, 4) if is_last else lowered.output.size)
    gradients = _gradients(lowered, accumulation)
    return memory._replace(backward=backward, outputs_held=held, outputs=outputs, gradients=gradients)


def _gradients(lowered: Lowered, accumulation: Accumulation) -> Form:
    total = 0
    for node in lowered.tape.nodes:
        for num_bytes, copy_bytes, name in node.weight_grads:
            if accumulation.repeated == "first":
                total += copy_bytes or num_bytes
            elif name in accumulation.pending or not (accumulation.persist or accumulation.repeated or accumulation.shares(name)):
                total += num_bytes
    return form(GRADIENTS, ONCE, total) + _waiting(lowered)


def _waiting(lowered: Lowered) -> Form:
    """Gradients of the block's tensors that stay until all blocks are through backward."""
    return sum([form(TEMPORARY, *one.size) for one in lowered.tape.waiting])


def _returned(lowered: Lowered, plan: _Plan) -> tuple[Form, Form]:
    """The cache's part that no node saves, and the part that one does."""
    parts = [ZERO, ZERO]
    for one in lowered.tape.returned:
        parts[bool(plan.saved[one.storage])] += form(ACTIVATIONS, *one.size)
    return parts[0], parts[1]


def _is_leaf(lowered: Lowered, tensor: Tensor) -> bool:
    makers = [node for node in lowered.tape.nodes if any(one is tensor for one in node.outputs)]
    return not any(node.weight_grads or any(one.requires_grad for one in node.inputs) for node in makers)


def _block_memory(lowered: Lowered, plan: _Plan, kept: Form) -> BlockMemory:
    sizes = lowered.tape.sizes
    made = lowered.tape.cached_casts.values()
    casts = sum([sizes[one.storage][1] for one in made if not plan.saved[one.storage]])
    saved_casts = sum([sizes[one.storage][1] for one in made if plan.saved[one.storage]])
    forward, stopped = _forward(lowered, plan)
    return BlockMemory(
        kept=kept,
        region_casts=form(TEMPORARY, ONCE, casts),
        forward=forward,
        stopped=stopped,
        backward=(),
        gradients=ZERO,
        input=form(ACTIVATIONS, lowered.input.axis, sizes[lowered.input.storage][1]),
        input_saved=bool(plan.saved[lowered.input.storage]),
        output=form(TEMPORARY, *lowered.output.size),
        outputs_held=ZERO,
        outputs=ZERO,
        output_dtype=lowered.output.dtype,
        output_requires_grad=lowered.output.requires_grad,
        casts_saved=form(TEMPORARY, ONCE, saved_casts),
        returned=_returned(lowered, plan),
        waiting=_waiting(lowered),
        lingering=sum([plan.storages[one.storage] for one in lowered.tape.lingering if not plan.saved[one.storage]]),
        read=tuple(
            [
                Read(name, form(ACTIVATIONS, *one.size), bool(plan.saved[one.storage]), one.requires_grad)
                for name, one in lowered.externals
            ]
        ),
        provided=tuple(
            [
                Provided(
                    name,
                    form(TEMPORARY, *one.size),
                    bool(plan.saved[one.storage]),
                    one.dtype,
                    one.requires_grad,
                    one.requires_grad and _is_leaf(lowered, one),
                )
                for name, one in lowered.provided
            ]
        ),
    )
