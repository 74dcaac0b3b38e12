"""The timeline of inference as moments: load, prefill, decode. Nothing is kept for backward; the cache grows with the context,
recurrent states do not.

Prefill runs the prompts of all sequences at once or in chunks, decode one token of each with the whole context in the cache. An
encoder alone runs once. An encoder-decoder encodes the source, and its decoder then starts from one token: prefill is both.
Source: transformers 5 generation/utils.py (_prefill, _sample) and cache_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.account.blocks import masks_of, quantizable, relevant, shared_forms
from memfit.account.crossing import BlockMemory
from memfit.account.forms import (
    INPUTS,
    KV_CACHE,
    LOGITS,
    RECURRENT_STATE,
    TEMPORARY,
    WEIGHTS,
    WORKSPACE,
    ZERO,
    Form,
    form,
    moved,
    per_axis,
)
from memfit.account.liveness import measure_forward
from memfit.account.profile import Profile, loading, pruned
from memfit.account.standing import ID_BYTES
from memfit.account.states import buffer_bytes, tensors_of, weight_bytes
from memfit.kernels import Externals, KernelPolicy, lower
from memfit.model import AXES, KEY_TOKEN, ONCE, PAIR, POSITION, POSITION_PAIR, SEQUENCE, TOKEN, Block, CacheSpec, Model
from memfit.model.description import TARGET_KEY_TOKEN
from memfit.model.remember import of_model
from memfit.precision import DTYPE_BYTES, KV_BYTES_X2

PROMPT, STEP, FULL_CHUNK, LAST_CHUNK = range(4)
"""Which of the job's numbers a moment is evaluated at: the prompt (or its first chunk), one decoding step, a later full chunk,
the last chunk."""


class ServingPolicy(NamedTuple):
    """What decides inference beside the kernels."""

    kv_dtype: str
    workspace: int
    cache: str = "dynamic"
    """dynamic | static"""
    chunked: bool = False
    """The prompt is longer than a chunk."""
    decode_windows: tuple[int, ...] = ()
    """Sliding windows that the context fills."""


def cache_axis(cache: CacheSpec, windows: tuple[int, ...]) -> int:
    """The axis that counts its cached tokens: all of the context, or what a window keeps of it."""
    return cache.axis if cache.window is None else len(AXES) + windows.index(cache.window)


def cache_form(model: Model, kv_dtype: str) -> Form:
    """Bytes of the cache: for each layer (K + V elements) x bytes x cached tokens.

    A sliding layer holds what its last update returned: DynamicSlidingWindowLayer crops by a view, whose storage goes only when
    the next tokens are concatenated, so that after a prefill the whole prompt is there.
    """
    return sum([_layer_cache(model, (cache,), kv_dtype) * layers for cache, layers in model.caches])


def _layer_cache(model: Model, caches: tuple[CacheSpec, ...], kv_dtype: str) -> Form:
    """One layer's caches."""
    return sum([form(KV_CACHE, cache_axis(one, model.windows), cache_bytes(one, kv_dtype)) for one in caches])


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


class _Pass(NamedTuple):
    """One forward through some of the segments: its phase, at which numbers, under which kernels, what is there beside it."""

    phase: str
    numbers: int
    kernels: KernelPolicy
    beside: Form = ZERO
    """All the time: logits that a name still holds, the encoder's output, recurrent states."""
    shared: Form = ZERO
    """While the layers run: rotary tables and masks."""


class _Turn(NamedTuple):
    """A block at the last of its repeats, with what the cache lacks by then, beside all that it holds when the pass is over."""

    segment: int
    place: int
    missing: Form


def _stored(block: Block, kv_dtype: str, model: Model) -> Form:
    """What the block's own operations put into its cache; latents are counted from the beginning of the pass."""
    if not any(op.attributes.get("cached") for op in block.ops):
        return ZERO
    return _layer_cache(model, block.caches, kv_dtype)


def _turns(model: Model, segments: range, one: _Pass, kv_dtype: str) -> Iterator[_Turn]:
    """Blocks in order. What a layer itself and all later ones store for the first time is not there yet when it begins.

    Later tokens are few beside those that are cached: they are counted from the beginning of their pass.
    """
    stores = bool(one.kernels.kv_cache) and not one.kernels.filled
    periods = [
        [_stored(block, kv_dtype, model) if stores else ZERO for block in model.segments[index].blocks] for index in segments
    ]
    left = sum([sum(period) * model.segments[index].repeat for index, period in zip(segments, periods, strict=True)])
    for index, period in zip(segments, periods, strict=True):
        left -= sum(period) * (model.segments[index].repeat - 1)
        for place, stored in enumerate(period):
            yield _Turn(index, place, left)
            left -= stored


