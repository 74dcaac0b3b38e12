"""Activation checkpointing: which layers are recomputed in backward, in groups of how many, and what is kept of them instead.

none         nothing is recomputed
full         every layer, one by one: its input is kept
every:n      every n-th layer, the others keep all (torchtitan's selective option n)
first:n      the first n layers (Megatron's block method)
group:n      n layers as one checkpoint: ceil(L / n) inputs are kept, n layers recomputed at once (Megatron's uniform method)
selective    (of parts of a layer, where a kernel set can recompute some: selective:core_attn of Megatron) all is kept but what
             lies within these parts
selective    every layer, but the outputs of listed operations are kept beside its input (torch.utils.checkpoint's
             create_selective_checkpoint_contexts)
offloaded    as full, the inputs wait in host memory
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from memfit.account.blocks import Run
from memfit.account.crossing import BlockMemory
from memfit.errors import UsageError, did_you_mean
from memfit.kernels.tape import OPERATORS
from memfit.model import Model

COUNTED = ("every", "first", "group")
"""Kinds that take a number of layers."""
PARTS = ("core_attn",)
"""Parts of a layer that kernel sets recompute by themselves, as Megatron's recompute_modules names them."""
DEFAULT_OPERATORS = ("mm/2", "addmm", "bmm", "attention", "convolution", "reduce_scatter")
"""torchtitan's default: every product and attention kernel, of the products without a bias every second one.

Source: torchtitan distributed/activation_checkpoint.py SelectiveAC, with torch/_functorch/partitioners.py get_default_op_list.
"""


class Checkpointing(NamedTuple):
    """What `--checkpointing` says."""

    kind: str = "none"
    layers: int = 1
    """For every, first and group."""
    operators: tuple[str, ...] = ()
    """For selective: names of `OPERATORS` whose outputs are kept; `/2` keeps those of every second one, the first included."""

    parts: tuple[str, ...] = ()
    """For parts: names of `PARTS`, which alone are recomputed; the layers around them run as without checkpoints."""

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed."""
        return self.kind not in ("none", "parts")

    @property
    def all_layers(self) -> bool:
        """Whether no layer keeps everything."""
        return self.kind not in ("none", "every", "first", "parts")


NONE = Checkpointing()


@lru_cache(maxsize=256)
def find_checkpointing(text: str) -> Checkpointing:
    """What `--checkpointing` says.

    Raises:
        UsageError: a number of layers or an operation that cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind == "selective":
        # torchtitan spells every n-th layer as a selective option, too
        if rest.isascii() and rest.isdecimal():
            return find_checkpointing(f"every:{rest}")
        if rest in PARTS:
            return Checkpointing("parts", parts=(rest,))
        return Checkpointing(kind, operators=_operators(text, rest) if rest not in ("", "op") else DEFAULT_OPERATORS)
    if kind not in COUNTED:
        return Checkpointing(kind)
    if not (rest.isascii() and rest.isdecimal() and len(rest) <= 6 and int(rest) > 0):
        raise UsageError(f"--checkpointing {text[:60]!r}: write it like {kind}:2, with a whole number of layers")
    if kind in ("every", "group") and int(rest) == 1:
        return Checkpointing("full")
    return Checkpointing(kind, layers=int(rest))


def _operators(text: str, given: str) -> tuple[str, ...]:
    known = [*OPERATORS, *[f"{one}/2" for one in OPERATORS]]
    found = tuple([part.strip() for part in given.split(",") if part.strip()])
    for one in found:
        if one not in known:
            hint = did_you_mean(one[:60], known)
            raise UsageError(
                f"--checkpointing {text[:60]!r}: no operation {one[:60]!r}{hint}; it keeps those of {', '.join(OPERATORS)}, "
                "or with /2 those of every second one: selective:mm/2,attention"
            )
    twice = next((one for one in found if f"{one}/2" in found), None)
    if twice is not None:
        raise UsageError(f"--checkpointing {text[:60]!r} keeps every {twice} and every second one: leave one of them out")
    if not found:
        raise UsageError(f"--checkpointing {text[:60]!r} names no operation: selective:{','.join(DEFAULT_OPERATORS)}")
    return found


def num_checkpointed(model: Model, checkpointing: Checkpointing) -> int:
    """How many layers are recomputed."""
    total = sum(segment.repeat * len(segment.blocks) for segment in model.segments if segment.role == "layers")
    return {
        "none": 0,
        "parts": total,
        "every": total // checkpointing.layers,
        "first": min(total, checkpointing.layers),
    }.get(checkpointing.kind, total)


