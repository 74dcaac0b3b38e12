"""What to know, what to run to verify the answer, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.account.estimate import Estimate
from memfit.account.resolve import runtime_of
from memfit.fit.answer import Limit, Step, Verdict, Warning
from memfit.fit.command import cluster_word, command_line, device_word, model_words
from memfit.fit.hardware import smallest_devices
from memfit.fit.ladder import Ladder
from memfit.fit.limits import EstimateFunction, number, with_number
from memfit.fit.verdict import cluster_text
from memfit.job import Inference, Job, Training
from memfit.units import format_gib

if TYPE_CHECKING:
    from memfit.devices import Device

NOTICEABLE = 0.01
"""Share of the peak below which a difference is not worth a warning."""

SHORT_SEQUENCE = 512
"""Tokens. Judgement: a training sequence below this is more often the mean of the data than its longest."""


# --- warnings


def warnings(job: Job, estimate: EstimateFunction, current: Estimate, verdict: Verdict | None) -> tuple[Warning, ...]:
    """What the user should know before trusting the answer to a resolved job."""
    found = [_beyond_positions(job), _tight(job, current, verdict)]
    if isinstance(job.workload, Training):
        found += [_first_step(current), _short_sequence(job)]
        if verdict is None or verdict.fits != "no":
            found.append(_padding(job, estimate, current))
    return tuple(one for one in found if one is not None)


def _beyond_positions(job: Job) -> Warning | None:
    name = "context" if isinstance(job.workload, Inference) else "seq"
    length, positions = number(job, name), job.model.max_positions
    if positions is None or length <= positions:
        return None
    why = "has learned positions up to" if job.model.hard_position_limit else "was made for"
    return Warning(code="beyond-positions", text=f"--{name} {length:,} is beyond the model: it {why} {positions:,}")


def _tight(job: Job, current: Estimate, verdict: Verdict | None) -> Warning | None:
    if verdict is None or verdict.fits != "tight" or job.cluster is None:
        return None
    peak, usable = current.peak, job.cluster.usable_bytes
    low, high = format_gib(peak.low_bytes), format_gib(peak.high_bytes)
    text = f"the peak is between {low} and {high} (90 %) of {format_gib(usable)} usable: it may run out of memory"
    return Warning(code="tight", text=text)


def first_step_bytes(current: Estimate) -> int | None:
    """Largest allocation of the first step; `None` where it does not differ from the steady state."""
    phases = current.worst.phases
    first = {phase.name: phase.allocated_bytes for phase in phases if phase.first_step}
    if not first:
        return None
    steady = {phase.name: phase.allocated_bytes for phase in phases if not phase.first_step}
    return max((steady | first).values())


def _first_step(current: Estimate) -> Warning | None:
    first, steady = first_step_bytes(current), current.peak.allocated_bytes
    if first is None or steady - first <= steady * NOTICEABLE:
        return None
    text = (
        f"the first step peaks at {format_gib(first)} allocated, later ones at {format_gib(steady)}: "
        "the optimizer states are made at the end of the first step, so one step that runs proves nothing"
    )
    return Warning(code="first-step-lower", text=text)


def _padding(job: Job, estimate: EstimateFunction, current: Estimate) -> Warning | None:
    workload = job.workload
    if not isinstance(workload, Training) or workload.padding != "none" or workload.attention == "flash" or job.model.pixels:
        return None
    padded = job.replace(workload=workload.replace(padding="right"))
    more = estimate(padded).peak.device_bytes - current.peak.device_bytes
    if more <= current.peak.device_bytes * NOTICEABLE:
        return None
    text = f"any padding in a batch switches the attention kernel and costs {format_gib(more)} more (--padding right)"
    return Warning(code="padding-costs", text=text)


def _short_sequence(job: Job) -> Warning | None:
    length, positions = number(job, "seq"), job.model.max_positions
    if job.model.pixels or length >= SHORT_SEQUENCE or (positions is not None and length >= positions):
        return None
    text = f"--seq {length:,} is short: the longest batch of a run decides its peak, so give the longest sequence, not the mean"
    return Warning(code="short-sequence", text=text)


# --- verify


def verify(job: Job, current: Estimate) -> tuple[Step, ...]:
    """What to run to check the answer, and which of the three numbers to compare with it."""
    peak = current.peak
    vendor = job.cluster.device.vendor if job.cluster is not None else "nvidia"
    if vendor == "google":
        why = f"after two steps or one full-length request: compare with {format_gib(peak.device_bytes)} on each device"
        return (Step(why=why, command=_XLA_PEAK),)
    allocated = f"compare with {format_gib(peak.allocated_bytes)} allocated"
    if not isinstance(job.workload, Training):
        run = f"after one full-length request: {allocated}"
    elif runtime_of(job).trainer:
        run = f"with --max_steps 2 (the first step is lower: optimizer states are made at its end): {allocated}"
    else:
        run = f"after two steps (the first is lower: optimizer states are made at its end): {allocated}"
    reserved = f"at the same place: compare with {format_gib(peak.reserved_bytes)} reserved"
    steps = [Step(why=run, command=_ALLOCATED), Step(why=reserved, command=_RESERVED)]
    command = _DEVICE_COMMANDS.get(vendor)
    if command is not None:
        why = f"while it runs: compare with {format_gib(peak.device_bytes)} on the device, context included"
        steps.append(Step(why=why, command=command))
    return tuple(steps)


_ALLOCATED = 'python: print(torch.cuda.max_memory_allocated() / 2**30, "GiB")'
_RESERVED = 'python: print(torch.cuda.max_memory_reserved() / 2**30, "GiB")'
_XLA_PEAK = 'python: print(jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30, "GiB")'
"""XLA's allocator keeps one figure: nothing is reserved beside it, and there is no `nvidia-smi`."""
_DEVICE_COMMANDS = {
    "nvidia": "nvidia-smi --query-gpu=memory.used --format=csv",
    "": "nvidia-smi --query-gpu=memory.used --format=csv",
    "amd": "rocm-smi --showmeminfo vram",
}

