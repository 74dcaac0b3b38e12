"""The whole question, frozen: a model, what is done with it, with which software, on what.

Every input is a field declared with `option(...)`; everything else in memfit is job -> job or job -> answer.
A field whose default is `None` means "decided from the rest": whoever decides it lists the decision as an assumption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.options import Options, option
from memfit.records import Record

if TYPE_CHECKING:
    from memfit.devices import Cluster
    from memfit.model import Model

# One declaration of a field reads better in few lines.
# fmt: off
PRECISIONS = ("bf16-true", "bf16-mixed", "fp16-true", "fp16-mixed", "32-true")
DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused", "adamw-loop", "adamw-8bit", "paged-adamw-8bit", "sgd", "sgd-momentum",
              "adafactor", "lion", "muon", "adam-mini", "galore", "apollo", "sophia", "adagrad", "rmsprop")


class Training(Options):
    """Full training: every parameter is trained."""

    kind = "train"

    batch: int = option(1, "Micro-batch per data-parallel rank", kind="tokens", minimum=1, maximum=1 << 24, unit="sequences",
        group="workload", aliases=("per-device-train-batch-size", "micro-batch", "micro-batch-size", "batch-size"))
    seq: int | None = option(None, "Longest sequence of the run", kind="tokens", minimum=1, maximum=1 << 27, unit="tokens",
        group="workload", aliases=("seq-len", "seq-length", "max-seq-length", "sequence-length", "max-length"))
    target_seq: int | None = option(None, "Longest target of an encoder-decoder", kind="tokens", minimum=1, maximum=1 << 27,
        unit="tokens", group="workload", aliases=("max-target-length",))
    padding: str = option("none", "What fills batches: padding or packed sequences; with sdpa both switch the attention kernel",
        kind="choice", choices=("none", "right", "packed"), group="workload",
        choice_aliases={"packing": "packed", "varlen": "packed"})
    grad_accum: int = option(1, "Micro-batches per optimizer step", kind="tokens", minimum=1, maximum=1 << 20,
        unit="micro-batches",
        group="workload", aliases=("gradient-accumulation-steps", "grad-accumulation"))
    precision: str | None = option(None, "Compute precision: true = weights in it, mixed = autocast over --weight-dtype",
        kind="choice", choices=PRECISIONS, group="precision",
        choice_aliases={"bf16": "bf16-true", "fp16": "fp16-true", "fp32": "32-true", "32": "32-true", "float32": "32-true",
                        "bfloat16": "bf16-true", "float16": "fp16-true", "amp": "bf16-mixed", "16-mixed": "fp16-mixed",
                        "no": "32-true"})
    weight_dtype: str | None = option(None, "Storage format of the weights under a mixed precision", kind="choice",
        choices=DTYPES,
        group="precision", aliases=("param-dtype", "torch-dtype"),
        choice_aliases={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"})
    optimizer: str = option("adamw", "Optimizer; galore:rank=64 for a rank, custom:states=2,bytes=4 for any other", kind="choice",
        choices=OPTIMIZERS, patterns=("galore:", "apollo:", "custom:"), group="optimizer", aliases=("optim",),
        choice_aliases={"adamw_torch": "adamw-foreach", "adamw_torch_fused": "adamw-fused", "adamw_8bit": "adamw-8bit",
                        "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit", "adam": "adamw",
                        "adam-8bit": "adamw-8bit", "paged-adam-8bit": "paged-adamw-8bit", "sgdm": "sgd-momentum",
                        "galore_adamw": "galore", "apollo_adamw": "apollo", "adam_mini": "adam-mini", "sophiag": "sophia"})
    attention: str = option("sdpa", "Attention implementation", kind="choice", choices=("flash", "sdpa", "eager"),
        group="kernels", aliases=("attn", "attn-implementation"),
        choice_aliases={"flash_attention_2": "flash", "flash-attention-2": "flash", "fa2": "flash", "flash_attention_3": "flash"})
    mixer_kernels: str = option("torch", "State spaces and gated delta rules: transformers' own torch code, or fused kernels",
        kind="choice", choices=("torch", "fused"), group="kernels", aliases=("scan",),
        choice_aliases={"mamba-ssm": "fused", "fla": "fused"})
    checkpointing: str = option("none", "Activation checkpointing of every layer (full), of all but listed operations "
        "(selective), with inputs on the host (offloaded); every:2 each second layer, first:8 the first 8, group:4 four at once",
        kind="choice", choices=("none", "full", "selective", "offloaded"), patterns=("every:", "first:", "group:", "selective:"),
        group="activations", aliases=("gradient-checkpointing", "activation-checkpointing", "recompute"),
        choice_aliases={"true": "full", "false": "none", "off": "none", "on": "full", "unsloth": "offloaded",
                        "offload": "offloaded", "uniform:": "group:", "block:": "first:"})
    kernels: str | None = option(None, "Kernel set: eager modules, Liger's in their place, torch.compile, or a runtime's own: "
        "torchtitan, te or megatron (with Transformer Engine or without), unsloth", kind="choice",
        choices=("eager", "liger", "compile", "torchtitan", "te", "megatron", "unsloth"), group="kernels",
        choice_aliases={"hf": "eager", "liger-kernel": "liger", "torch.compile": "compile", "inductor": "compile",
                        "transformer-engine": "te", "transformer_engine": "te", "local": "megatron"})
    loss: str | None = option(None, "Loss: eager (logits upcast to fp32); chunked with the head, or over chunks of whole logits "
        "(chunked-output); fused with the head (Liger); cut (cut cross-entropy)",
        kind="choice", choices=("eager", "chunked", "chunked-output", "fused", "cut"), group="activations",
        choice_aliases={"liger": "fused", "chunked-fused": "fused", "cce": "cut", "cut-cross-entropy": "cut"})
    loss_chunks: int = option(8, "Chunks of the tokens in a chunked loss (torchtune's num_output_chunks)", kind="tokens",
        minimum=1, maximum=1024, group="activations", unit="chunks", aliases=("num-output-chunks",))
    loss_upcast: bool | None = option(None, "Whether the loss is computed on an fp32 copy of the logits, in place of what the "
        "class does", kind="flag", group="activations")
    outputs: str | None = option(None, "Whether the loop still holds the model's outputs (logits) during backward", kind="choice",
        choices=("kept", "dropped"), group="activations")
    use_cache: str | None = option(None, "Whether forward builds a key-value cache (config.use_cache); checkpointing prevents it",
        kind="choice", choices=("on", "off"), group="activations", choice_aliases={"true": "on", "false": "off"})
    clip_grad: float | None = option(None, "Clip the gradients to this global norm before the step (torch: in place)",
        kind="number", minimum=0, group="optimizer", aliases=("max-grad-norm", "gradient-clipping", "clip-grad-norm"))
    optimizer_in_backward: bool = option(False, "Step each parameter as soon as its gradient is there, and free the gradient",
        kind="flag", group="optimizer", aliases=("optimizer-in-bwd", "fused-backward-pass"))
    ema: str = option("none", "A moving average of the weights, on the device or in host memory", kind="choice",
        choices=("none", "device", "host"), group="optimizer", aliases=("use-ema",),
        choice_aliases={"true": "device", "false": "none", "on": "device", "off": "none", "cpu": "host"})
    ema_dtype: str | None = option(None, "Format of the moving average; that of the weights if not said", kind="choice",
        choices=DTYPES, group="optimizer", choice_aliases={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"})
    ddp: str | None = option(None, "DistributedDataParallel's buckets: copies of all gradients, or the gradients themselves "
        "(gradient_as_bucket_view=True)", kind="choice", choices=("none", "copies", "views"), group="optimizer")
    zero_grad: str = option("none", "Gradients between steps: freed (none) or kept as zeros", kind="choice",
        choices=("none", "zeros"), group="optimizer", choice_aliases={"set-to-none": "none"})
    dropout: float | None = option(None, "Dropout probability everywhere, in place of the config's", kind="fraction", minimum=0,
        group="activations")
    eval_batch: int | None = option(None, "Evaluate between steps with batches of this size (the Trainer's loop)", kind="tokens",
        minimum=1, maximum=1 << 24, unit="sequences", group="workload", aliases=("per-device-eval-batch-size",))
    eval_rows: int | None = option(None, "Rows whose logits the evaluation collects on the device (compute_metrics); none if not "
        "given", kind="tokens", minimum=1, maximum=1 << 32, unit="sequences", group="workload")
    eval_accumulation: int | None = option(None, "Evaluation batches after which what was collected goes to the host",
        kind="tokens", minimum=1, maximum=1 << 24, unit="batches", group="workload", aliases=("eval-accumulation-steps",))


class FineTuning(Training):
    """Training of some parameters, or of adapters beside frozen ones."""

    kind = "finetune"

    method: str = option("lora", "What is trained: everything, adapters (over a 4-bit base: qlora), a prompt, a prefix "
        "of keys and values, or what --unfreeze names", kind="choice", choices=("full", "lora", "qlora", "dora", "ia3", "prompt",
        "prefix", "freeze"), group="adapters",
        choice_aliases={"prompt-tuning": "prompt", "prefix-tuning": "prefix", "(ia)3": "ia3", "rslora": "lora"})
    lora_rank: int = option(16, "Rank of the adapters", kind="tokens", minimum=1, maximum=1 << 14, group="adapters",
        aliases=("lora-r", "rank", "lora-dim"))
    lora_targets: str = option("all-linear", "Modules with adapters: all-linear or names such as q_proj,v_proj; embed_tokens and "
        "lm_head where named", kind="text", group="adapters", aliases=("target-modules", "lora-target-modules"))
    lora_dtype: str = option("fp32", "Format of the adapters (PEFT keeps them in fp32 over 16-bit weights)", kind="choice",
        choices=DTYPES, group="adapters")
    lora_dropout: float = option(0.0, "Dropout on the adapters' input", kind="fraction", minimum=0, group="adapters")
    use_dora: bool = option(False, "DoRA: a magnitude for every output beside the adapters (also over a 4-bit base)", kind="flag",
        group="adapters")
    use_rslora: bool = option(False, "Scaling of the adapters as in rsLoRA: the same memory", kind="flag", group="adapters")
    lora_bias: str = option("none", "Biases that are trained beside adapters: all, or those of the targeted modules",
        kind="choice", choices=("none", "all", "lora_only"), group="adapters", choice_aliases={"lora-only": "lora_only"})
    modules_to_save: str = option("", "Modules of which a copy is trained in full beside adapters, such as embed_tokens,lm_head",
        kind="text", group="adapters")
    freeze: str = option("", "What is not trained: all, embedding, layers, layers:N (the first N), head, norm, bias, linear, or "
        "module names", kind="text", group="adapters")
    unfreeze: str = option("", "What is trained all the same, in the same words (bias: BitFit; embedding,norm: LongLoRA)",
        kind="text", group="adapters", aliases=("trainable-params",))
    virtual_tokens: int = option(20, "Prompt and prefix tuning: trained tokens, or their keys and values, before each sequence",
        kind="tokens", minimum=1, maximum=1 << 20, unit="tokens", group="adapters", aliases=("num-virtual-tokens",))
    prefix_projection: bool = option(False, "Prefix tuning: two layers make the keys and values from a small table",
        kind="flag", group="adapters")
    prefix_hidden: int | None = option(None, "Inner width of that projection; the keys' width of a layer if not said",
        kind="tokens", minimum=1, maximum=1 << 20, group="adapters", aliases=("encoder-hidden-size",))
    kbit_prep: str | None = option(None, "QLoRA: what is kept in fp32 beside the 4-bit layers: none; full, as "
        "prepare_model_for_kbit_training makes it; norms only, after TRL cast embedding and head back", kind="choice",
        choices=("none", "full", "norms"), group="adapters", aliases=("prepare-kbit",),
        choice_aliases={"true": "full", "false": "none"})
    quantizer: str | None = option(None, "Library of the 4-bit products; releases before bitsandbytes@0.43.2 keep the input of "
        "each", kind="choice", versioned="0.43.2", choices=("bitsandbytes",), group="adapters",
        choice_aliases={"bnb": "bitsandbytes"})
    double_quant: bool = option(True, "QLoRA: quantise the scales as well (bnb_4bit_use_double_quant)", kind="flag",
        group="adapters",
        aliases=("bnb-4bit-use-double-quant",))


class Inference(Options):
    """Serving or batch generation."""

    kind = "infer"

    context: int | None = option(None, "Prompt and generated tokens of one sequence together", kind="tokens", minimum=1,
        maximum=1 << 27, unit="tokens", group="workload", aliases=("max-model-len", "ctx-size", "context-length", "seq"))
    prompt: int | None = option(None, "Tokens of the prompt (of an encoder-decoder: of the source)", kind="tokens", minimum=1,
        maximum=1 << 27,
        unit="tokens", group="workload", aliases=("prompt-length", "prefill"))
    prefill_chunk: int | None = option(None, "Tokens of the prompt that prefill processes at once; all of them if not given",
        kind="tokens", minimum=1, maximum=1 << 27, unit="tokens", group="workload",
        aliases=("prefill-chunk-size", "max-num-batched-tokens", "chunked-prefill-size"))
    target_seq: int | None = option(None, "Longest output of an encoder-decoder", kind="tokens", minimum=1, maximum=1 << 27,
        unit="tokens", group="workload", aliases=("max-target-length",))
    concurrency: int = option(1, "Sequences served at the same time", kind="tokens", minimum=1, maximum=1 << 24, unit="sequences",
        group="workload", aliases=("max-num-seqs", "batch", "parallel"))
    weight_dtype: str | None = option(None, "Format in which unquantised weights are loaded", kind="choice", choices=DTYPES,
        group="precision", aliases=("dtype", "torch-dtype", "precision"),
        choice_aliases={"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "bf16-true": "bf16",
                        "fp16-true": "fp16", "32-true": "fp32", "32": "fp32", "16": "bf16"})
    quantization: str | None = option(None, "Format of the linear layers' weights; the rest keeps --weight-dtype", kind="choice",
        choices=("none", "int8", "fp8", "int4", "mxfp4", "nf4", "nf4-dq"), group="precision", aliases=("weights", "quant"),
        choice_aliases={"8": "int8", "8bit": "int8", "8-bit": "int8", "bnb-8bit": "int8", "4": "int4", "4bit": "int4",
        "4-bit": "int4",
                        "awq": "int4", "gptq": "int4", "bnb-4bit": "nf4", "bitsandbytes": "nf4", "16": "none", "16bit": "none",
                        "bf16": "none", "fp16": "none"})
    kv_dtype: str | None = option(None, "Format of the KV cache", kind="choice", choices=("fp32", "bf16", "fp16", "fp8",
        "int8", "int4"),
        group="cache", aliases=("kv-cache-dtype", "cache-type-k"),
        choice_aliases={"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "8": "int8", "4": "int4", "16": "bf16",
                        "bfloat16": "bf16", "float16": "fp16"})
    cache: str = option("dynamic", "KV cache that grows by concatenation, or buffers for the whole context", kind="choice",
        choices=("dynamic", "static"), group="cache", aliases=("cache-implementation",))
    attention: str = option("sdpa", "Attention implementation", kind="choice", choices=("flash", "sdpa", "eager"),
        group="kernels", aliases=("attn", "attn-implementation"), choice_aliases={"flash_attention_2": "flash", "fa2": "flash"})
    mixer_kernels: str = option("torch", "State spaces and gated delta rules: transformers' own torch code, or fused kernels",
        kind="choice", choices=("torch", "fused"), group="kernels", aliases=("scan",),
        choice_aliases={"mamba-ssm": "fused", "fla": "fused"})
    logits: str = option("last", "Positions of the prompt whose logits are computed", kind="choice", choices=("last", "all"),
        group="activations")


Workload = Training | FineTuning | Inference
WORKLOADS: dict[str, type[Training] | type[FineTuning] | type[Inference]] = {
    "train": Training,
    "finetune": FineTuning,
    "infer": Inference,
}


class Hardware(Options):
    """Where the job runs, and how much of the memory is to stay free."""

    on: str | None = option(None, "Devices: 4090, 8xh100-80gb, 2x8xh200, v5p-16, m4-max-64, or a size such as 24GiB", kind="text",
        group="hardware", aliases=("device", "devices", "gpu", "hardware", "accelerator"))
    headroom: float = option(0.1, "Share of the usable memory that is to stay free", kind="fraction", minimum=0, maximum=0.9,
        group="hardware")


class Parallelism(Options):
    """How the work is spread over devices. `None`: decided from the devices, the runtime and the other degrees."""

    tp: int | None = option(None, "Tensor parallelism: devices that share each layer's matrices and heads", kind="tokens",
        minimum=1, maximum=1 << 16, unit="devices", group="parallelism",
        aliases=("tensor-parallel-size", "tensor-model-parallel-size", "tensor-parallel"))
    sp: bool | None = option(None, "Sequence parallelism beside --tp: norms, residuals and dropouts are split along the sequence",
        kind="flag", group="parallelism", aliases=("sequence-parallel",))
    pp: int | None = option(None, "Pipeline parallelism: stages that hold a part of the layers each", kind="tokens", minimum=1,
        maximum=1 << 16, unit="stages", group="parallelism",
        aliases=("pipeline-parallel-size", "pipeline-model-parallel-size", "pipeline-parallel"))
    schedule: str = option("1f1b", "Order in which pipeline stages run micro-batches forward and backward", kind="choice",
        choices=("1f1b", "interleaved", "gpipe", "zero-bubble"), group="parallelism", aliases=("pipeline-parallel-schedule",),
        choice_aliases={"interleaved1f1b": "interleaved", "interleaved-1f1b": "interleaved", "zb": "zero-bubble"})
    virtual_stages: int = option(1, "Model chunks of each pipeline stage (interleaved schedule)", kind="tokens", minimum=1,
        maximum=1 << 12, unit="chunks", group="parallelism", aliases=("virtual-pipeline-model-parallel-size",))
    stage_layers: str | None = option(None, "Layers of each pipeline stage: weighted (embedding and head count as a layer each), "
        "even, or the numbers: 15,16x6,15", kind="text", group="parallelism", aliases=("pipeline-layers",))
    cp: int | None = option(None, "Context parallelism: devices that share the tokens of each sequence", kind="tokens", minimum=1,
        maximum=1 << 16, unit="devices", group="parallelism",
        aliases=("context-parallel-size", "context-parallel-degree"))
    ep: int | None = option(None, "Expert parallelism: devices, among the data-parallel ones, that share the experts",
        kind="tokens", minimum=1, maximum=1 << 16, unit="devices", group="parallelism",
        aliases=("expert-parallel-size", "expert-model-parallel-size", "expert-parallel"))
    dp_replicate: int | None = option(None, "Replicas that are kept equal (DDP; the outer degree of HSDP)", kind="tokens",
        minimum=1, maximum=1 << 20, unit="replicas", group="parallelism",
        aliases=("data-parallel-size", "data-parallel-replicate-degree", "dp"))
    dp_shard: int | None = option(None, "Devices over which ZeRO or FSDP splits the states; all that are left if not given",
        kind="tokens", minimum=1, maximum=1 << 20, unit="devices", group="parallelism",
        aliases=("data-parallel-shard-degree", "fsdp-size"))
    zero: int | None = option(None, "ZeRO stage: 1 splits optimizer states, 2 gradients as well, 3 weights as well",
        kind="tokens", minimum=0, maximum=3, group="parallelism", aliases=("zero-stage",))
    fsdp: bool = option(False, "Fully sharded data parallelism: --zero 3 as torch does it", kind="flag", group="parallelism",
        aliases=("fully-shard",))
    sharding: str | None = option(None, "Whose sharding it is: FSDP2 (fully_shard), FSDP1, DeepSpeed's ZeRO, Megatron's "
        "distributed optimizer", kind="choice", choices=("fsdp2", "fsdp1", "deepspeed", "megatron"), group="parallelism",
        aliases=("fsdp-version",), choice_aliases={"1": "fsdp1", "2": "fsdp2"})
    offload: str = option("none", "What waits in host memory between its uses: optimizer (states and their update), params "
        "(sharded weights as well)", kind="choice", choices=("none", "optimizer", "params"), group="parallelism",
        aliases=("cpu-offload",), choice_aliases={"true": "params", "false": "none", "cpu": "optimizer"})
    zero_init: bool = option(True, "DeepSpeed's ZeRO-3: the model is built under zero.Init (TrainingArguments come first); "
        "otherwise its linear layers keep gathered weights for backward", kind="flag", group="parallelism")


ALL_OPEN = Parallelism()
"""Nothing said of it: on one device there is nothing to decide."""


class Overheads(Options):
    """What the software takes beside the tensors. `None`: from the runtime's and the device's own facts."""

    runtime: str | None = option(None, "Software that runs the job: hf (raw loop), hf-trainer, torch, torchtitan, megatron, "
        "unsloth; with a release: hf@4.57",
        kind="choice", versioned="4.57", choices=("hf", "hf-trainer", "torch", "torchtitan", "megatron", "unsloth"),
        group="runtime",
        choice_aliases={"transformers": "hf", "trainer": "hf-trainer", "pytorch": "torch", "titan": "torchtitan",
                        "megatron-lm": "megatron", "megatron-core": "megatron", "nemo": "megatron"})
    communication: int | None = option(None, "Memory that NCCL takes on each device for its communicators", kind="size",
        minimum=0, group="overhead", unit="bytes", aliases=("nccl",))
    cuda_context: int | None = option(None, "Memory that the driver's context takes on each device", kind="size", minimum=0,
        group="overhead", unit="bytes", aliases=("context-memory",))
    workspace: int | None = option(None, "Library workspaces (cuBLAS) inside the allocator", kind="size", minimum=0,
        group="overhead",
        unit="bytes")
    fragmentation: int | None = option(None, "Memory that the allocator reserves beyond what tensors use at the peak",
        kind="size",
        minimum=0, group="overhead", unit="bytes")


class Dimensions(Options):
    """A model by its size or its dimensions, when there is no config."""

    params: int | None = option(None, "Number of parameters", kind="count", minimum=1, group="model", unit="parameters",
        aliases=("parameters",))
    layers: int | None = option(None, "Number of layers", kind="tokens", minimum=1, maximum=1 << 16, group="model",
        aliases=("num-hidden-layers", "n-layer"))
    hidden: int | None = option(None, "Hidden size", kind="tokens", minimum=1, maximum=1 << 24, group="model",
        aliases=("hidden-size", "n-embd", "d-model"))
    heads: int | None = option(None, "Attention heads", kind="tokens", minimum=1, maximum=1 << 20, group="model",
        aliases=("num-attention-heads", "n-head"))
    kv_heads: int | None = option(None, "Key-value heads", kind="tokens", minimum=1, maximum=1 << 20, group="model",
        aliases=("num-key-value-heads",))
    kv_ratio: float | None = option(None, "Key-value heads as a share of the attention heads", kind="number", minimum=0,
        maximum=1,
        group="model")
    ffn: int | None = option(None, "Width of the feed-forward layer", kind="tokens", minimum=1, maximum=1 << 26, group="model",
        aliases=("intermediate-size", "ffn-dim"))
    vocab: int | None = option(None, "Vocabulary size", kind="tokens", minimum=1, maximum=1 << 28, group="model",
        aliases=("vocab-size",))
    kind: str | None = option(None, "Causal decoder or bidirectional encoder", kind="choice", choices=("decoder", "encoder"),
        group="model")
    gated: bool | None = option(None, "Gated feed-forward (three matrices) instead of two", kind="flag", group="model")
    activation_elements: int | None = option(None, "Elements kept for backward per sequence, when only counts are known",
        kind="count",
        minimum=1, group="model", unit="elements")
    image: int | None = option(None, "Side of the images in pixels, in place of the config's", kind="tokens", minimum=1,
        maximum=1 << 16, group="model", unit="pixels", aliases=("image-size", "resolution"))
    head: str | None = option(None, "Class of the model with its head, in place of the config's architectures", kind="text",
        group="model")


class Assumption(Record):
    """A value that the input did not give: what was taken, why, and the flag that changes it."""

    name: str
    value: Any
    why: str
    flag: str | None = None


class Job(Record):
    """One question. `cluster` is `None` when no device was given: then there is no verdict."""

    model: Model
    workload: Workload
    overheads: Overheads = Overheads()
    cluster: Cluster | None = None
    headroom: float = 0.1
    parallelism: Parallelism = ALL_OPEN
