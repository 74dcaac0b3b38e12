"""The verdict: a peak against the usable memory of one device, with headroom.

The rule is the contract's: `no` if low > usable; `yes` if safe <= usable and device <= usable x (1 - headroom); else `tight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.account.estimate import Estimate, Peak
from memfit.fit.answer import Verdict
from memfit.job import Job
from memfit.units import format_gib

if TYPE_CHECKING:
    from memfit.devices import Cluster

_MILLION = 10**6


def allowed_bytes(usable: int, headroom: float) -> int:
    """Bytes that may be used when a share is to stay free: floor(usable x (1 - headroom)).

    In integers, with the headroom to the millionth: 1 - 0.9 in binary fractions is a little less than a tenth.
    """
    return usable * (_MILLION - round(headroom * _MILLION)) // _MILLION


def margin_bytes(peak: Peak, usable: int, headroom: float) -> int:
    """Bytes by which a peak is inside (>= 0) or outside (< 0) of `yes`: min(usable - safe, allowed - device)."""
    return min(usable - peak.safe_bytes, allowed_bytes(usable, headroom) - peak.device_bytes)


def fits(peak: Peak, usable: int, headroom: float) -> str:
    """`yes`, `tight` or `no` by the rule above."""
    if peak.low_bytes > usable:
        return "no"
    return "yes" if margin_bytes(peak, usable, headroom) >= 0 else "tight"


def job_fits(peak: Peak, job: Job) -> str | None:
    """The same for a job; `None` when it names no device."""
    return None if job.cluster is None else fits(peak, job.cluster.usable_bytes, job.headroom)


def shortfall_bytes(peak: Peak, usable: int, headroom: float) -> int:
    """Bytes that are missing to `yes`; 0 when it is."""
    return max(0, -margin_bytes(peak, usable, headroom))


def cluster_text(cluster: Cluster) -> str:
    """`8x H100 SXM 80GB`."""
    return f"{cluster.count}x {cluster.device.title}"


def judge(job: Job, estimate: Estimate) -> Verdict | None:
    """The verdict on a job with its estimate; `None` when it names no device."""
    if job.cluster is None:
        return None
    usable = job.cluster.usable_bytes
    peak = estimate.peak
    word = fits(peak, usable, job.headroom)
    return Verdict(fits=word, headroom_bytes=usable - peak.device_bytes, summary=_summary(word, peak, job, job.cluster))


def _summary(word: str, peak: Peak, job: Job, cluster: Cluster) -> str:
    usable = cluster.usable_bytes
    where = f"on {cluster_text(cluster)}"
    if word == "no":
        return f"DOES NOT FIT: short by {format_gib(peak.device_bytes - usable)} {where}; binds: {peak.phase}"
    device = format_gib(peak.device_bytes).removesuffix(" GiB")
    share = f"{device} of {format_gib(usable)} ({_percent(peak.device_bytes, usable)} %)"
    if word == "yes":
        return f"FITS: {share} {where}; binds: {peak.phase}"
    return f"TIGHT: {share} {where}, {_why_tight(peak, usable, job.headroom)}; binds: {peak.phase}"


def _percent(part: int, whole: int) -> int:
    return round(100 * part / whole) if whole else 0


def _why_tight(peak: Peak, usable: int, headroom: float) -> str:
    if peak.device_bytes > usable:
        return f"more than is available is expected: it fits only near the low end of the estimate ({format_gib(peak.low_bytes)})"
    if peak.safe_bytes > usable:
        return f"may need {format_gib(peak.safe_bytes)}"
    return f"less than {headroom * 100:g} % free"
