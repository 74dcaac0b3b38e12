"""Parameters, operations, blocks and the model: plain records, no arithmetic beyond counting.

Every tensor's size is a whole number of bytes times one of a few products of the run's numbers: its axis. With b sequences
(the micro-batch), s tokens of each that are processed at once, and k tokens of each that attention looks at (k = s in training):

    once            1          weights and what belongs to them
    position        s          rotary tables, position ids
    sequence        b          pooled outputs
    token           b s        hidden states
    key-token       b k        keys and values that attention reads
    position-pair   s k        masks without a batch dimension
    pair            b s k      score matrices

The decoder of an encoder-decoder works on t target tokens of each sequence, and looks at the s source tokens:

    target-position t          its position ids
    target-position-pair t u   its own position biases
    cross-position-pair t s    those over the encoder's output
    target-token    b t        its hidden states
    target-pair     b t u      its own score matrices
    cross-pair      b t s      score matrices over the encoder's output

Scans that work by chunks of c tokens pad a sequence to n = ceil(s / c) of them:

    chunk           b n        what a scan makes of a chunk
    chunk-of-several b n, 0 where n = 1: what is kept only where one chunk follows another
    later-chunk     b (n - 1)  what only the chunks behind the first have
    only-chunk      b where n = 1, else 0
    later-token     b (s - 1)  what only the tokens behind the first have
    target-key-token b u       keys and values of its own tokens (u = t in training; all that are cached when it generates)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.records import Record

if TYPE_CHECKING:
    from memfit.job import Assumption

AXES = (
    "once", "position", "sequence", "token", "key-token", "position-pair", "pair",
    "target-position", "target-token", "target-position-pair", "cross-position-pair", "target-pair", "cross-pair",
    "target-key-token", "chunk", "chunk-of-several", "later-chunk", "only-chunk", "later-token",
)  # fmt: skip
(
    ONCE, POSITION, SEQUENCE, TOKEN, KEY_TOKEN, POSITION_PAIR, PAIR,
    TARGET_POSITION, TARGET_TOKEN, TARGET_POSITION_PAIR, CROSS_POSITION_PAIR, TARGET_PAIR, CROSS_PAIR,
    TARGET_KEY_TOKEN, CHUNK, CHUNK_OF_SEVERAL, LATER_CHUNK, ONLY_CHUNK, LATER_TOKEN,
) = range(len(AXES))  # fmt: skip
"""In an order in which a result takes the later axis of its two operands; those of encoder-decoders are last."""

ACTIVATION_FUNCTIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")
"""Activation functions whose memory is known, by the name that configs use; each has an implementation in `memfit.kernels`."""


class Parameter(NamedTuple):
    """One learned tensor. `role`: linear, embedding, norm, bias, head, or unused (it gets no gradient).

    Only linear weights are quantised or adapted.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    split: str = "none"
    """How tensor parallelism splits it: column (outputs), row (inputs), vocab (rows of a table), heads (its columns), expert, or
    none (replicated)."""
    tied_to: str = ""
    """The name of the parameter whose tensor this is (a head that shares the embedding): counted there."""
    dtype: str = ""
    """A format of its own, whatever the weights have (a router that stays in fp32)."""

    @property
    def num_elements(self) -> int:
        """Elements, 0 if tied."""
        return 0 if self.tied_to else prod(self.shape)


class Value(NamedTuple):
    """A tensor within a block: `width` elements for each unit of its axis."""

    id: int
    axis: int
    width: int


class Op(NamedTuple):
    """One operation of a block, as the model's forward pass has it; kernels decide what it allocates and keeps."""

    kind: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...] = ()
    attributes: Mapping[str, Any] = {}


