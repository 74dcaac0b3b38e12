"""What a block takes in forward and backward: its tape's lifetimes and replay, put together."""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.backward import Backward
from memfit.account.crossing import Accumulation, BlockMemory, Provided, Read
from memfit.account.forms import ACTIVATIONS, GRADIENTS, TEMPORARY, ZERO, Form, form
from memfit.account.lifetimes import Plan, early_stop, forward_states, plan_forward
from memfit.kernels.lowering import Lowered
from memfit.kernels.tape import Tensor
from memfit.model.description import ONCE


class Recorded(NamedTuple):
    """A block that autograd records, and what it takes whatever becomes of its gradients."""

    lowered: Lowered
    plan: Plan
    memory: BlockMemory


def record(lowered: Lowered) -> Recorded:
    """The forward pass of a block, with all that it keeps."""
    plan = plan_forward(lowered, grad=True)
    kept = sum([takes for takes, times in zip(plan.storages, plan.saved, strict=True) if times])
    return Recorded(lowered, plan, _block_memory(lowered, plan, kept))


def measure_forward(lowered: Lowered) -> BlockMemory:
    """A block that runs without autograd: nothing is kept."""
    return _block_memory(lowered, plan_forward(lowered, grad=False), ZERO)


def measure_checkpointed(recorded: Recorded, chosen: frozenset[int]) -> BlockMemory:
    """A block under a checkpoint: it runs without autograd, which keeps the `chosen` storages only, and once more in backward."""
    lowered = recorded.lowered
    plan = plan_forward(lowered, grad=False, chosen=chosen)
    memory = _block_memory(lowered, plan, sum([plan.storages[storage] for storage in chosen]))
    if not chosen:
        stop = early_stop(lowered)
        again = recorded.memory.forward if stop is None else forward_states(lowered, recorded.plan, stop=stop)
        return memory._replace(recomputed=again)
    again = forward_states(lowered, plan_forward(lowered, grad=True, chosen=chosen, again=True), chosen)
    return memory._replace(recomputed=again, unclaimed=_unclaimed(lowered, plan, chosen))


def _unclaimed(lowered: Lowered, plan: Plan, chosen: frozenset[int]) -> Form:
    """Chosen storages that stay until backward is through: recomputation ends where the last saved tensor is there.

    A node saves its inputs before it runs and its results after (torch/utils/checkpoint.py, early_stop).
    """
    nodes = lowered.tape.nodes
    last = max((index for index, node in enumerate(nodes) if node.saved), default=0)
    reached = {one.storage for node in nodes[:last] for one in node.outputs} | set(nodes[last].saved)
    return sum([plan.storages[storage] for storage in chosen if storage not in reached])


def measure(
    lowered: Lowered, *, accumulation: Accumulation, outputs_kept: bool, is_last: bool, retained: bool = False
) -> BlockMemory:
    """Forward and backward of one block: `measure_recorded` of a tape that is measured once."""
    return measure_recorded(
        record(lowered), accumulation=accumulation, outputs_kept=outputs_kept, is_last=is_last, retained=retained
    )


def measure_recorded(
    recorded: Recorded, *, accumulation: Accumulation, outputs_kept: bool, is_last: bool, retained: bool = False
) -> BlockMemory:
    """Forward and backward of one block.

    Args:
        recorded: the block's tape, with its forward pass.
        accumulation: what becomes of parameters' gradients.
        outputs_kept: the caller still holds the model's outputs during backward.
        is_last: the block ends in the loss: its backward starts from a scalar.
        retained: backward runs with retain_graph=True, which frees nothing that was saved.
    """
    lowered, plan, memory = recorded
    outputs, held = ZERO, ZERO
    logits = lowered.logits if outputs_kept else None
    if logits is not None:
        outputs = plan.storages[logits.storage]
        held = ZERO if plan.saved[logits.storage] else outputs
    backward: tuple[Form, ...] = ()
    if lowered.output.requires_grad:
        stays = frozenset([one.storage for one in _outputs(lowered)]) if outputs_kept else frozenset()
        if retained:
            stays = frozenset(range(len(plan.storages)))
        replay = Backward(lowered, plan, memory.kept + held, stays=stays, accumulation=accumulation)
        backward = replay.run(lowered.output, (ONCE, 4) if is_last else lowered.output.size)
    gradients = _gradients(lowered, accumulation)
    return memory._replace(backward=backward, outputs_held=held, outputs=outputs, gradients=gradients)


