"""Affine forms: bytes per component and axis, packed into one integer, so that a sum of forms is the sum of integers.

A form has a field of 64 bits for every axis and component, and for every axis one with the sum over its components. Bytes per
unit stay below 2^63, so no field runs over into the next, and that one form nowhere exceeds another is a single subtraction.
Forms are added, subtracted and multiplied at compile time only; evaluation multiplies each field by the count of its axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from memfit.account.estimate import COMPONENTS
from memfit.model.description import ONCE, PAIR, POSITION, TOKEN

Form = int
"""Bytes by component and axis: `form(...)` makes one, `+`, `-` and `*` work on whole forms, `parts` takes it apart."""

ZERO: Form = 0

_FIELD = 64
"""Bits of a field; the highest one is free, for comparing."""
_NEAR = ("activations", "temporary", "logits", "gradients", "kv_cache", "recurrent_state", "inputs")
"""Components whose fields lie beside the sum of their axis; those of others lie beyond all of these, so that most integers are
short."""
_WIDTH = _FIELD * (1 + len(_NEAR))
_COMMON = (ONCE, TOKEN, POSITION, PAIR)
"""Axes that most blocks have, in the low fields, for the same reason."""
NUM_AXES = 24
"""The fixed axes, and one for each distinct sliding window."""
_ORDER = (*_COMMON, *[axis for axis in range(NUM_AXES) if axis not in _COMMON])
_PLACES = tuple([_ORDER.index(axis) for axis in range(NUM_AXES)])
_FAR = tuple([name for name in COMPONENTS if name not in _NEAR])
_NEAR_BITS = _WIDTH * NUM_AXES
ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS, KV_CACHE, RECURRENT_STATE, INPUTS = range(len(_NEAR))
WEIGHTS, OPTIMIZER_STATES, WORKSPACE = [
    len(_NEAR) + _FAR.index(name) for name in ("weights", "optimizer_states", "workspace")
]  # fmt: skip


def form(component: int, axis: int, num_bytes: int) -> Form:
    """So many bytes of one component for each unit of an axis."""
    place = _PLACES[axis]
    if component < len(_NEAR):
        field = _WIDTH * place + _FIELD * (1 + component)
    else:
        field = _NEAR_BITS + _FIELD * (len(_FAR) * place + component - len(_NEAR))
    return (num_bytes << field) + (num_bytes << _WIDTH * place)


UNITS = tuple([tuple([form(component, axis, 1) for axis in range(NUM_AXES)]) for component in range(4)])
"""The form of one byte, by axis, of activations, temporary, logits and gradients."""
_MASK = (1 << _FIELD) - 1
_SUMS = sum([_MASK << _WIDTH * place for place in range(NUM_AXES)])
_HIGHEST = sum([1 << _WIDTH * place + _FIELD - 1 for place in range(NUM_AXES)])
_HIGHEST_OF_COMMON = _HIGHEST & (1 << len(_COMMON) * _WIDTH) - 1


@lru_cache(maxsize=4096)
def parts(of: Form) -> tuple[tuple[str, int, int], ...]:
    """Component, axis and bytes per unit of everything in a form."""
    found = []
    values = memoryview(of.to_bytes(-(-of.bit_length() // _FIELD) * _FIELD // 8, "little")).cast("Q")
    for place, value in enumerate(values):
        if not value:
            continue
        if place * _FIELD >= _NEAR_BITS:
            order, component = divmod(place - _NEAR_BITS // _FIELD, len(_FAR))
            found.append((_FAR[component], _ORDER[order], value))
        elif place % (1 + len(_NEAR)):
            order, component = divmod(place, 1 + len(_NEAR))
            found.append((_NEAR[component - 1], _ORDER[order], value))
    return tuple(found)


def as_temporary(of: Form) -> Form:
    """The same bytes as working tensors: the gradients of what was kept."""
    return (of & _SUMS) * UNITS[TEMPORARY][ONCE]


def per_axis(of: Form) -> tuple[tuple[int, int], ...]:
    """The sum over components: (axis, bytes) pairs without zeros."""
    sums = of & _SUMS
    found = []
    for axis in _ORDER:
        if not sums:
            break
        if value := sums & _MASK:
            found.append((axis, value))
        sums >>= _WIDTH
    return tuple(found)


def largest(forms: Iterable[Form]) -> tuple[Form, ...]:
    """The forms that no other reaches on every axis: one of them is the largest for any numbers. Of equal ones the first."""
    sums: dict[Form, Form] = {}
    for one in forms:
        sums.setdefault(one & _SUMS, one)
    # a form that another reaches on every axis is not the larger integer
    ordered = sorted(sums, reverse=True)
    highest = _HIGHEST_OF_COMMON if not ordered or ordered[0] <= _HIGHEST_OF_COMMON else _HIGHEST
    found: list[Form] = []
    for total in ordered:
        for other in found:
            if (other - total) & highest == highest:
                break
        else:
            found.append(total | highest)
    return tuple([sums[total ^ highest] for total in found])
