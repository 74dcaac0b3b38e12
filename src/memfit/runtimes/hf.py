"""Hugging Face transformers: in a raw loop, and under its Trainer; and a raw PyTorch loop, which behaves like the first."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime

HF = Runtime(
    name="hf",
    version="5.24",
    description="transformers models in a raw loop: out = model(**batch); out.loss.backward(); optimizer.step()",
    outputs="kept",
    adamw="adamw-foreach",
    source="transformers 5.24 modelling code, eager kernels; torch.optim.AdamW takes foreach on CUDA by default",
)

HF_TRAINER = Runtime(
    name="hf-trainer",
    version="5.24",
    description="transformers models under Trainer and accelerate",
    outputs="dropped",
    adamw="adamw-fused",
    full_embedding_states=True,
    source=(
        "transformers 5.24 trainer.py drops the outputs before backward and registers 32-bit states of embeddings for "
        "bitsandbytes; TrainingArguments.optim is adamw_torch_fused"
    ),
)

TORCH = HF._replace(name="torch", version="2.13", description="a raw PyTorch loop over the same modules")
