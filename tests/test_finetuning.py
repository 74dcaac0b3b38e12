"""What fine-tuning trains, and beside what: against PEFT's own layers and against PyTorch.

`PEFT_STEPS` and `PREFIX_STEPS` were measured with PEFT 0.21.2, torch 2.13 and transformers 5.24 as
`torch_truth.training_step` does: the second step of a raw loop over a tiny Llama in bf16 on the CPU
(3 x 20 tokens, fused AdamW, adapters of rank 4), sdpa taking what its flash kernel takes. PEFT is not needed to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heart_models as models
import pytest
import torch
import torch_truth
import transformers
from torch_truth import Case

import memfit
from memfit import account
from memfit.account.estimate import Rank
from memfit.errors import UsageError
from memfit.families import build_model
from memfit.job import FineTuning, Job, Overheads, Training
from memfit.model import Model

BATCH, SEQ = 3, 20
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
NO_BIAS = {"attention_bias": False}
ROTARY = 48
"""Bytes of two rotary frequency buffers, 2 x 6 x 4 B, which are weights here and buffers there."""
SMALL_TENSORS = 310
"""Bytes by which a step may differ: step counters (4 B for each trained tensor), the loss, labels of virtual tokens."""


def tiny(**changes: Any) -> Model:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY, **changes}
    return build_model(config, name="tiny", source="test")


def answer(model: Model, **settings: Any) -> tuple[account.Estimate, Rank]:
    workload = FineTuning(**{"batch": BATCH, "seq": SEQ, "precision": "bf16-true", "optimizer": "adamw-fused", **settings})
    job = Job(model=model, workload=workload, overheads=Overheads(workspace=0, cuda_context=0, fragmentation=0))
    found = account.estimate(account.resolve(job).job)
    return found, found.ranks[0]


def phase(rank: Rank, name: str) -> int:
    return next(one.allocated_bytes for one in rank.phases if one.name == name and not one.first_step)


def weights(rank: Rank) -> int:
    return next(one.bytes for one in rank.components if one.name == "weights")


HEAD = {"lora_rank": 4, "lora_targets": "q_proj", "modules_to_save": "lm_head"}
PEFT_STEPS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = [
    ("lora", {}, {"method": "lora", "lora_rank": 4}, (8640, 165120, 521284, 813800, 281476, 768200)),
    ("rslora", {}, {"method": "lora", "lora_rank": 4, "use_rslora": True}, (8640, 165120, 521284, 813800, 281476, 768200)),
    # the hooks that count what is kept hold the graph of B A as well, which is gone when the layer returns
    ("dora", {}, {"method": "dora", "lora_rank": 4}, (9696, 169344, 0, 1219004, 298456, 1173404)),
    ("dora no bias", NO_BIAS, {"method": "dora", "lora_rank": 4}, (9696, 168480, 0, 1218140, 297592, 1172540)),
    ("embedding, head", {}, {"method": "lora", "lora_rank": 4, "lora_targets": "q_proj,embed_tokens,lm_head"},
     (2304, 139776, 299284, 515160, 179972, 469560)),
    ("save head", {}, {"method": "lora", **HEAD}, (5760, 144384, 279364, 509532, 198392, 463932)),
    ("save tied head", TIED, {"method": "lora", **HEAD}, (5760, 135168, 279364, 500316, 189176, 454716)),
    ("save both", {}, {"method": "lora", **HEAD, "modules_to_save": "lm_head,embed_tokens"},
     (10368, 153600, 291604, 548944, 235260, 503344)),
    ("bias all", {}, {"method": "lora", "lora_rank": 4, "lora_targets": "q_proj", "lora_bias": "all"},
     (1584, 135168, 273604, 477896, 164164, 432296)),
    ("bias lora_only", {}, {"method": "lora", "lora_rank": 4, "lora_targets": "q_proj", "lora_bias": "lora_only"},
     (1296, 135168, 273604, 476708, 162400, 431108)),
    ("prompt", {}, {"method": "prompt", "virtual_tokens": 5}, (240, 131520, 309944, 515776, 149832, 458776)),
    ("ia3", {}, {"method": "ia3"}, (384, 132096, 312388, 505700, 149248, 460100)),
    ("LongLoRA", {}, {"method": "lora", "lora_rank": 4, "unfreeze": "embedding,norm"},
     (13584, 165120, 573844, 885688, 311172, 840088)),
]  # fmt: skip
"""name, changes of the config, options, (trained parameters, weights, kept, backward, optimizer step, forward end)"""


@pytest.mark.parametrize(("changes", "options", "measured"), [row[1:] for row in PEFT_STEPS], ids=[row[0] for row in PEFT_STEPS])
def test_a_step_takes_what_peft_takes(changes: dict[str, Any], options: dict[str, Any], measured: tuple[int, ...]) -> None:
    trained, stored, kept, backward, step, forward_end = measured
    found, rank = answer(tiny(**changes), **options)
    assert found.trainable_parameters == trained
    assert weights(rank) == stored + ROTARY
    if kept:
        assert rank.kept_bytes == pytest.approx(kept, abs=40)  # the 4 B of the loss; labels of virtual tokens
    assert phase(rank, "backward") == pytest.approx(backward, abs=SMALL_TENSORS)
    assert phase(rank, "optimizer-step") == pytest.approx(step, abs=SMALL_TENSORS)
    assert rank.forward_end_bytes == pytest.approx(forward_end, abs=SMALL_TENSORS)


EAGER = {"method": "prefix", "virtual_tokens": 5, "attention": "eager"}
MLP = {"prefix_projection": True, "prefix_hidden": 60}
PREFIX_STEPS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = [
    ("eager", {}, EAGER, (720, 133440, 342764, 561676, 176232, 516076)),
    ("eager projected", {}, {**EAGER, "prefix_projection": True}, (4320, 147840, 345644, 607772, 233848, 562172)),
    ("eager fp32", {}, {**EAGER, "precision": "32-true"}, (720, 264000, 447404, 830020, 339936, 784420)),
    ("masked", {}, {"method": "prefix", "virtual_tokens": 5}, (720, 133440, 271124, 490036, 176232, 444436)),
    ("encoder binds", {"num_hidden_layers": 6, "num_key_value_heads": 4},
     {"method": "prefix", "virtual_tokens": 60, "batch": 2, **MLP}, (40956, 434640, 550884, 1453124, 1119280, 1321540)),
    ("more virtual than real", {}, {"method": "prefix", "virtual_tokens": 60, "seq": 8},
     (8640, 165120, 215332, 531588, 333056, 513348)),
]  # fmt: skip
"""The same of prefix tuning; sdpa, which gets a mask, takes what its memory-efficient kernel takes."""


@pytest.mark.parametrize(
    ("changes", "options", "measured"), [row[1:] for row in PREFIX_STEPS], ids=[row[0] for row in PREFIX_STEPS]
)
def test_prefix_tuning_takes_what_peft_takes(changes: dict[str, Any], options: dict[str, Any], measured: tuple[int, ...]) -> None:
    """To the byte but for step counters, the loss and the ids of the virtual tokens (8 B each, a buffer of the encoder)."""
    trained, stored, kept, backward, step, forward_end = measured
    found, rank = answer(tiny(**changes), **options)
    ids = 8 * options["virtual_tokens"]
    assert found.trainable_parameters == trained
    assert weights(rank) == stored + ROTARY
    assert rank.kept_bytes == kept + 4
    # addmm's three gradients are made one after the other, by memfit at once: 956 B where the encoder binds
    assert phase(rank, "backward") == pytest.approx(backward, rel=0.0007, abs=40 + ids)
    assert phase(rank, "optimizer-step") == pytest.approx(step, abs=40 + ids)
    assert rank.forward_end_bytes == pytest.approx(forward_end, abs=40)


def test_a_prefix_needs_a_cache() -> None:
    """PEFT refuses prefix tuning under checkpointing, whose layers have no cache; encoders have none either."""
    with pytest.raises(UsageError, match="excludes --checkpointing"):
        answer(tiny(), method="prefix", checkpointing="full")
    with pytest.raises(UsageError, match="cache of a decoder; bert has none"):
        answer(models.make(models.BERT_BASE), method="prefix")
    recommended = memfit.answer("llama-3.2-1b", FineTuning(method="prefix", seq=4096), on="8GiB").recommendations
    assert recommended
    assert not [one for one in recommended if "checkpointing" in one.change]


def layer_of(name: str) -> int:
    return int(name.split(".layers.")[1].split(".", maxsplit=1)[0]) if ".layers." in name else -1


LAST_LAYERS = ("lm_head.weight", "model.norm.weight")
FROZEN: list[tuple[str, dict[str, Any], dict[str, str], Callable[[str], bool]]] = [
    (
        "first layers",
        {},
        {"method": "full", "freeze": "embedding,layers:2"},
        lambda n: "embed" not in n and layer_of(n) not in (0, 1),
    ),
    ("one layer", {}, {"method": "full", "freeze": "layers:1"}, lambda n: layer_of(n) != 0),
    ("head only", {}, {"method": "freeze"}, lambda n: "lm_head" in n),
    (
        "head and norm",
        {},
        {"method": "full", "freeze": "embedding,layers"},
        lambda n: n in LAST_LAYERS,
    ),
    ("BitFit", {}, {"method": "freeze", "unfreeze": "bias"}, lambda n: n.endswith("bias")),
    ("norms", {}, {"method": "freeze", "unfreeze": "norm"}, lambda n: "norm" in n),
    ("by module", {}, {"method": "freeze", "unfreeze": "q_proj,down_proj"}, lambda n: "q_proj" in n or "down_proj" in n),
    ("tied, one layer", TIED, {"method": "full", "freeze": "layers:1"}, lambda n: layer_of(n) != 0),
    ("tied embedding", TIED, {"method": "full", "freeze": "embedding"}, lambda n: "embed" not in n),
    ("tied head", TIED, {"method": "freeze"}, lambda n: "embed" in n),
]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("changes", "options", "trains"), [row[1:] for row in FROZEN], ids=[row[0] for row in FROZEN])
def test_frozen_parts_against_torch(
    changes: dict[str, Any], options: dict[str, str], trains: Callable[[str], bool], checkpointed: bool
) -> None:
    """Frozen layers keep nothing below the first trained one, unless checkpointing makes the embedding's output need one."""
    config = transformers.LlamaConfig(**{**TINY, **changes})
    case = Case(transformers.LlamaForCausalLM, config)
    real = torch_truth.make_model(case, "bf16-true", "sdpa")
    for name, one in real.named_parameters():
        one.requires_grad = trains(name)
    if checkpointed:
        real.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [one for one in real.parameters() if one.requires_grad]
    inputs = torch_truth.make_inputs(case, BATCH, SEQ)
    own = {one.untyped_storage()._cdata for one in [*real.parameters(), *real.buffers()]}
    with torch_truth.flash_attention():
        kept = torch_truth.kept_by(lambda: real(**inputs), own)
        step = torch_truth.training_step(real, inputs, torch.optim.AdamW(trained, fused=True))
    found, rank = answer(tiny(**changes), checkpointing="full" if checkpointed else "none", **options)
    assert found.trainable_parameters == sum(one.numel() for one in trained)
    assert rank.kept_bytes == pytest.approx(kept, abs=16)
    assert phase(rank, "backward") == pytest.approx(step.backward, abs=SMALL_TENSORS)
    assert phase(rank, "optimizer-step") == pytest.approx(step.optimizer_step, abs=SMALL_TENSORS)


