"""Operations and whole models against PyTorch: what autograd really keeps, on small real tensors on the CPU.

Left out where the CPU is not CUDA (see `torch_truth`): dropout masks are made with `native_dropout`, LayerNorm's statistics
are compared
in fp32 or corrected by name, attention is eager or takes what the flash kernel takes, autocast is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heart_models as models
import pytest
import torch
import torch_truth
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch_truth import Case
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from memfit.families import build_model
from memfit.job import Training
from memfit.kernels import KernelPolicy, lower
from memfit.model import AXES, BlockBuilder, Value
from memfit.precision import training_policy

BATCH, SEQ, HIDDEN = 3, 20, 48
COUNTS = {
    "once": 1,
    "position": SEQ,
    "sequence": BATCH,
    "token": BATCH * SEQ,
    "key-token": BATCH * SEQ,
    "pair": BATCH * SEQ * SEQ,
    "position-pair": SEQ * SEQ,
}
PRECISIONS = ("32-true", "bf16-true")

# ------------------------------------------------------------------ operation by operation


def modelled(build: Callable[[BlockBuilder], Value], precision: str, *, width: int = HIDDEN, loss: bool = False) -> int:
    """Bytes that memfit says a block of operations keeps."""
    b = BlockBuilder("block", width)
    policy = training_policy(precision, None)
    lowered = lower(
        b.done(build(b)), KernelPolicy(precision=policy, attention="eager"), input_requires_grad=True, input_dtype=policy.weight
    )
    saved = {storage for node in lowered.tape.nodes for storage in node.saved if storage >= 0}
    sizes = (lowered.tape.sizes[storage] for storage in saved)
    return sum(num_bytes * COUNTS[AXES[axis]] for axis, num_bytes in sizes)


def measured(run: Callable[[Tensor], Any], precision: str, *modules: nn.Module, width: int = HIDDEN) -> int:
    """Bytes that autograd keeps of it, without the modules' parameters."""
    dtype = torch_truth.TORCH_DTYPES[precision]
    own = {one.untyped_storage()._cdata for module in modules for one in module.to(dtype).parameters()}
    x = torch.randn(BATCH, SEQ, width, dtype=dtype, requires_grad=True)
    return torch_truth.kept_by(lambda: run(x), own)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(precision: str, bias: bool) -> None:
    layer = nn.Linear(HIDDEN, 7, bias=bias)
    assert measured(layer, precision, layer) == modelled(lambda b: b.linear("a", b.input, 7, bias=bias), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_linears_that_share_their_input(precision: str) -> None:
    one, two = nn.Linear(HIDDEN, 7), nn.Linear(HIDDEN, 7)

    def build(b: BlockBuilder) -> Value:
        return b.add(b.linear("a", b.input, 7), b.linear("b", b.input, 7))

    assert measured(lambda x: one(x) + two(x), precision, one, two) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layer_norm(precision: str) -> None:
    norm = nn.LayerNorm(HIDDEN)
    statistics = torch_truth.CPU_STATISTICS * BATCH * SEQ if precision != "32-true" else 0
    assert measured(norm, precision, norm) == modelled(lambda b: b.layer_norm("a", b.input), precision) - statistics


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_before_a_linear(precision: str, offset: bool) -> None:
    """Gemma's 1 + w is an fp32 tensor of its own: 4h once, not per token."""
    norm = Gemma2RMSNorm(HIDDEN) if offset else LlamaRMSNorm(HIDDEN)
    layer = nn.Linear(HIDDEN, 7)

    def build(b: BlockBuilder) -> Value:
        return b.linear("next", b.rms_norm("a", b.input, offset=offset), 7)

    assert measured(lambda x: layer(norm(x)), precision, norm, layer) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rms_norm_of_every_head(precision: str) -> None:
    norm, layer = LlamaRMSNorm(8), nn.Linear(HIDDEN, 7)

    def build(b: BlockBuilder) -> Value:
        return b.linear("next", b.rms_norm("a", b.input, heads=6), 7)

    def run(x: Tensor) -> Tensor:
        return layer(norm(x.view(BATCH, SEQ, 6, 8)).view(BATCH, SEQ, HIDDEN))

    assert measured(run, precision, norm, layer) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("function", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"])
def test_activations_between_two_linears(precision: str, function: str) -> None:
    up, down, activation = nn.Linear(HIDDEN, 100), nn.Linear(100, HIDDEN), ACT2FN[function]

    def build(b: BlockBuilder) -> Value:
        return b.linear("down", b.activation(function, b.linear("up", b.input, 100)), HIDDEN)

    assert measured(lambda x: down(activation(up(x))), precision, up, down) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gated_mlp(precision: str) -> None:
    gate, up, down = nn.Linear(HIDDEN, 100), nn.Linear(HIDDEN, 100), nn.Linear(100, HIDDEN)

    def build(b: BlockBuilder) -> Value:
        gated = b.multiply(b.activation("silu", b.linear("gate", b.input, 100)), b.linear("up", b.input, 100))
        return b.linear("down", gated, HIDDEN)

    assert measured(lambda x: down(F.silu(gate(x)) * up(x)), precision, gate, up, down) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout_as_cuda_runs_it(precision: str) -> None:
    """`native_dropout` gives a mask of bools and keeps it; `F.dropout` on the CPU keeps a mask in the input's format."""
    layer = nn.Linear(HIDDEN, 7)

    def build(b: BlockBuilder) -> Value:
        return b.linear("next", b.dropout(b.input, 0.5), 7)

    assert measured(lambda x: layer(torch.native_dropout(x, 0.5, True)[0]), precision, layer) == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rotary(precision: str) -> None:
    """q and k rotated over 6 and 2 heads of 8: only cos and sin are kept, which memfit counts once per forward, not per layer."""
    dtype = torch_truth.TORCH_DTYPES[precision]
    wide, narrow = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 16)
    tables = torch.randn(1, SEQ, 8, dtype=dtype), torch.randn(1, SEQ, 8, dtype=dtype)

    def run(x: Tensor) -> Tensor:
        q, k = wide(x).view(BATCH, SEQ, 6, 8).transpose(1, 2), narrow(x).view(BATCH, SEQ, 2, 8).transpose(1, 2)
        return apply_rotary_pos_emb(q, k, *tables)[0]

    def build(b: BlockBuilder) -> Value:
        return b.rotary(b.linear("q", b.input, 48), b.linear("k", b.input, 16), head_dim=8)[0]

    both = 2 * SEQ * 8 * dtype.itemsize
    assert measured(run, precision, wide, narrow) - both == modelled(build, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_embedding_keeps_its_ids(precision: str) -> None:
    """8 B a token; ids belong to the batch, so the block counts them as its input of no width."""
    table = nn.Embedding(50, HIDDEN).to(torch_truth.TORCH_DTYPES[precision])
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    assert torch_truth.kept_by(lambda: table(ids), {table.weight.untyped_storage()._cdata}) == 8 * BATCH * SEQ


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("upcast", [True, False])
def test_cross_entropy(precision: str, upcast: bool) -> None:
    """The log-softmax, 4 or 2 B an entry, the labels, and two numbers."""
    head = nn.Linear(HIDDEN, 50, bias=False)
    labels = torch.zeros(BATCH * SEQ, dtype=torch.long)

    def run(x: Tensor) -> Tensor:
        logits = head(x).view(-1, 50)
        return F.cross_entropy(logits.float() if upcast else logits, labels)

    def build(b: BlockBuilder) -> Value:
        return b.loss(b.head("head", b.input, 50), upcast=upcast)

    assert modelled(build, precision) - measured(run, precision, head) in range(9)


# ------------------------------------------------------------------ kept bytes of whole models

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 64,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "pad_token_id": 0,
}
NEOX = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "classifier_dropout": 0.0,
}

