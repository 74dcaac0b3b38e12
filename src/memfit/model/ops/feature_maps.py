"""Operations of convolutional networks of any number of dimensions: signals, images, volumes.

A feature map is a value per sample (axis `sequence`) whose width is all its elements: channels x places, and the places of a grid
are the product of its sides.
"""

from __future__ import annotations

from math import prod

from memfit.model.builder import BlockBuilder
from memfit.model.description import SEQUENCE, Parameter, Value

Sides = tuple[int, ...]
"""The sides of a grid: (length,), (height, width) or (depth, height, width); of a kernel or a stride in the same order."""

IN_PLACE = ("relu", "leaky_relu", "silu")
"""Activation functions that may take the storage of their input."""


def convolved(sides: Sides, kernel: Sides, stride: Sides, padding: Sides, dilation: Sides | None = None) -> Sides:
    """The grid that a convolution or a pooling makes: floor((n + 2 p - d (k - 1) - 1) / s) + 1 on each side."""
    rows = zip(sides, kernel, stride, padding, dilation or (1,) * len(sides), strict=True)
    return tuple([(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows])


def transposed(sides: Sides, kernel: Sides, stride: Sides, padding: Sides, output_padding: Sides | None = None) -> Sides:
    """The grid that a transposed convolution makes: (n - 1) s - 2 p + k + output padding on each side (dilation 1)."""
    rows = zip(sides, kernel, stride, padding, output_padding or (0,) * len(sides), strict=True)
    return tuple([(n - 1) * s - 2 * p + k + more for n, k, s, p, more in rows])


def convolution(
    b: BlockBuilder,
    name: str,
    x: Value,
    channels: tuple[int, int],
    sides: Sides,
    *,
    kernel: Sides,
    groups: int = 1,
    bias: bool = True,
    transposed: bool = False,
) -> Value:
    """A convolution from `channels[0]` to `channels[1]`, or a transposed one ("up-convolution"); `sides`: the output's grid.

    Weight: out x in / groups x kernel; transposed: in x out / groups x kernel.
    """
    inner, outer = channels
    rows, columns = (inner, outer) if transposed else (outer, inner)
    parameters = [Parameter(name + ".weight", (rows, columns // groups, *kernel), "conv")]
    if bias:
        parameters.append(Parameter(name + ".bias", (outer,), "bias"))
    return b.op("conv2d", name, (x,), outer * prod(sides), tuple(parameters), SEQUENCE)


def group_norm(b: BlockBuilder, name: str, x: Value, channels: int, groups: int) -> Value:
    """(x - mean) / std * w + b over each group of channels and all places; instance norm has a group for each channel."""
    parameters = (Parameter(name + ".weight", (channels,), "norm"), Parameter(name + ".bias", (channels,), "norm"))
    return b.op("group_norm", name, (x,), x.width, parameters, groups=groups)


def average_pool(b: BlockBuilder, x: Value, channels: int, sides: Sides) -> Value:
    """The mean of each neighbourhood; `sides`: the output's grid. Over the whole map: `vision.average`."""
    return b.op("windowed_average", "average pool", (x,), channels * prod(sides))


def upsample(b: BlockBuilder, x: Value, channels: int, sides: Sides) -> Value:
    """Interpolation, nearest or linear, to the grid `sides`."""
    return b.op("upsample", "upsample", (x,), channels * prod(sides))


def activation_in_place(b: BlockBuilder, function: str, x: Value) -> Value:
    """An activation that overwrites its input: nn.ReLU(inplace=True).

    Raises:
        ValueError: a function of which it is not known what it keeps in place.
    """
    if function not in IN_PLACE:
        raise ValueError(f"activation {function} in place: known are {', '.join(IN_PLACE)}")
    return b.op("activation_in_place", function, (x,), x.width, function=function)