# ------------------------------------------------------------------ a 4-bit base


def test_norms_alone_in_fp32() -> None:
    """Llama-3.1-8B: 65 norms of 4,096 elements go from 2 to 4 bytes; embedding and head stay as they are."""
    model = models.make(models.LLAMA_8B)
    settings = {"method": "qlora", "precision": "bf16-mixed", "weight_dtype": "bf16"}
    none, norms = (weights(answer(model, kbit_prep=how, **settings)[1]) for how in ("none", "norms"))
    assert norms - none == 65 * 4096 * 2


def test_norms_in_fp32_make_the_residual_stream_fp32() -> None:
    """Checkpointed, every boundary but the first, which is the 16-bit embedding's output, has 4 h bytes instead of 2 h."""
    model = models.make(models.LLAMA_8B)
    settings = {"method": "qlora", "precision": "bf16-mixed", "weight_dtype": "bf16", "checkpointing": "full"}
    none, norms = (answer(model, kbit_prep=how, **settings)[1].kept_bytes or 0 for how in ("none", "norms"))
    # the final norm makes its fp32 input of a 16-bit residual stream, and is given one that is fp32 already: the same bytes
    assert norms - none == pytest.approx(31 * 2 * 4096 * BATCH * SEQ, abs=2 * 4096 * BATCH * SEQ)


