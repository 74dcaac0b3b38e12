"""A model compiled for one policy: moments of the run as affine forms, and the one function that evaluates them.

A moment is a state of memory that may be the largest of its phase. Its bytes are a sum over axes of an integer coefficient times
the axis' count, so the peak of a phase is a maximum over a few such sums: exact, branch-free, for integers and integer arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memfit.account.forms import Form, largest, parts, per_axis, shown

Terms = tuple[tuple[int, int], ...]
"""(axis, bytes per unit) pairs; axes beyond the fixed ones count the tokens that a layer of each sliding window caches."""


class Numbers(NamedTuple):
    """The run's numbers, integers or integer arrays: sequences, tokens processed at once of each, tokens attended to of each.

    `targets`, `target_keys`: the same two of the target, where there is an encoder and a decoder. `reach`: how many tokens at the
    end of the keys look back through a sliding window, so that its layers attend to min(keys, window - 1 + reach) tokens.
    """

    sequences: Any
    tokens: Any
    keys: Any
    targets: Any = 0
    target_keys: Any = 0
    reach: Any = 1
    chunks: Any = 0
    """Chunks of each, where layers scan by chunks."""


class Moment(NamedTuple):
    """A state of memory: its phase, what runs, its bytes by slot and their sum over components, without what is always there."""

    phase: str
    where: str
    form: Form
    total: Terms
    numbers: int = 0
    """At which of the job's numbers it is evaluated: the prompt, a decoding step, a chunk; in training the batch, or that of an
    evaluation."""
    alone: bool = False
    """What is always there is not added: it is not there yet (loading), or in the form (evaluation, which frees a part)."""

    def __repr__(self) -> str:
        return f"Moment({self.phase}, {self.where}, {shown(self.form)})"


class Profile(NamedTuple):
    """All that an evaluation needs; `kept` and the ends of forward and backward are figures to compare with measurements."""

    moments: tuple[Moment, ...]
    statics: Form
    """What is there all the time: weights, states, caches, inputs, workspace."""
    static_total: Terms
    windows: tuple[int, ...] = ()
    kept: Terms = ()
    forward_end: Terms = ()
    backward_end: Terms = ()
    cache: Terms = ()
    state: Terms = ()
    lazy_states: int = 0
    """Bytes of optimizer states that do not exist before the first step."""
    lazy_phases: tuple[str, ...] = ("forward", "loss", "backward")
    """The phases of the first step that come before them."""
    trained_parameters: int | None = None
    host: Terms = ()
    """Activations that wait in host memory."""

    def __repr__(self) -> str:
        return f"Profile({len(self.moments)} moments, statics={shown(self.statics)})"


def monomials(numbers: Numbers, windows: tuple[int, ...] = (), maximum: Callable[[Any, Any], Any] = max) -> tuple[Any, ...]:
    """The count of each axis, in the order of `AXES`, then b n for each window w, then b s n, with n = min(k, w - 1 + reach)."""
    b, s, k, t, u, reach, n = numbers
    pairs, target_pairs, cross_pairs = s * k, t * u, t * s
    counts = (
        1, s, b, b * s, b * k, pairs, b * pairs, t, b * t, target_pairs, cross_pairs, b * target_pairs, b * cross_pairs,
        b * u, b * n, b * n * (n > 1), b * (n - (n > 0)), b * (n == 1), b * (s - 1),
    )  # fmt: skip
    if not windows:
        return counts
    seen = [b * (k + beyond - maximum(k, beyond)) for beyond in [window - 1 + reach for window in windows]]
    return (*counts, *seen, *[s * one for one in seen])


def amount(terms: Terms, counts: tuple[Any, ...]) -> Any:
    """Bytes of an affine form: sum of coefficient x count."""
    total = 0
    for axis, coefficient in terms:
        total = total + coefficient * counts[axis]
    return total


def components(form: Form, counts: tuple[int, ...]) -> dict[str, int]:
    """Bytes of every component of a form."""
    found: dict[str, int] = {}
    for name, axis, value in parts(form):
        found[name] = found.get(name, 0) + value * counts[axis]
    return found


def moment_bytes(profile: Profile, counts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Allocated bytes of every moment; `counts` are the monomials of each of the job's numbers."""
    static = [amount(profile.static_total, one) for one in counts]
    found = []
    for moment in profile.moments:
        of = counts[moment.numbers]
        total = 0 if moment.alone else static[moment.numbers]
        for axis, coefficient in moment.total:
            total = total + coefficient * of[axis]
        found.append(total)
    return found


class Evaluation(NamedTuple):
    """Bytes of every moment, and the largest of them."""

    moments: list[Any]
    peak: Any


def evaluate(profile: Profile, *numbers: Numbers, maximum: Callable[[Any, Any], Any] = max) -> Evaluation:
    """Allocated bytes of every moment and their maximum.

    Takes plain integers, or integer arrays with an element-wise `maximum` (numpy.maximum). `numbers`: those that moments name.
    """
    values = moment_bytes(profile, [monomials(one, profile.windows, maximum) for one in numbers])
    peak = values[0]
    for value in values[1:]:
        peak = maximum(peak, value)
    return Evaluation(values, peak)


def loading(form: Form) -> Moment:
    """The moment at which weights are on the device and nothing else is."""
    return Moment("load", "weights", form, per_axis(form), alone=True)


def pruned(candidates: Sequence[tuple[str, str, Form, int]]) -> tuple[Moment, ...]:
    """Moments in order, without those that another of the same phase equals or exceeds on every axis, whatever the numbers."""
    phases: dict[tuple[str, int], dict[Form, str]] = {}
    for phase, where, one, numbers in candidates:
        phases.setdefault((phase, numbers), {}).setdefault(one, where)
    return tuple(
        [
            Moment(phase, named[one], one, per_axis(one), numbers)
            for (phase, numbers), named in phases.items()
            for one in largest(named)
        ]
    )
