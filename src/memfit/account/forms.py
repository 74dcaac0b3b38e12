"""Affine forms: bytes per component and axis, packed into one integer, so that a sum of forms is the sum of integers.

A form has a field of 64 bits for every axis, the sum over its components, and one for every axis and component. What most blocks
have comes first, so that most integers are short. Bytes per unit stay below 2^63, so no field runs over into the next, and that
one form nowhere exceeds another is a single subtraction of their sums. Forms are added, subtracted and multiplied at compile time
only; evaluation multiplies each field by the count of its axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache

from memfit.account.estimate import COMPONENTS
from memfit.model.description import AXES, KEY_TOKEN, ONCE, PAIR, POSITION, SEQUENCE, TOKEN

Form = int
"""Bytes by component and axis: `form(...)` makes one, `+`, `-` and `*` work on whole forms, `parts` takes it apart."""

ZERO: Form = 0

_FIELD = 64
"""Bits of a field; the highest one is free, for comparing."""
_NEAR = ("activations", "temporary", "logits", "gradients", "kv_cache", "recurrent_state", "inputs")
"""Components whose fields come before those of all others."""
_COMMON = (ONCE, TOKEN, POSITION, PAIR, KEY_TOKEN, SEQUENCE)
"""Axes that most models have, whose fields come before those of all others."""
NUM_AXES = 32
"""The fixed axes, and two for each distinct sliding window: its keys, and its scores."""
_FAR = tuple([name for name in COMPONENTS if name not in _NEAR])
_NAMES = (*_NEAR, *_FAR)
ACTIVATIONS, TEMPORARY, LOGITS, GRADIENTS, KV_CACHE, RECURRENT_STATE, INPUTS = range(len(_NEAR))
WEIGHTS, MASTER_WEIGHTS, OPTIMIZER_STATES, WORKSPACE = [
    _NAMES.index(name) for name in ("weights", "master_weights", "optimizer_states", "workspace")
]  # fmt: skip


def _fields() -> list[tuple[int, int | None]]:
    """What each field holds, from the lowest on: an axis and a component, or `None` for the sum over the components."""
    others = [axis for axis in range(NUM_AXES) if axis not in _COMMON]
    near, far = range(len(_NEAR)), range(len(_NEAR), len(_NAMES))
    fields: list[tuple[int, int | None]] = [(axis, None) for axis in _COMMON]
    fields += [(axis, component) for axis in _COMMON for component in near]
    fields += [(ONCE, component) for component in far]
    fields += [(axis, component) for axis in others for component in (None, *near)]
    return fields + [(axis, component) for axis in (*_COMMON, *others) if axis != ONCE for component in far]


_MEANING = _fields()
_SHIFT = {meaning: _FIELD * field for field, meaning in enumerate(_MEANING)}
"""Where the field of an axis and a component begins, in bits."""
_MASK = (1 << _FIELD) - 1
_SUM_FIELDS = [field for field, (_, component) in enumerate(_MEANING) if component is None]
_SUMS = sum([_MASK << _FIELD * field for field in _SUM_FIELDS])


def _unit(component: int, axis: int) -> Form:
    return (1 << _SHIFT[axis, component]) + (1 << _SHIFT[axis, None])


UNITS = tuple([tuple([_unit(component, axis) for axis in range(NUM_AXES)]) for component in range(len(_NEAR))])
"""The form of one byte, by component and axis, of the components that come first."""


def form(component: int, axis: int, num_bytes: int) -> Form:
    """So many bytes of one component for each unit of an axis."""
    return num_bytes * (UNITS[component][axis] if component < len(UNITS) else _unit(component, axis))


@cache
def _highest_bits(num_fields: int) -> int:
    """The highest bit of each sum in an integer of so many fields."""
    return sum([1 << _FIELD * field + _FIELD - 1 for field in _SUM_FIELDS if field < num_fields])


@lru_cache(maxsize=4096)
def parts(of: Form) -> tuple[tuple[str, int, int], ...]:
    """Component, axis and bytes per unit of everything in a form."""
    found = []
    values = memoryview(of.to_bytes(-(-of.bit_length() // _FIELD) * _FIELD // 8, "little")).cast("Q")
    for (axis, component), value in zip(_MEANING, values, strict=False):
        if value and component is not None:
            found.append((_NAMES[component], axis, value))
    return tuple(found)


def shown(of: Form) -> str:
    """A form for a person: `96,320 B x token + 12 B x once`; the integer itself has thousands of digits."""
    return " + ".join([f"{num_bytes:,} B x {_axis_name(axis)}" for axis, num_bytes in per_axis(of)]) or "0 B"


def _axis_name(axis: int) -> str:
    return AXES[axis] if axis < len(AXES) else f"window {axis - len(AXES)}"


def moved(of: Form, axes: Mapping[int, int]) -> Form:
    """The same bytes, counted by other axes: {from: to}."""
    return sum([form(_NAMES.index(name), axes.get(axis, axis), num_bytes) for name, axis, num_bytes in parts(of)])


def share(of: Form, times: int, parts_of: int) -> Form:
    """So many equal parts of a form, each bytes per unit rounded up: `times` / `parts_of` of it."""
    if parts_of == 1:
        return of * times
    components = (*_NEAR, *_FAR)
    return sum([form(components.index(name), axis, -(-num_bytes * times // parts_of)) for name, axis, num_bytes in parts(of)])


def only(of: Form, names: tuple[str, ...]) -> Form:
    """The bytes of some components."""
    components = (*_NEAR, *_FAR)
    return sum([form(components.index(name), axis, num_bytes) for name, axis, num_bytes in parts(of) if name in names])


def as_temporary(of: Form) -> Form:
    """The same bytes as working tensors: the gradients of what was kept."""
    return sum([form(TEMPORARY, axis, num_bytes) for axis, num_bytes in per_axis(of)])


def per_axis(of: Form) -> tuple[tuple[int, int], ...]:
    """The sum over components: (axis, bytes) pairs without zeros."""
    sums = of & _SUMS
    found = []
    for axis in _COMMON:
        if not sums:
            break
        if value := sums & _MASK:
            found.append((axis, value))
        sums >>= _FIELD
    if sums:
        for field in _SUM_FIELDS[len(_COMMON) :]:
            if value := (sums >> _FIELD * (field - len(_COMMON))) & _MASK:
                found.append((_MEANING[field][0], value))
    return tuple(found)


def largest(forms: Iterable[Form]) -> tuple[Form, ...]:
    """The forms that no other reaches on every axis: one of them is the largest for any numbers. Of equal ones the first."""
    # from the last to the first, so that of equal ones the first is left
    sums = {one & _SUMS: one for one in reversed(tuple(forms))}
    # a form that another reaches on every axis is not the larger integer
    ordered = sorted(sums, reverse=True)
    highest = _highest_bits(ordered[0].bit_length() // _FIELD + 1) if ordered else 0
    found: list[Form] = []
    for total in ordered:
        for other in found:
            if (other - total) & highest == highest:
                break
        else:
            found.append(total | highest)
    return tuple([sums[total ^ highest] for total in found])
