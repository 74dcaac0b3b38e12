"""gpt-oss: sinks in attention, sliding and full layers in turn, experts with biases and a clamped gate in every layer.

Source: transformers 5, models/gpt_oss/modeling_gpt_oss.py and configuration_gpt_oss.py.
"""

from __future__ import annotations

from memfit.families.common import EMBEDDING, attention_projections, check_heads, language_head, layer_segments, token_embedding
from memfit.families.description import Description
from memfit.families.mixtral import check_top_k, with_active
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder
from memfit.model.ops.latent import halves_rotary
from memfit.model.ops.moe import Experts, sparse_mlp
from memfit.model.ops.norms import rms_norm_fp32
from memfit.model.ops.sinks import sink_attention


def build(config: ConfigView, architecture: str) -> Description:
    """A gpt-oss model from its config."""
    hidden, heads = config.size("hidden_size", 2880), config.size("num_attention_heads", 64)
    kv_heads = config.size("num_key_value_heads", 8)
    check_heads(config, heads, kv_heads)
    head_dim = config.size("head_dim", 64)
    vocab = config.size("vocab_size", 201_088)
    bias = config.flag("attention_bias", True)
    dropout = config.probability("attention_dropout", 0.0)
    window = config.optional_size("sliding_window") if config.states("sliding_window") else 128
    experts = Experts(
        num_experts=config.size("num_local_experts", 128),
        top_k=config.size("num_experts_per_tok", 4),
        ffn=config.size("intermediate_size", 2880),
        activation="silu",
        normalised=False,
        fp32_scores=False,
        router="softmax_of_best",
        clamped=True,
    )
    check_top_k(config, experts.top_k, experts.num_experts)
    config.ignore(
        "hidden_act", "swiglu_alpha", "swiglu_limit", "router_aux_loss_coef", "initial_context_length", "experts_per_token",
        "output_router_logits",
    )  # fmt: skip
    num_layers = config.layers("num_hidden_layers")
    types = config.layer_types(num_layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]

    def layer(kind: str) -> Block:
        b = BlockBuilder("decoder layer", hidden)
        x = rms_norm_fp32(b, "input_layernorm", b.input)
        q, k, v = attention_projections(b, x, heads * head_dim, kv_heads * head_dim, bias=bias)
        q, k = halves_rotary(b, q, k)
        context = sink_attention(
            b,
            q,
            k,
            v,
            num_heads=heads,
            num_kv_heads=kv_heads,
            dropout=dropout,
            window=window if kind == "sliding_attention" else None,
        )
        attended = b.linear("self_attn.o_proj", context, hidden, bias=bias, split="row")
        b.until_here(x, q, k, v)
        x = b.add(b.input, attended)

        normed = rms_norm_fp32(b, "post_attention_layernorm", x)
        mixed = sparse_mlp(b, normed, experts)
        b.until_here(normed)
        return b.done(b.add(x, mixed))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: rms_norm_fp32(b, "model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
    )
    return with_active(
        Description(
            segments=(token_embedding(EMBEDDING, vocab, hidden), *layer_segments(config, types, layer), head),
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_positions=config.size("max_position_embeddings", 131_072),
            rotary_dim=head_dim // 2,
            buffer_bytes=2 * head_dim,
            loss=loss,
            attention_kernels=("eager",),
        )
    )
