"""A config from a size (`7B`) or from dimensions (`--layers 32 --hidden 4096`), when there is no config.json.

Whatever was not given is typical and is listed as an assumption with the flag that changes it. A gated decoder becomes a `llama`
config, one without gate a `gpt_neox` config, an encoder a `bert` config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from memfit.errors import UsageError
from memfit.families.shapes import FORMS, MAX_PARAMETERS, Form, Shape
from memfit.job import Assumption, Dimensions
from memfit.units import format_count

SIZE_ONLY_UNCERTAINTY = 0.25
"""Published models of one size differ about this much: a trained token takes 6.4 MB in Llama-2-7B and 8.4 MB in Qwen2.5-7B (what
the layers keep in bf16, and 14 B x V of logits at the peak). KV caches differ by more: see the assumption on kv_heads."""
SOME_DIMENSIONS_UNCERTAINTY = 0.10
ALL_DIMENSIONS_UNCERTAINTY = 0.05
"""Biases, norms, tied embeddings and dropout are still unknown when every dimension is."""
COUNT_TOLERANCE = 0.05
"""A stated count farther than this from the shape's own count is reported."""
_KEEP_SHAPE = 1.15
"""Within this factor of a typical shape only the feed-forward width is changed."""
_ROUNDING = 0.01
"""A ratio is written with a few digits (0.333): this share of a head is rounding, not a fraction of a head."""


class SizedConfig(NamedTuple):
    """A config made without a config.json."""

    config: dict[str, Any]
    assumptions: tuple[Assumption, ...]
    relative_uncertainty: float
    """Half width of the interval around every byte figure that comes from the shape, as a share of it."""
    parameters: int | None
    """The count as the user stated it; `None` if only dimensions were given."""


def config_for_size(params: int) -> SizedConfig:
    """A typical gated decoder of about `params` parameters (within 3 %).

    Raises:
        UsageError: no typical shape has so few or so many parameters.
    """
    return config_for_dimensions(Dimensions(params=params))


def config_for_dimensions(dimensions: Dimensions) -> SizedConfig:
    """The config of a model of which some dimensions, or its count, are known.

    With a count but not both of layers and hidden size, the typical shape of that size is fitted to the count around the given
    dimensions. With layers and hidden size the dimensions decide and the count is only checked.

    Raises:
        UsageError: nothing to start from, or dimensions that no model can have; the message names the nearest legal value.
    """
    form = _form(dimensions)
    shape = _shape(form, dimensions)
    count = form.parameters(shape)
    if count > MAX_PARAMETERS:
        raise UsageError(f"these dimensions make {count:.1e} parameters; at most {format_count(MAX_PARAMETERS)} are computed")
    return SizedConfig(
        config=form.config(shape),
        assumptions=_assumptions(form, shape, dimensions, count),
        relative_uncertainty=_uncertainty(dimensions),
        parameters=dimensions.params,
    )


def name_of(dimensions: Dimensions) -> str:
    """What to call the model in an answer: `7.00B decoder`, `32 layers x 4,096 decoder`."""
    kind = dimensions.kind or "decoder"
    if dimensions.layers is not None and dimensions.hidden is not None:
        return f"{dimensions.layers} layers x {dimensions.hidden:,} {kind}"
    if dimensions.params is not None:
        return f"{format_count(dimensions.params)} {kind}"
    return f"{kind} by dimensions"


def _form(dimensions: Dimensions) -> Form:
    """Which of the three kinds of shape the dimensions ask for."""
    if dimensions.kind == "encoder":
        if dimensions.gated:
            raise UsageError("--gated does not go with --kind encoder: an encoder by dimensions is a BERT, which has no gate")
        return FORMS["bert"]
    return FORMS["gpt_neox" if dimensions.gated is False else "llama"]


