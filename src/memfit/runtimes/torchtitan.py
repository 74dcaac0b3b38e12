"""torchtitan: its own models and loop over torch's FSDP2."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime

TORCHTITAN = Runtime(
    name="torchtitan",
    version="0.2.2",
    description="torchtitan's own Llama and Qwen 3 in its loop: weights in fp32, each unit cast while it runs (FSDP2)",
    outputs="dropped",
    adamw="adamw-fused",
    kernels="torchtitan",
    kernel_sets=("torchtitan", "compile"),
    mixed="fsdp2",
    sharding="fsdp2",
    shards=3,
    sequence_parallel=True,
    split_logits=True,
    separate_units=True,
    methods=("train", "full", "freeze"),
    only=(
        ("loss", ("eager",)),
        ("attention", ("sdpa",)),
        ("checkpointing", ("none", "full", "every", "selective")),
        ("optimizer", ("adamw", "adamw-fused", "adamw-foreach", "adamw-loop")),
        ("padding", ("none",)),
        ("optimizer_in_backward", ("False",)),
    ),
    spelling=(
        ("selective-checkpointing", ("--activation_checkpoint.mode selective", "--activation_checkpoint.selective_ac_option op")),
        ("checkpointing", ("--activation_checkpoint.mode full",)),
        ("micro-batch", ("--training.local_batch_size {batch}",)),
        ("bf16-true", ("--training.dtype bfloat16",)),
        ("adamw-fused", ("--optimizer.implementation fused",)),
    ),
    early_stop=False,
    advice="its configs of large models set --checkpointing selective",
    since=(0, 2, 2),
    source=(
        "pytorch/torchtitan v0.2.2 train.py deletes the logits before backward; OptimizersContainer's implementation is fused; "
        "distributed/fsdp.py always installs MixedPrecisionPolicy(param bf16, reduce fp32), on one device since the August 2026 "
        "sources (v0.2.2 takes autocast there)"
    ),
)

TORCHTITAN_0_1 = TORCHTITAN._replace(
    version="0.2.1",
    repeated_heads=True,
    since=(0, 1),
    source="pytorch/torchtitan v0.1.0 to v0.2.1 models/llama3/model/model.py: repeat_kv before sdpa; v0.2.2 has enable_gqa",
)

TORCHTITAN_0_0 = TORCHTITAN_0_1._replace(
    version="0.0.2",
    compiles_loss=False,
    separate_units=False,
    since=(0,),
    source=(
        "pytorch/torchtitan at 9dec370 (December 2024) train.py leaves the loss out of torch.compile; "
        "torchtitan/parallelisms/parallelize_llama.py: embedding, norm and head belong to the root unit; models/llama/model.py: "
        "repeat_kv before sdpa"
    ),
)
