"""T5, mT5 and UMT5: an encoder and a decoder over one embedding, a learned position bias, norms before, no biases.

The bias of the first layer of each stack is shared by the others (UMT5: one in every layer); cross-attention has zeros instead.
The `encoder` alone is read by the classes that have only that (T5EncoderModel).
Source: transformers 5, models/t5/modeling_t5.py and configuration_t5.py; models/mt5, models/umt5.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.description import Description
from memfit.families.encoders import unknown_head
from memfit.families.view import ConfigView
from memfit.model import ACTIVATION_FUNCTIONS, PAIR, POSITION_PAIR, TOKEN, Block, BlockBuilder, Segment, Value
from memfit.model.description import CROSS_PAIR, CROSS_POSITION_PAIR, TARGET_PAIR, TARGET_POSITION_PAIR, TARGET_TOKEN
from memfit.model.ops.seq2seq import clamp_fp16, position_bias, t5_norm, weight_format, zero_bias

WORDS = "shared"
HEADS = (
    "Model",
    "EncoderModel",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
TRAINED_LENGTH = 512
"""Tokens of the sequences that T5 was trained with; its relative positions allow longer ones."""


class _Parts:
    """The blocks, made from the dimensions that all of them read."""

    def __init__(self, config: ConfigView) -> None:
        model_type = config.text("model_type", "t5")
        self.hidden, self.heads = config.size("d_model", 512), config.size("num_heads", {"t5": 8}.get(model_type, 6))
        self.head_dim = config.size("d_kv", 64)
        self.ffn = config.size("d_ff", {"t5": 2048}.get(model_type, 1024))
        self.vocab = config.size("vocab_size", {"t5": 32128}.get(model_type, 250112))
        self.buckets = config.size("relative_attention_num_buckets", 32)
        self.dropout = config.probability("dropout_rate", 0.1)
        self.own_bias = model_type == "umt5"
        self.gated, self.activation = _feed_forward(config, "relu" if model_type == "t5" else "gated-gelu")

    def embedding(self, stack: str, axis: int) -> Segment:
        """The shared table, looked up for one stack; the decoder's ids are the labels shifted, made in forward."""
        decoder = stack == "decoder"
        b = BlockBuilder(f"{stack} embedding" if decoder else "embedding", 1, axis)
        x = b.embedding(
            "decoder.embed_tokens" if decoder else WORDS,
            self.vocab,
            self.hidden,
            axis=axis,
            ids="made" if decoder else "batch",
            tied_to=WORDS + ".weight" if decoder else "",
        )
        return Segment((b.done(b.dropout(x, self.dropout)),), role="embedding")

    def _attention(self, b: BlockBuilder, name: str, x: Value, source: Value, bias: Value | None, stack: str) -> Value:
        """Norm, attention of one's own tokens or of the encoder's, residual. Without `bias` it is made here, and provided."""
        own = source is x
        normed = t5_norm(b, f"{name}.layer_norm", x)
        width = self.heads * self.head_dim
        read = normed if own else source
        q = b.linear(f"{name}.q", normed, width)
        k, v = b.linear(f"{name}.k", read, width), b.linear(f"{name}.v", read, width)
        if bias is None:
            if own:
                axis = TARGET_POSITION_PAIR if stack == "decoder" else POSITION_PAIR
                bias = position_bias(b, f"{name}.relative_attention_bias", self.buckets, self.heads, axis)
            else:
                bias = zero_bias(b, q, self.heads, CROSS_POSITION_PAIR, leaf=not self.own_bias)
            if not self.own_bias:
                b.provide(_bias_name(stack, own), bias)
        context = b.attention(
            q,
            k,
            v,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            causal=stack == "decoder" and own,
            dropout=self.dropout,
            softmax_dtype=None,
            cached=stack == "decoder",
            bias=bias,
        )
        attended = b.linear(f"{name}.o", context, self.hidden, split="row")
        b.until_here(q, k, v)
        out = b.add(x, b.dropout(attended, self.dropout))
        b.until_here(normed, attended)
        return clamp_fp16(b, out)

    def _mlp(self, b: BlockBuilder, x: Value) -> Value:
        normed = t5_norm(b, "DenseReluDense.layer_norm", x)
        if self.gated:
            inner = b.activation(self.activation, b.linear("DenseReluDense.wi_0", normed, self.ffn))
            inner = b.multiply(inner, b.linear("DenseReluDense.wi_1", normed, self.ffn))
        else:
            inner = b.activation(self.activation, b.linear("DenseReluDense.wi", normed, self.ffn))
        inner = weight_format(b, b.dropout(inner, self.dropout))
        mixed = b.linear("DenseReluDense.wo", inner, self.hidden, split="row")
        b.until_here(normed, inner)
        out = b.add(x, b.dropout(mixed, self.dropout))
        b.until_here(mixed)
        return clamp_fp16(b, out)

    def layer(self, stack: str, *, first: bool) -> Block:
        """One layer of a stack; the first one makes the biases."""
        decoder = stack == "decoder"
        axis = TARGET_TOKEN if decoder else TOKEN
        b = BlockBuilder(f"{stack} layer", self.hidden, axis)
        makes = first or self.own_bias
        bias = (
            None if makes else b.external(_bias_name(stack, True), self.heads, TARGET_POSITION_PAIR if decoder else POSITION_PAIR)
        )
        x = self._attention(b, "SelfAttention", b.input, b.input, bias, stack)
        if decoder:
            bias = None if makes else b.external(_bias_name(stack, False), self.heads, CROSS_POSITION_PAIR)
            x = self._attention(b, "EncDecAttention", x, b.external("encoder", self.hidden), bias, stack)
        return b.done(self._mlp(b, x))

    def layers(self, stack: str, count: int) -> tuple[Segment, ...]:
        """All layers of a stack."""
        if self.own_bias:
            return (Segment((self.layer(stack, first=True),), count),)
        first = Segment((self.layer(stack, first=True),))
        return (first, Segment((self.layer(stack, first=False),), count - 1)) if count > 1 else (first,)

    def final(self, b: BlockBuilder, stack: str) -> Value:
        """The norm and the dropout at the end of a stack."""
        return b.dropout(t5_norm(b, f"{stack}.final_layer_norm", b.input), self.dropout)


