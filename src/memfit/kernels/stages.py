"""What pipeline stages run beside their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels.context import Context
from memfit.kernels.tape import Tensor
from memfit.model.description import Op


def receive(context: Context, op: Op, x: Tensor) -> Sequence[Tensor]:
    """Hidden states from the stage before: a leaf that requires a gradient, which goes back there when backward is through.

    Source: torch distributed/pipelining/stage.py, _retrieve_recv_activations; Megatron-LM p2p_communication.py.
    """
    tape = context.tape
    out = tape.tensor(x.axis, x.width, tape.policy.weight)
    tape.record((), (out,))
    out.requires_grad = context.policy.training and tape.grad
    return [out]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {"receive": receive}
"""Kind of operation -> its implementation."""
