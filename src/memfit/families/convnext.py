"""ConvNeXt: depthwise convolutions, LayerNorm over channels, pointwise linears, a factor for each channel, stochastic depth.

Source: transformers 5, models/convnext/modeling_convnext.py and configuration_convnext.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import (
    BACKBONE_KEYS,
    check_class,
    check_depth,
    checked,
    classification,
    depth_rates,
    head_segment,
    image_grid,
    stage_segments,
)
from memfit.families.view import ConfigView
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid


def _layer(channels: int, grid: Grid, activation: str, scaled: bool, rate: float) -> Block:
    b = BlockBuilder("block", channels * grid.size, SEQUENCE)
    x = vision.convolution(b, "dwconv", b.input, (channels, channels), grid, kernel=7, groups=channels)
    x = vision.layer_norm(b, "layernorm", x, channels)
    x = b.activation(activation, vision.linear(b, "pwconv1", x, (channels, 4 * channels)))
    x = vision.linear(b, "pwconv2", x, (4 * channels, channels))
    if scaled:
        x = vision.layer_scale(b, "layer_scale_parameter", x, channels)
    return b.done(b.add(b.input, vision.drop_path(b, x, rate)))


def _downsampling(channels: tuple[int, int], before: Grid, after: Grid) -> Block:
    b = BlockBuilder("downsampling", channels[0] * before.size, SEQUENCE)
    x = vision.layer_norm(b, "downsampling_layer.0", b.input, channels[0])
    return b.done(vision.convolution(b, "downsampling_layer.1", x, channels, after, kernel=2))


def _head(config: ConfigView, head: str, channels: int, grid: Grid) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", channels * grid.size, SEQUENCE)
    pooled = vision.layer_norm(b, "layernorm", vision.average(b, b.input, channels), channels)
    if head == "Model":
        return head_segment(b.done(pooled)), None
    return head_segment(b.done(classification(b, pooled, config, b.input))), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A ConvNeXt model from its config."""
    head = check_class(architecture, "ConvNext")
    config.ignore(*BACKBONE_KEYS)
    image, colours = image_grid(config), config.size("num_channels", 3)
    patch = Grid(*config.sides("patch_size", 4))
    widths, depths = config.sizes("hidden_sizes", (96, 192, 384, 768)), config.sizes("depths", (3, 3, 9, 3))
    num_stages = config.size("num_stages", 4)
    if not num_stages == len(widths) == len(depths):
        raise InputError(f"{config.name}: num_stages {num_stages}, hidden_sizes and depths do not have the same length")
    activation = activation_name(config, "hidden_act", "gelu")
    scaled = config.number("layer_scale_init_value", 1e-6) > 0
    num_layers = check_depth(config, depths)
    rates = depth_rates(config.probability("drop_path_rate", 0.0), depths)

    grid = checked(config, image.after(patch, patch), "patches")
    b = BlockBuilder("stem", colours * image.size, SEQUENCE)
    x = vision.convolution(b, "patch_embeddings", b.input, (colours, widths[0]), grid, kernel=patch, kind="pixels")
    segments = [Segment((b.done(vision.layer_norm(b, "layernorm", x, widths[0])),), role="embedding")]
    before = widths[0]
    for stage, width in enumerate(widths):
        if stage:
            smaller = checked(config, grid.after(2, 2), f"stage {stage + 1}")
            segments.append(Segment((_downsampling((before, width), grid, smaller),), role="between"))
            grid = smaller
        elif before != width:
            raise InputError(f"{config.name}: the stem and the first stage have different widths")
        before = width

        def make(_: int, drops: bool, width: int = width, grid: Grid = grid, rate: float = rates[stage][-1]) -> Block:
            return _layer(width, grid, activation, scaled, rate if drops else 0.0)

        segments += stage_segments(rates[stage], make)
    last, loss = _head(config, head, before, grid)
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
        loss=loss,
        attention_kernels=(),
        checkpoints_layers=False,
    )
