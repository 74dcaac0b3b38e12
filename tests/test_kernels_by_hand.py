"""What operations keep for backward and what they need while they run, worked out by hand from shapes and formats.

Symbols: h hidden, f feed-forward, a heads, d head dimension, q = a d, kv = key-value heads x d, s sequence, V vocabulary;
bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heart_models as models
import pytest

from memfit.job import FineTuning, Training
from memfit.kernels import Adapter, KernelPolicy, lower
from memfit.model import AXES, BlockBuilder, Model, Value
from memfit.precision import PrecisionPolicy, training_policy

H, FFN, HEADS, HEAD_DIM, KV_HEADS = 2048, 8192, 32, 64, 8
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
HALF = training_policy("bf16-true", None)
SINGLE = training_policy("32-true", None)


def kept_by(
    build: Callable[[BlockBuilder], Value], width: int = H, *, precision: PrecisionPolicy = HALF, sequence: int = 1, **policy: Any
) -> int:
    """Bytes per token that the operations of a block keep, at a sequence of `sequence` tokens. Weights' own bytes are not
    kept."""
    b = BlockBuilder("block", width)
    block = b.done(build(b))
    lowered = lower(block, KernelPolicy(precision=precision, **policy), input_requires_grad=True, input_dtype=precision.weight)
    saved = {storage for node in lowered.tape.nodes for storage in node.saved if storage >= 0}
    counts = {"token": 1, "key-token": 1, "pair": sequence}
    total = 0
    for storage in saved:
        axis, num_bytes = lowered.tape.sizes[storage]
        total += num_bytes * counts[AXES[axis]]
    return total


def slope(
    workload: Training, config: dict[str, Any] = models.LLAMA_1B, *, key: str = "num_hidden_layers", **changes: Any
) -> float:
    """Kept bytes per token that one more layer adds."""

    def kept(layers: int) -> int:
        found = models.rank_of(models.make(config, **{key: layers}, **changes), workload).kept_bytes
        assert found is not None
        return found

    return (kept(5) - kept(4)) / (workload.batch * (workload.seq or 1))


# ------------------------------------------------------------------ whole layers of Llama-3.2-1B


def llama_layer() -> int:
    norms = 2 * (8 * H + 4)
    attention = 2 * Q + 2 * 2 * KV + 2 * Q + 4 * HEADS
    mlp = 8 * FFN
    return norms + attention + mlp


def test_a_llama_layer_with_sdpa_and_no_mask() -> None:
    """Norms 2 (8h + 4); roped q, k, v, output and log-sum-exp 2q + 4kv + 2q + 4a; gate, silu, up and product 8f."""
    assert llama_layer() == 108_680
    assert slope(Training(batch=1, seq=2048, precision="bf16-true")) == 108_680
    assert slope(Training(batch=3, seq=512, precision="bf16-true")) == 108_680
    assert slope(Training(batch=1, seq=2048, precision="bf16-true", attention="flash")) == 108_680


def test_any_mask_switches_the_attention_kernel() -> None:
    """Keys and values repeated for every head, + 2 x 2 (q - kv), and an additive mask of 2s a token in every layer."""
    masked = llama_layer() + 2 * 2 * (Q - KV) + 2 * 2048
    assert masked == 118_920
    assert slope(Training(batch=2, seq=2048, precision="bf16-true", padding="right")) == masked


def test_a_window_that_binds_is_a_mask_and_a_longer_one_is_none() -> None:
    workload = Training(batch=2, seq=2048, precision="bf16-true")
    changes = {"model_type": "mistral", "tie_word_embeddings": False}
    assert slope(workload, sliding_window=2048, **changes) == 118_920
    assert slope(workload, sliding_window=2049, **changes) == 108_680


def test_an_eager_llama_layer_keeps_two_score_matrices() -> None:
    """6as in place of the log-sum-exp, keys and values repeated for every head."""
    seq = 1024
    eager = llama_layer() - 4 * HEADS + 2 * 2 * (Q - KV) + 6 * HEADS * seq
    found = slope(Training(batch=1, seq=seq, precision="bf16-true", attention="eager"))
    assert found == pytest.approx(eager, rel=0.05)
    longer = slope(Training(batch=1, seq=seq + 1, precision="bf16-true", attention="eager"))
    assert longer - found == pytest.approx(6 * HEADS)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    """2h in bf16; 4h under autocast over fp32 weights, whose residual stream is fp32; 4h in fp32."""
    for precision, weight_dtype, boundary in (
        ("bf16-true", None, 2),
        ("bf16-mixed", "fp32", 4),
        ("bf16-mixed", "bf16", 2),
        ("32-true", None, 4),
    ):
        workload = Training(batch=2, seq=1024, precision=precision, weight_dtype=weight_dtype, checkpointing="full")
        assert slope(workload) == boundary * H


def test_autocast_over_16_bit_weights_has_nothing_to_cast_in_matrix_products() -> None:
    """The norms run as they are written, in fp32 anyway; q, k, v and the MLP are bf16 already."""
    assert slope(Training(batch=1, seq=2048, precision="bf16-mixed", weight_dtype="bf16")) == pytest.approx(108_680, rel=0.02)


def test_frozen_weights_keep_less() -> None:
    """No linear keeps its input, norms 4h + 4 each, SwiGLU 6f; what remains are the adapters: fp32 inputs 4 in and 4r a
    module."""
    rank = 8
    adapters = {"lora_targets": "q_proj", "lora_rank": rank, "lora_dtype": "fp32"}
    frozen = 2 * (4 * H + 4) + (2 * Q + 4 * KV + 2 * Q + 4 * HEADS) + 6 * FFN
    workload = FineTuning(batch=1, seq=1024, precision="bf16-true", **adapters)
    assert slope(workload) == frozen + 4 * H + 4 * rank


def test_each_targeted_module_has_its_own_fp32_copy_of_its_input_and_16_bit_adapters_share_it() -> None:
    def kept(targets: str, dtype: str) -> float:
        return slope(FineTuning(batch=1, seq=1024, precision="bf16-true", lora_targets=targets, lora_rank=16, lora_dtype=dtype))

    assert kept("q_proj,k_proj,v_proj", "fp32") - kept("q_proj", "fp32") == 2 * (4 * H + 4 * 16)
    assert kept("q_proj,k_proj,v_proj", "bf16") - kept("q_proj", "bf16") == 2 * (2 * 16)
    assert kept("q_proj", "fp32") - kept("q_proj", "bf16") == (4 * H + 4 * 16) - (2 * H + 2 * 16)


def test_dropout_on_the_adapters_input_keeps_a_mask_and_its_result() -> None:
    """One byte per element of the mask; the fp32 copy is replaced by the dropout's result."""

    def kept(dropout: float) -> float:
        return slope(FineTuning(batch=1, seq=256, precision="bf16-true", lora_targets="q_proj", lora_dropout=dropout))

    assert kept(0.1) - kept(0.0) == H


