"""Measures a model's blocks under the conditions of a job, each once; equal blocks in a row become one run.

The optimizer, checkpointing and batch of a job change nothing here, so that alternatives of one job share what was measured.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.account.forms import ACTIVATIONS, GRADIENTS, TEMPORARY, ZERO, Form
from memfit.account.liveness import Accumulation, BlockMemory, measure, measure_forward
from memfit.kernels import Externals, KernelPolicy, Lowered, lower
from memfit.model import ONCE, PAIR, POSITION, POSITION_PAIR, Model
from memfit.precision import DTYPE_BYTES


class Run(NamedTuple):
    """Equal blocks in a row: the memory of each of the period, with and without autograd, and how often the period repeats."""

    names: tuple[str, ...]
    blocks: tuple[BlockMemory, ...]
    bare: tuple[BlockMemory, ...]
    repeat: int
    checkpointed: bool
    role: str
    provides: str
    shared_gradients: Form
    """Gradients of parameters that all repeats share: there from the first one on."""

    def kept(self, index: int) -> Form:
        """What one block leaves for backward: all it saves, or only its input when checkpointed."""
        return self.blocks[index].input if self.checkpointed else self.blocks[index].kept


def shared_forms(model: Model, kernels: KernelPolicy) -> tuple[Form, Form]:
    """Tensors that all layers share: rotary tables, and the masks that the backbone makes once.

    Full and sliding layers have a mask each. For eager it is a tensor in the weights' format with a batch dimension, for sdpa
    1 byte an entry, expanded over the batch unless padding differs; sdpa needs none where nothing is padded and no window binds,
    FlashAttention never.
    """
    dtype = DTYPE_BYTES[kernels.precision.weight]
    tables = {ACTIVATIONS + POSITION: 2 * model.rotary_dim * dtype} if model.rotary_dim else ZERO
    kinds = {cache.window for cache, _ in model.caches} or {None}
    if kernels.attention == "eager":
        masks, entry = (len(kinds) if model.kind == "decoder" or kernels.padded else 0), dtype
    elif kernels.attention == "sdpa":
        masks, entry = len(kinds) if kernels.padded else len(kinds.intersection(kernels.binding_windows)), 1
    else:
        masks, entry = 0, 0
    axis = PAIR if kernels.padded or kernels.attention == "eager" else POSITION_PAIR
    return tables, {TEMPORARY + axis: masks * entry} if masks else ZERO


@lru_cache(maxsize=256)
def relevant(kernels: KernelPolicy, role: str) -> KernelPolicy:
    """The policy without what a part of the model does not depend on, so that jobs that differ only there share its measure."""
    if role == "layers":
        return kernels._replace(loss="eager", logits_last=False, generating=False)
    same = kernels._replace(attention="sdpa", padded=False, binding_windows=(), device_capability=None, one_sequence=False)
    return same if role == "head" else same._replace(loss="eager", logits_last=False, generating=False)


class Conditions(NamedTuple):
    """What one block's memory depends on beside the block: a key for what was measured before."""

    kernels: KernelPolicy
    accumulation: Accumulation
    outputs_kept: bool
    requires_grad: bool
    dtype: str
    externals: Externals = ()


@lru_cache(maxsize=1024)
def _measured(model: Model, segment: int, place: int, conditions: Conditions) -> BlockMemory:
    """A block that autograd records. The optimizer and checkpointing of the job change nothing here."""
    lowered = _lowered(
        model, segment, place, conditions.kernels, conditions.requires_grad, conditions.dtype, conditions.externals
    )
    is_last = model.segments[segment].role == "head"
    return measure(lowered, accumulation=conditions.accumulation, outputs_kept=conditions.outputs_kept, is_last=is_last)


@lru_cache(maxsize=1024)
def _measured_bare(model: Model, segment: int, place: int, conditions: Conditions) -> BlockMemory:
    """A block whose forward runs without autograd: under a checkpoint."""
    return measure_forward(
        _lowered(model, segment, place, conditions.kernels, conditions.requires_grad, conditions.dtype, conditions.externals)
    )


@lru_cache(maxsize=16)
def _lowered(
    model: Model, segment: int, place: int, kernels: KernelPolicy, requires_grad: bool, dtype: str, externals: Externals
) -> Lowered:
    block = model.segments[segment].blocks[place]
    return lower(block, kernels, input_requires_grad=requires_grad, input_dtype=dtype, externals=externals)


def measure_segment(
    model: Model, index: int, conditions: Conditions, *, checkpointed: bool, gradients_persist: bool = False
) -> tuple[list[Run], Conditions]:
    """The runs of a segment: one, or two when its first period meets other conditions than the rest (no gradient, a format).

    Returns them and the conditions that the next segment meets.
    """
    segment = model.segments[index]
    given = conditions
    kept = conditions.outputs_kept and segment.role == "head"
    conditions = conditions._replace(kernels=relevant(conditions.kernels, segment.role), outputs_kept=kept)
    runs: list[Run] = []
    shared: Form = ZERO
    if segment.shared and conditions.kernels.train_all and not gradients_persist:
        elements = sum(block.num_parameters for block in segment.blocks)
        shared = {GRADIENTS + ONCE: elements * DTYPE_BYTES[conditions.kernels.precision.weight]}
    left = segment.repeat
    while left:
        before = conditions
        blocks, bare = [], []
        for place in range(len(segment.blocks)):
            memory = _measured(model, index, place, conditions)
            blocks.append(memory)
            bare.append(_measured_bare(model, index, place, conditions) if checkpointed else memory)
            met = (memory.output_requires_grad, memory.output_dtype)
            if met != (conditions.requires_grad, conditions.dtype):
                conditions = conditions._replace(requires_grad=met[0], dtype=met[1])
        count = left if before is conditions else 1
        runs.append(
            Run(
                tuple([block.name for block in segment.blocks]),
                tuple(blocks),
                tuple(bare),
                count,
                checkpointed,
                segment.role,
                segment.provides,
                shared,
            )
        )
        left -= count
    after = given._replace(requires_grad=conditions.requires_grad, dtype=conditions.dtype)
    if segment.provides:
        provided = (segment.provides, conditions.dtype, conditions.requires_grad)
        after = after._replace(externals=(*given.externals, provided), requires_grad=False, dtype=given.kernels.precision.weight)
    return runs, after
