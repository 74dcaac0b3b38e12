#!/usr/bin/env python3
"""Make the rows of src/memfit/data/corpus/traced_inference.jsonl anew: `python scripts/trace_inference.py [FILE]`.

Needs a CUDA build of torch (no device: tensors are fake) and transformers 5.24. Every row is run as its `run` says, in the loop
of generate() (generation/utils.py, _prefill and _sample), and each storage is counted from its birth to its end. Differences
from what stands in the file are printed; with FILE the rows are written there.

Patched, because fake tensors cannot be asked: initialisation, the masks' look at values, and scaled_dot_product_attention, which
runs what CUDA chooses at compute capability 8.0. The math path is written as ATen/native/transformers/attention.cpp runs it.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.masking_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

CORPUS = Path(__file__).parent.parent / "src" / "memfit" / "data" / "corpus" / "traced_inference.jsonl"
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLASH_MAX_HEAD_DIM = 256


class LiveMemory(TorchDispatchMode):
    """Bytes of all device storages that are alive, and the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, Any] = {}

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self.alive or tensor.device.type == "cpu":
            return

        def freed(_: object) -> None:
            self.now -= num_bytes
            del self.alive[key]

        self.now += num_bytes
        self.alive[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor):
                self.count(one)
        self.peak = max(self.peak, self.now)
        return result

    def take_peak(self) -> int:
        peak, self.peak = self.peak, self.now
        return peak


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as convert_boolean_attn_mask makes it: one new tensor."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def math_attention(q, k, v, mask, is_causal, grouped):  # type: ignore[no-untyped-def]
    """_scaled_dot_product_attention_math and _safe_softmax: fp32, the mask in place, a byte a score beside the softmax."""
    dtype = q.dtype
    query, key, value = q.float(), k.float(), v.float()
    scaled = query * 0.5
    if is_causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        mask = additive(mask, torch.float32)
    if grouped:
        key = key.repeat_interleave(q.shape[1] // k.shape[1], 1)
        value = value.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = torch.matmul(scaled, key.transpose(-2, -1) * 0.5)
    if mask is not None:
        scores.add_(mask)
    probabilities = scores.softmax(-1)
    masked = probabilities.isneginf()
    rows = masked.all(-1, keepdim=True)
    probabilities.masked_fill_(rows, 0)
    del masked, rows
    scores = probabilities
    del probabilities
    return torch.matmul(scores, value).to(dtype)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    """Flash for 16 bit without a mask, math where heads differ and no fused kernel takes that, else memory-efficient."""
    alike = k.shape[1] == q.shape[1]
    if attn_mask is None and q.dtype != torch.float32 and q.shape[-1] <= FLASH_MAX_HEAD_DIM and (enable_gqa or alike):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if not alike:
        return math_attention(q, k, v, attn_mask, is_causal, enable_gqa)
    if attn_mask is not None:
        attn_mask = additive(attn_mask, q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    return run(q, k, v, attn_mask, False, dropout_p, is_causal, scale=scale)[0]


def patch() -> None:
    """See the module's text."""
    for name in ("kaiming_uniform_", "uniform_", "normal_", "zeros_", "ones_", "xavier_uniform_", "trunc_normal_", "constant_"):
        setattr(torch.nn.init, name, lambda tensor=None, *args, **kwargs: tensor)
    transformers.PreTrainedModel.initialize_weights = lambda self: None
    transformers.masking_utils.fast_all = lambda *args, **kwargs: True
    transformers.masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
    functional.scaled_dot_product_attention = attention
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)


def build(row: dict[str, Any]) -> Any:
    """The class of a row on the fake device, in its format."""
    config = transformers.CONFIG_MAPPING[row["config"]["model_type"]].from_dict(dict(row["config"]))
    config._attn_implementation = row["run"].get("attn", "sdpa")
    torch.set_default_dtype(FORMATS[row["run"].get("precision", "bf16")])
    try:
        with torch.device("cuda"):
            return getattr(transformers, row["cls"])._from_config(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def next_scores(out: Any) -> torch.Tensor:
    """generate()'s copy of the last position's logits."""
    return out.logits[:, -1].to(copy=True, dtype=torch.float32)


def appended(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The most likely token, concatenated."""
    return torch.cat([ids, scores.argmax(-1)[:, None]], -1)


def decoder(model: Any, ids: torch.Tensor, run: dict[str, Any], memory: LiveMemory) -> dict[str, int]:
    """Prefill, whole or in chunks, then two steps."""
    prompt = ids.shape[1]
    static = run.get("cache") == "static"
    cache = StaticCache(config=model.config, max_cache_len=run["context"]) if static else DynamicCache(config=model.config)
    accepts = "position_ids" in inspect.signature(model.forward).parameters
    more = {"logits_to_keep": 1} if run.get("logits", "last") == "last" else {}
    positions = torch.ones_like(ids).cumsum(-1) - 1
    past = 0
    for part in torch.split(ids, run.get("chunk", prompt), dim=-1):
        at = {"position_ids": positions[:, past : past + part.shape[1]].clone()} if accepts else {}
        out = model(input_ids=part, cache=cache, use_cache=True, **at, **more)
        past += part.shape[1]
    scores = next_scores(out)
    ids = appended(ids, scores)
    del out, part
    found = {"prefill": memory.take_peak()}
    for _ in range(2):
        positions = torch.cat([positions, positions[:, -1:] + 1], -1)
        at = {"position_ids": positions[:, -1:].clone()} if accepts else {}
        out = model(input_ids=ids[:, -1:], cache=cache, use_cache=True, **at, **more)
        scores = next_scores(out)
        ids = appended(ids, scores)
        del out
        found["decode"] = memory.take_peak()
    return found


def encoder_decoder(model: Any, source: torch.Tensor, run: dict[str, Any], memory: LiveMemory) -> dict[str, int]:
    """The encoder and the first token are prefill."""
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    encoded = model.get_encoder()(input_ids=source, return_dict=True)
    ids = torch.zeros(source.shape[0], 1, dtype=torch.long, device="cuda")
    found = {}
    for step in range(run["target"]):
        out = model(encoder_outputs=encoded, decoder_input_ids=ids[:, -1:], cache=cache, use_cache=True)
        scores = next_scores(out)
        ids = appended(ids, scores)
        del out
        found["decode" if step else "prefill"] = memory.take_peak()
    return found


def measured(row: dict[str, Any]) -> dict[str, int]:
    """Weights and the peaks of a row."""
    run, batch = row["run"], row["batch"]
    kind = run.get("kind", "clm")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model, memory = build(row), LiveMemory()
        for one in [*model.parameters(), *model.buffers()]:
            memory.count(one)
        weights = memory.now
        if kind == "img":
            shape = (batch, 3, row["seq"], row["seq"])
            inputs = torch.empty(shape, device="cuda", dtype=FORMATS[run.get("precision", "bf16")])
        else:
            inputs = torch.randint(0, model.config.vocab_size, (batch, row["seq"]), device="cuda")
        memory.count(inputs)
        with memory:
            if kind == "s2s":
                found = encoder_decoder(model, inputs, run, memory)
            elif kind == "clm":
                found = decoder(model, inputs, run, memory)
            else:
                out = model(**{"pixel_values" if kind == "img" else "input_ids": inputs})
                found = {"prefill": memory.take_peak()}
                del out
    return {"weights": weights, **found}


def main() -> None:
    """All rows."""
    patch()
    rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        found = measured(row)
        different = {name: (row[name], value) for name, value in found.items() if row[name] != value}
        if different:
            print(row["id"], different)
        row.update(found)
    if len(sys.argv) > 1:
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
