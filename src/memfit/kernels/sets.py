"""Kernel sets: which implementations stand in for Hugging Face's eager ones, for which families, and what comes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from memfit.kernels.tape import Tensor
from memfit.model.description import Op

Kernels = Mapping[str, Callable[..., Sequence[Tensor]]]


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
KERNEL_SETS = {one.name: one for one in (EAGER, LIGER, COMPILE)}
"""Kernel sets by the name that `--kernels` takes."""


def kernels_of(name: str) -> Kernels:
    """What a set puts in the place of eager implementations, by kind of operation."""
    library = KERNEL_SETS[name].library
    found: Kernels = import_module(f"memfit.kernels.{library}").KERNELS if library else {}
    return found


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
