"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with one key-value head, a fused c_attn and GELU by tanh in one kernel.

Source: transformers 5, models/gpt_bigcode/modeling_gpt_bigcode.py and configuration_gpt_bigcode.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, language_head
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import POSITION, Block, BlockBuilder, Segment

NOTES = (
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size", "pad_key_length",
    "pre_allocate_kv_cache", "validate_runner_input", "num_key_value_heads",
)  # fmt: skip
"""Keys of published configs that change nothing: its softmax is always in fp32."""


def _layer(config: ConfigView, hidden: int, heads: int, kv_heads: int) -> Block:
    dropout, attention_dropout = config.probability("resid_pdrop", 0.1), config.probability("attn_pdrop", 0.1)
    inner = config.optional_size("n_inner") or 4 * hidden
    activation = activation_name(config, "activation_function", "gelu_pytorch_tanh")
    kv_width = hidden // heads * kv_heads
    b = BlockBuilder("decoder layer", hidden)
    x = b.layer_norm("ln_1", b.input)
    fused = b.linear("attn.c_attn", x, hidden + 2 * kv_width, bias=True)
    q, k, v = b.split(fused, hidden, kv_width, kv_width)
    context = b.attention(q, k, v, num_heads=heads, num_kv_heads=kv_heads, dropout=attention_dropout)
    attended = b.dropout(b.linear("attn.c_proj", context, hidden, bias=True, split="row"), dropout)
    b.until_here(x, q, k, v)
    x = b.add(attended, b.input)
    normed = b.layer_norm("ln_2", x)
    activated = b.activation(activation, b.linear("mlp.c_fc", normed, inner, bias=True))
    mixed = b.dropout(b.linear("mlp.c_proj", activated, hidden, bias=True, split="row"), dropout)
    b.until_here(normed)
    out = b.add(x, mixed)
    b.until_here(attended)
    return b.done(out)


def build(config: ConfigView, architecture: str) -> Description:
    """A GPT-BigCode model from its config."""
    hidden, heads, num_layers = config.size("n_embd", 768), config.size("n_head", 12), config.layers("n_layer")
    if hidden % heads:
        raise InputError(f"{config.name}: n_embd {hidden} is not a multiple of n_head {heads}")
    if config.flag("add_cross_attention", False):
        raise InputError(f"{config.name}: add_cross_attention is not supported for GPT-BigCode")
    config.ignore(*NOTES)
    kv_heads = 1 if config.flag("multi_query", True) else heads
    vocab, positions = config.size("vocab_size", 50257), config.size("n_positions", 1024)
    layer = _layer(config, hidden, heads, kv_heads)
    b = BlockBuilder("embedding", 1)
    words = b.embedding("transformer.wte", vocab, hidden)
    places = b.embedding("transformer.wpe", positions, hidden, axis=POSITION, ids="positions")
    b.provide("position embeddings", places)  # the backbone's own name for them
    x = b.add(words, places)
    embedding = Segment((b.done(b.dropout(x, config.probability("embd_pdrop", 0.1))),), role="embedding")
    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.layer_norm("transformer.ln_f", x),
        tied_to="transformer.wte.weight" if config.flag("tie_word_embeddings", True) else "",
        token_upcast=False,
    )
    return Description(
        segments=(embedding, Segment((layer,), num_layers), head),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        buffer_bytes=positions * positions,  # a causal mask of booleans, which no layer reads
        loss=loss,
    )
