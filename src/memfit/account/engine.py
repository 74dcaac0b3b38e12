"""From a resolved job to an estimate: compile (cached), evaluate, and put the three numbers together for every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from memfit.account import overheads
from memfit.account.compilation import Compiled, compile_job, compile_training_job, least_profile, trained_parameters
from memfit.account.estimate import CacheUse, Component, Estimate, Peak, Phase, Rank
from memfit.account.formulas import formula
from memfit.account.intervals import WIDTHS, WORKING_SET, bounds, combine, working_width
from memfit.account.layout import layout_of
from memfit.account.overheads import Overhead
from memfit.account.pipelines import holds
from memfit.account.profile import Moment, Numbers, Profile, Terms, amount, components, moment_bytes, monomials
from memfit.account.ranks import RankJob, groups_of, rank_jobs
from memfit.account.serving import STEP
from memfit.job import Inference, Job

STATIC_COMPONENTS = ("weights", "master_weights", "optimizer_states", "kv_cache", "recurrent_state", "workspace")
"""What is taken once and never given back: the allocator does not fragment around it."""


class _Binding(NamedTuple):
    """A moment, evaluated."""

    moment: Moment
    allocated: int
    counts: tuple[int, ...]


def _evaluated(compiled: Compiled) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes of every moment, and the counts of each of the job's numbers."""
    profile = compiled.profile
    counts = [monomials(one, profile.windows) for one in compiled.numbers]
    return moment_bytes(profile, counts), counts


def _binding_moments(bindings: list[_Binding]) -> list[_Binding]:
    """The largest moment of every phase, in order of appearance."""
    best: dict[str, _Binding] = {}
    for one in bindings:
        found = best.get(one.moment.phase)
        if found is None or one.allocated > found.allocated:
            best[one.moment.phase] = one
    return list(best.values())


def _components(compiled: Compiled, binding: _Binding) -> dict[str, int]:
    """Bytes of every component at a moment."""
    found = {} if binding.moment.alone else components(compiled.profile.statics, binding.counts)
    for name, value in components(binding.moment.form, binding.counts).items():
        found[name] = found.get(name, 0) + value
    return found


class _AtPeak(NamedTuple):
    """The binding moment, what every component holds then, what lies outside of the tensors, and the sums."""

    moment: Moment
    components: dict[str, int]
    outside: dict[str, Overhead]
    allocated: int
    reserved: int
    """What the allocator holds."""
    device: int
    """What the process takes."""


def _at_peak(job: Job, compiled: Compiled, values: list[int], counts: list[tuple[int, ...]]) -> _AtPeak:
    allocated = max(values)
    moment = compiled.profile.moments[values.index(allocated)]
    found = _components(compiled, _Binding(moment, allocated, counts[moment.numbers]))
    dynamic = allocated
    for name in STATIC_COMPONENTS:
        dynamic -= found.get(name, 0)
    outside = _outside(job, dynamic)
    reserved = allocated + outside["fragmentation"].bytes
    device = reserved
    for name, one in outside.items():
        if name != "fragmentation":
            device += one.bytes
    return _AtPeak(moment, found, outside, allocated, reserved, device)


def least_bytes(job: Job) -> int:
    """A lower bound of the device peak that needs no measuring: what an optimizer step of a training job holds.

    0 for inference, whose estimates are cheap. It rules out alternatives that cannot fit, or cannot save anything.
    """
    workload = job.workload
    if isinstance(workload, Inference):
        return 0
    most = 0
    for one in rank_jobs(job):
        compiled = compile_training_job(one.job, workload, one.in_flight, least_profile)
        most = max(most, _at_peak(one.job, compiled, *_evaluated(compiled)).device)
    return most


