"""What a block takes, and what crosses its border: values that others read or provide, gradients that wait for one another."""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit.account.forms import ZERO, Form, shown


class Read(NamedTuple):
    """A value from outside that a block reads."""

    name: str
    form: Form
    saved: bool
    requires_grad: bool

    def __repr__(self) -> str:
        return f"Read({self.name}, {shown(self.form)})"


class Provided(NamedTuple):
    """A value of a block that later blocks read."""

    name: str
    form: Form
    saved: bool
    """A node of the block itself saves it."""
    dtype: str
    requires_grad: bool
    leaf: bool
    """No operation made it of others: its gradient stays, as long as the graph does."""


class BlockMemory(NamedTuple):
    """What one block takes beyond what was there before it; every figure is a form."""

    kept: Form
    """Saved for backward when its forward has run, its input included if it is saved."""
    region_casts: Form
    """Autocast copies that no node saves: alive until the autocast block ends."""
    forward: tuple[Form, ...]
    """The largest states while it runs forward, its input included."""
    backward: tuple[Form, ...]
    """The largest states while it runs backward, from all it kept and its output's gradient on."""
    gradients: Form
    """Gradients of its parameters that remain after backward."""
    input: Form
    """Its input, as what a checkpoint keeps."""
    input_saved: bool
    output: Form
    outputs_held: Form
    """The model's outputs that the caller holds, apart from what is kept."""
    outputs: Form
    """The model's outputs that the caller holds."""
    output_dtype: str
    output_requires_grad: bool
    returned: tuple[Form, Form] = (ZERO, ZERO)
    """Keys and values in the cache object that the model returns: those that no node saves, and those that one does."""
    waiting: Form = ZERO
    """The part of `gradients` that is no parameter's: of keys and values whose virtual ones wait for all layers."""
    lingering: Form = ZERO
    """What it returns beside its output and no node saves: held while the next block runs."""
    casts_saved: Form = ZERO
    """The part of `kept` that is autocast's copies of trained weights: made once, however often the weights are used."""
    recomputed: tuple[Form, ...] = ()
    """Under a checkpoint: the largest states while it runs forward again, with what was kept beside its input. Without that, it
    stops when the last tensor is saved."""
    unclaimed: Form = ZERO
    """Under such a checkpoint: what running forward again, which ends at the last tensor that backward needs, does not reach."""
    read: tuple[Read, ...] = ()
    provided: tuple[Provided, ...] = ()
    unit: Unit | None = None
    """Where its weights are cast while it runs."""
    sharded: Any = None
    """Its weights and gradients as they are gathered and reduced (`account.units.Unit`), where they are sharded."""

    def __repr__(self) -> str:
        return f"BlockMemory(kept={shown(self.kept)}, output={shown(self.output)})"


class Unit(NamedTuple):
    """A block as FSDP2 runs it on one device: weights cast before it runs, gradients reduced in full precision after it.

    Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py (init_unsharded_param of one rank),
    _fsdp_collectives.py foreach_reduce.
    """

    weights: Form
    """The cast weights."""
    casting: Form
    """While they are made: the cast of the largest parameter beside its copy in the unit."""
    reducing: tuple[Form, ...]
    """States of the reduction: the gradients that backward made and its input; its input, the quotient of that by a divide factor
    of 1, and its result, the gradients in full precision."""
    reduced: Form
    """The reduction's input, which waits for the next unit's reduction."""


class Accumulation(NamedTuple):
    """What becomes of a parameter's gradient when a node has made it."""

    persist: bool = False
    """Gradients exist already: the new one is added to them in place and freed."""
    pending: frozenset[str] = frozenset()
    """Shared with an earlier block (a tied head): waits for that block's gradient, then both are added."""
    completes: frozenset[str] = frozenset()
    """Shared with a later block (a tied embedding): added to the waiting one out of place, three copies for a moment."""
    joins: frozenset[str] = frozenset()
    """Shared with several later blocks: the waiting one is their sum, to which this one is added in place."""
    repeated: str = ""
    """Layers that share their parameters, by their turn in backward: the `first`'s gradients wait, the `second`'s are added to
    them out of place, all `later` ones in place."""
    step_scratch: int = -1
    """The optimizer steps each parameter as its gradient arrives, with this many bytes of scratch for each byte of the gradient,
    which is gone then; -1: it steps when backward is through."""
    widened: int = 1
    """How many times as large gradients are as those that the nodes make, from the end of the block on (FSDP2's reduction)."""
    waiting: frozenset[str] = frozenset()
    """Values from outside the block whose gradient another block has made already."""

    def shares(self, name: str) -> bool:
        """Whether this gradient is added to one that waits."""
        return name in self.completes or name in self.joins or self.repeated in ("second", "later")
