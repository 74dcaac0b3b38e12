"""How a job is laid out over its devices: every degree decided, the whole checked against the number of devices.

devices = dp_replicate x dp_shard x cp x tp x pp        (ep is taken from dp_replicate x dp_shard x cp)
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from memfit.account import pipelines
from memfit.account.choices import Choices
from memfit.account.sharding import SCHEMES
from memfit.errors import UsageError
from memfit.job import ALL_OPEN, Assumption, Inference, Job, Parallelism, Training
from memfit.options import options_of
from memfit.runtimes import Runtime

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Degrees that multiply to the number of devices."""

OF_TRAINING = ("cp", "dp_shard", "zero", "fsdp", "sharding", "offload", "schedule", "virtual_stages", "sp")
"""Fields that mean nothing where nothing is trained."""


class Layout(NamedTuple):
    """The degrees of a job, all decided."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sp: bool = False
    zero: int = 0
    scheme: str = ""
    """Whose sharding, or whose master weights, it is: fsdp2 | fsdp1 | deepspeed | megatron; empty: nobody's."""
    schedule: str = "1f1b"
    virtual_stages: int = 1
    offload: str = "none"
    stage_layers: str = ""
    """See `parallel.stages.layers_of_stages`; empty: as the runtime gives layers to stages."""

    @property
    def devices(self) -> int:
        """dp_replicate x dp_shard x cp x tp x pp"""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Devices over which ZeRO or FSDP splits: those that share a sequence (cp) hold the same weights, so they take part."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def gathers_apart(self) -> bool:
        """Whether DeepSpeed gathers weights, on a stream of its own."""
        return self.scheme == "deepspeed" and self.zero == 3 and self.shards > 1


ALONE = Layout()


def layout_of(job: Job) -> Layout:
    """The layout of a resolved job; open degrees are 1."""
    given = job.parallelism
    if given is ALL_OPEN:
        return ALONE
    zero = given.zero or 0
    return Layout(
        dp_replicate=given.dp_replicate or 1,
        dp_shard=given.dp_shard or 1,
        cp=given.cp or 1,
        tp=given.tp or 1,
        pp=given.pp or 1,
        ep=given.ep or 1,
        sp=bool(given.sp),
        zero=zero,
        scheme=given.sharding or "",
        schedule=given.schedule,
        virtual_stages=given.virtual_stages,
        offload=given.offload,
        stage_layers=given.stage_layers or "",
    )


def resolve_parallelism(job: Job, runtime: Runtime, choices: Choices) -> Parallelism:
    """Every degree, from what was given, the devices and the runtime's habits.

    Raises:
        UsageError: degrees that contradict each other or the number of devices.
    """
    given, devices = job.parallelism, job.cluster.count if job.cluster else None
    if given == ALL_OPEN and devices in (None, 1):
        return ALL_OPEN
    _refuse_contradictions(job, given)
    if isinstance(job.workload, Inference):
        return _inference(job, given, devices, runtime, choices)
    zero = 3 if given.fsdp else given.zero
    if zero is None:
        by_habit = runtime.shards if given.dp_replicate is None and devices not in (None, 1) else 0
        zero = by_habit or (3 if (given.dp_shard or 1) > 1 else 0)
        if zero:
            habit = f"{runtime.name} shards over all devices that are left"
            how = habit if by_habit else "--dp-shard alone splits weights as well"
            _assume(choices, "zero", zero, how)
    fixed = {name: getattr(given, name) or 1 for name in ("cp", "tp", "pp")}
    replicate, shard = given.dp_replicate, given.dp_shard
    if devices is not None:
        left = _left(devices, {**fixed, **{name: getattr(given, name) for name in ("dp_replicate", "dp_shard")}}, job)
        if zero and shard is None:
            replicate = replicate or 1
            shard = left
        elif replicate is None:
            shard = shard or 1
            replicate = left
            if left > 1:
                why = "whole replicas, kept equal by DistributedDataParallel; --fsdp or --zero splits the states over them"
                _assume(choices, "dp_replicate", left, why)
    elif zero and shard is None and fixed["cp"] == 1:
        flag = "--fsdp" if given.fsdp else f"--zero {zero}"
        raise UsageError(f"{flag} splits the states over devices: say over how many with --on 8x... or --dp-shard")
    given = given.replace(**pipelines.resolved(job.model, given, runtime, choices))
    filled = given.replace(
        **fixed,
        dp_replicate=replicate or 1,
        dp_shard=shard or 1,
        zero=zero,
        ep=given.ep or 1,
        sp=_sequence_parallel(given, runtime, choices),
        sharding=_scheme(given, zero, runtime, choices),
    )
    if not filled.zero_init and filled.sharding != "deepspeed":
        raise UsageError("--no-zero-init is a habit of DeepSpeed's ZeRO: leave it out, or say --zero with --sharding deepspeed")
    reason = refusal(layout_of(job.replace(parallelism=filled)), runtime)
    if reason is not None:
        raise UsageError(reason)
    _check_product(filled, devices, job)
    _check_experts(filled, job)
    return filled


