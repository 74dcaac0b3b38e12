"""Checkpointing, clipping, moving averages, DDP's buckets, steps within backward: by hand, against PyTorch, what is refused."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest
import torch
from heart_strategies import model
from torch_truth import LiveMemory

from memfit.account import estimate, resolve
from memfit.account.checkpoints import DEFAULT_OPERATORS, Checkpointing, find_checkpointing
from memfit.account.estimate import Estimate
from memfit.devices import parse_cluster
from memfit.errors import UsageError
from memfit.job import FineTuning, Job, Training
from memfit.options import build

SETTINGS: dict[str, Any] = {"batch": 2, "seq": 128, "precision": "bf16-true", "optimizer": "sgd", "attention": "flash"}
LAYERS, HIDDEN = 7, 256


def of(**values: Any) -> Estimate:
    return models.estimate_of(model("llama", LAYERS), Training(**SETTINGS | values))


def kept(**values: Any) -> int:
    return of(**values).worst.kept_bytes or 0


# ------------------------------------------------------------------ checkpointing


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("every:3", Checkpointing("every", 3)),
        ("selective:3", Checkpointing("every", 3)),
        ("every:1", Checkpointing("full")),
        ("uniform:4", Checkpointing("group", 4)),
        ("block:4", Checkpointing("first", 4)),
        ("unsloth", Checkpointing("offloaded")),
        ("selective", Checkpointing("selective", operators=DEFAULT_OPERATORS)),
        ("selective:op", Checkpointing("selective", operators=DEFAULT_OPERATORS)),
        ("selective:attention, mm/2", Checkpointing("selective", operators=("attention", "mm/2"))),
    ],
)
def test_other_tools_words(given: str, means: Checkpointing) -> None:
    assert find_checkpointing(build(Training, {"checkpointing": given}).checkpointing) == means


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("every:0", "write it like every:2, with a whole number of layers"),
        ("group:", "write it like group:2"),
        ("first:x", "write it like first:2"),
        ("selective:mn", "no operation 'mn'.*it keeps those of mm, addmm"),
        ("selective:,", "names no operation"),
        ("every:8", "has fewer than 8 layers, so nothing would be recomputed"),
    ],
)
def test_what_cannot_be_read(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of(checkpointing=given)


def test_kept_inputs_by_hand() -> None:
    """Each input has 2 x 128 tokens of 256 elements of 2 bytes: 131,072 bytes."""
    one = 2 * 128 * HIDDEN * 2
    none, full = kept(), kept(checkpointing="full")
    # cosines and sines of 128 positions and 32 elements are kept once, as soon as one layer keeps everything
    tables = 2 * 128 * 32 * 2
    layer, rest = divmod(none - full - tables, LAYERS)
    assert rest == 0
    assert kept(checkpointing="every:3") == full + tables + 5 * layer
    assert kept(checkpointing="first:2") == full + tables + 5 * layer
    assert full - kept(checkpointing="group:3") == (LAYERS - 3) * one
    assert full - kept(checkpointing="offloaded") == LAYERS * one
    assert of(checkpointing="offloaded").host_bytes == LAYERS * one
    assert of(checkpointing="full").host_bytes == 0


def test_selective_keeps_what_it_lists_by_hand() -> None:
    """A token of Llama with h 256, 8 heads, 4 of keys and values (128 elements), f 688: products q, k, v, o, gate, up, down."""
    tokens, full = 2 * 128, kept(checkpointing="full")

    def more(operators: str) -> int:
        return (kept(checkpointing=f"selective:{operators}") - full) // (LAYERS * tokens)

    assert more("attention") == 2 * 256 + 4 * 8  # the result, and a log-sum-exp for each head in fp32
    assert more("mm") == 2 * (256 + 128 + 128 + 256 + 688 + 688 + 256)
    assert more("mm/2") == 2 * (256 + 128 + 688 + 256)  # q, v, gate, down
    assert more("mm/2,attention") == more("mm/2") + more("attention")
    assert more("addmm,bmm,convolution") == 0  # it has none


# ------------------------------------------------------------------ the optimizer's step


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_makes_no_copies(foreach: bool, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(500, 300, dtype=dtype)) for _ in range(4)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    with LiveMemory() as memory:
        for one in parameters:
            assert one.grad is not None
            memory.count(one.grad)
        before = memory.now
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    assert memory.peak - before < 1000  # norms and factors; a gradient has 300,000 bytes or twice that
    assert of(clip_grad=1.0).peak == of().peak


def test_a_moving_average_by_hand() -> None:
    parameters = model("llama", LAYERS).num_parameters
    base = of()
    assert of(ema="device").peak.allocated_bytes - base.peak.allocated_bytes == 2 * parameters
    assert of(ema="device", ema_dtype="fp32").peak.allocated_bytes - base.peak.allocated_bytes == 4 * parameters
    on_host = of(ema="host", ema_dtype="fp32")
    assert (on_host.peak, on_host.host_bytes) == (base.peak, 4 * parameters)
    load = [phase.allocated_bytes for phase in of(ema="device").worst.phases if phase.name == "load"]
    assert load == [
        phase.allocated_bytes for phase in base.worst.phases if phase.name == "load"
    ]  # made when the weights are there


def test_a_moving_average_of_adapters() -> None:
    lora = FineTuning(**SETTINGS, lora_rank=8)
    base, averaged = (models.estimate_of(model("llama", 2), one) for one in (lora, lora.replace(ema="device")))
    assert averaged.peak.allocated_bytes - base.peak.allocated_bytes == 4 * (base.trainable_parameters or 0)  # fp32 adapters


def test_buckets_by_hand() -> None:
    gradients = 2 * model("llama", LAYERS).num_parameters

    def phase(name: str, **values: Any) -> int:
        return next(one.components.get("gradients", 0) for one in of(**values).worst.phases if one.name == name)

    assert phase("forward") == 0
    assert phase("forward", ddp="copies") == phase("forward", ddp="views") == gradients
    assert phase("optimizer-step", ddp="copies") == 2 * gradients
    assert phase("optimizer-step", ddp="views") == gradients


def test_several_devices_train_with_ddp() -> None:
    job = Job(model=model("llama", 2), workload=Training(**SETTINGS), cluster=parse_cluster("2x4090"))
    found = resolve(job)
    assert (found.job.workload.ddp, [one.flag for one in found.assumptions if one.name == "ddp"]) == ("copies", ["--ddp"])  # type: ignore[union-attr]
    single = resolve(job.replace(cluster=parse_cluster("4090")))
    assert single.job.workload.ddp == "none"  # type: ignore[union-attr]
    assert not [one for one in single.assumptions if one.name == "ddp"]


def test_gradients_are_gone_when_backward_has_stepped() -> None:
    within = of(optimizer_in_backward=True).worst
    by_name = {one.name: one for one in within.phases if not one.first_step}
    assert by_name["optimizer-step"].components.get("gradients", 0) == 0
    largest = 2 * 1000 * HIDDEN  # the head's and the embedding's are the largest
    assert 0 < models.component(within, "gradients") <= largest
    with_states = of(optimizer_in_backward=True, optimizer="adamw-loop").worst
    assert {one.name for one in with_states.phases if one.first_step} == {"forward", "loss"}  # backward makes the states


@pytest.mark.parametrize(
    ("values", "on", "message"),
    [
        ({"optimizer_in_backward": True, "grad_accum": 4}, None, "excludes --grad-accum 4"),
        ({"optimizer_in_backward": True, "clip_grad": 1.0, "zero_grad": "zeros"}, None, "--clip-grad 1.0 and --zero-grad zeros"),
        ({"optimizer_in_backward": True}, "2x4090", "excludes --ddp copies"),
        ({"ddp": "views"}, "4090", "one device has nobody to share gradients with"),
        ({"ema_dtype": "fp32"}, None, "--ema-dtype fp32 needs --ema"),
    ],
)
def test_what_is_refused(values: dict[str, Any], on: str | None, message: str) -> None:
    job = Job(model=model("llama", 2), workload=Training(**SETTINGS | values), cluster=parse_cluster(on) if on else None)
    with pytest.raises(UsageError, match=message):
        estimate(resolve(job).job)
