"""When each storage of a tape begins and ends in forward, and the largest states of memory on the way.

Sizes are kept per component and axis, so that a state is an affine form in the run's numbers. Of the states within a block only
those are noted that no other noted state exceeds on every axis: the maximum over them is exact for any numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.account.forms import ACTIVATIONS, KV_CACHE, LOGITS, TEMPORARY, UNITS, Form, largest
from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Size
from memfit.model.description import ONCE

_ACTIVATIONS, _TEMPORARY, _LOGITS, _KV_CACHE = [UNITS[one] for one in (ACTIVATIONS, TEMPORARY, LOGITS, KV_CACHE)]


def scratch_form(sizes: Sequence[Size]) -> Form:
    """What a node needs while it runs."""
    total = 0
    for axis, num_bytes in sizes:
        total += num_bytes * _TEMPORARY[axis]
    return total


class Plan(NamedTuple):
    """Lists by storage or by node."""

    born: list[Form]
    """What each node's forward adds to the state."""
    dies: list[Form]
    """What is freed after it."""
    saved: list[int]
    """How many nodes save each storage."""
    storages: list[Form]
    """What each storage takes."""


def plan_forward(lowered: Lowered, *, grad: bool, chosen: frozenset[int] = frozenset(), again: bool = False) -> Plan:
    """`chosen`: storages that a checkpoint keeps; when it runs `again` they are there from the start, and go like all others."""
    tape = lowered.tape
    last, held = tape.last, tape.held
    saved = [0] * len(tape.sizes)
    if grad:
        for node in tape.graph:
            for storage in node.saved:
                saved[storage] += 1
    if not again:
        for storage in chosen:
            saved[storage] += 1
    storages = _storage_forms(lowered, saved)
    num_nodes = len(tape.nodes)
    born, dies = [0] * num_nodes, [0] * num_nodes
    for takes, begins, ends, times in zip(storages, tape.first, last, saved, strict=True):
        if begins >= 0:
            born[begins] += takes
            if not times:
                dies[ends] += takes
    # exceptions: what is there before the first node, or still when the last one has run, or as long as a name holds it
    source, stays = lowered.input.storage, _staying(lowered)
    for storage in {source, *chosen} if again else (source,):
        if tape.first[storage] >= 0:
            born[tape.first[storage]] -= storages[storage]
    for storage in {*stays, *held}:
        if saved[storage] or tape.first[storage] < 0:
            continue
        dies[last[storage]] -= storages[storage]
        if storage not in stays:
            dies[min(max(last[storage], held[storage]), num_nodes - 1)] += storages[storage]
    return Plan(born, dies, saved, storages)


def _storage_forms(lowered: Lowered, saved: list[int]) -> list[Form]:
    """What each storage takes, as activations where it is `saved`, else as temporary, unless it is known as something else."""
    tape = lowered.tape
    sizes = tape.sizes
    forms = [
        num_bytes * (_ACTIVATIONS if times else _TEMPORARY)[axis] for (axis, num_bytes), times in zip(sizes, saved, strict=True)
    ]
    for cast in tape.cached_casts.values():
        axis, num_bytes = sizes[cast.storage]
        forms[cast.storage] = num_bytes * _TEMPORARY[axis]
    for one in tape.returned:
        axis, num_bytes = sizes[one.storage]
        forms[one.storage] = num_bytes * _ACTIVATIONS[axis]
    if tape.first_logits is not None:
        for storage in range(tape.first_logits, len(sizes)):
            axis, num_bytes = sizes[storage]
            if axis != ONCE:
                forms[storage] = num_bytes * _LOGITS[axis]
    for storage in tape.cached:
        axis, num_bytes = sizes[storage]
        forms[storage] = num_bytes * _KV_CACHE[axis]
    return forms


def _staying(lowered: Lowered) -> set[int]:
    """Storages that outlive the block whether a node saves them or not."""
    tape = lowered.tape
    stays = {lowered.output.storage, *tape.cached}
    stays.update([one.storage for one in (*tape.cached_casts.values(), *tape.returned)])
    stays.update([one.storage for _, one in lowered.provided])
    if lowered.logits is not None:
        stays.add(lowered.logits.storage)
    if lowered.input_held:
        stays.add(lowered.input.storage)
    return stays


def forward_states(
    lowered: Lowered, plan: Plan, there: frozenset[int] = frozenset(), stop: int | None = None
) -> tuple[Form, ...]:
    """The largest states while a block runs forward, all of it or until before the node `stop`.

    `there`: storages that exist when it begins, beside its input.
    """
    now = plan.storages[lowered.input.storage] + sum([plan.storages[storage] for storage in there])
    states = [now]
    for node, born, dies in zip(lowered.tape.nodes[:stop], plan.born, plan.dies, strict=False):
        now += born
        if node.scratch:
            states.append(now + scratch_form(node.scratch))
        elif dies:  # a state that the next node only adds to need not be noted
            states.append(now)
        now -= dies
    states.append(now)
    return largest(states)


def early_stop(lowered: Lowered) -> int | None:
    """Where a recomputation stops: when the last tensor that backward needs has been saved (torch/utils/checkpoint.py,
    set_checkpoint_early_stop), before the operation runs that saves its inputs last, so that what would only make the block's
    output is not made. `None` where that operation saves what it makes, or nothing is saved.
    """
    tape = lowered.tape
    for index in range(len(tape.nodes) - 1, -1, -1):
        saved = tape.nodes[index].saved
        if saved:
            return None if any(tape.first[storage] == index for storage in saved) else index
    return None
