"""A record of what autograd would record: tensors with storages, and nodes with what they save, allocate and return.

Kernels write it op by op; `account.liveness` replays it forward and backward. The rules are PyTorch's own:
a node saves an input only if the gradient of another input needs it; views share a storage; `add` passes its gradient on.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.model.description import ONCE, Parameter
from memfit.precision import DTYPE_BYTES, PrecisionPolicy

Size = tuple[int, int]
"""An axis and the bytes for each unit of it."""

OPERATORS = ("mm", "addmm", "bmm", "attention", "convolution", "reduce_scatter")
"""Operators whose outputs a selective checkpoint can keep, as torch names them: products without and with a bias, batched ones,
the fused attention kernels, convolutions, sums whose tokens are scattered over tensor-parallel devices."""

WHOLE_BLOCK = 1 << 30
"""Later than any node."""

_PROMOTION = {"fp32": 3, "bf16": 2, "fp16": 2, "bool": 0, "int64": 0}


class Tensor:
    """`width` elements of `dtype` per unit of `axis`, in a storage that other tensors may share."""

    __slots__ = ("axis", "dtype", "requires_grad", "size", "storage", "width")

    def __init__(self, storage: int, axis: int, width: int, dtype: str, requires_grad: bool) -> None:
        self.storage = storage
        self.axis = axis
        self.width = width
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.size: Size = (axis, width * DTYPE_BYTES[dtype])


class Node:
    """One autograd function: forward allocates `outputs` and `scratch`, backward the gradients and `backward_scratch`."""

    __slots__ = (
        "alias", "backward_scratch", "handed", "inputs", "outputs", "parts", "saved", "scratch", "view_gradient", "weight_grads",
    )  # fmt: skip

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        saved: tuple[int, ...],
        alias: bool,
        weight_grads: tuple[tuple[int, int, str], ...],
        scratch: Sequence[Size],
        backward_scratch: Sequence[Size],
        view_gradient: bool,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.saved = saved
        self.alias = alias
        """The gradient of the output is passed on as the gradient of the inputs, without a copy."""
        self.weight_grads = weight_grads
        """For each trained parameter: bytes of its gradient, bytes of the copy in the compute format before it, its name."""
        self.scratch = scratch
        self.backward_scratch = backward_scratch
        self.parts = False
        """With `alias`: the inputs are parts of the output: their gradients are views of its own, whatever their size."""
        self.handed: tuple[int, ...] = ()
        """Saved storages that become gradients: made in forward, or written over; backward makes no others."""
        self.view_gradient = view_gradient
        """Its input's gradient is a view (a matrix product over folded dimensions): a second one is not added to it in place."""