def _growth(model: Model, kv_dtype: str) -> Form:
    """While one layer's latents are concatenated, the old and the new ones are alive."""
    largest = [
        cache_bytes(cache, kv_dtype)
        for segment in model.segments
        for block in segment.blocks
        if not any(op.attributes.get("cached") for op in block.ops)
        for cache in block.caches
    ]
    return form(TEMPORARY, KEY_TOKEN, max(largest, default=0))


def _within_window(model: Model, block: Block, state: Form) -> Form:
    """Keys and scores of a sliding layer are counted by what it attends to."""
    window = next((one.window for one in block.caches if one.window is not None), None)
    if window is None:
        return state
    keys = len(AXES) + model.windows.index(window)
    return moved(state, {KEY_TOKEN: keys, PAIR: keys + len(model.windows)})


class _Passed(NamedTuple):
    """What a run of segments hands on: moments, and the encoder's output if it is one."""

    moments: list[tuple[str, str, Form, int]]
    provided: Form
    externals: Externals


@of_model(1024)
def _measured(model: Model, segment: int, place: int, kernels: KernelPolicy, dtype: str, outside: Externals) -> BlockMemory:
    """A block's forward; embedding and head are the same in all passes, and for all formats of the layers."""
    block = model.segments[segment].blocks[place]
    return measure_forward(lower(block, kernels, input_requires_grad=False, input_dtype=dtype, externals=outside))


def _states(model: Model, segments: range, one: _Pass, kv_dtype: str, outside: Externals = ()) -> _Passed:
    """The largest states of every kind of block."""
    cache = cache_form(model, kv_dtype) if one.kernels.kv_cache else ZERO
    moments: list[tuple[str, str, Form, int]] = []
    dtype = one.kernels.precision.weight
    embedded, passed, provided, lingering = ZERO, ZERO, ZERO, ZERO
    for index, place, missing in _turns(model, segments, one, kv_dtype):
        segment = model.segments[index]
        block = segment.blocks[place]
        base = cache - missing + one.beside + passed
        if segment.role == "layers":
            base += one.shared + embedded + lingering
        memory = _measured(model, index, place, relevant(one.kernels, segment.role, quantizable(model, index)), dtype, outside)
        dtype, lingering = memory.output_dtype, memory.lingering
        states = [base + _within_window(model, block, state) for state in memory.forward]
        moments += [(one.phase, block.name, state, one.numbers) for state in states]
        for value in memory.provided:
            outside = (*outside, (value.name, value.dtype, False))
            passed += value.form
        if segment.role == "embedding":
            embedded = memory.output  # the name `inputs_embeds` holds it while the layers run
        if segment.provides:
            provided, outside = memory.output, (*outside, (segment.provides, dtype, False))
    return _Passed(moments, provided, outside)


def _masks(model: Model, kernels: KernelPolicy) -> Form:
    """Masks that the backbone makes once for all layers of a kind, and the rotary tables beside them.

    A decoding step without a window needs none under sdpa; a mask spans what the layers of its kind attend to.
    """
    if model.encoder_decoder:
        return ZERO
    tables, masks = shared_forms(model, kernels)
    if kernels.kv_cache:  # generate() makes position ids, and with them the tables, for every sequence
        tables = moved(tables, {POSITION: TOKEN})
    if not (kernels.filled and kernels.attention == "sdpa" and model.mask == "usual" and kernels.causal_mask):
        return tables + masks
    return tables + form(TEMPORARY, POSITION_PAIR, len(model.attention_windows or {None}))


