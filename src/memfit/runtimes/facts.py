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
    sharding: str = ""
    """Whose sharding it brings: fsdp2 | fsdp1 | deepspeed | megatron; empty: torch's for --fsdp, DeepSpeed's for --zero."""
    sequence_parallel: bool = False
    """Whether tensor parallelism brings sequence parallelism with it."""
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
