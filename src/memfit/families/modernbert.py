"""ModernBERT: layers alternating between global and local attention, rotary in fp32, GeGLU, norms before, no biases by default.

Padding is not unpadded in transformers 5: it makes a mask, and so does a window that is not longer than the sequence.
Source: transformers 5, models/modernbert/modeling_modernbert.py and configuration_modernbert.py.
"""

from __future__ import annotations

from memfit.errors import InputError
from memfit.families.common import activation_name, layer_segments
from memfit.families.description import Description
from memfit.families.encoders import check_encoder, unknown_head
from memfit.families.view import ConfigView
from memfit.model import Block, BlockBuilder, Segment, Value
from memfit.model.ops.seq2seq import mean_pool, plain_layer_norm

WORDS = "model.embeddings.tok_embeddings"
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_IGNORED = (
    "cls_token_id", "deterministic_flash_attn", "global_rope_theta", "initializer_cutoff_factor", "local_rope_theta", "norm_eps",
    "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
)  # fmt: skip
"""Constants, token ids, and switches of the first releases, which transformers 5 does not read."""


class _Parts:
    """The blocks, made from the switches that all of them read."""

    def __init__(self, config: ConfigView) -> None:
        self.config = config
        self.hidden, self.heads = config.size("hidden_size", 768), config.size("num_attention_heads", 12)
        check_encoder(config, self.hidden, self.heads)
        self.vocab = config.size("vocab_size", 50368)
        self.ffn = config.size("intermediate_size", 1152)
        self.activation = activation_name(config, "hidden_activation", "gelu")
        self.norm_bias = config.flag("norm_bias", False)
        self.attention_bias, self.mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
        self.attention_dropout = config.probability("attention_dropout", 0.0)
        self.mlp_dropout = config.probability("mlp_dropout", 0.0)
        # half the window: a token sees as many others on either side
        self.window = config.size("local_attention", 128) // 2 or 1

    def norm(self, b: BlockBuilder, name: str, x: Value) -> Value:
        """LayerNorm, with a bias only where the config asks for it."""
        return b.layer_norm(name, x) if self.norm_bias else plain_layer_norm(b, name, x)

    def embedding(self) -> Segment:
        """Words, normalised."""
        b = BlockBuilder("embedding", 1)
        x = self.norm(b, "model.embeddings.norm", b.embedding(WORDS, self.vocab, self.hidden))
        return Segment((b.done(b.dropout(x, self.config.probability("embedding_dropout", 0.0))),), role="embedding")

    def layer(self, kind: str) -> Block:
        """One layer of a kind; the first one has no norm before its attention."""
        b = BlockBuilder("encoder layer", self.hidden)
        hidden, heads = self.hidden, self.heads
        x = b.input if kind.startswith("first") else self.norm(b, "attn_norm", b.input)
        fused = b.linear("attn.Wqkv", x, 3 * hidden, bias=self.attention_bias)
        q, k, v = b.split(fused, hidden, hidden, hidden)
        q, k = b.rotary(q, k, head_dim=hidden // heads, in_fp32="twice", cast_back=True)
        context = b.attention(
            q,
            k,
            v,
            num_heads=heads,
            num_kv_heads=heads,
            causal=False,
            window=self.window if kind.endswith("sliding_attention") else None,
            dropout=self.attention_dropout,
            cached=False,
        )
        attended = b.linear("attn.Wo", context, hidden, bias=self.attention_bias, split="row")
        b.until_here(x, fused, q, k)
        attended = b.dropout(attended, self.attention_dropout)
        x = b.add(b.input, attended)

        normed = self.norm(b, "mlp_norm", x)
        wide = b.linear("mlp.Wi", normed, 2 * self.ffn, bias=self.mlp_bias)
        inner, gate = b.split(wide, self.ffn, self.ffn)
        inner = b.dropout(b.multiply(b.activation(self.activation, inner), gate), self.mlp_dropout)
        mixed = b.linear("mlp.Wo", inner, hidden, bias=self.mlp_bias, split="row")
        b.until_here(normed, inner)
        x = b.add(x, mixed)
        b.until_here(attended)
        return b.done(x)

    def head(self, architecture: str) -> tuple[Segment, str | None]:
        """The final norm, the prediction head and the loss of a class."""
        config = self.config
        b = BlockBuilder("head", self.hidden)
        x = self.norm(b, "model.final_norm", b.input)
        kind = architecture.removeprefix("ModernBert")
        labels, dropout = config.num_labels(), config.probability("classifier_dropout", 0.0)
        bias, activation = config.flag("classifier_bias", False), activation_name(config, "classifier_activation", "gelu")
        pooling = config.choice("classifier_pooling", "cls", ("cls", "mean"))
        tied, decoder_bias = config.flag("tie_word_embeddings", True), config.flag("decoder_bias", True)
        if config.flag("sparse_prediction", False):
            raise InputError(f"{config.name}: sparse_prediction computes logits of the masked tokens only, which is not counted")
        if kind == "Model":
            return Segment((b.done(x),), role="head"), None
        if kind == "ForSequenceClassification":
            x = b.one_token(x) if pooling == "cls" else mean_pool(b, x)
        elif kind not in ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering"):
            raise unknown_head(architecture, HEADS)
        x = self.norm(b, "head.norm", b.activation(activation, b.linear("head.dense", x, self.hidden, bias=bias)))
        if kind == "ForMaskedLM":
            logits = b.head("decoder", x, self.vocab, bias=decoder_bias, tied_to=WORDS + ".weight" if tied else "")
            return Segment((b.done(b.loss(logits, upcast=True)),), role="head"), "masked-lm"
        logits = b.linear("classifier", b.dropout(x, dropout), labels, bias=True, role="head")
        function = config.classification_loss() if kind == "ForSequenceClassification" else "cross-entropy"
        return Segment((b.done(b.loss(logits, upcast=False, function=function)),), role="head"), "classification"


def build(config: ConfigView, architecture: str) -> Description:
    """A ModernBERT model from its config."""
    parts = _Parts(config)
    for key in _IGNORED:
        config.has(key)
    num_layers = config.size("num_hidden_layers", 22, maximum=1024)
    every = config.size("global_attn_every_n_layers", 3)
    kinds = config.layer_types(num_layers) or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)
    ]
    head, loss = parts.head(architecture)
    first = Segment((parts.layer("first " + kinds[0]),))
    others = layer_segments(config, kinds[1:], parts.layer) if num_layers > 1 else ()
    return Description(
        segments=(parts.embedding(), first, *others, head),
        kind="encoder",
        num_layers=num_layers,
        hidden_size=parts.hidden,
        num_heads=parts.heads,
        num_kv_heads=parts.heads,
        head_dim=parts.hidden // parts.heads,
        vocab_size=parts.vocab,
        max_positions=config.size("max_position_embeddings", 8192),
        rotary_dim=parts.hidden // parts.heads,
        rotary_tables=len(set(kinds)),
        loss=loss,
    )
