"""Replays a block's tape forward and backward and notes the largest states of memory, as PyTorch's engine would pass them.

Sizes are kept per category and axis, so that a state is an affine form in the run's numbers. Of the states within a block only
those are noted that no other noted state exceeds on every axis: the maximum over them is exact for any numbers.

The engine's rules (torch/csrc/autograd/engine.cpp, input_buffer.cpp, functions/accumulate_grad.h):
- while a node runs, its saved tensors, the gradients of its outputs and the gradients it makes are alive together;
- a second gradient for the same tensor is added in place if nothing else holds the first and it is not a view, else into a new one;
- the gradient of a parameter without one is stolen, with one it is added in place and freed.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Size, Tensor
from memfit.model.description import AXES, ONCE

NUM_AXES = len(AXES)
ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS, CASTS = range(5)
CATEGORIES = ("activations", "temporary", "logits", "gradients", "temporary")
"""Which component each category is reported as."""
WIDTH = NUM_AXES * len(CATEGORIES)

Form = tuple[int, ...]
"""Bytes per category and axis, flattened: index = category x NUM_AXES + axis."""
ZERO: Form = (0,) * WIDTH


class BlockMemory(NamedTuple):
    """What one block takes beyond what was there before it; every figure is a form."""

    kept: Form
    """Saved for backward when its forward has run, its input included if it is saved."""
    region_casts: Form
    """Autocast copies that no node saves: alive until the autocast block ends."""
    forward: tuple[Form, ...]
    """The largest states while it runs forward, its input included."""
    backward: tuple[Form, ...]
    """The largest states while it runs backward, from all it kept and its output's gradient on."""
    gradients: Form
    """Gradients of its parameters that remain after backward."""
    input: Form
    input_saved: bool
    output: Form
    outputs_held: Form
    """The model's outputs that the caller holds, apart from what is kept."""
    outputs: Form
    """The model's outputs that the caller holds."""
    output_dtype: str
    output_requires_grad: bool


class Accumulation(NamedTuple):
    """What becomes of a parameter's gradient when a node has made it."""

    persist: bool = False
    """Gradients exist already: the new one is added to them in place and freed."""
    pending: frozenset[str] = frozenset()
    """Shared with an earlier block (a tied head): waits for that block's gradient, then both are added."""
    completes: frozenset[str] = frozenset()
    """Shared with a later block (a tied embedding): added to the waiting one out of place, three copies for a moment."""


class _Memory:
    """A running state and the noted maxima."""

    def __init__(self) -> None:
        self.now = [0] * WIDTH
        self.total = [0] * NUM_AXES
        self.noted: list[tuple[tuple[int, ...], Form]] = []

    def take(self, category: int, size: Size) -> None:
        axis, num_bytes = size
        self.now[category * NUM_AXES + axis] += num_bytes
        self.total[axis] += num_bytes

    def free(self, category: int, size: Size) -> None:
        axis, num_bytes = size
        self.now[category * NUM_AXES + axis] -= num_bytes
        self.total[axis] -= num_bytes

    def note(self) -> None:
        total = self.total
        for other, _ in self.noted:
            for mine, theirs in zip(total, other, strict=True):
                if mine > theirs:
                    break
            else:
                return
        kept = [pair for pair in self.noted if any(theirs > mine for mine, theirs in zip(total, pair[0], strict=True))]
        kept.append((tuple(total), tuple(self.now)))
        self.noted = kept

    def peaks(self) -> tuple[Form, ...]:
        return tuple(form for _, form in self.noted)


def _saved_counts(lowered: Lowered) -> dict[int, int]:
    counts: dict[int, int] = {}
    for node in lowered.tape.nodes:
        for storage in node.saved:
            counts[storage] = counts.get(storage, 0) + 1
    return counts


def _last_uses(lowered: Lowered) -> dict[int, int]:
    """Storage -> index of the last node that touches it; a Python name may hold it longer."""
    last: dict[int, int] = {}
    for index, node in enumerate(lowered.tape.nodes):
        for one in node.inputs:
            last[one.storage] = index
        for one in node.outputs:
            last[one.storage] = index
    for storage, index in lowered.tape.held.items():
        last[storage] = max(index, last.get(storage, index))
    return last