@pytest.mark.parametrize(("runtime", "expected"), [("hf", "none"), ("hf-trainer", "none"), ("hf-trainer@4.57", "norms")])
def test_the_runtime_decides_the_preparation(runtime: str, expected: str) -> None:
    job = Job(model=tiny(), workload=FineTuning(method="qlora"), overheads=Overheads(runtime=runtime))
    assert account.resolve(job).job.workload.kbit_prep == expected


@pytest.mark.parametrize(("release", "keeps"), [("0.41.1", True), ("0.43.1", True), ("0.43.2", False), ("0.45", False)])
def test_earlier_bitsandbytes_keeps_the_input_of_every_product(release: str, keeps: bool) -> None:
    """A Llama layer with adapters on q only (bf16, so that q's input is kept anyway): gate and up's input 2 h, down's 2 f."""
    settings = {"method": "qlora", "lora_targets": "q_proj", "lora_dtype": "bf16"}
    plain, asked = (answer(tiny(), quantizer=one, **settings)[1].kept_bytes for one in (None, f"bitsandbytes@{release}"))
    assert (asked or 0) - (plain or 0) == (3 * (2 * 48 + 2 * 80) * BATCH * SEQ if keeps else 0)


def test_qdora_expands_the_weight_for_its_norm() -> None:
    """DoRA keeps as much over a 4-bit base as over a 16-bit one: the base's result and B's, 2 x 48 + 4 x 48 a token for q."""
    settings = {"lora_targets": "q_proj", "lora_rank": 4}
    model = tiny(**NO_BIAS)
    lora, dora = (answer(model, method="qlora", use_dora=flag, **settings)[1].kept_bytes or 0 for flag in (False, True))
    # the norm, m / norm, and it less one, by layer, in fp32; in the first layer the base's result needs no gradient of the last
    magnitudes = (3 * 3 - 1) * 48 * 4
    assert dora - lora == 3 * (2 + 4) * 48 * BATCH * SEQ + magnitudes


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"freeze": "atention"}, "--freeze names 'atention'"),
        ({"unfreeze": "layer"}, "did you mean"),
        ({"modules_to_save": "head"}, "--modules-to-save names 'head'"),
        ({"method": "full", "freeze": "all"}, "nothing that is trained"),
        ({"lora_targets": "lm_head", "loss": "fused"}, "an adapter on lm_head would not be used"),
        ({"lora_targets": "nowhere"}, "--lora-targets names 'nowhere'"),
    ],
)
def test_what_would_train_nothing_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        account.resolve(Job(model=tiny(), workload=FineTuning(**options)))


