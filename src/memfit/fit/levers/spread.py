"""Levers over the devices that a job has: ZeRO and FSDP, tensor and pipeline parallelism, states in host memory."""

from __future__ import annotations

from collections.abc import Callable

from memfit.account.layout import Layout, layout_of, refusal
from memfit.account.ranks import stage_split
from memfit.account.resolve import runtime_of
from memfit.fit.levers.lever import Lever, with_workload
from memfit.job import Inference, Job, Training
from memfit.parallel.legality import pipeline_reason, tensor_reason
from memfit.units import format_gib

TENSOR_DEGREES = (2, 4, 8, 16)
PIPELINE_DEGREES = (2, 3, 4, 5, 6, 7, 8, 12, 16)


def with_layout(job: Job, **degrees: object) -> Job:
    """The job with some degrees of its layout changed; the data-parallel ones take what is left of its devices."""
    one = layout_of(job)
    changed = one._replace(**degrees)  # type: ignore[arg-type]
    data = job.cluster.count // (changed.tp * changed.pp * changed.cp) if job.cluster else changed.dp_replicate * changed.dp_shard
    if isinstance(job.workload, Inference):
        replicate, shard = data, 1
    elif changed.zero:
        replicate = one.dp_replicate if one.zero and data % one.dp_replicate == 0 else 1
        shard = data // replicate
    else:
        replicate, shard = data, 1
    spread = job.parallelism.replace(
        dp_replicate=replicate, dp_shard=shard, cp=changed.cp, tp=changed.tp, pp=changed.pp, ep=changed.ep, zero=changed.zero,
        fsdp=False, sp=changed.sp, sharding=changed.scheme or None, offload=changed.offload,
    )  # fmt: skip
    edited = job.replace(parallelism=spread)
    if isinstance(job.workload, Training):
        buckets = "none" if changed.zero or replicate == 1 else job.workload.ddp or "copies"
        edited = with_workload(edited, ddp=buckets) if buckets != job.workload.ddp else edited
    return edited


def _leaves(job: Job, tp: int, pp: int) -> int:
    """Data-parallel devices beside other degrees, of which expert parallelism takes some in training; 0 where it takes others."""
    assert job.cluster is not None
    return job.cluster.count // (tp * pp) if isinstance(job.workload, Training) else 0


def _data(job: Job) -> int:
    """Data-parallel devices."""
    one = layout_of(job)
    return one.dp_replicate * one.dp_shard


def _traffic(before: Job, after: Job) -> tuple[int, int]:
    """Bytes that each device sends in a step: of the sharded job, and of DDP's all-reduce of whole gradients.

    An all-reduce is a reduce-scatter and an all-gather of P elements. ZeRO-1 and 2 scatter gradients and gather weights, whole
    sharding gathers weights twice (forward and backward). Gradients are reduced in fp32 where FSDP2 mixes precisions.
    """
    one, workload = layout_of(after), after.workload
    assert isinstance(workload, Training)
    count = after.model.num_parameters // (one.tp * one.pp)
    full, mixed = workload.precision == "32-true", str(workload.precision).endswith("-mixed")
    weight = 4 if full else 2
    gradient = 4 if full or (mixed and one.scheme in ("fsdp2", "megatron")) else 2
    replicated = 4 if full or (mixed and workload.weight_dtype in (None, "fp32")) else 2
    gathered = 2 * weight if one.zero == 3 else weight
    return count * (gathered + gradient), 2 * count * replicated


# --- ZeRO and FSDP: the same gradients, other owners


def _scheme(job: Job, stage: int) -> str:
    """Whose sharding: what the job has, what the runtime brings, else torch's for whole sharding and DeepSpeed's for less."""
    one = layout_of(job)
    return one.scheme or runtime_of(job).sharding or ("fsdp2" if stage == 3 else "deepspeed")


def _shards_more(stage: int) -> Callable[[Job], bool]:
    def applies(job: Job) -> bool:
        workload, one = job.workload, layout_of(job)
        if not isinstance(workload, Training) or workload.optimizer_in_backward or _data(job) == 1 or one.zero >= stage:
            return False
        return refusal(one._replace(zero=stage, scheme=_scheme(job, stage)), runtime_of(job)) is None

    return applies


_OWNED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
_NAMES = {"fsdp2": "FSDP2", "fsdp1": "FSDP", "deepspeed": "ZeRO", "megatron": "the distributed optimizer"}


def _sharding_change(stage: int) -> Callable[[Job, Job], str]:
    def change(before: Job, after: Job) -> str:
        one = layout_of(after)
        name = "ZeRO-1 (distributed optimizer)" if one.scheme == "megatron" else _NAMES[one.scheme]
        name = name if one.scheme != "deepspeed" else f"ZeRO-{stage}"
        owned = _OWNED[1] if one.scheme == "megatron" else _OWNED[stage]
        return f"{name}: {owned} split over {one.shards:,} devices"

    return change


