"""What is known of a runtime; every runtime's file fills one record."""

from __future__ import annotations

from typing import NamedTuple


class Runtime(NamedTuple):
    """Habits that decide memory. Versions are those whose behaviour the facts describe."""

    name: str
    version: str
    description: str
    outputs: str
    """kept | dropped: whether the loop still holds the model's outputs during backward."""
    adamw: str
    """Which implementation `adamw` means."""
    source: str
    inference: str = "transformers models under generate()"
    """How it runs a model that is not trained."""
    full_embedding_states: bool = False
    """Block-wise optimizers keep 32-bit states for embeddings."""
    trainer: bool = False
    """Whether TrainingArguments configure it, or the user's own loop."""
    kernels: str = "eager"
    """The kernel set that it brings: see memfit/kernels/sets.py."""
    kernel_sets: tuple[str, ...] = ("eager", "liger", "compile")
    """The kernel sets that it can run with, by the name of --kernels."""
    mixed: str = "autocast"
    """What a mixed precision is to it: a name of `memfit.precision.MIXED_SCHEMES`."""
    methods: tuple[str, ...] = ()
    """What it is counted for: train, or methods of fine-tuning; empty: all, and inference."""
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fields of a workload for which it has only some values, or kinds of values (`group` is one of group:4)."""
    spelling: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """How it spells changes, by the lever's name, where not as PyTorch does; fields of the workload stand in braces."""
    compiles_loss: bool = True
    """torch.compile takes the loss as well, not only the layers."""
    repeated_heads: bool = False
    """Its model code repeats keys and values for their query heads before attention."""
    early_stop: bool = True
    """A checkpoint that runs again stops when the last tensor that backward needs is there (torch's default)."""
    gradient_buffer: bool = False
    """Gradients live in a buffer all the time."""
    selective: str = ""
    """What `--checkpointing selective` means to it; empty: the list of operations that torchtitan keeps."""
    advice: str = ""
    """What its own examples set and the job has not said, for the assumption on checkpointing."""
    batch_tensors: tuple[tuple[int, int], ...] = ()
    """What a batch has on the device beside ids and labels: an axis of `memfit.model`, and bytes for each unit of it."""
    ignores_padding: bool = False
    """Its training loop drops the padding mask: padded tokens are computed as all others."""
    use_cache: str = "off"
    """on | off: whether a training loop leaves config.use_cache on where the job does not say."""
    shifted_logits: bool = False
    """The causal loss copies the upcast logits without their last position, instead of shifting the labels."""
    mask_without_cache: bool = False
    """sdpa gets a mask whenever the caller passes none and there is no cache object."""
    own_masks: tuple[str, ...] = ()
    """Families whose modelling code makes its masks itself, so that `mask_without_cache` does not hold for them."""
    causal_buffers: tuple[str, ...] = ()
    """Families whose layers each have a triangle of booleans over all positions as a buffer: L P^2 bytes."""
    uncached: tuple[str, ...] = ()
    """Families that build no cache object in training, whatever config.use_cache says."""
    no_sdpa: tuple[str, ...] = ()
    """Families that have no sdpa attention yet and run eager."""
    cache_format: str = "own"
    """The format of the values that a cache object holds: their own, or that of the keys."""
    kbit_prep: str = "none"
    """What its own programs make of a model that is loaded in 4 bits: none | full | norms (see --kbit-prep)."""
    shards: int = 0
    """The ZeRO stage that it takes over several devices where no degree is given; 0: replicas (DDP)."""
    lacks: tuple[str, ...] = ()
    """Kinds of parallelism (tp, pp, cp, ep, zero) and pipeline schedules that it does not have."""
    sharding: str = ""
    """Whose sharding it brings: fsdp2 | fsdp1 | deepspeed | megatron; empty: torch's for --fsdp, DeepSpeed's for --zero."""
    separate_units: bool = False
    """Embedding and head are gathered as units of their own under FSDP2, instead of with what else is not in a layer."""
    sequence_parallel: bool = False
    """Whether tensor parallelism brings sequence parallelism with it."""
    pipeline: str = "torch"
    """How it runs pipeline stages: see memfit/runtimes/pipelines.py."""
    context_parallel: str = "allgather"
    """How attention gets the keys of others under --cp: see memfit/kernels/ring.py."""
    collectives: str = "functional"
    """functional | in-place: whether what devices of a tensor-parallel group exchange in training becomes new tensors."""
    regathers: bool = False
    """With sequence parallelism, products keep this device's tokens and gather the others once more in backward."""
    split_logits: bool = False
    """The loss works on each device's part of the vocabulary; otherwise logits are gathered."""
    vocabulary_multiple: int = 1
    """Rows of embedding and head on each device of a tensor-parallel group are a multiple of it."""
    whole_embedding: bool = False
    """Tensor parallelism leaves the embedding on every device, unless the head shares it."""
    since: tuple[int, ...] = (0,)
    """The first release that behaves like this."""
    looked_at: tuple[int, ...] = ()
    """The first release that was looked at, where earlier ones are counted like it."""
