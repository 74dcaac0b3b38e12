"""The largest value of one number of a job that still fits, with everything else held.

The estimate is monotone in each number but not linear: it is a maximum over phases, attention scores grow with the square of
the sequence, windows stop growing. So a limit is searched (extrapolate or grow, then interpolate or bisect) and never divided
out; what is returned has been evaluated, and so has the next larger value, which did not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from memfit.account.estimate import Estimate
from memfit.fit.answer import Limit
from memfit.fit.verdict import margin_bytes
from memfit.job import Inference, Job, Training
from memfit.options import options_of

if TYPE_CHECKING:
    from memfit.model import Model

_ROUNDING = 8
"""Bytes by which a straight line may seem to bend, because shares are rounded down to whole bytes."""
_SAME_SLOPE = 0.01
"""Judgement: a parabola whose slope is off by more than this share does not describe the estimate."""

EstimateFunction = Callable[[Job], Estimate]

TRAINING_NUMBERS = ("batch", "seq")
INFERENCE_NUMBERS = ("concurrency", "context", "prompt")
ENCODER_DECODER_NUMBERS = ("concurrency", "prompt", "target_seq")
POSITION_NUMBERS = ("seq", "context", "prompt", "target_seq")
"""Numbers that are bounded by the model's positions."""

MAX_EVALUATIONS = 64
"""A stop for estimates that are not monotone. Straight lines take about 4 evaluations, squares about 8, cliffs up to 30."""


def numbers_of(job: Job) -> tuple[str, ...]:
    """The numbers of this job that have a limit. An encoder keeps no cache, so its context is its prompt; an image has its own
    length."""
    if job.model.pixels:
        return INFERENCE_NUMBERS[:1] if isinstance(job.workload, Inference) else TRAINING_NUMBERS[:1]
    if not isinstance(job.workload, Inference):
        return TRAINING_NUMBERS
    if job.model.encoder_decoder:
        return ENCODER_DECODER_NUMBERS
    return INFERENCE_NUMBERS if job.model.kind == "decoder" else INFERENCE_NUMBERS[:2]


def number(job: Job, name: str) -> int:
    """The current value; 1 where the job does not say."""
    return cast(int, getattr(job.workload, name) or 1)


def with_number(job: Job, name: str, value: int) -> Job:
    """The job with one number changed. A prompt that filled the context follows it, any other is cut to fit into it; a target as
    long as the source follows that."""
    edits: dict[str, Any] = {name: value}
    workload = job.workload
    if name == "context" and isinstance(workload, Inference) and workload.prompt is not None:
        fills = workload.prompt == workload.context
        edits["prompt"] = value if fills else min(workload.prompt, value)
    if name == "seq" and isinstance(workload, Training) and workload.target_seq == workload.seq:
        edits["target_seq"] = value
    return job.replace(workload=workload.replace(**edits))


def hard_position_limit(model: Model) -> int | None:
    """Positions that the model cannot go beyond: those of a learned table, which has no further rows.

    With rotary positions `max_positions` is what the model was trained for, not what it can run: that is a remark, no limit.
    """
    return model.max_positions if model.hard_position_limit else None


def largest_allowed(job: Job, name: str) -> int:
    """The largest value that is looked at: the field's own bound, the model's learned positions, for a prompt the context."""
    bounds = [int(options_of(type(job.workload))[name].maximum or 1 << 27)]
    if name in POSITION_NUMBERS and (positions := hard_position_limit(job.model)) is not None:
        bounds.append(positions)
    if name == "prompt" and not job.model.encoder_decoder:
        bounds.append(number(job, "context"))
    return min(bounds)


def largest(margin: Callable[[int], int], *, start: int, minimum: int = 1, maximum: int) -> int:
    """The largest value in [minimum, maximum] whose margin is not negative; `minimum - 1` when there is none.

    `margin` falls (not strictly) with the value. Before both ends of a bracket are known, the line through two neighbours is
    extrapolated; then the bracket (low fits, high does not) shrinks by the parabola through its ends and the nearest third
    point, which is exact where memory grows with the square. Bisection takes turns where that does not halve the bracket.
    """
    if maximum < minimum:
        return minimum - 1
    low, high = minimum - 1, maximum + 1
    known: dict[int, int] = {}

    def look(value: int) -> None:
        nonlocal low, high
        known[value] = margin(value)
        if known[value] >= 0:
            low = max(low, value)
        else:
            high = min(high, value)

    first = min(max(start, minimum), maximum)
    look(first)
    neighbour = first + 1 if known[first] >= 0 else first - 1
    if minimum <= neighbour <= maximum:
        look(neighbour)
    wasted, patience, width = 0, 2, high - low
    while high - low > 1 and len(known) < MAX_EVALUATIONS:
        bisect = wasted >= patience
        look(_bisect(known, low, high) if bisect else _guess(known, low, high))
        patience = 1 if bisect else patience
        if 2 * (high - low) <= width or bisect:
            wasted, width = 0, high - low
        else:
            wasted += 1
    return low


def _bisect(known: dict[int, int], low: int, high: int) -> int:
    """The middle; four times the low end or a quarter of the high one while the other end is only a bound."""
    if low in known and high in known:
        guess = (low + high) // 2
    elif low in known:
        guess = 4 * low
    else:
        guess = low + (high - low) // 4
    return min(max(guess, low + 1), high - 1)


def _guess(known: dict[int, int], low: int, high: int) -> int:
    """Where the curve through the known points crosses zero, strictly between `low` and `high`."""
    if low in known and high in known:
        guess: int | None = low + _crossing(known, low, high)
    else:
        guess = _extrapolate(known, low if low in known else high, upwards=low in known)
    if guess is None:
        return _bisect(known, low, high) if low in known else low + 1
    return min(max(guess, low + 1), high - 1)