def forward(lowered: Lowered, *, grad: bool, input_held: bool = True) -> tuple[_Memory, dict[int, int], dict[int, int]]:
    """Replay forward. Returns the memory at its end, the saved counts and the category of each storage."""
    tape = lowered.tape
    saved = _saved_counts(lowered) if grad else {}
    casts = {one.storage for one in tape.cached_casts.values()}
    last = _last_uses(lowered)
    stays = {lowered.output.storage}
    if lowered.logits is not None:
        stays.add(lowered.logits.storage)
    if input_held:
        stays.add(lowered.input.storage)
    categories: dict[int, int] = {}
    first_logits = tape.first_logits if tape.first_logits is not None else len(tape.sizes)
    memory = _Memory()

    def category(storage: int) -> int:
        if storage >= first_logits and tape.sizes[storage][0] != ONCE:
            return LOGITS
        if storage in casts:
            return CASTS
        return ACTIVATIONS if storage in saved else TEMPORARY

    alive: set[int] = {lowered.input.storage}
    categories[lowered.input.storage] = ACTIVATIONS if lowered.input.storage in saved else TEMPORARY
    memory.take(categories[lowered.input.storage], tape.sizes[lowered.input.storage])
    memory.note()
    for index, node in enumerate(tape.nodes):
        for one in node.outputs:
            storage = one.storage
            if storage not in alive and storage >= 0:
                alive.add(storage)
                categories[storage] = category(storage)
                memory.take(categories[storage], tape.sizes[storage])
        for one in node.inputs:
            # labels, masks: made before the node that reads them
            storage = one.storage
            if storage not in alive and storage >= 0:
                alive.add(storage)
                categories[storage] = category(storage)
                memory.take(categories[storage], tape.sizes[storage])
        for size in node.scratch:
            memory.take(TEMPORARY, size)
        memory.note()
        for size in node.scratch:
            memory.free(TEMPORARY, size)
        for storage in {one.storage for one in (*node.inputs, *node.outputs)}:
            if storage in alive and last[storage] == index and storage not in saved and storage not in stays and storage not in casts:
                alive.discard(storage)
                memory.free(categories[storage], tape.sizes[storage])
    for storage, until in tape.held.items():
        if storage in alive and until >= len(tape.nodes) - 1 and storage not in saved:
            alive.discard(storage)
            memory.free(categories[storage], tape.sizes[storage])
    return memory, saved, categories


class _Gradient:
    """The gradient of a tensor on its way: how many hold it."""

    __slots__ = ("category", "holders", "size", "view")

    def __init__(self, size: Size, category: int, *, view: bool = False) -> None:
        self.size = size
        self.category = category
        self.holders = 1
        self.view = view


class _Backward:
    """Replays the nodes in reverse from a state in which everything kept is alive."""

    def __init__(self, lowered: Lowered, memory: _Memory, saved: dict[int, int], categories: dict[int, int], *, stays: set[int],
                 accumulation: Accumulation) -> None:  # fmt: skip
        self.lowered = lowered
        self.memory = memory
        self.saved = saved
        self.categories = categories
        self.stays = stays
        self.accumulation = accumulation
        self.pending: dict[int, _Gradient] = {}

    def run(self) -> None:
        tape = self.lowered.tape
        first_logits = tape.first_logits if tape.first_logits is not None else len(tape.sizes)
        for node in reversed(tape.nodes):
            arrived = [self.pending.pop(id(one)) for one in node.outputs if id(one) in self.pending]
            if not arrived:
                self._release_saved(node.saved)
                continue
            made: list[tuple[Tensor, _Gradient]] = []
            for one in node.inputs:
                if not one.requires_grad:
                    continue
                if node.alias and one.dtype == node.outputs[0].dtype and one.axis == node.outputs[0].axis:
                    gradient = arrived[0]
                    gradient.holders += 1
                else:
                    in_logits = one.storage >= first_logits
                    gradient = _Gradient(one.size, LOGITS if in_logits else TEMPORARY, view=node.view_gradient)
                    self.memory.take(gradient.category, gradient.size)
                made.append((one, gradient))
            for num_bytes, copy_bytes, _ in node.weight_grads:
                self.memory.take(GRADIENTS, (ONCE, num_bytes))
                if copy_bytes:
                    self.memory.take(TEMPORARY, (ONCE, copy_bytes))
            for size in node.backward_scratch:
                self.memory.take(TEMPORARY, size)
            self.memory.note()
            for size in node.backward_scratch:
                self.memory.free(TEMPORARY, size)
            for num_bytes, copy_bytes, name in node.weight_grads:
                if copy_bytes:
                    self.memory.free(TEMPORARY, (ONCE, copy_bytes))
                if name in self.accumulation.completes:
                    self._add_shared((ONCE, num_bytes))
                elif self.accumulation.persist and name not in self.accumulation.pending:
                    self.memory.free(GRADIENTS, (ONCE, num_bytes))
            self._release_saved(node.saved)
            for gradient in arrived:
                self._drop(gradient)
            for one, gradient in made:
                self._deliver(one, gradient)

    def _add_shared(self, size: Size) -> None:
        """The sum of a shared parameter's two gradients is a new tensor (the waiting one is a view); one of three stays."""
        self.memory.take(TEMPORARY, size)
        self.memory.note()
        self.memory.free(TEMPORARY, size)
        self.memory.free(GRADIENTS, size)

    def _release_saved(self, storages: tuple[int, ...]) -> None:
        for storage in storages:
            self.saved[storage] -= 1
            if self.saved[storage] == 0 and storage not in self.stays:
                self.memory.free(self.categories[storage], self.lowered.tape.sizes[storage])

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if gradient.holders == 0:
            self.memory.free(gradient.category, gradient.size)

    def _deliver(self, tensor: Tensor, gradient: _Gradient) -> None:
        earlier = self.pending.get(id(tensor))
        if earlier is None:
            self.pending[id(tensor)] = gradient
            return
        if earlier.holders == 1 and not earlier.view:
            self._drop(gradient)
            return
        total = _Gradient(earlier.size, earlier.category)
        self.memory.take(total.category, total.size)
        self.memory.note()
        self._drop(gradient)
        self._drop(earlier)
        self.pending[id(tensor)] = total


