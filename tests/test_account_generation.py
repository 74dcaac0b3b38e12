"""Inference against what PyTorch itself takes: tiny real models on the CPU, every storage counted, and caches worked out by hand.

Attention is eager, which runs the same operations on the CPU as on CUDA. What the fused kernels take is in the corpus
(traced_inference.jsonl), made on CUDA's dispatch path.
"""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest
import torch
import torch_truth
import transformers as T
from torch_truth import Case

from memfit.account import resolve
from memfit.errors import UsageError
from memfit.families import build_model
from memfit.job import Inference, Job
from memfit.model import Model
from memfit.validate import runner

BAR_PERCENT = {"prefill": 1.0, "decode": 2.0}
"""What traced inference must reach: the worst row, as a share of what is not weights."""
SMALL = {"vocab_size": 500, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **SMALL,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
CASES = {
    "llama": Case(T.LlamaForCausalLM, T.LlamaConfig(**DECODER)),
    "mistral": Case(T.MistralForCausalLM, T.MistralConfig(**DECODER, sliding_window=24)),
    "gpt2": Case(T.GPT2LMHeadModel, T.GPT2Config(vocab_size=500, n_embd=96, n_layer=3, n_head=6, n_positions=256)),
    "opt": Case(T.OPTForCausalLM, T.OPTConfig(vocab_size=500, hidden_size=96, ffn_dim=256, num_hidden_layers=3,
                                              num_attention_heads=6, word_embed_proj_dim=96, max_position_embeddings=256)),
}  # fmt: skip
T5 = {"vocab_size": 500, "d_model": 96, "d_kv": 16, "num_heads": 6, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 3}
BART = {"vocab_size": 500, "d_model": 96, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 6,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_position_embeddings": 128}  # fmt: skip
SEQ2SEQ = {
    "t5": Case(T.T5ForConditionalGeneration, T.T5Config(**T5)),
    "bart": Case(T.BartForConditionalGeneration, T.BartConfig(**BART)),
}


def described(case: Case) -> Model:
    return build_model(case.config.to_dict(), name="test", source="test", head=case.head)


def counted(model: torch.nn.Module, *inputs: torch.Tensor) -> torch_truth.LiveMemory:
    memory = torch_truth.LiveMemory()
    for one in [*model.parameters(), *model.buffers(), *inputs]:
        memory.count(one)
    return memory


def generate(case: Case, batch: int, prompt: int, *, chunk: int | None = None, steps: int = 3) -> tuple[int, int, int]:
    """Weights, and the peaks of prefill and of the last step, of the loop that generate() runs."""
    model = torch_truth.make_model(case, "bf16-true", "eager").eval()
    ids = torch_truth.make_inputs(case, batch, prompt)["input_ids"]
    positions = torch.arange(prompt).expand(batch, -1).contiguous()
    memory = counted(model, ids, positions)
    weights = memory.now - 16 * batch * prompt
    cache = T.DynamicCache(config=case.config)
    with torch.no_grad(), memory:
        past, peaks = 0, []
        for part in torch.split(ids, chunk or prompt, dim=-1):
            at = positions[:, past : past + part.shape[1]]
            out = model(input_ids=part, position_ids=at, cache=cache, use_cache=True, logits_to_keep=1)
            past += part.shape[1]
        for step in range(steps + 1):
            scores = out.logits[:, -1].to(copy=True, dtype=torch.float32)  # noqa: F841 - the name is held as generate() holds it
            del out
            peaks.append(memory.peak)
            memory.peak = memory.now
            if step < steps:
                last = torch.ones_like(ids[:, :1])
                more = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
                out = model(input_ids=last, position_ids=last * past, **more)  # noqa: F841 - used when the loop comes round
                past += 1
    return weights, peaks[0], peaks[-1]


def phases(case: Case, **settings: Any) -> dict[str, int]:
    workload = Inference(weight_dtype="bf16", attention="eager", **settings)
    found = models.estimate_of(described(case), workload, workspace=0, cuda_context=0, fragmentation=0)
    return {one.name: one.allocated_bytes for one in found.worst.phases}


def within(found: int, measured: int, weights: int) -> None:
    """2 % of what is not weights: masks and ids of a few bytes that CUDA keeps elsewhere or not at all."""
    assert found - weights == pytest.approx(measured - weights, rel=0.02)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("batch", "prompt", "chunk"), [(2, 64, None), (3, 61, None), (2, 64, 16), (2, 61, 16)])
def test_prefill_and_decoding_of_a_real_decoder(name: str, batch: int, prompt: int, chunk: int | None) -> None:
    weights, prefill, decode = generate(CASES[name], batch, prompt, chunk=chunk)
    found = phases(CASES[name], concurrency=batch, prompt=prompt, context=prompt + 3, prefill_chunk=chunk)
    within(found["prefill"], prefill, weights)
    within(found["decode"], decode, weights)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_real_encoder_decoder(name: str) -> None:
    """The encoder, the decoder's first token with its view of the source, and later tokens."""
    case, batch, source, steps = SEQ2SEQ[name], 2, 61, 12
    model = torch_truth.make_model(case, "bf16-true", "eager").eval()
    ids = torch_truth.make_inputs(case, batch, source)["input_ids"]
    memory = counted(model, ids)
    weights = memory.now - 8 * batch * source
    cache = T.EncoderDecoderCache(T.DynamicCache(), T.DynamicCache())
    with torch.no_grad(), memory:
        encoded = model.get_encoder()(input_ids=ids, return_dict=True)
        for step in range(steps):
            token = torch.ones_like(ids[:, :1])
            out = model(encoder_outputs=encoded, decoder_input_ids=token, cache=cache, use_cache=True)
            scores = out.logits[:, -1].to(copy=True, dtype=torch.float32)  # noqa: F841
            del out
            if step == 0:
                prefill, memory.peak = memory.peak, memory.now
            elif step < steps - 1:
                memory.peak = memory.now
    found = phases(case, concurrency=batch, prompt=source, target_seq=steps)
    within(found["prefill"], prefill, weights)
    within(found["decode"], memory.peak, weights)


def test_the_cache_of_an_encoder_decoder_holds_source_and_target_apart() -> None:
    """3 decoder layers x 2 (K, V) x 96 x 2 B for each of 50 source and 20 target tokens, of 4 sequences."""
    found = models.estimate_of(described(SEQ2SEQ["t5"]), Inference(prompt=50, target_seq=20, concurrency=4, weight_dtype="bf16"))
    assert found.cache is not None
    assert found.cache.bytes_per_sequence == 3 * 2 * 96 * 2 * (50 + 20)
    assert found.cache.bytes_per_token == 3 * 2 * 96 * 2  # one more of the target
    assert models.phase(found.worst, "decode", "kv_cache") == 4 * 3 * 2 * 96 * 2 * (50 + 20)
    assert models.phase(found.worst, "prefill", "kv_cache") <= 4 * 3 * 2 * 96 * 2 * (50 + 1)


@pytest.mark.parametrize(
    ("given", "source", "target"),
    [
        ({"prompt": 30, "target_seq": 9}, 30, 9),
        ({"prompt": 30, "context": 50}, 30, 20),
        ({"context": 50, "target_seq": 9}, 41, 9),
        ({"context": 50}, 50, 50),
        ({}, 512, 512),
    ],
)
def test_lengths_of_source_and_target(given: dict[str, int], source: int, target: int) -> None:
    workload = resolve(Job(model=described(SEQ2SEQ["t5"]), workload=Inference(**given))).job.workload
    assert isinstance(workload, Inference)
    assert (workload.prompt, workload.target_seq) == (source, target)


@pytest.mark.parametrize("chunk", [1, 16, 100, 128, 1000, 4096])
def test_a_chunk_never_takes_more_than_the_whole_prompt(chunk: int) -> None:
    case = CASES["llama"]
    whole = phases(case, context=1024, prompt=1000)["prefill"]
    assert phases(case, context=1024, prompt=1000, prefill_chunk=chunk)["prefill"] <= whole
    if chunk >= 1000:
        assert phases(case, context=1024, prompt=1000, prefill_chunk=chunk)["prefill"] == whole


def test_a_static_cache_is_there_at_once_and_is_not_copied() -> None:
    """All buffers of the context in prefill; decoding needs no second copy of one layer's keys or values."""
    model = described(CASES["llama"])
    settings: dict[str, Any] = {"prompt": 16, "context": 4096, "weight_dtype": "bf16"}
    per_token = 3 * 2 * 2 * 16 * 2
    grows, fixed = (models.rank_of(model, Inference(cache=cache, **settings)) for cache in ("dynamic", "static"))
    assert models.phase(grows, "prefill", "kv_cache") == 16 * per_token
    assert models.phase(fixed, "prefill", "kv_cache") == models.phase(fixed, "decode", "kv_cache") == 4096 * per_token
    assert models.phase(grows, "decode", "temporary") >= 4096 * per_token // 3 // 2  # the keys of one layer


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        (SEQ2SEQ["t5"], {"prefill_chunk": 8}, "--prefill-chunk"),
        (SEQ2SEQ["t5"], {"cache": "static"}, "--cache static"),
        (CASES["llama"], {"target_seq": 8}, "--context counts"),
        (CASES["llama"], {"cache": "static", "attention": "flash"}, "--attention flash"),
        (CASES["mistral"], {"cache": "static", "prefill_chunk": 8}, "sliding windows"),
    ],
)
def test_what_is_not_counted_is_refused(case: Case, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(Job(model=described(case), workload=Inference(**settings)))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_traced_inference_reaches_its_bar(phase: str) -> None:
    group = runner.run(["inference"]).group(f"traced inference {phase}")
    assert len(group.rows) > 80
    assert group.median_percent < 0.6  # the prompt that the caller still holds is not counted: 8 B a token
    assert max(abs(row.error_percent) for row in group.rows) < BAR_PERCENT[phase]