def test_evaluation_options_need_a_batch() -> None:
    with pytest.raises(UsageError, match="--eval-batch"):
        account.resolve(Job(model=tiny(), workload=Training(eval_rows=10)))


@pytest.mark.parametrize("loss", ["eager", "chunked", "chunked-output", "fused", "cut"])
@pytest.mark.parametrize("method", ["dora", "ia3", "prompt", "prefix", "freeze"])
def test_every_method_and_loss_has_a_whole_answer(method: str, loss: str) -> None:
    found = memfit.answer(tiny(), FineTuning(method=method, loss=loss, batch=BATCH, seq=SEQ, eval_batch=2), on="4090")
    assert any(one.computes == "loss" and one.name == loss for one in found.kernels)
    assert "evaluate" in {one.name for one in found.estimate.worst.phases}
    assert found.verdict is not None


# ------------------------------------------------------------------ evaluation


def evaluated(rows: int, batch: int) -> int:
    """The peak of an evaluation loop as the Trainer's: every batch's logits and labels joined to those before."""
    case = Case(transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY))
    real = torch_truth.make_model(case, "bf16-true", "sdpa").eval()
    memory = torch_truth.LiveMemory()
    inputs = torch_truth.make_inputs(case, batch, SEQ)
    for one in [*real.parameters(), *real.buffers(), *inputs.values()]:
        memory.count(one)
    kept_logits = kept_labels = logits = labels = None
    with torch_truth.flash_attention(), memory, torch.no_grad():
        for _ in range(rows // batch):
            out = real(**inputs)
            logits, labels = out.logits.detach(), inputs["labels"]
            del out
            kept_labels = labels if kept_labels is None else torch.cat((kept_labels, labels))
            kept_logits = logits if kept_logits is None else torch.cat((kept_logits, logits))
    return memory.peak


@pytest.mark.parametrize(("rows", "batch"), [(4, 4), (40, 4), (64, 2)])
def test_evaluation_against_torch(rows: int, batch: int) -> None:
    """SGD without momentum: nothing but weights, batch and what evaluation makes is there."""
    workload = {"method": "full", "optimizer": "sgd", "eval_batch": batch, "eval_rows": rows}
    _, rank = answer(tiny(), **workload)
    # the labels of the first batch are the batch's own; names of one batch's logits overlap: within a batch's logits
    assert phase(rank, "evaluate") == pytest.approx(evaluated(rows, batch), abs=2 * batch * SEQ * (2 * 96 + 8))


def test_collected_logits_by_hand() -> None:
    """100 rows of 20 tokens of 96 entries in fp32, as accelerate converts them, twice while they are joined; labels as well."""
    job = Job(
        model=tiny(),
        workload=Training(batch=1, seq=SEQ, precision="bf16-mixed", eval_batch=2, eval_rows=100),
        overheads=Overheads(runtime="hf-trainer", workspace=0, cuda_context=0, fragmentation=0),
    )
    rank = account.estimate(account.resolve(job).job).ranks[0]
    evaluation = next(one for one in rank.phases if one.name == "evaluate")
    rows = 100 * SEQ
    assert evaluation.components["logits"] == rows * 96 * 4
    assert evaluation.components["temporary"] == rows * (96 * 4 + 8)


def test_accumulation_bounds_what_is_collected() -> None:
    whole, bounded = (
        phase(answer(tiny(), method="full", eval_batch=2, eval_rows=1000, eval_accumulation=one)[1], "evaluate")
        for one in (None, 4)
    )
    assert bounded < whole
    assert bounded == phase(answer(tiny(), method="full", eval_batch=2, eval_rows=8)[1], "evaluate")
