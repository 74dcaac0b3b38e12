"""MPT: ALiBi, no biases, LayerNorm without bias, a fused Wqkv, attention in its own Python.

Source: transformers 5, models/mpt/modeling_mpt.py and configuration_mpt.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import ONCE, PAIR, Block, BlockBuilder, Segment, SharedTensor
from memfit.model.ops import decoders as ops

WORDS = "transformer.wte"
NOTES = (
    "resid_pdrop", "emb_pdrop", "learned_pos_emb", "init_device", "logit_scale", "no_bias", "embedding_fraction", "norm_type",
    "verbose", "init_config", "expansion_ratio",
)  # fmt: skip
"""Keys that transformers' class does not read: its MLP is always four times as wide, and it never has biases."""


def _attention_settings(config: ConfigView) -> tuple[float, bool]:
    """Dropout, and whether q, k and v are clipped."""
    raw = config.mapping("attn_config")
    dropout = raw.get("attn_pdrop", 0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise InputError(f"{config.name}: attn_config.attn_pdrop must be a number from 0 to 1, not {dropout!r:.40}")
    return float(dropout), bool(raw.get("clip_qkv"))


def _layer(hidden: int, heads: int, dropout: float, clipped: bool) -> Block:
    b = BlockBuilder("decoder layer", hidden)
    normed = ops.norm(b, "norm_1", b.input, bias=False)
    fused = b.linear("attn.Wqkv", normed, 3 * hidden)
    q, k, v = b.split(ops.clamp(b, fused) if clipped else fused, hidden, hidden, hidden)
    context = ops.attention(b, "mpt_attention", q, k, v, num_heads=heads, num_kv_heads=heads, dropout=dropout)
    attended = b.linear("attn.out_proj", context, hidden, split="row")
    b.until_here(q, k, v, context)
    x = b.add(b.dropout(attended, dropout), b.input)
    b.until_here(normed)
    normed = ops.norm(b, "norm_2", x, bias=False)
    inner = b.activation("gelu", b.linear("ffn.up_proj", normed, 4 * hidden))
    mixed = b.linear("ffn.down_proj", inner, hidden, split="row")
    out = b.add(b.dropout(mixed, dropout), x)
    b.until_here(normed, inner, mixed, attended)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """An MPT model from its config."""
    hidden, heads = config.size("d_model", 2048), config.size("n_heads", 16)
    if hidden % heads:
        raise InputError(f"{config.name}: d_model {hidden} is not a multiple of n_heads {heads}")
    config.ignore(*NOTES)
    dropout, clipped = _attention_settings(config)
    vocab, positions, num_layers = config.size("vocab_size", 50368), config.size("max_seq_len", 2048), config.layers("n_layers")
    b = BlockBuilder("embedding", 1)
    embedding = Segment((b.done(b.embedding(WORDS, vocab, hidden)),), role="embedding")
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: ops.norm(b, "transformer.norm_f", x, bias=False),
        tied_to=WORDS + ".weight" if config.flag("tie_word_embeddings", True) else "",
        token_upcast=False,
    )
    return Description(
        segments=(embedding, Segment((_layer(hidden, heads, dropout, clipped),), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        mask="own",
        # the mask as booleans, which every layer's masked_fill keeps, and the bias for the longest sequence
        shared=(SharedTensor(PAIR, 1, "bool", saved=True), SharedTensor(ONCE, heads * positions, "fp32", per_head=True)),
        loss=loss,
        attention_kernels=("eager",),
    )
