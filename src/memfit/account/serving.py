"""The timeline of inference as moments: load, prefill, decode. Nothing is kept for backward; the cache grows with the context,
recurrent states do not.

Prefill runs the prompts of all sequences at once, decode one token of each with the whole context in the cache.
Source for the cache: transformers 5 cache_utils.py, DynamicCache grows by concatenation, keys and values of one layer at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.account.blocks import shared_forms
from memfit.account.forms import INPUTS, KV_CACHE, RECURRENT_STATE, TEMPORARY, WEIGHTS, WORKSPACE, ZERO, Form, form, per_axis
from memfit.account.liveness import measure_forward
from memfit.account.profile import Profile, loading, pruned
from memfit.account.states import buffer_bytes, tensors_of, weight_bytes
from memfit.account.training import ID_BYTES
from memfit.kernels import KernelPolicy, lower
from memfit.model import AXES, KEY_TOKEN, ONCE, SEQUENCE, TOKEN, CacheSpec, Model
from memfit.precision import DTYPE_BYTES, KV_BYTES_X2


class ServingPolicy(NamedTuple):
    """What decides inference beside the kernels."""

    kv_dtype: str
    workspace: int


def cache_axis(cache: CacheSpec, windows: tuple[int, ...]) -> int:
    """The axis that counts its cached tokens: all of the context, or min(context, window)."""
    return KEY_TOKEN if cache.window is None else len(AXES) + windows.index(cache.window)


def cache_form(model: Model, kv_dtype: str, *, cropped: bool = True) -> Form:
    """Bytes of the cache: for each layer (K + V elements) x bytes x cached tokens.

    `cropped` false: a sliding layer still holds the whole prompt. DynamicSlidingWindowLayer crops by a view, whose storage goes
    only when the next token is concatenated.
    """
    total = ZERO
    for cache, layers in model.caches:
        axis = cache_axis(cache, model.windows) if cropped else KEY_TOKEN
        total += form(KV_CACHE, axis, layers * cache_bytes(cache, kv_dtype))
    return total


def cache_bytes(cache: CacheSpec, kv_dtype: str) -> int:
    """Bytes of one layer's cache for one token, halves rounded up."""
    return -(-cache.elements_per_token * KV_BYTES_X2[kv_dtype] // 2)


def state_form(model: Model, dtype: str) -> Form:
    """Bytes of the recurrent states of one sequence, whatever its length: layers x (convolution x format + recurrence x 4).

    Source: transformers 5 cache_utils.py, LinearAttentionLayer; a recurrent state has the format of what the scan returns: fp32.
    """
    total = sum(
        layers * (state.convolution * DTYPE_BYTES[dtype] + state.recurrence * DTYPE_BYTES["fp32"])
        for state, layers in model.states
    )
    return form(RECURRENT_STATE, SEQUENCE, total)


def _growth(model: Model, kv_dtype: str) -> list[Form]:
    """While one layer's keys are concatenated, the old and the new ones are alive: half of that layer's cache."""
    largest: dict[int, int] = {}
    for cache, _ in model.caches:
        axis = cache_axis(cache, model.windows)
        largest[axis] = max(largest.get(axis, 0), cache_bytes(cache, kv_dtype) // 2)
    return [form(TEMPORARY, axis, num_bytes) for axis, num_bytes in largest.items()]


def _states(
    model: Model, kernels: KernelPolicy, cache: Form, shared: Form, phase: str, *, short: bool
) -> list[tuple[str, str, Form, bool]]:
    """The largest states of every kind of block; a layer's are the same wherever it stands, the cache is counted whole."""
    found = []
    dtype = kernels.precision.weight
    embedded, passed = ZERO, ZERO
    outside: list[tuple[str, str, bool]] = []
    for segment in model.segments:
        base = cache + shared + embedded if segment.role == "layers" else cache
        for block in segment.blocks:
            memory = measure_forward(
                lower(block, kernels, input_requires_grad=False, input_dtype=dtype, externals=tuple(outside))
            )
            dtype = memory.output_dtype
            found += [(phase, block.name, base + passed + state, short) for state in memory.forward]
            for value in memory.provided:
                outside.append((value.name, value.dtype, False))
                passed += value.form
            if segment.role == "embedding":
                embedded = memory.output  # the name `inputs_embeds` holds it while the layers run
    return found


def compile_serving(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> Profile:
    """The profile of prefill and decode."""
    weights = form(WEIGHTS, ONCE, weight_bytes(tensors_of(model), kernels) + buffer_bytes(model, kernels))
    state = state_form(model, kernels.precision.weight)
    cache = cache_form(model, policy.kv_dtype)
    pixels = model.pixels * DTYPE_BYTES[kernels.precision.weight]
    inputs = form(INPUTS, SEQUENCE, pixels) if pixels else form(INPUTS, TOKEN, ID_BYTES)
    statics = weights + inputs + form(WORKSPACE, ONCE, policy.workspace)
    tables, mask = shared_forms(model, kernels)
    load = weights + form(TEMPORARY, ONCE, _load_scratch(model, kernels))
    filled = cache_form(model, policy.kv_dtype, cropped=False) + state
    moments = _states(model, kernels, filled, tables + mask, "prefill", short=False)
    held = cache + state
    if model.kind == "decoder" and held:
        moments += _states(model, kernels._replace(decoding=True), held, tables, "decode", short=True)
        moments += [("decode", "cache concatenation", held + growth, True) for growth in _growth(model, policy.kv_dtype)]
    return Profile(
        moments=(loading(load), *pruned(moments)),
        statics=statics,
        static_total=per_axis(statics),
        windows=model.windows,
        cache=per_axis(cache),
        state=per_axis(state),
    )


def _load_scratch(model: Model, kernels: KernelPolicy) -> int:
    """Quantising at load: the unquantised matrix is on the device beside its quantised copy (bitsandbytes Params4bit.to)."""
    if kernels.quantized is None or not kernels.quantized.dequantized:
        return 0
    element = DTYPE_BYTES[kernels.precision.weight]
    return max((one.parameter.num_elements * element for one in tensors_of(model) if one.parameter.role == "linear"), default=0)
