"""Judging an estimate: verdict, limits, the smallest change that makes it fit, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.account import Resolved, least_bytes
from memfit.account import estimate as real_estimate
from memfit.account import resolve as real_resolve
from memfit.account.estimate import Estimate
from memfit.account.layout import layout_of
from memfit.fit.advise import next_steps, verify, warnings
from memfit.fit.answer import Answer, Limit, Recommendation, RuleOfThumb, Step, Verdict, Warning
from memfit.fit.devices import more_devices, smallest_clusters
from memfit.fit.hardware import smallest_devices
from memfit.fit.kernels import kernels_in_force
from memfit.fit.ladder import climb
from memfit.fit.limits import EstimateFunction, solve_limits
from memfit.fit.thumb import rule_of_thumb
from memfit.fit.verdict import judge
from memfit.job import Job

__all__ = ["Answer", "Limit", "Recommendation", "RuleOfThumb", "Step", "Verdict", "Warning", "answer", "judge_estimate"]


def answer(job: Job, *, estimate: EstimateFunction = real_estimate) -> Answer:
    """Everything memfit says about one job.

    Raises:
        UsageError: the job's fields contradict each other (see `memfit.account.resolve`).
    """
    return judge_estimate(job, real_resolve(job), estimate)


def judge_estimate(asked: Job, resolved: Resolved, estimate: EstimateFunction) -> Answer:
    """The answer to a job that has been resolved. `asked` is the job as given: commands to run next repeat it."""
    job = resolved.job
    current = estimate(job)
    verdict = judge(job, current)
    limits = solve_limits(job, estimate, current)
    ladder = climb(job, estimate, current, least_bytes if estimate is real_estimate else None)
    lacking = verdict is not None and verdict.fits != "yes" and ladder.best is None
    more = more_devices(job, estimate, current) if lacking else ()
    where = _where(job, estimate, current) if job.cluster is None else ()
    given = [Warning(code=code, text=text) for code, text in resolved.warnings]
    return Answer(
        job=job,
        estimate=current,
        verdict=verdict,
        limits=limits,
        recommendations=(*[one.recommendation for one in more], *ladder.recommendations),
        rule_of_thumb=rule_of_thumb(job, current),
        assumptions=resolved.assumptions,
        warnings=_each_code_once([*given, *warnings(job, estimate, current, verdict)]),
        verify=verify(job, current),
        next=next_steps(asked, job, estimate, current, verdict, limits, ladder, where, [one.job for one in more]),
        smallest_devices=where,
        kernels=kernels_in_force(job, estimate, current.peak.device_bytes),
    )


def _where(job: Job, estimate: EstimateFunction, current: Estimate) -> tuple[tuple[str, int], ...]:
    """The smallest devices that hold a job that names none; several of one kind where no single one does."""
    single = smallest_devices(job, estimate, current.peak.device_bytes)
    if single or layout_of(job).devices > 1:
        return tuple((device.id, layout_of(job).devices) for device in single)
    return smallest_clusters(job, estimate)


def _each_code_once(found: Iterable[Warning]) -> tuple[Warning, ...]:
    return tuple({one.code: one for one in reversed(list(found))}.values())[::-1]
