"""DeepSeek-V2 and -V3: multi-head latent attention, experts with shared ones beside them, the first layers dense.

q is projected in one or two steps; k and v come from a latent vector, beside a rotary part of k that all heads share.
Source: transformers 5, models/deepseek_v2/modeling_deepseek_v2.py, models/deepseek_v3/modeling_deepseek_v3.py and their
configurations.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import (
    EMBEDDING,
    activation_name,
    gated_mlp,
    language_head,
    layer_segments,
    token_embedding,
)
from memfit.families.description import Description
from memfit.families.mixtral import check_top_k, with_active
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Value
from memfit.model.ops import latent
from memfit.model.ops.moe import Experts, sparse_mlp
from memfit.records import Record

IGNORED = (
    "aux_loss_alpha", "seq_aux", "scoring_func", "ep_size", "moe_layer_freq", "routed_scaling_factor", "num_nextn_predict_layers",
    "num_mtp_layers", "router_aux_loss_coef", "head_dim", "qk_head_dim", "output_router_logits",
)  # fmt: skip
"""Constants, the extra prediction layers (which the class leaves out), and widths that follow from others."""


class Latent(Record):
    """The dimensions of one layer's attention."""

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rotary: int
    value: int
    bias: bool
    dropout: float
    rotation: str


def _attention(b: BlockBuilder, x: Value, shape: Latent) -> Value:
    """q from x, or from a latent of its own; k and v from theirs."""
    heads, name = shape.heads, "self_attn."
    q_width = heads * (shape.nope + shape.rotary)
    if shape.q_rank is None:
        q = b.linear(name + "q_proj", x, q_width)
    else:
        narrow = b.linear(name + "q_a_proj", x, shape.q_rank, bias=shape.bias, split="none")
        q = b.linear(name + "q_b_proj", b.rms_norm(name + "q_a_layernorm", narrow), q_width)
    q_pass, q_rotary = b.split(q, heads * shape.nope, heads * shape.rotary)
    compressed = b.linear(name + "kv_a_proj_with_mqa", x, shape.kv_rank + shape.rotary, bias=shape.bias, split="none")
    narrow, k_rotary = b.split(compressed, shape.kv_rank, shape.rotary)
    narrow = b.rms_norm(name + "kv_a_layernorm", narrow)
    if shape.rotation == "pairs":
        q_rotary, k_rotary = latent.interleaved_pairs(b, q_rotary, k_rotary)
    elif shape.rotation == "complex":
        q_rotary, k_rotary = latent.complex_rotary(b, q_rotary, k_rotary)
    else:
        q_rotary, k_rotary = b.rotary(q_rotary, k_rotary, head_dim=shape.rotary)
    b.cache_latents(narrow, k_rotary)
    narrow, k_rotary = latent.from_cache(b, narrow), latent.from_cache(b, k_rotary)
    query = latent.join(b, q_pass, q_rotary)
    expanded = b.linear(name + "kv_b_proj", narrow, heads * (shape.nope + shape.value))
    k, v = latent.expand(b, expanded, k_rotary, heads, q_width)
    context = b.attention(query, k, v, num_heads=heads, num_kv_heads=heads, dropout=shape.dropout, head_major=True, cached=False)
    attended = b.linear(name + "o_proj", context, shape.hidden, bias=shape.bias, split="row")
    b.until_here(x, q, compressed, narrow, k_rotary, q_rotary, query, k, v)
    return attended