def _shape(form: Form, dimensions: Dimensions) -> Shape:
    if dimensions.params is not None and (dimensions.layers is None or dimensions.hidden is None):
        shape = _fitted(form, dimensions, dimensions.params)
    elif dimensions.layers is not None or dimensions.hidden is not None:
        shape = _typical(form, dimensions)
    else:
        more = "--heads, --kv-heads, --ffn and --vocab make it exact"
        raise UsageError(f"a model without a config needs --params, or --layers and --hidden; {more}")
    return shape


# ---------------------------------------------------------------- by size


def _fitted(form: Form, given: Dimensions, params: int) -> Shape:
    """The typical shape nearest to `params`, fitted to the count around the dimensions that were given.

    Close to the typical shape only its feed-forward width is changed; farther away hidden size and depth are scaled first.
    """
    low, high = form.sizes
    if not low <= params <= high:
        span = f"{format_count(low)} to {format_count(high)}"
        raise UsageError(
            f"no typical {form.noun} has {format_count(params)} parameters ({span} are known): give"
            " --layers, --hidden, --heads, --ffn and --vocab, or write 7B for seven billion"
        )
    legal = [shape for shape in form.shapes if given.heads is not None or _groups(shape.heads, given)]
    near = min(legal or form.shapes, key=lambda shape: abs(math.log(params / form.parameters(shape))))
    base = near.replace(vocab=given.vocab or near.vocab)
    as_it_is = given.layers is None and given.hidden is None and given.heads is None and given.vocab is None
    close = as_it_is and 1 / _KEEP_SHAPE <= params / form.parameters(near) <= _KEEP_SHAPE
    hidden = near.hidden if close else given.hidden or _scaled_hidden(form, base, given, params)
    shape = _with_heads(form, base.replace(hidden=hidden), given)
    shape = shape.replace(ffn=given.ffn or max(1, round(near.ffn / near.hidden * hidden)), layers=given.layers or near.layers)
    if given.layers is None and not close:
        shape = shape.replace(layers=max(1, round((params - form.outside(shape)) / form.layer(shape))))
    if given.ffn is None:
        shape = shape.replace(ffn=_fitting_ffn(form, shape, params))
    return shape


def _scaled_hidden(form: Form, near: Shape, given: Dimensions, params: int) -> int:
    """The hidden size of `near` scaled to `params`: embeddings go with s, a layer with s^2, the depth with s if it is free.

    Solves params = s x outside + s^2 x (s or layers) x layer by bisection (the right side grows with s).
    """
    outside, layer = form.outside(near), form.layer(near)
    low, high = 1e-6, 1e6
    for _ in range(60):
        scale = math.sqrt(low * high)
        layers = given.layers if given.layers is not None else scale * near.layers
        if scale * outside + scale**2 * layers * layer < params:
            low = scale
        else:
            high = scale
    step = _hidden_step(near, given)
    return max(1, round(near.hidden * low / step)) * step


