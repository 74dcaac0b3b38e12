"""From a resolved job to its profile on one rank, with the numbers to evaluate it at; each profile is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.account import finetuning
from memfit.account.context import local_tokens
from memfit.account.optimizers import Optimizer
from memfit.account.overheads import Overhead
from memfit.account.policies import inference_kernels, trained_format, training_policies, workspace_of
from memfit.account.profile import Numbers, Profile
from memfit.account.serving import LAST_CHUNK, ServingPolicy, compile_serving
from memfit.account.sharding import UNSHARDED, Sharding
from memfit.account.standing import TrainingPolicy, ema_bytes, sharded_bytes, trained_elements
from memfit.account.states import state_bytes, trained_tensors
from memfit.account.training import compile_least, compile_training
from memfit.job import Inference, Job, Training
from memfit.kernels import KernelPolicy
from memfit.kernels.sets import KERNEL_SETS
from memfit.model import Model
from memfit.model.remember import of_model
from memfit.parallel import ALONE, InFlight


class Compiled(NamedTuple):
    """A profile with the numbers to evaluate it at."""

    profile: Profile
    kernels: KernelPolicy
    numbers: tuple[Numbers, ...]
    """Those of a step of training; of inference, in the order of `account.serving.PROMPT` and the names after it."""
    workspace: Overhead
    host_bytes: int
    optimizer: Optimizer | None = None
    in_flight: InFlight = ALONE
    sharding: Sharding = UNSHARDED
    held_gradients: int = 0
    """One device's part of the gradients, where they are sharded."""

    @property
    def widths(self) -> tuple[int, int] | None:
        """The least widths of what the kernel set keeps, where no run was compared with it."""
        return KERNEL_SETS[self.kernels.kernels].widths


@of_model(256)
def _training_profile(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    return compile_training(model, kernels, policy)


@of_model(256)
def least_profile(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Profile:
    """See `compile_least`."""
    return compile_least(model, kernels, policy)


@of_model(256)
def _serving_profile(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> Profile:
    return compile_serving(model, kernels, policy)


@of_model(256)
def _host_states(model: Model, kernels: KernelPolicy, optimizer: Optimizer) -> int:
    return state_bytes(optimizer, trained_tensors(model, kernels))


def compile_job(job: Job, in_flight: InFlight = ALONE) -> Compiled:
    """The compiled profile of a resolved job on one of its ranks; compiled once per model, kernels and policy.

    `in_flight`: what it holds for backward at the same time, in a pipeline.
    """
    workload = job.workload
    if isinstance(workload, Inference):
        return _compile_inference(job, workload)
    return compile_training_job(job, workload, in_flight)


def trained_parameters(job: Job) -> int | None:
    """Elements that the optimizer updates in the whole model; `None` if not counted."""
    if isinstance(job.workload, Inference):
        return None
    kernels, _ = training_policies(job, job.workload)
    return trained_elements(job.model, kernels)


def chunks_of(model: Model, tokens: int) -> int:
    """Chunks into which the model's scans cut a sequence: ceil(s / c); 0 without such layers."""
    return -(-tokens // model.chunk) if model.chunk else 0


def compile_training_job(
    job: Job,
    workload: Training,
    in_flight: InFlight = ALONE,
    profile_of: Callable[[Model, KernelPolicy, TrainingPolicy], Profile] = _training_profile,
) -> Compiled:
    """The compiled profile of a training job: `profile_of` compiles it, as a whole or as a lower bound."""
    kernels, policy = training_policies(job, workload)
    if in_flight is not ALONE:
        policy = policy._replace(in_flight=in_flight)
    seq = (workload.seq or 1) + finetuning.virtual_tokens(workload)
    target = workload.target_seq or 0
    seq = local_tokens(seq, job.parallelism)
    keys = seq + finetuning.virtual_keys(workload)
    numbers = Numbers(workload.batch, seq, keys, target, target, chunks=chunks_of(job.model, seq))
    ran = (numbers,) if workload.eval_batch is None else (numbers, numbers._replace(sequences=workload.eval_batch))
    sharding, gradients = policy.sharding, 0
    if sharding.scheme:
        host, gradients = sharded_bytes(job.model, kernels, policy)
    else:
        host = _host_states(job.model, kernels, policy.optimizer) if policy.optimizer.paged else 0
    if workload.ema == "host":
        host += ema_bytes(job.model, kernels, workload.ema_dtype or trained_format(kernels))
    profile = profile_of(job.model, kernels, policy)
    return Compiled(
        profile, kernels, ran, workspace_of(job, training=True), host, policy.optimizer, in_flight, sharding, gradients
    )


def _compile_inference(job: Job, workload: Inference) -> Compiled:
    model = job.model
    context = workload.context or 1
    numbers = _inference_numbers(job, workload)
    kernels = inference_kernels(job, workload)
    workspace = workspace_of(job, training=False)
    policy = ServingPolicy(
        kv_dtype=workload.kv_dtype or kernels.precision.weight,
        workspace=workspace.bytes,
        cache=workload.cache,
        chunked=len(numbers) > LAST_CHUNK,
        decode_windows=tuple(window for window in model.windows if window <= context),
    )
    return Compiled(_serving_profile(model, kernels, policy), kernels, numbers, workspace, 0)


def _inference_numbers(job: Job, workload: Inference) -> tuple[Numbers, ...]:
    """Those of the prompt and of a decoding step; in chunks, of the first, of the last full one, and of the rest.

    The full chunk before the rest may take more than the rest, which sees more keys.
    """
    b, prompt, context = workload.concurrency, workload.prompt or 1, workload.context or 1
    if job.model.encoder_decoder:
        step = Numbers(b, prompt, prompt, 1, workload.target_seq or 1)
        return step._replace(target_keys=1), step
    if not (job.model.caches or job.model.states):
        return (Numbers(b, prompt, prompt),)
    static = workload.cache == "static"
    step = Numbers(b, 1, context, chunks=chunks_of(job.model, 1))

    def chunk(tokens: int, end: int) -> Numbers:
        keys, reach = (context, 1) if static else (end, tokens)
        return Numbers(b, tokens, keys, reach=reach, chunks=chunks_of(job.model, tokens))

    size = min(workload.prefill_chunk or prompt, prompt)
    if size == prompt:
        return chunk(prompt, prompt), step
    rest = prompt % size or size
    full = chunk(size, prompt - rest) if prompt - rest > size else chunk(rest, prompt)
    return chunk(size, size), step, full, chunk(rest, prompt)