def _bias_name(stack: str, own: bool) -> str:
    return f"{stack} position bias" if own else f"{stack} cross bias"


def _feed_forward(config: ConfigView, default: str) -> tuple[bool, str]:
    """`feed_forward_proj`: an activation function, or gated- and one; gated-gelu means GELU in Python."""
    stated = config.text("feed_forward_proj", default)
    for derived in ("dense_act_fn", "is_gated_act"):
        config.has(derived)
    gated, activation = stated.startswith("gated-"), stated.removeprefix("gated-")
    activation = "gelu_new" if stated == "gated-gelu" else activation
    if activation not in ACTIVATION_FUNCTIONS:
        known = ", ".join(sorted(ACTIVATION_FUNCTIONS))
        raise InputError(f"{config.name}: feed_forward_proj must be one of {known}, or gated- with one, not {stated[:40]!r}")
    return gated, activation


def _head(config: ConfigView, parts: _Parts, architecture: str) -> tuple[Segment, str | None]:
    """What stands on the decoder, or on the encoder where there is no decoder."""
    kind = architecture.removeprefix("U").removeprefix("M").removeprefix("T5")
    encoder = kind in ("EncoderModel", "ForTokenClassification")
    b = BlockBuilder("head", parts.hidden, TOKEN if encoder else TARGET_TOKEN)
    x = parts.final(b, "encoder" if encoder else "decoder")
    labels, dropout = config.num_labels(), config.probability("classifier_dropout", 0.0)
    scaled = config.flag("tie_word_embeddings", True)  # the head is tied whatever it says; False means that nothing is scaled
    scaled = config.flag("scale_decoder_outputs", scaled) and not architecture.startswith("MT5")
    if kind == "ForConditionalGeneration":
        read = b.scale(x) if scaled else x
        logits = b.head("lm_head", read, parts.vocab, tied_to=WORDS + ".weight")
        b.until_here(x)
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "seq2seq-lm"
    if kind == "ForSequenceClassification":
        x = b.dropout(b.one_token(x, view=False), dropout)
        x = b.activation("tanh", b.linear("classification_head.dense", x, parts.hidden, bias=True))
        logits = b.linear("classification_head.out_proj", b.dropout(x, dropout), labels, bias=True, role="head")
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if kind in ("ForTokenClassification", "ForQuestionAnswering"):
        x = b.dropout(x, dropout) if kind == "ForTokenClassification" else x
        logits = b.linear("classifier", x, labels, bias=True, role="head")
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "classification"
    if kind in ("Model", "EncoderModel"):
        return Segment((b.done(x),), role="head"), None
    raise unknown_head(architecture, HEADS)


def build(config: ConfigView, architecture: str) -> Description:
    """A T5 model from its config."""
    parts = _Parts(config)
    for constant in ("output_past", "relative_attention_max_distance", "initializer_factor"):
        config.has(constant)
    num_layers = config.size("num_layers", {"t5": 6}.get(config.text("model_type", "t5"), 8), maximum=1024)
    decoder_layers = config.size("num_decoder_layers", num_layers, maximum=1024)
    head, loss = _head(config, parts, architecture)
    encoder = (parts.embedding("encoder", TOKEN), *parts.layers("encoder", num_layers))
    whole = architecture.endswith(("EncoderModel", "ForTokenClassification"))
    if whole:
        segments = (*encoder, head)
    else:
        b = BlockBuilder("encoder norm", parts.hidden)
        between = Segment((b.done(parts.final(b, "encoder")),), role="between", provides="encoder")
        decoder = (parts.embedding("decoder", TARGET_TOKEN), *parts.layers("decoder", decoder_layers))
        segments = (*encoder, between, *decoder, head)
    return Description(
        published_dtype="fp32",
        segments=segments,
        kind="encoder" if whole else "encoder-decoder",
        encoder_decoder=not whole,
        num_layers=num_layers if whole else num_layers + decoder_layers,
        hidden_size=parts.hidden,
        num_heads=parts.heads,
        num_kv_heads=parts.heads,
        head_dim=parts.head_dim,
        vocab_size=parts.vocab,
        max_positions=config.size("n_positions", TRAINED_LENGTH),
        loss=loss,
        attention_kernels=("sdpa", "eager"),
        checkpointed_masks=(PAIR, TARGET_PAIR, CROSS_PAIR),
    )
