"""DINOv2: a ViT with a factor for each channel on both branches, stochastic depth, an optional SwiGLU; the classifier reads the
class token and the mean of the patches.

Source: transformers 5, models/dinov2/modeling_dinov2.py and configuration_dinov2.py.
"""

from __future__ import annotations

from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.images import BACKBONE_KEYS, check_class, check_heads, classification, feed_forward_width, head_segment
from memfit.families.view import ConfigView
from memfit.families.vit import Patches, attended, mlp
from memfit.model import SEQUENCE, Block, BlockBuilder, Segment, Value
from memfit.model.ops import vision


def _swiglu(b: BlockBuilder, x: Value, ffn: int) -> Value:
    """silu(gate) * up with biases; two thirds of the MLP's width, rounded up to a multiple of 8."""
    ffn = (int(ffn * 2 / 3) + 7) // 8 * 8
    gate = b.activation("silu", b.linear("mlp.gate_proj", x, ffn, bias=True))
    inner = b.multiply(gate, b.linear("mlp.up_proj", x, ffn, bias=True))
    out = b.linear("mlp.down_proj", inner, x.width, bias=True, split="row")
    b.until_here(x)
    return out


def _layer(config: ConfigView, hidden: int, heads: int) -> Block:
    drop_path = config.probability("drop_path_rate", 0.0)
    dropout, bias = config.probability("attention_probs_dropout_prob", 0.0), config.flag("qkv_bias", True)
    ffn = feed_forward_width(config.name, config.number("mlp_ratio", 4), hidden)
    activation, gated = activation_name(config, "hidden_act", "gelu"), config.flag("use_swiglu_ffn", False)

    b = BlockBuilder("encoder layer", hidden)
    x = attended(b, b.layer_norm("norm1", b.input), heads, bias=bias, dropout=dropout, softmax_dtype=None)
    x = vision.layer_scale(b, "layer_scale1.lambda1", x, hidden)
    residual = b.add(vision.drop_path(b, x, drop_path), b.input)
    x = b.layer_norm("norm2", residual)
    x = _swiglu(b, x, ffn) if gated else mlp(b, x, ffn, activation)
    x = vision.layer_scale(b, "layer_scale2.lambda1", x, hidden)
    return b.done(b.add(vision.drop_path(b, x, drop_path), residual))


def _head(config: ConfigView, head: str, hidden: int) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", hidden)
    x = b.layer_norm("layernorm", b.input)
    if head == "Model":
        return head_segment(b.done(b.one_token(x))), None
    return head_segment(b.done(classification(b, vision.mean_of_patches(b, x), config, x))), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A DINOv2 model from its config."""
    head = check_class(architecture, "Dinov2")
    config.ignore(*BACKBONE_KEYS, "reshape_hidden_states", "apply_layernorm", "layerscale_value")
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_heads(config, hidden, heads)
    num_layers = config.layers("num_hidden_layers") if config.has("num_hidden_layers") else 12
    patches = Patches(config, 14)
    b = BlockBuilder("embedding", patches.pixels, SEQUENCE)
    mask_token = (1, hidden) if config.flag("use_mask_token", True) else None
    x = patches.embed(b, hidden, config.probability("hidden_dropout_prob", 0.0), mask_token)
    last, loss = _head(config, head, hidden)
    return Description(
        published_dtype="fp32",
        segments=(
            Segment((b.done(x),), role="embedding"),
            Segment((_layer(config, hidden, heads),), num_layers),
            last,
        ),
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
