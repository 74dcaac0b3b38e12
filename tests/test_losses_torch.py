"""Losses beside the eager cross-entropy against PyTorch: what they keep, and the largest state in each direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_truth
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch_truth import Case, LiveMemory

from memfit import account
from memfit.account.crossing import Accumulation
from memfit.account.forms import Form, per_axis
from memfit.account.liveness import measure
from memfit.families import build_model
from memfit.job import FineTuning, Job, Overheads
from memfit.kernels import KernelPolicy, lower
from memfit.model import AXES, BlockBuilder
from memfit.precision import training_policy

TOKENS, HIDDEN, VOCABULARY, CHUNKS = 240, 48, 320, 4
SMALL_TENSORS = 64
"""Bytes of losses, sums and counts of labels that torch makes beside: a few numbers for each chunk."""


class Peaks(NamedTuple):
    kept: int
    forward: int
    backward: int


def counted(loss: str, precision: str, *, train_head: bool, upcast: bool = True, outputs_kept: bool = False) -> Peaks:
    """Head and loss as memfit counts them, without labels, which the batch has."""
    b = BlockBuilder("head", HIDDEN)
    block = b.done(b.loss(b.head("lm_head", b.input, VOCABULARY), upcast=upcast))
    policy = training_policy(precision, None)
    kernels = KernelPolicy(precision=policy, loss=loss, loss_chunks=CHUNKS, train_all=train_head)
    lowered = lower(block, kernels, input_requires_grad=True, input_dtype=policy.weight)
    memory = measure(lowered, accumulation=Accumulation(), outputs_kept=outputs_kept, is_last=True)

    def total(of: Form) -> int:
        counts = {"once": 1, "token": TOKENS}
        return sum(num_bytes * counts[AXES[axis]] for axis, num_bytes in per_axis(of))

    return Peaks(total(memory.kept), max(map(total, memory.forward)), max(map(total, memory.backward)))


def measured(run: Callable[[Tensor, Tensor, Tensor], Any], precision: str, *, train_head: bool, hold: bool = False) -> Peaks:
    """The same in torch: `run(x, weight, labels)` returns the loss, and what the caller holds if `hold`."""
    dtype = torch_truth.TORCH_DTYPES[precision]
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_(train_head)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    leaf = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    x = leaf * 1  # not a leaf: its gradient is passed on
    own = {weight.untyped_storage()._cdata, labels.untyped_storage()._cdata}
    kept = torch_truth.kept_by(lambda: run(x, weight, labels), own)
    memory = LiveMemory()
    with memory:
        for one in (weight, labels):
            memory.count(one)
        outside = memory.now
        memory.count(x)
        if not train_head:
            outside = memory.now  # only the test holds x
        memory.peak = memory.now
        result = run(x, weight, labels)
        loss, held = result if hold else (result, None)
        forward, memory.peak = memory.peak, memory.now
        if train_head:
            torch.autograd.grad(loss, (x, weight))
        else:
            torch.autograd.grad(loss, (x,))
        del held
    return Peaks(kept, forward - outside, memory.peak - outside)


def eager_part(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def chunked(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As torchtune's LinearCrossEntropyLoss: head and loss for one chunk after the other."""
    pieces = x.tensor_split(CHUNKS, dim=0)
    parts = [eager_part(F.linear(piece, weight), one) for piece, one in zip(pieces, labels.tensor_split(CHUNKS), strict=True)]
    return torch.stack(parts).sum()


