"""Operations of image models: convolutions, pooling, norms over channels, windows, stochastic depth.

A feature map is a value per image (axis `sequence`) whose width is all its elements: channels x height x width. Whether it lies
channels first or last makes no difference to its bytes; a layout change that copies is an operation of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.model.builder import BlockBuilder
from memfit.model.description import ONCE, SEQUENCE, TOKEN, Parameter, Value


class Grid(NamedTuple):
    """Height and width of a feature map."""

    height: int
    width: int

    @property
    def size(self) -> int:
        """Places of the grid: tokens of one image."""
        return self.height * self.width

    def after(self, kernel: int | Grid, stride: int | Grid, padding: int = 0) -> Grid:
        """The grid that a convolution or a pooling makes of it: floor((n + 2 p - k) / s) + 1 on each side."""
        k, s = (one if isinstance(one, Grid) else Grid(one, one) for one in (kernel, stride))
        return Grid(
            (self.height + 2 * padding - k.height) // s.height + 1,
            (self.width + 2 * padding - k.width) // s.width + 1,
        )

    def padded(self, multiple: int | Grid) -> Grid:
        """The grid padded on both sides to a multiple."""
        m = multiple if isinstance(multiple, Grid) else Grid(multiple, multiple)
        return Grid(-(-self.height // m.height) * m.height, -(-self.width // m.width) * m.width)


def convolution(
    b: BlockBuilder,
    name: str,
    x: Value,
    channels: tuple[int, int],
    grid: Grid,
    *,
    kernel: int | Grid,
    groups: int = 1,
    bias: bool = True,
    kind: str = "conv2d",
) -> Value:
    """A 2d convolution from `channels[0]` to `channels[1]` whose output has the size of `grid`.

    `kind`: conv2d; or pixels, when it reads the batch's images.
    """
    inner, outer = channels
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    parameters = [Parameter(name + ".weight", (outer, inner // groups, *sides), "conv")]
    if bias:
        parameters.append(Parameter(name + ".bias", (outer,), "bias"))
    return b.op(kind, name, (x,), outer * grid.size, tuple(parameters), SEQUENCE)


def batch_norm(b: BlockBuilder, name: str, x: Value, channels: int) -> Value:
    """Normalised over batch and places, with running statistics (`batch_norm_buffers`)."""
    parameters = (Parameter(name + ".weight", (channels,), "norm"), Parameter(name + ".bias", (channels,), "norm"))
    return b.op("batch_norm", name, (x,), x.width, parameters)


def batch_norm_buffers(channels: int) -> int:
    """Bytes of the running mean and variance in fp32 and of the number of batches, int64."""
    return 2 * 4 * channels + 8


def layer_norm(b: BlockBuilder, name: str, x: Value, channels: int) -> Value:
    """(x - mean) / std * w + b over the channels of each place."""
    parameters = (Parameter(name + ".weight", (channels,), "norm"), Parameter(name + ".bias", (channels,), "norm"))
    return b.op("layer_norm", name, (x,), x.width, parameters, rows=x.width // channels)


def linear(b: BlockBuilder, name: str, x: Value, channels: tuple[int, int], *, bias: bool = True, role: str = "linear") -> Value:
    """y = x W^T + b at each place, from `channels[0]` to `channels[1]`."""
    inner, outer = channels
    parameters = [Parameter(name + ".weight", (outer, inner), role, "column")]
    if bias:
        parameters.append(Parameter(name + ".bias", (outer,), "bias", "column"))
    return b.op("linear", name, (x,), x.width // inner * outer, tuple(parameters))


def max_pool(b: BlockBuilder, x: Value, channels: int, grid: Grid) -> Value:
    """The largest of each neighbourhood; `grid` is the output's."""
    return b.op("max_pool", "max pool", (x,), channels * grid.size)


def average(b: BlockBuilder, x: Value, channels: int) -> Value:
    """The mean over all places of an image."""
    return b.op("average_pool", "average pool", (x,), channels, axis=SEQUENCE)


def copy(b: BlockBuilder, name: str, x: Value, width: int | None = None) -> Value:
    """The same elements in another order, padded or cut: `.contiguous()`, `roll`, `pad`, window partition."""
    return b.op("image_copy", name, (x,), x.width if width is None else width)


