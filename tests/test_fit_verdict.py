"""The verdict's thresholds, by hand: usable 1,000 bytes."""

from __future__ import annotations

import dataclasses

import pytest
from fit_fakes import alone, cluster, estimate_of, peak, training_job

from memfit.account.estimate import Estimate
from memfit.fit.verdict import allowed_bytes, fits, judge, margin_bytes, shortfall_bytes
from memfit.job import Job
from memfit.units import GiB


@pytest.mark.parametrize(
    ("device", "low", "safe", "headroom", "expected"),
    [
        (900, 850, 1000, 0.1, "yes"),  # both at their bound
        (901, 850, 1000, 0.1, "tight"),  # one byte into the headroom
        (900, 850, 1001, 0.1, "tight"),  # the safe bound one byte over
        (1100, 1000, 1200, 0.1, "tight"),  # low exactly at usable is not "no"
        (1100, 1001, 1200, 0.1, "no"),
        (1000, 1000, 1000, 0.0, "yes"),  # no headroom asked
        (100, 100, 100, 0.9, "yes"),  # 1 - 0.9 in binary is below a tenth; the rule is in integers
        (101, 101, 101, 0.9, "tight"),
        (700, 700, 700, 0.3, "yes"),
    ],
)
def test_rule(device: int, low: int, safe: int, headroom: float, expected: str) -> None:
    assert fits(peak(device, low=low, safe=safe), 1000, headroom) == expected


def test_allowed_is_rounded_down() -> None:
    assert allowed_bytes(15, 0.1) == 13  # 13.5
    assert allowed_bytes(85_899_345_920, 0.1) == 77_309_411_328


def test_margin_is_the_smaller_of_the_two() -> None:
    assert margin_bytes(peak(850, safe=990), 1000, 0.1) == 10
    assert margin_bytes(peak(880, safe=950), 1000, 0.1) == 20
    assert shortfall_bytes(peak(930, safe=950), 1000, 0.1) == 30
    assert shortfall_bytes(peak(880, safe=950), 1000, 0.1) == 0


def _estimate(device: int, low: int, safe: int, phase: str) -> Estimate:
    return alone(peak(device, low=low, safe=safe, phase=phase))


def _job(headroom: float = 0.1) -> Job:
    return dataclasses.replace(training_job(headroom=headroom), cluster=cluster(80 * GiB, name="Toy 80GB"))


def test_summary_when_it_fits() -> None:
    verdict = judge(_job(), _estimate(72 * GiB, 70 * GiB, 79 * GiB, "optimizer-step"))
    assert verdict is not None
    assert (verdict.fits, verdict.headroom_bytes) == ("yes", 8 * GiB)
    assert verdict.summary == "FITS: 72.00 of 80.00 GiB (90 %) on 1x Toy 80GB; binds: optimizer-step"


def test_summary_when_tight_names_the_reason() -> None:
    room = judge(_job(), _estimate(76 * GiB, 70 * GiB, 79 * GiB, "loss"))
    assert room is not None
    assert room.summary == "TIGHT: 76.00 of 80.00 GiB (95 %) on 1x Toy 80GB, less than 10 % free; binds: loss"
    bound = judge(_job(), _estimate(70 * GiB, 66 * GiB, 82 * GiB, "loss"))
    assert bound is not None
    assert bound.summary == "TIGHT: 70.00 of 80.00 GiB (88 %) on 1x Toy 80GB, may need 82.00 GiB; binds: loss"


def test_summary_when_more_than_there_is_is_expected_says_so() -> None:
    over = judge(_job(), _estimate(82 * GiB, 78 * GiB, 90 * GiB, "loss"))
    assert over is not None
    assert (over.fits, over.headroom_bytes) == ("tight", -2 * GiB)
    assert over.summary == (
        "TIGHT: 82.00 of 80.00 GiB (102 %) on 1x Toy 80GB, more than is available is expected: it fits only near the low end "
        "of the estimate (78.00 GiB); binds: loss"
    )


def test_summary_when_it_does_not_fit() -> None:
    verdict = judge(_job(), _estimate(90 * GiB + 410 * GiB // 1024, 85 * GiB, 95 * GiB, "backward"))
    assert verdict is not None
    assert verdict.headroom_bytes == -10 * GiB - 410 * GiB // 1024
    assert verdict.summary == "DOES NOT FIT: short by 10.40 GiB on 1x Toy 80GB; binds: backward"


def test_no_device_no_verdict() -> None:
    assert judge(training_job(), estimate_of({"loss": {"weights": 1}})) is None
