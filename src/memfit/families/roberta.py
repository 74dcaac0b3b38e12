"""RoBERTa and XLM-RoBERTa: BERT's layers; positions are counted from the tokens, so their ids are made for every row.

Source: transformers 5, models/roberta/modeling_roberta.py and configuration_roberta.py; models/xlm_roberta.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.bert import encoder_layer
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.encoders import check_encoder, classifier_dropout, token_head, unknown_head
from memfit.families.view import ConfigView
from memfit.model import PAIR, BlockBuilder, Segment

WORDS = "roberta.embeddings.word_embeddings"
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def _embedding(vocab: int, positions: int, types: int, hidden: int, dropout: float) -> Segment:
    b = BlockBuilder("embedding", 1)
    words = b.embedding(WORDS, vocab, hidden)
    x = b.add(words, b.embedding("roberta.embeddings.token_type_embeddings", types, hidden, ids="made"))
    x = b.add(x, b.embedding("roberta.embeddings.position_embeddings", positions, hidden, ids="made"))
    return Segment((b.done(b.dropout(b.layer_norm("roberta.embeddings.LayerNorm", x), dropout)),), role="embedding")


def _head(config: ConfigView, architecture: str, hidden: int, vocab: int, dropout: float) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", hidden)
    x = b.input
    kind = architecture.removeprefix("XLM").removeprefix("Roberta").removeprefix("RoBERTa")
    labels, classifier = config.num_labels(), classifier_dropout(config, dropout)
    tied = config.flag("tie_word_embeddings", True)
    if kind == "ForMaskedLM":
        x = b.layer_norm("lm_head.layer_norm", b.activation("gelu", b.linear("lm_head.dense", x, hidden, bias=True)))
        logits = b.head("lm_head.decoder", x, vocab, bias=True, tied_to=WORDS + ".weight" if tied else "", second_bias=not tied)
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "masked-lm"
    if kind == "ForSequenceClassification":
        x = b.activation("tanh", b.linear("classifier.dense", b.dropout(b.one_token(x), classifier), hidden, bias=True))
        logits = b.linear("classifier.out_proj", b.dropout(x, classifier), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if kind in ("ForTokenClassification", "ForQuestionAnswering"):
        return token_head(b, labels, classifier if kind == "ForTokenClassification" else 0.0), "classification"
    if kind == "Model":
        pooled = b.activation("tanh", b.linear("roberta.pooler.dense", b.one_token(x), hidden, bias=True))
        return Segment((b.done(pooled),), role="head"), None
    raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """A RoBERTa model from its config."""
    hidden, heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
    check_encoder(config, hidden, heads)
    vocab, positions = config.size("vocab_size", 50265), config.size("max_position_embeddings", 512)
    # positions are counted from the padding id + 1, so that many rows of the table hold no position of a token
    padding = config.count("pad_token_id", 1)
    if positions <= padding + 1:
        raise InputError(f"{config.name}: max_position_embeddings {positions} leaves no position after pad_token_id {padding}")
    dropout = config.probability("hidden_dropout_prob", 0.1)
    layer = encoder_layer(
        hidden,
        heads,
        config.size("intermediate_size", 3072),
        activation_name(config, "hidden_act", "gelu"),
        dropout,
        config.probability("attention_probs_dropout_prob", 0.1),
    )
    num_layers = config.layers("num_hidden_layers")
    head, loss = _head(config, architecture, hidden, vocab, dropout)
    return Description(
        published_dtype="fp32",
        segments=(
            _embedding(vocab, positions, config.size("type_vocab_size", 2), hidden, dropout),
            Segment((layer,), num_layers),
            head,
        ),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_positions=positions - padding - 1,
        hard_position_limit=True,
        checkpointed_masks=(PAIR,),
        buffer_bytes=2 * 8 * positions,  # position_ids and token_type_ids, int64
        loss=loss,
    )
