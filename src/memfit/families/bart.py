"""BART: an encoder and a decoder over one embedding, learned positions with an offset of 2, LayerNorm after each residual.

Source: transformers 5, models/bart/modeling_bart.py and configuration_bart.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name
from memfit.families.description import Description
from memfit.families.encoders import unknown_head
from memfit.families.view import ConfigView
from memfit.model import PAIR, TOKEN, Block, BlockBuilder, Parameter, Segment, Value
from memfit.model.description import TARGET_PAIR, TARGET_POSITION, TARGET_TOKEN
from memfit.model.ops.seq2seq import add_buffer

WORDS = "model.shared"
HEADS = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering")
_IGNORED = (
    "_num_labels", "add_bias_logits", "add_final_layer_norm", "classif_dropout", "force_bos_token_to_be_generated", "init_std",
    "normalize_before", "normalize_embedding", "num_hidden_layers", "output_past", "static_position_embeddings",
)  # fmt: skip
"""Keys of older releases, which transformers 5 does not read, and a copy of `encoder_layers`."""
POSITION_OFFSET = 2
"""Rows of the position tables before the first position (BartLearnedPositionalEmbedding)."""


class _Parts:
    """The blocks, made from the dimensions that all of them read."""

    def __init__(self, config: ConfigView) -> None:
        self.config = config
        self.hidden = config.size("d_model", 1024)
        self.vocab, self.positions = config.size("vocab_size", 50265), config.size("max_position_embeddings", 1024)
        self.activation = activation_name(config, "activation_function", "gelu")
        self.dropout = config.probability("dropout", 0.1)
        self.attention_dropout = config.probability("attention_dropout", 0.0)
        self.activation_dropout = config.probability("activation_dropout", 0.0)
        self.tied = config.flag("tie_word_embeddings", True)
        config.flag("scale_embedding", False)  # the embedding is multiplied by 1 otherwise

    def embedding(self, stack: str) -> Segment:
        """Words times a number, plus positions: of every row in the encoder, of one in the decoder."""
        decoder = stack == "decoder"
        axis = TARGET_TOKEN if decoder else TOKEN
        b = BlockBuilder(f"{stack} embedding" if decoder else "embedding", 1, axis)
        name = f"model.{stack}.embed_tokens"
        tied_to = WORDS + ".weight" if self.tied and decoder else ""
        shape = (self.vocab, self.hidden)
        table = Parameter((WORDS if self.tied and not decoder else name) + ".weight", shape, "embedding", "vocab", tied_to)
        # untied, the model still has the table that would be shared, which nothing reads
        unread = () if self.tied or decoder else (Parameter(WORDS + ".weight", shape, "unused"),)
        ids = "made" if decoder else "batch"
        words = b.scale(b.op("embedding", name, (b.input,), self.hidden, (table, *unread), axis, ids=ids))
        places = b.embedding(
            f"model.{stack}.embed_positions",
            self.positions + POSITION_OFFSET,
            self.hidden,
            axis=TARGET_POSITION if decoder else TOKEN,
            ids="made",
        )
        b.provide(f"{stack} position embeddings", places)  # the stack's own name for them
        x = b.layer_norm(f"model.{stack}.layernorm_embedding", b.add(words, places))
        return Segment((b.done(b.dropout(x, self.dropout)),), role="embedding")

    def _attention(self, b: BlockBuilder, name: str, x: Value, source: Value, heads: int, *, causal: bool) -> Value:
        """Attention, dropout, residual, norm."""
        q = b.linear(f"{name}.q_proj", x, self.hidden, bias=True)
        k = b.linear(f"{name}.k_proj", source, self.hidden, bias=True)
        v = b.linear(f"{name}.v_proj", source, self.hidden, bias=True)
        context = b.attention(
            q,
            k,
            v,
            num_heads=heads,
            num_kv_heads=heads,
            causal=causal,
            dropout=self.attention_dropout,
            softmax_dtype=None,
            cached=x.axis == TARGET_TOKEN,
        )
        attended = b.linear(f"{name}.out_proj", context, self.hidden, bias=True, split="row")
        b.until_here(q, k, v)
        return b.layer_norm(f"{name}_layer_norm", b.add(x, b.dropout(attended, self.dropout)))

    def layer(self, stack: str) -> Block:
        """One layer of a stack."""
        decoder = stack == "decoder"
        heads, ffn = self.config.size(f"{stack}_attention_heads", 16), self.config.size(f"{stack}_ffn_dim", 4096)
        if self.hidden % heads:
            raise InputError(f"{self.config.name}: d_model {self.hidden} is not a multiple of {stack}_attention_heads {heads}")
        b = BlockBuilder(f"{stack} layer", self.hidden, TARGET_TOKEN if decoder else TOKEN)
        x = self._attention(b, "self_attn", b.input, b.input, heads, causal=decoder)
        if decoder:
            x = self._attention(b, "encoder_attn", x, b.external("encoder", self.hidden), heads, causal=False)
        inner = b.activation(self.activation, b.linear("fc1", x, ffn, bias=True))
        inner = b.dropout(inner, self.activation_dropout)
        mixed = b.dropout(b.linear("fc2", inner, self.hidden, bias=True, split="row"), self.dropout)
        return b.done(b.layer_norm("final_layer_norm", b.add(x, mixed)))

    def head(self, architecture: str) -> tuple[Segment, str | None]:
        """What stands on the decoder."""
        b = BlockBuilder("head", self.hidden, TARGET_TOKEN)
        x = b.input
        kind = architecture.removeprefix("Bart")
        labels, dropout = self.config.num_labels(), self.config.probability("classifier_dropout", 0.0)
        if kind == "ForConditionalGeneration":
            logits = b.head("lm_head", x, self.vocab, tied_to=WORDS + ".weight" if self.tied else "")
            return Segment((b.done(b.loss(add_buffer(b, logits), upcast=False)),), role="head"), "seq2seq-lm"
        if kind == "ForSequenceClassification":
            x = b.dropout(b.one_token(x, view=False), dropout)
            x = b.activation("tanh", b.linear("classification_head.dense", x, self.hidden, bias=True))
            logits = b.linear("classification_head.out_proj", b.dropout(x, dropout), labels, bias=True, role="head")
            loss = b.loss(logits, upcast=False, function=self.config.classification_loss())
            return Segment((b.done(loss),), role="head"), "classification"
        if kind == "ForQuestionAnswering":
            logits = b.linear("qa_outputs", x, 2, bias=True, role="head")
            return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "classification"
        if kind == "Model":
            return Segment((b.done(b.dropout(x, 0.0)),), role="head"), None
        raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """A BART model from its config."""
    parts = _Parts(config)
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if config.probability(key, 0.0) > 0:
            raise InputError(f"{config.name}: {key} skips layers at random, which is not counted; set it to 0 for the worst case")
    layers = [config.size(f"{stack}_layers", 12, maximum=1024) for stack in ("encoder", "decoder")]
    for key in _IGNORED:
        config.has(key)
    head, loss = parts.head(architecture)
    return Description(
        published_dtype="fp32",
        segments=(
            parts.embedding("encoder"),
            Segment((parts.layer("encoder"),), layers[0], provides="encoder"),
            parts.embedding("decoder"),
            Segment((parts.layer("decoder"),), layers[1]),
            head,
        ),
        kind="encoder-decoder",
        encoder_decoder=True,
        num_layers=sum(layers),
        hidden_size=parts.hidden,
        num_heads=config.size("encoder_attention_heads", 16),
        num_kv_heads=config.size("encoder_attention_heads", 16),
        head_dim=parts.hidden // config.size("encoder_attention_heads", 16),
        vocab_size=parts.vocab,
        max_positions=parts.positions,
        hard_position_limit=True,
        buffer_elements=parts.vocab if architecture == "BartForConditionalGeneration" else 0,  # final_logits_bias
        loss=loss,
        checkpointed_masks=(PAIR, TARGET_PAIR),
    )
