"""Levers of inference on one device, cheapest first."""

from __future__ import annotations

from memfit.fit.levers.common import ATTENTION, MIXER_KERNELS
from memfit.fit.levers.lever import Lever, with_workload
from memfit.fit.levers.spread import PIPELINE, TENSOR
from memfit.fit.limits import with_number
from memfit.job import Inference, Job

_SHORTEST_CONTEXT = 512
"""Tokens. Judgement: nobody serves a decoder with less, so nothing shorter is proposed."""

_CHUNK = 2048
"""Tokens. vLLM's usual budget for a chunk: large enough to keep the products of a layer busy."""


def _inference(job: Job) -> Inference:
    assert isinstance(job.workload, Inference)
    return job.workload


def _has_cache(job: Job) -> bool:
    return job.model.kind == "decoder"


# --- prompts in chunks


def _chunks(job: Job) -> bool:
    workload = _inference(job)
    longer = (workload.prompt or 1) > _CHUNK and (workload.prefill_chunk or workload.prompt or 1) > _CHUNK
    return longer and bool(job.model.caches or job.model.states) and not job.model.encoder_decoder and workload.cache == "dynamic"


PREFILL_CHUNK = Lever(
    name="prefill-chunk",
    group="prefill",
    why_here="the same outputs; the first token comes a little later",
    may_add=True,
    applies=_chunks,
    edit=lambda job: with_workload(job, prefill_chunk=_CHUNK),
    change=lambda before, after: f"prompts in chunks of {_CHUNK:,} tokens",
    cost=lambda before, after: (
        f"{-(-(_inference(before).prompt or 1) // _CHUNK)} passes over the weights for a prompt instead of one; under sdpa each "
        "chunk after the first takes a mask, and another kernel than FlashAttention"
    ),
    flags=lambda job: (f"prefill_chunk_size={_CHUNK}",),
)

# --- KV cache in fp8


KV_FP8 = Lever(
    name="kv-fp8",
    group="kv-dtype",
    why_here="no slower; keys and values are rounded, which few tasks notice",
    applies=lambda job: _has_cache(job) and _inference(job).kv_dtype in ("fp32", "bf16", "fp16"),
    edit=lambda job: with_workload(job, kv_dtype="fp8"),
    change=lambda before, after: "KV cache in fp8",
    cost=lambda before, after: (
        f"keys and values rounded from {_inference(before).kv_dtype} to 8 bits: little loss of quality, check long contexts; "
        "needs an engine with an fp8 cache (vLLM, SGLang, TensorRT-LLM)"
    ),
    flags=lambda job: ("--kv-cache-dtype fp8",),
)

# --- weights in 8 bits


def _quantization(job: Job) -> str:
    return _inference(job).quantization or "none"


INT8_WEIGHTS = Lever(
    name="int8-weights",
    group="weights",
    why_here="little loss of quality; slower products",
    applies=lambda job: _quantization(job) == "none",
    edit=lambda job: with_workload(job, quantization="int8"),
    change=lambda before, after: "linear weights in int8",
    # Dettmers et al. 2022 (arXiv:2208.07339): no loss of quality up to 175B with outliers kept in 16 bits.
    cost=lambda before, after: (
        "about 1 B per linear weight: no measurable loss in published runs; slower at small batches; needs bitsandbytes"
    ),
    flags=lambda job: ("BitsAndBytesConfig(load_in_8bit=True)",),
)

# --- fewer sequences at a time


def _concurrency_cost(before: Job, after: Job) -> str:
    old, new = _inference(before).concurrency, _inference(after).concurrency
    share = max(1, round(100 * new / old))
    return (
        f"{new:,} instead of {old:,} sequences at a time: the rest wait, and throughput falls to about {share} % "
        "where decoding is bound by reading the weights"
    )


CONCURRENCY = Lever(
    name="concurrency",
    group="concurrency",
    why_here="the same outputs; requests wait",
    applies=lambda job: _inference(job).concurrency > 1,
    edit=lambda job: with_number(job, "concurrency", 1),
    edit_to=lambda job, value: with_number(job, "concurrency", value),
    value=lambda job: _inference(job).concurrency,
    change=lambda before, after: (
        f"{_inference(after).concurrency:,} sequence{'s' if _inference(after).concurrency > 1 else ''} at a time"
    ),
    cost=_concurrency_cost,
    flags=lambda job: (f"--max-num-seqs {_inference(job).concurrency}",),
)

# --- weights in 4 bits


INT4_WEIGHTS = Lever(
    name="int4-weights",
    group="weights",
    why_here="a loss of quality that benchmarks show",
    applies=lambda job: _quantization(job) in ("none", "int8", "fp8"),
    edit=lambda job: with_workload(job, quantization="int4"),
    change=lambda before, after: "linear weights in 4 bits (AWQ or GPTQ)",
    # Groups of 128: 0.5 + 2/128 (scale) + 0.5/128 (zero point) = 0.52 B per weight.
    cost=lambda before, after: (
        "about 0.52 B per linear weight: a small loss of quality that grows as models shrink; needs a quantised checkpoint"
    ),
    flags=lambda job: ("--quantization awq",),
)

# --- shorter context


def _context_cost(before: Job, after: Job) -> str:
    old, new = _inference(before).context, _inference(after).context
    return f"prompt and answer together at most {new or 0:,} instead of {old or 0:,} tokens"


CONTEXT = Lever(
    name="context",
    group="context",
    changes_task=True,
    why_here="longer requests are refused",
    applies=lambda job: (
        not (job.model.pixels or job.model.encoder_decoder) and (_inference(job).context or 1) > _SHORTEST_CONTEXT
    ),
    edit=lambda job: with_number(job, "context", _SHORTEST_CONTEXT),
    edit_to=lambda job, value: with_number(job, "context", value),
    strongest=_SHORTEST_CONTEXT,
    value=lambda job: _inference(job).context or 1,
    change=lambda before, after: f"context of {_inference(after).context or 0:,} tokens",
    cost=_context_cost,
    flags=lambda job: (f"--max-model-len {_inference(job).context}",),
)

INFERENCE_LEVERS = (
    ATTENTION, MIXER_KERNELS, PREFILL_CHUNK, *TENSOR, *PIPELINE, KV_FP8, INT8_WEIGHTS, CONCURRENCY, INT4_WEIGHTS, CONTEXT,
)  # fmt: skip
