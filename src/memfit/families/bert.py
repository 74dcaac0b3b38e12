"""BERT: an encoder with LayerNorm after each residual, learned positions and token types, and the head that the config names.

Source: transformers 5, models/bert/modeling_bert.py.
"""

from __future__ import annotations

from memfit.errors import InputError, UnknownArchitectureError, did_you_mean
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.view import ConfigView
from memfit.model import PAIR, POSITION, Block, BlockBuilder, Segment

WORDS = "bert.embeddings.word_embeddings"
HEADS = (
    "BertModel",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)


def _embedding(vocab: int, positions: int, types: int, hidden: int, dropout: float) -> Segment:
    b = BlockBuilder("embedding", 1)
    words = b.embedding(WORDS, vocab, hidden)
    x = b.add(words, b.embedding("bert.embeddings.token_type_embeddings", types, hidden, ids="positions"))
    x = b.add(x, b.embedding("bert.embeddings.position_embeddings", positions, hidden, axis=POSITION, ids="buffer"))
    x = b.dropout(b.layer_norm("bert.embeddings.LayerNorm", x), dropout)
    return Segment((b.done(x),), role="embedding")


def encoder_layer(hidden: int, heads: int, ffn: int, activation: str, dropout: float, attention_dropout: float) -> Block:
    """One layer: LayerNorm after each residual. Also RoBERTa's and ELECTRA's."""
    b = BlockBuilder("encoder layer", hidden)
    x = b.input
    q = b.linear("attention.self.query", x, hidden, bias=True)
    k = b.linear("attention.self.key", x, hidden, bias=True)
    v = b.linear("attention.self.value", x, hidden, bias=True)
    context = b.attention(
        q, k, v, num_heads=heads, num_kv_heads=heads, causal=False, dropout=attention_dropout, softmax_dtype=None, cached=False
    )
    b.until_here(q, k, v)
    attended = b.dropout(b.linear("attention.output.dense", context, hidden, bias=True, split="row"), dropout)
    x = b.layer_norm("attention.output.LayerNorm", b.add(attended, x))
    b.until_here(context, attended)

    inner = b.activation(activation, b.linear("intermediate.dense", x, ffn, bias=True))
    mixed = b.dropout(b.linear("output.dense", inner, hidden, bias=True, split="row"), dropout)
    out = b.layer_norm("output.LayerNorm", b.add(mixed, x))
    b.until_here(x, inner, mixed)
    return b.done(out)


def _head(
    config: ConfigView, architecture: str, hidden: int, vocab: int, activation: str, dropout: float, tied: bool
) -> tuple[Segment, str | None]:
    labels = config.num_labels()
    b = BlockBuilder("head", hidden)
    x = b.input
    if architecture == "BertForMaskedLM":
        x = b.layer_norm(
            "cls.predictions.transform.LayerNorm",
            b.activation(activation, b.linear("cls.predictions.transform.dense", x, hidden, bias=True)),
        )
        logits = b.head(
            "cls.predictions.decoder", x, vocab, bias=True, tied_to=WORDS + ".weight" if tied else "", second_bias=not tied
        )
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "masked-lm"
    if architecture in ("BertModel", "BertForSequenceClassification"):
        pooled = b.activation("tanh", b.linear("bert.pooler.dense", b.one_token(x), hidden, bias=True))
        if architecture == "BertModel":
            return Segment((b.done(pooled),), role="head"), None
        logits = b.linear("classifier", b.dropout(pooled, dropout), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if architecture in ("BertForTokenClassification", "BertForQuestionAnswering"):
        token = architecture == "BertForTokenClassification"
        x = b.dropout(x, dropout) if token else x
        logits = b.linear("classifier" if token else "qa_outputs", x, labels, bias=True, role="head")
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "classification"
    raise UnknownArchitectureError(
        f"the head of {architecture!r} is not known{did_you_mean(architecture, HEADS)}; known are {', '.join(HEADS)}"
    )


def build(config: ConfigView, architecture: str) -> Description:
    """A BERT model from its config."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise InputError(f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if config.text("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"{config.name}: only absolute positions are supported for BERT")
    if config.flag("add_cross_attention", False):
        raise InputError(f"{config.name}: add_cross_attention is not supported for BERT")
    vocab, ffn, num_layers = config.size("vocab_size"), config.size("intermediate_size"), config.layers("num_hidden_layers")
    positions, types = config.size("max_position_embeddings", 512), config.size("type_vocab_size", 2)
    dropout = config.probability("hidden_dropout_prob", 0.1)
    attention_dropout = config.probability("attention_probs_dropout_prob", 0.1)
    activation = activation_name(config, "hidden_act", "gelu")
    layer = encoder_layer(hidden, heads, ffn, activation, dropout, attention_dropout)
    tied = config.flag("tie_word_embeddings", True)
    head, loss = _head(config, architecture, hidden, vocab, activation, dropout, tied)
    return Description(
        segments=(_embedding(vocab, positions, types, hidden, dropout), Segment((layer,), num_layers), head),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        checkpointed_masks=(PAIR,),
        published_dtype="fp32",
        buffer_bytes=2 * 8 * positions,  # position_ids and token_type_ids, int64
        loss=loss,
    )