# ------------------------------------------------------------------ other families


def test_a_gpt2_layer() -> None:
    """fp32: LayerNorms 2 (4h + 8) with their outputs 4h each as inputs of c_attn and c_fc; fused qkv 12h; eager q, k, v copies
    12h,
    probabilities 4as; attention output 4h; gelu_new 5 x 4 x 4h, its result being c_proj's input."""
    h, a, seq = 768, 12, 256
    norms = 2 * (4 * h + 8) + 2 * 4 * h
    inner = 4 * h
    gelu_new = 5 * 4 * inner
    attention = 3 * 4 * h + 4 * a * seq + 4 * h
    workload = Training(batch=1, seq=seq, precision="32-true", attention="eager")
    assert slope(workload, models.GPT2, key="n_layer") == norms + attention + gelu_new


def test_a_bert_layer() -> None:
    """fp32, eager: x; q, k, v copied head by head 12h; probabilities 4as; context 4h; two LayerNorms 4h + 8 with outputs 4h
    (the second
    is the next layer's x); GELU 4f + 4f."""
    h, f, a, seq = 768, 3072, 12, 128
    expected = 3 * 4 * h + 4 * a * seq + 4 * h + 2 * (4 * h + 8) + 2 * 4 * h + 8 * f
    workload = Training(batch=2, seq=seq, precision="32-true", attention="eager")
    assert slope(workload, models.BERT_BASE) == expected


def test_qwen3_norms_q_and_k_head_by_head() -> None:
    """Each RMSNorm of width w over n heads keeps 6w + 4n: fp32 input, normalised copy, one number a head (its output is
    roped)."""
    plain = {**models.LLAMA_1B, "model_type": "qwen2", "head_dim": None}
    normed = {**models.LLAMA_1B, "model_type": "qwen3"}
    workload = Training(batch=1, seq=512, precision="bf16-true")
    without = slope(workload, {key: value for key, value in plain.items() if value is not None})
    assert slope(workload, normed) - without == 6 * Q + 4 * HEADS + 6 * KV + 4 * KV_HEADS


# ------------------------------------------------------------------ operations


def test_rms_norm_keeps_8h_and_4_with_its_output() -> None:
    """fp32 input 4h, reciprocal root 4, normalised 2h; the output 2h is what the linear reads."""
    assert kept_by(lambda b: b.linear("next", b.rms_norm("norm", b.input), 16)) == 8 * H + 4


def test_rms_norm_with_a_frozen_weight_keeps_4h_and_4() -> None:
    assert kept_by(lambda b: b.rms_norm("norm", b.input), train_all=False) == 4 * H + 4


