"""ALBERT: a narrow embedding with a projection, and layers that share their parameters within a group.

Source: transformers 5, models/albert/modeling_albert.py and configuration_albert.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.electra import narrow_embedding
from memfit.families.encoders import check_encoder, token_head, unknown_head
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment

WORDS = "albert.embeddings.word_embeddings"
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def _layer(hidden: int, heads: int, ffn: int, activation: str, dropout: float, attention_dropout: float) -> Block:
    b = BlockBuilder("encoder layer", hidden)
    x = b.input
    q = b.linear("attention.query", x, hidden, bias=True)
    k = b.linear("attention.key", x, hidden, bias=True)
    v = b.linear("attention.value", x, hidden, bias=True)
    context = b.attention(
        q, k, v, num_heads=heads, num_kv_heads=heads, causal=False, dropout=attention_dropout, softmax_dtype=None, cached=False
    )
    attended = b.dropout(b.linear("attention.dense", context, hidden, bias=True, split="row"), dropout)
    attended = b.layer_norm("attention.LayerNorm", b.add(x, attended))
    b.until_here(q, k, v)
    inner = b.activation(activation, b.linear("ffn", attended, ffn, bias=True))
    mixed = b.linear("ffn_output", inner, hidden, bias=True, split="row")
    out = b.layer_norm("full_layer_layer_norm", b.add(mixed, attended))
    b.until_here(mixed)
    return b.done(out)


def _groups(config: ConfigView, block: Block, num_layers: int) -> tuple[Segment, ...]:
    """Layer i runs the blocks of group i / (layers / groups), rounded down as Python rounds."""
    groups = config.size("num_hidden_groups", 1, maximum=1024)
    inner = config.size("inner_group_num", 1, maximum=64)
    if groups > num_layers:
        raise InputError(f"{config.name}: num_hidden_groups {groups} is more than num_hidden_layers {num_layers}")
    used = [int(layer / (num_layers / groups)) for layer in range(num_layers)]
    return tuple(Segment((block,) * inner, used.count(group), shared=True) for group in range(groups) if group in used)


def _head(
    config: ConfigView, architecture: str, hidden: int, width: int, vocab: int, activation: str
) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", hidden)
    x = b.input
    kind = architecture.removeprefix("Albert")
    labels, dropout = config.num_labels(), config.probability("classifier_dropout_prob", 0.1)
    tied = config.flag("tie_word_embeddings", True)
    if kind == "ForMaskedLM":
        x = b.activation(activation, b.linear("predictions.dense", x, width, bias=True))
        x = b.layer_norm("predictions.LayerNorm", x)
        tied_to = WORDS + ".weight" if tied else ""
        logits = b.head("predictions.decoder", x, vocab, bias=True, tied_to=tied_to, second_bias=not tied)
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "masked-lm"
    if kind in ("Model", "ForSequenceClassification"):
        pooled = b.activation("tanh", b.linear("albert.pooler", b.one_token(x), hidden, bias=True))
        if kind == "Model":
            return Segment((b.done(pooled),), role="head"), None
        logits = b.linear("classifier", b.dropout(pooled, dropout), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if kind in ("ForTokenClassification", "ForQuestionAnswering"):
        return token_head(b, labels, dropout if kind == "ForTokenClassification" else 0.0), "classification"
    raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """An ALBERT model from its config."""
    hidden, heads = config.size("hidden_size", 4096), config.size("num_attention_heads", 64)
    check_encoder(config, hidden, heads)
    width = config.size("embedding_size", 128)
    vocab, positions = config.size("vocab_size", 30000), config.size("max_position_embeddings", 512)
    dropout = config.probability("hidden_dropout_prob", 0.0)
    activation = activation_name(config, "hidden_act", "gelu_new")
    ffn, attention_dropout = config.size("intermediate_size", 16384), config.probability("attention_probs_dropout_prob", 0.0)
    for unused in ("net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor"):
        config.has(unused)  # keys of the original implementation, which transformers does not read
    num_layers = config.size("num_hidden_layers", 12, maximum=1024)
    b = BlockBuilder("embedding", 1)
    x = narrow_embedding(b, "albert.embeddings", vocab, positions, config.size("type_vocab_size", 2), width, dropout)
    narrow = b.done(x)  # as wide as a name holds it while the layers run; they read the projection
    b = BlockBuilder("projection", width)
    mapped = b.done(b.linear("albert.encoder.embedding_hidden_mapping_in", b.input, hidden, bias=True))
    head, loss = _head(config, architecture, hidden, width, vocab, activation)
    return Description(
        published_dtype="fp32",
        segments=(
            Segment((narrow,), role="embedding"),
            Segment((mapped,), role="between"),
            *_groups(config, _layer(hidden, heads, ffn, activation, dropout, attention_dropout), num_layers),
            head,
        ),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        buffer_bytes=2 * 8 * positions,  # position_ids and token_type_ids, int64
        loss=loss,
    )