def _outputs(lowered: Lowered) -> list[Tensor]:
    """The model's outputs that this block makes."""
    return [*lowered.tape.returned, *([lowered.logits] if lowered.logits is not None else [])]


def _gradients(lowered: Lowered, accumulation: Accumulation) -> Form:
    """Gradients that remain when its backward has run."""
    total = 0
    for node in lowered.tape.graph:
        for num_bytes, copy_bytes, name in node.weight_grads:
            if accumulation.repeated == "first":
                total += copy_bytes or num_bytes
            elif name in accumulation.pending:
                total += num_bytes
            elif accumulation.shares(name):
                total += num_bytes * (accumulation.widened - 1) if name in accumulation.completes else 0
            elif not (accumulation.persist or accumulation.repeated):
                total += num_bytes * accumulation.widened
    return form(GRADIENTS, ONCE, total) + _waiting(lowered)


def _waiting(lowered: Lowered) -> Form:
    """Gradients of the block's tensors that stay until all blocks are through backward."""
    return sum([form(TEMPORARY, *one.size) for one in lowered.tape.waiting])


def _returned(lowered: Lowered, plan: Plan) -> tuple[Form, Form]:
    """The cache's part that no node saves, and the part that one does."""
    parts = [ZERO, ZERO]
    for one in lowered.tape.returned:
        parts[bool(plan.saved[one.storage])] += form(ACTIVATIONS, *one.size)
    return parts[0], parts[1]


def _is_leaf(lowered: Lowered, tensor: Tensor) -> bool:
    makers = [node for node in lowered.tape.nodes if any(one is tensor for one in node.outputs)]
    return not any(node.weight_grads or any(one.requires_grad for one in node.inputs) for node in makers)


def _block_memory(lowered: Lowered, plan: Plan, kept: Form) -> BlockMemory:
    sizes = lowered.tape.sizes
    made = lowered.tape.cached_casts.values()
    casts = sum([sizes[one.storage][1] for one in made if not plan.saved[one.storage]])
    saved_casts = sum([sizes[one.storage][1] for one in made if plan.saved[one.storage]])
    return BlockMemory(
        kept=kept,
        region_casts=form(TEMPORARY, ONCE, casts),
        forward=forward_states(lowered, plan),
        backward=(),
        gradients=ZERO,
        input=form(ACTIVATIONS, lowered.input.axis, sizes[lowered.input.storage][1]),
        input_saved=bool(plan.saved[lowered.input.storage]),
        output=form(TEMPORARY, *lowered.output.size),
        outputs_held=ZERO,
        outputs=ZERO,
        output_dtype=lowered.output.dtype,
        output_requires_grad=lowered.output.requires_grad,
        casts_saved=form(TEMPORARY, ONCE, saved_casts),
        returned=_returned(lowered, plan),
        waiting=_waiting(lowered),
        lingering=sum([plan.storages[one.storage] for one in lowered.tape.lingering if not plan.saved[one.storage]]),
        read=tuple(
            [
                Read(name, form(ACTIVATIONS, *one.size), bool(plan.saved[one.storage]), one.requires_grad)
                for name, one in lowered.externals
            ]
        ),
        provided=tuple(
            [
                Provided(
                    name,
                    form(TEMPORARY, *one.size),
                    bool(plan.saved[one.storage]),
                    one.dtype,
                    one.requires_grad,
                    one.requires_grad and _is_leaf(lowered, one),
                )
                for name, one in lowered.provided
            ]
        ),
    )
