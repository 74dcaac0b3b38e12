"""Unsloth: adapters over frozen weights in its own autograd functions, under TRL's trainer."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime

UNSLOTH = Runtime(
    name="unsloth",
    lacks=("tp", "pp", "cp", "ep", "zero"),
    version="2026.8",
    description="Unsloth's FastLanguageModel with adapters, under TRL's SFTTrainer",
    outputs="dropped",
    adamw="adamw-fused",
    full_embedding_states=True,
    trainer=True,
    kernels="unsloth",
    kernel_sets=("unsloth",),
    methods=("lora", "qlora"),
    only=(
        ("precision", ("bf16-true", "fp16-true")),
        ("loss", ("fused", "eager")),
        ("attention", ("sdpa", "flash")),
        ("checkpointing", ("none", "full", "offloaded")),
    ),
    spelling=(("checkpointing", ("use_gradient_checkpointing=True",)),),
    advice='its examples set use_gradient_checkpointing="unsloth": --checkpointing offloaded',
    ignores_padding=True,
    source=(
        "unslothai/unsloth models/llama.py: LlamaModel_fast_forward drops the mask in training, CausalLM_fast_forward returns no "
        "logits; unsloth-zoo training_utils.py keeps adapters in fp32"
    ),
)
