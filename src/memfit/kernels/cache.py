"""How keys and values enter a KV cache: a layer's new ones are concatenated to the old ones, or written into a buffer.

Source: transformers 5 cache_utils.py: DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer. Attention
reads what the cache returns, under the names that held the new keys and values, so that those are gone by then.
"""

from __future__ import annotations

from memfit.kernels.context import Context
from memfit.kernels.tape import Size, Tape, Tensor
from memfit.model.description import KEY_TOKEN, TARGET_KEY_TOKEN, TARGET_TOKEN, TOKEN, Op
from memfit.precision import KV_BYTES_X2


def caches(context: Context, op: Op) -> bool:
    """Whether this attention's keys and values go into a cache."""
    return bool(context.policy.kv_cache) and bool(op.attributes.get("cached"))


def cached_axis(op: Op) -> int:
    """The axis that counts its cached tokens, window or not."""
    q, k = op.inputs[:2]
    if q.axis != TARGET_TOKEN:
        return KEY_TOKEN
    return TARGET_KEY_TOKEN if k.axis == TARGET_TOKEN else TOKEN


def stored(context: Context, op: Op, k: Tensor, v: Tensor) -> list[Tensor]:
    """What attention reads of a layer's keys and values once they are in the cache."""
    policy = context.policy
    axis = cached_axis(op)
    if policy.filled and axis == TOKEN:
        return [k, v]  # those of the encoder's output were stored with the first token
    if policy.kv_cache == "static":
        return _static(context, op, k, v)
    return _concatenated(context, op, k, v, axis)


def _entry(context: Context, x: Tensor, axis: int) -> Size:
    """Bytes of keys (or of values) in the cache's format for each token, halves rounded up."""
    return axis, -(-x.width * KV_BYTES_X2[context.policy.kv_dtype or x.dtype] // 2)


def _resident(tape: Tape, x: Tensor, size: Size, axis: int) -> Tensor:
    """Cached keys (or values): as wide as x, `size` bytes of the cache's own, alive as long as the cache."""
    made = tape.tensor(axis, x.width, x.dtype)
    tape.sizes[made.storage] = size
    tape.cached.add(made.storage)
    return made


def _full_window(context: Context, op: Op) -> bool:
    """Whether this layer's window is full, so that its cache does not grow any more."""
    return op.attributes["window"] in context.policy.binding_windows


def _concatenated(context: Context, op: Op, k: Tensor, v: Tensor, axis: int) -> list[Tensor]:
    """cat([old, new]): all of the result is new where nothing was cached, otherwise old and result are alive together.

    The cache of a later pass is counted as it is when the pass is over; a full window's does not grow. A sliding layer lets go of
    old keys and values when both are concatenated, others of the keys first. The caller's names hold the new ones as long.
    """
    tape, filled = context.tape, context.policy.filled
    grows = not _full_window(context, op)
    made: list[Tensor] = []
    old: list[Size] = []
    new = [min(_entry(context, x, x.axis)[1], x.size[1]) for x in (k, v)]
    for index, x in enumerate((k, v)):
        entry = _entry(context, x, axis)
        if x.storage in tape.companions:
            tape.companions[len(tape.sizes)] = tape.companions[x.storage]
        made.append(_resident(tape, x, (axis, 0) if filled else entry, axis))
        if op.attributes["window"] is None:
            old.clear()
        if filled:
            # the cache is counted with the new tokens in it, which are not there yet
            old += [entry, (x.axis, -sum(new[index:]))] if grows else [entry]
        tape.record((x,), made[-1:], scratch=tuple(old))
    tape.hold(k)
    return made


def _static(context: Context, op: Op, k: Tensor, v: Tensor) -> list[Tensor]:
    """Buffers for the whole context, made by a layer's first update; new keys and values are copied into them.

    Attention reads the whole buffers; of a prompt that is longer than a sliding window it reads the prompt's own. A full window's
    buffers are rolled: copies of both for a moment.
    """
    tape, policy = context.tape, context.policy
    axis = cached_axis(op)
    entries = [_entry(context, x, axis) for x in (k, v)]
    buffers = [_resident(tape, x, (axis, 0) if policy.filled else entry, axis) for x, entry in zip((k, v), entries, strict=True)]
    if not policy.filled:
        tape.record((), buffers)
    longer = _full_window(context, op)
    tape.record((k, v, *buffers), (), scratch=entries if longer and policy.filled else ())
    if longer and not policy.filled:
        return [k, v]
    return buffers