def test_rms_norm_in_fp32_needs_no_copy_of_its_input() -> None:
    """x is the block's input, normalised and output are tensors of their own."""
    assert kept_by(lambda b: b.linear("next", b.rms_norm("norm", b.input), 16), precision=SINGLE) == 12 * H + 4


def test_layer_norm_keeps_its_input_and_two_numbers_a_row() -> None:
    assert kept_by(lambda b: b.layer_norm("norm", b.input)) == 2 * H + 8
    assert kept_by(lambda b: b.layer_norm("norm", b.input), precision=SINGLE) == 4 * H + 8


def test_a_linear_keeps_its_input_only_if_it_is_trained() -> None:
    assert kept_by(lambda b: b.linear("only", b.input, 64, bias=True)) == 2 * H
    assert kept_by(lambda b: b.linear("only", b.input, 64, bias=True), train_all=False) == 0


@pytest.mark.parametrize(
    ("function", "per_element"),
    [("gelu", 4), ("gelu_pytorch_tanh", 4), ("silu", 4), ("relu", 2), ("tanh", 2), ("gelu_new", 10), ("quick_gelu", 6)],
)
def test_activations_between_two_linears(function: str, per_element: int) -> None:
    """Bytes per element in 16 bit with the result, which the second linear reads: gelu 2f + 2f, gelu_new 10f, quick_gelu 6f.

    relu and tanh keep only their result.
    """

    def mlp(b: BlockBuilder) -> Value:
        return b.linear("down", b.activation(function, b.linear("up", b.input, FFN)), H)

    assert kept_by(mlp) == 2 * H + per_element * FFN


def test_swiglu_keeps_8f_and_6f_when_frozen() -> None:
    """gate, silu(gate), up and their product; without a trained down projection nobody keeps the product."""

    def mlp(b: BlockBuilder) -> Value:
        gate = b.activation("silu", b.linear("gate", b.input, FFN))
        return b.linear("down", b.multiply(gate, b.linear("up", b.input, FFN)), H)

    assert kept_by(mlp) == 2 * H + 8 * FFN
    assert kept_by(mlp, train_all=False) == 6 * FFN


def test_a_residual_sum_keeps_nothing() -> None:
    assert kept_by(lambda b: b.add(b.input, b.input)) == 0


def test_a_tensor_kept_by_three_operations_is_counted_once() -> None:
    def block(b: BlockBuilder) -> Value:
        return b.add(b.linear("one", b.input, 8), b.add(b.linear("two", b.input, 8), b.linear("three", b.input, 8)))

    assert kept_by(block) == 2 * H


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    assert kept_by(lambda b: b.dropout(b.input, 0.1)) == H
    assert kept_by(lambda b: b.dropout(b.input, 0.0)) == 0
    assert kept_by(lambda b: b.dropout(b.input, 0.1), dropout=0.0) == 0
    assert kept_by(lambda b: b.dropout(b.input, 0.0), dropout=0.5) == H


def attention(dropout: float = 0.0, kv_heads: int = 4, **attributes: Any) -> Callable[[BlockBuilder], Value]:
    """q, k and v of 4 heads of 16 from linears; the softmax in fp32."""

    def build(b: BlockBuilder) -> Value:
        q, k, v = (b.linear(name, b.input, heads * 16) for name, heads in (("q", 4), ("k", kv_heads), ("v", kv_heads)))
        return b.attention(q, k, v, num_heads=4, num_kv_heads=kv_heads, dropout=dropout, **attributes)

    return build


def scores_kept(precision: PrecisionPolicy, dropout: float) -> int:
    """What one more key adds per query: the score matrices alone."""
    build = attention(dropout)
    long, short = (kept_by(build, 64, precision=precision, sequence=length, attention="eager") for length in (101, 100))
    return long - short


@pytest.mark.parametrize(
    ("precision", "dropout", "per_head"),
    [(HALF, 0.0, 4 + 2), (HALF, 0.1, 4 + 1 + 2), (SINGLE, 0.0, 4), (SINGLE, 0.1, 4 + 1 + 4)],
)
def test_score_matrices_of_eager_attention(precision: PrecisionPolicy, dropout: float, per_head: int) -> None:
    """16 bit: fp32 softmax 4 and probabilities 2; dropout adds its mask and its result, which replaces the probabilities as
    the second
    product's operand. fp32: 4; with dropout the mask and the result beside it."""
    assert scores_kept(precision, dropout) == 4 * per_head


def test_flash_keeps_q_k_v_the_output_and_a_log_sum_exp() -> None:
    expected = 2 * 64 + 3 * 2 * 64 + 2 * 64 + 4 * 4
    assert kept_by(attention(), 64) == kept_by(attention(), 64, attention="flash") == expected


