"""Swin: attention within windows that shift from block to block, with a learned bias for relative positions; patches merge
between stages.

Source: transformers 5, models/swin/modeling_swin.py and configuration_swin.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import (
    BACKBONE_KEYS,
    check_class,
    check_depth,
    check_heads,
    checked,
    classification,
    depth_rates,
    feed_forward_width,
    head_segment,
    image_grid,
    stage_segments,
    stated_grid,
)
from memfit.families.view import ConfigView
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid


class _Layers:
    """Builds the blocks of a stage."""

    def __init__(self, config: ConfigView) -> None:
        self.name = config.name
        self.window = config.size("window_size", 7, maximum=1 << 12)
        self.mlp_ratio = config.number("mlp_ratio", 4.0)
        self.bias = config.flag("qkv_bias", True)
        self.dropout = config.probability("hidden_dropout_prob", 0.0)
        self.attention_dropout = config.probability("attention_probs_dropout_prob", 0.0)
        self.activation = activation_name(config, "hidden_act", "gelu")

    @property
    def buffer_bytes(self) -> int:
        """The index of relative positions of one block, int64."""
        return 8 * self.window**4

    def check(self, grid: Grid, stage: int) -> None:
        """A grid smaller than the window does not fit the table of relative positions."""
        if min(grid) < self.window:
            raise InputError(
                f"{self.name}: stage {stage + 1} has {grid.height} x {grid.width} patches, less than a window of {self.window}; "
                "give a larger --image"
            )

    def block(self, channels: int, heads: int, grid: Grid, shifted: bool, rate: float) -> Block:
        """One block; windows shift in every second one unless one window covers the grid."""
        shifts = shifted and min(grid) > self.window
        b = BlockBuilder("shifted block" if shifts else "block", channels * grid.size, SEQUENCE)
        x = vision.layer_norm(b, "layernorm_before", b.input, channels)
        x, named = self._attended(b, x, channels, heads, grid, shifts)
        x = b.add(b.input, vision.drop_path(b, x, rate))
        normed = vision.layer_norm(b, "layernorm_after", x, channels)
        ffn = feed_forward_width(self.name, self.mlp_ratio, channels)
        inner = b.activation(self.activation, vision.linear(b, "mlp.fc1", normed, (channels, ffn)))
        mixed = vision.linear(b, "mlp.fc2", inner, (ffn, channels))
        b.until_here(normed)
        mixed = b.dropout(mixed, self.dropout)
        x = b.add(mixed, x)
        b.until_here(*named)
        return b.done(x)

    def _attended(
        self, b: BlockBuilder, x: Value, channels: int, heads: int, grid: Grid, shifts: bool
    ) -> tuple[Value, tuple[Value, ...]]:
        """Pad, shift, cut into windows, attend, and all of it back: every step but a view is a copy.

        Returns the result and what names of the block's forward hold until it returns.
        """
        padded = grid.padded(self.window)
        groups = padded.size // self.window**2
        rows = padded.width > self.window  # one window in a row: cutting is a view
        normed = x = vision.copy(b, "pad", x, channels * padded.size)
        x = vision.copy(b, "cyclic shift", x) if shifts else x
        windows = vision.copy(b, "window partition", x) if rows else x
        q, k, v = (vision.linear(b, f"attention.{name}_proj", windows, (channels, channels), bias=self.bias) for name in "qkv")
        bias = vision.relative_bias(b, "attention.relative_position_bias", self.window, heads)
        if shifts:
            bias = vision.shift_mask(b, bias, normed, groups, self.window)
        x = vision.attention(
            b,
            q,
            k,
            v,
            heads=heads,
            channels=channels,
            groups=groups,
            bias=bias,
            dropout=self.attention_dropout,
            returned=True,
        )
        attended = x = b.dropout(vision.linear(b, "attention.o_proj", x, (channels, channels)), self.dropout)
        x = vision.copy(b, "window reverse", x) if rows else x
        x = vision.copy(b, "cyclic shift", x) if shifts else x
        x = x if padded == grid else vision.copy(b, "cut", x, channels * grid.size)
        b.until_here(normed)
        return x, (windows, attended, x)


def _merging(channels: int, grid: Grid) -> tuple[Block, Grid]:
    """Four neighbours become one place of twice the channels; odd sides are padded."""
    even = grid.padded(2)
    half = Grid(even.height // 2, even.width // 2)
    b = BlockBuilder("patch merging", channels * grid.size, SEQUENCE)
    x = b.input if even == grid else vision.copy(b, "pad", b.input, channels * even.size)
    x = vision.layer_norm(b, "downsample.norm", vision.merge_patches(b, x, channels * even.size), 4 * channels)
    return b.done(vision.linear(b, "downsample.reduction", x, (4 * channels, 2 * channels), bias=False)), half


def _head(config: ConfigView, head: str, channels: int, grid: Grid) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", channels * grid.size, SEQUENCE)
    x = vision.layer_norm(b, "layernorm", b.input, channels)
    pooled = vision.average(b, x, channels)
    if head == "Model":
        return head_segment(b.done(pooled)), None
    return head_segment(b.done(classification(b, pooled, config, x))), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A Swin model from its config."""
    head = check_class(architecture, "Swin")
    config.ignore(*BACKBONE_KEYS, "encoder_stride", "num_layers", "hidden_size", "path_norm")
    image, colours = image_grid(config), config.size("num_channels", 3)
    patch, width = Grid(*config.sides("patch_size", 4)), config.size("embed_dim", 96)
    depths, heads = config.sizes("depths", (2, 2, 6, 2)), config.sizes("num_heads", (3, 6, 12, 24))
    if len(depths) != len(heads):
        raise InputError(f"{config.name}: depths and num_heads do not have the same length")
    num_layers = check_depth(config, depths)
    rates = depth_rates(config.probability("drop_path_rate", 0.1), depths)
    layers = _Layers(config)

    b = BlockBuilder("embedding", colours * image.size, SEQUENCE)
    grid = checked(config, image.padded(patch).after(patch, patch), "patches")
    x = vision.convolution(b, "patch_embeddings.projection", b.input, (colours, width), grid, kernel=patch, kind="pixels")
    x = vision.layer_norm(b, "norm", x, width)
    if config.flag("use_absolute_embeddings", False):
        stated = stated_grid(config)
        table = Grid(stated.height // patch.height, stated.width // patch.width)
        x = vision.positions(b, "position_embeddings", x, (table.size, width), interpolated=table != grid)
    segments = [Segment((b.done(b.dropout(x, layers.dropout)),), role="embedding")]
    for stage in range(len(depths)):
        layers.check(grid, stage)
        check_heads(config, width, heads[stage])

        def make(kind: int, drops: bool, stage: int = stage, width: int = width, grid: Grid = grid) -> Block:
            return layers.block(width, heads[stage], grid, kind == 1, rates[stage][-1] if drops else 0.0)

        unit = f"stage {stage + 1}"  # SwinStage is a checkpointed module as SwinLayer is
        segments += [segment._replace(unit=unit) for segment in stage_segments(rates[stage], make, kinds=2)]
        if stage < len(depths) - 1:
            block, grid = _merging(width, grid)
            segments.append(Segment((block,), role="between", unit=unit))
            width *= 2
    last, loss = _head(config, head, width, grid)
    return Description(
        published_dtype="fp32",
        segments=(*segments, last),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=width,
        num_heads=heads[-1],
        num_kv_heads=heads[-1],
        head_dim=width // heads[-1],
        vocab_size=config.num_labels(),
        max_positions=None,
        pixels=colours * image.size,
        buffer_bytes=num_layers * layers.buffer_bytes,
        loss=loss,
        attention_kernels=("sdpa", "eager"),
    )
