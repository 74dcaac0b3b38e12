"""Tensor and sequence parallelism: a model as one of `tp` devices holds it.

Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198): products by columns make a
share of heads or of the MLP's columns, products by rows make summands of the whole, which the devices add up. With sequence
parallelism the sums are scattered along the tokens, so that norms, dropouts and residuals are split as well, and gathered where
a product by columns reads them. The pass follows the values of each block; `splits.SPLITS` has a rule for every kind of
operation, and what the devices exchange becomes operations of its own, which `memfit.kernels.collectives` writes down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memfit.errors import UsageError
from memfit.model import Block, Model, Op, Parameter, Segment, StateSpec, Value
from memfit.model.description import POSITION, TARGET_POSITION, TARGET_TOKEN, TOKEN
from memfit.parallel.habits import USUAL, Habits
from memfit.parallel.pieces import Pieces, local_columns, pieces_of, share
from memfit.parallel.splits import ALONG_TOKENS, SPLIT, SPLITS, WHOLE

ALONG = (TOKEN, TARGET_TOKEN, POSITION, TARGET_POSITION)
"""Axes that sequence parallelism splits."""
READS_THE_BATCH = ("embedding", "pixels", "opaque")


class Need(NamedTuple):
    """What must divide by the degree."""

    units: int
    noun: str
    repeated: bool = False
    """Fewer units than devices are there several times: the degree may be a multiple of them."""


class Walk:
    """One block's operations, rewritten for one of `degree` devices."""

    def __init__(self, block: Block, model: Model, degree: int, *, sequence: bool, habits: Habits, known: dict[str, str]) -> None:
        self.block = block
        self.model = model
        self.degree = degree
        self.sequence = sequence
        self.habits = habits
        self.needed: list[Need] = []
        self.pieces: dict[int, Pieces] = pieces_of(block)
        self.keeps_share_of_state = False
        self.ops: list[Op] = []
        self.values: dict[int, Value] = {}
        self.states: dict[int, str] = {}
        self._known = known
        self._caches: list[int] = []
        self._gathered: dict[int, Value] = {}
        self._next = 1 + max([0, *[one.id for op in block.ops for one in (*op.inputs, *op.outputs)]])

    # --- what rules ask

    @property
    def whole_experts(self) -> bool:
        """Whether experts stay as they are."""
        return self.habits.whole_experts

    def state(self, value: Value) -> str:
        """How a value of the whole model lies on the devices."""
        return self.states[value.id]

    def local(self, value: Value) -> Value:
        """As it lies."""
        return self.values[value.id]

    def local_width(self, value: Value) -> int:
        """Columns of a split value on one device."""
        return local_columns(self.pieces.get(value.id) or ((value.width, value.width),), self.degree)

    def whole(self, value: Value) -> Value:
        """All of a value: gathered where it is not whole."""
        state = self.states[value.id]
        if state == WHOLE:
            return self.values[value.id]
        if value.id not in self._gathered:
            kind = "gather_tokens" if state == ALONG_TOKENS else "gather_columns"
            made = self.fresh(value, value.width)
            self.record(Op(kind, kind.replace("_", " "), (self.values[value.id],), (made,)))
            self._gathered[value.id] = made
        return self._gathered[value.id]

    def entering(self, value: Value) -> Value:
        """All of a value for an operation of which each device does a share: the gradients are summed in backward."""
        read = self.whole(value)
        if self.states[value.id] == ALONG_TOKENS:
            return read  # summed where the gathered value's gradient is scattered
        made = self.fresh(value, value.width)
        self.record(Op("enter_split", "all-reduce of the gradient", (read,), (made,)))
        return made

    def part(self, value: Value) -> Value:
        """This device's share of a value's heads or columns."""
        if self.states[value.id] == SPLIT:
            return self.values[value.id]
        made = self.fresh(value, self.local_width(value))
        self.record(Op("own_part", "own part", (self.whole(value),), (made,)))
        return made

    def tokens(self, value: Value) -> Value:
        """This device's share of the tokens."""
        if self.states[value.id] == ALONG_TOKENS:
            return self.values[value.id]
        made = self.fresh(value, -(-value.width // self.degree))
        self.record(Op("own_part", "own tokens", (self.whole(value),), (made,)))
        return made

    def vocabulary(self, rows: int) -> int:
        """Rows of the embedding and of the head on one device, padded."""
        multiple = self.habits.vocabulary_multiple
        return -(-rows // (multiple * self.degree)) * multiple

    def splits_table(self, table: Parameter) -> bool:
        """Whether this embedding is split by its rows: that of the tokens is, unless the runtime keeps it whole."""
        if table.shape[0] != self.model.vocab_size:
            return False
        tied = bool(table.tied_to) or table.name in self.model.tied
        return tied or not self.habits.whole_embedding

    def needs(self, units: int, noun: str, *, repeated: bool = False) -> None:
        """The degree must divide this many units (or be a multiple of them, where they are then repeated)."""
        self.needed.append(Need(units, noun, repeated))

    def needs_columns(self, value: Value, name: str) -> None:
        """The degree must divide the columns of a value that are no heads."""
        for columns, units in self.pieces.get(value.id) or ((value.width, value.width),):
            if columns == units:
                self.needs(columns, f"columns of {name}")

    # --- what rules say

    def fresh(self, like: Value, width: int) -> Value:
        """A value that the whole model does not have."""
        made = Value(self._next, like.axis, width)
        self._next += 1
        return made

    def record(self, op: Op) -> None:
        """Append an operation as it is."""
        self.ops.append(op)

    def _placed(self, value: Value, state: str) -> Value:
        if state == SPLIT:
            width = self.local_width(value)
        elif state == ALONG_TOKENS:
            width = -(-value.width // self.degree)
        else:
            width = value.width
        self.states[value.id] = state
        made = self.values[value.id] = Value(value.id, value.axis, width)
        return made

    def emit(
        self,
        op: Op,
        inputs: Sequence[Value],
        *states: str,
        parameters: tuple[Parameter, ...] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """The operation on local values; a state for each output."""
        outputs = tuple([self._placed(one, state) for one, state in zip(op.outputs, states, strict=True)])
        given = op.parameters if parameters is None else parameters
        self.record(Op(op.kind, op.name, tuple(inputs), outputs, given, op.attributes if attributes is None else attributes))

    def summand(
        self,
        op: Op,
        inputs: Sequence[Value],
        *,
        parameters: tuple[Parameter, ...] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """The operation makes a summand of its output: the devices add them up, and with `sequence` each keeps its tokens."""
        (out,) = op.outputs
        made = self.fresh(out, out.width)
        given = op.parameters if parameters is None else parameters
        self.record(Op(op.kind, op.name, tuple(inputs), (made,), given, op.attributes if attributes is None else attributes))
        along = self.sequence and out.axis in ALONG
        self.collective("reduce_scatter" if along else "all_reduce", made, out, ALONG_TOKENS if along else WHOLE)

    def collective(self, kind: str, made: Value, out: Value, state: str) -> None:
        """What devices do with what an operation made, so that it becomes a value of the whole model."""
        self.record(Op(kind, kind.replace("_", " "), (made,), (self._placed(out, state),)))

    def cached_heads(self, op: Op, inputs: Sequence[Value]) -> None:
        """Keys and values of the local heads go into the cache."""
        if op.attributes.get("cached"):
            self._caches.append(inputs[1].width + inputs[2].width)

    # --- the block

    def run(self, state: str, *, boundary: str | None) -> Block:
        """All operations, from an input in that state to an output in the state `boundary`, if one is asked for."""
        block = self.block
        self._placed(block.input, state)
        for name, value in block.externals:
            self._placed(value, self._known[name])
        ends = []
        for op in block.ops:
            rule = SPLITS.get(op.kind)
            if rule is None:
                raise UsageError(
                    f"{self.model.family}'s {op.kind} ({op.name} of the {block.name}) has no rule for tensor parallelism"
                )
            rule(self, op)
            ends.append(len(self.ops) - 1)
        output = self.values[block.output.id]
        if boundary == ALONG_TOKENS and block.output.axis in ALONG:
            output = self.tokens(block.output)
        elif boundary is not None:
            output = self.whole(block.output)
        for name, value in block.provides:
            self._known[name] = self.states[value.id]
        return block._replace(
            input=self.values[block.input.id],
            output=output,
            ops=tuple(self.ops),
            caches=self._local_caches(),
            externals=tuple([(name, self.values[value.id]) for name, value in block.externals]),
            holds=self._holds(ends),
            provides=tuple([(name, self.values[value.id]) for name, value in block.provides]),
            state=self._local_state(),
        )

    def _holds(self, ends: list[int]) -> tuple[tuple[int, int], ...]:
        """A module's arguments were gathered for it, so the name holds what was gathered as well."""
        held = [(id_, ends[index]) for id_, index in self.block.holds]
        return (*held, *[(self._gathered[id_].id, index) for id_, index in held if id_ in self._gathered])

    def _local_caches(self) -> tuple[Any, ...]:
        caches = self.block.caches
        if not self._caches:
            return caches  # latents, which every device has
        return tuple([one._replace(elements_per_token=elements) for one, elements in zip(caches, self._caches, strict=True)])

    def _local_state(self) -> StateSpec | None:
        state = self.block.state
        if state is None or not self.keeps_share_of_state:
            return state
        return StateSpec(state.convolution // self.degree, state.recurrence // self.degree)


def walk_model(model: Model, tp: int, *, sequence: bool, habits: Habits) -> tuple[tuple[Segment, ...], tuple[Need, ...]]:
    """The segments on one of `tp` devices, and what must divide by their number; equal blocks stay one.

    Raises:
        UsageError: an operation that no rule splits.
    """
    boundary = ALONG_TOKENS if sequence else WHOLE
    made: dict[tuple[int, str], Block] = {}
    known: dict[str, str] = {}
    needs: dict[Need, None] = {}
    segments = []
    for segment in model.segments:
        blocks = []
        for block in segment.blocks:
            reads_batch = bool(block.ops) and block.ops[0].kind in READS_THE_BATCH
            state = WHOLE if reads_batch or block.input.axis not in ALONG else boundary
            key = (id(block), state)
            if key not in made:
                walk = Walk(block, model, tp, sequence=sequence, habits=habits, known=known)
                made[key] = walk.run(state, boundary=None if segment.role == "head" else boundary)
                needs.update(dict.fromkeys(walk.needed))
            blocks.append(made[key])
        if segment.provides:
            known[segment.provides] = boundary if segment.blocks[-1].output.axis in ALONG else WHOLE
        segments.append(segment._replace(blocks=tuple(blocks)))
    return tuple(segments), tuple(needs)


def split_tensors(model: Model, tp: int, *, sequence: bool, habits: Habits = USUAL) -> Model:
    """The part of a model that one of `tp` devices holds and runs; all of them are alike.

    sequence: what tensor parallelism leaves whole is split along the tokens.

    Raises:
        UsageError: a degree that the model does not allow, with the nearest ones that it does.
    """
    from memfit.parallel.legality import check_tensor

    check_tensor(model, tp)
    segments, _ = walk_model(model, tp, sequence=sequence, habits=habits)
    heads = model.num_heads
    shared = tuple([one._replace(width=one.width // heads * share(heads, tp)) if one.per_head else one for one in model.shared])
    return model.part(segments=segments, shared=shared)
