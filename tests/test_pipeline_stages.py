"""Pipeline stages: shares of layers, what is legal, micro-batches in flight, and laws of their memory."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest

from memfit.account import estimate, resolve
from memfit.account.estimate import Estimate
from memfit.account.forms import ACTIVATIONS, TEMPORARY, form, parts, share
from memfit.account.pipelines import shown
from memfit.errors import UsageError
from memfit.job import Inference, Job, Overheads, Parallelism, Training
from memfit.model import Model
from memfit.parallel.stages import in_flight, layers_of_stages, stages

LLAMA_405B: dict[str, Any] = {
    **models.LLAMA_8B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip
ALBERT: dict[str, Any] = {"model_type": "albert", "architectures": ["AlbertForMaskedLM"]}
T5: dict[str, Any] = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "num_heads": 8}
STEP = Training(seq=512, attention="flash", precision="bf16-true", optimizer="adamw-fused", outputs="dropped")


def _estimate(model: Model, workload: Training | Inference = STEP, **degrees: Any) -> Estimate:
    nothing = Overheads(workspace=0, cuda_context=0, fragmentation=0, communication=0)
    return estimate(resolve(Job(model=model, workload=workload, overheads=nothing, parallelism=Parallelism(**degrees))).job)


def _cut(model: Model, pp: int, **given: Any) -> list[Model]:
    asked = {"schedule": "1f1b", "virtual_stages": 1, "micro_batches": None, **given}
    return [one.model for one in stages(model, pp, **asked) for _ in range(one.stages)]


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "split", "expected"),
    [
        (126, 8, 1, "weighted", "15,16x6,15"),  # torchtitan's Llama 3.1 405B
        (32, 4, 1, "weighted", "8,9,8,7"),  # 34 = 9 + 9 + 8 + 8, less the embedding and the head
        (32, 4, 2, "weighted", "4,5,4x5,3"),
        (32, 4, 1, "even", "8x4"),
        (96, 8, 3, "even", "4x24"),
        (32, 4, 1, "10,8x2,6", "10,8x2,6"),
    ],
)
def test_shares_of_layers(layers: int, pp: int, chunks: int, split: str, expected: str) -> None:
    model = models.make(models.LLAMA_8B, num_hidden_layers=layers)
    assert shown(layers_of_stages(model, pp, chunks, split)) == expected


@pytest.mark.parametrize(
    ("config", "degrees", "message"),
    [
        (models.LLAMA_8B, {"pp": 5, "stage_layers": "even"}, "do not give 5 stages equal shares: take --pp 4 or --pp 8"),
        (models.LLAMA_8B, {"pp": 40}, "do not give 40 stages a layer each: take --pp 17"),
        (models.LLAMA_8B, {"pp": 4, "stage_layers": "8,8,8"}, "gives 24 layers to 3 of them; there are 32 layers and 4 stages"),
        (models.LLAMA_8B, {"pp": 4, "stage_layers": "8x"}, "8x"),
        (models.LLAMA_8B, {"pp": 4, "stage_layers": "most"}, "write weighted or even, or a number of layers for every stage"),
        (ALBERT, {"pp": 2}, "share their parameters"),
        (T5, {"pp": 2}, "read the encoder's output"),
        (models.LLAMA_8B, {"stage_layers": "even"}, "give --pp as well"),
        (models.LLAMA_8B, {"schedule": "gpipe"}, "give --pp as well"),
    ],
)
def test_what_cannot_be_cut_says_why(config: dict[str, Any], degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        _estimate(models.make(config), **degrees)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"optimizer_in_backward": True}, "excludes --pp 2"), ({"eval_batch": 1}, "excludes --pp 2")],
)
def test_what_a_pipeline_excludes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _estimate(models.make(models.LLAMA_1B), STEP.replace(**change), pp=2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_micro_batches_in_flight(stage: int) -> None:
    """p = 4, by the published schedules."""
    assert in_flight("1f1b", 4, stage, 1, 100)[:3] == (4 - stage, 4 - stage, 1)
    assert in_flight("1f1b", 4, stage, 1, 2)[:2] == (min(2, 4 - stage),) * 2
    assert in_flight("zero-bubble", 4, stage, 1, 8) == in_flight("1f1b", 4, stage, 1, 8)
    assert in_flight("gpipe", 4, stage, 1, 16) == (16, 16, 1, 16)
    assert in_flight("inference", 4, stage, 1, None) == (1, 1, 1, 1)


@pytest.mark.parametrize(("pp", "chunks"), [(8, 3), (35, 3), (4, 2)])
def test_an_interleaved_first_stage_holds_the_published_share(pp: int, chunks: int) -> None:
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds L (1 + (p - 1)/(p v)) layers' activations."""
    held = in_flight("interleaved", pp, 0, chunks, 10 * pp)
    layers = 6 * pp * chunks
    assert held.chunks * (layers // (pp * chunks)) == layers + layers * (pp - 1) // (pp * chunks)
    assert held.of == chunks
    # of m = p micro-batches the first stage runs all forward before it begins with backward
    assert in_flight("interleaved", pp, 0, chunks, pp)[:2] == (pp, pp * chunks)


@pytest.mark.parametrize("config", [models.FAMILY_CONFIGS[name] for name in ("llama", "gemma2", "gemma3_text", "gpt2", "bert")])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_hold_the_model_and_a_copy_of_a_tied_head(config: dict[str, Any], pp: int) -> None:
    model = models.make(config)
    copied = [one for one in model.segments[-1].blocks[0].parameters if one.tied_to]
    whole = model.num_parameters + sum(one.shape[0] * one.shape[1] for one in copied if one.role == "head")
    assert sum(one.num_parameters for one in _cut(model, pp)) == whole
    assert sum(one.num_layers for one in _cut(model, pp)) == model.num_layers


def test_patterns_of_layers_stay_in_order() -> None:
    """Gemma 2 alternates; a stage that begins with an odd layer has it apart, and whole periods as one segment."""
    model = models.make(models.GEMMA2_2B)
    sliding, full = model.segments[1].blocks
    [first, second] = _cut(model, 2, split="7,19")
    assert [(one.blocks, one.repeat) for one in first.segments[1:]] == [((sliding, full), 3), ((sliding,), 1)]
    assert [(one.blocks, one.repeat) for one in second.segments[1:-1]] == [((full,), 1), ((sliding, full), 9)]
    assert second.first_layer == 7


def test_equal_stages_are_one_rank() -> None:
    found = stages(models.make(LLAMA_405B), 8, schedule="1f1b", virtual_stages=1, micro_batches=None)
    assert [(one.name, one.stages, one.model.num_layers) for one in found] == [("pp0", 1, 15), ("pp1-6", 6, 16), ("pp7", 1, 15)]
    assert [one.in_flight.micro_batches for one in found] == [8, 7, 1]
    assert [one.model.loss for one in found] == [None, None, "causal-lm"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_the_first_stage_holds_the_most_activations(schedule: str) -> None:
    """Of stages with as many layers, under schedules that run backward early; the last one's logits come on top."""
    model = models.make(models.LLAMA_8B)
    ranks = _estimate(model, pp=4, schedule=schedule, stage_layers="4x8" if schedule == "interleaved" else "8x4").ranks
    kept = [rank.kept_bytes or 0 for rank in ranks[:-1]]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_more_stages_never_need_more(checkpointing: str) -> None:
    """At 8 micro-batches; each stage of a longer pipeline has fewer layers and no more micro-batches times layers."""
    model = models.make(models.LLAMA_8B)
    workload = STEP.replace(grad_accum=8, checkpointing=checkpointing)
    peaks = [_estimate(model, workload, pp=pp, stage_layers="even").peak.allocated_bytes for pp in (1, 2, 4, 8) if pp > 1]
    assert peaks == sorted(peaks, reverse=True)


def test_micro_batches_are_assumed_and_named() -> None:
    found = resolve(Job(model=models.make(models.LLAMA_8B), workload=STEP, parallelism=Parallelism(pp=4)))
    said = {one.name: one for one in found.assumptions}
    assert said["grad_accum"].value == 4
    assert said["grad_accum"].flag == "--grad-accum"
    assert said["stage_layers"].value == "8,9,8,7"
    tied = resolve(Job(model=models.make(models.LLAMA_1B), workload=STEP, parallelism=Parallelism(pp=2)))
    assert "tied_head" in {one.name for one in tied.assumptions}


def test_activations_of_the_first_stage_by_hand() -> None:
    """8 layers x 4 micro-batches x 512 tokens: what one layer keeps in bf16 (8 h + 4 a norm, 2 (2 q + 2 kv) + 4 a, 8 f), the ids,
    and under torch the outputs that were sent: 2 h each."""
    model = models.make(models.LLAMA_8B)
    h, kv, heads, ffn = 4096, 1024, 32, 14336
    layer = 2 * (8 * h + 4) + 2 * (2 * h + 2 * kv) + 4 * heads + 8 * ffn
    tables = 2 * 2 * 128 * 512
    rank = _estimate(model, pp=4, stage_layers="even").ranks[0]
    # the fourth has not sent its output yet
    assert rank.kept_bytes == 4 * (8 * layer * 512 + tables + 8 * 512) + 3 * (2 * h * 512)


def test_inference_splits_the_cache_by_layers() -> None:
    model = models.make(models.LLAMA_8B)
    whole = _estimate(model, Inference(context=1024)).ranks[0]
    ranks = _estimate(model, Inference(context=1024), pp=4).ranks
    caches = [models.component(rank, "kv_cache") * rank.count for rank in ranks]
    assert sum(caches) == models.component(whole, "kv_cache")
    weights = sum(models.component(rank, "weights") * rank.count for rank in ranks)
    assert weights == models.component(whole, "weights") + 3 * model.buffer_bytes  # each stage has its rotary frequencies
    assert all(models.component(rank, "logits") == 0 for rank in ranks[:-1])


def test_a_share_of_a_form_is_rounded_up() -> None:
    whole = form(ACTIVATIONS, 0, 10) + form(TEMPORARY, 3, 9)
    assert set(parts(share(whole, 2, 3))) == {("activations", 0, 7), ("temporary", 3, 6)}
    assert share(whole, 5, 1) == 5 * whole


@pytest.mark.parametrize(
    ("degree", "change", "message"),
    [
        (3, {}, "take --seq 510 or --seq 516, or --cp 2 or --cp 4"),
        (2, {"attention": "eager"}, "take --attention flash or sdpa"),
        (2, {"padding": "right"}, "needs a mask"),
        (2, {"precision": "32-true"}, "runs in 16 bit"),
        (2, {"eval_batch": 1}, "evaluation on one device"),
    ],
)
def test_a_sequence_that_cannot_be_shared_says_why(degree: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _estimate(models.make(models.LLAMA_8B), STEP.replace(**change), cp=degree)


def test_a_shared_sequence_keeps_what_its_part_keeps() -> None:
    """Four devices with 2,048 tokens together keep what one with 512 does: attention saves local q, k and v only."""
    model = models.make(models.LLAMA_8B)
    alone = _estimate(model, STEP.replace(ddp="none")).ranks[0]
    shared = _estimate(model, STEP.replace(seq=2048), cp=4).ranks[0]
    assert shared.kept_bytes == alone.kept_bytes
    assert models.component(shared, "inputs") == models.component(alone, "inputs")