class Tape:
    """Records nodes under a precision policy. `trained(parameter)` tells what gets a gradient."""

    def __init__(self, policy: PrecisionPolicy, *, grad: bool = True) -> None:
        self.policy = policy
        self.grad = grad
        self.nodes: list[Node] = []
        self.graph: list[Node] = []
        """Those that autograd records: a gradient passes through them, or ends in their parameters."""
        self.sizes: list[Size] = []
        self.first: list[int] = []
        """By storage: the node that first touches it, -1 if none does; and below the last one."""
        self.last: list[int] = []
        self.held: dict[int, int] = {}
        """Storages that a Python name holds: storage -> index of the node after which it is let go."""
        self.cached_casts: dict[str, Tensor] = {}
        """Autocast's casts of trained weights, alive until the autocast block ends."""
        self.returned: list[Tensor] = []
        """Keys and values in the cache object that the model returns: alive as long as the caller holds the outputs."""
        self.operators: dict[int, str] = {}
        """By node: which of `OPERATORS` it is."""
        self.whole_logits: Tensor | None = None
        """Logits that the caller gets from a loss that makes them itself."""
        self.lingering: list[Tensor] = []
        """What the block returns beside its output: a name of the caller's holds it while the next block runs."""
        self.waiting: list[Tensor] = []
        """Tensors whose gradient stays when the block is through backward: another that waits is a view of it."""
        self.companions: dict[int, Tensor] = {}
        """Storages that are held with others: a name of the same function."""
        self.cached: set[int] = set()
        """Storages of the KV cache: they outlive the block."""
        self.regathered: dict[int, Tensor] = {}
        """Storages that a product keeps as the part they were gathered from, and gathers once more in backward."""
        self.first_logits: int | None = None
        """The storage of the head's output: it and all later ones of the block are counted as logits."""

    def name(self, operator: str) -> None:
        """Say which of `OPERATORS` the latest node is."""
        self.operators[len(self.nodes) - 1] = operator

    def outputs_of(self, operators: tuple[str, ...]) -> frozenset[int]:
        """Storages that nodes of these operators make; of `mm/2` those of the first, the third and so on."""
        found: list[int] = []
        met = dict.fromkeys(OPERATORS, 0)
        for index, operator in self.operators.items() if operators else ():
            met[operator] += 1
            if operator in operators or (f"{operator}/2" in operators and met[operator] % 2):
                found += [one.storage for one in self.nodes[index].outputs]
        return frozenset(found)

    def tensor(self, axis: int, width: int, dtype: str, requires_grad: bool = False) -> Tensor:
        """A tensor with a storage of its own."""
        made = Tensor(len(self.sizes), axis, width, dtype, requires_grad)
        self.sizes.append(made.size)
        self.first.append(-1)
        self.last.append(-1)
        return made

    def outside(self, axis: int, width: int, dtype: str, requires_grad: bool = False) -> Tensor:
        """A tensor that is counted elsewhere: it takes no memory here, but its gradient and its casts do."""
        made = self.tensor(axis, width, dtype, requires_grad)
        self.sizes[made.storage] = (axis, 0)
        return made

    def hold(self, x: Tensor, until: int | None = None) -> None:
        """A Python name keeps `x` until the node of that index, the latest one if not said, has run."""
        until = len(self.nodes) - 1 if until is None else until
        self.held[x.storage] = max(until, self.held.get(x.storage, until))
        companion = self.companions.get(x.storage)
        if companion is not None:
            self.hold(companion, until)

    def hold_to_the_end(self, x: Tensor) -> None:
        """A Python name keeps `x` as long as the block runs."""
        self.held[x.storage] = WHOLE_BLOCK

    def in_cache(self, x: Tensor) -> bool:
        """Whether these are the cache object's keys or values, which lie head by head."""
        return any(one is x for one in self.returned)

    def view(self, base: Tensor, width: int) -> Tensor:
        """A part of `base`, or another shape of it, in the same storage."""
        return Tensor(base.storage, base.axis, width, base.dtype, base.requires_grad)

    def record(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        saved: Sequence[Tensor] = (),
        alias: bool = False,
        parts: bool = False,
        weight_grads: tuple[tuple[int, int, str], ...] = (),
        scratch: Sequence[Size] = (),
        backward_scratch: Sequence[Size] = (),
        view_gradient: bool = False,
    ) -> None:
        """Append a node; outputs require a gradient if an input or a parameter does, and only then is anything saved."""
        first, last = self.first, self.last
        index = len(self.nodes)
        requires = bool(weight_grads)
        for one in inputs:
            storage = one.storage
            last[storage] = index
            if first[storage] < 0:
                first[storage] = index
            if one.requires_grad:
                requires = True
        for one in outputs:
            storage = one.storage
            last[storage] = index
            if first[storage] < 0:
                first[storage] = index
        if requires and self.grad:
            for one in outputs:
                one.requires_grad = True
            kept = tuple([one.storage for one in saved]) if saved else ()
            node = Node(inputs, outputs, kept, alias, weight_grads, scratch, backward_scratch, view_gradient)
            self.graph.append(node)
        else:
            node = Node(inputs, outputs, (), alias, (), scratch, backward_scratch, view_gradient)
        node.parts = parts
        self.nodes.append(node)

    def collapse(self, start: int, inputs: Sequence[Tensor], output: Tensor) -> None:
        """The nodes from `start` on become one that keeps its inputs and runs again in backward (a checkpoint within a layer).

        What they make beside `output` is scratch, both ways: an upper bound, for all of it is not there at once.
        """
        inside = {one.storage for node in self.nodes[start:] for one in node.outputs} - {output.storage}
        scratch = [self.sizes[storage] for storage in sorted(inside)]
        gone = set(map(id, self.nodes[start:]))
        del self.nodes[start:]
        self.graph = [node for node in self.graph if id(node) not in gone]
        for storage in inside:
            self.first[storage] = self.last[storage] = -1
            self.held.pop(storage, None)
        self.operators = {index: name for index, name in self.operators.items() if index < start}
        self.record(inputs, (output,), saved=inputs, scratch=scratch, backward_scratch=scratch)
        for storage, until in self.held.items():
            self.held[storage] = until if until == WHOLE_BLOCK else min(until, start)
        self.first[output.storage] = self.last[output.storage] = start

    def promote(self, *tensors: Tensor) -> str:
        """The format of an element-wise result: the widest of its inputs'."""
        widest = tensors[0].dtype
        for one in tensors[1:]:
            if _PROMOTION[one.dtype] > _PROMOTION[widest]:
                widest = one.dtype
        return widest

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """`x.to(dtype)`: x itself when it already has the format. Saves nothing."""
        if x.dtype == dtype:
            return x
        out = self.tensor(x.axis, x.width, dtype)
        self.record((x,), (out,))
        return out

    def autocast_fp32(self, x: Tensor) -> Tensor:
        """The input of an operation on autocast's fp32 list (norms, softmax, pow, losses)."""
        return self.cast(x, "fp32") if self.policy.autocast else x

    def autocast_compute(self, x: Tensor) -> Tensor:
        """The input of an operation on autocast's 16-bit list (matrix products)."""
        return self.cast(x, self.policy.compute) if self.policy.autocast else x

    def weight_cast(self, parameter: Parameter, dtype: str, trained: bool) -> Tensor | None:
        """Autocast's copy of a weight in the compute format, `None` where none is needed.

        Copies of trained weights are cached until the autocast block ends, those of frozen ones are made at each use
        (torch/csrc/autocast: only leaves that require a gradient are cached).
        """
        if not self.policy.autocast or dtype == self.policy.compute or dtype != "fp32":
            return None
        cached = self.cached_casts.get(parameter.name) if trained else None
        if cached is None:
            count = 1
            for dim in parameter.shape:
                count *= dim
            cached = self.tensor(ONCE, count, self.policy.compute)
            self.record((), (cached,))
            if trained:
                self.cached_casts[parameter.name] = cached
        return cached
