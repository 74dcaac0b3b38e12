"""The estimate judged: verdict, limits, recommendations, assumptions, what to verify, what to try next."""

from __future__ import annotations

from memfit.account.estimate import Estimate
from memfit.job import Assumption, Job
from memfit.records import Record


class Verdict(Record):
    """`fits`: no if low > usable; yes if safe <= usable and device <= usable x (1 - headroom); else tight."""

    fits: str
    headroom_bytes: int
    """Usable memory minus the device peak; negative when it does not fit."""
    summary: str


class Limit(Record):
    """The largest value of one number that is still `yes`, with the fixed part and the part per unit apart."""

    max: int | None
    likely: int | None
    """The largest value whose expected device peak is within the usable memory."""
    fixed_bytes: int
    bytes_per_unit: int
    binds: str
    """The phase that binds at the largest value."""
    remark: str = ""
    """What bounds it beside memory: the model's positions."""


class Recommendation(Record):
    """One change, or several together, evaluated on the edited job."""

    change: str
    flags: tuple[str, ...]
    peak_bytes: int
    saves_bytes: int
    cost: str
    fits: str | None


class RuleOfThumb(Record):
    """What a textbook factor would have said, and why the answer differs."""

    formula: str
    bytes: int
    differs_because: str


class Warning(Record):
    """Something the user should know before trusting the answer. `code` is stable."""

    code: str
    text: str


class Step(Record):
    """A command to run: to verify the answer, or to go on from it."""

    why: str
    command: str


class Kernel(Record):
    """A kernel in force: what it computes (modules, attention, loss), its name, and why it is that one."""

    computes: str
    name: str
    why: str
    layers: int | None = None
    """How many layers it computes; `None`: all."""
    costs_bytes: int | None = None
    """Device bytes beyond what the kernel without a mask would take; `None`: not a question of a mask."""
    source: str = ""


class Answer(Record):
    """Everything memfit says about one job."""

    job: Job
    estimate: Estimate
    verdict: Verdict | None
    limits: dict[str, Limit]
    recommendations: tuple[Recommendation, ...]
    rule_of_thumb: RuleOfThumb | None
    assumptions: tuple[Assumption, ...]
    warnings: tuple[Warning, ...]
    verify: tuple[Step, ...]
    next: tuple[Step, ...]
    smallest_devices: tuple[tuple[str, int], ...] = ()
    """Without a device: the smallest catalogue devices that hold the job, as (id, count)."""
    kernels: tuple[Kernel, ...] = ()
    """The kernels in force, and why."""