def estimate(job: Job) -> Estimate:
    """The memory of a resolved job on each of its devices.

    Raises:
        UsageError: a custom optimizer that cannot be read, precisions that contradict each other, degrees that the model does
            not allow.
    """
    found = [(one, compile_job(one.job, one.in_flight)) for one in rank_jobs(job)]
    ranks = tuple([_rank(one, compiled) for one, compiled in found])
    peaks = [rank.peak.device_bytes for rank in ranks]
    of, compiled = found[peaks.index(max(peaks))]
    whole = compiled.profile.trained_parameters if of.job is job else trained_parameters(job)
    return Estimate(
        ranks=ranks,
        host_bytes=max([_host_bytes(one) for _, one in found]),
        cache=_cache_use(of.job, compiled),
        trainable_parameters=whole,
    )


def _host_bytes(compiled: Compiled) -> int:
    """What waits in host memory: states, and inputs of checkpoints."""
    profile = compiled.profile
    if not profile.host:
        return compiled.host_bytes
    return compiled.host_bytes + int(amount(profile.host, monomials(compiled.numbers[0], profile.windows)))


def _rank(of: RankJob, compiled: Compiled) -> Rank:
    """One of the distinct ranks."""
    job = of.job
    values, counts = _evaluated(compiled)
    at_peak = _at_peak(job, compiled, values, counts)
    return _ComputedRank(
        rank=of.name,
        count=of.devices,
        components=(),
        phases=(),
        peak=_peak(job, compiled, at_peak),
        holds=holds(job.model, of.in_flight) if job.model.receives or job.model.sends else "",
        profile=compiled.profile,
        counts=counts[0],
        details=partial(_details, job, compiled, at_peak.components, at_peak.outside),
    )


def _outside(job: Job, dynamic: int) -> dict[str, Overhead]:
    """What the process takes beside its tensors, but for the workspaces, which are among them."""
    device, given = job.cluster.device if job.cluster else None, job.overheads
    if given.fragmentation is None:
        unused = overheads.fragmentation(dynamic, gathers=layout_of(job).gathers_apart)
    else:
        unused = _fixed(given.fragmentation)
    found = {
        "context": overheads.context(device) if given.cuda_context is None else _fixed(given.cuda_context),
        "fragmentation": unused,
    }
    groups = groups_of(job)
    if groups:
        said = given.communication
        found["communication"] = overheads.communication(device, groups) if said is None else _fixed(said)
    return found


def _peak(job: Job, compiled: Compiled, at_peak: _AtPeak) -> Peak:
    """The three numbers and their bounds."""
    found = at_peak.components
    parts = [(one.bytes, one.low, one.high) for one in (compiled.workspace, *at_peak.outside.values()) if one.low != one.high]
    uncertainty = job.model.relative_uncertainty
    working = working_width(job, compiled.widths)
    if uncertainty:
        sizes = [(name, value) for name, value in found.items() if name != "workspace"]
    else:  # one residual speaks for all that operations take: their errors go together
        sizes = [(WORKING_SET[0], sum([found.get(name, 0) for name in WORKING_SET]))]
    for name, value in sizes:
        parts.append((value, *bounds(name, value, uncertainty, working)))
    low, high, safe = combine(at_peak.device, parts, certain_model=not uncertainty)
    return Peak(
        phase=at_peak.moment.phase,
        allocated_bytes=at_peak.allocated,
        reserved_bytes=at_peak.reserved,
        device_bytes=at_peak.device,
        low_bytes=low,
        high_bytes=high,
        safe_bytes=safe,
        where=at_peak.moment.where,
    )


class _ComputedRank(Rank):
    """A rank whose table is made when it is asked for: solving for a limit needs only the peak."""

    details: Callable[[], tuple[tuple[Component, ...], tuple[Phase, ...]]]
    profile: Profile
    counts: tuple[int, ...]

    @property  # type: ignore[misc]
    def kept_bytes(self) -> int | None:
        """Training: what autograd holds when forward and loss have run."""
        return self._at(self.profile.kept)

    @property  # type: ignore[misc]
    def forward_end_bytes(self) -> int | None:
        """Training: everything allocated at that moment."""
        return self._at(self.profile.forward_end)

    @property  # type: ignore[misc]
    def backward_end_bytes(self) -> int | None:
        """Training: everything allocated when backward has run and the optimizer has not."""
        return self._at(self.profile.backward_end)

    def _at(self, terms: Terms) -> int | None:
        return int(amount(terms, self.counts)) if self.profile.kept else None

    def __repr__(self) -> str:
        """As any rank; what makes the table has thousands of digits."""
        return repr(Rank(**{name: getattr(self, name) for name in Rank.field_names}))

    @cached_property
    def _table(self) -> tuple[tuple[Component, ...], tuple[Phase, ...]]:
        return self.details()

    @property  # type: ignore[misc]
    def components(self) -> tuple[Component, ...]:
        """The rows of the answer, largest first."""
        return self._table[0]

    @property  # type: ignore[misc]
    def phases(self) -> tuple[Phase, ...]:
        """The phases in order."""
        return self._table[1]


