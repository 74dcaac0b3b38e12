"""Affine forms: bytes per component and axis, sparse. A form maps a slot (component and axis) to bytes per unit of it.

Forms are added and multiplied at compile time only; evaluation multiplies each slot by the count of its axis.
"""

from __future__ import annotations

from memfit.account.estimate import COMPONENTS

Form = dict[int, int]
"""Slot -> bytes. Treated as immutable: every operation returns a new one."""

ZERO: Form = {}
STRIDE = 24
"""Slots per component: the fixed axes, and one for each distinct sliding window."""

ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS, WEIGHTS, OPTIMIZER_STATES, INPUTS, WORKSPACE, KV_CACHE = (
    COMPONENTS.index(name) * STRIDE
    for name in (
        "activations",
        "temporary",
        "logits",
        "gradients",
        "weights",
        "optimizer_states",
        "inputs",
        "workspace",
        "kv_cache",
    )
)
"""First slot of each component: slot = component + axis."""


def component_of(slot: int) -> str:
    """The component's name."""
    return COMPONENTS[slot // STRIDE]


def add(*forms: Form) -> Form:
    """Sum."""
    total = dict(forms[0])
    for form in forms[1:]:
        for slot, value in form.items():
            total[slot] = total.get(slot, 0) + value
    return total


def scaled(form: Form, factor: int) -> Form:
    """Every slot times a number."""
    if factor == 1:
        return form
    return {slot: factor * value for slot, value in form.items()} if factor else ZERO


def per_axis(form: Form) -> tuple[tuple[int, int], ...]:
    """The sum over components: (axis, bytes) pairs without zeros."""
    total: dict[int, int] = {}
    for slot, value in form.items():
        axis = slot % STRIDE
        total[axis] = total.get(axis, 0) + value
    return tuple([pair for pair in total.items() if pair[1]])
