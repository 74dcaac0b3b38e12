"""The result of a validation: rows with their errors, groups with their statistics, and what could not be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. Bytes, or a count of parameters in the group of parameters."""

    id: str
    measured: int
    predicted: int
    relative_to: int
    """What the error is a share of: the measured value, or the part of it that is neither parameters nor optimizer states."""
    low: int | None = None
    high: int | None = None
    """The 90 % interval around the prediction, where the estimate gives one for this number."""
    rounding: int = 0
    """Half of the last digit that the source gives: the measured value is known no better."""
    source: str = ""
    note: str = ""
    """Why the row may differ, where that is known."""

    @property
    def error(self) -> int:
        """predicted - measured: positive if memfit says more than there was."""
        return self.predicted - self.measured

    @property
    def error_percent(self) -> float:
        """100 x (predicted - measured) / relative_to"""
        return 100 * self.error / self.relative_to if self.relative_to else 0.0

    @property
    def covered(self) -> bool | None:
        """Whether the measured value, as far as its digits go, lies in the interval; `None` without an interval."""
        if self.low is None or self.high is None:
            return None
        return self.low - self.rounding <= self.measured <= self.high + self.rounding


def half_digit(value: float, unit: int) -> int:
    """Half of the last digit of a figure as it is written, in bytes: 14.38 of 1 GiB -> 0.005 GiB; exact bytes -> 0."""
    if unit == 1:
        return 0
    digits = len(str(value).partition(".")[2].rstrip("0"))
    return round(0.5 * unit / 10.0**digits)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that is at least as large as the share `share` of all values (nearest rank).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    rank = -(-len(ordered) * round(share * 100) // 100)
    return ordered[max(rank, 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of one kind and one metric, worst first. Statistics are over the size of the error, without its sign, but `bias`."""

    name: str
    title: str
    metric: str
    """What was measured: parameters | kept bytes | allocated | reserved | device total."""
    kind: str
    """exact (the same code without a device) | traced (an ideal allocator) | measured (on a device)"""
    about: str
    """What is compared, and how the software that ran differs from what memfit counts."""
    rows: tuple[Row, ...]

    @property
    def errors(self) -> list[float]:
        """Sizes of the errors in percent."""
        return [abs(row.error_percent) for row in self.rows]

    @property
    def mean_percent(self) -> float:
        """Mean size of the error."""
        return fmean(self.errors)

    @property
    def median_percent(self) -> float:
        """Median size of the error."""
        return median(self.errors)

    @property
    def p90_percent(self) -> float:
        """Nine of ten errors are at most this large."""
        return percentile(self.errors, 0.9)

    @property
    def worst_percent(self) -> float:
        """The largest error."""
        return max(self.errors)

    @property
    def bias_percent(self) -> float:
        """Mean of the errors with their sign: positive if memfit says too much."""
        return fmean(row.error_percent for row in self.rows)

    @property
    def num_exact(self) -> int:
        """Rows without any difference."""
        return sum(1 for row in self.rows if row.error == 0)

    @property
    def coverage(self) -> tuple[int, int] | None:
        """Rows whose measured value lies in the 90 % interval, of how many that have one; `None` if none has."""
        known = [row.covered for row in self.rows if row.covered is not None]
        return (sum(known), len(known)) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run of which is known only whether it fitted."""

    id: str
    observed: str
    """fits | oom"""
    predicted: str
    """fits | oom | tight: the verdict without headroom; tight if the device lies in the interval."""
    source: str = ""

    @property
    def right(self) -> bool:
        """Whether the verdict agrees; `tight` never does, because it decides nothing."""
        return self.observed == self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of the corpus that were not compared, and why."""

    id: str
    file: str
    reason: str
    detail: str = ""
    """Which architecture, method or field it is."""
    count: int = 1


class Reason(NamedTuple):
    """Rows of one file that were left out for one reason, with the details that occur."""

    file: str
    reason: str
    details: tuple[str, ...]
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All groups, the outcomes, and what was left out."""

    groups: tuple[Group, ...]
    outcomes: tuple[Outcome, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def group(self, name: str) -> Group:
        """The group of this name.

        Raises:
            KeyError: there is none.
        """
        for one in self.groups:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def worst(self) -> list[tuple[Group, Row]]:
        """All rows with their group, largest error first."""
        pairs = [(group, row) for group in self.groups for row in group.rows]
        return sorted(pairs, key=lambda pair: -abs(pair[1].error_percent))

    @property
    def reasons(self) -> list[Reason]:
        """What was left out by file and reason, most rows first."""
        found: dict[tuple[str, str], list[LeftOut]] = {}
        for one in self.left_out:
            found.setdefault((one.file, one.reason), []).append(one)
        made = [
            Reason(file, reason, tuple(sorted({one.detail for one in rows if one.detail})), sum(one.count for one in rows))
            for (file, reason), rows in found.items()
        ]
        return sorted(made, key=lambda one: (-one.num_rows, one.file, one.reason))