class CacheSpec(NamedTuple):
    """A KV cache of one layer: elements of K and V for each cached token, and how many tokens it keeps at most.

    `axis` counts the cached tokens where no window limits them: key-token, target-key-token, or token for an encoder's output.
    """

    elements_per_token: int
    window: int | None = None
    axis: int = KEY_TOKEN

    def tokens(self, context: int) -> int:
        """Cached tokens of one sequence of `context` tokens: min(context, window)."""
        return context if self.window is None else min(context, self.window)


class StateSpec(NamedTuple):
    """The recurrent state of one layer: elements for each sequence, however long it is."""

    convolution: int
    """Columns that the causal convolution looks back at, in the weights' format."""
    recurrence: int
    """The state of the recurrence, in fp32."""


class Block(NamedTuple):
    """Operations in execution order, from one input tensor to one output tensor."""

    name: str
    input: Value
    output: Value
    ops: tuple[Op, ...]
    caches: tuple[CacheSpec, ...] = ()
    externals: tuple[tuple[str, Value], ...] = ()
    """Values from outside the block, by name: the encoder's output in a decoder layer."""
    holds: tuple[tuple[int, int], ...] = ()
    """Values that a Python name keeps alive: (value id, index of the operation after which the name is gone)."""
    provides: tuple[tuple[str, Value], ...] = ()
    """Values of this block that later blocks read, by name: a position bias that all layers share."""
    input_held: bool = True
    """The caller's name for its input is there until it ends (false where it begins inside a module that reassigns the name)."""
    state: StateSpec | None = None

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, tied ones included."""
        return [parameter for op in self.ops for parameter in op.parameters]

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters that belong to this block."""
        return sum(parameter.num_elements for parameter in self.parameters)


class Segment(NamedTuple):
    """A run of blocks, repeated: 28 x (decoder layer), or 13 x (sliding layer, full layer)."""

    blocks: tuple[Block, ...]
    repeat: int = 1
    role: str = "layers"
    """embedding | receive (hidden states of another pipeline stage) | layers | head | between (runs once, is neither checkpointed
    nor the last). Only layers are checkpointed."""
    provides: str = ""
    """The name under which later blocks find its output."""
    shared: bool = False
    """All repeats use the same parameters (ALBERT): they are counted once, and their gradients add up."""
    unit: str = ""
    """A module that is checkpointed as a whole beside its layers (a stage of Swin): segments of the same unit, in a row."""


class SharedTensor(NamedTuple):
    """A tensor that the backbone makes once in each forward for all layers, beside rotary tables and the usual mask."""

    axis: int
    width: int
    dtype: str | None = None
    """`None`: the weights' format."""
    saved: bool = False
    """Attention keeps it for backward, which it does not need where it casts it."""
    kernels: tuple[str, ...] = ("flash", "sdpa", "eager")
    """The attention implementations under which it is made."""
    per_head: bool = False
    """Its width is a number for each head, of which tensor parallelism has a share."""


