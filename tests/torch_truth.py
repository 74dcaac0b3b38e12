"""Measures what PyTorch itself takes: tiny real Hugging Face models on the CPU, every storage counted to the byte.

The CPU records the same autograd graph as CUDA where the operators are the same. They are not for dropout masks (here: dropout
0), for
autocast (other lists of operations: not used here), for scaled_dot_product_attention (replaced by `flash_attention`, which
takes what
the CUDA kernel takes) and for LayerNorm's statistics in 16 bit (`CPU_STATISTICS`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

transformers.logging.set_verbosity_error()

CPU_STATISTICS = 4
"""Bytes a row that CUDA's LayerNorm keeps more than the CPU's in 16 bit: mean and deviation in fp32 (2 x 4 B), not in the
input's format."""

TORCH_DTYPES = {"bf16-true": torch.bfloat16, "32-true": torch.float32}


class LiveMemory(TorchDispatchMode):
    """The bytes of all storages that are alive, and the largest sum seen when an operation had just made its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            self.now -= num_bytes
            del self._alive[key]

        self.now += num_bytes
        self._alive[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                self.count(one)
        self.peak = max(self.peak, self.now)
        return result


class _Flash(torch.autograd.Function):
    """Takes what FlashAttention 2 takes on CUDA: keeps q, k, v, the output and an fp32 log-sum-exp; backward has its accumulator.

    Source: Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, seq, _ = q.shape
        out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.zeros(batch, heads, seq))
        return out.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        batch, heads, seq, width = q.shape
        accumulator = torch.empty(batch, seq, heads, width, dtype=torch.float32)
        sums = torch.empty(batch, heads, seq, dtype=torch.float32)
        dq = torch.zeros(batch, seq, heads, width, dtype=q.dtype).transpose(1, 2)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        expanded = [torch.empty(batch, seq, heads, width, dtype=q.dtype) for _ in (k, v)] if k.shape[1] != heads else []
        del accumulator, sums, expanded
        return dq, dk, dv


def _flash_sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
                scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    assert attn_mask is None, "a mask would take another kernel"
    assert q.dtype == torch.bfloat16, "fp32 would take another kernel"
    return _Flash.apply(q, k, v)


@contextmanager
def flash_attention() -> Iterator[None]:
    """scaled_dot_product_attention takes what its flash kernel takes on CUDA."""
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = _flash_sdpa
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


class Case(NamedTuple):
    """A model class with its config, and the labels that its loss takes: token | sequence | span."""

    cls: type[nn.Module]
    config: transformers.PretrainedConfig
    labels: str = "token"

    @property
    def head(self) -> str:
        return self.cls.__name__


def count_parameters(case: Case) -> int:
    """Elements of the real class's parameters, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        return sum(one.numel() for one in case.cls(case.config).parameters())


def make_model(case: Case, precision: str, attention: str) -> nn.Module:
    """The real model in training mode, all weights in one format."""
    case.config._attn_implementation = attention
    case.config.use_cache = False
    torch.manual_seed(0)
    return case.cls(case.config).to(TORCH_DTYPES[precision]).train()


def make_inputs(case: Case, batch: int, seq: int) -> dict[str, Tensor]:
    """Token ids and labels, tensors of their own. No padding: no attention mask."""
    ids = torch.randint(3, case.config.vocab_size, (batch, seq))
    per_sequence = torch.zeros(batch, dtype=torch.long)
    if case.labels == "span":
        return {"input_ids": ids, "start_positions": per_sequence, "end_positions": per_sequence.clone()}
    return {"input_ids": ids, "labels": torch.zeros_like(ids) if case.labels == "token" else per_sequence}


def kept_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes of the distinct storages that autograd holds when forward and loss have run, without parameters and buffers."""
    own = {one.untyped_storage()._cdata for one in [*model.parameters(), *model.buffers()]}
    return kept_by(lambda: model(**inputs), own)


def kept_by(forward: Callable[[], Any], own: set[int] | None = None) -> int:
    """Bytes of the distinct storages that a forward saves for backward, except those of `own`."""
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for key, storage in kept.items() if key not in (own or ()))
    del result
    return total


class Step(NamedTuple):
    """Bytes of a training step in steady state: the peak of each of its parts, and what is alive between them."""

    forward: int
    backward: int
    optimizer_step: int
    forward_end: int
    backward_end: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.optimizer_step)


def training_step(model: nn.Module, inputs: dict[str, Tensor], optimizer: torch.optim.Optimizer, *, set_to_none: bool = True,
                  outputs: str = "kept") -> Step:  # fmt: skip
    """The second step of a raw loop; nothing else is counted than parameters, buffers, states, inputs and what the step makes."""
    memory = LiveMemory()
    for one in [*model.parameters(), *model.buffers(), *inputs.values()]:
        memory.count(one)
    peaks: list[int] = []
    ends: list[int] = []

    def note() -> None:
        peaks.append(memory.peak)
        ends.append(memory.now)
        memory.peak = memory.now

    with memory:
        for _ in range(2):
            peaks.clear()
            ends.clear()
            memory.peak = memory.now
            out = model(**inputs)
            loss = out.loss
            if outputs == "dropped":
                del out
            note()
            loss.backward()
            note()
            optimizer.step()
            note()
            optimizer.zero_grad(set_to_none=set_to_none)
            out = loss = None
    return Step(*peaks, *ends[:2])
