"""torchtitan's runtime against PyTorch: a small Llama written as torchtitan has it, under the real FSDP2 on one device.

FSDP2 runs on the CPU over a process group of one, which communicates nothing. What the CPU has no kernel for takes what CUDA's
takes: attention (`torch_truth.flash_attention`), and RMSNorm, whose CPU form is several operations.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch_truth
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import memfit
from memfit.account.estimate import Rank

VOCAB, HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, BATCH = 256, 64, 4, 2, 192, 3, 2
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 4096,
}  # fmt: skip
DIM = HIDDEN // HEADS


class _RmsNorm(torch.autograd.Function):
    """Takes what aten::_fused_rms_norm takes on CUDA: keeps x, its weight and 1 / rms(x) in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(grad), torch.empty_like(ctx.saved_tensors[1])


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight)


def rotated(q: Tensor, k: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    q_pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_pairs = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    q_out = torch.view_as_real(q_pairs * factors[:, None]).flatten(3)
    k_out = torch.view_as_real(k_pairs * factors[:, None]).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (one.view(*x.shape[:2], -1, DIM) for one in (q, k, v))
        q, k = rotated(q, k, factors)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).contiguous().flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, FFN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward, self.attention_norm, self.ffn_norm = Attention(), FeedForward(), Norm(), Norm()

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), factors)
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, seq: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.output = nn.Embedding(VOCAB, HIDDEN), Norm(), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(
            [checkpoint_wrapper(Layer(), early_stop=False) if checkpointed else Layer() for _ in range(LAYERS)]
        )
        angles = torch.outer(torch.arange(seq).float(), torch.rand(DIM // 2))
        self.register_buffer("factors", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.factors)
        return self.output(self.norm(x))


class Live(TorchDispatchMode):
    """As `torch_truth.LiveMemory`, for storages that are resized: FSDP2 frees a unit's weights without forgetting them."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for one in list(self._alive.values()) if (storage := one()) is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if type(one) is Tensor:
                self.count(one)
        self.peak = max(self.peak, self.now)
        return result


class Step(NamedTuple):
    forward: int
    forward_end: int
    backward: int
    backward_end: int


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(seq: int, *, checkpointed: bool, tied: bool = False) -> Step:
    """The largest sum of live tensors in forward (with the loss) and in backward, of a step whose optimizer states exist."""
    model = Model(seq, checkpointed=checkpointed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    first, last = model.tok_embeddings, [model.norm, model.output]
    if tied:
        first.weight = model.output.weight
    units: list[Any] = [[first, *last], *model.layers, model] if tied else [first, *model.layers, last, model]
    for unit in units:
        kept = isinstance(unit, list)  # the last unit is not resharded between its forward and its backward
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy, reshard_after_forward=not kept)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, labels = torch.randint(0, VOCAB, (2, BATCH, seq))
    ids, labels = ids.clone(), labels.clone()

    def loss_of() -> Tensor:
        pred = model(ids)
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")

    with torch_truth.flash_attention():
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        live = Live()
        states = [one.to_local() for found in optimizer.state.values() for one in found.values() if one.ndim]
        for one in (*[one.to_local() for one in model.parameters()], *states, model.factors, ids, labels):
            live.count(one)
        with live:
            loss = loss_of()
            forward, forward_end, live.peak = live.peak, live.now, 0
            loss.backward()
            return Step(forward, forward_end, live.peak, live.now)


def modelled(seq: int, *, tied: bool = False, **workload: object) -> Rank:
    asked = {"kind": "train", "batch": BATCH, "seq": seq, **workload}
    config = {**CONFIG, "tie_word_embeddings": tied}
    return memfit.answer(config, asked, overheads={"runtime": "torchtitan", "workspace": 0}).estimate.ranks[0]


def largest(rank: Rank, *phases: str) -> int:
    return max(one.allocated_bytes for one in rank.phases if one.name in phases and not one.first_step)


SCALARS = 64
"""Bytes of single numbers (the loss, its weight), of which memfit and autograd hold a few at different times."""


@pytest.mark.parametrize("seq", [32, 128])  # the reduction of a layer's gradients binds backward, and its activations do
@pytest.mark.parametrize(("checkpointing", "tied"), [("none", False), ("full", False), ("none", True)])
def test_a_step_of_torchtitan_under_fsdp2(checkpointing: str, tied: bool, seq: int) -> None:
    truth = measured(seq, checkpointed=checkpointing == "full", tied=tied)
    rank = modelled(seq, tied=tied, checkpointing=checkpointing)
    shifted = 8 * BATCH * seq  # transformers' loss shifts the labels into a copy, torchtitan's data loader has shifted them
    assert largest(rank, "forward", "loss") - truth.forward == pytest.approx(shifted, abs=SCALARS)
    assert rank.forward_end_bytes is not None
    assert rank.forward_end_bytes - truth.forward_end == pytest.approx(shifted, abs=SCALARS)
    assert largest(rank, "backward") == pytest.approx(truth.backward, abs=SCALARS)
    assert rank.backward_end_bytes == pytest.approx(truth.backward_end, abs=SCALARS)


def test_releases_before_0_2_2_repeat_keys_and_values() -> None:
    kept = [
        memfit.answer(CONFIG, {"kind": "train", "seq": 64}, overheads={"runtime": one}).estimate.ranks[0].kept_bytes
        for one in ("torchtitan@0.2.1", "torchtitan@0.2.2")
    ]
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[0] - kept[1] == LAYERS * 64 * 2 * 2 * (HIDDEN - KV_HEADS * DIM)  # two tensors of 2 B for each query head


def test_weights_gradients_and_states_are_fp32() -> None:
    sizes = {one.name: one.bytes for one in modelled(32).components}
    count = (
        2 * VOCAB * HIDDEN + HIDDEN + LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * DIM + 3 * HIDDEN * FFN + 2 * HIDDEN)
    )
    tables = 32 * DIM * 4 + 2 * DIM // 2 * 4  # half as many complex numbers; transformers' inverse frequencies
    assert sizes["weights"] == 4 * count + tables
    assert sizes["gradients"] == 4 * count
    assert sizes["optimizer_states"] == 8 * count
    assert "master_weights" not in sizes
