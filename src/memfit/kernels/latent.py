"""Multi-head latent attention as transformers runs it: latents in the cache, keys and values expanded from them for every pass.

Source: transformers 5 models/deepseek_v3/modeling_deepseek_v3.py (apply_rotary_pos_emb_interleave, expand_kv) and
models/deepseek_v2/modeling_deepseek_v2.py (apply_rotary_emb).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.kernels import functions
from memfit.kernels.context import Context
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import KEY_TOKEN, Op


def pair_rotary(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """cat(x1 cos - x2 sin, x2 cos + x1 sin) of the even and odd elements: keeps cos and sin only, which all layers share."""
    tape = context.tape
    table = tape.policy.weight if tape.policy.autocast else x.dtype
    dtype = "fp32" if "fp32" in (table, x.dtype) else x.dtype
    halves = []
    odd, even = (_slice(tape, x, x.width // 2) for _ in range(2))
    for first, second in ((odd, even), (even, odd)):
        halves.append(functions.add(tape, functions.unary(tape, first, dtype=dtype), functions.unary(tape, second, dtype=dtype)))
    out = tape.tensor(x.axis, x.width, dtype)
    tape.record(halves, (out,))
    return [out]


def half_rotary(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """cat(x1 cos - x2 sin, x2 cos + x1 sin) of the two halves, with tables of half a head's width."""
    tape = context.tape
    table = tape.policy.weight if tape.policy.autocast else x.dtype
    dtype = "fp32" if "fp32" in (table, x.dtype) else x.dtype
    first, second = (tape.view(x, x.width // 2) for _ in range(2))
    tape.record((x,), (first, second))
    halves = []
    for one, other in ((first, second), (second, first)):
        halves.append(functions.add(tape, functions.unary(tape, one, dtype=dtype), functions.unary(tape, other, dtype=dtype)))
    out = tape.tensor(x.axis, x.width, dtype)
    tape.record(halves, (out,))
    return [out]


def _slice(tape: Tape, x: Tensor, width: int) -> Tensor:
    """A strided view; its backward fills a whole tensor of zeros."""
    out = tape.view(x, width)
    tape.record((x,), (out,))
    return out


def complex_rotary(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """x in fp32 read as complex numbers, times a table that all layers share: keeps the table only."""
    tape = context.tape
    turned = functions.unary(tape, tape.cast(x, "fp32"))
    return [tape.cast(turned, x.dtype)]


def from_cache(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Inference reads the cache, which is counted as such; training has none."""
    if context.policy.training:
        return [x]
    tape = context.tape
    out = tape.outside(KEY_TOKEN, x.width, x.dtype)
    tape.record((x,), (out,))
    return [out]


def join(context: Context, op: Op, *parts: Tensor) -> list[Tensor]:
    """cat: saves nothing; parts of another format are cast first."""
    tape = context.tape
    dtype = tape.promote(*parts)
    cast = [tape.cast(one, dtype) for one in parts] if tape.policy.autocast else list(parts)
    out = tape.tensor(parts[0].axis, op.outputs[0].width, dtype)
    tape.record(cast, (out,))
    return [out]


def latent_keys(context: Context, op: Op, expanded: Tensor, k_rotary: Tensor) -> list[Tensor]:
    """Copied into an empty tensor, part by part: each copy's backward makes a copy of the whole gradient."""
    tape = context.tape
    out = tape.tensor(expanded.axis, op.outputs[0].width, expanded.dtype)
    part = tape.view(expanded, out.width - op.attributes["heads"] * k_rotary.width)
    tape.record((expanded,), (part,))
    tape.record((part, k_rotary), (out,), backward_scratch=[out.size])
    return [out]


def latent_values(context: Context, op: Op, expanded: Tensor) -> list[Tensor]:
    """A part of every head: a view."""
    out = context.tape.view(expanded, op.outputs[0].width)
    context.tape.record((expanded,), (out,))
    return [out]


KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "pair_rotary": pair_rotary,
    "half_rotary": half_rotary,
    "complex_rotary": complex_rotary,
    "from_cache": from_cache,
    "join": join,
    "latent_keys": latent_keys,
    "latent_values": latent_values,
}
