"""What a training step holds whatever its operations take: weights, gradients, states, inputs, workspaces."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.account.checkpoints import Checkpointing
from memfit.account.evaluation import EvaluationPolicy
from memfit.account.forms import (
    GRADIENTS,
    INPUTS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATES,
    TEMPORARY,
    WEIGHTS,
    WORKSPACE,
    ZERO,
    Form,
    form,
)
from memfit.account.optimizers import Optimizer, Trained
from memfit.account.residents import buffers_of
from memfit.account.sharding import UNSHARDED, Sharding
from memfit.account.shards import held
from memfit.account.states import (
    added_tensors,
    buffer_bytes,
    gradient_bytes,
    master_bytes,
    state_bytes,
    step_scratch,
    tensors_of,
    trained_tensors,
    weight_bytes,
)
from memfit.kernels import KernelPolicy
from memfit.model import ONCE, SEQUENCE, TOKEN, Model
from memfit.model.remember import of_model
from memfit.parallel import ALONE, InFlight
from memfit.precision import DTYPE_BYTES
from memfit.runtimes.pipelines import Pipelining

ID_BYTES = 8
"""Token ids and labels are int64."""


class TrainingPolicy(NamedTuple):
    """What decides a training step beside the kernels."""

    optimizer: Optimizer
    checkpointing: Checkpointing
    outputs_kept: bool
    gradients_persist: bool
    workspace: int
    buffers: int = 0
    """Untrained tensors of the release's modelling code, beside the model's own."""
    in_backward: bool = False
    """The optimizer steps each parameter as its gradient arrives."""
    buckets: str = "none"
    """DDP's buckets: none | copies | views (of which the gradients are parts)."""
    ema: str = ""
    """Format of a moving average of the weights on the device."""
    evaluation: EvaluationPolicy | None = None
    sharding: Sharding = UNSHARDED
    in_flight: InFlight = ALONE
    """What it holds for backward at the same time, as a stage of a pipeline."""
    pipeline: Pipelining | None = None
    """How stages are run; `None` where there is one."""
    early_stop: bool = True
    """See `StepPolicy`."""
    batch_tensors: tuple[tuple[int, int], ...] = ()
    """Axes and bytes of what a batch has beside ids and labels."""


def _inputs(model: Model, kernels: KernelPolicy) -> Form:
    """Ids for every token or the pixels of every image, and labels for whatever the loss compares."""
    pixels = model.pixels * DTYPE_BYTES[kernels.precision.weight]
    read = form(INPUTS, SEQUENCE, pixels) if pixels else ZERO if model.receives else form(INPUTS, TOKEN, ID_BYTES)
    losses = [op for segment in model.segments for block in segment.blocks for op in block.ops if op.kind == "loss"]
    # the label of a class is an id; for a mean square or several classes at once, a number for every logit
    labels = {
        op.inputs[0].axis: ID_BYTES if op.attributes["function"] == "cross-entropy" else 4 * op.inputs[0].width for op in losses
    }
    return read + sum([form(INPUTS, axis, num_bytes) for axis, num_bytes in labels.items()])


class Totals(NamedTuple):
    """Weights, trained tensors and inputs of a model under its kernels."""

    weights: int
    trained: list[Trained]
    parameters: int
    """Elements that are trained."""
    gradients: int
    inputs: Form
    master: int


@lru_cache(maxsize=256)
def stored(kernels: KernelPolicy) -> KernelPolicy:
    """The policy without what changes how operations run, but not what is stored and trained: loss, attention and the like."""
    return KernelPolicy(
        precision=kernels.precision,
        quantized=kernels.quantized,
        train_all=kernels.train_all,
        choice=kernels.choice,
        norm_dtype=kernels.norm_dtype,
        adapter=kernels.adapter,
        virtual_tokens=kernels.virtual_tokens,
        virtual_dtype=kernels.virtual_dtype,
        prefix=kernels.prefix,
        adapter_targets=kernels.adapter_targets,
    )


def totals_of(model: Model, kernels: KernelPolicy) -> Totals:
    """What a model stores and trains under its kernels."""
    return totals_of_stored(model, stored(kernels))


@of_model(256)
def totals_of_stored(model: Model, kernels: KernelPolicy) -> Totals:
    """The same of a policy as `stored` leaves it."""
    trained = trained_tensors(model, kernels)
    added = gradient_bytes(added_tensors(model, kernels)) if not kernels.train_all else 0
    weights = weight_bytes(tensors_of(model), kernels) + added + buffer_bytes(model, kernels)
    parameters = sum([one.repeat * one.elements for one in trained])
    return Totals(weights, trained, parameters, gradient_bytes(trained), _inputs(model, kernels), master_bytes(trained, kernels))