def arranged(runs: list[Run], checkpointing: Checkpointing) -> list[Run]:
    """The runs of a model, whose layers are all measured, with the checkpoints of a kind that counts layers.

    Layers are counted through the model; a group ends where a stack of layers does.
    """
    if checkpointing.kind not in COUNTED:
        return runs
    found: list[Run] = []
    counted, place = 0, 0
    while place < len(runs):
        run = runs[place]
        end = place + 1
        if run.role != "layers":
            found.append(run)
        else:
            while end < len(runs) and runs[end].role == "layers" and runs[end].shared == run.shared:
                end += 1
            stretch = _Stretch(runs[place:end], checkpointing, counted)
            found += stretch.runs()
            counted += stretch.length
        place = end
    return found


class _Stretch:
    """Layers in a row, cut anew so that checkpoints and equal layers form periods that repeat."""

    def __init__(self, runs: list[Run], checkpointing: Checkpointing, counted: int) -> None:
        self.given = runs
        self.checkpointing = checkpointing
        self.counted = counted
        self.starts: list[int] = []
        self.length = 0
        for run in runs:
            self.starts.append(self.length)
            self.length += len(run.names) * run.repeat

    def runs(self) -> list[Run]:
        kind, layers = self.checkpointing.kind, self.checkpointing.layers
        if kind == "group":
            return list(self._cut(0, self.length, layers, 0))
        if kind == "every":
            return list(self._cut(0, self.length, layers, -self.counted % layers))
        border = min(self.length, max(0, layers - self.counted))
        return [*self._cut(0, border, 1, 0), *self._cut(border, self.length, 1, 0)]

    def _cut(self, begin: int, end: int, period: int, phase: int) -> Iterator[Run]:
        """Runs of the layers from `begin` to `end`, where checkpoints repeat with `period`, the first time at `phase`.

        Within each given run the whole periods are one run; layers at its borders, and those met first in backward, which may
        differ, are listed.
        """
        position = begin
        for run, start in zip(self.given, self.starts, strict=True):
            common = lcm(period, len(run.names))
            first = max(position, start)
            first += (phase - first) % period
            alike = min(end, start + len(run.names) * (run.repeat - len(run.turns) + 1))
            times = (alike - first) // common
            if times < 2:
                continue
            if position < first:
                yield self._run(position, first, 1)
            yield self._run(first, first + common, times)
            position = first + common * times
        if position < end:
            yield self._run(position, end, 1)

    def _run(self, start: int, stop: int, repeat: int) -> Run:
        layers = [self._layer(index) for index in range(start, stop)]
        end = start + (stop - start) * repeat
        begun = [run for run, begins in zip(self.given, self.starts, strict=True) if start <= begins < end]
        last = layers[-1][3]
        return last._replace(
            names=tuple([name for name, _, _, _ in layers]),
            turns=(tuple([memory for _, memory, _, _ in layers]),),
            bare=tuple(
                [bare if self._checkpointed(start + place) else memory for place, (_, memory, bare, _) in enumerate(layers)]
            ),
            repeat=repeat,
            spans=self._spans(start, stop),
            once=sum([run.once for run in begun]),
            settled=sum([run.settled for run in begun]),
        )

    def _layer(self, index: int) -> tuple[str, BlockMemory, BlockMemory, Run]:
        """A layer's name, its memory with and without autograd, and the run that it comes from."""
        number = next(place for place in range(len(self.starts) - 1, -1, -1) if self.starts[place] <= index)
        run = self.given[number]
        turn, place = divmod(index - self.starts[number], len(run.names))
        return run.names[place], run.turn(run.repeat - 1 - turn)[place], run.bare[place], run

    def _checkpointed(self, index: int) -> bool:
        kind, layers = self.checkpointing.kind, self.checkpointing.layers
        if kind == "every":
            return (self.counted + index + 1) % layers == 0
        return kind == "group" or self.counted + index < layers

    def _spans(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        if self.checkpointing.kind == "group":
            step = self.checkpointing.layers
            return tuple([(place, min(place + step, stop - start)) for place in range(0, stop - start, step)])
        return tuple([(index - start, index - start + 1) for index in range(start, stop) if self._checkpointed(index)])
