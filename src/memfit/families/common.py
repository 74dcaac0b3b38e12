"""What decoder families share: embeddings, heads and runs of equal layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from memfit.errors import InputError, UnknownArchitectureError, did_you_mean
from memfit.families.view import ConfigView
from memfit.model import ACTIVATION_FUNCTIONS, TOKEN, Block, BlockBuilder, Segment, Value

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
) -> tuple[Segment, str | None]:
    """Final norm, head and loss of the class that `architecture` names. Returns the segment and the kind of loss.

    `token_upcast`: whether token classification computes its loss in fp32 (the generic class does, GPT-2's own does not).

    Raises:
        UnknownArchitectureError: a class whose head is not known.
    """
    b = BlockBuilder("head", hidden, TOKEN)
    x = norm(b, b.input)
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        logits = b.head(head_name, x, vocab, tied_to=tied_to)
        if softcap:
            logits = b.softcap(logits)
        b.until_here(x)
        return Segment((b.done(b.loss(logits, upcast=True)),), role="head"), "causal-lm"
    num_labels = config.num_labels()
    if architecture.endswith("ForSequenceClassification"):
        logits = b.one_token(b.linear("score", x, num_labels, role="head", split="none"), view=False)
        return Segment((b.done(b.loss(logits, upcast=False)),), role="head"), "classification"
    if architecture.endswith("ForTokenClassification"):
        x = b.dropout(x, config.probability("classifier_dropout", config.probability("hidden_dropout", 0.1)))
        logits = b.linear("score", x, num_labels, bias=True, role="head", split="none")
        return Segment((b.done(b.loss(logits, upcast=token_upcast)),), role="head"), "classification"
    if architecture.endswith("Model") and not architecture.endswith("HeadsModel"):
        return Segment((b.done(x),), role="head"), None
    known = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "Model")
    raise UnknownArchitectureError(
        f"the head of {architecture!r} is not known{did_you_mean(architecture, known)}; a class may end in {', '.join(known)}"
    )


def layer_segments(config: ConfigView, kinds: Sequence[str], make: Callable[[str], Block]) -> tuple[Segment, ...]:
    """Layers in order, repeats multiplied: an alternating pattern becomes one segment of its period.

    Raises:
        InputError: the kinds follow no pattern and change too often to be measured one after the other.
    """
    blocks = {kind: make(kind) for kind in dict.fromkeys(kinds)}
    total = len(kinds)
    for period in range(1, min(LONGEST_PERIOD, total) + 1):
        if total % period == 0 and list(kinds) == list(kinds[:period]) * (total // period):
            return (Segment(tuple(blocks[kind] for kind in kinds[:period]), total // period),)
    runs = [(kind, sum(1 for _ in run)) for kind, run in groupby(kinds)]
    if len(runs) > MOST_RUNS:
        raise InputError(
            f"{config.name}: the {total} layers change their kind {len(runs) - 1} times without a pattern that repeats; "
            f"at most {MOST_RUNS} runs of equal layers are read: check layer_types"
        )
    return tuple(Segment((blocks[kind],), count) for kind, count in runs)
