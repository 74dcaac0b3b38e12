"""Mamba and Falcon Mamba: one norm and one selective state space a layer, no attention, the residual stream in fp32.

Falcon Mamba divides the time step, B and C by their root mean square; it has no other difference that takes memory.
Source: transformers 5, models/mamba/modeling_mamba.py, models/falcon_mamba/modeling_falcon_mamba.py and their configurations.
"""

from __future__ import annotations

from memfit.families.common import activation_name, language_head, token_embedding
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment, Value
from memfit.model.ops.mixers import mask_padding, selective_state_space, to_fp32
from memfit.model.ops.seq2seq import weight_format

EMBEDDING = "backbone.embeddings"

FUSED_CHUNK = 2048
"""Tokens after which mamba-ssm's scan keeps a state (csrc/selective_scan/selective_scan.cpp)."""

IGNORED = (
    "rescale_prenorm_residual", "time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor",
    "use_associative_scan", "mixer_rms_eps", "fused_add_norm", "rms_norm", "residual_dtype", "d_inner", "d_model", "n_layer",
    "ssm_cfg", "pad_vocab_size_multiple",
)  # fmt: skip
"""Initialisation, constants, the original code's names of what is given as well, and a scan for `torch.compile`."""


def mixer_sizes(config: ConfigView, default: int = 768) -> tuple[int, int]:
    """Hidden size and inner width; transformers 5 computes the latter from `expand`, whatever the config says."""
    hidden = config.size("hidden_size", default)
    inner = int(config.number("expand", 2) * hidden)
    config.ignore("intermediate_size", *IGNORED)
    return hidden, inner


def residual_block(hidden: int) -> tuple[BlockBuilder, Value]:
    """A layer up to its mixer's input."""
    b = BlockBuilder("layer", hidden)
    x = b.rms_norm("norm", weight_format(b, b.input))
    return b, mask_padding(b, x)


def close(b: BlockBuilder, mixed: Value, residual_fp32: bool) -> Block:
    """residual + mixed."""
    return b.done(b.add(to_fp32(b, b.input) if residual_fp32 else b.input, mixed))


def describe(
    config: ConfigView,
    architecture: str,
    layer: Block,
    hidden: int,
    *,
    vocab: int = 50_280,
    tied: bool = True,
    chunk: int = 0,
    buffer_elements: int = 0,
) -> Description:
    """Embedding, equal layers, norm and head; there is no limit to the sequence. `vocab` and `tied` are the class' defaults."""
    vocab = config.size("vocab_size", vocab)
    tied = config.flag("tie_word_embeddings", tied)
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: weight_format(b, b.rms_norm("backbone.norm_f", x)),
        tied_to=EMBEDDING + ".weight" if tied else "",
        fp32_logits=True,
    )
    num_layers = config.layers("num_hidden_layers")
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden), Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden,
        vocab_size=vocab,
        max_positions=None,
        mask="own",
        one_sequence_differs=True,
        attention_kernels=(),
        chunk=chunk,
        buffer_elements=buffer_elements,
        loss=loss,
    )


def build(config: ConfigView, architecture: str) -> Description:
    """A Mamba or Falcon Mamba model from its config."""
    hidden, inner = mixer_sizes(config)
    falcon = config.text("model_type", "mamba") == "falcon_mamba"
    rank = -(-hidden // 16) if config.says("time_step_rank", "auto") else config.size("time_step_rank", -(-hidden // 16))
    states = config.size("state_size", 16)
    bias = config.flag("use_bias", False)
    residual_fp32 = config.flag("residual_in_fp32", True)
    if config.flag("use_mambapy", False):
        config.refuse("use_mambapy", "false: mamba.py's parallel scan is not counted")

    b, x = residual_block(hidden)
    xz = b.linear("mixer.in_proj", x, 2 * inner, bias=bias)
    mixed = selective_state_space(
        b,
        "mixer",
        xz,
        hidden,
        states=states,
        rank=rank,
        taps=config.size("conv_kernel", 4),
        activation=activation_name(config, "hidden_act", "silu"),
        bias=bias,
        conv_bias=config.flag("use_conv_bias", True),
        normed=falcon,
    )
    # Falcon Mamba's norms have a buffer of ones each, as wide as what they divide
    buffers = (inner + 2 * states) * config.layers("num_hidden_layers") if falcon else 0
    layer = close(b, mixed, residual_fp32)
    return describe(config, architecture, layer, hidden, chunk=FUSED_CHUNK, buffer_elements=buffers)
