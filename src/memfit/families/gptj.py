"""GPT-J: rotary of every two elements on part of each head, attention and MLP in parallel, biases in MLP and head only.

Source: transformers 5, models/gptj/modeling_gptj.py and configuration_gptj.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import POSITION, Block, BlockBuilder, Segment, SharedTensor
from memfit.model.ops import decoders as ops


def _layer(config: ConfigView, hidden: int, heads: int, rotary_dim: int) -> Block:
    dropout, attention_dropout = config.probability("resid_pdrop", 0.0), config.probability("attn_pdrop", 0.0)
    inner = config.optional_size("n_inner") or 4 * hidden
    activation = activation_name(config, "activation_function", "gelu_new")
    b = BlockBuilder("decoder layer", hidden)
    x = b.layer_norm("ln_1", b.input)
    q = b.linear("attn.q_proj", x, hidden)
    k = b.linear("attn.k_proj", x, hidden)
    v = b.linear("attn.v_proj", x, hidden)
    k = ops.interleaved_rotary(b, k, head_dim=hidden // heads, rotary_dim=rotary_dim)
    q = ops.interleaved_rotary(b, q, head_dim=hidden // heads, rotary_dim=rotary_dim)
    context = ops.attention(b, "gptj_attention", q, k, v, num_heads=heads, num_kv_heads=heads, dropout=attention_dropout)
    attended = b.dropout(b.linear("attn.out_proj", context, hidden, split="row"), dropout)
    b.until_here(q, k, v)
    activated = b.activation(activation, b.linear("mlp.fc_in", x, inner, bias=True))
    mixed = b.dropout(b.linear("mlp.fc_out", activated, hidden, bias=True, split="row"), dropout)
    out = b.add(b.add(attended, mixed), b.input)
    b.until_here(x, attended, mixed)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A GPT-J model from its config."""
    hidden, heads, num_layers = config.size("n_embd", 4096), config.size("n_head", 16), config.layers("n_layer")
    if hidden % heads:
        raise InputError(f"{config.name}: n_embd {hidden} is not a multiple of n_head {heads}")
    rotary_dim = config.size("rotary_dim", 64)
    if rotary_dim > hidden // heads:
        raise InputError(f"{config.name}: rotary_dim {rotary_dim} is more than the head dimension {hidden // heads}")
    config.ignore("rotary")
    vocab, positions = config.size("vocab_size", 50400), config.size("n_positions", 2048)
    layer = _layer(config, hidden, heads, rotary_dim)
    b = BlockBuilder("embedding", 1)
    words = b.embedding("transformer.wte", vocab, hidden)
    embedding = Segment((b.done(b.dropout(words, config.probability("embd_pdrop", 0.0))),), role="embedding")
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("transformer.ln_f", x),
        tied_to="transformer.wte.weight" if config.flag("tie_word_embeddings", False) else "",
        bias=True,
    )
    return Description(
        published_dtype="fp32",
        segments=(embedding, Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        shared=(SharedTensor(POSITION, rotary_dim),),
        buffer_bytes=4 * positions * rotary_dim,  # the table of all positions, fp32
        loss=loss,
    )
