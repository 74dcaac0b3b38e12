"""Pipeline stages: a model as each stage holds it, and how many micro-batches are alive on it at the same time.

The layers are cut into p x v chunks, of which stage i holds those with the numbers i, i + p, i + 2p ...; the embedding is in the
first chunk, final norm, head and loss in the last. A stage that does not begin with the embedding receives hidden states, which
require a gradient; one that does not end with the head sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from memfit.errors import UsageError
from memfit.model import Block, BlockBuilder, Model, Segment
from memfit.parallel.ranks import InFlight, RankModel

SPLITS = ("weighted", "even")
"""How layers are given to stages: embedding and head count as a layer each, and the first stages get what is left over; or equal
numbers of layers only. Beside these, the numbers themselves: `15,16x6,15`."""

LAYER_ROLES = ("layers", "between")
"""Segments that are cut; a segment between layers goes with those before it."""


class _Cut(NamedTuple):
    """A stage: what it holds, as far as stages can differ."""

    first: bool
    last: bool
    segments: tuple[Segment, ...]
    begins: int
    """Layers of the model before its first one."""


def stages(
    model: Model, pp: int, *, schedule: str, virtual_stages: int, micro_batches: int | None, split: str = SPLITS[0]
) -> tuple[RankModel, ...]:
    """The distinct stages in order. Of equal ones in a row the first, which holds the most micro-batches, stands for all.

    Raises:
        UsageError: the model cannot be cut into so many stages; the nearest numbers that it can be cut into are named.
    """
    counts = layers_of_stages(model, pp, virtual_stages, split)
    bounds = [0, *accumulate(counts)]
    cuts = [_cut(model, stage, pp, bounds) for stage in range(pp)]
    found, at = [], 0
    for _, group in groupby(cuts, key=_key):
        alike = list(group)
        last = at + len(alike) - 1
        found.append(
            RankModel(
                f"pp{at}" if last == at else f"pp{at}-{last}",
                _model_of(model, alike[0]),
                stages=len(alike),
                in_flight=in_flight(schedule, pp, at, virtual_stages, micro_batches),
            )
        )
        at = last + 1
    return tuple(found)


def fills(schedule: str, pp: int, virtual_stages: int) -> int:
    """Micro-batches that fill a pipeline, so that more of them change no stage's memory (but GPipe's): p, or 2 p in chunks."""
    return 2 * pp if schedule == "interleaved" and virtual_stages > 1 else pp


def in_flight(schedule: str, pp: int, stage: int, virtual_stages: int, micro_batches: int | None) -> InFlight:
    """Micro-batches, and of an interleaved schedule chunks, that stage i (from 0) of p holds at the most.

    1F1B and zero bubble: min(m, p - i). GPipe: m. Interleaved with v chunks: min(m v, 2 (p - i - 1) + (v - 1) min(m, p) + 1)
    chunks, which of the first stage is 1 + (p - 1)/(p v) times all layers; of these, at the stage's end of the pipeline, all but
    (v - 1) min(m, p). Inference holds nothing for later.
    Source: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3; Megatron-LM
    core/pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    if schedule == "inference":
        return InFlight()
    m = micro_batches or fills(schedule, pp, virtual_stages)
    if schedule == "gpipe":
        return InFlight(m, m, 1, m)
    if schedule != "interleaved" or virtual_stages == 1:
        held = min(m, pp - stage)
        return InFlight(held, held, 1, m)
    earlier = (virtual_stages - 1) * min(m, pp)
    chunks = min(m * virtual_stages, 2 * (pp - stage - 1) + earlier + 1)
    return InFlight(chunks - earlier, chunks, virtual_stages, m)


def num_layers(model: Model) -> int:
    """Layers that can be given to stages."""
    return sum([segment.repeat * len(segment.blocks) for segment in model.segments if segment.role == "layers"])