def _sharding_cost(stage: int) -> Callable[[Job, Job], str]:
    def cost(before: Job, after: Job) -> str:
        moved, replicas = _traffic(before, after)
        what = "weights gathered twice and gradients scattered once" if stage == 3 else "gradients scattered and weights gathered"
        return (
            f"{what}: {format_gib(moved)} a step through each device's interconnect, where replicas (DDP) take "
            f"{format_gib(replicas)}"
        )

    return cost


def _sharding_flags(job: Job) -> tuple[str, ...]:
    one, runtime = layout_of(job), runtime_of(job)
    if runtime.name == "torchtitan":
        return (f"--parallelism.data_parallel_shard_degree {one.dp_shard}",)
    if one.scheme == "megatron":
        return ("--use-distributed-optimizer",)
    if one.scheme == "deepspeed":
        stage = f'"zero_optimization": {{"stage": {one.zero}}}'
        return (f"--deepspeed ds_config.json  # {stage}",) if runtime.trainer else (f"deepspeed.initialize(config={{{stage}}})",)
    if runtime.trainer:
        return ('--fsdp "full_shard auto_wrap"',)
    return ("fully_shard(layer) for each layer, then fully_shard(model)",)


def _sharding(stage: int, why: str) -> Lever:
    return Lever(
        name=f"zero-{stage}" if stage < 3 else "fsdp",
        group="sharding",
        why_here=why,
        applies=_shards_more(stage),
        edit=lambda job: with_layout(job, zero=stage, scheme=_scheme(job, stage)),
        change=_sharding_change(stage),
        cost=_sharding_cost(stage),
        flags=_sharding_flags,
    )


ZERO_1 = _sharding(1, "the same update and the same traffic: each device updates its share")
ZERO_2 = _sharding(2, "as ZeRO-1; each device keeps the gradients of its share")
FSDP = _sharding(3, "the same gradients; half as much traffic again")


# --- tensor parallelism: within a machine


def _tensor_applies(degree: int) -> Callable[[Job], bool]:
    def applies(job: Job) -> bool:
        cluster, one = job.cluster, layout_of(job)
        if cluster is None or one.tp >= degree or degree > cluster.devices_per_node:
            return False
        rest = one.pp * one.cp * degree
        if cluster.count % rest or _leaves(job, degree, one.pp) % one.ep:
            return False
        return refusal(one._replace(tp=degree), runtime_of(job)) is None and tensor_reason(job.model, degree) is None

    return applies


def _tensor_cost(before: Job, after: Job) -> str:
    one, workload, model = layout_of(after), after.workload, after.model
    inside = f"keep them inside a machine of {after.cluster.devices_per_node}" if after.cluster else "keep them inside a machine"
    if isinstance(workload, Inference):
        return f"2 all-reduces per layer and step over {one.tp} devices: {inside}; {one.tp} devices serve as one"
    tokens = workload.batch * (workload.seq or 1)
    size = tokens * model.hidden_size * (4 if workload.precision == "32-true" else 2)
    replicas = _data(before) // max(1, _data(after))
    fewer = f"; {replicas} times fewer sequences at a time" if replicas > 1 else ""
    return f"4 all-reduces of {format_gib(size)} per layer and micro-batch over {one.tp} devices: {inside}{fewer}"


def _tensor_flags(job: Job) -> tuple[str, ...]:
    one, runtime = layout_of(job), runtime_of(job)
    if isinstance(job.workload, Inference):
        return (f"--tensor-parallel-size {one.tp}",)
    if runtime.name == "torchtitan":
        return (f"--parallelism.tensor_parallel_degree {one.tp}",)
    if runtime.name == "megatron":
        return (f"--tensor-model-parallel-size {one.tp}", *(("--sequence-parallel",) if one.sp else ()))
    return (f"parallelize_module(model, mesh of {one.tp}, plan)",)


def _tensor(degree: int) -> Lever:
    return Lever(
        name=f"tp-{degree}",
        group="tensor",
        spreads=1,
        why_here="the same arithmetic; each layer waits for its neighbours",
        applies=_tensor_applies(degree),
        edit=lambda job: with_layout(job, tp=degree, sp=isinstance(job.workload, Training)),
        change=lambda before, after: (
            f"tensor parallelism over {degree} devices" + (", with sequence parallelism" if layout_of(after).sp else "")
        ),
        cost=_tensor_cost,
        flags=_tensor_flags,
    )


SEQUENCE = Lever(
    name="sequence-parallel",
    group="sequence-parallel",
    why_here="the same traffic: each all-reduce becomes a reduce-scatter and an all-gather",
    applies=lambda job: isinstance(job.workload, Training) and layout_of(job).tp > 1 and not layout_of(job).sp,
    edit=lambda job: with_layout(job, sp=True),
    change=lambda before, after: f"sequence parallelism over the {layout_of(after).tp} devices of --tp",
    # Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2
    cost=lambda before, after: (
        "none in traffic: norms, residuals and dropouts are split along the sequence, which has to divide evenly"
    ),
    flags=lambda job: ("--sequence-parallel",) if runtime_of(job).name == "megatron" else ("SequenceParallel() for norms",),
)