T = transformers
CASES = {
    "llama": lambda: Case(T.LlamaForCausalLM, T.LlamaConfig(**DECODER)),
    "llama, biases, tied, wide heads": lambda: Case(
        T.LlamaForCausalLM, T.LlamaConfig(**DECODER, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16)
    ),
    "llama, multi-head": lambda: Case(T.LlamaForCausalLM, T.LlamaConfig(**{**DECODER, "num_key_value_heads": 4})),
    "llama, gelu": lambda: Case(T.LlamaForCausalLM, T.LlamaConfig(**DECODER, hidden_act="gelu")),
    "llama, sequence labels": lambda: Case(T.LlamaForSequenceClassification, T.LlamaConfig(**DECODER, num_labels=3), "sequence"),
    "llama, token labels": lambda: Case(
        T.LlamaForTokenClassification, T.LlamaConfig(**DECODER, num_labels=3, classifier_dropout=0.0)
    ),
    "mistral": lambda: Case(T.MistralForCausalLM, T.MistralConfig(**DECODER, sliding_window=16)),
    "qwen2": lambda: Case(T.Qwen2ForCausalLM, T.Qwen2Config(**DECODER)),
    "qwen2, sliding": lambda: Case(
        T.Qwen2ForCausalLM, T.Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ),
    "qwen3": lambda: Case(T.Qwen3ForCausalLM, T.Qwen3Config(**DECODER, head_dim=16)),
    "gemma2": lambda: Case(T.Gemma2ForCausalLM, T.Gemma2Config(**DECODER, head_dim=16, sliding_window=16)),
    "gpt2": lambda: Case(T.GPT2LMHeadModel, T.GPT2Config(**GPT2)),
    "gpt2, gelu, narrow": lambda: Case(T.GPT2LMHeadModel, T.GPT2Config(**GPT2, n_inner=40, activation_function="gelu")),
    "gpt2, token labels": lambda: Case(T.GPT2ForTokenClassification, T.GPT2Config(**GPT2, num_labels=3, classifier_dropout=0.0)),
    "gpt_neox": lambda: Case(T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**NEOX)),
    "gpt_neox, in sequence, whole rotary": lambda: Case(
        T.GPTNeoXForCausalLM, T.GPTNeoXConfig(**NEOX, use_parallel_residual=False, rotary_pct=1.0, attention_bias=False)
    ),
    "bert": lambda: Case(T.BertForMaskedLM, T.BertConfig(**ENCODER)),
    "bert, untied, relu": lambda: Case(T.BertForMaskedLM, T.BertConfig(**ENCODER, tie_word_embeddings=False, hidden_act="relu")),
    "bert, sequence labels": lambda: Case(T.BertForSequenceClassification, T.BertConfig(**ENCODER, num_labels=3), "sequence"),
    "bert, token labels": lambda: Case(T.BertForTokenClassification, T.BertConfig(**ENCODER, num_labels=3)),
    "bert, spans": lambda: Case(T.BertForQuestionAnswering, T.BertConfig(**ENCODER), "span"),
}


