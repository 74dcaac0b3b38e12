"""Replays a block's tape backward and notes the largest states of memory, as PyTorch's engine would pass them.

The engine's rules (torch/csrc/autograd/engine.cpp, input_buffer.cpp, functions/accumulate_grad.h):
- while a node runs, its saved tensors, the gradients of its outputs and the gradients it makes are alive together;
- a second gradient for the same tensor is added in place if nothing else holds the first and it is no view, else into a new;
- the gradient of a parameter without one is stolen, with one it is added in place and freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.account.crossing import Accumulation
from memfit.account.forms import GRADIENTS, LOGITS, TEMPORARY, UNITS, Form, largest
from memfit.account.lifetimes import Plan, scratch_form
from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Node, Size, Tensor
from memfit.model.description import ONCE

_TEMPORARY, _LOGITS = UNITS[TEMPORARY], UNITS[LOGITS]
_TEMPORARY_BYTE, _GRADIENT_BYTE = UNITS[TEMPORARY][ONCE], UNITS[GRADIENTS][ONCE]


class _Gradient:
    """The gradient of a tensor on its way: how many hold it."""

    __slots__ = ("holders", "takes", "view")

    def __init__(self, takes: Form, view: bool) -> None:
        self.takes = takes
        self.holders = 1
        self.view = view


class Backward:
    """Replays the nodes in reverse from a state in which everything kept is alive.

    `stays`: saved storages that are held beyond backward.
    """

    def __init__(self, lowered: Lowered, plan: Plan, start: Form, *, stays: frozenset[int], accumulation: Accumulation) -> None:
        self.graph = lowered.tape.graph
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
        for node in reversed(self.graph):
            arrived = self._arrived(node.outputs)
            now, seconds = self._run_node(node, arrived) if arrived else (self.now, ())
            for storage in node.saved:
                saved[storage] -= 1
                if not saved[storage] and storage not in stays:
                    now -= storages[storage]
            for gradient in arrived:
                gradient.holders -= 1
                if not gradient.holders:
                    now -= gradient.takes
            self.now = now
            if arrived and node.weight_grads:
                if self.shares:
                    self._add_shared(node)
                if self.steps:
                    self._step(node)
            for tensor, gradient in seconds:
                self._accumulate(tensor, gradient)
        return largest(self.states)

    def _arrived(self, outputs: Sequence[Tensor]) -> Sequence[_Gradient]:
        """The gradients of a node's outputs."""
        pending = self.pending
        if len(outputs) == 1:
            gradient = pending.pop(outputs[0], None)
            return (gradient,) if gradient is not None else ()
        return [pending.pop(one) for one in outputs if one in pending]

    def _run_node(self, node: Node, arrived: Sequence[_Gradient]) -> tuple[Form, Sequence[tuple[Tensor, _Gradient]]]:
        """All that a node makes and needs is there at once.

        Returns what is there when it has run, all that it needed included, and second gradients of tensors.
        """
        pending, now = self.pending, self.now
        seconds: list[tuple[Tensor, _Gradient]] = []
        passed = node.outputs[0] if node.alias else None
        for one in node.inputs:
            if not one.requires_grad:
                continue
            if passed is not None and (one.size == passed.size or node.parts) and one.dtype == passed.dtype:
                gradient = arrived[0]
                gradient.holders += 1
            else:
                axis, num_bytes = one.size
                takes = num_bytes * (_TEMPORARY if one.storage < self.first_logits else _LOGITS)[axis]
                gradient = _Gradient(takes, node.view_gradient)
                now += takes
            if one in pending:
                seconds.append((one, gradient))
            else:
                pending[one] = gradient
        settled = 0
        if node.weight_grads:
            there, settled = self._weight_gradients(node)
            now += there
        for storage in node.handed:
            if self.saved[storage] == 1:  # not if another node keeps it as well, nor once more
                now -= self.storages[storage]
                self.saved[storage] = 0
        self.states.append(now + scratch_form(node.backward_scratch) if node.backward_scratch else now)
        return now - settled, seconds

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

    def _accumulate(self, tensor: Tensor, gradient: _Gradient) -> None:
        """A second gradient of one tensor arrives."""
        earlier = self.pending[tensor]
        if earlier.holders == 1 and not earlier.view:
            self._drop(gradient)
            return
        total = _Gradient(earlier.takes, False)
        self.now += total.takes
        self.states.append(self.now)
        self._drop(gradient)
        self._drop(earlier)
        self.pending[tensor] = total