TENSOR = tuple(_tensor(degree) for degree in TENSOR_DEGREES)


# --- pipeline parallelism: over machines


def _pipeline_applies(degree: int) -> Callable[[Job], bool]:
    def applies(job: Job) -> bool:
        cluster, one = job.cluster, layout_of(job)
        if cluster is None or one.pp >= degree or cluster.count % (one.tp * one.cp * degree):
            return False
        if _leaves(job, one.tp, degree) % one.ep or refusal(one._replace(pp=degree), runtime_of(job)) is not None:
            return False
        return pipeline_reason(job.model, degree, virtual_stages=one.virtual_stages, split=stage_split(job)) is None

    return applies


def _pipeline_cost(before: Job, after: Job) -> str:
    one, workload = layout_of(after), after.workload
    if isinstance(workload, Inference):
        return f"each token passes {one.pp} stages in turn: latency as on one device, throughput with several requests"
    p = one.pp
    m = workload.grad_accum if workload.grad_accum > 1 else p
    bubble = 100 * (p - 1) / (m + p - 1)
    fewest = "" if workload.grad_accum > 1 else ", as many as fill it; more make it less"
    idle = f"idle {bubble:.0f} % of the time with {m} micro-batches a step ((p - 1) / (m + p - 1)){fewest}"
    return f"{idle}; hidden states pass from stage to stage"


def _pipeline_flags(job: Job) -> tuple[str, ...]:
    one, runtime = layout_of(job), runtime_of(job)
    if isinstance(job.workload, Inference):
        return (f"--pipeline-parallel-size {one.pp}",)
    if runtime.name == "torchtitan":
        return (f"--parallelism.pipeline_parallel_degree {one.pp}",)
    if runtime.name == "megatron":
        return (f"--pipeline-model-parallel-size {one.pp}",)
    return (f"torch.distributed.pipelining: {one.pp} stages, Schedule1F1B",)


def _pipeline(degree: int) -> Lever:
    return Lever(
        name=f"pp-{degree}",
        group="pipeline",
        spreads=2,
        why_here="the same gradients; stages wait for one another",
        may_add=True,  # a stage keeps the activations of several micro-batches
        applies=_pipeline_applies(degree),
        edit=lambda job: with_layout(job, pp=degree),
        change=lambda before, after: f"pipeline of {degree} stages",
        cost=_pipeline_cost,
        flags=_pipeline_flags,
    )


PIPELINE = tuple(_pipeline(degree) for degree in PIPELINE_DEGREES)


# --- states in host memory


def _offloads(job: Job) -> bool:
    one = layout_of(job)
    return isinstance(job.workload, Training) and one.zero > 0 and one.offload == "none" and one.scheme == "deepspeed"


def _offloaded_states(job: Job) -> int:
    """Master weights, gradients and two moments in fp32; of ZeRO-3 its partition of the 16-bit gradients as well."""
    one = layout_of(job)
    return (18 if one.zero == 3 else 16) * job.model.num_parameters // one.shards


OFFLOAD_OPTIMIZER = Lever(
    name="offload-optimizer",
    group="offload",
    last_resort=True,
    why_here="the same update, on the host: slow",
    applies=_offloads,
    edit=lambda job: with_layout(job, offload="optimizer"),
    change=lambda before, after: "optimizer states and their update in host memory",
    cost=lambda before, after: (
        f"{format_gib(_offloaded_states(after))} of host memory for each device, gradients and weights over the host bus every "
        "step, and the update on the CPU: often half the speed or less"
    ),
    flags=lambda job: ('"offload_optimizer": {"device": "cpu"}',),
)


OFFLOAD_PARAMS = Lever(
    name="offload-params",
    group="offload",
    last_resort=True,
    why_here="the same update with everything on the host: very slow",
    applies=lambda job: isinstance(job.workload, Training) and layout_of(job).zero == 3 and layout_of(job).offload != "params",
    edit=lambda job: with_layout(job, offload="params"),
    change=lambda before, after: "weights, gradients and optimizer states in host memory",
    cost=lambda before, after: (
        "every layer's weights over the host bus in forward and in backward, gradients back, and the update on the CPU: several "
        "times slower"
    ),
    flags=lambda job: (
        ('"offload_param": {"device": "cpu"}', '"offload_optimizer": {"device": "cpu"}')
        if layout_of(job).scheme == "deepspeed"
        else ("CPUOffloadPolicy()",)
    ),
)


def layout_words(one: Layout) -> str:
    """`tp 8 x pp 4 x dp-shard 16`; empty for one device."""
    named = (("tp", one.tp), ("pp", one.pp), ("cp", one.cp), ("dp-shard", one.dp_shard), ("dp-replicate", one.dp_replicate))
    return " x ".join(f"{name} {degree:,}" for name, degree in named if degree > 1)
