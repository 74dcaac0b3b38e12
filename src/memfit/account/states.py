"""Bytes of weights, gradients and optimizer states, tensor by tensor.

Every function takes the model's parameters with the number of times that each occurs; nothing follows from a total count alone,
because small tensors, embeddings and quantised matrices follow other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from memfit.errors import UsageError
from memfit.kernels import KernelPolicy
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape
from memfit.model import Model, Parameter
from memfit.precision import DTYPE_BYTES

BLOCKWISE_MINIMUM = 4096
"""bitsandbytes keeps 32-bit states for tensors with fewer elements (optim/optimizer.py, min_8bit_size)."""
BLOCKWISE_BLOCK = 256
"""Elements that share an fp32 scale in an 8-bit state (optim/optimizer.py, blocksize 256)."""


QUANTIZE_EXPERTS = ("fp8", "int4")
"""Formats of checkpoints that hold every expert's matrices quantised (fp8, GPTQ, AWQ). Bitsandbytes, whose formats the others
are, replaces linear layers only (transformers integrations/bitsandbytes.py)."""


class Tensors(NamedTuple):
    """A parameter of the model and how often it occurs."""

    parameter: Parameter
    repeat: int


class Trained(NamedTuple):
    """A trained tensor: elements, bytes of one, and how often it occurs."""

    elements: int
    dtype: str
    repeat: int
    role: str
    shape: tuple[int, ...] = ()


class Optimizer(NamedTuple):
    """States and the scratch of a step. `states`: number of tensors as large as the parameter; `state_bytes` None: its format.

    scratch: foreach = temporaries of all parameters at once, loop = of the largest one, none = fused.
    """

    name: str
    states: int
    state_bytes: int | None = None
    blockwise: bool = False
    full_embeddings: bool = False
    """Block-wise, but embeddings keep 32-bit states (the runtime's habit)."""
    paged: bool = False
    foreach_tensors: int = 0
    loop: bool = False
    rule: str = "dense"
    """What a state is as large as: dense (the parameter), factored, muon."""
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
        Optimizer("adamw-loop", 2, loop=True, source=f"{_TORCH} _single_tensor_adam: the root and the denominator of one tensor"),
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
        Optimizer("adagrad", 1, foreach_tensors=2, source="torch/optim/adagrad.py: sum of squares; foreach: root and quotient"),
        Optimizer("rmsprop", 1, foreach_tensors=1, source="torch/optim/rmsprop.py: mean of squares; foreach: its root"),
    )
}
"""Optimizers by name; `adamw` is torch's default, which is foreach on CUDA."""


def find_optimizer(text: str) -> Optimizer:
    """An optimizer by name, or `custom:states=2,bytes=4`.

    Raises:
        UsageError: a custom form that cannot be read.
    """
    if not text.startswith("custom:"):
        return OPTIMIZERS["adamw-foreach" if text == "adamw" else text]
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


def tensors_of(model: Model) -> list[Tensors]:
    """Every tensor of the model once (tied ones are one tensor), with its repeat count."""
    return [
        Tensors(parameter, 1 if segment.shared else segment.repeat)
        for segment in model.segments
        for block in segment.blocks
        for op in block.ops
        for parameter in op.parameters
        if not parameter.tied_to
    ]


def weight_bytes(tensors: Iterable[Tensors], policy: KernelPolicy) -> int:
    """Stored weights: elements x bytes of the format, or the quantised format's bytes for linear layers' matrices."""
    element = DTYPE_BYTES[policy.precision.weight]
    total = 0
    for parameter, repeat in tensors:
        if policy.quantized is not None and parameter.role == "linear" and len(parameter.shape) == 2:
            total += repeat * policy.quantized.weight_bytes(*parameter.shape)
        elif policy.quantized is not None and parameter.role == "expert" and policy.quantized.name in QUANTIZE_EXPERTS:
            total += repeat * parameter.shape[0] * policy.quantized.weight_bytes(*parameter.shape[1:])
        else:
            total += repeat * parameter.num_elements * element
    return total


def buffer_bytes(model: Model, policy: KernelPolicy) -> int:
    """Untrained tensors: those of a format of their own, and those in the weights' format."""
    return model.buffer_bytes + model.buffer_elements * DTYPE_BYTES[policy.precision.weight]


