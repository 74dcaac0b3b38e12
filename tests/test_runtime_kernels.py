"""Kernel sets of runtimes of their own: Megatron with and without Transformer Engine, Unsloth. Bytes by hand and from PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_truth
from torch import Tensor

import memfit
from memfit.account.estimate import Rank
from memfit.account.refusals import refusal
from memfit.account.resolve import runtime_of
from memfit.errors import UsageError
from memfit.fit.levers import levers_for
from memfit.kernels.sets import KERNEL_SETS
from memfit.report.payload import to_json
from memfit.runtimes import RUNTIMES

S, B, H, A, V, F, Q, KV = 64, 2, 256, 8, 1000, 512, 256, 128
GPT = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_embd": H, "n_layer": 2, "n_head": A,
       "n_positions": S}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": H, "intermediate_size": F,
    "num_hidden_layers": 2, "num_attention_heads": A, "num_key_value_heads": 4, "max_position_embeddings": 1 << 20,
}  # fmt: skip


def rank(config: dict[str, Any], runtime: str, **workload: object) -> Rank:
    asked = {"kind": "train", "batch": B, "seq": S, **workload}
    return memfit.answer(config, asked, overheads={"runtime": runtime, "workspace": 0}).estimate.ranks[0]


def layer(config: dict[str, Any], runtime: str, **workload: object) -> int:
    """Bytes that one more layer keeps."""
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    one, two = (rank({**config, key: number}, runtime, **workload).kept_bytes for number in (1, 2))
    assert one is not None
    assert two is not None
    return two - one


# --- Megatron


STATISTICS = 2 * 2 * 4
"""Mean and reciprocal deviation in fp32 of two norms, for each token, which the closed form leaves out."""


def test_a_gpt_layer_keeps_what_korthikanti_et_al_say() -> None:
    # Korthikanti et al. 2022 (arXiv:2205.05198): s b h (34 + 5 a s / h) with dropout and unfused attention
    assert layer(GPT, "megatron", kernels="megatron") == S * B * H * 34 + 5 * A * S * S * B + STATISTICS * S * B


def test_selective_recomputation_drops_the_scores() -> None:
    for flag in ("selective", "selective:core_attn"):
        assert layer(GPT, "megatron", kernels="megatron", checkpointing=flag) == S * B * (34 * H + STATISTICS)


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    assert layer(GPT, "megatron", kernels="megatron", checkpointing="full") == 2 * S * B * H
    assert layer(GPT, "megatron", checkpointing="full") == 2 * S * B * H


def test_transformer_engine_keeps_a_log_sum_exp_in_place_of_the_scores() -> None:
    assert layer(GPT, "megatron") == S * B * (34 * H + STATISTICS + 4 * A)
    # without dropout the masks go: one byte for each element of two hidden states
    assert layer(GPT, "megatron", dropout=0) == S * B * (32 * H + STATISTICS + 4 * A)


def test_a_llama_layer_of_megatron() -> None:
    local = layer({**LLAMA, "num_key_value_heads": A}, "megatron", kernels="megatron")
    scores = 2 * A * S  # no dropout
    # q and k beside v in the projection, and rotated
    assert local == S * B * (2 * (4 * H + 4) + 2 * (Q + 2 * Q) + 2 * (Q + Q) + scores + 2 * Q + 6 * F)
    # two norms: x 2h, result 2h, 1 / rms 4 B; rotated q and k, v; the attention's output; gate, up and their product
    assert layer(LLAMA, "megatron") == S * B * (2 * (4 * H + 4) + 2 * (Q + 2 * KV) + 2 * Q + 4 * A + 6 * F)


def test_megatron_holds_18_bytes_for_each_parameter() -> None:
    parts = {one.name: one.bytes for one in rank(LLAMA, "megatron").components}
    count = 2 * V * H + H + 2 * (2 * H * Q + 2 * H * KV + 3 * H * F + 2 * H)
    tables = 4 * S * H // A + 2 * H // A // 2 * 4  # a buffer; transformers' inverse frequencies
    assert parts["weights"] - tables == 2 * count
    assert parts["master_weights"] == 4 * count
    assert parts["optimizer_states"] == 8 * count
    embedding = 2 * V * H  # a gradient of 16 bit, until it is added to the buffer
    assert parts["gradients"] == 4 * count + embedding
    assert parts["inputs"] == S * B * (8 + 8 + 8 + 4) + S * S * B  # ids, labels, positions, weights of the loss; a mask
    single = {one.name: one.bytes for one in rank(LLAMA, "megatron", precision="32-true").components}
    assert "master_weights" not in single
    assert single["weights"] - tables == 4 * count


def test_gradients_of_megatron_are_there_before_backward() -> None:
    forward = next(one for one in rank(LLAMA, "megatron").phases if one.name == "forward")
    assert forward.components["gradients"] == 4 * (2 * V * H + H + 2 * (2 * H * Q + 2 * H * KV + 3 * H * F + 2 * H))


def test_placeholders_stand_for_the_gradients_of_products() -> None:
    # one tensor in 16 bit for each shape of a weight: a layer's, and the head's
    layer_and_head = 2 * (2 * H * Q + 2 * H * KV + 3 * H * F + V * H)
    for layers in (1, 2):
        load, step = (
            next(one for one in rank({**LLAMA, "num_hidden_layers": layers}, "megatron").phases if one.name == name)
            for name in ("load", "optimizer-step")
        )
        assert step.components["temporary"] - load.components.get("temporary", 0) == layer_and_head
    own = next(one for one in rank(LLAMA, "megatron", kernels="megatron").phases if one.name == "optimizer-step")
    assert own.components["temporary"] == 2 * A * S * S * B  # a buffer for the scores


GPT_64M = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50304, "n_embd": 512, "n_layer": 12,
           "n_head": 8, "n_positions": 1024}  # fmt: skip


@pytest.mark.parametrize(
    ("workload", "on", "peak", "between_steps"),
    [
        pytest.param({"checkpointing": "full"}, "a100-80gb", 2536167424, 1234585088, id="te_uniform_full_recompute"),
        pytest.param({}, "a100-80gb", 2711714304, 552128512, id="te_resume_dist_optimizer"),
        pytest.param({}, "h100-80gb", 2690742784, 581488640, id="te_frozen_resume_dist_optimizer"),
        pytest.param({"attention": "eager"}, "h100-80gb", 4702430720, 581489664, id="te_dist_optimizer_unfused"),
        pytest.param({"kernels": "megatron"}, "h100-80gb", 4608815616, 518880768, id="local_dist_optimizer"),
    ],
)
def test_what_a_step_adds_in_megatrons_own_tests(workload: dict[str, Any], on: str, peak: int, between_steps: int) -> None:
    # NVIDIA/Megatron-LM@d98e8a64ddf3 tests/functional_tests/test_cases/gpt/gpt3_mcore_*tp1_pp1*: mem-max-allocated-bytes and
    # mem-allocated-bytes, micro-batch 4 of 1,024 tokens. Their products do not add gradients to the buffer themselves.
    asked = {"kind": "train", "batch": 4, "seq": 1024, **workload}
    found = memfit.answer(GPT_64M, asked, on=on, overheads={"runtime": "megatron", "workspace": 0}).estimate
    parts = {one.name: one.at_peak_bytes for one in found.worst.components}
    standing = ("weights", "master_weights", "optimizer_states")
    added = found.peak.allocated_bytes - sum(parts[one] for one in standing) - 4 * (found.trainable_parameters or 0)
    if workload.get("kernels") == "megatron":
        added -= 2 * 8 * 1024 * 1024 * 4  # the buffer for scores is there between steps, too
    else:
        added -= 2 * (12 * 512 * 512 + 50304 * 512)  # placeholders
    assert added == pytest.approx(peak - between_steps, rel=1e-2 if workload.get("kernels") else 2e-3)


class _VocabParallel(torch.autograd.Function):
    """An fp32 copy that becomes the softmax in place, and then the gradient: what Megatron's loss does on one rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        copy = logits.float()
        copy -= copy.max(dim=-1, keepdim=True)[0]
        torch.exp(copy, out=copy)
        total = copy.sum(dim=-1)
        copy.div_(total[:, None])
        ctx.save_for_backward(copy, labels < 0, labels.clone())
        return total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, _, _ = ctx.saved_tensors
        softmax.mul_(grad[:, None])
        return softmax, None


