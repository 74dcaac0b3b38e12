"""ResNet: residual blocks of convolutions with batch norm, basic or with a bottleneck.

Source: transformers 5, models/resnet/modeling_resnet.py and configuration_resnet.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import BACKBONE_KEYS, check_class, check_depth, checked, classification, head_segment, image_grid
from memfit.families.view import ConfigView
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid

REDUCTION = 4
"""A bottleneck has a quarter of the block's channels."""


class _Blocks:
    """Builds blocks and counts the buffers of their batch norms."""

    def __init__(self, config: ConfigView) -> None:
        self.activation = activation_name(config, "hidden_act", "relu")
        self.bottleneck = config.choice("layer_type", "bottleneck", ("basic", "bottleneck")) == "bottleneck"
        self.first_convolution_strides = config.flag("downsample_in_bottleneck", False)
        self.buffer_bytes = 0

    def convolved(
        self,
        b: BlockBuilder,
        name: str,
        x: Value,
        channels: tuple[int, int],
        grid: Grid,
        kernel: int,
        activation: str = "",
        kind: str = "conv2d",
    ) -> Value:
        """Convolution without bias, batch norm, activation."""
        x = vision.convolution(b, name + ".convolution", x, channels, grid, kernel=kernel, bias=False, kind=kind)
        x = vision.batch_norm(b, name + ".normalization", x, channels[1])
        self.buffer_bytes += vision.batch_norm_buffers(channels[1])
        return b.activation(activation, x) if activation else x

    def block(self, channels: tuple[int, int], before: Grid, stride: int, *, first: bool = False) -> tuple[Block, Grid]:
        """A residual block, with a projected shortcut where its sizes change.

        It begins with the activation of the block before, which both save, so that it is counted once; the first has none before.
        """
        inner, outer = channels
        after = before.after(3, stride, 1)
        b = BlockBuilder("block", inner * before.size, SEQUENCE)
        entry = b.input if first else b.activation(self.activation, b.input)
        # inner convolutions have ReLU whatever hidden_act says
        if self.bottleneck:
            reduced = outer // REDUCTION
            middle = after if self.first_convolution_strides else before
            x = self.convolved(b, "layer.0", entry, (inner, reduced), middle, 1, "relu")
            x = self.convolved(b, "layer.1", x, (reduced, reduced), after, 3, "relu")
            x = self.convolved(b, "layer.2", x, (reduced, outer), after, 1)
        else:
            x = self.convolved(b, "layer.0", entry, (inner, outer), after, 3, "relu")
            x = self.convolved(b, "layer.1", x, (outer, outer), after, 3)
        residual = entry
        if inner != outer or stride != 1:
            residual = self.convolved(b, "shortcut", residual, (inner, outer), after, 1)
        x = vision.add_in_place(b, x, residual)
        b.until_here(entry, residual)
        return b.done(x, input_held=first), after


def _head(config: ConfigView, head: str, channels: int, grid: Grid, activation: str) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", channels * grid.size, SEQUENCE)
    x = b.activation(activation, b.input)
    pooled = vision.average(b, x, channels)
    if head == "Model":
        return head_segment(b.done(pooled, input_held=False)), None
    loss = classification(b, pooled, config, x)
    return head_segment(b.done(loss, input_held=False)), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A ResNet model from its config."""
    head = check_class(architecture, "ResNet")
    config.ignore(*BACKBONE_KEYS)
    image, colours = image_grid(config, None), config.size("num_channels", 3)
    stem = config.size("embedding_size", 64)
    widths, depths = config.sizes("hidden_sizes", (256, 512, 1024, 2048)), config.sizes("depths", (3, 4, 6, 3))
    if len(widths) != len(depths):
        raise InputError(f"{config.name}: hidden_sizes and depths do not have the same length")
    num_layers = check_depth(config, depths)
    blocks = _Blocks(config)
    strided_first = config.flag("downsample_in_first_stage", False)

    b = BlockBuilder("stem", colours * image.size, SEQUENCE)
    grid = image.after(7, 2, 3)
    x = blocks.convolved(b, "embedder", b.input, (colours, stem), grid, 7, blocks.activation, kind="pixels")
    grid = checked(config, grid.after(3, 2, 1), "stem")
    segments = [Segment((b.done(vision.max_pool(b, x, stem, grid)),), role="embedding")]
    before = stem
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        block, grid = blocks.block((before, width), grid, 2 if stage or strided_first else 1, first=not stage)
        segments.append(Segment((block,)))
        if depth > 1:
            counted = blocks.buffer_bytes
            block, grid = blocks.block((width, width), grid, 1)
            segments.append(Segment((block,), depth - 1))
            blocks.buffer_bytes = counted + (depth - 1) * (blocks.buffer_bytes - counted)
        before = width
    last, loss = _head(config, head, before, grid, blocks.activation)
    return Description(
        published_dtype="fp32",
        segments=(*segments, last),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=before,
        num_heads=1,
        num_kv_heads=1,
        head_dim=before,
        vocab_size=config.num_labels(),
        max_positions=None,
        pixels=colours * image.size,
        buffer_bytes=blocks.buffer_bytes,
        loss=loss,
        attention_kernels=(),
        checkpoints_layers=False,
    )