def _hidden_step(near: Shape, given: Dimensions) -> int:
    """What a scaled hidden size is a multiple of, so that it splits into heads, and these into groups."""
    if given.heads is not None:
        return given.heads * 2
    if given.kv_heads is not None:
        return near.head_dim * given.kv_heads
    grouped = near.kv_heads != near.heads
    return near.head_dim * (near.kv_heads if grouped else max(1, near.heads // 8))


def _fitting_ffn(form: Form, shape: Shape, params: int) -> int:
    """The feed-forward width with which the count is met, as a multiple of 64 (8 below a hidden size of 1,024), within
    1/2 to 12 times the hidden size."""
    without = form.outside(shape) + shape.layers * form.layer(shape.replace(ffn=0))
    per_column = (form.layer(shape.replace(ffn=1)) - form.layer(shape.replace(ffn=0))) * shape.layers
    step = 64 if shape.hidden >= 1024 else 8
    width = round((params - without) / per_column / step) * step
    return min(max(width, step * math.ceil(shape.hidden / 2 / step)), 12 * shape.hidden)


# ---------------------------------------------------------------- by dimensions


def _typical(form: Form, given: Dimensions) -> Shape:
    """The given dimensions, and typical ones for the rest."""
    hidden, layers = given.hidden, given.layers
    if hidden is None:
        near = min(form.shapes, key=lambda shape: (abs(shape.layers - (layers or 0)), -shape.hidden))
        head_dim = 128 if (given.heads or 0) >= 16 and form is not FORMS["bert"] else 64
        hidden = given.heads * head_dim if given.heads is not None else near.hidden
    if layers is None:
        layers = min(form.shapes, key=lambda shape: abs(math.log(shape.hidden / hidden))).layers
    base = form.shapes[0]
    shape = Shape(
        layers=layers, hidden=hidden, heads=0, kv_heads=0, head_dim=0, ffn=given.ffn or form.typical_ffn(hidden),
        vocab=given.vocab or form.typical_vocab(hidden), tied=form.typically_tied(hidden), positions=base.positions,
    )  # fmt: skip
    return _with_heads(form, shape, given, typical=True)


def _with_heads(form: Form, shape: Shape, given: Dimensions, typical: bool = False) -> Shape:
    """`shape` with a legal number of heads and key-value heads.

    Raises:
        UsageError: the given heads do not divide the hidden size, or the given key-value heads do not divide the heads.
    """
    hidden, heads = shape.hidden, given.heads
    legal = _legal_heads(form, hidden)
    if not legal:
        nearest = f"the nearest is --hidden {hidden + 1}"
        raise UsageError(f"--hidden {hidden} is odd and does not split into heads of even width; {nearest}")
    if heads is None:
        width = form.typical_head_dim(hidden) if typical else shape.head_dim
        heads = _nearest([number for number in legal if _groups(number, given)] or legal, hidden / width)
    elif heads not in legal:
        even = "" if hidden % heads else " of even width"
        nearest = f"the nearest is --heads {_nearest(legal, heads)}"
        raise UsageError(f"--hidden {hidden} does not split into {heads} heads{even}; {nearest}")
    kv_heads = _given_kv_heads(form, given, heads)
    if kv_heads is None:
        grouped = not typical and given.heads is None and shape.kv_heads != shape.heads and heads % shape.kv_heads == 0
        kv_heads = shape.kv_heads if grouped else heads
    return shape.replace(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads)


def _groups(heads: int, given: Dimensions) -> bool:
    """Whether the given key-value heads, or their ratio, go with this number of heads."""
    if given.kv_ratio is not None:
        exact = given.kv_ratio * heads
        if abs(exact - _nearest(_divisors(heads), exact)) > _ROUNDING:
            return False
    return given.kv_heads is None or heads % given.kv_heads == 0


def _given_kv_heads(form: Form, given: Dimensions, heads: int) -> int | None:
    """The key-value heads from `--kv-heads` or `--kv-ratio`; `None` if neither was given."""
    kv_heads = given.kv_heads
    if given.kv_ratio is not None:
        exact = given.kv_ratio * heads
        nearest = _nearest(_divisors(heads), exact)
        if abs(exact - nearest) > _ROUNDING:
            raise UsageError(
                f"--kv-ratio {given.kv_ratio:g} of {heads} heads is {exact:g} key-value heads, which does not divide {heads}; "
                f"the nearest is --kv-ratio {nearest / heads:g} (--kv-heads {nearest})"
            )
        if kv_heads is not None and kv_heads != nearest:
            ratio = f"--kv-ratio {given.kv_ratio:g} (= {nearest} of {heads} heads)"
            raise UsageError(f"--kv-heads {kv_heads} and {ratio} differ; give one")
        kv_heads = nearest
    if kv_heads is None:
        return None
    if heads % kv_heads:
        nearest = _nearest(_divisors(heads), kv_heads)
        raise UsageError(f"--kv-heads {kv_heads} does not divide {heads} heads; the nearest is --kv-heads {nearest}")
    if kv_heads != heads and not form.grouped_heads:
        legal = f"give --kv-heads {heads}{form.instead}"
        raise UsageError(f"--kv-heads {kv_heads}: a {form.noun} has as many key-value heads as heads; {legal}")
    return kv_heads


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _legal_heads(form: Form, hidden: int) -> list[int]:
    """Numbers of heads into which `hidden` splits; with rotary embeddings a head's width is even, as they turn pairs."""
    return [heads for heads in _divisors(hidden) if not form.rotary or (hidden // heads) % 2 == 0]


def _nearest(values: Iterable[int], wanted: float) -> int:
    return min(values, key=lambda value: (abs(value - wanted), value))


# ---------------------------------------------------------------- what was assumed


class _Reason(NamedTuple):
    """Why a dimension was taken: how the value was chosen."""

    by_size: str
    by_dimensions: str


_REASONS = {
    "layers": _Reason("typical depth for the size", "typical depth for the hidden size"),
    "hidden": _Reason("typical width for the size", "typical width for the number of layers"),
    "heads": _Reason("typical head width", "typical head width of 128, or 64 in small models and encoders"),
    "kv_heads": _Reason(
        "typical for the size; the KV cache is proportional to it",
        "as many as heads (no grouping); the KV cache is proportional to it",
    ),
    "ffn": _Reason("chosen so that the number of parameters is met", "{ffn_rule}"),
    "vocab": _Reason("typical for the size", "typical vocabulary of a {noun} of this width"),
}


def _assumptions(form: Form, shape: Shape, given: Dimensions, count: int) -> tuple[Assumption, ...]:
    by_size = given.params is not None and (given.layers is None or given.hidden is None)
    found = []
    if given.kind is None:
        found.append(Assumption(name="kind", value="decoder", why="most language models are causal decoders", flag="--kind"))
    if given.gated is None and form is not FORMS["bert"]:
        why = "current decoders have a gated feed-forward (SwiGLU)"
        found.append(Assumption(name="gated", value=True, why=why, flag="--gated"))
    for name, reason in _REASONS.items():
        if name == "kv_heads" and (given.kv_ratio is not None or not form.grouped_heads):
            continue
        if getattr(given, name) is None:
            why = (reason.by_size if by_size else reason.by_dimensions).format(ffn_rule=form.ffn_rule, noun=form.noun)
            found.append(Assumption(name=name, value=getattr(shape, name), why=why, flag="--" + name.replace("_", "-")))
    why = "longest sequence of the typical model; only a config.json changes it"
    found.append(Assumption(name="max_positions", value=shape.positions, why=why))
    tied = "one matrix" if shape.tied else "two matrices"
    why = f"embedding and head as {tied}, typical for the size; only a config.json changes it"
    found.append(Assumption(name="tie_word_embeddings", value=shape.tied, why=why))
    if given.params is not None:
        off = count / given.params - 1
        if abs(off) > COUNT_TOLERANCE:
            stated = f"{off:+.1%} against the {format_count(given.params)} stated"
            why = f"the dimensions make {format_count(count)} parameters, {stated}; the dimensions were taken"
            found.append(Assumption(name="params", value=count, why=why, flag="--params"))
        elif by_size:
            why = f"shape fitted to the {format_count(given.params)} asked for ({off:+.2%})"
            found.append(Assumption(name="params", value=count, why=why, flag="--params"))
    if form is FORMS["bert"]:
        found.append(Assumption(name="dropout", value=0.1, why="as in BERT (Devlin et al. 2019)", flag="--dropout"))
    return tuple(found)


def _uncertainty(given: Dimensions) -> float:
    """Size or one dimension only: 0.25; depth and width known: 0.10; every dimension known: 0.05."""
    if given.layers is None or given.hidden is None:
        return SIZE_ONLY_UNCERTAINTY
    kv_known = given.kv_heads is not None or given.kv_ratio is not None or given.kind == "encoder" or given.gated is False
    known = given.heads is not None and kv_known and given.ffn is not None and given.vocab is not None
    return ALL_DIMENSIONS_UNCERTAINTY if known else SOME_DIMENSIONS_UNCERTAINTY