def trained_elements(model: Model, kernels: KernelPolicy) -> int:
    """Elements that are trained."""
    return totals_of(model, kernels).parameters


@of_model(256)
def _optimizer_bytes(model: Model, kernels: KernelPolicy, optimizer: Optimizer) -> tuple[int, int]:
    """States on the device, and the scratch of a step over all parameters; `kernels` as `stored` leaves them."""
    trained = totals_of_stored(model, kernels).trained
    return 0 if optimizer.paged else state_bytes(optimizer, trained), step_scratch(optimizer, trained)


def ema_bytes(model: Model, kernels: KernelPolicy, dtype: str) -> int:
    """A moving average of what is trained: elements x bytes of its format."""
    return totals_of(model, kernels).parameters * DTYPE_BYTES[dtype]


def _standing_gradients(totals: Totals, policy: TrainingPolicy) -> int:
    """Gradients and buckets that are there all the time."""
    times = (policy.gradients_persist or policy.buckets == "views") + (policy.buckets == "copies")
    return totals.gradients * times


def _passing_gradients(totals: Totals, policy: TrainingPolicy) -> int:
    """Gradients that come with backward and stay until the step."""
    stay = policy.gradients_persist or policy.buckets == "views" or policy.in_backward
    return 0 if stay else totals.gradients


class Base(NamedTuple):
    """What a step holds whatever its operations take."""

    weights: Form
    statics: Form
    """Weights, states, inputs, workspace, and what stands of gradients."""
    standing: Form
    """Gradients and buckets that are there all the time: a part of `statics`."""
    held: Form
    """Gradients from backward to the step."""
    scratch: Form
    """Of the optimizer, when it steps all parameters after backward."""
    states: int
    parameters: int

    @property
    def update(self) -> Form:
        """What an optimizer step holds at the least, beside the statics."""
        return self.held + self.scratch


def base_of(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Base:
    """What a step of these policies holds."""
    if policy.sharding.scheme:
        return _sharded_base(model, kernels, policy)
    kept = stored(kernels)
    totals = totals_of_stored(model, kept)
    states, at_once = _optimizer_bytes(model, kept, policy.optimizer)
    weights = form(WEIGHTS, ONCE, totals.weights + policy.buffers)
    average = form(WEIGHTS, ONCE, totals.parameters * DTYPE_BYTES[policy.ema]) if policy.ema else ZERO
    standing = form(GRADIENTS, ONCE, _standing_gradients(totals, policy))
    master = form(MASTER_WEIGHTS, ONCE, totals.master)
    statics = weights + average + master + totals.inputs + standing + buffers_of(model, kernels)
    statics += sum([form(INPUTS, axis, num_bytes) for axis, num_bytes in policy.batch_tensors])
    statics += form(OPTIMIZER_STATES, ONCE, states) + form(WORKSPACE, ONCE, policy.workspace)
    held = form(GRADIENTS, ONCE, _passing_gradients(totals, policy))
    scratch = ZERO if policy.in_backward else form(TEMPORARY, ONCE, at_once)
    return Base(weights, statics, standing, held, scratch, states, totals.parameters)


def _sharded_base(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> Base:
    """Of one device's part."""
    sharding, totals = policy.sharding, totals_of(model, kernels)
    own = held(model, stored(kernels), sharding, policy.optimizer)
    buffers = sharding.standing_buffers(own.largest)
    parts = sharding.degree if sharding.splits_states else 1
    average = -(-totals.parameters // parts) * DTYPE_BYTES[policy.ema] if policy.ema else 0
    stays = policy.gradients_persist or policy.buckets == "views" or sharding.gradients_stand
    copies = own.gradients if policy.buckets == "copies" and not sharding.rules.main_gradients else 0
    weights = form(WEIGHTS, ONCE, own.weights + policy.buffers)
    standing = form(GRADIENTS, ONCE, copies + (own.gradients if stays else 0))
    statics = weights + form(WEIGHTS, ONCE, average) + totals.inputs + standing + form(TEMPORARY, ONCE, buffers)
    statics += form(MASTER_WEIGHTS, ONCE, own.master) + form(OPTIMIZER_STATES, ONCE, own.states)
    statics += form(WORKSPACE, ONCE, policy.workspace)
    passing = form(GRADIENTS, ONCE, 0 if stays else own.gradients)
    return Base(weights, statics, standing, passing, form(TEMPORARY, ONCE, own.scratch), own.states, totals.parameters)


def sharded_bytes(model: Model, kernels: KernelPolicy, policy: TrainingPolicy) -> tuple[int, int]:
    """What a sharded job keeps in host memory, of this process, and one device's part of the gradients."""
    own = held(model, stored(kernels), policy.sharding, policy.optimizer)
    return own.host, own.gradients
