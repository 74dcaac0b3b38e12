"""Optimizers: one row each, how many states of which size and what a step needs beside them."""

from __future__ import annotations

from typing import NamedTuple

from memfit.errors import UsageError
from memfit.precision import DTYPE_BYTES

DEFAULT_RANK = 128
"""Of GaLore and APOLLO (transformers trainer_optimizer.py)."""


class Trained(NamedTuple):
    """A trained tensor: elements, bytes of one, and how often it occurs."""

    elements: int
    dtype: str
    repeat: int
    role: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of one."""
        return self.elements * DTYPE_BYTES[self.dtype]


class Optimizer(NamedTuple):
    """States and the scratch of a step. `states`: number of tensors as large as the parameter; `state_bytes` None: its format.

    The scratch is either `foreach_tensors` lists of all parameters at once, or by a rule of `SCRATCH`, or that of the largest
    tensor alone, or none.
    """

    name: str
    states: int
    state_bytes: int | None = None
    blockwise: bool = False
    full_embeddings: bool = False
    """Block-wise, but embeddings keep 32-bit states (the runtime's habit)."""
    paged: bool = False
    foreach_tensors: int = 0
    scratch: str = ""
    """The rule by which a step that goes tensor by tensor needs scratch."""
    rule: str = "dense"
    """What a state is as large as: dense (the parameter), or a rule of `STATES`."""
    rank: int = 0
    """Of the space into which gradients of linear layers are projected."""
    largest_scratch: tuple[int, int] = (0, 0)
    """Bytes per element of the largest tensor that a step needs, for 16-bit and for 32-bit parameters."""
    source: str = ""


_TORCH = "torch/optim/adam.py"
OPTIMIZERS = {
    one.name: one
    for one in (
        Optimizer(
            "adamw-foreach",
            2,
            foreach_tensors=1,
            source=f"{_TORCH} _multi_tensor_adam: exp_avg_sq_sqrt, one list as large as the parameters",
        ),
        Optimizer("adamw-fused", 2, source=f"{_TORCH} _fused_adam: no temporaries"),
        Optimizer("adamw-loop", 2, scratch="loop", source=f"{_TORCH} _single_tensor_adam: root and denominator of one tensor"),
        Optimizer("adamw-8bit", 2, 1, blockwise=True, source="bitsandbytes optim/optimizer.py Optimizer2State, block-wise 8 bit"),
        Optimizer("paged-adamw-8bit", 2, 1, blockwise=True, paged=True, source="bitsandbytes: states in managed memory"),
        Optimizer("sgd", 0, source="torch/optim/sgd.py: updates in place"),
        Optimizer("sgd-momentum", 1, source="torch/optim/sgd.py: one momentum buffer in the parameter's format"),
        Optimizer(
            "adafactor",
            1,
            4,
            rule="factored",
            largest_scratch=(16, 8),
            source="transformers optimization.py Adafactor: fp32 row and column sums; fp32 gradient, parameter and update",
        ),
        Optimizer("lion", 1, largest_scratch=(4, 8), source="lion-pytorch: one momentum; the update is a clone and a sum"),
        Optimizer(
            "muon",
            1,
            rule="muon",
            largest_scratch=(10, 12),
            source="torch/optim/_muon.py for matrices of layers, AdamW for the rest; Newton-Schulz in bf16, one matrix at a time",
        ),
        Optimizer(
            "adam-mini",
            1,
            rule="adam-mini",
            scratch="adam-mini",
            source="zyushun/Adam-mini 1.1.1: the first moment, and one second moment a row; the update and its negation",
        ),
        Optimizer(
            "galore",
            2,
            rule="galore",
            scratch="galore",
            rank=DEFAULT_RANK,
            source="jiaweizzhao/GaLore galore_torch/adamw.py, galore_projector.py; every linear layer but the head is projected",
        ),
        Optimizer(
            "apollo",
            2,
            rule="apollo",
            scratch="apollo",
            rank=DEFAULT_RANK,
            source="zhuhanqing/APOLLO apollo_torch/apollo.py, random_projector.py; every linear layer but the head is projected",
        ),
        Optimizer("sophia", 2, scratch="sophia", source="Liuhong99/Sophia sophia.py: a moment and a diagonal Hessian"),
        Optimizer("adagrad", 1, foreach_tensors=2, source="torch/optim/adagrad.py: sum of squares; foreach: root and quotient"),
        Optimizer("rmsprop", 1, foreach_tensors=1, source="torch/optim/rmsprop.py: mean of squares; foreach: its root"),
    )
}
"""Optimizers by name; `adamw` is torch's default, which is foreach on CUDA."""


def _rank(text: str, given: str) -> int:
    key, _, value = given.partition("=")
    if key.strip() != "rank" or not (value.strip().isascii() and value.strip().isdecimal()) or not 0 < int(value[:9]) <= 1 << 16:
        raise UsageError(f"--optimizer {text[:60]!r}: write it like {text.partition(':')[0]}:rank={DEFAULT_RANK} (1 to 65,536)")
    return int(value)


def find_optimizer(text: str) -> Optimizer:
    """An optimizer by name, with a rank where it has one (`galore:rank=128`), or `custom:states=2,bytes=4`.

    Raises:
        UsageError: a rank or a custom form that cannot be read.
    """
    if not text.startswith("custom:"):
        name, colon, given = text.partition(":")
        found = OPTIMIZERS["adamw-foreach" if name == "adamw" else name]
        return found._replace(name=text, rank=_rank(text, given)) if colon else found
    values = {"states": -1, "bytes": -1}
    for part in text.removeprefix("custom:").split(","):
        key, _, value = part.partition("=")
        if (
            key.strip() not in values
            or not (value.strip().isascii() and value.strip().isdecimal())
            or len(value) > 3
            or int(value) > 64
        ):
            raise UsageError(f"--optimizer {text[:60]!r}: write it like custom:states=2,bytes=4 (whole numbers up to 64)")
        values[key.strip()] = int(value)
    if min(values.values()) < 0:
        raise UsageError(f"--optimizer {text[:60]!r} needs both states and bytes: custom:states=2,bytes=4")
    return Optimizer(text, values["states"], values["bytes"], source="as given")
