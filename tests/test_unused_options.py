"""Options that change nothing are named in a warning, and it is true: the estimate without them is the same."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest

import memfit
from memfit.account.compilation import compile_job
from memfit.account.unused import INFERENCE_ROWS, ROWS
from memfit.errors import UsageError
from memfit.job import FineTuning, Inference, Overheads, Training
from memfit.options import options_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
CLASSIFIER = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
BERT = models.FAMILY_CONFIGS["bert"]
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4,
    "num_layers": 2, "vocab_size": 1000,
}  # fmt: skip
IMAGES = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
NO_ATTENTION = {
    "model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 16, "hidden_sizes": [32, 64],
    "depths": [1, 1],
}  # fmt: skip


def tuning(method: str, **values: Any) -> dict[str, Any]:
    return {"kind": "finetune", "method": method, **values}


def full(**values: Any) -> dict[str, Any]:
    return {"kind": "train", **values}


IN_VAIN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (IMAGES, full(seq=20), "seq"),
    (IMAGES, full(padding="right"), "padding"),
    (LLAMA, full(target_seq=7), "target_seq"),
    (CLASSIFIER, full(loss="cut"), "loss"),
    (LLAMA, full(loss="fused", loss_chunks=4), "loss_chunks"),
    (LLAMA, full(loss="fused", loss_upcast=False), "loss_upcast"),
    (LLAMA, full(loss="cut", loss_upcast=True), "loss_upcast"),
    (BERT, full(use_cache="on"), "use_cache"),
    (LLAMA, full(use_cache="on", checkpointing="full"), "use_cache"),
    (NO_ATTENTION, full(attention="eager"), "attention"),
    (LLAMA, full(eval_batch=2, eval_accumulation=3), "eval_accumulation"),
    (LLAMA, tuning("full", lora_rank=4), "lora_rank"),
    (LLAMA, tuning("ia3", lora_dropout=0.1), "lora_dropout"),
    (LLAMA, tuning("freeze", lora_targets="q_proj"), "lora_targets"),
    (LLAMA, tuning("full", lora_dtype="bf16"), "lora_dtype"),
    (LLAMA, tuning("lora", virtual_tokens=400), "virtual_tokens"),
    (LLAMA, tuning("prompt", prefix_projection=True), "prefix_projection"),
    (LLAMA, tuning("prefix", prefix_hidden=9), "prefix_hidden"),
    (LLAMA, tuning("lora", freeze="embedding"), "freeze"),
    (LLAMA, tuning("lora", kbit_prep="full"), "kbit_prep"),
    (LLAMA, tuning("lora", quantizer="bitsandbytes@0.42"), "quantizer"),
    (LLAMA, tuning("full", double_quant=False), "double_quant"),
]


def asked(config: dict[str, Any] | None, workload: dict[str, Any]) -> Any:
    counts = memfit.load_model(dimensions={"params": 1000, "activation_elements": 10})
    return memfit.answer(counts if config is None else config, workload)


def by_phase(answer: Any) -> list[Any]:
    return [(one.name, one.first_step, one.components) for one in answer.estimate.worst.phases]


@pytest.mark.parametrize(("config", "workload", "field"), IN_VAIN)
def test_what_changes_nothing_is_named_and_changes_nothing(config: Any, workload: dict[str, Any], field: str) -> None:
    found = asked(config, workload)
    code = field.replace("_", "-") + "-unused"
    (text,) = [one.text for one in found.warnings if one.code == code]
    flag = options_of(FineTuning)[field].flag
    assert text.startswith((f"{flag} changes nothing here: ", f"--no-{flag[2:]} changes nothing here: "))
    without = asked(config, {name: value for name, value in workload.items() if name != field})
    assert not [one for one in without.warnings if one.code == code]
    assert by_phase(found) == by_phase(without)


def test_every_row_is_tried() -> None:
    assert {row.field for row in ROWS} == {field for _, _, field in IN_VAIN}


@pytest.mark.parametrize(
    ("config", "workload"),
    [
        (T5, full(target_seq=7, loss="chunked", loss_chunks=4, loss_upcast=False, use_cache="on")),
        (LLAMA, full(padding="packed", attention="flash", checkpointing="full", eval_batch=2, eval_rows=9, eval_accumulation=1)),
        (LLAMA, tuning("qlora", lora_rank=8, lora_dropout=0.1, lora_targets="q_proj", lora_dtype="bf16", kbit_prep="full",
                       quantizer="bitsandbytes@0.42", double_quant=False, use_dora=True, lora_bias="all")),
        (LLAMA, tuning("prompt", virtual_tokens=3, lora_dtype="bf16")),
        (LLAMA, tuning("prefix", virtual_tokens=3, lora_dtype="bf16", prefix_projection=True, prefix_hidden=8)),
        (LLAMA, tuning("freeze", freeze="embedding")),
        (IMAGES, full(attention="eager")),
        (None, full(batch=3, checkpointing="full", eval_batch=4)),
    ],
)  # fmt: skip
def test_what_counts_is_not_named(config: Any, workload: dict[str, Any]) -> None:
    assert not [one.code for one in asked(config, workload).warnings if one.code.endswith("-unused")]


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (tuning("full", use_dora=True), "--use-dora belongs to --method lora, qlora, dora, not to full"),
        (tuning("ia3", use_dora=True), "not to ia3"),
        (tuning("freeze", lora_bias="all"), "--lora-bias all belongs to .* not to freeze; --unfreeze"),
        (tuning("full", modules_to_save="lm_head"), "--modules-to-save belongs to .*ia3, not to full"),
        (tuning("lora", modules_to_save="head"), "it takes names of modules: .*lm_head"),
        (tuning("freeze", freeze="all", unfreeze="bias"), "--freeze all leaves nothing that is trained, and .* has no bias"),
        (tuning("qlora", quantizer="bitsandbytes@new"), r"a release such as bitsandbytes@0\.43\.2"),
    ],
)
def test_what_belongs_to_another_method_is_refused(workload: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        asked(LLAMA, workload)


@pytest.mark.parametrize(
    ("source", "dimensions", "says"),
    [
        (LLAMA, {"image": 30}, "llama reads no images"),
        ("7B", {"image": 30}, "reads no images"),
        (None, {"params": 1000, "activation_elements": 10, "layers": 3}, "counts say nothing of layers: leave out --layers"),
    ],
)
def test_dimensions_that_a_model_does_not_have_are_refused(source: Any, dimensions: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        memfit.load_model(source, dimensions=dimensions)


def test_adapters_by_default_need_a_linear_layer_also_in_ia3() -> None:
    with pytest.raises(UsageError, match="resnet has no linear layer but its head"):
        asked(NO_ATTENTION, tuning("ia3"))


MAMBA: dict[str, Any] = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
    "state_size": 8,
}  # fmt: skip


def infer(**values: Any) -> dict[str, Any]:
    return {"kind": "infer", **values}


INFERENCE_IN_VAIN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (IMAGES, infer(context=9), "context"),
    (IMAGES, infer(prompt=9), "prompt"),
    (BERT, infer(kv_dtype="fp8"), "kv_dtype"),
    (MAMBA, infer(kv_dtype="int8"), "kv_dtype"),
    (NO_ATTENTION, infer(quantization="int8"), "quantization"),
    (MAMBA, infer(attention="eager"), "attention"),
    (T5, infer(logits="all"), "logits"),
    (CLASSIFIER, infer(logits="all"), "logits"),
]


@pytest.mark.parametrize(("config", "workload", "field"), INFERENCE_IN_VAIN)
def test_what_changes_nothing_in_inference_is_named(config: dict[str, Any], workload: dict[str, Any], field: str) -> None:
    found = asked(config, workload)
    code = field.replace("_", "-") + "-unused"
    (text,) = [one.text for one in found.warnings if one.code == code]
    assert text.startswith(f"{options_of(Inference)[field].flag} changes nothing here: ")
    assert by_phase(found) == by_phase(asked(config, infer()))


def test_every_row_of_inference_is_tried_and_what_counts_is_not_named() -> None:
    assert {row.field for row in INFERENCE_ROWS} == {field for _, _, field in INFERENCE_IN_VAIN}
    given = infer(context=64, prompt=32, kv_dtype="int8", quantization="int8", attention="eager", logits="all")
    assert not [one.code for one in asked(LLAMA, given).warnings if one.code.endswith("-unused")]
    assert not [one.code for one in asked(NO_ATTENTION, infer(quantization="none")).warnings if one.code.endswith("-unused")]


@pytest.mark.parametrize("loss", ["fused", "cut"])
@pytest.mark.parametrize("config", [{**BERT, "architectures": ["BertForMaskedLM"]}, T5])
def test_a_loss_of_causal_models_is_not_counted_for_others(config: dict[str, Any], loss: str) -> None:
    found, eager = asked(config, full(loss=loss)), asked(config, full())
    assert [one.text for one in found.warnings if one.code == "loss-unused"]
    assert by_phase(found) == by_phase(eager)


@pytest.mark.parametrize(("release", "known"), [
    ("hf@99", False), ("hf@5.25", False), ("hf@5.24.3", True), ("hf@5", True), ("hf@4.57", True), ("torch@2.1", False),
    ("torch@2.13.1", True), ("torch@2", True), ("hf", True),
])  # fmt: skip
def test_a_release_that_nobody_looked_at_is_named(release: str, known: bool) -> None:
    found = memfit.answer(LLAMA, full(), overheads=Overheads(runtime=release))
    texts = [one.text for one in found.warnings if one.code == "unknown-release"]
    assert bool(texts) != known
    assert all("counted as" in one for one in texts)


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        (full(optimizer_in_backward=True, precision="fp16-mixed"), "it excludes --precision fp16-mixed .GradScaler"),
        (full(checkpointing="selective:mm,mm/2"), "keeps every mm and every second one"),
    ],
)
def test_what_contradicts_itself_is_refused(workload: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        asked(LLAMA, workload)


def test_in_backward_is_not_proposed_or_assumed_with_a_gradient_scaler() -> None:
    """On a device without bf16 the default is fp16-mixed."""
    with pytest.raises(UsageError, match="fp16-mixed, the default on a device without bf16"):
        memfit.answer(LLAMA, full(optimizer_in_backward=True), on="t4")
    big = {**LLAMA, "num_hidden_layers": 2}
    found = memfit.answer(big, full(precision="fp16-mixed", batch=1), on="1GiB")
    assert not [one for one in found.recommendations if "within backward" in one.change]


def test_estimates_and_what_they_are_made_of_can_be_shown() -> None:
    """Packed forms have more digits than Python prints."""
    found = memfit.answer(LLAMA, full())
    assert "kept_bytes" in repr(found.estimate.worst)
    assert "Rank(" in repr(found.estimate)
    profile = compile_job(models.job(memfit.load_model(LLAMA), Training(seq=64))).profile
    assert repr(profile).startswith(f"Profile({len(profile.moments)} moments, statics=")
    assert " B x token" in repr(profile.moments)