def _crossing(known: dict[int, int], low: int, high: int) -> int:
    """t such that f(low + t) = 0, for f through `low`, `high` and the third point nearest to them.

    Newton's form: f(low + t) = f_low + b t + c t^2 with c the second divided difference and b = (f_high - f_low) / w - c w.
    """
    width, at_low, at_high = high - low, known[low], known[high]
    line = width * at_low // (at_low - at_high)
    others = (value for value in known if value not in (low, high))
    third = min(others, key=lambda value: min(abs(value - low), abs(value - high)), default=None)
    if third is None:
        return line
    slope = (at_high - at_low) / width
    curve = ((known[third] - at_high) / (third - high) - slope) / (third - low)
    linear = slope - curve * width
    root = linear * linear - 4 * curve * at_low
    if root < 0 or curve == 0:
        return line
    half = -(linear + math.copysign(math.sqrt(root), linear)) / 2
    crossings = (half / curve, at_low / half if half else width)
    return next((math.floor(one) for one in crossings if 0 <= one <= width), line)


def _extrapolate(known: dict[int, int], at: int, upwards: bool) -> int | None:
    """Where the line through `at` and its nearest known neighbour meets a margin of zero; `None` where it is flat."""
    nearest = min((value for value in known if value != at), key=lambda value: abs(value - at), default=None)
    if nearest is None:
        return None
    left, right = min(at, nearest), max(at, nearest)
    fall = known[left] - known[right]
    if fall <= 0:
        return None
    distance = abs(known[at]) * (right - left)
    return at + distance // fall if upwards else at - -(-distance // fall)


def solve_limits(job: Job, estimate: EstimateFunction, current: Estimate) -> dict[str, Limit]:
    """The limit of every number of a resolved job whose estimate is `current`."""
    return {name: solve_limit(job, name, estimate, current) for name in numbers_of(job)}


def solve_limit(job: Job, name: str, estimate: EstimateFunction, current: Estimate) -> Limit:
    """The limit of one number. Without a device `max` and `likely` are `None`; when not even 1 fits they are 0."""
    value = number(job, name)
    seen = {value: current}

    def at(candidate: int) -> Estimate:
        found = seen.get(candidate)
        if found is None:
            found = seen[candidate] = estimate(with_number(job, name, candidate))
        return found

    per_unit = at(value + 1).peak.device_bytes - current.peak.device_bytes
    fixed = _fixed_bytes(value, per_unit, at)
    if job.cluster is None:
        return Limit(max=None, likely=None, fixed_bytes=fixed, bytes_per_unit=per_unit, binds=current.peak.phase)
    usable, headroom, bound = job.cluster.usable_bytes, job.headroom, largest_allowed(job, name)
    certain = largest(lambda candidate: margin_bytes(at(candidate).peak, usable, headroom), start=value, maximum=bound)
    likely = largest(lambda candidate: usable - at(candidate).peak.device_bytes, start=max(certain, 1), maximum=bound)
    return Limit(
        max=certain, likely=likely, fixed_bytes=fixed, bytes_per_unit=per_unit, binds=at(max(certain, 1)).peak.phase,
        remark=_remark(job, name, certain, likely, bound),
    )  # fmt: skip


def _fixed_bytes(value: int, per_unit: int, at: Callable[[int], Estimate]) -> int:
    """What would remain at a value of zero: the straight line, or where it bends the parabola, through the current value.

    With f0, f1, f2 at v, v + h and v + 2h (h = v / 8), D1 = f1 - f0 and D2 = f2 - 2 f1 + f0:
    f(0) = f0 - v D1 / h + v (v + h) D2 / (2 h^2). A parabola that does not have the slope seen at v is a bend between two
    phases: then, and at small values, the straight line through v is taken.
    """
    f0, step = at(value).peak.device_bytes, value // 8
    line = max(0, f0 - value * per_unit)
    if step < 2:
        return line
    f1, f2 = at(value + step).peak.device_bytes, at(value + 2 * step).peak.device_bytes
    first, second = f1 - f0, f2 - 2 * f1 + f0
    slope = first / step - second * (step - 1) / (2 * step * step)
    if abs(second) <= _ROUNDING or abs(slope - per_unit) > _SAME_SLOPE * abs(per_unit):
        return line
    return max(0, f0 - value * first // step + value * (value + step) * second // (2 * step * step))


def _remark(job: Job, name: str, certain: int, likely: int, bound: int) -> str:
    remarks = []
    workload, positions = job.workload, job.model.max_positions
    if name == "context" and isinstance(workload, Inference):
        if workload.prompt == workload.context:
            # an encoder keeps no cache: its context is its prompt
            remarks += ["with prompts as long as the context"] if job.model.caches else []
        elif certain < (workload.prompt or 0):
            remarks.append("with prompts cut to the context")
    if name == "seq" and job.model.encoder_decoder and isinstance(workload, Training) and workload.target_seq == workload.seq:
        remarks.append("with targets as long as the source")
    if name in POSITION_NUMBERS and positions is not None:
        if likely == bound == hard_position_limit(job.model):
            what = "more" if certain == bound else "more than the likely value"
            remarks.append(f"memory allows {what}; the model has {positions:,} learned positions")
        elif likely > positions:
            beyond = "it" if certain > positions else "the likely value"
            remarks.append(f"memory allows {beyond}, but the model's config names {positions:,} positions")
    return "; ".join(remarks)
