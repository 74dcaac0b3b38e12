"""StableLM: LayerNorm with bias, gated MLP, rotary on part of each head, optional norms of heads, in sequence or in parallel.

The parts of a head are joined by `cat`, so that q lies head by head and the attention output is copied.
Source: transformers 5, models/stablelm/modeling_stablelm.py and configuration_stablelm.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import (
    EMBEDDING,
    activation_name,
    attention_projections,
    check_heads,
    gated_mlp,
    language_head,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment
from memfit.model.ops.norms import separate_head_norms


def _layer(config: ConfigView, hidden: int, heads: int, kv_heads: int, rotary_dim: int) -> Block:
    head_dim, ffn = hidden // heads, config.size("intermediate_size")
    bias = config.flag("use_qkv_bias", False)
    parallel = config.flag("use_parallel_residual", False)
    attention_dropout = config.probability("attention_dropout", 0.0)
    dropout = config.probability("hidden_dropout", 0.0)
    activation = activation_name(config, "hidden_act", "silu")

    b = BlockBuilder("decoder layer", hidden)
    normed = b.layer_norm("input_layernorm", b.input)
    q, k, v = attention_projections(b, normed, hidden, kv_heads * head_dim, bias=bias)
    if config.flag("qk_layernorm", False):
        q = separate_head_norms(b, "self_attn.q_layernorm", q, heads)
        k = separate_head_norms(b, "self_attn.k_layernorm", k, kv_heads)
    whole = (q, k)  # the parts that are not rotated are views of them
    q, k = b.rotary(q, k, head_dim=head_dim, rotary_dim=rotary_dim, parts_named=True)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=attention_dropout, head_major=True)
    attended = b.linear("self_attn.o_proj", context, hidden, split="row")
    b.until_here(q, k, v, *whole)
    if parallel:
        mixed = b.dropout(gated_mlp(b, normed, ffn, activation), dropout)
        out = b.add(b.add(b.input, attended), mixed)
    else:
        x = b.add(b.input, attended)
        normed_again = b.layer_norm("post_attention_layernorm", x)
        mixed = gated_mlp(b, normed_again, ffn, activation)
        b.until_here(normed_again)
        mixed = b.dropout(mixed, dropout)
        out = b.add(x, mixed)
    b.until_here(normed, attended, mixed)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A StableLM model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", 32)
    check_heads(config, heads, kv_heads)
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    vocab, num_layers = config.size("vocab_size"), config.layers("num_hidden_layers")
    rotary_dim = int(hidden // heads * config.rotary_share("partial_rotary_factor", 0.25))
    layer = _layer(config, hidden, heads, kv_heads, rotary_dim)
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
        token_dropout=0.0,
    )
    return Description(
        segments=(token_embedding(EMBEDDING, vocab, hidden), Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=config.size("max_position_embeddings", 4096),
        rotary_dim=rotary_dim,
        loss=loss,
    )
