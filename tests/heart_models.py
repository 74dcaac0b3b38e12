"""Small and well-known models and jobs for the tests of the heart."""

from __future__ import annotations

from typing import Any

from memfit.account import estimate, resolve
from memfit.account.estimate import Estimate, Rank
from memfit.families import build_model
from memfit.job import FineTuning, Inference, Job, Overheads, Training
from memfit.model import Model

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B."""

LLAMA_1B: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Llama-3.2-1B."""

MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096,
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
PYTHIA_1B: dict[str, Any] = {
    "model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "rotary_pct": 0.25, "tie_word_embeddings": False,
}  # fmt: skip
BERT_BASE: dict[str, Any] = {
    "model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

GEMMA_2B: dict[str, Any] = {
    "model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "hidden_act": "gelu",
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
PHI_2: dict[str, Any] = {
    "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
    "num_attention_heads": 32, "partial_rotary_factor": 0.4, "resid_pdrop": 0.1,
}  # fmt: skip
PHI_4_MINI: dict[str, Any] = {
    "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144,
    "tie_word_embeddings": True, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "attention_bias": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
STABLELM_2: dict[str, Any] = {
    "model_type": "stablelm", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 32, "use_qkv_bias": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
OLMO2_13B: dict[str, Any] = {
    "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 40,
}  # fmt: skip
GRANITE_8B: dict[str, Any] = {
    "model_type": "granite", "vocab_size": 49155, "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
    "logits_scaling": 16.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
}  # fmt: skip
AYA_8B: dict[str, Any] = {
    "model_type": "cohere", "vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "logit_scale": 0.0625, "use_qk_norm": False,
}  # fmt: skip
STARCODER2_3B: dict[str, Any] = {
    "model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096, "norm_epsilon": 1e-5,
}  # fmt: skip

FAMILY_CONFIGS = {
    "llama": LLAMA_8B, "mistral": MISTRAL_7B, "qwen2": QWEN2_7B, "qwen3": QWEN3_8B, "gemma2": GEMMA2_2B, "gpt2": GPT2,
    "gpt_neox": PYTHIA_1B, "bert": BERT_BASE, "gemma": GEMMA_2B, "gemma3_text": GEMMA3_1B, "phi": PHI_2, "phi3": PHI_4_MINI,
    "stablelm": STABLELM_2, "olmo2": OLMO2_13B, "granite": GRANITE_8B, "cohere": AYA_8B, "starcoder2": STARCODER2_3B,
}  # fmt: skip


def make(config: dict[str, Any], head: str | None = None, **changes: Any) -> Model:
    """The model of a config, with some keys changed (`None` leaves a key out)."""
    changed = {key: value for key, value in {**config, **changes}.items() if value is not None}
    return build_model(changed, name="test", source="test", head=head)


def job(model: Model, workload: Training | FineTuning | Inference, **overheads: Any) -> Job:
    """A resolved job without overheads, so that its bytes can be worked out by hand."""
    nothing = {"workspace": 0, "cuda_context": 0, "fragmentation": 0, **overheads}
    return resolve(Job(model=model, workload=workload, overheads=Overheads(**nothing))).job


def estimate_of(model: Model, workload: Training | FineTuning | Inference, **overheads: Any) -> Estimate:
    """The estimate of such a job."""
    return estimate(job(model, workload, **overheads))


def rank_of(model: Model, workload: Training | FineTuning | Inference, **overheads: Any) -> Rank:
    """Its only rank."""
    return estimate_of(model, workload, **overheads).worst


def component(rank: Rank, name: str) -> int:
    """The largest bytes of a component, 0 if the job has none."""
    return next((one.bytes for one in rank.components if one.name == name), 0)


def phase(rank: Rank, name: str, part: str | None = None) -> int:
    """Allocated bytes of a phase in steady state, or one component of it."""
    found = next(one for one in rank.phases if one.name == name and not one.first_step)
    return found.allocated_bytes if part is None else found.components.get(part, 0)
