"""What the benchmarks share: a table of figures with their limits, and the exit status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """One measured figure. `at_least`: the limit is a floor, not a ceiling."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def show(figures: Sequence[Figure]) -> int:
    """Print the table; the exit status is 1 if a limit does not hold."""
    width = max(len(one.name) for one in figures)
    print(f"{'what':{width}}  {'measured':>14}  {'limit':>16}")
    for one in figures:
        limit = f"{'>=' if one.at_least else '<='} {one.limit:,.0f} {one.unit}"
        print(f"{one.name:{width}}  {one.value:>11,.2f} {one.unit:2}  {limit:>16}  {'ok' if one.holds else 'TOO SLOW'}")
    return 0 if all(one.holds for one in figures) else 1
