"""Which degrees a model allows, and why not the others."""

from __future__ import annotations

from memfit.errors import UsageError
from memfit.model import Model


def tensor_reason(model: Model, tp: int) -> str | None:
    """Why the model cannot be split over `tp` devices; `None` if it can."""
    if tp == 1:
        return None
    if model.num_heads % tp:
        return f"{model.num_heads} attention heads do not divide by {tp}"
    return None


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
