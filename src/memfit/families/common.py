"""What decoder families share: embeddings, heads and runs of equal layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memfit.errors import InputError, UnknownArchitectureError, did_you_mean
from memfit.families.view import ConfigView
from memfit.model import ACTIVATION_FUNCTIONS, TOKEN, Block, BlockBuilder, Segment, Value
from memfit.model.ops.mixers import to_fp32

EMBEDDING = "model.embed_tokens"

MOST_RUNS = 64
"""Runs of equal layers that are measured one by one. Published models alternate kinds with a short period, or have a few runs."""

LONGEST_PERIOD = 16
"""Layers after which an alternating pattern is looked for to repeat; published ones repeat after 2 to 8."""


def activation_name(config: ConfigView, key: str, default: str) -> str:
    """The activation function that the config names, if its memory is known."""
    return config.choice(key, default, ACTIVATION_FUNCTIONS)


def check_heads(config: ConfigView, heads: int, kv_heads: int) -> None:
    """Query heads must be a multiple of key-value heads."""
    if heads % kv_heads:
        raise InputError(f"{config.name}: {heads} attention heads are not a multiple of {kv_heads} key-value heads")


def head_dimension(config: ConfigView, hidden: int, heads: int, default: int | None = None) -> int:
    """`head_dim` from the config where it stands, otherwise hidden / heads."""
    stated = config.optional_size("head_dim") or default
    if stated is None and hidden % heads:
        raise InputError(
            f"{config.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    return stated or hidden // heads


def token_embedding(name: str, vocab: int, hidden: int, *, scaled: bool = False) -> Segment:
    """Token ids -> hidden states."""
    b = BlockBuilder("embedding", 1)
    x = b.embedding(name, vocab, hidden)
    return Segment((b.done(b.scale(x) if scaled else x),), role="embedding")


def attention_projections(
    b: BlockBuilder, x: Value, q_width: int, kv_width: int, *, bias: bool, name: str = "self_attn"
) -> tuple[Value, Value, Value]:
    """Queries, keys and values from matrices of their own."""
    q = b.linear(f"{name}.q_proj", x, q_width, bias=bias)
    k = b.linear(f"{name}.k_proj", x, kv_width, bias=bias)
    v = b.linear(f"{name}.v_proj", x, kv_width, bias=bias)
    return q, k, v


def gated_mlp(b: BlockBuilder, x: Value, ffn: int, activation: str, *, bias: bool = False, name: str = "mlp") -> Value:
    """down(activation(gate(x)) * up(x)), as wide as x."""
    gate = b.activation(activation, b.linear(f"{name}.gate_proj", x, ffn, bias=bias))
    up = b.linear(f"{name}.up_proj", x, ffn, bias=bias)
    return b.linear(f"{name}.down_proj", b.multiply(gate, up), x.width, bias=bias, split="row")


def language_head(
    config: ConfigView,
    architecture: str,
    hidden: int,
    vocab: int,
    *,
    norm: Callable[[BlockBuilder, Value], Value],
    tied_to: str,
    head_name: str = "lm_head",
    softcap: bool = False,
    token_upcast: bool = True,
    bias: bool = False,
    scaled: bool = False,
    fp32_logits: bool = False,
    token_dropout: float = 0.1,
) -> tuple[Segment, str | None]:
    """Final norm, head and loss of the class that `architecture` names. Returns the segment and the kind of loss.

    `bias`: of the language head; `scaled`: its logits are multiplied by a number; `fp32_logits`: the class itself casts them, and
    what it returns is the copy; `token_dropout`: before a token classifier
    where the config says nothing; `token_upcast`: whether token classification computes its loss in fp32 (the generic class does,
    GPT-2's own does not).

    Raises:
        UnknownArchitectureError: a class whose head is not known.
    """
    b = BlockBuilder("head", hidden, TOKEN)
    x = norm(b, b.input)
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        logits = b.head(head_name, x, vocab, bias=bias, tied_to=tied_to)
        if scaled:
            logits = b.scale(logits)
        if softcap:
            logits = b.softcap(logits)
        if fp32_logits:
            logits = to_fp32(b, logits)
        loss = b.loss(logits, upcast=True)
        b.until_here(x)
        return Segment((b.done(loss),), role="head"), "causal-lm"
    num_labels = config.num_labels()
    if architecture.endswith("ForSequenceClassification"):
        logits = b.one_token(b.linear("score", x, num_labels, role="head", split="none"), view=False)
        loss = b.loss(logits, upcast=False, function=config.classification_loss())
        return Segment((b.done(loss),), role="head"), "classification"
    if architecture.endswith("ForTokenClassification"):
        x = b.dropout(x, config.probability("classifier_dropout", config.probability("hidden_dropout", token_dropout)))
        logits = b.linear("score", x, num_labels, bias=True, role="head", split="none")
        return Segment((b.done(b.loss(logits, upcast=token_upcast)),), role="head"), "classification"
    if architecture.endswith("Model") and not architecture.endswith("HeadsModel"):
        return Segment((b.done(x),), role="head"), None
    known = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")
    raise UnknownArchitectureError(
        f"the head of {architecture!r} is not known{did_you_mean(architecture, known)}; a class may end in {', '.join(known)}"
    )


class DecoderSizes(NamedTuple):
    """The dimensions that every decoder with grouped heads states under the same keys."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


def decoder_sizes(config: ConfigView) -> DecoderSizes:
    """Read them; key-value heads default to the heads, a head's dimension to hidden / heads.

    Raises:
        InputError: one is missing, out of bounds, or heads do not divide.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    check_heads(config, heads, kv_heads)
    head_dim = head_dimension(config, hidden, heads)
    return DecoderSizes(hidden, heads, kv_heads, head_dim, config.size("intermediate_size"), config.size("vocab_size"))


def layer_segments(config: ConfigView, kinds: Sequence[str], make: Callable[[str], Block]) -> tuple[Segment, ...]:
    """The layers of `layer_types`: see `repeated_segments`.

    Raises:
        InputError: the kinds follow no pattern and change too often to be measured one after the other.
    """
    segments = repeated_segments(kinds, make)
    if len(segments) > MOST_RUNS:
        raise InputError(
            f"{config.name}: the {len(kinds)} layers change their kind {len(segments) - 1} times without a pattern that repeats; "
            f"at most {MOST_RUNS} runs of equal layers are read: check layer_types"
        )
    return segments


def repeated_segments(kinds: Sequence[str], make: Callable[[str], Block]) -> tuple[Segment, ...]:
    """Layers in order, repeats multiplied: an alternating pattern becomes one segment of its period, its rest another."""
    blocks = {kind: make(kind) for kind in dict.fromkeys(kinds)}
    total = len(kinds)
    for period in range(1, min(LONGEST_PERIOD, total) + 1):
        repeats, rest = divmod(total, period)
        if (repeats > 1 or not rest) and all(kind == kinds[index % period] for index, kind in enumerate(kinds)):
            repeated = Segment(tuple(blocks[kind] for kind in kinds[:period]), repeats)
            return (repeated, *_runs_of(kinds[total - rest :], blocks))
    return _runs_of(kinds, blocks)


def _runs_of(kinds: Sequence[str], blocks: Mapping[str, Block]) -> tuple[Segment, ...]:
    """Equal layers in a row as one segment."""
    return tuple(Segment((blocks[kind],), sum(1 for _ in run)) for kind, run in groupby(kinds))
