"""ViT: patches of an image as tokens behind a class token, LayerNorm before attention and MLP, biases, learned positions.

Source: transformers 5, models/vit/modeling_vit.py and configuration_vit.py.
"""

from __future__ import annotations

from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import check_class, check_heads, checked, classification, head_segment, image_grid, stated_grid
from memfit.families.view import ConfigView
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision
from memfit.model.ops.vision import Grid


class Patches:
    """The images of a transformer over patches: their pixels, and the tokens that they become."""

    def __init__(self, config: ConfigView, patch_size: int) -> None:
        self.image = image_grid(config)
        self.channels = config.size("num_channels", 3)
        self.patch = Grid(*config.sides("patch_size", patch_size))
        self.grid = checked(config, self.image.after(self.patch, self.patch), "patches")
        stated = stated_grid(config)
        self.table_rows = max(0, stated.after(self.patch, self.patch).size) + 1
        """Rows of the table of positions: of the size that the config states, whatever the user's."""
        self.interpolated = stated != self.image

    @property
    def pixels(self) -> int:
        """Elements of one image."""
        return self.channels * self.image.size

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return self.grid.size + 1

    def embed(self, b: BlockBuilder, hidden: int, dropout: float, mask_token: tuple[int, ...] | None = None) -> Value:
        """Images -> hidden states. `mask_token`: the shape of a parameter that only masked images use."""
        x = vision.convolution(
            b, "patch_embeddings.projection", b.input, (self.channels, hidden), self.grid, kernel=self.patch, kind="pixels"
        )
        if mask_token is not None:
            x = vision.unused(b, "mask_token", mask_token, x)
        x = vision.class_token(b, "cls_token", x, hidden)
        x = vision.positions(b, "position_embeddings", x, (self.table_rows, hidden), interpolated=self.interpolated)
        return b.dropout(x, dropout)


def attended(b: BlockBuilder, x: Value, heads: int, *, bias: bool, dropout: float, softmax_dtype: str | None) -> Value:
    """Bidirectional attention with its output projection."""
    q, k, v = (b.linear(f"attention.{name}_proj", x, x.width, bias=bias) for name in "qkv")
    context = b.attention(
        q, k, v, num_heads=heads, num_kv_heads=heads, causal=False, dropout=dropout, softmax_dtype=softmax_dtype, cached=False
    )
    out = b.linear("attention.o_proj", context, x.width, bias=True, split="row")
    b.until_here(x, q, k, v)
    return out


def mlp(b: BlockBuilder, x: Value, ffn: int, activation: str) -> Value:
    """Two linears around an activation function."""
    inner = b.activation(activation, b.linear("mlp.fc1", x, ffn, bias=True))
    out = b.linear("mlp.fc2", inner, x.width, bias=True, split="row")
    b.until_here(x)
    return out


def _layer(config: ConfigView, hidden: int, heads: int, dropout: float) -> Block:
    b = BlockBuilder("encoder layer", hidden)
    x = b.layer_norm("layernorm_before", b.input)
    attention_dropout, bias = config.probability("attention_probs_dropout_prob", 0.0), config.flag("qkv_bias", True)
    x = b.dropout(attended(b, x, heads, bias=bias, dropout=attention_dropout, softmax_dtype="fp32"), dropout)
    residual = b.add(x, b.input)
    x = b.layer_norm("layernorm_after", residual)
    x = mlp(b, x, config.size("intermediate_size", 3072), activation_name(config, "hidden_act", "gelu"))
    return b.done(b.add(b.dropout(x, dropout), residual))


def _head(config: ConfigView, head: str, hidden: int) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", hidden)
    x = b.layer_norm("layernorm", b.input)
    first = b.one_token(x)
    width = config.size("pooler_output_size", hidden)
    activation = activation_name(config, "pooler_act", "tanh")
    if head == "Model":
        return head_segment(b.done(b.activation(activation, b.linear("pooler.dense", first, width, bias=True)))), None
    return head_segment(b.done(classification(b, first, config, x))), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A ViT model from its config."""
    head = check_class(architecture, "ViT")
    config.ignore("encoder_stride")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_heads(config, hidden, heads)
    num_layers = config.layers("num_hidden_layers") if config.has("num_hidden_layers") else 12
    dropout = config.probability("hidden_dropout_prob", 0.0)
    patches = Patches(config, 16)
    b = BlockBuilder("embedding", patches.pixels, SEQUENCE)
    embedding = Segment((b.done(patches.embed(b, hidden, dropout)),), role="embedding")
    last, loss = _head(config, head, hidden)
    return Description(
        published_dtype="fp32",
        segments=(embedding, Segment((_layer(config, hidden, heads, dropout),), num_layers), last),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=config.num_labels(),
        max_positions=None,
        pixels=patches.pixels,
        tokens_per_image=patches.tokens,
        loss=loss,
    )
