"""What encoder families share: checks, dropouts and heads."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import InputError, UnknownArchitectureError, did_you_mean
from memfit.families.view import ConfigView
from memfit.model import BlockBuilder, Segment, Value


def check_encoder(config: ConfigView, hidden: int, heads: int) -> None:
    """Heads divide the width; no relative positions, no decoder.

    Raises:
        InputError: a dimension or a switch that is not supported.
    """
    if hidden % heads:
        raise InputError(f"{config.name}: the width {hidden} is not a multiple of {heads} attention heads")
    if config.text("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"{config.name}: only absolute positions are supported for this family")
    for key in ("add_cross_attention", "is_decoder"):
        if config.flag(key, False):
            raise InputError(f"{config.name}: {key} is not supported for this family")


def classifier_dropout(config: ConfigView, hidden_dropout: float) -> float:
    """The head's dropout: `classifier_dropout`, or the hidden states' one where the config says nothing or null."""
    return config.probability("classifier_dropout", hidden_dropout)


def token_head(b: BlockBuilder, labels: int, dropout: float, x: Value | None = None, *, name: str = "classifier") -> Segment:
    """Dropout and a linear over every token, with its loss."""
    logits = b.linear(name, b.dropout(b.input if x is None else x, dropout), labels, bias=True, role="head")
    return Segment((b.done(b.loss(logits, upcast=False)),), role="head")


def unknown_head(architecture: str, known: Sequence[str]) -> UnknownArchitectureError:
    """The error for a class whose head is not described."""
    return UnknownArchitectureError(
        f"the head of {architecture!r} is not known{did_you_mean(architecture, known)}; a class may end in {', '.join(known)}"
    )