def chunked_output(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    """As torchtune's CEWithChunkedOutputLoss: all logits first, in chunks that the loop holds."""
    logits = [F.linear(piece, weight) for piece in x.tensor_split(CHUNKS, dim=0)]
    parts = [eager_part(one, label) for one, label in zip(logits, labels.tensor_split(CHUNKS), strict=True)]
    return torch.stack(parts).sum(), logits


PRECISIONS = ("bf16-true", "32-true")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("train_head", [True, False])
def test_chunked(precision: str, train_head: bool) -> None:
    """4V a token are kept; forward adds (2V + 4V + 4V) / n of one chunk, backward 8V / n and sums of the head's gradients."""
    found, truth = counted("chunked", precision, train_head=train_head), measured(chunked, precision, train_head=train_head)
    assert found.kept - truth.kept == pytest.approx(TOKENS * 8, abs=SMALL_TENSORS)  # labels are slices of the batch's here
    labels = 8 * TOKENS
    assert found.forward - labels == pytest.approx(truth.forward, rel=0.01)  # float32 sums of log_softmax on the CPU
    assert found.backward - labels == pytest.approx(truth.backward, rel=0.01)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("train_head", [True, False])
def test_chunked_output(precision: str, train_head: bool) -> None:
    """The logits, 2V a token, are there all the time beside the log-softmax."""
    found = counted("chunked-output", precision, train_head=train_head, outputs_kept=True)
    truth = measured(chunked_output, precision, train_head=train_head, hold=True)
    labels = 8 * TOKENS
    assert found.kept - truth.kept == pytest.approx(labels, abs=SMALL_TENSORS)
    assert found.forward - labels == pytest.approx(truth.forward, rel=0.01)
    # memfit joins the chunks' gradients before the head's product, torch makes one product for each
    assert found.backward - labels == pytest.approx(truth.backward, rel=0.02)


class Cut(torch.autograd.Function):
    """Saves what apple/ml-cross-entropy saves: the head's input and weight, the log-sum-exp, valid tokens, mean logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros(len(x), dtype=torch.float32), torch.arange(len(x)), torch.zeros(len(weight)))
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, *_ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight), None


@pytest.mark.parametrize("train_head", [True, False])
def test_cut(train_head: bool) -> None:
    """2h + 4 + 8 B a token and 4V once, whether the head is trained or not."""
    found = counted("cut", "bf16-true", train_head=train_head)
    truth = measured(Cut.apply, "bf16-true", train_head=train_head)
    assert found.kept == truth.kept == TOKENS * (2 * HIDDEN + 12) + 4 * VOCABULARY


def test_losses_are_ordered_by_what_they_keep() -> None:
    kept = [counted(one, "bf16-true", train_head=True).backward for one in ("eager", "chunked-output", "chunked", "cut")]
    assert kept == sorted(kept, reverse=True)


def test_more_chunks_never_take_more_forward() -> None:
    model = build_model(
        {"model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4}, name="x", source="test",
    )  # fmt: skip
    peaks = []
    for chunks in (1, 2, 4, 8):
        job = Job(model=model, workload=FineTuning(method="freeze", batch=4, seq=512, loss="chunked", loss_chunks=chunks),
                  overheads=Overheads(workspace=0, cuda_context=0, fragmentation=0))  # fmt: skip
        rank = account.estimate(account.resolve(job).job).ranks[0]
        peaks.append(rank.peak.allocated_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("labels", "problem"), [(1, None), (3, "regression"), (5, "multi_label_classification"), (4, "single_label_classification")]
)
def test_classifiers_of_sequences(labels: int, problem: str | None) -> None:
    """Mean square and several labels at once keep logits and labels, one class keeps a log-softmax, of a real BERT in fp32."""
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
    config = transformers.BertConfig(**shape, num_labels=labels, problem_type=problem)
    case = Case(transformers.BertForSequenceClassification, config, "sequence")
    real = torch_truth.make_model(case, "32-true", "eager")
    inputs = torch_truth.make_inputs(case, 3, 20)
    if problem != "single_label_classification":
        inputs["labels"] = torch.rand(3, labels)
    own = {one.untyped_storage()._cdata for one in [*real.parameters(), *real.buffers()]}
    truth = torch_truth.kept_bytes(real, inputs)
    raw = {"model_type": "bert", "architectures": [case.head], **shape, "num_labels": labels, "problem_type": problem}
    model = build_model(raw, name="x", source="test")
    settings = {"method": "full", "batch": 3, "seq": 20, "precision": "32-true", "attention": "eager"}
    rank = account.estimate(account.resolve(Job(model=model, workload=FineTuning(**settings))).job).ranks[0]
    assert own
    assert rank.kept_bytes == pytest.approx(truth, abs=8)  # the sum of the loss's weights is a number more on CUDA
    names = [op.name for segment in model.segments for block in segment.blocks for op in block.ops if op.kind == "loss"]
    expected = {None: "mse", "regression": "mse", "multi_label_classification": "bce"}.get(problem, "cross-entropy")
    assert names == [expected]


def test_a_problem_type_that_is_not_known_is_refused() -> None:
    raw = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "problem_type": "ranking", "vocab_size": 96,
           "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    with pytest.raises(Exception, match="problem_type"):
        build_model(raw, name="x", source="test")
