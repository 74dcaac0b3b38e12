"""Forms: packed integers that behave as sparse sums of bytes by component and axis."""

from __future__ import annotations

import random

import pytest

from memfit.account.forms import (
    ACTIVATIONS,
    GRADIENTS,
    KV_CACHE,
    LOGITS,
    NUM_AXES,
    OPTIMIZER_STATES,
    TEMPORARY,
    WEIGHTS,
    WORKSPACE,
    ZERO,
    as_temporary,
    form,
    largest,
    parts,
    per_axis,
)
from memfit.model import ONCE, TOKEN

COMPONENTS = {
    ACTIVATIONS: "activations",
    LOGITS: "logits",
    TEMPORARY: "temporary",
    GRADIENTS: "gradients",
    KV_CACHE: "kv_cache",
    WEIGHTS: "weights",
    OPTIMIZER_STATES: "optimizer_states",
    WORKSPACE: "workspace",
}
Sparse = dict[tuple[int, int], int]
BIGGEST = (1 << 63) - 1


def packed(sparse: Sparse) -> int:
    return sum(form(component, axis, num_bytes) for (component, axis), num_bytes in sparse.items())


def sums(sparse: Sparse) -> dict[int, int]:
    found: dict[int, int] = {}
    for (_, axis), num_bytes in sparse.items():
        found[axis] = found.get(axis, 0) + num_bytes
    return found


def a_sparse(random_: random.Random, ceiling: int = 1 << 50) -> Sparse:
    places = [(random_.choice(list(COMPONENTS)), random_.randrange(NUM_AXES)) for _ in range(random_.randrange(1, 6))]
    return {place: random_.randrange(1, ceiling) for place in places}


@pytest.mark.parametrize("seed", range(50))
def test_parts_give_back_what_was_put_in(seed: int) -> None:
    sparse = a_sparse(random.Random(seed))
    given = {(COMPONENTS[component], axis): num_bytes for (component, axis), num_bytes in sparse.items()}
    assert {(name, axis): num_bytes for name, axis, num_bytes in parts(packed(sparse))} == given
    assert dict(per_axis(packed(sparse))) == sums(sparse)


@pytest.mark.parametrize("seed", range(50))
def test_sums_differences_and_multiples_are_those_of_the_integers(seed: int) -> None:
    random_ = random.Random(seed)
    a, b = a_sparse(random_), a_sparse(random_)
    both = {place: 3 * a.get(place, 0) + b.get(place, 0) for place in a | b}
    assert 3 * packed(a) + packed(b) == packed(both)
    assert packed(both) - packed(b) == 3 * packed(a)


def test_the_largest_field_does_not_run_over() -> None:
    assert parts(form(TEMPORARY, ONCE, BIGGEST) + form(GRADIENTS, TOKEN, 1)) == (
        ("temporary", ONCE, BIGGEST),
        ("gradients", TOKEN, 1),
    )


def test_zero_is_empty() -> None:
    assert parts(ZERO) == per_axis(ZERO) == ()
    assert largest([]) == ()


def test_as_temporary_keeps_the_bytes_of_every_axis() -> None:
    mixed = form(ACTIVATIONS, TOKEN, 5) + form(GRADIENTS, TOKEN, 7) + form(ACTIVATIONS, ONCE, 2)
    assert as_temporary(mixed) == form(TEMPORARY, TOKEN, 12) + form(TEMPORARY, ONCE, 2)


@pytest.mark.parametrize("seed", range(100))
def test_largest_keeps_what_no_other_reaches_on_every_axis(seed: int) -> None:
    """Compared with the definition, over few axes and small numbers so that many reach each other."""
    random_ = random.Random(seed)
    axes, ceiling = random_.sample(range(NUM_AXES), 3), random_.choice((3, 6, BIGGEST // 20))
    many = [
        {
            (random_.choice((ACTIVATIONS, TEMPORARY)), axis): random_.randrange(1, ceiling)
            for axis in axes
            if random_.random() < 0.8
        }
        for _ in range(12)
    ]

    def reaches(one: Sparse, other: Sparse) -> bool:
        return all(sums(one).get(axis, 0) >= num_bytes for axis, num_bytes in sums(other).items())

    expected = {
        packed(one)
        for index, one in enumerate(many)
        if not any(
            reaches(other, one) and (not reaches(one, other) or place < index)
            for place, other in enumerate(many)
            if place != index
        )
    }
    assert set(largest(map(packed, many))) == expected