# --- next


def next_steps(
    asked: Job, job: Job, estimate: EstimateFunction, current: Estimate, verdict: Verdict | None,
    limits: dict[str, Limit], ladder: Ladder, devices: Sequence[tuple[str, int]], more: Sequence[Job] = (),
) -> tuple[Step, ...]:  # fmt: skip
    """Commands that go on from the answer. `asked` is the job as given, `job` the resolved one; `more`: it over more devices."""
    if verdict is None:
        return _without_device(asked, devices)
    if verdict.fits == "yes":
        return _use_the_room(asked, job, limits)
    larger = _larger_device(asked, job, estimate, current, ladder, over_more=bool(more))
    changes = (*_smallest_change(asked, job, ladder), *_over_more(asked, job, more), *_as_asked(asked, job, ladder), *larger)
    return (*changes, *_expandable_segments(job, current))


def _without_device(asked: Job, devices: Sequence[tuple[str, int]]) -> tuple[Step, ...]:
    if not devices:
        why = "no GPUs of the catalogue hold it; for a verdict, and for changes that help"
        return (Step(why=why, command=command_line(asked, on="h200")),)
    name, count = devices[0]
    holds = "device that holds it" if count == 1 else "number of devices that hold it together (no single GPU does)"
    command = command_line(asked, on=device_word(name, count))
    if count > 1 and isinstance(asked.workload, Training):
        command += " --fsdp"
    return (Step(why=f"a verdict, with limits, on the smallest {holds}", command=command),)


def _use_the_room(asked: Job, job: Job, limits: dict[str, Limit]) -> tuple[Step, ...]:
    for name, limit in limits.items():
        if limit.max is not None and limit.max > number(job, name):
            command = command_line(asked, with_number(job, name, limit.max), resolved=job)
            return (Step(why=f"use the room: {name} {limit.max:,} is the largest that still fits", command=command),)
    return ()


