"""Pipeline stages and ring attention against torch itself: one rank of a fake process group, every storage counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_truth import LiveMemory

from memfit.account.checkpoints import NONE
from memfit.account.optimizers import find_optimizer
from memfit.account.profile import Numbers, evaluate
from memfit.account.standing import TrainingPolicy
from memfit.account.training import compile_training
from memfit.kernels import KernelPolicy
from memfit.kernels.ring import Ring, scratch
from memfit.kernels.tape import Tape
from memfit.model import TOKEN, BlockBuilder, Model, Segment
from memfit.parallel.stages import stages
from memfit.precision import PrecisionPolicy
from memfit.runtimes.pipelines import TORCH

HIDDEN, FFN, VOCAB, TOKENS = 32, 64, 128, 32
STAGES, LAYERS_EACH = 4, 2
FP32 = PrecisionPolicy("fp32", "fp32", "fp32", False)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class _Chunk(nn.Module):
    """Two layers, with the embedding if it is the first and the head if it is the last."""

    def __init__(self, index: int, of: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if index == 0 else nn.Identity()
        self.layers = nn.Sequential(*[_Layer() for _ in range(LAYERS_EACH)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if index == of - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)))


def _model(chunks: int) -> Model:
    """The same modules as memfit describes them."""
    b = BlockBuilder("embedding", 1)
    embedding = b.done(b.embedding("embedding", VOCAB, HIDDEN))
    b = BlockBuilder("layer", HIDDEN)
    layer = b.done(b.add(b.input, b.linear("down", b.activation("gelu", b.linear("up", b.input, FFN)), HIDDEN)))
    b = BlockBuilder("head", HIDDEN)
    head = b.done(b.loss(b.head("head", b.input, VOCAB), upcast=True))
    parts = (Segment((embedding,), role="embedding"), Segment((layer,), LAYERS_EACH * chunks), Segment((head,), role="head"))
    return Model(name="m", family="m", architecture="m", source="", kind="decoder", segments=parts, hidden_size=HIDDEN,
                 num_layers=LAYERS_EACH * chunks, num_heads=1, num_kv_heads=1, head_dim=HIDDEN, vocab_size=VOCAB)  # fmt: skip


@pytest.fixture
def group() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one rank of a fake group, and takes the group apart afterwards."""

    def start(rank: int, size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    dist.destroy_process_group()


def _shape(index: int, of: int) -> Tensor:
    """An example of what goes into chunk `index`, or out of the one before."""
    if index == 0:
        return torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    width = VOCAB if index == of else HIDDEN
    return torch.empty(1, TOKENS, width, device="meta", requires_grad=index < of)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def _measured(schedule: str, rank: int, micro_batches: int, chunks: int, returned: bool) -> int:
    """The peak of a second step, without the parameters and the batch."""
    of = STAGES * chunks
    modules = [_Chunk(index, of) for index in range(rank, of, STAGES)]
    made = [
        PipelineStage(module, index, of, torch.device("cpu"), (_shape(index, of),), (_shape(index + 1, of),))
        for module, index in zip(modules, range(rank, of, STAGES), strict=True)
    ]
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    runs = kinds[schedule](made if schedule == "interleaved" else made[0], micro_batches, loss_fn=_loss)

    def known_shapes(stages: list[PipelineStage], *given: Any) -> None:
        for stage in stages:  # the others, who would vote on it, do not exist
            stage._inference_mode = InferenceMode.STATIC

    runs._warmup_p2p = known_shapes
    ids = torch.zeros(micro_batches, TOKENS, dtype=torch.int64)
    batch = (ids,) if rank == 0 else ()
    target = {"target": ids} if rank == STAGES - 1 else {}
    memory = LiveMemory()
    for one in (ids, *[weight for module in modules for weight in module.parameters()]):
        memory.count(one)
    constant = memory.now
    with memory:
        runs.step(*batch, **target, return_outputs=returned)
        memory.peak = 0
        runs.step(*batch, **target, return_outputs=returned)
    return memory.peak - constant


def _expected(schedule: str, rank: int, micro_batches: int, chunks: int, returned: bool) -> int:
    """What memfit says of the same rank."""
    found = stages(
        _model(STAGES * chunks),
        STAGES,
        schedule=schedule,
        virtual_stages=chunks,
        micro_batches=micro_batches,
        split=f"{LAYERS_EACH}x{STAGES * chunks}",
    )
    one = next(one for one in found if rank == int(one.name.removeprefix("pp").partition("-")[0]))
    policy = TrainingPolicy(
        optimizer=find_optimizer("sgd"),
        checkpointing=NONE,
        outputs_kept=returned,
        gradients_persist=True,
        workspace=0,
        in_flight=one.in_flight,
        pipeline=TORCH,
    )
    profile = compile_training(one.model, KernelPolicy(FP32), policy)
    ids = 8 * TOKENS * micro_batches * (rank in (0, STAGES - 1))
    return int(evaluate(profile, Numbers(1, TOKENS, TOKENS)).peak) - 4 * one.model.num_parameters - ids


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("micro_batches", [4, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_of_torch_to_the_byte(group: Callable[[int, int], None], schedule: str, micro_batches: int, rank: int) -> None:
    """Activations in flight, buffers for every micro-batch, the output in torch's cache, a gradient on its way back."""
    group(rank, STAGES)
    assert _expected(schedule, rank, micro_batches, 1, False) == _measured(schedule, rank, micro_batches, 1, False)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_last_stage_of_torch(group: Callable[[int, int], None], schedule: str, returned: bool) -> None:
    """Its logits stay until their backward, and all of them where they are returned.

    0.5 %: ids of a micro-batch are a view of the batch, whose gradient buffers torch frees at other moments.
    """
    group(STAGES - 1, STAGES)
    measured = _measured(schedule, STAGES - 1, 6, 1, returned)
    assert _expected(schedule, STAGES - 1, 6, 1, returned) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_of_an_interleaved_stage(group: Callable[[int, int], None], rank: int) -> None:
    """1 %: which hidden states are on their way while the peak is reached differs from rank to rank, by one of 250."""
    group(rank, STAGES)
    measured = _measured("interleaved", rank, 8, 2, False)
    assert _expected("interleaved", rank, 8, 2, False) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (32, 8)])
def test_ring_attention_of_torch(group: Callable[[int, int], None], degree: int, heads: int, kv_heads: int) -> None:
    """The last rank, which merges whole blocks. Forward to 1 % (the statistics are counted by their number)."""
    group(degree - 1, degree)
    dim, seq = 64, 64
    q, k, v = [
        torch.empty(1, seq, number, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for number in (heads, kv_heads, kv_heads)
    ]
    memory = LiveMemory()
    for one in (q, k, v):
        memory.count(one)
    given, memory.peak = memory.now, 0
    operation: Any = torch.ops.aten._scaled_dot_product_flash_attention
    with memory:
        _attention._templated_ring_attention(dist.group.WORLD, 2, operation, q, k, v, is_causal=True)
    tape = Tape(PrecisionPolicy("bf16", "bf16", "bf16", False))
    tensors = [tape.tensor(TOKEN, number * dim, "bf16") for number in (heads, kv_heads, kv_heads)]
    [(_, forward)], _ = scratch(Ring("allgather", degree), *tensors, heads)
    results = 2 * heads * dim + 4 * heads
    assert seq * (forward + results) == pytest.approx(memory.peak - given, rel=0.01)
