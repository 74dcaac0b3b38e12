"""A model compiled for one policy: moments of the run as affine forms, and the one function that evaluates them.

A moment is a state of memory that may be the largest of its phase. Its bytes are a sum over axes of an integer coefficient times
the axis' count, so the peak of a phase is a maximum over a few such sums: exact, branch-free, for integers and integer arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memfit.account.liveness import CATEGORIES, NUM_AXES, Form

Terms = tuple[int, ...]
"""Bytes per axis; after the fixed axes one for each sliding window: tokens that a layer of that window caches, of all sequences."""


class Numbers(NamedTuple):
    """The run's numbers, integers or integer arrays: sequences, tokens processed at once of each, tokens attended to of each."""

    sequences: Any
    tokens: Any
    keys: Any


class Moment(NamedTuple):
    """A state of memory: its phase, what runs, the terms of its total and of each component."""

    phase: str
    where: str
    total: Terms
    components: Mapping[str, Terms]
    first_step: bool = False
    short: bool = False
    """Inference: this moment processes one token of each sequence, not the prompt."""


class Profile(NamedTuple):
    """All that an evaluation needs; `kept` and the ends of forward and backward are figures to compare with measurements."""

    moments: tuple[Moment, ...]
    windows: tuple[int, ...] = ()
    kept: Terms = ()
    forward_end: Terms = ()
    backward_end: Terms = ()
    cache_per_sequence: Terms = ()


def monomials(numbers: Numbers, windows: tuple[int, ...] = (), maximum: Callable[[Any, Any], Any] = max) -> tuple[Any, ...]:
    """The count of each axis: 1, s, b, b s, b k, b s k, s k, and b min(k, w) for each window w."""
    b, s, k = numbers
    pairs = s * k
    capped = [b * (k + window - maximum(k, window)) for window in windows]
    return (1, s, b, b * s, b * k, b * pairs, pairs, *capped)


def amount(terms: Terms, counts: tuple[Any, ...]) -> Any:
    """Bytes of an affine form: sum of coefficient x count."""
    total = terms[0]
    for coefficient, count in zip(terms[1:], counts[1:], strict=False):
        if coefficient:
            total = total + coefficient * count
    return total


class Evaluation(NamedTuple):
    """Bytes of every moment, and the largest of them."""

    moments: list[Any]
    peak: Any


def evaluate(profile: Profile, prompt: Numbers, step: Numbers | None = None, maximum: Callable[[Any, Any], Any] = max) -> Evaluation:
    """Allocated bytes of every steady-state moment and their maximum.

    Takes plain integers, or integer arrays with an element-wise `maximum` (numpy.maximum). `step`: the numbers of the short moments.
    """
    counts = monomials(prompt, profile.windows, maximum)
    short = counts if step is None else monomials(step, profile.windows, maximum)
    values = [amount(moment.total, short if moment.short else counts) for moment in profile.moments]
    peak = values[0]
    for moment, value in zip(profile.moments, values, strict=True):
        if not moment.first_step:
            peak = maximum(peak, value)
    return Evaluation(values, peak)


def add(*forms: Form) -> Form:
    """Element-wise sum."""
    return tuple(map(sum, zip(*forms, strict=True)))


def scaled(form: Form, factor: int) -> Form:
    """Every element times a number."""
    return form if factor == 1 else tuple(factor * one for one in form)


def moment(phase: str, where: str, form: Form, static: Mapping[str, Terms], *, first_step: bool = False, short: bool = False) -> Moment:
    """A moment from a form per category and the components that do not depend on the block that runs."""
    components: dict[str, Terms] = dict(static)
    for index, name in enumerate(CATEGORIES):
        part = form[index * NUM_AXES : (index + 1) * NUM_AXES]
        if any(part):
            components[name] = plus(components[name], part) if name in components else part
    total: Terms = ()
    for terms in components.values():
        total = plus(total, terms) if total else terms
    return Moment(phase, where, total, components, first_step, short)


def plus(a: Terms, b: Terms) -> Terms:
    """Sum of terms of different length: a shorter one has no window terms."""
    if len(a) < len(b):
        a, b = b, a
    return tuple(x + y for x, y in zip(a, b, strict=False)) + a[len(b) :]
