"""Affine forms: bytes per component and axis, packed into one integer, so that a sum of forms is the sum of integers.

A form has a field of 64 bits for every axis, the sum over its components, and above these one for every axis and component.
Bytes per unit stay below 2^63, so no field runs over into the next, and that one form nowhere exceeds another is a single
subtraction of their sums. Forms are added, subtracted and multiplied at compile time only; evaluation multiplies each field by
the count of its axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from memfit.account.estimate import COMPONENTS
from memfit.model.description import AXES, ONCE, PAIR, POSITION, TOKEN

Form = int
"""Bytes by component and axis: `form(...)` makes one, `+`, `-` and `*` work on whole forms, `parts` takes it apart."""

ZERO: Form = 0

_FIELD = 64
"""Bits of a field; the highest one is free, for comparing."""
_NEAR = ("activations", "temporary", "logits", "gradients", "kv_cache", "recurrent_state", "inputs")
"""Components whose fields come first, axis by axis; those of others lie beyond all of these, so that most integers are short."""
_COMMON = (ONCE, TOKEN, POSITION, PAIR)
"""Axes that most blocks have, before the others for the same reason."""
NUM_AXES = 32
"""The fixed axes, and two for each distinct sliding window: its keys, and its scores."""
_ORDER = (*_COMMON, *[axis for axis in range(NUM_AXES) if axis not in _COMMON])
_PLACES = tuple([_ORDER.index(axis) for axis in range(NUM_AXES)])
_FAR = tuple([name for name in COMPONENTS if name not in _NEAR])
_FIRST_NEAR = NUM_AXES
_FIRST_FAR = _FIRST_NEAR + len(_NEAR) * NUM_AXES
"""Places of the first field of a component."""
ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS, KV_CACHE, RECURRENT_STATE, INPUTS = range(len(_NEAR))
WEIGHTS, OPTIMIZER_STATES, WORKSPACE = [
    len(_NEAR) + _FAR.index(name) for name in ("weights", "optimizer_states", "workspace")
]  # fmt: skip


def form(component: int, axis: int, num_bytes: int) -> Form:
    """So many bytes of one component for each unit of an axis."""
    if not num_bytes:
        return ZERO
    place = _PLACES[axis]
    if component < len(_NEAR):
        field = _FIRST_NEAR + len(_NEAR) * place + component
    else:
        field = _FIRST_FAR + len(_FAR) * place + component - len(_NEAR)
    return (num_bytes << _FIELD * field) + (num_bytes << _FIELD * place)


UNITS = tuple([tuple([form(component, axis, 1) for axis in range(NUM_AXES)]) for component in range(5)])
"""The form of one byte, by axis, of activations, temporary, logits, gradients and the KV cache."""
_MASK = (1 << _FIELD) - 1
_SUMS = (1 << _FIELD * NUM_AXES) - 1
_HIGHEST = tuple([sum([1 << _FIELD * place + _FIELD - 1 for place in range(axes + 1)]) for axes in range(NUM_AXES)])
"""The highest bit of each sum, of as many axes as there are."""


@lru_cache(maxsize=4096)
def parts(of: Form) -> tuple[tuple[str, int, int], ...]:
    """Component, axis and bytes per unit of everything in a form."""
    found = []
    values = memoryview(of.to_bytes(-(-of.bit_length() // _FIELD) * _FIELD // 8, "little")).cast("Q")
    for place, value in enumerate(values):
        if not value or place < _FIRST_NEAR:
            continue
        if place < _FIRST_FAR:
            order, component = divmod(place - _FIRST_NEAR, len(_NEAR))
            found.append((_NEAR[component], _ORDER[order], value))
        else:
            order, component = divmod(place - _FIRST_FAR, len(_FAR))
            found.append((_FAR[component], _ORDER[order], value))
    return tuple(found)


def shown(of: Form) -> str:
    """A form for a person: `96,320 B x token + 12 B x once`; the integer itself has thousands of digits."""
    return " + ".join([f"{num_bytes:,} B x {_axis_name(axis)}" for axis, num_bytes in per_axis(of)]) or "0 B"


def _axis_name(axis: int) -> str:
    return AXES[axis] if axis < len(AXES) else f"window {axis - len(AXES)}"


def moved(of: Form, axes: Mapping[int, int]) -> Form:
    """The same bytes, counted by other axes: {from: to}."""
    components = (*_NEAR, *_FAR)
    return sum([form(components.index(name), axes.get(axis, axis), num_bytes) for name, axis, num_bytes in parts(of)])


def as_temporary(of: Form) -> Form:
    """The same bytes as working tensors: the gradients of what was kept."""
    return sum([form(TEMPORARY, axis, num_bytes) for axis, num_bytes in per_axis(of)])


def per_axis(of: Form) -> tuple[tuple[int, int], ...]:
    """The sum over components: (axis, bytes) pairs without zeros."""
    sums = of & _SUMS
    found = []
    for axis in _ORDER:
        if not sums:
            break
        if value := sums & _MASK:
            found.append((axis, value))
        sums >>= _FIELD
    return tuple(found)


def largest(forms: Iterable[Form]) -> tuple[Form, ...]:
    """The forms that no other reaches on every axis: one of them is the largest for any numbers. Of equal ones the first."""
    # from the last to the first, so that of equal ones the first is left
    sums = {one & _SUMS: one for one in reversed(tuple(forms))}
    # a form that another reaches on every axis is not the larger integer
    ordered = sorted(sums, reverse=True)
    highest = _HIGHEST[ordered[0].bit_length() // _FIELD] if ordered else 0
    found: list[Form] = []
    for total in ordered:
        for other in found:
            if (other - total) & highest == highest:
                break
        else:
            found.append(total | highest)
    return tuple([sums[total ^ highest] for total in found])
