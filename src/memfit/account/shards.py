"""One device's part of the weights, master weights, gradients and optimizer states, tensor by tensor.

FSDP2 cuts each tensor on its first dimension: ceil(d0 / n) rows. The others cut flat: ceil(elements / n).
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from memfit.account.optimizers import Optimizer, Trained
from memfit.account.sharding import Sharding
from memfit.account.states import (
    Tensors,
    added_tensors,
    buffer_bytes,
    gradient_bytes,
    state_bytes,
    step_scratch,
    tensors_of,
    trained_tensors,
    weight_bytes,
)
from memfit.kernels import KernelPolicy
from memfit.model import Model
from memfit.precision import DTYPE_BYTES


class Held(NamedTuple):
    """Bytes on one device between the operations of a step."""

    weights: int
    master: int
    states: int
    gradients: int
    """Those that the optimizer finds."""
    scratch: int
    """Temporaries of the step."""
    host: int
    """What waits in host memory, of this process."""
    trained: int
    """Elements that get a gradient, before anything is split."""
    largest: int
    """Elements of the largest trained tensor."""


def divisor(role: str, sharding: Sharding) -> int:
    """Over how many devices a tensor is split."""
    return sharding.expert_degree if role == "expert" else sharding.degree


def share(shape: tuple[int, ...], parts: int, *, flat: bool) -> tuple[int, ...]:
    """The shape of the largest part: ceil(d0 / n) rows, or ceil(elements / n) of the flat tensor."""
    if parts == 1 or not shape:
        return shape
    if flat:
        return (-(-prod(shape) // parts),)
    return (-(-shape[0] // parts), *shape[1:])


def part_of(one: Trained, sharding: Sharding, dtype: str = "") -> Trained:
    """One device's part of a trained tensor, in a format of its own if one is given."""
    shape = share(one.shape or (one.elements,), divisor(one.role, sharding), flat=sharding.rules.flat)
    return one._replace(elements=prod(shape), shape=shape, dtype=dtype or one.dtype)


def split_weight_bytes(tensors: tuple[Tensors, ...], kernels: KernelPolicy, sharding: Sharding) -> int:
    """Stored bytes of one device's part of the weights; a quantised tensor is split by bytes, scales included."""
    total = 0
    for tensor in tensors:
        parameter = tensor.parameter
        parts = divisor(parameter.role, sharding)
        whole = weight_bytes((Tensors(parameter, 1),), kernels)
        elements = parameter.num_elements
        if elements and whole % elements == 0:
            part = prod(share(parameter.shape, parts, flat=sharding.rules.flat)) * (whole // elements)
        else:
            part = -(-whole // parts)
        total += tensor.repeat * part
    return total


@lru_cache(maxsize=256)
def held(model: Model, kernels: KernelPolicy, sharding: Sharding, optimizer: Optimizer) -> Held:
    """What one device holds. `kernels`: as operations compute; stored formats are the sharding's."""
    stored = kernels._replace(precision=kernels.precision._replace(weight=sharding.stored))
    trained, added = trained_tensors(model, stored), added_tensors(model, stored) if not kernels.train_all else []
    tensors = tensors_of(model)
    if sharding.splits_weights:
        weights = split_weight_bytes(tensors, stored, sharding) + gradient_bytes([part_of(one, sharding) for one in added])
    else:
        weights = weight_bytes(tensors, stored) + gradient_bytes(added)
    updated = [part_of(one, sharding, sharding.master) for one in trained] if sharding.splits_states else [
        one._replace(dtype=sharding.master or one.dtype) for one in trained
    ]  # fmt: skip
    master = gradient_bytes(updated) if sharding.master else 0
    states = state_bytes(optimizer, updated)
    kept = [part_of(one, sharding) for one in trained] if sharding.splits_gradients else trained
    gradients = gradient_bytes([one._replace(dtype=_gradient_format(one, sharding)) for one in kept])
    scratch = _scratch(optimizer, updated, gradients, sharding)
    host = 0
    if sharding.offload == "params" or (sharding.offload == "optimizer" and sharding.stage == 3):
        host += gradients  # the partition buffer of ZeRO-3, or FSDP2's sharded gradients
        gradients = 0
    if sharding.offload != "none":
        host += master + states + (gradient_bytes(updated) if sharding.master else 0)
        master = states = scratch = 0
        if sharding.offload == "params":
            host += weights
            weights = 0
        elif sharding.stage < 3:
            gradients = 0  # they leave for the host as they are reduced
    return Held(
        weights + buffer_bytes(model, kernels),
        master,
        0 if optimizer.paged else states,
        gradients,
        scratch,
        host + (states if optimizer.paged else 0),
        sum([one.repeat * one.elements for one in trained]),
        max([one.elements for one in trained], default=0),
    )


def _gradient_format(one: Trained, sharding: Sharding) -> str:
    """Adapters and tensors with a format of their own keep it, unless gradients have one buffer."""
    if sharding.rules.master:
        return sharding.gradient
    return one.dtype


def _scratch(optimizer: Optimizer, updated: list[Trained], gradients: int, sharding: Sharding) -> int:
    """What a step needs beside states and gradients.

    Masters are updated with fp32 gradients. DeepSpeed's stages 1 and 2 flatten a device's gradients (2 B) and convert them
    (4 B) before the others are freed; stage 3 converts one sub-group at a time. Megatron converts those that are not fp32.
    """
    own = step_scratch(optimizer, updated)
    if not sharding.master or sharding.gradient == sharding.master:
        return own
    elements = sum([one.repeat * one.elements for one in updated])
    half = DTYPE_BYTES[sharding.gradient]
    if sharding.scheme == "megatron":
        return 4 * elements + own
    if sharding.stage == 3:
        group = min(elements, sharding.buckets.sub_group)
        return 4 * group + own * group // max(elements, 1)
    return max((half + 4) * elements, 4 * elements + own)
