"""Expert parallelism: a model as one of `ep` devices holds it.

Each device has E / ep whole experts of every layer, and the router. Its activations do not shrink: every device brings tokens of
its own, and what goes to experts elsewhere is made up by what arrives from there (routing taken as balanced). Two all-to-alls a
layer, whose results are tensors of their own. The experts' states are sharded over the data-parallel devices that hold the same
experts, dp / ep of them: their parameters are those of role `expert`.
"""

from __future__ import annotations

from memfit.model import Block, Model, Op
from memfit.parallel.legality import check_experts


def split_experts(model: Model, ep: int, *, shared_tokens: bool = False) -> Model:
    """The part of a model that one of `ep` devices holds and runs.

    shared_tokens: all of them have the same tokens, as engines do whose other layers are tensor-parallel: each device runs those
    that go to its experts, 1 / ep of them, and nothing is exchanged but the sum.

    Raises:
        UsageError: a degree that the model does not allow, with the nearest ones that it does.
    """
    check_experts(model, ep)
    made: dict[int, Block] = {}
    for segment in model.segments:
        for block in segment.blocks:
            if id(block) not in made:
                made[id(block)] = block._replace(ops=tuple([_spread(op, ep, shared_tokens) for op in block.ops]))
    return model.part(
        segments=tuple([one._replace(blocks=tuple([made[id(block)] for block in one.blocks])) for one in model.segments])
    )


def _spread(op: Op, ep: int, shared_tokens: bool) -> Op:
    if op.kind != "experts":
        return op
    parameters = tuple([one._replace(shape=(one.shape[0] // ep, *one.shape[1:])) for one in op.parameters])
    return op._replace(parameters=parameters, attributes={**op.attributes, "ep": ep, "parts": ep if shared_tokens else 1})
