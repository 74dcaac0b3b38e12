"""Megatron-LM, with Transformer Engine's modules or its own."""

from __future__ import annotations

from memfit.model.description import PAIR, TOKEN
from memfit.runtimes.facts import Runtime

MEGATRON = Runtime(
    name="megatron",
    version="0.20",
    description="Megatron-LM's GPT on one rank: 16-bit weights, fp32 gradients in one buffer, fp32 main weights and moments",
    outputs="dropped",
    adamw="adamw-fused",
    kernels="te",
    kernel_sets=("te", "megatron"),
    mixed="megatron",
    sharding="megatron",
    lacks=("gpipe", "zero-bubble"),
    collectives="in-place",
    regathers=True,
    split_logits=True,
    vocabulary_multiple=128,
    methods=("train", "full"),
    gradient_buffer=True,
    pipeline="megatron",
    context_parallel="p2p",
    batch_tensors=((TOKEN, 8 + 4), (PAIR, 1)),
    only=(
        ("checkpointing", ("none", "full", "first", "group", "selective:core_attn")),
        ("loss", ("eager",)),
        ("padding", ("none", "packed")),
        ("optimizer_in_backward", ("False",)),
        ("optimizer", ("adamw", "adamw-fused", "sgd", "sgd-momentum")),
    ),
    spelling=(
        ("selective-checkpointing", ("--recompute-granularity selective",)),
        ("checkpointing", ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")),
        ("micro-batch", ("--micro-batch-size {batch}",)),
    ),
    selective="core_attn",
    source=(
        "NVIDIA/Megatron-LM core/distributed/param_and_grad_buffer.py keeps main_grad, core/optimizer/optimizer.py fp32 copies; "
        "transformer_impl is transformer_engine unless local is asked for; FusedAdam has no temporaries; recompute_modules is "
        "core_attn; the loss function gets the loss, not the logits; a batch has position ids, an fp32 loss mask and, unless "
        "--no-create-attention-mask-in-dataloader says otherwise, a mask of booleans"
    ),
)
