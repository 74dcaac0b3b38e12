"""Options that change nothing in a job: said, so that nobody takes the answer for one that heeds them.

One row for each: where the field counts, and what it belongs to. Fields at their defaults are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.account import finetuning
from memfit.job import FineTuning, Inference, Training, Workload
from memfit.model import Model
from memfit.options import options_of

CHUNKED = ("chunked", "chunked-output")


class Row(NamedTuple):
    """A field of the workload, whether it counts in a job whose open fields are decided, and what it belongs to."""

    field: str
    counts: Callable[[Model, Training], bool]
    belongs_to: str


class InferenceRow(NamedTuple):
    """The same for a field of inference."""

    field: str
    counts: Callable[[Model, Inference], bool]
    belongs_to: str


def _generates(model: Model, workload: Training) -> bool:
    return model.kind == "decoder" or model.encoder_decoder


def _by_method(*methods: str) -> Callable[[Model, Training], bool]:
    return lambda model, workload: isinstance(workload, FineTuning) and workload.method in methods


_LOW_RANK = ("lora", "qlora", "dora")

ROWS = (
    Row("seq", lambda model, workload: not model.pixels, "images have their own length: --image"),
    Row("padding", lambda model, workload: not model.pixels, "images of one size need no padding"),
    Row("target_seq", lambda model, workload: model.encoder_decoder, "an encoder-decoder has targets apart from its text"),
    Row("loss", lambda model, workload: (model.loss or "").endswith("-lm"), "it is for the head of a language model"),
    Row("loss_chunks", lambda model, workload: workload.loss in CHUNKED, "it belongs to --loss chunked or chunked-output"),
    Row(
        "loss_upcast",
        lambda model, workload: workload.loss not in ("fused", "cut"),
        "fused and cut losses compute in fp32 within their kernels",
    ),
    Row("use_cache", _generates, "only decoders have a key-value cache"),
    Row(
        "use_cache",
        lambda model, workload: workload.use_cache != "on" or workload.checkpointing == "none",
        "transformers switches the cache off under checkpointing",
    ),
    Row(
        "attention",
        lambda model, workload: _attends(model),
        "the model has no attention",
    ),
    Row("eval_accumulation", lambda model, workload: bool(workload.eval_rows), "it moves the logits of --eval-rows"),
    Row("lora_rank", _by_method(*_LOW_RANK), "it belongs to --method lora, qlora or dora"),
    Row("lora_dropout", _by_method(*_LOW_RANK), "it belongs to --method lora, qlora or dora"),
    Row("lora_targets", _by_method(*finetuning.ADAPTER_METHODS), "it belongs to adapters: --method lora, qlora, dora or ia3"),
    Row(
        "lora_dtype",
        _by_method(*finetuning.ADAPTER_METHODS, "prompt", "prefix"),
        "it is the format of adapters, a prompt or a prefix",
    ),
    Row("virtual_tokens", _by_method("prompt", "prefix"), "it belongs to --method prompt or prefix"),
    Row("prefix_projection", _by_method("prefix"), "it belongs to --method prefix"),
    Row(
        "prefix_hidden",
        lambda model, workload: isinstance(workload, FineTuning) and workload.method == "prefix" and workload.prefix_projection,
        "it is the inner width of --prefix-projection",
    ),
    Row("freeze", _by_method("full", "freeze"), "all weights are frozen beside adapters or a prompt; --unfreeze trains some"),
    Row("kbit_prep", _by_method("qlora"), "it belongs to a 4-bit base: --method qlora"),
    Row("quantizer", _by_method("qlora"), "it belongs to a 4-bit base: --method qlora"),
    Row("double_quant", _by_method("qlora"), "it belongs to a 4-bit base: --method qlora"),
)


def _attends(model: Model) -> bool:
    return model.family == "counts" or bool(model.attention_kernels)


def _has_linear_layers(model: Model) -> bool:
    return any(one.role == "linear" for segment in model.segments for block in segment.blocks for one in block.parameters)


INFERENCE_ROWS: tuple[InferenceRow, ...] = (
    InferenceRow("context", lambda model, workload: not model.pixels, "images have their own length: --image"),
    InferenceRow("prompt", lambda model, workload: not model.pixels, "images have their own length: --image"),
    InferenceRow("kv_dtype", lambda model, workload: bool(model.caches), "the model caches no keys and values"),
    InferenceRow(
        "quantization",
        lambda model, workload: workload.quantization == "none" or _has_linear_layers(model),
        "it is the format of linear layers, of which the model has none but its head",
    ),
    InferenceRow("attention", lambda model, workload: _attends(model), "the model has no attention"),
    InferenceRow(
        "logits", lambda model, workload: model.loss == "causal-lm", "only causal language models can leave positions out"
    ),
)
"""The same of inference; what contradicts a model is refused (`account.lengths`)."""


def unused(model: Model, given: Workload, resolved: Workload) -> list[tuple[str, str]]:
    """Warnings of the fields that `given` states in vain: code and text."""
    found = []
    rows: tuple[Row | InferenceRow, ...] = INFERENCE_ROWS if isinstance(resolved, Inference) else ROWS
    for row in rows:
        one = options_of(type(given)).get(row.field)
        if one is None or getattr(given, row.field) == one.default or row.counts(model, resolved):  # type: ignore[arg-type]
            continue
        flag = "--no-" + one.flag[2:] if getattr(given, row.field) is False else one.flag
        found.append((f"{row.field.replace('_', '-')}-unused", f"{flag} changes nothing here: {row.belongs_to}"))
    return found
