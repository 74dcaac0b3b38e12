"""What devices that share a layer exchange, as autograd functions: tensor and sequence parallelism, experts.

Functional collectives (torch's DTensor) make new tensors; along another dimension than the first they work on a copy whose chunks
are joined. Engines and Megatron reduce in place.
Source: torch 2.13 torch/distributed/_functional_collectives.py, torch/distributed/tensor/placement_types.py (Shard, Partial);
NVIDIA/Megatron-LM core/tensor_parallel/mappings.py, layers.py (LinearWithGradAccumulationAndAsyncCommunication).
"""

from __future__ import annotations

from memfit.kernels.context import Context
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Size, Tensor
from memfit.model.description import ONCE, Op


def _functional(context: Context) -> bool:
    return context.policy.collectives == "functional"


def enter_split(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """x itself; backward adds up the gradients of all devices: into a new tensor, or in place."""
    out = context.tape.view(x, x.width)
    context.tape.record((x,), (out,), alias=not _functional(context))
    return [out]


def all_reduce(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """The sum over the devices: a new tensor, or in place; the gradient is the same on all of them and passed on."""
    tape = context.tape
    out = tape.tensor(x.axis, x.width, x.dtype) if _functional(context) else tape.view(x, x.width)
    tape.record((x,), (out,), alias=True)
    return [out]


def reduce_scatter(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """The sum of this device's tokens: a new tensor; backward gathers the gradient."""
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    copy: list[Size] = [x.size] if _functional(context) else []
    tape.record((x,), (out,), scratch=copy, backward_scratch=copy)
    tape.name("reduce_scatter")
    return [out]


def gather_tokens(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """All tokens: a new tensor; backward adds the gradients up and scatters them.

    Megatron's products keep this device's tokens alone and gather them once more for the weights' gradient.
    """
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    copy: list[Size] = [out.size] if _functional(context) else []
    tape.record((x,), (out,), scratch=copy, backward_scratch=copy)
    if context.policy.regathers:
        tape.regathered[out.storage] = x
    return [out]


def gather_columns(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """All columns side by side: a new tensor; its gradient is the part of the device."""
    tape = context.tape
    out = tape.tensor(x.axis, op.outputs[0].width, x.dtype)
    tape.record((x,), (out,), scratch=[out.size] if _functional(context) else ())
    return [out]


def gather_logits(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Whole logits, where the loss does not work on those of each device's part of the vocabulary."""
    policy = context.policy
    if policy.split_logits and policy.training:
        return [x]
    return gather_columns(context, op, x)


def own_part(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """A view; the gradient of the whole is gathered, or filled with zeros: a new tensor."""
    out = context.tape.view(x, op.outputs[0].width)
    context.tape.record((x,), (out,))
    return [out]


def exchange(context: Context, x: Tensor) -> Tensor:
    """An all-to-all of balanced parts: as many rows arrive as leave, in a new tensor; so do their gradients."""
    tape = context.tape
    moved = tape.tensor(x.axis, x.width, x.dtype)
    tape.record((x,), (moved,))
    return moved


def split_cross_entropy(context: Context, op: Op, logits: Tensor) -> list[Tensor]:
    """Cross-entropy of logits that are split by the vocabulary (loss_parallel): shifted logits, their exponentials, the result.

    Keeps the log-softmax of this device's part, 4 V / t a token. Forward holds x - max and exp(x - max) beside x. Backward: zeros
    into which the labels' rows are written, exp of what is kept, and their sum.
    Source: torch 2.13 torch/distributed/tensor/parallel/loss.py, _log_softmax, _nll_loss_and_log_softmax_backward.
    """
    tape = context.tape
    upcast = tape.cast(logits, "fp32")
    labels = tape.tensor(logits.axis, 1, "int64")
    log_probs = tape.tensor(upcast.axis, upcast.width, "fp32")
    tape.record((upcast,), (log_probs,), saved=(log_probs,), scratch=[upcast.size], alias=True)
    value = tape.tensor(ONCE, 2, "fp32")
    tape.record((log_probs, labels), (value,), saved=(log_probs, labels, value), backward_scratch=[upcast.size] * 2)
    labels.requires_grad = False
    tape.hold(upcast)
    return [value]


KERNELS: Kernels = {
    "enter_split": enter_split,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "gather_tokens": gather_tokens,
    "gather_columns": gather_columns,
    "gather_logits": gather_logits,
    "own_part": own_part,
}
