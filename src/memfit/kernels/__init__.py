"""Implementations of operations as sequences of autograd functions: what each keeps, allocates and needs as scratch."""

from memfit.kernels.context import Adapter, KernelPolicy, target_of
from memfit.kernels.lowering import Externals, Lowered, lower
from memfit.kernels.tape import Node, Size, Tape, Tensor

__all__ = ["Adapter", "Externals", "KernelPolicy", "Lowered", "Node", "Size", "Tape", "Tensor", "lower", "target_of"]
