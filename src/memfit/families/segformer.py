"""SegFormer: overlapping patches in stages, attention over keys and values reduced by a convolution, an MLP with a depthwise
convolution inside.

Source: transformers 5, models/segformer/modeling_segformer.py and configuration_segformer.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import (
    check_class,
    check_depth,
    check_heads,
    checked,
    classification,
    depth_rates,
    head_segment,
    image_grid,
    stage_segments,
)
from memfit.families.view import ConfigView
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid

TYPICAL_SIDE = 512
"""ADE20K crops, on which the published models were trained."""


class _Stage:
    """The sizes of one stage."""

    def __init__(self, config: ConfigView, sizes: tuple[int, ...], before: Grid, index: int) -> None:
        self.width, self.heads, self.reduction, self.ffn, self.patch, stride = sizes
        check_heads(config, self.width, self.heads)
        self.grid = checked(config, before.after(self.patch, stride, self.patch // 2), f"stage {index + 1}")
        self.reduced = self.grid.after(self.reduction, self.reduction) if self.reduction > 1 else self.grid
        checked(config, self.reduced, f"keys of stage {index + 1}")
        self.dropout = config.probability("hidden_dropout_prob", 0.0)
        self.attention_dropout = config.probability("attention_probs_dropout_prob", 0.0)
        self.activation = activation_name(config, "hidden_act", "gelu")

    def patches(self, b: BlockBuilder, x: Value, channels: int, kind: str = "conv2d") -> Value:
        """Overlapping patches: a strided convolution and a norm."""
        sizes = (channels, self.width)
        x = vision.convolution(b, "patch_embeddings.proj", x, sizes, self.grid, kernel=self.patch, kind=kind)
        return vision.layer_norm(b, "patch_embeddings.layer_norm", x, self.width)

    def feature_map(self, b: BlockBuilder, *, copied: bool = True) -> Value:
        """The stage's last norm, laid out as an image."""
        x = vision.layer_norm(b, "layer_norm", b.input, self.width)
        return vision.copy(b, "channels first", x) if copied else x

    def block(self, rate: float) -> Block:
        """One transformer block."""
        width = self.width
        b = BlockBuilder("block", width * self.grid.size, SEQUENCE)
        normed = vision.layer_norm(b, "layernorm_before", b.input, width)
        x = vision.drop_path(b, b.dropout(self._attended(b, normed), self.dropout), rate)
        residual = b.add(x, b.input)
        normed = vision.layer_norm(b, "layernorm_after", residual, width)
        x = vision.linear(b, "mlp.fc1", normed, (width, self.ffn))
        x = vision.convolution(b, "mlp.dwconv.dwconv", x, (self.ffn, self.ffn), self.grid, kernel=3, groups=self.ffn)
        x = b.dropout(b.activation(self.activation, x), self.dropout)
        x = b.dropout(vision.linear(b, "mlp.fc2", x, (self.ffn, width)), self.dropout)
        b.until_here(normed)
        return b.done(b.add(vision.drop_path(b, x, rate), residual))

    def _attended(self, b: BlockBuilder, normed: Value) -> Value:
        sizes = (self.width, self.width)
        q = vision.linear(b, "attention.q_proj", normed, sizes)
        keys = normed
        if self.reduction > 1:
            name = "attention.sequence_reduction."
            keys = vision.convolution(b, name + "sequence_reduction", normed, sizes, self.reduced, kernel=self.reduction)
            keys = vision.layer_norm(b, name + "layer_norm", keys, self.width)
        k, v = (vision.linear(b, f"attention.{one}_proj", keys, sizes) for one in "kv")
        context = vision.attention(b, q, k, v, heads=self.heads, channels=self.width, dropout=self.attention_dropout)
        out = vision.linear(b, "attention.o_proj", context, sizes)
        b.until_here(normed, keys, q, k, v)
        return out


def _stages(config: ConfigView, image: Grid) -> tuple[list[_Stage], tuple[int, ...]]:
    count = config.size("num_encoder_blocks", 4, maximum=64)
    typical = {
        "hidden_sizes": (32, 64, 160, 256), "num_attention_heads": (1, 2, 5, 8), "sr_ratios": (8, 4, 2, 1),
        "mlp_ratios": (4, 4, 4, 4), "patch_sizes": (7, 3, 3, 3), "strides": (4, 2, 2, 2), "depths": (2, 2, 2, 2),
    }  # fmt: skip
    rows = {key: config.sizes(key, default, count if config.has(key) else None) for key, default in typical.items()}
    if any(len(row) != count for row in rows.values()):
        raise InputError(f"{config.name}: num_encoder_blocks is {count}, but a list of stages has another length")
    stages: list[_Stage] = []
    grid = image
    for index in range(count):
        width, heads, reduction, ratio, patch, stride, _ = (row[index] for row in rows.values())
        stages.append(_Stage(config, (width, heads, reduction, width * ratio, patch, stride), grid, index))
        grid = stages[-1].grid
    return stages, rows["depths"]


def build(config: ConfigView, architecture: str) -> Description:
    """A SegFormer model from its config."""
    head = check_class(architecture, "Segformer")
    config.ignore("classifier_dropout_prob", "decoder_hidden_size", "semantic_loss_ignore_index", "downsampling_rates")
    image, colours = image_grid(config, None, typical=TYPICAL_SIDE), config.size("num_channels", 3)
    stages, depths = _stages(config, image)
    num_layers = check_depth(config, depths)
    rates = depth_rates(config.probability("drop_path_rate", 0.1), depths)

    b = BlockBuilder("patches", colours * image.size, SEQUENCE)
    segments = [Segment((b.done(stages[0].patches(b, b.input, colours, "pixels")),), role="embedding")]
    for index, stage in enumerate(stages):
        if index:
            before = stages[index - 1]
            b = BlockBuilder("patches", before.width * before.grid.size, SEQUENCE)
            x = before.feature_map(b)
            segments.append(Segment((b.done(stage.patches(b, x, before.width)),), role="between"))

        def make(_: int, drops: bool, stage: _Stage = stage, rate: float = rates[index][-1]) -> Block:
            return stage.block(rate if drops else 0.0)

        segments += stage_segments(rates[index], make)
    last = stages[-1]
    b = BlockBuilder("head", last.width * last.grid.size, SEQUENCE)
    x = last.feature_map(b, copied=config.flag("reshape_last_stage", True))
    classified = head == "ForImageClassification"
    if classified:
        x = classification(b, vision.average(b, x, last.width), config, x)
    return Description(
        published_dtype="fp32",
        segments=(*segments, head_segment(b.done(x))),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=last.width,
        num_heads=last.heads,
        num_kv_heads=last.heads,
        head_dim=last.width // last.heads,
        vocab_size=config.num_labels(),
        max_positions=None,
        pixels=colours * image.size,
        loss="classification" if classified else None,
    )
