"""DistilBERT: BERT's layers without token types, without dropout after attention, and with other names in the config.

Source: transformers 5, models/distilbert/modeling_distilbert.py and configuration_distilbert.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.encoders import check_encoder, token_head, unknown_head
from memfit.families.view import ConfigView
from memfit.model import PAIR, POSITION, Block, BlockBuilder, Segment

WORDS = "distilbert.embeddings.word_embeddings"
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def _embedding(vocab: int, positions: int, dim: int, dropout: float) -> Segment:
    b = BlockBuilder("embedding", 1)
    places = b.embedding("distilbert.embeddings.position_embeddings", positions, dim, axis=POSITION, ids="buffer")
    x = b.layer_norm("distilbert.embeddings.LayerNorm", b.add(b.embedding(WORDS, vocab, dim), places))
    return Segment((b.done(b.dropout(x, dropout)),), role="embedding")


def _layer(dim: int, heads: int, hidden: int, activation: str, dropout: float, attention_dropout: float) -> Block:
    b = BlockBuilder("encoder layer", dim)
    x = b.input
    q = b.linear("attention.q_lin", x, dim, bias=True)
    k = b.linear("attention.k_lin", x, dim, bias=True)
    v = b.linear("attention.v_lin", x, dim, bias=True)
    context = b.attention(
        q, k, v, num_heads=heads, num_kv_heads=heads, causal=False, dropout=attention_dropout, softmax_dtype=None, cached=False
    )
    attended = b.linear("attention.out_lin", context, dim, bias=True, split="row")
    b.until_here(q, k, v)
    x = b.layer_norm("sa_layer_norm", b.add(attended, x))

    inner = b.activation(activation, b.linear("ffn.lin1", x, hidden, bias=True))
    mixed = b.dropout(b.linear("ffn.lin2", inner, dim, bias=True, split="row"), dropout)
    out = b.layer_norm("output_layer_norm", b.add(mixed, x))
    b.until_here(mixed)
    return b.done(out)


def _head(
    config: ConfigView, architecture: str, dim: int, vocab: int, activation: str, dropout: float
) -> tuple[Segment, str | None]:
    b = BlockBuilder("head", dim)
    x = b.input
    kind = architecture.removeprefix("DistilBert")
    labels = config.num_labels()
    pooled_dropout, answer_dropout = config.probability("seq_classif_dropout", 0.2), config.probability("qa_dropout", 0.1)
    tied = config.flag("tie_word_embeddings", True)
    if kind == "ForMaskedLM":
        x = b.layer_norm("vocab_layer_norm", b.activation(activation, b.linear("vocab_transform", x, dim, bias=True)))
        logits = b.head("vocab_projector", x, vocab, bias=True, tied_to=WORDS + ".weight" if tied else "")
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "masked-lm"
    if kind == "ForSequenceClassification":
        x = b.activation("relu", b.linear("pre_classifier", b.one_token(x), dim, bias=True))
        logits = b.linear("classifier", b.dropout(x, pooled_dropout), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if kind == "ForTokenClassification":
        return token_head(b, labels, dropout), "classification"
    if kind == "ForQuestionAnswering":
        if labels != 2:
            raise InputError(f"{config.name}: DistilBertForQuestionAnswering needs num_labels 2, not {labels}")
        return token_head(b, 2, answer_dropout, name="qa_outputs"), "classification"
    if kind == "Model":
        return Segment((b.done(b.dropout(x, 0.0)),), role="head"), None
    raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """A DistilBERT model from its config."""
    dim, heads = config.size("dim", 768), config.size("n_heads", 12)
    check_encoder(config, dim, heads)
    for constant in ("sinusoidal_pos_embds", "tie_weights_"):  # how the trained table is initialised; not read by transformers 5
        config.flag(constant, False)
    vocab, positions = config.size("vocab_size", 30522), config.size("max_position_embeddings", 512)
    dropout = config.probability("dropout", 0.1)
    activation = activation_name(config, "activation", "gelu")
    layer = _layer(dim, heads, config.size("hidden_dim", 3072), activation, dropout, config.probability("attention_dropout", 0.1))
    num_layers = config.size("n_layers", 6, maximum=1024)
    head, loss = _head(config, architecture, dim, vocab, activation, dropout)
    return Description(
        published_dtype="fp32",
        segments=(_embedding(vocab, positions, dim, dropout), Segment((layer,), num_layers), head),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim // heads,
        vocab_size=vocab,
        max_positions=positions,
        hard_position_limit=True,
        checkpointed_masks=(PAIR,),
        buffer_bytes=8 * positions,  # position_ids, int64
        loss=loss,
    )