def layout_warnings(job: Job) -> list[tuple[str, str]]:
    """What the degrees of a resolved job allow but should be looked at: (code, text)."""
    one, found = layout_of(job), []
    per_node = job.cluster.devices_per_node if job.cluster else None
    if per_node is not None and one.tp > per_node:
        text = f"--tp {one.tp} spans machines of {per_node} devices: every layer waits for the network between them"
        found.append(("tensor-parallel-across-machines", text))
    if one.sp and isinstance(job.workload, Training) and job.workload.seq:
        from memfit.parallel.legality import sequence_reason

        reason = sequence_reason(job.workload.seq, one.tp)
        if reason:
            found.append(("uneven-sequence", f"{reason}; Megatron refuses it, DTensor gives the first devices more"))
    if one.tp > 1 and isinstance(job.workload, Training) and job.workload.loss not in (None, "eager"):
        text = (
            f"--loss {job.workload.loss} makes the logits from the head's weight: counted as if it worked on each device's part "
            "of the vocabulary, which the libraries that have such losses may refuse under --tp"
        )
        found.append(("loss-over-split-vocabulary", text))
    if one.ep > 1:
        text = (
            f"experts get equal shares of the tokens in this count; early in training, or without a balancing loss, a device of "
            f"--ep {one.ep} has been seen to get 2 to 3 times its share, and its routed activations grow with it"
        )
        found.append(("balanced-experts", text))
    return found


def _all_open(given: Parallelism) -> bool:
    return all(getattr(given, name) is None for name in (*DEGREES, "ep", "zero")) and not given.fsdp


def _assume(choices: Choices, field: str, value: object, why: str) -> None:
    choices.assumptions.append(Assumption(name=field, value=value, why=why, flag=options_of(Parallelism)[field].flag))


def _refuse_contradictions(job: Job, given: Parallelism) -> None:
    """Fields that exclude each other, whatever the devices are."""
    if given.fsdp and given.zero not in (None, 3):
        raise UsageError(f"--fsdp is --zero 3: it excludes --zero {given.zero}")
    if given.zero == 0 and (given.dp_shard or 1) > 1:
        raise UsageError(f"--dp-shard {given.dp_shard} splits states, --zero 0 says that none are: leave out one of them")
    if given.sp and (given.tp or 1) == 1:
        raise UsageError("--sp splits along the sequence what --tp leaves whole: give --tp as well")
    if given.virtual_stages > 1 and given.schedule != "interleaved":
        raise UsageError(f"--virtual-stages {given.virtual_stages} belongs to --schedule interleaved")
    if given.schedule != "1f1b" and (given.pp or 1) == 1:
        raise UsageError(f"--schedule {given.schedule} orders the stages of a pipeline: give --pp as well")
    if given.stage_layers and (given.pp or 1) == 1:
        raise UsageError("--stage-layers gives layers to the stages of a pipeline: give --pp as well")
    if given.offload != "none" and not (given.zero or given.fsdp):
        raise UsageError(f"--offload {given.offload} is a part of ZeRO and FSDP: give --zero or --fsdp as well")
    if given.offload == "params" and given.zero not in (None, 3):
        raise UsageError("--offload params needs weights that are split: --zero 3 or --fsdp")
    if isinstance(job.workload, Inference):
        said = [name for name in OF_TRAINING if not _says_nothing(name, getattr(given, name))]
        if said:
            flag = options_of(Parallelism)[said[0]].flag
            raise UsageError(f"{flag} belongs to training; inference is split with --tp, --pp and --ep, and replicated beyond")


def _says_nothing(name: str, value: object) -> bool:
    """Whether a field of training is at its default, or a degree that was decided to be one."""
    return value is False or value == getattr(ALL_OPEN, name) or (type(value) is int and value == (0 if name == "zero" else 1))


def _left(devices: int, degrees: dict[str, int | None], job: Job) -> int:
    """Devices that the given degrees leave to the one that is open."""
    named = {name: value for name, value in degrees.items() if value is not None and value > 1}
    product = prod(named.values())
    if devices % product:
        many = f"{devices:,} devices" if devices > 1 else "one device"
        raise UsageError(f"{_said(named)} does not divide the {many} of --on")
    return devices // product


def _said(named: dict[str, int]) -> str:
    flags = options_of(Parallelism)
    words = " x ".join(f"{flags[name].flag} {value}" for name, value in named.items())
    return words if len(named) < 2 else f"{words} = {prod(named.values()):,}"


def _check_product(filled: Parallelism, devices: int | None, job: Job) -> None:
    named = {name: getattr(filled, name) for name in DEGREES if getattr(filled, name) > 1}
    if devices is not None and prod(named.values()) != devices:
        given = _said(named) or "one device"
        more = "" if filled.zero else ", or split states over the rest with --fsdp or --zero"
        raise UsageError(f"{given}: --on has {devices:,} devices; the degrees multiply to their number{more}")


