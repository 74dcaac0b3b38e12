"""Whole training steps and generations of tiny real models: every byte that PyTorch has alive, against memfit's moments.

The truth is `torch_truth.training_step`: the second step of a raw loop on the CPU, each storage counted exactly. Where the CPU
allocates
other things than CUDA see `torch_truth`; what an operation allocates and frees inside itself is not seen, as by an ideal
allocator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import heart_models as models
import pytest
import torch
import torch_truth
import transformers as T
from torch_truth import Case, Step

from memfit.account.estimate import Rank
from memfit.families import build_model
from memfit.job import Training

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
}
STEP_COUNTER = 4
"""Adam's step, an fp32 scalar for each parameter."""


def decoder(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 500,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def encoder(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 500,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **changes,
    }


def gpt2(**changes: Any) -> T.GPT2Config:
    return T.GPT2Config(
        vocab_size=500, n_embd=96, n_head=6, n_layer=3, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **changes
    )


def neox(**changes: Any) -> T.GPTNeoXConfig:
    return T.GPTNeoXConfig(
        vocab_size=500,
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=64,
        **changes,
    )


def step_of(
    case: Case,
    batch: int,
    seq: int,
    *,
    precision: str,
    attention: str,
    optimizer: str,
    checkpointing: str = "none",
    zero_grad: str = "none",
    outputs: str = "kept",
) -> tuple[Step, Rank, int]:
    """The real step, memfit's rank, and what LayerNorm's statistics on CUDA add to it."""
    with torch_truth.flash_attention():
        model = torch_truth.make_model(case, precision, attention)
        if checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        inputs = torch_truth.make_inputs(case, batch, seq)
        truth = torch_truth.training_step(
            model, inputs, OPTIMIZERS[optimizer](list(model.parameters())), set_to_none=zero_grad == "none", outputs=outputs
        )
    described = build_model(case.config.to_dict(), name="test", source="test", head=case.head)
    workload = Training(
        batch=batch,
        seq=seq,
        precision=precision,
        attention=attention,
        optimizer=optimizer,
        checkpointing=checkpointing,
        zero_grad=zero_grad,
        outputs=outputs,
        dropout=0.0,
    )
    norms = sum(isinstance(one, torch.nn.LayerNorm) for one in model.modules())
    statistics = 0 if precision == "32-true" else torch_truth.CPU_STATISTICS * norms * batch * seq
    return truth, models.rank_of(described, workload), statistics


def off(found: int, truth: int) -> float:
    return abs(found / truth - 1)


def check(truth: Step, rank: Rank, statistics: int, *, peak: float = 0.01) -> None:
    """The peak of the step within 1 %, the ends of forward and backward within half a percent: both are nearly exact."""
    assert rank.forward_end_bytes is not None
    assert rank.backward_end_bytes is not None
    # checkpointed layers keep no statistics
    assert min(off(rank.forward_end_bytes, truth.forward_end + extra) for extra in (0, statistics)) < 0.005
    assert off(rank.backward_end_bytes, truth.backward_end) < 0.005
    assert off(models.phase(rank, "optimizer-step"), truth.optimizer_step) < 0.01
    assert min(off(models.phase(rank, "backward"), truth.backward + extra) for extra in (0, statistics)) < peak
    assert min(off(rank.peak.allocated_bytes, truth.peak + extra) for extra in (0, statistics)) < peak


QUICK = [
    (
        lambda: Case(T.LlamaForCausalLM, T.LlamaConfig(**decoder())),
        {"precision": "bf16-true", "attention": "sdpa", "optimizer": "adamw-fused"},
    ),
    (
        lambda: Case(T.LlamaForCausalLM, T.LlamaConfig(**decoder(tie_word_embeddings=True, num_hidden_layers=8))),
        {"precision": "bf16-true", "attention": "eager", "optimizer": "sgd", "checkpointing": "full"},
    ),
    (
        lambda: Case(T.Qwen3ForCausalLM, T.Qwen3Config(**decoder(head_dim=16))),
        {"precision": "32-true", "attention": "eager", "optimizer": "adamw-foreach", "zero_grad": "zeros"},
    ),
    (
        lambda: Case(T.Gemma2ForCausalLM, T.Gemma2Config(**decoder(head_dim=16, sliding_window=64))),
        {"precision": "bf16-true", "attention": "eager", "optimizer": "adamw-loop", "outputs": "dropped"},
    ),
    (
        lambda: Case(T.GPT2LMHeadModel, gpt2()),
        {"precision": "32-true", "attention": "eager", "optimizer": "sgd-momentum", "checkpointing": "full"},
    ),
    (
        lambda: Case(T.GPTNeoXForCausalLM, neox()),
        {"precision": "bf16-true", "attention": "sdpa", "optimizer": "adamw-fused", "checkpointing": "full"},
    ),
    (
        lambda: Case(T.BertForSequenceClassification, T.BertConfig(**encoder()), "sequence"),
        {"precision": "32-true", "attention": "eager", "optimizer": "adamw-fused"},
    ),
]


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_a_step(number: int) -> None:
    make, settings = QUICK[number]
    check(*step_of(make(), 2, 40, **settings))


def test_eager_reads_what_a_partial_rotary_has_laid_head_by_head() -> None:
    """Its `cat` leaves q and k as batched products read them; copies would be 7 % of this recomputation's temporaries."""
    config = neox()
    config.update({"num_hidden_layers": 1, "hidden_size": 192, "num_attention_heads": 12, "intermediate_size": 250})
    settings = {"precision": "bf16-true", "attention": "eager", "optimizer": "sgd", "checkpointing": "full", "zero_grad": "zeros"}
    truth, rank, statistics = step_of(Case(T.GPTNeoXForCausalLM, config), 8, 48, **settings)
    check(truth, rank, statistics)
    # within layers that keep nothing: GPT-NeoX gives the name of the rotated part to what joins it with the rest
    assert models.phase(rank, "forward") == pytest.approx(truth.forward, rel=0.001)


def test_the_loss_binds_under_a_large_vocabulary_and_dropped_outputs_lower_the_peak() -> None:
    """14V and 12V of logits a token in backward: the real difference is memfit's."""
    case = Case(T.LlamaForCausalLM, T.LlamaConfig(**decoder(vocab_size=8000, tie_word_embeddings=True)))
    settings = {"precision": "bf16-true", "attention": "sdpa", "optimizer": "sgd"}
    (kept, rank_kept, _), (dropped, rank_dropped, _) = (
        step_of(case, 2, 40, outputs=outputs, **settings) for outputs in ("kept", "dropped")
    )
    assert kept.peak - dropped.peak == 2 * 8000 * 80
    assert rank_kept.peak.allocated_bytes - rank_dropped.peak.allocated_bytes == 2 * 8000 * 80
    check(kept, rank_kept, 0)


def test_a_layer_more_costs_what_it_really_costs() -> None:
    """The difference between 4 and 3 layers, at the end of forward, at the end of backward and at the peak: to the byte but
    for Adam's
    counters and 512 B."""
    found = []
    for layers in (3, 4):
        case = Case(T.LlamaForCausalLM, T.LlamaConfig(**decoder(num_hidden_layers=layers)))
        truth, rank, _ = step_of(case, 2, 40, precision="bf16-true", attention="sdpa", optimizer="adamw-fused")
        found.append((truth, rank))
    (truth3, rank3), (truth4, rank4) = found
    counters = 9 * STEP_COUNTER
    assert abs((rank4.forward_end_bytes - rank3.forward_end_bytes) - (truth4.forward_end - truth3.forward_end)) <= counters
    assert abs((rank4.backward_end_bytes - rank3.backward_end_bytes) - (truth4.backward_end - truth3.backward_end)) <= counters
    assert abs((rank4.peak.allocated_bytes - rank3.peak.allocated_bytes) - (truth4.peak - truth3.peak)) <= counters + 512


def _random_case(choose: random.Random) -> tuple[Case, dict[str, Any]]:
    """A family, a shape and a way of training it; every dimension is small, activations and weights are of one order."""
    family = choose.choice(["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "GPT2", "GPTNeoX", "Bert"])
    kv_heads = choose.choice([2, 4])
    heads, vocab, layers = kv_heads * choose.choice([1, 2, 3]), choose.choice([100, 500, 2000]), choose.randint(1, 5)
    hidden, ffn, tied = heads * 16, choose.choice([100, 250, 400]), choose.random() < 0.5
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    config: T.PretrainedConfig
    if family == "GPT2":
        config = gpt2()
        config.update({"vocab_size": vocab, "n_embd": hidden, "n_head": heads, "n_layer": layers, "tie_word_embeddings": tied})
    elif family == "GPTNeoX":
        config = neox(use_parallel_residual=choose.random() < 0.5, attention_bias=choose.random() < 0.5)
        config.update(shape)
    elif family == "Bert":
        config = T.BertConfig(**encoder(**{**shape, "tie_word_embeddings": True}))
    else:
        own: dict[str, Any] = {"head_dim": choose.choice([8, 16]), "num_key_value_heads": kv_heads}
        own |= {"Mistral": {"sliding_window": None}, "Gemma2": {"sliding_window": 64}}.get(family, {})
        if family == "Llama":
            own |= {"attention_bias": choose.random() < 0.5, "mlp_bias": choose.random() < 0.5}
        config = getattr(T, family + "Config")(**decoder(**shape, **own))
    precision = choose.choice(["bf16-true", "32-true"])
    settings = {
        "precision": precision,
        "attention": choose.choice(["sdpa", "eager"]) if precision == "bf16-true" and family != "Gemma2" else "eager",
        "optimizer": choose.choice(sorted(OPTIMIZERS)),
        "checkpointing": choose.choice(["none", "full"]),
        "zero_grad": choose.choice(["none", "none", "zeros"]),
        "outputs": choose.choice(["kept", "dropped"]),
    }
    head = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}.get(family, "ForCausalLM")
    return Case(getattr(T, family + head), config), settings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_random_step(seed: int) -> None:
    choose = random.Random(seed)
    case, settings = _random_case(choose)
    check(*step_of(case, choose.choice([2, 3]), choose.choice([24, 48]), **settings), peak=0.02)


# ------------------------------------------------------------------ generation


@pytest.mark.parametrize("layers", [1, 4])
def test_prefill_and_cache_of_a_real_model(layers: int) -> None:
    """A forward without autograd that fills a real cache: K and V of every layer to the byte, the working set within 5 %."""
    batch, seq = 2, 48
    case = Case(T.LlamaForCausalLM, T.LlamaConfig(**decoder(num_hidden_layers=layers)))
    model = torch_truth.make_model(case, "bf16-true", "sdpa").eval()
    ids = torch_truth.make_inputs(case, batch, seq)["input_ids"]
    memory = torch_truth.LiveMemory()
    for one in [*model.parameters(), *model.buffers(), ids]:
        memory.count(one)
    with torch_truth.flash_attention(), torch.no_grad(), memory:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cached = sum(one.untyped_storage().nbytes() for layer in out.past_key_values.layers for one in (layer.keys, layer.values))
    described = build_model(case.config.to_dict(), name="test", source="test", head=case.head)
    found = models.estimate_of(described, models.Inference(context=seq, concurrency=batch, weight_dtype="bf16"))
    assert found.cache is not None
    assert batch * found.cache.bytes_per_sequence == cached == layers * batch * seq * 2 * 2 * 16 * 2
    assert models.phase(found.worst, "prefill") == pytest.approx(memory.peak, rel=0.05)