def _decoder_passes(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> list[_Pass]:
    """Prefill at once, or its first chunk and the later ones; then decoding."""
    first = kernels._replace(kv_cache=policy.cache, kv_dtype=policy.kv_dtype)
    passes = [_Pass("prefill", PROMPT, first, shared=_masks(model, first))]
    logits = DTYPE_BYTES[kernels.precision.weight] * model.vocab_size
    if policy.chunked:
        later = first._replace(filled=True, causal_mask=True)
        # the name `outputs` holds the logits of the chunk before
        held = form(LOGITS, SEQUENCE if kernels.logits_last else TOKEN, logits) if kernels.generating else ZERO
        shared = _masks(model, later)
        passes += [_Pass("prefill", numbers, later, held, shared) for numbers in (FULL_CHUNK, LAST_CHUNK)]
    step = first._replace(filled=True, decoding=True, binding_windows=policy.decode_windows, causal_mask=policy.cache == "static")
    passes.append(_Pass("decode", STEP, step, _last_scores(model, kernels), _masks(model, step)))
    return passes


def _last_scores(model: Model, kernels: KernelPolicy) -> Form:
    """The name `next_token_logits` holds those of the step before, in fp32."""
    return form(LOGITS, SEQUENCE, 4 * model.vocab_size) if kernels.generating else ZERO


def _decoder(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> list[tuple[str, str, Form, int]]:
    """All passes, with the recurrent states there from the beginning; latents grow by concatenation."""
    state = state_form(model, kernels.precision.weight)
    moments = [
        moment
        for one in _decoder_passes(model, kernels, policy)
        for moment in _states(model, range(len(model.segments)), one._replace(beside=one.beside + state), policy.kv_dtype).moments
    ]
    if growth := _growth(model, policy.kv_dtype):
        grown = cache_form(model, policy.kv_dtype) + state + growth
        moments.append(("decode", "cache concatenation", grown, STEP))
    return moments


def _encoder_decoder(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> list[tuple[str, str, Form, int]]:
    """The source is encoded once; the decoder starts with one token, which also stores its view of the source, and goes on."""
    split = 1 + next(index for index, segment in enumerate(model.segments) if segment.provides)
    encoder, decoder = range(split), range(split, len(model.segments))
    source, target = masks_of(model, kernels)
    encoded = _states(model, encoder, _Pass("prefill", PROMPT, kernels, shared=source), policy.kv_dtype)
    first = kernels._replace(kv_cache=policy.cache, kv_dtype=policy.kv_dtype)
    start = _Pass("prefill", PROMPT, first, encoded.provided, target)
    step = first._replace(filled=True, decoding=True)
    then = _Pass("decode", STEP, step, encoded.provided + _last_scores(model, kernels), target)
    moments = encoded.moments
    for one in (start, then):
        moments += _states(model, decoder, one, policy.kv_dtype, encoded.externals).moments
    return moments


def _inputs(model: Model, kernels: KernelPolicy) -> Form:
    """Pixels, or the ids of all tokens; generate() keeps their position ids as well."""
    if model.pixels:
        return form(INPUTS, SEQUENCE, model.pixels * DTYPE_BYTES[kernels.precision.weight])
    if model.encoder_decoder:
        return form(INPUTS, TOKEN, ID_BYTES) + form(INPUTS, TARGET_KEY_TOKEN, ID_BYTES)
    return form(INPUTS, KEY_TOKEN, 2 * ID_BYTES) if model.caches else form(INPUTS, TOKEN, ID_BYTES)


def compile_serving(model: Model, kernels: KernelPolicy, policy: ServingPolicy) -> Profile:
    """The profile of prefill and decode."""
    weights = form(WEIGHTS, ONCE, weight_bytes(tensors_of(model), kernels) + buffer_bytes(model, kernels))
    statics = weights + _inputs(model, kernels) + form(WORKSPACE, ONCE, policy.workspace)
    load = weights + form(TEMPORARY, ONCE, _load_scratch(model, kernels))
    if model.encoder_decoder:
        moments = _encoder_decoder(model, kernels, policy)
    elif model.caches or model.states:
        moments = _decoder(model, kernels, policy)
    else:
        once = _Pass("prefill", PROMPT, kernels, shared=_masks(model, kernels))
        moments = _states(model, range(len(model.segments)), once, policy.kv_dtype).moments
    return Profile(
        moments=(loading(load), *pruned(moments)),
        statics=statics,
        static_total=per_axis(statics),
        windows=model.windows,
        cache=per_axis(cache_form(model, policy.kv_dtype)),
        state=per_axis(state_form(model, kernels.precision.weight)),
    )


def _load_scratch(model: Model, kernels: KernelPolicy) -> int:
    """Quantising at load: the unquantised matrix is on the device beside its quantised copy (bitsandbytes Params4bit.to)."""
    if kernels.quantized is None or not kernels.quantized.dequantized:
        return 0
    element = DTYPE_BYTES[kernels.precision.weight]
    return max((one.parameter.num_elements * element for one in tensors_of(model) if one.parameter.role == "linear"), default=0)