def adapters(tensors: Iterable[Tensors], policy: KernelPolicy) -> list[Trained]:
    """The two factors beside each targeted linear: rank x in and out x rank."""
    if policy.adapter is None:
        return []
    context = Context(Tape(policy.precision), policy)
    found = []
    for parameter, repeat in tensors:
        adapter = context.adapter(parameter)
        if adapter is not None:
            rows, columns = parameter.shape
            found += [
                Trained(adapter.rank * columns, adapter.dtype, repeat, "adapter", (adapter.rank, columns)),
                Trained(rows * adapter.rank, adapter.dtype, repeat, "adapter", (rows, adapter.rank)),
            ]
    return found


def trained_tensors(tensors: Iterable[Tensors], policy: KernelPolicy) -> list[Trained]:
    """Everything that gets a gradient."""
    if policy.adapter is not None:
        return adapters(tensors, policy)
    dtype = policy.precision.weight
    return [Trained(one.num_elements, dtype, repeat, one.role, one.shape) for one, repeat in tensors if one.role != "unused"]


def gradient_bytes(trained: Iterable[Trained]) -> int:
    """A gradient has its parameter's size and format."""
    return sum(one.repeat * one.elements * DTYPE_BYTES[one.dtype] for one in trained)


def state_bytes(optimizer: Optimizer, trained: Iterable[Trained]) -> int:
    """Optimizer states: states x elements x bytes; block-wise 8 bit adds 4 bytes per 256 elements and spares small tensors.

    2 (1 + 4/256) = 2.03125 bytes per parameter for two 8-bit states.
    """
    total = 0
    for one in trained:
        element = DTYPE_BYTES[one.dtype] if optimizer.state_bytes is None else optimizer.state_bytes
        if optimizer.rule != "dense":
            total += one.repeat * element * _RULES[optimizer.rule](one)
            continue
        if optimizer.blockwise:
            if one.elements < BLOCKWISE_MINIMUM or (optimizer.full_embeddings and one.role == "embedding"):
                per_state = 4 * one.elements
            else:
                per_state = one.elements * element + 4 * -(-one.elements // BLOCKWISE_BLOCK)
        else:
            per_state = one.elements * element
        total += one.repeat * optimizer.states * per_state
    return total


def _factored(one: Trained) -> int:
    """Adafactor: rows + columns of the last two dimensions, for each of the leading ones; a vector has a state of its size."""
    if len(one.shape) < 2:
        return one.elements
    rows, columns = one.shape[-2:]
    return one.elements // (rows * columns) * (rows + columns)


def _muon(one: Trained) -> int:
    """Muon keeps one momentum for a layer's matrix; AdamW keeps two states for everything else."""
    return one.elements if one.role in ("linear", "adapter") and len(one.shape) == 2 else 2 * one.elements


_RULES: dict[str, Callable[[Trained], int]] = {"factored": _factored, "muon": _muon}
"""Elements of all states of a tensor, where they are not as large as it."""


def step_scratch(optimizer: Optimizer, trained: list[Trained]) -> int:
    """Temporaries of a step: as many lists of all parameters, or copies of the largest tensor, as the implementation makes."""
    if optimizer.foreach_tensors:
        return optimizer.foreach_tensors * gradient_bytes(trained)
    if optimizer.paged:
        return max((state_bytes(optimizer, [one._replace(repeat=1)]) for one in trained), default=0)
    if optimizer.loop:
        return _loop_scratch(trained)
    return max((one.elements * optimizer.largest_scratch[DTYPE_BYTES[one.dtype] // 4] for one in trained), default=0)


def _loop_scratch(trained: list[Trained]) -> int:
    """The root and the denominator of one tensor, beside the denominator of the one before, whose name is still bound.

    max over tensors i, in the order of the model, of size(i - 1) + 2 size(i). Equal neighbours occur where a block repeats one.
    """
    sizes = [one.elements * DTYPE_BYTES[one.dtype] for one in trained]
    return max((before + 2 * size for before, size in zip([0, *sizes], sizes, strict=False)), default=0)