def rank_of(case: Case, batch: int, seq: int, **settings: Any) -> Any:
    """memfit's estimate of the same run. Dropout 0 everywhere: the CPU keeps other masks than CUDA."""
    model = build_model(case.config.to_dict(), name="test", source="test", head=case.head)
    return models.rank_of(model, Training(batch=batch, seq=seq, dropout=0.0, **settings))


def unlike(case: Case, model: nn.Module, batch: int, seq: int, precision: str) -> tuple[int, int]:
    """What memfit and the CPU may differ by, in bytes, with a name for each: (least, most) of memfit - measured.

    - LayerNorm's statistics in 16 bit: exactly 4 B a row and norm;
    - the loss's scalars: up to 8 B;
    - labels shifted by one for the causal loss: a batch of one keeps a view of a tensor one label longer, 8 B;
    - sequence labels of a decoder: two indices of 8 B that pick the last token of each sequence;
    - spans: memfit counts start and end as labels of every token.
    """
    norms = sum(isinstance(one, nn.LayerNorm) for one in model.modules())
    statistics = 0 if precision == "32-true" else torch_truth.CPU_STATISTICS * norms * batch * seq
    least, most = statistics - 8, statistics + 8
    if case.labels == "sequence" and not isinstance(case.config, transformers.BertConfig):
        least -= 16 * batch
    if case.labels == "span":
        most += 8 * batch * seq
    return least, most


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 16), (2, 24)])
def test_kept_bytes_with_eager_attention(name: str, precision: str, batch: int, seq: int) -> None:
    case = CASES[name]()
    model = torch_truth.make_model(case, precision, "eager")
    truth = torch_truth.kept_bytes(model, torch_truth.make_inputs(case, batch, seq))
    rank = rank_of(case, batch, seq, precision=precision, attention="eager")
    least, most = unlike(case, model, batch, seq, precision)
    assert least <= rank.kept_bytes - truth <= most


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gemma2", "mistral", "qwen2, sliding")])
def test_kept_bytes_with_flash_attention(name: str) -> None:
    """16 bit without a mask, so no binding window; Gemma 2 soft-caps its scores."""
    case, batch, seq = CASES[name](), 2, 24
    model = torch_truth.make_model(case, "bf16-true", "sdpa")
    with torch_truth.flash_attention():
        truth = torch_truth.kept_bytes(model, torch_truth.make_inputs(case, batch, seq))
    rank = rank_of(case, batch, seq, precision="bf16-true", attention="sdpa")
    least, most = unlike(case, model, batch, seq, "bf16-true")
    assert least <= rank.kept_bytes - truth <= most


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "bert"])
def test_a_checkpointed_model_keeps_its_boundaries(name: str) -> None:
    """What autograd holds itself: checkpoint() saves a layer's positional tensors, which for GPT-2 include the mask."""
    case, batch, seq = CASES[name](), 2, 24
    model = torch_truth.make_model(case, "32-true", "eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    truth = torch_truth.kept_bytes(model, torch_truth.make_inputs(case, batch, seq))
    mask = 4 * batch * seq * seq if name == "gpt2" else 0
    rank = rank_of(case, batch, seq, precision="32-true", attention="eager", checkpointing="full")
    assert abs(rank.kept_bytes + mask - truth) <= 8