def _form(category: int, size: Size) -> Form:
    form = [0] * WIDTH
    form[category * NUM_AXES + size[0]] = size[1]
    return tuple(form)


def measure(lowered: Lowered, *, grad: bool, accumulation: Accumulation | None = None, outputs_kept: bool = True,
            is_last: bool = False) -> BlockMemory:  # fmt: skip
    """Forward and backward of one block.

    Args:
        lowered: the block's tape.
        grad: whether autograd records; without it nothing is kept and there is no backward.
        accumulation: what becomes of parameters' gradients; they are new if not said.
        outputs_kept: the caller still holds the model's outputs during backward.
        is_last: the block ends in the loss: its backward starts from a scalar.
    """
    tape = lowered.tape
    accumulation = accumulation or Accumulation()
    memory, saved, categories = forward(lowered, grad=grad)
    output = lowered.output
    kept = [0] * WIDTH
    for storage in saved:
        axis, num_bytes = tape.sizes[storage]
        kept[categories[storage] * NUM_AXES + axis] += num_bytes
    region = [0] * WIDTH
    for one in tape.cached_casts.values():
        if one.storage not in saved:
            axis, num_bytes = tape.sizes[one.storage]
            region[CASTS * NUM_AXES + axis] += num_bytes
    held = outputs = ZERO
    stays: set[int] = set()
    logits = lowered.logits
    if logits is not None and outputs_kept:
        stays.add(logits.storage)
        outputs = _form(categories[logits.storage], tape.sizes[logits.storage])
        if logits.storage not in saved:
            held = outputs
    gradients = [0] * WIDTH
    backward: tuple[Form, ...] = ()
    if grad and output.requires_grad:
        state = _Memory()
        for index in range(WIDTH):
            state.now[index] = kept[index] + held[index]
            state.total[index % NUM_AXES] += state.now[index]
        replay = _Backward(lowered, state, dict(saved), categories, stays=stays, accumulation=accumulation)
        seed = _Gradient((ONCE, 4) if is_last else output.size, TEMPORARY)
        state.take(seed.category, seed.size)
        state.note()
        replay.pending[id(output)] = seed
        replay.run()
        backward = state.peaks()
        gradients[GRADIENTS * NUM_AXES + ONCE] = sum(
            grad_bytes
            for node in tape.nodes
            for grad_bytes, _, name in node.weight_grads
            if name in accumulation.pending or not (accumulation.persist or name in accumulation.completes)
        )
    return BlockMemory(tuple(kept), tuple(region), memory.peaks(), backward, tuple(gradients),
                       _form(ACTIVATIONS, tape.sizes[lowered.input.storage]), lowered.input.storage in saved, _form(TEMPORARY, tape.sizes[output.storage]), held, outputs,
                       output.dtype, output.requires_grad)  # fmt: skip
