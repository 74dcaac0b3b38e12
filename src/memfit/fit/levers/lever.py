"""The record: what a lever is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.job import Job
from memfit.records import Record


class Lever(Record):
    """One kind of change. Its place in its table is its cost: earlier is cheaper."""

    name: str
    """Stable identifier, unique among all levers."""
    group: str
    """Levers of one group are alternatives: a combination takes at most one of them."""
    why_here: str
    """Why it is cheaper than the next lever of the table and dearer than the one before."""
    applies: Callable[[Job], bool]
    """Whether the change is possible and is not made already."""
    edit: Callable[[Job], Job]
    """The resolved job with the change made, resolved itself. For a lever on a number: the change at its strongest."""
    change: Callable[[Job, Job], str]
    """In words, from the job before and after."""
    cost: Callable[[Job, Job], str]
    """What it costs in throughput, quality or function, with numbers, from the job before and after."""
    flags: Callable[[Job], tuple[str, ...]]
    """How the runtime of the edited job spells it."""
    free: bool = False
    """It costs neither throughput nor quality, so it is named even when the job fits."""
    changes_task: bool = False
    """It changes what is computed, not only how: combinations of other levers go before it."""
    last_resort: bool = False
    """It makes a step several times slower: combinations of other levers go before it as well."""
    may_add: bool = False
    """It can add memory beside what it frees, so a set with it may not fit where the same set without it does."""
    spreads: int = 0
    """1 and more: it takes devices for layers that others would take (tensor, then pipeline parallelism)."""
    edit_to: Callable[[Job, int], Job] | None = None
    """Levers on a number: the job with it at a value (or the nearest legal one below); solved for the largest that fits."""
    strongest: int = 1
    """Levers on a number: the smallest value that is proposed."""
    value: Callable[[Job], int] | None = None
    """Levers on a number: its value in a job."""


def with_workload(job: Job, **edits: Any) -> Job:
    """The job with fields of its workload replaced."""
    return job.replace(workload=job.workload.replace(**edits))
