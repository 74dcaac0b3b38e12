"""Kernel sets: which implementations stand in for Hugging Face's eager ones, for which families, and what comes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from memfit.kernels.tape import Tensor
from memfit.model.description import Op

Kernels = Mapping[str, Callable[..., Sequence[Tensor]]]


Rewriter = Callable[..., list[Op]]
"""(context, operations) -> as many operations, some of which make the values of others, which make none."""


class KernelSet(NamedTuple):
    """One row: `library` is the module of this package whose `KERNELS` replace the eager ones by kind of operation."""

    name: str
    description: str
    library: str = ""
    families: tuple[str, ...] | None = None
    """Families that it has kernels for; `None`: all."""
    loss: str = "eager"
    """What `--loss` means where the job does not say."""
    plain_loss: tuple[str, ...] = ()
    """Families whose loss it does not fuse with the head, but computes in place."""
    gated: tuple[str, ...] = ()
    """Activation functions whose product with another tensor is one function."""
    rotary_in_place: bool = False
    """q and k stay where the projection put them, token by token, also where eager joins the parts of a partial rotary."""
    widths: tuple[int, int] | None = None
    """Percent below and above that kept activations and logits may be, where no run has been compared."""
    apart: tuple[str, ...] = ()
    """Families whose norms do not write their gradient over that of their output."""
    logits: str = ""
    """What its own form of the eager loss makes of the logits, in the words of the formula."""
    why_loss: str = ""
    """What the answer says of its own form of a loss that it brings."""
    attention: tuple[tuple[str, str], ...] = ()
    """Its own attention in place of an implementation: ("sdpa", "flash") where it always takes FlashAttention."""
    why_attention: str = ""
    """What the answer says of it."""
    chunk_bytes: int = 0
    """A fused loss takes the tokens in chunks of at most so many bytes of fp32 logits, the number of chunks a multiple of 4."""
    weight_buffer: bool = False
    """A buffer into which forward expands 4-bit weights one after the other is there all the time."""
    copies_below: tuple[int, int] | None = None
    """On devices below this compute capability its fused attention is FlashAttention, which orders dimensions otherwise: queries,
    keys, values and the result are copied."""
    compared: str = ""
    """What it was compared with, where that is not the corpus."""
    table_buffer: bool = False
    """Rotary tables are a buffer of complex numbers or of cosines and sines, not made anew in each forward pass."""
    score_buffer: bool = False
    """Eager attention's product has a buffer of its result's size that is there all the time."""
    gradient_placeholders: bool = False
    """Products with weights add their gradient to the buffer of all gradients; what autograd gets in its place is one tensor in
    the compute format for each shape of a weight, which is always there."""
    packs: bool = True
    """Its attention can be told where packed sequences begin."""
    recomputes: tuple[str, ...] = ()
    """Parts of a layer that `--checkpointing selective:...` can name: they run again in backward, all else is kept."""
    source: str = ""


EAGER = KernelSet("eager", "the modules as transformers' Python code runs them, one autograd function after the other")
LIGER = KernelSet(
    name="liger",
    description="Liger's RMSNorm, rotary embedding in place, SwiGLU and GeGLU, and the loss fused with the head",
    library="liger",
    families=("gemma", "gemma2", "gemma3", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"),
    loss="fused",
    plain_loss=("granite",),
    gated=("silu", "swish", "gelu_pytorch_tanh"),
    rotary_in_place=True,
    apart=("gemma2", "gemma3", "olmo2"),
    source=(
        "linkedin/Liger-Kernel 0.8 ops/rms_norm.py, rope.py, swiglu.py, geglu.py, fused_linear_cross_entropy.py, "
        "transformers/monkey_patch.py"
    ),
)
COMPILE = KernelSet(
    name="compile",
    description="torch.compile: fused element-wise kernels, run again in backward; modelled, not measured on a device",
    library="compiled",
    gated=("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "quick_gelu"),
    source="torch 2.13 _functorch/partitioners.py min_cut_rematerialization_partition, as torch.compile calls it",
    widths=(10, 10),
)
TORCHTITAN = KernelSet(
    name="torchtitan",
    description="torchtitan's own modules: torch's fused RMSNorm, rotary embedding of complex numbers in fp32",
    library="torchtitan",
    families=("llama", "qwen3"),
    table_buffer=True,
    widths=(10, 10),
    compared="the same modules under the real FSDP2 on the CPU",
    source=(
        "pytorch/torchtitan v0.2.2 models/llama3/model/model.py, components/loss.py, train.py; "
        "torch 2.13 aten/src/ATen/native/layer_norm.cpp, derivatives.yaml _fused_rms_norm"
    ),
)
_MEGATRON = KernelSet(
    name="megatron",
    description="Megatron's own modules (transformer_impl local): fused norm, bias and activation, and softmax; "
    "unfused core attention",
    library="megatron",
    families=("gpt2", "llama", "mistral", "qwen2", "qwen3"),
    gated=("silu", "swish"),
    attention=(("sdpa", "eager"), ("flash", "flash")),
    why_attention="core attention of local modules, which keeps the probabilities; --kernels te has fused attention",
    table_buffer=True,
    score_buffer=True,
    packs=False,
    logits="their fp32 copies, which become the softmax and its gradient in place",
    why_loss="vocab-parallel cross-entropy: an fp32 copy of the logits becomes the softmax, and that the gradient, in place",
    recomputes=("core_attn",),
    widths=(5, 10),
    compared="five runs of a GPT of 64M parameters in Megatron's own tests",
    source=(
        "NVIDIA/Megatron-LM core/transformer/dot_product_attention.py, core/fusions/fused_softmax.py, fused_bias_gelu.py, "
        "fused_bias_swiglu.py, core/tensor_parallel/cross_entropy.py; Korthikanti et al. 2022 (arXiv:2205.05198)"
    ),
)
TE = _MEGATRON._replace(
    name="te",
    description="Megatron with Transformer Engine: norms fused with the products that follow, fused attention",
    attention=(("sdpa", "flash"),),
    why_attention="Transformer Engine's fused attention: no scores and no dropout mask are kept",
    copies_below=(9, 0),
    score_buffer=False,
    gradient_placeholders=True,
    packs=True,
    source=_MEGATRON.source + "; NVIDIA/TransformerEngine pytorch/module/layernorm_linear.py, base.py get_dummy_wgrad, attention",
)
UNSLOTH = KernelSet(
    name="unsloth",
    description="Unsloth's Triton kernels, and one autograd function for q, k, v, one for the MLP, one for the output "
    "projection, each with its adapters",
    library="unsloth",
    families=("gemma", "llama", "mistral", "qwen2", "qwen3"),
    loss="fused",
    chunk_bytes=4 << 30,
    weight_buffer=True,
    rotary_in_place=True,
    apart=("gemma",),
    attention=(("sdpa", "flash"),),
    why_loss="with the head, in chunks of at most 4 GiB of fp32 logits; gradients are made in forward (unsloth_fused_ce_loss)",
    why_attention="FlashAttention, or what keeps the same: torch's sdpa with grouped heads",
    table_buffer=True,
    widths=(15, 25),
    source=(
        "unslothai/unsloth kernels/fast_lora.py, rms_layernorm.py, rope_embedding.py, models/llama.py; "
        "unslothai/unsloth-zoo fused_losses/cross_entropy_loss.py"
    ),
)
KERNEL_SETS = {one.name: one for one in (EAGER, LIGER, COMPILE, TORCHTITAN, _MEGATRON, TE, UNSLOTH)}
"""Kernel sets by the name that `--kernels` takes."""


def kernels_of(name: str) -> Kernels:
    """What a set puts in the place of eager implementations, by kind of operation."""
    library = KERNEL_SETS[name].library
    found: Kernels = import_module(f"memfit.kernels.{library}").KERNELS if library else {}
    return found


def rewriter_of(name: str) -> Rewriter | None:
    """How a set turns several operations of a block into one function; `None` where it does not."""
    library = KERNEL_SETS[name].library
    return getattr(import_module(f"memfit.kernels.{library}"), "rewritten", None) if library else None


def with_head_of(name: str, loss: str) -> Callable[..., Tensor] | None:
    """The loss that makes the logits itself, the set's own before the general one; `None` where whole logits are made first."""
    from memfit.kernels import losses

    library = KERNEL_SETS[name].library
    own = getattr(import_module(f"memfit.kernels.{library}"), "WITH_HEAD", {}) if library else {}
    return own.get(loss) or losses.WITH_HEAD.get(loss)


def with_gated_products(ops: Sequence[Op], functions: Sequence[str]) -> list[Op]:
    """The operations with `activation(gate) * up` as one: the activation hands its input on, and the product reads both.

    As many operations as before, so that places within the block stay what they are.
    """
    found = list(ops)
    activations = {op.outputs[0].id: index for index, op in enumerate(ops) if op.kind == "activation"}
    for index, op in enumerate(ops):
        places = [activations[one.id] for one in op.inputs if one.id in activations] if op.kind == "multiply" else []
        place = next(iter(places), None)
        if place is not None and ops[place].attributes["function"] in functions:
            found[place] = ops[place]._replace(kind="handed_on")
            found[index] = op._replace(kind="gated_product")
    return found