def add_in_place(b: BlockBuilder, a: Value, c: Value) -> Value:
    """a += c"""
    return b.op("add_in_place", "add", (a, c), a.width)


def drop_path(b: BlockBuilder, x: Value, probability: float) -> Value:
    """Stochastic depth: whole samples are dropped in training; x itself where the probability is 0."""
    return b.op("drop_path", "drop path", (x,), x.width, probability=probability)


def layer_scale(b: BlockBuilder, name: str, x: Value, channels: int) -> Value:
    """x times a learned factor for each channel."""
    return b.op("layer_scale", name, (x,), x.width, (Parameter(name, (channels,), "norm"),))


def class_token(b: BlockBuilder, name: str, x: Value, hidden: int) -> Value:
    """A learned token before the patches of every image: a copy of all (concatenation)."""
    return b.op("class_token", name, (x,), hidden, (Parameter(name, (1, 1, hidden), "embedding"),), TOKEN)


def unused(b: BlockBuilder, name: str, shape: tuple[int, ...], x: Value) -> Value:
    """A parameter that the class declares but this forward pass does not touch."""
    return b.op("unused_parameter", name, (x,), x.width, (Parameter(name, shape, "unused"),))


def positions(b: BlockBuilder, name: str, x: Value, shape: tuple[int, int], *, interpolated: bool = False) -> Value:
    """x + a learned table of (positions, channels); `interpolated`: resized first, since the image has another size."""
    parameter = Parameter(name, (1, *shape), "embedding")
    return b.op("position_table", name, (x,), x.width, (parameter,), channels=shape[1], interpolated=interpolated)


def mean_of_patches(b: BlockBuilder, x: Value) -> Value:
    """The class token and the mean of the other tokens, side by side."""
    return b.op("mean_of_patches", "mean of patches", (x,), 2 * x.width, axis=SEQUENCE)


def relative_bias(b: BlockBuilder, name: str, window: int, heads: int) -> Value:
    """A learned score for each head and pair of places within a window, looked up in a table of distances."""
    table = Parameter(name + ".relative_position_bias_table", ((2 * window - 1) ** 2, heads), "embedding")
    return b.op("relative_bias", name, (), heads * window**4, (table,), ONCE)


def shift_mask(b: BlockBuilder, bias: Value, normed: Value, num_windows: int, window: int) -> Value:
    """The relative bias plus the mask of shifted windows, for each window of each image, in the wider of both formats."""
    return b.op("shift_mask", "shift mask", (bias, normed), num_windows * bias.width, axis=SEQUENCE, mask=num_windows * window**4)


def attention(
    b: BlockBuilder,
    q: Value,
    k: Value,
    v: Value,
    *,
    heads: int,
    channels: int,
    groups: int = 1,
    bias: Value | None = None,
    dropout: float = 0.0,
    returned: bool = False,
) -> Value:
    """softmax(q k^T / sqrt(d) + bias) v within each group (window) of an image.

    `returned`: eager's probabilities are a result of the block.
    """
    keys = k.width // channels // groups
    rows = q.width // channels * heads
    return b.op(
        "image_attention",
        "attention",
        (q, k, v) if bias is None else (q, k, v, bias),
        q.width,
        num_heads=rows,  # rows of the score matrix: one for each head and query of an image
        num_kv_heads=rows,
        window=None,
        head_major=False,
        dropout=dropout,
        keys=keys,
        scores=rows * keys,
        queries=q.width // channels // groups,
        single_head=heads == 1,
        groups=groups,
        returned=returned,
    )


def merge_patches(b: BlockBuilder, x: Value, width: int) -> Value:
    """Four neighbours side by side: slices of x, concatenated into `width` elements."""
    return b.op("merge_patches", "patch merging", (x,), width)


def upsample(b: BlockBuilder, x: Value, width: int) -> Value:
    """Bilinear interpolation to `width` elements."""
    return b.op("upsample", "upsample", (x,), width)


def concatenate(b: BlockBuilder, *parts: Value) -> Value:
    """Feature maps side by side: a copy of all."""
    return b.op("concatenate_maps", "concatenate", parts, sum(part.width for part in parts))
