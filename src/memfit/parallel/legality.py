"""Which degrees a model allows, and why not the others."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.model import Model
from memfit.model.remember import of_model
from memfit.parallel.habits import USUAL
from memfit.parallel.tensor import Need, walk_model

FARTHEST = 1024
"""Degrees up to which a legal one is looked for."""


@of_model(1)
def tensor_needs(model: Model) -> tuple[tuple[Need, ...], str]:
    """What must divide by a tensor-parallel degree, and why the model cannot be split at all (empty if it can)."""
    try:
        _, needs = walk_model(model, 1, sequence=False, habits=USUAL)
    except UsageError as error:
        return (), str(error)
    return needs, "" if needs else f"{model.family} has nothing that tensor parallelism splits"


def _divides(need: Need, tp: int) -> bool:
    return need.units % tp == 0 or (need.repeated and tp % need.units == 0)


def tensor_reason(model: Model, tp: int) -> str | None:
    """Why the model cannot be split over `tp` devices; `None` if it can."""
    if tp == 1:
        return None
    needs, never = tensor_needs(model)
    if never:
        return never
    broken = next((one for one in needs if not _divides(one, tp)), None)
    if broken is None:
        return None
    also = " and are not a divisor of it" if broken.repeated else ""
    return f"{broken.units:,} {broken.noun} do not divide by {tp}{also}"


def legal_near(model: Model, tp: int) -> tuple[int | None, int | None]:
    """The nearest legal tensor-parallel degrees below and above."""
    below = next((one for one in range(tp - 1, 0, -1) if tensor_reason(model, one) is None), None)
    most = min(FARTHEST, max([one.units for one in tensor_needs(model)[0]], default=0))
    above = next((one for one in range(tp + 1, most + 1) if tensor_reason(model, one) is None), None)
    return below, above


def check_tensor(model: Model, tp: int) -> None:
    """Raises `UsageError` with the reason and the nearest legal degrees where the model does not allow `tp`."""
    reason = tensor_reason(model, tp)
    if reason is None:
        return
    if tensor_needs(model)[1]:
        raise UsageError(f"--tp {tp}: {reason}; leave it out, or split the states with --fsdp")
    near = " and ".join([f"--tp {one}" for one in legal_near(model, tp) if one is not None])
    raise UsageError(f"--tp {tp}: {reason}; the nearest that {model.name} allows: {near}")


def sequence_reason(tokens: int, tp: int) -> str | None:
    """Why sequences of so many tokens cannot be split along the tokens over `tp` devices; `None` if they can."""
    if tokens % tp == 0:
        return None
    below = tokens // tp * tp
    near = f"{below:,} or {below + tp:,}" if below else f"{tp:,}"
    return f"--sp splits {tokens:,} tokens over {tp} devices, which does not divide them; {near} would do"


def expert_reason(model: Model, ep: int) -> str | None:
    """Why the experts cannot be spread over `ep` devices; `None` if they can."""
    if ep == 1:
        return None
    counts = expert_counts(model)
    if not counts:
        return f"{model.family} has no experts"
    broken = next((one for one in counts if one % ep), None)
    return None if broken is None else f"{broken:,} experts do not divide by {ep}"


@of_model(1)
def expert_counts(model: Model) -> tuple[int, ...]:
    """The distinct numbers of experts that its layers have."""
    found = [
        op.parameters[0].shape[0]
        for segment in model.segments
        for block in segment.blocks
        for op in block.ops
        if op.kind == "experts"
    ]
    return tuple(dict.fromkeys(found))


def check_experts(model: Model, ep: int) -> None:
    """Raises `UsageError` with the reason and the nearest legal degrees where the model does not allow `ep`."""
    reason = expert_reason(model, ep)
    if reason is None:
        return
    counts = expert_counts(model)
    if not counts:
        raise UsageError(f"--ep {ep}: {reason}: leave it out")
    legal = [one for one in range(1, min(counts) + 1) if expert_reason(model, one) is None]
    near = [max([one for one in legal if one < ep], default=None), min([one for one in legal if one > ep], default=None)]
    said = " and ".join([f"--ep {one}" for one in near if one is not None])
    raise UsageError(f"--ep {ep}: {reason}; the nearest that {model.name} allows: {said}")


def largest_legal(model: Model, devices: int, per_node: int) -> int:
    """The largest tensor-parallel degree that the model allows, divides `devices` and stays within a machine of `per_node`."""
    most = min(devices, per_node)
    return max(tp for tp in range(1, most + 1) if devices % tp == 0 and per_node % tp == 0 and tensor_reason(model, tp) is None)


def pipeline_reason(model: Model, pp: int, *, virtual_stages: int = 1, split: str = "weighted") -> str | None:
    """Why the model cannot be cut into `pp` stages; `None` if it can."""
    if pp == 1:
        return None
    from memfit.parallel.stages import layers_of_stages

    try:
        layers_of_stages(model, pp, virtual_stages, split)
    except UsageError as error:
        return str(error).removeprefix(f"--pp {pp}: ")
    return None
