"""Hugging Face transformers: in a raw loop, and under its Trainer; and a raw PyTorch loop, which behaves like the first."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime

HF = Runtime(
    name="hf",
    version="5.24",
    description="transformers models in a raw loop: out = model(**batch); out.loss.backward(); optimizer.step()",
    outputs="kept",
    adamw="adamw-foreach",
    since=(5,),
    source="transformers 5.24 modelling code, eager kernels; torch.optim.AdamW takes foreach on CUDA by default",
)

HF_4 = HF._replace(
    version="4.57",
    mask_without_cache=True,
    since=(4, 53),
    source=(
        "transformers 4.57 masking_utils.py looks for packed sequences in the position ids when there is neither a mask nor a "
        "cache object, and then does not leave the mask out; torch.optim.AdamW takes foreach on CUDA by default"
    ),
)

HF_TRAINER = Runtime(
    name="hf-trainer",
    version="5.24",
    description="transformers models under Trainer and accelerate",
    outputs="dropped",
    adamw="adamw-fused",
    full_embedding_states=True,
    trainer=True,
    since=(5,),
    source=(
        "transformers 5.24 trainer.py drops the outputs before backward and registers 32-bit states of embeddings for "
        "bitsandbytes; TrainingArguments.optim is adamw_torch_fused"
    ),
)

HF_TRAINER_4 = HF_TRAINER._replace(
    version="4.57",
    since=(4, 53),
    source=(
        "transformers 4.57 trainer.py, as 5.24; its collators pass a mask of ones, which is left out, so no packed sequences are "
        "looked for"
    ),
)

TORCH = HF._replace(name="torch", version="2.13", since=(2,), description="a raw PyTorch loop over the same modules")
