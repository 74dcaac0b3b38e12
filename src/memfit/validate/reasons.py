"""Why a row differs, where that is known: text beside the figure, never a correction of it."""

from __future__ import annotations

from memfit.validate.report import Row

WORTH_A_REASON_PERCENT = 1.0
"""Below this a difference is rounding or an allocator's granularity."""

_SHIFTED_LOGITS = (
    "2 V + 2 h bytes a token more than counted: what a loss needs that copies the shifted logits in fp32 (transformers before it shifted the "
    "labels instead)"
)
_CAP = "the sequence is the cap of 768; the longest batch of the run may have been shorter"
_KEPT_INPUTS = "bitsandbytes 0.41 keeps the input of every 4-bit product for backward (2 h + 2 f a token and layer): about half of the difference"
_AFTER_DECODE = "the figure equals weights and cache at the end of decoding, so prefill's working set is not in it"
_GPTQ = "scratch of the 4-bit kernels and what the checkpoint leaves unquantised are not counted"

BY_GROUP = {
    "litgpt lora": "an output head of its own where memfit counts a tied one (+2 B x V h), and LitGPT's own loss and attention code",
    "litgpt qlora": _KEPT_INPUTS,
    "peft lora": _CAP,
    "peft full": _CAP,
    "trainer lora": _SHIFTED_LOGITS,
    "trainer qlora": _SHIFTED_LOGITS,
    "trainer device": "the allocator keeps blocks that it does not use; the source itself has the larger batch below the smaller one",
    "generate 4-bit": _GPTQ,
}
"""The reason that holds for every row of a group which differs by more than rounding."""

BY_ROW = {
    "litgpt-hub-27-llama-3.2-1b-full": "below weights, gradients and two 16-bit states (9.9 GB): the run did not hold AdamW's states as the row says",
    "litgpt-hub-30-llama-3.2-3b-full": "below weights, gradients and two 16-bit states (25.7 GB): the run did not hold AdamW's states as the row says",
    "litgpt-hub-50-tiny-llama-full": "LitGPT's own loss and attention code",
    "fms-029-alloc": "prepare_model_for_kbit_training upcasts norms, embedding and head to fp32: the residual stream and the logits are fp32",
    "fms-031-alloc": "prepare_model_for_kbit_training upcasts norms, embedding and head to fp32: the residual stream and the logits are fp32",
    "hf-qwen3-8b-bf16-in6144": _AFTER_DECODE,
    "hf-qwen3-8b-bf16-in30720": _AFTER_DECODE,
    "hf-qwen3-4b-awq-int4-in30720": _AFTER_DECODE,
    "hf-qwen2.5-3b-instruct-awq-in1": "this checkpoint has a head of its own (0.58 GiB) where the config ties it",
}
"""The reason for single rows; it goes before the group's."""


def reason_for(group: str, row: Row) -> str:
    """The reason for a row's difference; empty where none is known, or where none is needed."""
    if abs(row.error_percent) < WORTH_A_REASON_PERCENT:
        return ""
    if row.id in BY_ROW and not group.endswith(("device", "steady")):
        return BY_ROW[row.id]
    return BY_GROUP.get(group, "")