def _check_experts(filled: Parallelism, job: Job) -> None:
    ep = filled.ep or 1
    data = prod(getattr(filled, name) for name in ("dp_replicate", "dp_shard", "cp"))
    if ep > 1 and isinstance(job.workload, Training) and data % ep:
        legal = [one for one in range(1, min(ep, data) + 1) if data % one == 0]
        raise UsageError(
            f"--ep {ep} takes its devices from the {data:,} data-parallel ones, which it does not divide: take --ep {legal[-1]}, "
            "or less of --tp and --pp"
        )


def _sequence_parallel(given: Parallelism, runtime: Runtime, choices: Choices) -> bool:
    """Whether what tensor parallelism leaves whole is split along the sequence."""
    if (given.tp or 1) == 1:
        return False
    if given.sp is None:
        why = f"what {runtime.name} does beside --tp" if runtime.sequence_parallel else f"{runtime.name} keeps them whole"
        _assume(choices, "sp", runtime.sequence_parallel, f"norms and residuals along the sequence: {why}")
        return runtime.sequence_parallel
    return given.sp


def _scheme(given: Parallelism, zero: int, runtime: Runtime, choices: Choices) -> str | None:
    """Whose sharding it is. Without a stage, those with master weights have them all the same."""
    scheme = given.sharding
    if scheme is None:
        if not zero:
            return runtime.sharding if runtime.sharding and SCHEMES[runtime.sharding].master else None
        scheme = runtime.sharding or ("fsdp2" if given.fsdp or (zero == 3 and given.zero is None) else "deepspeed")
        why = "what the runtime brings" if runtime.sharding else "--fsdp is torch's, --zero DeepSpeed's"
        _assume(choices, "sharding", scheme, why)
    return scheme


def refusal(one: Layout, runtime: Runtime) -> str | None:
    """Why the software has no such layout; `None` if it has. Levers ask before they propose one."""
    split = [name for name in ("tp", "pp", "cp", "ep") if getattr(one, name) > 1] + (["zero"] if one.zero else [])
    missing = next((name for name in split if name in runtime.lacks), None)
    if missing is not None:
        flag = options_of(Parallelism)[missing].flag
        return f"{flag} {getattr(one, missing)}: {runtime.name} has nothing of the kind"
    if one.pp > 1 and one.schedule in runtime.lacks:
        return f"--schedule {one.schedule}: {runtime.name} has 1f1b and interleaved"
    if not one.zero:
        return None
    rules = SCHEMES[one.scheme]
    if one.zero not in rules.stages:
        names = [f"--zero {stage} ({name})" for stage, name in zip(rules.stages, rules.stage_names, strict=True) if stage]
        return f"--sharding {one.scheme}, stage {one.zero}: {rules.title} has {' and '.join(names)}"
    if one.scheme == "deepspeed" and one.pp > 1 and one.zero > 1:
        return f"--zero {one.zero} with --pp {one.pp}: DeepSpeed's pipelines go with --zero 1 alone"
    if one.scheme == "deepspeed" and one.pp > 1 and one.schedule != "1f1b":
        return f"--schedule {one.schedule}: DeepSpeed's pipelines run 1f1b"
    if one.offload == "optimizer" and rules.gathers:
        return f"--offload optimizer: {rules.title} moves weights, gradients and states together: --offload params"
    if one.offload != "none" and one.scheme == "megatron":
        return f"--offload {one.offload}: {rules.title} keeps its states on the device as it is counted here"
    return None


def _inference(job: Job, given: Parallelism, devices: int | None, runtime: Runtime, choices: Choices) -> Parallelism:
    """Tensor parallelism within a machine where it is legal, replicas beyond."""
    from memfit.parallel import largest_legal

    given = given.replace(**pipelines.resolved(job.model, given, runtime, choices))
    tp, pp = given.tp, given.pp or 1
    if devices is None:
        return given.replace(tp=tp or 1, pp=pp, dp_replicate=given.dp_replicate or 1, dp_shard=1, cp=1, ep=given.ep or 1)
    left = _left(devices, {"tp": tp, "pp": pp, "dp_replicate": given.dp_replicate}, job)
    if tp is None:
        per_node = job.cluster.devices_per_node if job.cluster else 1
        tp = left if given.dp_replicate is not None else largest_legal(job.model, left, per_node)
        if tp > 1:
            _assume(choices, "tp", tp, "the devices of one machine share every layer, as engines are started")
    replicate = devices // (tp * pp)
    if replicate > 1 and given.dp_replicate is None:
        _assume(choices, "dp_replicate", replicate, "replicas, which serve apart")
    filled = given.replace(tp=tp, pp=pp, dp_replicate=replicate, dp_shard=1, cp=1, ep=given.ep or 1)
    _check_product(filled, devices, job)
    return filled
