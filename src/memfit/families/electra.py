"""ELECTRA: BERT's layers behind an embedding of its own width and a projection.

Source: transformers 5, models/electra/modeling_electra.py and configuration_electra.py.
"""

from __future__ import annotations

from memfit.families.bert import encoder_layer
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.encoders import check_encoder, classifier_dropout, token_head, unknown_head
from memfit.families.view import ConfigView
from memfit.model import PAIR, POSITION, BlockBuilder, Segment, Value

WORDS = "electra.embeddings.word_embeddings"
HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


def narrow_embedding(b: BlockBuilder, prefix: str, vocab: int, positions: int, types: int, width: int, dropout: float) -> Value:
    """Words, token types and positions in a width of their own, summed and normalised. Also ALBERT's."""
    x = b.add(
        b.embedding(prefix + ".word_embeddings", vocab, width),
        b.embedding(prefix + ".token_type_embeddings", types, width, ids="positions"),
    )
    x = b.add(x, b.embedding(prefix + ".position_embeddings", positions, width, axis=POSITION, ids="buffer"))
    return b.dropout(b.layer_norm(prefix + ".LayerNorm", x), dropout)


def _head(
    config: ConfigView, architecture: str, hidden: int, width: int, vocab: int, activation: str, dropout: float
) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", hidden)
    x = b.input
    kind = architecture.removeprefix("Electra")
    labels, classifier = config.num_labels(), classifier_dropout(config, dropout)
    tied = config.flag("tie_word_embeddings", True)
    if kind == "ForMaskedLM":
        x = b.activation("gelu", b.linear("generator_predictions.dense", x, width, bias=True))
        x = b.layer_norm("generator_predictions.LayerNorm", x)
        logits = b.head("generator_lm_head", x, vocab, bias=True, tied_to=WORDS + ".weight" if tied else "")
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "masked-lm"
    if kind == "ForPreTraining":
        x = b.activation(activation, b.linear("discriminator_predictions.dense", x, hidden, bias=True))
        return token_head(b, 1, 0.0, x, name="discriminator_predictions.dense_prediction"), "classification"
    if kind == "ForSequenceClassification":
        x = b.activation("gelu", b.linear("classifier.dense", b.dropout(b.one_token(x), classifier), hidden, bias=True))
        logits = b.linear("classifier.out_proj", b.dropout(x, classifier), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if kind in ("ForTokenClassification", "ForQuestionAnswering"):
        return token_head(b, labels, classifier if kind == "ForTokenClassification" else 0.0), "classification"
    if kind == "Model":
        return Segment((b.done(b.dropout(x, 0.0)),), role="head"), None
    raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """An ELECTRA model from its config."""
    hidden, heads = config.size("hidden_size", 256), config.size("num_attention_heads", 4)
    check_encoder(config, hidden, heads)
    width = config.size("embedding_size", 128)
    config.probability("summary_last_dropout", 0.1)  # of the multiple-choice head
    vocab, positions = config.size("vocab_size", 30522), config.size("max_position_embeddings", 512)
    dropout = config.probability("hidden_dropout_prob", 0.1)
    activation = activation_name(config, "hidden_act", "gelu")
    ffn, attention_dropout = config.size("intermediate_size", 1024), config.probability("attention_probs_dropout_prob", 0.1)
    layer = encoder_layer(hidden, heads, ffn, activation, dropout, attention_dropout)
    b = BlockBuilder("embedding", 1)
    x = narrow_embedding(b, "electra.embeddings", vocab, positions, config.size("type_vocab_size", 2), width, dropout)
    if width != hidden:
        x = b.linear("electra.embeddings_project", x, hidden, bias=True)
    num_layers = config.size("num_hidden_layers", 12, maximum=1024)
    head, loss = _head(config, architecture, hidden, width, vocab, activation, dropout)
    return Description(
        published_dtype="fp32",
        segments=(Segment((b.done(x),), role="embedding"), Segment((layer,), num_layers), head),
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
        buffer_bytes=2 * 8 * positions,  # position_ids and token_type_ids, int64
        loss=loss,
    )