class Model(Record):
    """What every source is translated into. Two models are the same only if they are the same object."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    name: str
    family: str
    architecture: str
    source: str
    kind: str
    """decoder | encoder"""
    segments: tuple[Segment, ...]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None = None
    hard_position_limit: bool = False
    """Learned positions: a longer sequence is impossible, not only untrained."""
    dtype: str | None = None
    """Format of the checkpoint as the config states it."""
    loss: str | None = "causal-lm"
    attention_kernels: tuple[str, ...] = ("flash", "sdpa", "eager")
    """Attention implementations that the architecture supports (soft-capped scores rule out sdpa)."""
    stated_parameters: int | None = None
    """The count that the user gave, where the shapes are only typical for it."""
    buffer_bytes: int = 0
    """Non-trained tensors on the device."""
    buffer_elements: int = 0
    """Of those, elements in the weights' format, beside `buffer_bytes`."""
    encoder_decoder: bool = False
    checkpointed_masks: tuple[int, ...] = ()
    """Axes of the masks that layers take by position, so that a checkpoint saves them as inputs; others it only refers to."""
    pixels: int = 0
    """Elements of one image, where the model reads images."""
    tokens_per_image: int | None = None
    """Tokens that an image becomes, where that is a fixed number: the sequence length."""
    checkpoints_layers: bool = True
    """Whether the class can checkpoint its layers by itself."""
    rotary_dim: int | None = None
    """Width of the rotary tables (cos and sin), which are made once per forward and kept by every layer."""
    rotary_tables: int = 1
    """Pairs of such tables: one for every kind of layer that has a frequency of its own (Gemma 3)."""
    rotary_fp32: bool = False
    """The tables stay in fp32 whatever format the hidden states have (OLMo 2)."""
    mask: str = "usual"
    """usual: the backbone makes a mask where attention needs one; always: even where it could be skipped; own: see `shared`."""
    one_sequence_differs: bool = False
    """Its tensors differ at a batch of one not only under eager attention: products of strided operands (one key-value head
    that is not repeated; a scan's transposed channels) then read views."""
    shared: tuple[SharedTensor, ...] = ()
    """Position biases and masks of a kind of their own."""
    chunk: int = 0
    """Tokens of a chunk, where layers scan by chunks."""
    first_layer: int = 0
    """Layers before its first one, on other pipeline stages."""
    sends: bool = False
    """Its output goes to another pipeline stage."""
    relative_uncertainty: float = 0.0
    """Share by which the model itself may be off: 0 for a config, wide for a model known only by its size."""
    assumptions: tuple[Assumption, ...] = ()
    facts: Mapping[str, Any] = {}

    @property
    def receives(self) -> bool:
        """Whether it begins with what another pipeline stage made, not with ids or pixels."""
        return self.segments[0].role == "receive"

    @cached_property
    def memory(self) -> dict[str, dict[Any, Any]]:
        """What was found out about the model, by function and arguments (`model.remember`): a copy of the model begins anew."""
        return {}

    @cached_property
    def memory_of_blocks(self) -> dict[Any, tuple[Block, Any]]:
        """What was found out about blocks, whichever model they are in: its parts share it."""
        return {}

    def part(self, **changes: Any) -> Model:
        """What one rank holds of this model: another model, which knows what is known of the blocks that it shares with it."""
        made = self.replace(**changes)
        made.__dict__["memory_of_blocks"] = self.memory_of_blocks
        return made

    @cached_property
    def num_parameters(self) -> int:
        """Learned elements, tied ones once; as built by `architecture`."""
        return sum(
            (1 if segment.shared else segment.repeat) * block.num_parameters
            for segment in self.segments
            for block in segment.blocks
        )

    @cached_property
    def tied(self) -> frozenset[str]:
        """The names of the parameters whose tensor others use as well."""
        return frozenset(
            one.tied_to for segment in self.segments for block in segment.blocks for one in block.parameters if one.tied_to
        )

    @cached_property
    def attention_windows(self) -> frozenset[int | None]:
        """The kinds of attention that its layers have: each distinct sliding window, `None` for full attention."""
        return frozenset(
            op.attributes["window"]
            for segment in self.segments
            for block in segment.blocks
            for op in block.ops
            if "window" in op.attributes
        )

    @cached_property
    def reads_across_blocks(self) -> bool:
        """Whether a block reads what another provides beside the hidden states."""
        return any(block.externals for segment in self.segments for block in segment.blocks)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The distinct sliding windows of its layers."""
        return tuple(sorted(window for window in self.attention_windows if window is not None))

    @cached_property
    def caches(self) -> list[tuple[CacheSpec, int]]:
        """Each layer kind's caches with the number of such layers."""
        return [(cache, segment.repeat) for segment in self.segments for block in segment.blocks for cache in block.caches]

    @cached_property
    def states(self) -> list[tuple[StateSpec, int]]:
        """Each layer kind's recurrent state with the number of such layers."""
        return [(block.state, segment.repeat) for segment in self.segments for block in segment.blocks if block.state]