def _phases(compiled: Compiled, bindings: list[_Binding]) -> tuple[Phase, ...]:
    """Each phase at its largest; the first step, before lazy optimizer states exist, apart."""
    phases = [
        Phase(name=one.moment.phase, allocated_bytes=one.allocated, components=_components(compiled, one)) for one in bindings
    ]
    lazy = compiled.profile.lazy_states
    if not lazy:
        return tuple(phases)
    first = [
        Phase(
            name=one.name,
            allocated_bytes=one.allocated_bytes - lazy,
            first_step=True,
            components={**one.components, "optimizer_states": 0},
        )
        for one in phases
        if one.name in compiled.profile.lazy_phases
    ]
    return (*phases, *first)


def _details(
    job: Job, compiled: Compiled, at_peak: dict[str, int], outside: dict[str, Overhead]
) -> tuple[tuple[Component, ...], tuple[Phase, ...]]:
    """The table of components, largest first, and the phases."""
    values, counts = _evaluated(compiled)
    bindings = [
        _Binding(moment, allocated, counts[moment.numbers])
        for moment, allocated in zip(compiled.profile.moments, values, strict=True)
    ]
    phases = _phases(compiled, _binding_moments(bindings))
    known = {"workspace": compiled.workspace, **outside}
    largest = {name: one.bytes for name, one in outside.items()}
    for binding in bindings:
        for name, value in _components(compiled, binding).items():
            if value > largest.get(name, 0):
                largest[name] = value
    uncertainty, working = job.model.relative_uncertainty, working_width(job, compiled.widths)
    table = []
    for name, value in sorted(largest.items(), key=lambda pair: -pair[1]):
        overhead = known.get(name)
        if overhead is not None:
            low, high, basis = overhead.low, overhead.high, "assumed" if overhead.low != overhead.high else "exact"
        else:
            low, high = bounds(name, value, uncertainty, working)
            basis = "assumed" if uncertainty else WIDTHS.get(name, working).basis
        now = outside[name].bytes if name in outside else at_peak.get(name, 0)
        table.append(
            Component(
                name=name,
                bytes=value,
                at_peak_bytes=now,
                low_bytes=low,
                high_bytes=high,
                basis=basis,
                formula=formula(name, job, compiled, value),
                source=overhead.source if overhead else "",
            )
        )
    return tuple(table), phases


def _fixed(value: int) -> Overhead:
    return Overhead(value, value, value, "given by hand")


def _cache_use(job: Job, compiled: Compiled) -> CacheUse | None:
    workload = job.workload
    profile = compiled.profile
    if not isinstance(workload, Inference) or not (profile.cache or profile.state):
        return None
    return _cache_of_one(profile.cache, profile.state, profile.windows, compiled.numbers[STEP]._replace(sequences=1))


@lru_cache(maxsize=256)
def _cache_of_one(cache: Terms, state: Terms, windows: tuple[int, ...], last: Numbers) -> CacheUse:
    """The cache of one sequence at its last token; the same however many there are."""
    earlier = last._replace(keys=last.keys - 1, target_keys=last.target_keys - 1)
    counts, counts_before = monomials(last, windows), monomials(earlier, windows)
    now = amount(cache, counts)
    return CacheUse(
        bytes_per_token=now - amount(cache, counts_before),
        bytes_per_sequence=now,
        state_bytes_per_sequence=amount(state, counts),
    )
