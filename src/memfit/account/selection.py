"""Which of the model's own parameters are trained: from selectors to names, block by block.

A selector is `all`, `embedding`, `layers`, `layers:N` (the first N of each stack), `head`, a kind (`norm`, `bias`, `linear`), or
the last part of a module's name (`lm_head`, `q_proj`). The head is the output projection, not the norm before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.kernels import KernelPolicy
from memfit.kernels.context import ALL_LINEAR, Choice, target_of
from memfit.model import Block, Model, Op, Parameter, Segment
from memfit.model.remember import of_model

KINDS = ("norm", "bias", "linear", "embedding")
PLACES = ("embedding", "layers", "head")
BIAS_OF = "bias of "
"""The biases of targeted modules (PEFT's bias="lora_only"), as --lora-bias spells it here."""
GENERAL = ("all", *PLACES, *[one for one in KINDS if one not in PLACES])
"""Selectors that every model has; beside them `layers:N` and names of modules."""


class Stretch(NamedTuple):
    """Equal repeats of a segment in a row, and which parameters of each of its blocks are trained there, by name."""

    repeat: int
    trained: tuple[frozenset[str], ...]


def layers_of(selector: str) -> int | None:
    """N of `layers:N`, `None` for any other selector."""
    name, _, number = selector.partition(":")
    return int(number) if name == "layers" and number.isascii() and number.isdecimal() and len(number) < 6 else None


def _selects(selector: str, segment: Segment, op: Op, parameter: Parameter, layer: int) -> bool:
    """Whether a selector means this parameter of the layer with this number."""
    if selector == "all":
        return True
    first = layers_of(selector)
    if first is not None:
        return segment.role == "layers" and layer < first
    if selector == "bias":
        return parameter.role == "bias" or parameter.name.endswith(".bias")
    if selector.startswith(BIAS_OF):
        targets = selector.removeprefix(BIAS_OF).split(",")
        return parameter.role == "bias" and (targets == [ALL_LINEAR] or target_of(parameter) in targets)
    if selector == "norm":
        return parameter.role == "norm"
    if selector == "linear":
        return parameter.role == "linear"
    if selector == "head":
        return _is_head(op)
    if selector == "embedding":
        return segment.role == "embedding" or parameter.role == "embedding"
    return segment.role == selector or target_of(parameter) == selector


def _is_head(op: Op) -> bool:
    """An output projection, with its bias."""
    return any(one.role == "head" for one in op.parameters)


def _chosen(choice: Choice, uses: list[tuple[Segment, Op, Parameter]], layer: int) -> bool:
    """Whether a tensor is trained that is used as each of `uses`."""
    if all(one.role == "unused" for _, _, one in uses):
        return False

    def selected(selectors: tuple[str, ...]) -> bool:
        return any(_selects(one, *use, layer) for one in selectors for use in uses)

    return (choice.base and not selected(choice.freeze)) or selected(choice.unfreeze)


def _names(choice: Choice, model: Model, segment: Segment, block: Block, layer: int) -> frozenset[str]:
    """The names of what is trained in a block. A tied tensor is one tensor, a copy in its place another."""
    found = set()
    for op in block.ops:
        for one in op.parameters:
            if target_of(one) in choice.saved:
                found.add(one.name)
                continue
            uses = [(segment, op, one)]
            if one.tied_to or segment.role != "layers":
                uses += _other_uses(choice, model, one)
            if _chosen(choice, uses, layer):
                found.add(one.name)
    return frozenset(found)


def _other_uses(choice: Choice, model: Model, parameter: Parameter) -> list[tuple[Segment, Op, Parameter]]:
    """Where else the tensor of a parameter is used, as itself and not as a copy."""
    owner = parameter.tied_to or parameter.name
    return [
        (segment, op, one)
        for segment in model.segments
        for block in segment.blocks
        for op in block.ops
        for one in op.parameters
        if (one.tied_to or one.name) == owner and (one.tied_to or parameter.tied_to) and target_of(one) not in choice.saved
    ]


@of_model(64)
def stretches(model: Model, choice: Choice) -> tuple[tuple[Stretch, ...], ...]:
    """For each segment of the model: its repeats, cut where the first N layers end."""
    found = []
    seen = 0
    for segment in model.segments:
        found.append(tuple(_joined(_repeats(choice, model, segment, seen))))
        seen = seen + segment.repeat * len(segment.blocks) if segment.role == "layers" else 0
    return tuple(found)


def _repeats(choice: Choice, model: Model, segment: Segment, seen: int) -> Iterator[Stretch]:
    """A repeat after the other until none of the numbers in selectors is met any more, then the rest."""
    period = len(segment.blocks)
    last = max((layers_of(one) or 0 for one in (*choice.freeze, *choice.unfreeze)), default=0)
    for turn in range(segment.repeat):
        first = seen + turn * period
        names = tuple([_names(choice, model, segment, block, first + place) for place, block in enumerate(segment.blocks)])
        if segment.role != "layers" or segment.shared or first >= last:
            yield Stretch(segment.repeat - turn, names)
            return
        yield Stretch(1, names)


def _joined(found: Iterator[Stretch]) -> Iterator[Stretch]:
    """Equal stretches in a row as one."""
    current: Stretch | None = None
    for one in found:
        if current is not None and current.trained == one.trained:
            current = Stretch(current.repeat + one.repeat, current.trained)
            continue
        if current is not None:
            yield current
        current = one
    if current is not None:
        yield current


class Own(NamedTuple):
    """A parameter of the model that is trained, how often, and whether a copy is trained in its place."""

    parameter: Parameter
    repeat: int
    copied: bool


def trained_parameters(model: Model, kernels: KernelPolicy) -> list[Own]:
    """The model's own parameters that get a gradient, tied ones once."""
    choice = kernels.choice
    if choice is None:
        return []
    found = []
    for segment, parts in zip(model.segments, stretches(model, choice), strict=True):
        for place, block in enumerate(segment.blocks):
            for one in block.parameters:
                times = sum(part.repeat for part in parts if one.name in part.trained[place])
                copied = target_of(one) in choice.saved
                if times and (copied or not one.tied_to):
                    found.append(Own(one, 1 if segment.shared else times, copied))
    return found