def test_the_loss_of_megatron_as_torch_runs_it() -> None:
    rows, wide = 2048, 4096
    live = torch_truth.LiveMemory()
    hidden = torch.randn(rows, 8, dtype=torch.bfloat16)
    weight = torch.randn(wide, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    with live:
        loss = _VocabParallel.apply(hidden @ weight.T, labels).sum()
        forward, live.peak = live.peak, 0
        loss.backward()
    config = {**LLAMA, "vocab_size": wide, "num_hidden_layers": 1}
    found = {
        one.name: one.components.get("logits", 0)
        for one in rank(config, "megatron", batch=1, seq=rows).phases
        if not one.first_step
    }
    assert found["loss"] == (2 * wide + 4 * wide + 1 + 8) * rows  # logits, their fp32 copy, a mask, an index
    assert found["loss"] == pytest.approx(forward - weight.nbytes, rel=1e-3)  # a few numbers a row besides
    assert found["backward"] == pytest.approx(live.peak - weight.nbytes, rel=1e-3)


# --- Unsloth


LORA = {"kind": "finetune", "method": "qlora", "lora_rank": 8}


def test_an_unsloth_layer_keeps_each_input_once() -> None:
    # norms as Liger's; q, k, v where the projections put them; the output projection's input; gate and up, not their product
    assert layer(LLAMA, "unsloth", **LORA) == S * B * (2 * (4 * H + 4) + 2 * (Q + 2 * KV) + 2 * Q + 4 * A + 4 * F)


def test_what_its_functions_do_not_cover_runs_as_peft_has_it() -> None:
    whole = layer(LLAMA, "unsloth", **LORA)
    # without q_proj's adapter: k's and v's in fp32 each keep a copy of the input, 4 B an element, and r numbers of 4 B
    some = layer(LLAMA, "unsloth", **LORA, lora_targets="k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj")
    assert some - whole == S * B * (2 * (4 * H + 4 * 8) - 2 * H)
    assert layer(LLAMA, "unsloth", **LORA, lora_dropout=0.1) > some


def test_unsloth_offloads_the_inputs_of_layers() -> None:
    assert layer(LLAMA, "unsloth", **LORA, checkpointing="unsloth") == 0


def test_unsloth_computes_padded_tokens_as_all_others() -> None:
    padded, packed = (rank(LLAMA, "unsloth", **LORA, padding=one) for one in ("right", "none"))
    assert padded.phases == packed.phases


@pytest.mark.parametrize(("seq", "chunks"), [(1 << 17, 1), (1 << 18, 4), (1 << 20, 8)])
def test_the_chunks_of_unsloths_loss_hold_4_gib_of_fp32_logits(seq: int, chunks: int) -> None:
    asked = {**LORA, "checkpointing": "offloaded", "batch": 1, "lora_targets": "q_proj"}
    wide = {**LLAMA, "vocab_size": 1 << 13, "num_hidden_layers": 1}
    loss = next(one for one in rank(wide, "unsloth", **asked, seq=seq).phases if one.name == "loss")
    logits = 4 * (1 << 13) * seq  # 4, 8 and 32 GiB
    assert logits // chunks < loss.components["temporary"] < 1.2 * logits / chunks


# --- what runtimes refuse


@pytest.mark.parametrize(
    ("runtime", "workload", "words"),
    [
        ("megatron", {"precision": "bf16-true"}, "bf16-mixed, 32-true"),
        ("megatron", {"kernels": "liger"}, "te, megatron"),
        ("megatron", {"optimizer": "adamw-8bit"}, "adamw-fused"),
        ("megatron", {"kind": "finetune", "method": "lora"}, "--method lora is not counted"),
        ("megatron", {"kind": "infer"}, "inference is not counted"),
        ("megatron", {"kernels": "megatron", "padding": "packed"}, "--kernels te has"),
        ("megatron", {"checkpointing": "every:2"}, "selective:core_attn"),
        ("torchtitan", {"loss": "fused"}, "eager"),
        ("torchtitan", {"checkpointing": "selective:core_attn"}, "no switch"),
        ("torchtitan", {"optimizer_in_backward": True}, "not counted"),
        ("unsloth", {}, "full training is not counted, only --method lora, --method qlora"),
        ("unsloth", {**LORA, "precision": "bf16-mixed"}, "bf16-true"),
        ("hf", {"kernels": "te"}, "eager, liger, compile"),
        ("hf", {"checkpointing": "selective:core_attn"}, "--runtime megatron"),
    ],
)
def test_what_a_runtime_does_not_do_is_refused(runtime: str, workload: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        memfit.answer(LLAMA, {"kind": "train", **workload}, overheads={"runtime": runtime})


@pytest.mark.parametrize(("runtime", "family"), [("torchtitan", "gpt2"), ("unsloth", "gpt2"), ("megatron", "gemma2")])
def test_families_without_kernels_are_refused(runtime: str, family: str) -> None:
    gemma = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 100, "hidden_size": 64,
             "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    asked = LORA if runtime == "unsloth" else {"kind": "train"}
    with pytest.raises(UsageError, match=f"--runtime {runtime} is not counted for {family}"):
        memfit.answer(GPT if family == "gpt2" else gemma, asked, overheads={"runtime": runtime})


@pytest.mark.parametrize(
    ("runtime", "asked"), [("torchtitan", {"kind": "train"}), ("megatron", {"kind": "train"}), ("unsloth", LORA)]
)
def test_levers_propose_only_what_the_runtime_has(runtime: str, asked: dict[str, Any]) -> None:
    found = memfit.answer(LLAMA, {**asked, "batch": 4}, on="h100", overheads={"runtime": runtime})
    levers = levers_for(found.job)
    assert levers
    for lever in levers:
        edited = lever.edit(found.job)
        assert not refusal(runtime_of(edited), edited.workload)
        memfit.account.estimate(edited)
        text = " ".join(lever.flags(edited))
        assert "{" not in text
    names = {lever.name for lever in levers}
    assert "micro-batch" in names
    assert not names & {"adamw-8bit", "fused-loss", "lora", "optimizer-in-backward"}


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "te", "unsloth"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_answer_names_the_set_and_says_that_no_run_was_compared(name: str, family: str) -> None:
    one = KERNEL_SETS[name]
    if family not in (one.families or ()):
        return
    config = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} if family == "qwen3" else LLAMA
    runtime = next(row.name for row in RUNTIMES.values() if name in row.kernel_sets)
    asked = LORA if runtime == "unsloth" else {"kind": "train"}
    config = GPT if family == "gpt2" else config
    found = memfit.answer(config, {**asked, "kernels": name, "seq": S}, on="h100", overheads={"runtime": runtime})
    shown = to_json(found)
    kernels = {row["computes"]: row for row in shown["kernels"]}
    assert kernels["modules"]["name"] == name
    assert kernels["modules"]["source"]
    assert one.widths is not None
    activations = next(row for row in found.estimate.worst.components if row.name == "activations")
    assert activations.low_bytes <= activations.bytes * (100 - one.widths[0]) // 100 + 1
    assert activations.high_bytes >= activations.bytes * (100 + one.widths[1]) // 100
