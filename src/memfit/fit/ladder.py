"""The ladder: which change makes a job fit, cheapest first, each proved by an estimate of the edited job.

Order of work: every lever alone; when none fits, all levers up to each cost together until a set fits, and that set stripped of
what it does not need. So the combination that is found needs no lever dearer than any other combination would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from memfit.account.estimate import Estimate
from memfit.fit.answer import Recommendation
from memfit.fit.levers import Lever, levers_for
from memfit.fit.limits import EstimateFunction, largest
from memfit.fit.verdict import cluster_text, job_fits, margin_bytes
from memfit.job import Job
from memfit.records import Record
from memfit.units import format_gib

LeastFunction = Callable[[Job], int]

MOST_SHOWN = 10
"""Recommendations in an answer: a combination and each lever alone."""

WORTH_SHOWING = 0.02
"""Judgement: a lever that saves less than this share of the peak is not worth a line (unless it makes the job fit)."""

USEFUL_HEADROOM = 0.05
"""Judgement: when the job fits already, only a lever that costs nothing and frees this share of the peak is named."""


class Trial(Record):
    """Levers applied together to a job; what came out is estimated when it is asked for."""

    levers: tuple[Lever, ...]
    job: Job
    steps: tuple[tuple[Lever, Job, Job], ...]
    """Each lever with the job before and after it; the dearest, which is last, was applied first."""
    how: EstimateFunction
    least_bytes: int = 0
    """A lower bound of its peak."""

    @cached_property
    def estimate(self) -> Estimate:
        """The estimate of the edited job."""
        return self.how(self.job)

    @property
    def fits(self) -> str | None:
        """yes | tight | no; `None` without a device."""
        return job_fits(self.estimate.peak, self.job)

    @property
    def hopeless(self) -> bool:
        """Whether what is always there is too much already."""
        return self.job.cluster is not None and self.least_bytes > self.job.cluster.usable_bytes

    @property
    def is_enough(self) -> bool:
        """Whether it makes the job fit."""
        return not self.hopeless and self.fits == "yes"

    @property
    def margin(self) -> int:
        """Bytes inside (>= 0) or outside (< 0) of `yes`; without a device the negative peak, which orders in the same way."""
        cluster = self.job.cluster
        if cluster is None:
            return -self.estimate.peak.device_bytes
        return margin_bytes(self.estimate.peak, cluster.usable_bytes, self.job.headroom)

    def saves(self, current: Estimate, more_than: float = 0) -> bool:
        """Whether its peak is lower than the current one by more than so many bytes."""
        device = current.peak.device_bytes
        return device - self.least_bytes > more_than and device - self.estimate.peak.device_bytes > more_than


class Ladder(Record):
    """What the search found: recommendations to show, and the trial that the next command should use."""

    recommendations: tuple[Recommendation, ...]
    best: Trial | None
    """The cheapest that fits; `None` when the job fits already or nothing makes it fit."""
    closest: Trial | None = None
    """When nothing makes it fit: what comes nearest."""
    trials: tuple[Trial, ...] = ()
    """Every lever alone, in order of cost."""


def climb(job: Job, estimate: EstimateFunction, current: Estimate, least: LeastFunction | None = None) -> Ladder:
    """The ladder of a resolved job whose estimate is `current`.

    `least`: a cheap lower bound of a job's peak; what cannot fit or save anything by it needs no estimate.
    """
    fits = job_fits(current.peak, job)
    levers = levers_for(job)
    least = least if least is not None and _rules_out(job, current, least(job)) else None
    if fits == "yes":
        trials = [_try((lever,), job, estimate) for lever in levers if lever.free]
        worth = current.peak.device_bytes * USEFUL_HEADROOM
        useful = [one for one in trials if one.fits == "yes" and _saved(current, one) >= worth]
        return Ladder(recommendations=_shown(useful, current), best=None, trials=tuple(trials))
    singles = _singles(job, estimate, levers, least)
    if fits is None:
        return Ladder(recommendations=_shown(_worth(singles, current), current), best=None, trials=tuple(singles))
    fitting = [trial for trial in singles if trial.is_enough]
    if fitting:
        dear = fitting[0].levers[0]
        first = _without(job, estimate, levers, least, dear) if dear.changes_task or dear.last_resort else None
        best = first or fitting[0]
        others = [trial for trial in _worth(singles, current) if not trial.is_enough]
        shown = [*([first] if first else []), *fitting, *others]
        return Ladder(recommendations=_shown(shown, current), best=best, trials=tuple(singles))
    return _combine(job, estimate, current, levers, singles, least)


def _singles(job: Job, estimate: EstimateFunction, levers: Sequence[Lever], least: LeastFunction | None) -> list[Trial]:
    """Every lever alone, in order of cost.

    Of degrees of tensor or pipeline parallelism those up to the first that is enough; if none is, the largest stands for all.
    """
    found: list[Trial] = []
    for lever in levers:
        degrees = [one for one in levers if one.group == lever.group] if lever.spreads else [lever]
        if lever is not degrees[0]:
            continue
        strongest = _try((degrees[-1],), job, estimate, least)
        if len(degrees) == 1 or not strongest.is_enough:
            found.append(strongest)
            continue
        for one in degrees:
            found.append(strongest if one is degrees[-1] else _try((one,), job, estimate, least))
            if found[-1].is_enough:
                break
    return found


def _rules_out(job: Job, current: Estimate, least_bytes: int) -> bool:
    """Whether a lower bound can rule out any lever: they hardly raise it, so one that is far below the peak is no help."""
    hopeless = job.cluster is not None and least_bytes > job.cluster.usable_bytes
    return hopeless or not current.peak.device_bytes - least_bytes > current.peak.device_bytes * WORTH_SHOWING


def _without(
    job: Job, estimate: EstimateFunction, levers: Sequence[Lever], least: LeastFunction | None, dear: Lever
) -> Trial | None:
    """A combination of levers that leave the task as it is (and, if `dear` does, the speed within reason), if one fits: better
    than the one lever that does not."""
    among = [one for one in levers if not one.changes_task and not (dear.last_resort and one.last_resort)]
    return _cheapest_set(job, estimate, among, least)[0]


def _combine(
    job: Job,
    estimate: EstimateFunction,
    current: Estimate,
    levers: Sequence[Lever],
    singles: list[Trial],
    least: LeastFunction | None,
) -> Ladder:
    """When no lever alone is enough."""
    together, seen = _cheapest_set(job, estimate, levers, least)
    worth = _worth(singles, current)
    if together is not None:
        return Ladder(recommendations=_shown([together, *worth], current), best=together, trials=tuple(singles))
    tried = [*seen, *singles]
    if not tried:
        return Ladder(recommendations=(), best=None)
    closest = max(tried, key=lambda trial: trial.margin)
    rest = [trial for trial in worth if trial is not closest]
    return Ladder(recommendations=_shown([closest, *rest], current), best=None, closest=closest, trials=tuple(singles))


def _cheapest_set(
    job: Job, estimate: EstimateFunction, levers: Sequence[Lever], least: LeastFunction | None
) -> tuple[Trial | None, list[Trial]]:
    """The set that fits and whose dearest lever is as cheap as possible, stripped; or the sets that were looked at.

    Levers that spread layers over devices leave fewer to others (a pipeline over all devices leaves none to FSDP), so sets
    without them are searched first, and sets with them only where their dearest lever may be cheaper.
    """
    best: Trial | None = None
    looked: list[Trial] = []
    for highest in sorted({lever.spreads for lever in levers}):
        dearest = None if best is None else levers.index(best.levers[-1])
        added = [place for place, lever in enumerate(levers) if lever.spreads == highest]
        if dearest is not None and dearest < added[0]:
            break
        found, seen = _search(job, estimate, [lever for lever in levers if lever.spreads <= highest], least)
        looked += seen
        if found is not None and (dearest is None or levers.index(found.levers[-1]) < dearest):
            best = found
    return best, [] if best is not None else looked


def _search(
    job: Job, estimate: EstimateFunction, levers: Sequence[Lever], least: LeastFunction | None
) -> tuple[Trial | None, list[Trial]]:
    """The same among levers that can go together.

    A lever only ever frees memory, so when all levers up to one cost do not fit, no combination of them does. Levers that may
    add some are the exception: when everything together does not fit, everything without those is looked at as well.
    """
    seen: dict[int, Trial] = {}

    def fits_up_to(count: int) -> bool:
        if count not in seen:
            seen[count] = _try(_strongest_of_each_group(levers[:count]), job, estimate, least, solve=False)
        return seen[count].is_enough

    certain = next((place for place, lever in enumerate(levers) if lever.may_add), len(levers))
    high = next((count for count in (len(levers), certain) if count > 1 and fits_up_to(count)), 0)
    if not high:
        return None, [trial for count, trial in seen.items() if count == len(levers) or not trial.hopeless]
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_up_to(middle) else (middle, high)
    return _stripped(seen[high], job, estimate, levers, least), []


def _stripped(trial: Trial, job: Job, estimate: EstimateFunction, levers: Sequence[Lever], least: LeastFunction | None) -> Trial:
    """The set without what it does not need, dearest first, and with the cheapest of each group that is enough.

    Its dearest lever is needed: without it, a cheaper set would have fitted.
    """
    chosen, dropped = list(trial.levers), []

    def enough(set_of_levers: Sequence[Lever]) -> bool:
        return _try(tuple(set_of_levers), job, estimate, least, solve=False).is_enough

    for lever in reversed(trial.levers[:-1]):
        if enough([one for one in chosen if one is not lever]):
            chosen.remove(lever)
            dropped.append(lever)
    if len(chosen) > 2:
        # One dearer partner may do what several cheap ones do: fewer changes are better.
        partner = next((one for one in reversed(dropped) if enough([one, chosen[-1]])), None)
        chosen = chosen if partner is None else [partner, chosen[-1]]
    for place, lever in enumerate(chosen[:-1]):
        for cheaper in levers[: levers.index(lever)]:
            swapped = [*chosen[:place], cheaper, *chosen[place + 1 :]]
            if cheaper.group == lever.group and enough(swapped):
                chosen = swapped
                break
    return _try(tuple(chosen), job, estimate)


def _strongest_of_each_group(levers: Sequence[Lever]) -> tuple[Lever, ...]:
    last = {lever.group: lever for lever in levers}
    return tuple(lever for lever in levers if last[lever.group] is lever)


def _try(
    levers: tuple[Lever, ...], job: Job, estimate: EstimateFunction, least: LeastFunction | None = None, *, solve: bool = True
) -> Trial:
    """The job with the levers applied in order, each once and only where it still applies.

    Levers on a number go to their strongest value; with `solve`, the dearest of them comes back to the largest that fits
    (without a device, to half of what the job has).
    """
    solvable = next((lever for lever in reversed(levers) if lever.edit_to is not None), None)
    if solvable is None or solvable.value is None or not solve:
        return _with_values(levers, job, estimate, {}, least)
    name, at_most = solvable.name, solvable.value(job) - 1
    if job.cluster is None:
        return _with_values(levers, job, estimate, {name: max(solvable.strongest, (at_most + 1) // 2)}, least)
    strongest = _with_values(levers, job, estimate, {}, least)
    if not strongest.is_enough or at_most <= solvable.strongest:
        return strongest
    value = largest(
        lambda candidate: _with_values(levers, job, estimate, {name: candidate}).margin,
        start=at_most, minimum=solvable.strongest, maximum=at_most,
    )  # fmt: skip
    return _with_values(levers, job, estimate, {name: value}) if value >= solvable.strongest else strongest


def _with_values(
    levers: tuple[Lever, ...], job: Job, estimate: EstimateFunction, values: dict[str, int], least: LeastFunction | None = None
) -> Trial:
    """The trial with levers on a number at given values, or at their strongest."""
    edited, steps = _applied(levers, job, values)
    bound = least(edited) if least is not None else 0
    return Trial(levers=tuple([lever for lever, _, _ in steps]), job=edited, steps=tuple(steps), how=estimate, least_bytes=bound)


def _applied(levers: tuple[Lever, ...], job: Job, values: dict[str, int]) -> tuple[Job, list[tuple[Lever, Job, Job]]]:
    """The edited job, and each lever with the job before and after it.

    Dearest first: what a dear lever makes pointless (16-bit weights under adapters) does not apply any more and is left out.
    """
    steps: list[tuple[Lever, Job, Job]] = []
    edited = job
    for lever in reversed(levers):
        if not lever.applies(edited):
            continue
        before, value = edited, values.get(lever.name)
        edited = lever.edit(before) if value is None or lever.edit_to is None else lever.edit_to(before, value)
        steps.append((lever, before, edited))
    steps.reverse()
    return edited, steps


def _saved(current: Estimate, trial: Trial) -> int:
    return current.peak.device_bytes - trial.estimate.peak.device_bytes


def _worth(trials: Sequence[Trial], current: Estimate) -> list[Trial]:
    """The trials worth a line, in order of cost; of more than can be shown, those that save most."""
    worth = [trial for trial in trials if trial.saves(current, more_than=current.peak.device_bytes * WORTH_SHOWING)]
    best = sorted(worth, key=lambda trial: _saved(current, trial), reverse=True)[:MOST_SHOWN]
    return [trial for trial in worth if trial in best]


def _shown(trials: Sequence[Trial], current: Estimate) -> tuple[Recommendation, ...]:
    return tuple(recommendation(trial, current) for trial in trials[:MOST_SHOWN])


def recommendation(trial: Trial, current: Estimate) -> Recommendation:
    """A trial in words."""
    peak = trial.estimate.peak
    cost = "; ".join(_text(lever.cost, before, after) for lever, before, after in trial.steps)
    cluster = trial.job.cluster
    if trial.fits == "no" and cluster is not None:
        cost += f"; still short by {format_gib(peak.device_bytes - cluster.usable_bytes)} on {cluster_text(cluster)}"
    return Recommendation(
        change=" + ".join(_text(lever.change, before, after) for lever, before, after in trial.steps),
        flags=tuple(flag for lever, _, _ in trial.steps for flag in lever.flags(trial.job)),
        peak_bytes=peak.device_bytes,
        saves_bytes=_saved(current, trial),
        cost=cost,
        fits=trial.fits,
    )


def _text(text: Callable[[Job, Job], str], before: Job, after: Job) -> str:
    return text(before, after)
