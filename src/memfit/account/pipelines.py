"""Pipeline stages in a job: what is decided for them, and what other micro-batches hold while one runs."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.account.choices import Choices
from memfit.account.forms import ACTIVATIONS, ZERO, Form, as_temporary, form, only, per_axis, share
from memfit.errors import UsageError
from memfit.job import Assumption, FineTuning, Parallelism, Training
from memfit.model import Model
from memfit.options import options_of
from memfit.parallel import InFlight
from memfit.runtimes import Runtime
from memfit.runtimes.pipelines import PIPELINES, Pipelining

if TYPE_CHECKING:
    from memfit.account.profile import Moment
    from memfit.account.timeline import Timeline

LEAST_CHUNKS = 2
"""Of an interleaved schedule: with one it would be 1F1B (torchtitan's default for such schedules, too)."""


def resolved(model: Model, given: Parallelism, runtime: Runtime, choices: Choices) -> dict[str, Any]:
    """What a pipeline needs and the job does not say: chunks of a stage, layers of each."""
    if (given.pp or 1) == 1:
        return {}
    from memfit.parallel.stages import layers_of_stages

    changes: dict[str, Any] = {}
    pp, chunks = given.pp or 1, given.virtual_stages
    if given.schedule == "interleaved" and chunks == 1:
        chunks = changes["virtual_stages"] = LEAST_CHUNKS
        _assume(choices, "virtual_stages", chunks, "an interleaved schedule needs chunks: with one it is 1F1B")
    if given.stage_layers is None:
        how = PIPELINES[runtime.pipeline]
        counts = layers_of_stages(model, pp, chunks, how.split)
        changes["stage_layers"] = how.split
        stated = {"weighted": "embedding and head count as a layer each", "even": "equal shares"}[how.split]
        _assume(choices, "stage_layers", shown(counts), f"{stated}, as {how.name} gives them")
    if model.tied:
        row = PIPELINES[runtime.pipeline]
        _assume(choices, "tied_head", "copied", f"the head shares the embedding's table: {row.tied}", flag=None)
    return changes


def _assume(choices: Choices, name: str, value: object, why: str, flag: str | None = "") -> None:
    said = options_of(Parallelism)[name].flag if flag == "" else flag
    choices.assumptions.append(Assumption(name=name, value=value, why=why, flag=said))


def virtual_method(workload: Training) -> str:
    """The method, if it trains virtual tokens; those are on one device only."""
    method = workload.method if isinstance(workload, FineTuning) else ""
    return method if method in ("prompt", "prefix") else ""


def holds(model: Model, count: InFlight) -> str:
    """A stage in words: `embedding, 15 layers; 8 micro-batches in flight`."""
    of = f" in {count.of} chunks" if count.of > 1 else ""
    parts = [f"{model.num_layers} layers{of}" if model.num_layers > 1 else "1 layer"]
    parts = parts if model.receives else ["embedding", *parts]
    text = ", ".join(parts if model.sends else [*parts, "head"])
    if count.of > 1:
        return f"{text}; {count.chunks} chunks in flight"
    return f"{text}; {count.chunks} micro-batches in flight" if count.chunks > 1 else text


def shown(counts: tuple[int, ...]) -> str:
    """`15,16x6,15`"""
    runs = [(number, len(list(group))) for number, group in groupby(counts)]
    return ",".join([f"{number}x{times}" if times > 1 else str(number) for number, times in runs])


def resolve_micro_batches(given: Parallelism, workload: Training, choices: Choices) -> None:
    """The micro-batches of a step: as many as fill the pipeline, where the job does not say.

    Raises:
        UsageError: what a pipeline excludes.
    """
    pp = given.pp or 1
    if pp == 1:
        return
    if workload.optimizer_in_backward:
        raise UsageError(
            f"--optimizer-in-backward frees each gradient at once: it excludes --pp {pp}, whose micro-batches add up theirs"
        )
    if workload.eval_batch is not None:
        raise UsageError(f"--eval-batch is an evaluation on one device: it excludes --pp {pp}")
    if virtual := virtual_method(workload):
        raise UsageError(f"--method {virtual} trains tokens that every layer sees: it excludes --pp {pp}")
    if workload.grad_accum > 1:
        return
    from memfit.parallel.stages import fills

    number = fills(given.schedule, pp, given.virtual_stages)
    more = "each more adds to every stage" if given.schedule == "gpipe" else "more change only what the last stage returns"
    choices.assume("grad_accum", number, f"micro-batches of a step, as many as fill {pp} stages; {more}")


class Held(NamedTuple):
    """What one micro-batch holds on a stage between its forward and its backward."""

    layers: Form = ZERO
    """In all layers of the stage."""
    ends: Form = ZERO
    """In its embedding or head, and what it has once: hidden states that it received, masks and tables."""
    beside: Form = ZERO
    """Logits that the caller holds, apart from what is kept; below all of them."""
    outputs: Form = ZERO
    boundary: Form = ZERO
    """The hidden states that one stage hands to the next."""


NOTHING = Held()
"""Of a model that is not cut."""


def as_activations(of: Form) -> Form:
    """The same bytes, counted as activations."""
    return sum([form(ACTIVATIONS, axis, num_bytes) for axis, num_bytes in per_axis(of)])


def held_of(timeline: Timeline, shared: Form) -> Held:
    """What a micro-batch holds; `shared`: tables and masks that its layers keep.

    Autocast's copies of the weights are made once for all micro-batches (the region spans the schedule), as are gathered weights.
    """
    runs = timeline.runs
    layers = ends = ZERO
    for index, run in enumerate(runs):
        found = only(sum(timeline.kept[index]), ("activations", "logits"))
        if run.role in ("layers", "between"):
            layers += found * run.repeat
        else:
            ends += found * run.repeat
    last = runs[-1].blocks[-1]
    return Held(
        layers=layers,
        ends=ends + shared + timeline.received() + timeline.cache(),
        beside=last.outputs_held,
        outputs=last.outputs,
        boundary=as_activations((runs[0] if runs[-1].role == "head" else runs[-1]).blocks[-1].output),
    )


class Beside(NamedTuple):
    """What a stage has beside the micro-batch that runs."""

    held: Form
    """For the backward of others; a part of what is below."""
    always: Form
    forward: Form
    backward: Form
    between_steps: Form


def beside_of(model: Model, how: Pipelining, count: InFlight, held: Held, inputs: Form, *, returned: bool) -> Beside:
    """Other micro-batches' activations, and the buffers through which stages hand on hidden states and gradients.

    Of n micro-batches in flight n - 1 are others; of a stage's chunks all send but the one with the head, all receive but the one
    with the embedding. Where every micro-batch of the step has its buffers, those that are in flight hold what the first layer
    keeps, and the gradient from which a backward begins is one of them. Unless all micro-batches run forward first, the gradient
    of the input before is on its way back. `returned`: the caller gets the logits of all micro-batches.
    """
    number, steps = count.micro_batches, count.steps
    others = share(held.layers, count.chunks - count.of, count.of) + (held.ends + held.beside + inputs) * (number - 1)
    sending, receiving = count.of - (not model.sends), count.of - (not model.receives)
    if how.keeps_sent:
        others += held.boundary * (count.chunks - number * (not model.sends) - model.sends)
    # one micro-batch's logits are counted as if they were returned; those that are returned are joined, and both stay for a while
    kept_logits = held.outputs * (-1 if not returned else 2 * steps - 1 if how.keeps_buffers else 0) if how.keeps_sent else ZERO
    if not how.keeps_buffers:
        return Beside(others, ZERO, others, others, kept_logits)
    buffer = as_temporary(held.boundary)
    received = count.chunks - number * (not model.receives)
    idle = buffer * (steps * receiving - received) + inputs * (steps - number)
    gradients = buffer * (steps * sending)
    logits = held.outputs * (steps - number if returned else 0)
    returning = buffer if model.receives and number < steps and count.of == 1 else ZERO
    return Beside(
        others,
        idle,
        others + logits + gradients + returning,
        others + logits + gradients + returning - (buffer if model.sends else ZERO),
        kept_logits + buffer * received + gradients,
    )


def with_others(moments: tuple[Moment, ...], beside: Beside) -> tuple[Moment, ...]:
    """The moments of one micro-batch, with what is there beside it."""
    found = []
    for one in moments:
        state = one.form + (beside.backward if one.phase == "backward" else beside.forward)
        found.append(one._replace(form=state, total=per_axis(state)))
    return tuple(found)