def layers_of_stages(model: Model, pp: int, virtual_stages: int = 1, split: str = SPLITS[0]) -> tuple[int, ...]:
    """The layers of each chunk in the order of the model: p x v numbers.

    `weighted`: (L + 2) / (p v) each, the first ones one more where that does not divide, less one for the embedding in the first
    and one for norm and head in the last (torchtitan distributed/pipeline_parallel.py). `even`: L / (p v) (Megatron-LM).

    Raises:
        UsageError: see `stages`.
    """
    reason = structure_reason(model)
    if reason is not None:
        raise UsageError(f"--pp {pp}: {reason}")
    layers, chunks = num_layers(model), pp * virtual_stages
    if split not in SPLITS:
        return _stated(split, layers, pp, virtual_stages)
    counts = _shares(layers, chunks, split)
    if counts is None:
        legal = [one for one in range(1, layers // virtual_stages + 1) if _shares(layers, one * virtual_stages, split)]
        below = max([one for one in legal if one < pp], default=None)
        above = min([one for one in legal if one > pp], default=None)
        nearest = " or ".join([f"--pp {one}" for one in (below, above) if one is not None])
        of = f" of {virtual_stages} chunks" if virtual_stages > 1 else ""
        raise UsageError(
            f"--pp {pp}: the {layers} layers of {model.name} do not give {pp} stages{of} "
            f"{'equal shares' if split == 'even' else 'a layer each'}: take {nearest}, or say the shares with --stage-layers"
        )
    return counts


def _shares(layers: int, chunks: int, split: str) -> tuple[int, ...] | None:
    """The layers of each chunk; `None` if they do not go round."""
    if chunks == 1:
        return (layers,)
    if split == "even":
        return (layers // chunks,) * chunks if layers >= chunks and layers % chunks == 0 else None
    share, over = divmod(layers + 2, chunks)
    counts = [share + (number < over) for number in range(chunks)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts) if min(counts) > 0 else None


def _stated(text: str, layers: int, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Shares as they are written: `15,16x6,15`.

    Raises:
        UsageError: it cannot be read, or is not about these layers and stages.
    """
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.strip().partition("x")
        if not all(one.isascii() and one.isdecimal() and len(one) <= 6 and int(one) for one in (number, times or "1")):
            raise UsageError(f"--stage-layers {text[:60]!r}: write {' or '.join(SPLITS)}, or a number of layers for every stage, "
                             "such as 15,16x6,15")  # fmt: skip
        counts += [int(number)] * min(int(times or 1), pp * virtual_stages + 1)
    if len(counts) != pp * virtual_stages or sum(counts) != layers:
        chunks = f"{pp} stages" if virtual_stages == 1 else f"{pp} stages of {virtual_stages} chunks"
        said = f"--stage-layers {text[:60]!r} gives {sum(counts)} layers to {len(counts)} of them"
        raise UsageError(f"{said}; there are {layers} layers and {chunks}")
    return tuple(counts)


def structure_reason(model: Model) -> str | None:
    """Why the model cannot be cut into stages at all; `None` if it can."""
    segments = model.segments
    if model.family == "counts":
        return "only its size is known, not its layers: name a model or its dimensions"
    if model.encoder_decoder:
        return f"the decoder layers of {model.family} all read the encoder's output, which stages do not hand on"
    if model.reads_across_blocks or any(segment.provides for segment in segments):
        return f"layers of {model.family} read values that other layers made, which stages do not hand on"
    if any(segment.shared for segment in segments):
        return f"all layers of {model.family} share their parameters, so a stage would hold them all"
    if any(segment.unit for segment in segments):
        return f"{model.family} is checkpointed in modules of several layers, which stages would cut"
    if not num_layers(model) or any(segment.role not in LAYER_ROLES for segment in segments[1:-1]):
        return f"{model.family} is no row of layers between an embedding and a head"
    return None


def _cut(model: Model, stage: int, pp: int, bounds: Sequence[int]) -> _Cut:
    """The chunks of one stage as segments, those of equal layers in a row joined."""
    chunks = len(bounds) - 1
    first, last = stage == 0, stage == pp - 1
    found: list[Segment] = [model.segments[0]] if first else []
    for chunk in range(stage, chunks, pp):
        for one in _between(model, bounds[chunk], bounds[chunk + 1]):
            before = found[-1] if found else None
            alike = before is not None and before.role == one.role == "layers" and _same(before.blocks, one.blocks)
            if before is not None and alike:
                found[-1] = before._replace(repeat=before.repeat + one.repeat)
            else:
                found.append(one)
    if last:
        found.append(model.segments[-1])
    return _Cut(first, last, tuple(found), bounds[stage])


def _between(model: Model, begin: int, end: int) -> list[Segment]:
    """The layers from `begin` to `end`: what is left of a period that is cut comes before and after its whole repeats."""
    found: list[Segment] = []
    start = 0
    for segment in model.segments[1:-1]:
        if segment.role != "layers":
            if begin < start <= end:
                found.append(segment)
            continue
        period = len(segment.blocks)
        length = period * segment.repeat
        low, high = max(begin - start, 0), min(end - start, length)
        start += length
        if low >= high:
            continue
        whole = min(-(-low // period) * period, high)
        if low < whole:
            found.append(segment._replace(blocks=segment.blocks[low % period :][: whole - low], repeat=1))
        if (high - whole) // period:
            found.append(segment._replace(repeat=(high - whole) // period))
        if (high - whole) % period:
            found.append(segment._replace(blocks=segment.blocks[: (high - whole) % period], repeat=1))
    return found


def _same(some: tuple[Block, ...], others: tuple[Block, ...]) -> bool:
    """The very same blocks."""
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _key(cut: _Cut) -> tuple[object, ...]:
    """Stages with the same key are equal."""
    parts = [(segment.repeat, *[id(block) for block in segment.blocks]) for segment in cut.segments]
    return (cut.first, cut.last, *parts)


def _receive(block: Block) -> Segment:
    """What a stage begins with that has no embedding: the hidden states that its first layer reads."""
    b = BlockBuilder("receive", block.input.width, block.input.axis)
    return Segment((b.done(b.op("receive", "receive", (b.input,), block.input.width)),), role="receive")


def _model_of(model: Model, cut: _Cut) -> Model:
    """A stage as a model. A head that shares the embedding's table has a copy of its own where the embedding is elsewhere."""
    segments = cut.segments if cut.first else (_receive(cut.segments[0].blocks[0]), *cut.segments)
    if cut.last and not cut.first:
        owned = {one.name for segment in segments for block in segment.blocks for one in block.parameters if not one.tied_to}
        segments = (*segments[:-1], _untied(segments[-1], owned))
    layers = sum([segment.repeat * len(segment.blocks) for segment in segments if segment.role == "layers"])
    return model.part(
        segments=segments,
        num_layers=layers,
        first_layer=model.first_layer + cut.begins,
        sends=not cut.last,
        loss=model.loss if cut.last else None,
        pixels=model.pixels if cut.first else 0,
        stated_parameters=None,
        facts={**model.facts, "whole_parameters": model.num_parameters},
    )


def _untied(segment: Segment, owned: set[str]) -> Segment:
    """The segment with parameters of its own in place of those that are tied to tensors of another stage."""
    blocks = []
    for block in segment.blocks:
        ops = [
            op._replace(
                parameters=tuple(
                    [one._replace(tied_to="") if one.tied_to and one.tied_to not in owned else one for one in op.parameters]
                )
            )
            for op in block.ops
        ]
        blocks.append(block._replace(ops=tuple(ops)))
    return segment._replace(blocks=tuple(blocks))