def test_grouped_heads_are_native_to_flash_and_repeated_by_the_memory_efficient_kernel() -> None:
    """The mask is 2 B a pair. A single key-value head is repeated without a copy: `expand` of one head stays a view."""
    native = 2 * 64 + 2 * 64 + 2 * 2 * 32 + 2 * 64 + 4 * 4
    assert kept_by(attention(kv_heads=2), 64) == native
    assert kept_by(attention(kv_heads=2), 64, padded=True) == native + 2 * 2 * (64 - 32) + 2


def test_fp32_attention_without_a_mask_keeps_scores_only_when_heads_are_grouped() -> None:
    """The math kernel: the softmax of every head and pair. Equal heads take the memory-efficient kernel."""

    def per_key(kv_heads: int) -> int:
        long, short = (kept_by(attention(kv_heads=kv_heads), 64, precision=SINGLE, sequence=length) for length in (11, 10))
        return long - short

    assert per_key(4) == 0
    assert per_key(1) >= 4 * 4


def test_before_compute_capability_8_there_is_no_flash() -> None:
    new = kept_by(attention(kv_heads=1), 64, sequence=100)
    assert kept_by(attention(kv_heads=1), 64, sequence=100, device_capability=(8, 0)) == new
    assert kept_by(attention(kv_heads=1), 64, sequence=100, device_capability=(7, 5)) > new + 2 * 4 * 99


def test_rotary_embedding_keeps_no_copies() -> None:
    def build(b: BlockBuilder) -> Value:
        q, _ = b.rotary(b.linear("q", b.input, Q), b.linear("k", b.input, KV), head_dim=HEAD_DIM)
        return q

    assert kept_by(build) == 2 * H


def test_an_adapter_keeps_the_input_in_its_format_and_the_low_rank_result() -> None:
    for dtype, element in (("fp32", 4), ("bf16", 2)):
        adapter = {"train_all": False, "adapter": Adapter(16, dtype, 0.0), "adapter_targets": ("all-linear",)}
        assert kept_by(lambda b: b.linear("mlp.up", b.input, 64), **adapter) == element * (H + 16)
        untouched = {**adapter, "adapter_targets": ("down",)}
        assert kept_by(lambda b: b.linear("mlp.up", b.input, 64), **untouched) == 0


# ------------------------------------------------------------------ logits and loss


def wide(vocab: int) -> Model:
    """One small layer under a vocabulary so large that the loss binds."""
    return models.make(
        models.LLAMA_1B,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=1,
        vocab_size=vocab,
    )


@pytest.mark.parametrize(("outputs", "backward"), [("kept", 14), ("dropped", 12)])
def test_logits_cost_10v_in_forward_and_14v_in_backward(outputs: str, backward: int) -> None:
    """bf16 logits 2V, fp32 copy 4V, log-softmax 4V; backward adds the log-softmax's gradient 4V and the copy's 4V, and 2V of
    outputs."""
    tokens, vocab = 2 * 512, 200_000
    rank = models.rank_of(wide(vocab), Training(batch=2, seq=512, precision="bf16-true", optimizer="sgd", outputs=outputs))
    assert rank.peak.phase == "backward"
    assert models.phase(rank, "loss", "logits") == pytest.approx(10 * vocab * tokens, rel=1e-3)
    assert models.phase(rank, "backward", "logits") == pytest.approx(backward * vocab * tokens, rel=1e-3)


def test_after_forward_6v_are_alive_of_which_4v_are_kept() -> None:
    tokens = 2 * 512

    def ends(vocab: int, outputs: str) -> tuple[int, int]:
        rank = models.rank_of(wide(vocab), Training(batch=2, seq=512, precision="bf16-true", optimizer="sgd", outputs=outputs))
        assert rank.kept_bytes is not None
        assert rank.forward_end_bytes is not None
        return rank.kept_bytes, rank.forward_end_bytes - 2 * 64 * vocab  # without the tied embedding

    for outputs, alive in (("kept", 6), ("dropped", 4)):
        kept, end = (after - before for before, after in zip(ends(100_000, outputs), ends(200_000, outputs), strict=True))
        assert kept == 4 * 100_000 * tokens
        assert end == alive * 100_000 * tokens


def test_fp32_logits_need_no_copy() -> None:
    """Logits 4V and log-softmax 4V after forward."""
    tokens, vocab = 512, 100_000
    rank = models.rank_of(wide(vocab), Training(batch=1, seq=512, precision="32-true", optimizer="sgd", outputs="kept"))
    assert models.phase(rank, "loss", "logits") == pytest.approx(8 * vocab * tokens, rel=1e-3)


def test_a_fused_loss_has_no_logits() -> None:
    eager, fused = (
        models.rank_of(wide(200_000), Training(batch=2, seq=512, precision="bf16-true", loss=loss)) for loss in ("eager", "fused")
    )
    assert models.component(fused, "logits") == 0
    assert fused.peak.allocated_bytes < eager.peak.allocated_bytes
