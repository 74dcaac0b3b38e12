"""Why rows are left out, and why a row differs where that is known: text beside the figure, never a correction of it."""

from __future__ import annotations

from memfit.validate.report import Row

NO_CONFIG = "not expressible yet: another architecture, or no config"
"""Why measured rows are left out whose model the corpus does not carry."""


def contradicts(measured: int, resident: int) -> bool:
    """Whether a figure is below weights, gradients and states alone: the run was not what the row says, or not counted whole."""
    return measured < resident


WORTH_A_REASON_PERCENT = 1.0
"""Below this a difference is rounding or an allocator's granularity."""

_SHIFTED_LOGITS = (
    "2 V + 2 h bytes a token more than counted, as a loss needs that copies the shifted logits in fp32 "
    "(older transformers; newer ones shift the labels)"
)
_CAP = "the sequence is the cap of 768; the longest batch of the run may have been shorter"
_NO_STATES = "below weights, gradients and two 16-bit states ({} GB): the run did not hold AdamW's states as the row says"
_MASK_OF_ONES = (
    "BART's decoder is given a mask of ones, which a real run recognises and drops; fake tensors cannot be asked, so the row "
    "holds a mask for every decoder layer (b t t)"
)
_AFTER_DECODE = "the figure equals weights and cache at the end of decoding: prefill's working set is not in it"

NOT_OF_THE_PEAK = ("hf-qwen3-8b-bf16-in6144", "hf-qwen3-8b-bf16-in30720", "hf-qwen3-4b-awq-int4-in30720")
"""Figures that are weights and cache at the end of decoding to their last digit: no interval can be learnt from them."""

BY_GROUP = {
    "litgpt lora": "LitGPT's own attention, adapter and loss code; not known in detail",
    "litgpt qlora": "LitGPT's own attention, adapter and loss code over 4-bit layers; not known in detail",
    "peft lora": _CAP,
    "peft full": "the optimizer step binds; what the allocator and the evaluation hold beyond it is not known",
    "trainer lora": _SHIFTED_LOGITS,
    "trainer qlora": _SHIFTED_LOGITS,
    "trainer device": "what the allocator holds beyond tensors is above the assumed share; the peak's own error comes on top",
    "generate 16-bit": "not known",
    "operations": "Liger 0.4.2 adds each chunk's product to the head's gradient in place; memfit counts 0.8, which makes it in "
    "16 bit and in fp32 first",
    "generate 4-bit": "scratch of the 4-bit kernels and what the checkpoint leaves unquantised are not counted",
}
"""The reason that holds for every row of a group which differs by more than rounding."""

BY_ROW = {
    **{
        f"liger-op-0{number}-swiglu-liger": "retain_graph holds the gate and the up projection that the kernel writes over; "
        "memfit frees them with their gradients"
        for number in range(402, 406)
    },
    "bart-base amp": _MASK_OF_ONES,
    "bart-base fp32 nodrop": _MASK_OF_ONES,
    "litgpt-hub-27-llama-3.2-1b-full": _NO_STATES.format("9.9"),
    "litgpt-hub-30-llama-3.2-3b-full": _NO_STATES.format("25.7"),
    "litgpt-hub-43-phi-3-full": _NO_STATES.format("30.6"),
    "litgpt-hub-50-tiny-llama-full": "LitGPT's own attention and loss code; not known in detail",
    "hf-qwen3-8b-bf16-in6144": _AFTER_DECODE,
    "hf-qwen3-8b-bf16-in30720": _AFTER_DECODE,
    "hf-qwen3-4b-awq-int4-in30720": _AFTER_DECODE,
    "hf-qwen2.5-3b-instruct-awq-in1": "nearly the size of an output head of its own (0.58 GiB), which the config ties",
}
"""The reason for single rows; it goes before the group's."""


def reason_for(group: str, row: Row) -> str:
    """The reason for a row's difference; empty where none is known, or where none is needed."""
    if abs(row.error_percent) < WORTH_A_REASON_PERCENT:
        return ""
    if row.id in BY_ROW and not group.endswith(("device", "steady")):
        return BY_ROW[row.id]
    return BY_GROUP.get(group, "")