def build(config: ConfigView, architecture: str) -> Description:
    """A DeepSeek-V2 or -V3 model from its config."""
    third = config.text("model_type", "") == "deepseek_v3"
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.size("num_key_value_heads", heads) != heads:
        raise InputError(f"{config.name}: num_key_value_heads must be num_attention_heads: every head has keys of its own")
    rank = config.optional_size("q_lora_rank") if config.states("q_lora_rank") else 1536
    interleaved = config.flag("rope_interleave", True)
    shape = Latent(
        hidden=hidden,
        heads=heads,
        q_rank=rank,
        kv_rank=config.size("kv_lora_rank", 512),
        nope=config.size("qk_nope_head_dim", 128),
        rotary=config.size("qk_rope_head_dim", 64),
        value=config.size("v_head_dim", 128),
        bias=config.flag("attention_bias", False),
        dropout=config.probability("attention_dropout", 0.0),
        rotation=("pairs" if interleaved else "halves") if third else "complex",
    )
    activation = activation_name(config, "hidden_act", "silu")
    ffn, vocab = config.size("intermediate_size"), config.size("vocab_size")
    mlp_bias = False if third else config.flag("mlp_bias", False)
    experts, shared = _experts(config, activation, third=third)
    num_layers = config.layers("num_hidden_layers")
    dense = min(config.count("first_k_dense_replace", 3 if third else 0), num_layers)
    config.ignore(*IGNORED)

    def layer(kind: str) -> Block:
        b = BlockBuilder("decoder layer", hidden)
        normed = b.rms_norm("input_layernorm", b.input)
        x = b.add(b.input, _attention(b, normed, shape))
        normed = b.rms_norm("post_attention_layernorm", x)
        if kind == "dense":
            down = gated_mlp(b, normed, ffn, activation, bias=mlp_bias)
        else:
            routed = sparse_mlp(b, normed, experts)
            down = b.add(routed, gated_mlp(b, normed, shared, activation, bias=mlp_bias, name="mlp.shared_experts"))
        b.until_here(normed)
        return b.done(b.add(x, down))

    head, loss = language_head(
        config,
        architecture,
        hidden,
        vocab,
        norm=lambda b, x: b.rms_norm("model.norm", x),
        tied_to=EMBEDDING + ".weight" if config.flag("tie_word_embeddings", False) else "",
    )
    kinds = ["dense"] * dense + ["sparse"] * (num_layers - dense)
    return with_active(
        Description(
            segments=(token_embedding(EMBEDDING, vocab, hidden), *layer_segments(config, kinds, layer), head),
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=shape.nope + shape.rotary,
            vocab_size=vocab,
            max_positions=config.size("max_position_embeddings", 4096 if third else 2048),
            # DeepSeek-V2's table holds a complex number for two elements: as many bytes as cos and sin in fp32 for half of them
            rotary_dim=shape.rotary if third else shape.rotary // 2,
            rotary_fp32=not third,
            buffer_bytes=4 * experts.num_experts * (num_layers - dense) if third else 2 * shape.rotary,
            loss=loss,
        )
    )


def _experts(config: ConfigView, activation: str, *, third: bool) -> tuple[Experts, int]:
    """The routed experts, and the width of the shared ones together."""
    width = config.size("moe_intermediate_size", 2048 if third else 1407)
    method = config.choice("topk_method", "noaux_tc" if third else "greedy", ("greedy", "group_limited_greedy", "noaux_tc"))
    grouped = third or method == "group_limited_greedy"
    groups, chosen = config.count("n_group", 8 if third else 1), config.count("topk_group", 4 if third else 1)
    experts = Experts(
        num_experts=config.size("n_routed_experts", 256 if third else 64),
        top_k=config.size("num_experts_per_tok", 8 if third else None),
        ffn=width,
        activation=activation,
        normalised=config.flag("norm_topk_prob", third),
        fp32_scores=True,
        router="sigmoid_groups" if third else "softmax_groups",
        groups=groups if grouped else 0,
    )
    check_top_k(config, experts.top_k, experts.num_experts)
    if grouped and (experts.num_experts % max(groups, 1) or chosen > groups):
        raise InputError(
            f"{config.name}: {experts.num_experts} experts do not form n_group {groups} groups of which {chosen} are chosen"
        )
    return experts, width * config.size("n_shared_experts", 1 if third else 2)