def _expandable_segments(job: Job, current: Estimate) -> tuple[Step, ...]:
    """Where what the allocator holds unused decides: the setting that makes it small. No lever: its effect is not counted."""
    assert job.cluster is not None
    held = sum(one.at_peak_bytes for one in current.worst.components if one.name == "fragmentation")
    missing = current.peak.device_bytes - job.cluster.usable_bytes
    given_by_hand = job.overheads.fragmentation is not None
    if given_by_hand or held < current.peak.device_bytes * NOTICEABLE or missing >= held:
        return ()
    if job.cluster.device.vendor not in ("nvidia", ""):
        return ()
    why = (
        f"{format_gib(held)} of the peak is what torch's allocator holds unused, usually less with expandable segments "
        "(on Linux; not counted as a change that fits): set before the run"
    )
    return (Step(why=why, command="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),)


def _smallest_change(asked: Job, job: Job, ladder: Ladder) -> tuple[Step, ...]:
    if ladder.best is None:
        return ()
    names = " + ".join(lever.name for lever in ladder.best.levers)
    command = command_line(asked, ladder.best.job, resolved=job)
    return (Step(why=f"the cheapest change that makes it fit: {names}", command=command),)


def _as_asked(asked: Job, job: Job, ladder: Ladder) -> tuple[Step, ...]:
    """Where only a change of the task fits: the overview says how many devices each task takes."""
    if ladder.best is None or not any(lever.changes_task for lever in ladder.best.levers) or asked.cluster is None:
        return ()
    words = " ".join(["memfit", *model_words(asked), "--on", device_word(asked.cluster.device.id, 1)])
    return (Step(why="how many of these devices the task as it is would take", command=words),)


def _over_more(asked: Job, job: Job, more: Sequence[Job]) -> tuple[Step, ...]:
    """More devices of the same type."""
    steps = []
    for one in more:
        assert one.cluster is not None
        command = command_line(asked, one, resolved=job, on=cluster_word(one))
        steps.append(Step(why=f"{one.cluster.count:,} of these devices hold it together", command=command))
    return tuple(steps)


_FORMATS = ("precision", "weight_dtype", "kv_dtype")
"""Fields that are decided by what the device computes in, when they are left open."""


def _larger_device(
    asked: Job, job: Job, estimate: EstimateFunction, current: Estimate, ladder: Ladder, *, over_more: bool
) -> tuple[Step, ...]:
    """The smallest device that holds the job unchanged; if no lever helps either, the smallest for the closest change."""
    assert job.cluster is not None
    steps = []

    def there(device: Device) -> Job:
        """As asked, with the formats said where the other device would get others than those that were counted."""
        assert job.cluster is not None
        if ("bf16" in device.native_dtypes) == ("bf16" in job.cluster.device.native_dtypes):
            return asked
        left_open = [name for name in _FORMATS if getattr(asked.workload, name, "") is None]
        return asked.replace(workload=asked.workload.replace(**{name: getattr(job.workload, name) for name in left_open}))

    none_helps = ladder.best is None
    on_these = f"no change that memfit knows makes it fit on {cluster_text(job.cluster)}; "
    said = on_these if none_helps and not over_more else ""
    unchanged = smallest_devices(job, estimate, current.peak.device_bytes, most=1)
    if unchanged:
        command = command_line(there(unchanged[0]), on=device_word(unchanged[0].id, job.cluster.count))
        why = f"{said}without a change: {unchanged[0].title} is the smallest device that holds it"
        steps.append(Step(why=why, command=command))
    if none_helps and ladder.closest is not None:
        changed = smallest_devices(ladder.closest.job, estimate, ladder.closest.estimate.peak.device_bytes, most=1)
        if changed and changed != unchanged:
            names = " + ".join(lever.name for lever in ladder.closest.levers)
            on = device_word(changed[0].id, job.cluster.count)
            command = command_line(there(changed[0]), ladder.closest.job, resolved=job, on=on)
            why = f"{'' if unchanged else said}with {names}: {changed[0].title} is the smallest device that holds it"
            steps.append(Step(why=why, command=command))
    if not steps and none_helps and not over_more:
        why = f"{said}nor does any single GPU of the catalogue hold it: it has to be split over several devices"
        steps.append(Step(why=why, command="memfit devices"))
    return tuple(steps)
