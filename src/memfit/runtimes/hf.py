"""Hugging Face transformers: in a raw loop, and under its Trainer; and a raw PyTorch loop, which behaves like the first."""

from __future__ import annotations

from memfit.runtimes.facts import Runtime

HF = Runtime(
    name="hf",
    version="5.24",
    description="transformers models in a raw loop: out = model(**batch); out.loss.backward(); optimizer.step()",
    outputs="kept",
    adamw="adamw-foreach",
    whole_embedding=True,
    since=(5,),
    source=(
        "transformers 5.24 modelling code, eager kernels; torch.optim.AdamW takes foreach on CUDA by default; "
        "tensor-parallel plans leave the embedding out and gather the head's outputs"
    ),
)

HF_4 = HF._replace(
    version="4.57",
    mask_without_cache=True,
    own_masks=("bloom", "falcon", "gptj", "mpt", "opt", "stablelm"),
    causal_buffers=("gpt2",),
    uncached=("gemma2", "gemma3"),
    no_sdpa=("electra", "gptj", "segformer", "swin", "t5"),
    cache_format="keys",
    since=(4, 53),
    source=(
        "transformers 4.57 masking_utils.py looks for packed sequences in the position ids when there is neither a mask nor a "
        "cache object, and then does not leave the mask out; cache_utils.py DynamicLayer; torch.optim.AdamW takes foreach on "
        "CUDA by default"
    ),
)

HF_TRAINER = Runtime(
    name="hf-trainer",
    lacks=("pp",),
    version="5.24",
    description="transformers models under Trainer and accelerate",
    outputs="dropped",
    adamw="adamw-fused",
    full_embedding_states=True,
    trainer=True,
    whole_embedding=True,
    since=(5,),
    source=(
        "transformers 5.24 trainer.py drops the outputs before backward and registers 32-bit states of embeddings for "
        "bitsandbytes; TrainingArguments.optim is adamw_torch_fused"
    ),
)

HF_TRAINER_4 = HF_TRAINER._replace(
    version="4.57",
    causal_buffers=HF_4.causal_buffers,
    uncached=HF_4.uncached,
    no_sdpa=HF_4.no_sdpa,
    cache_format=HF_4.cache_format,
    since=(4, 53),
    kbit_prep="norms",
    source=(
        "transformers 4.57 trainer.py, as 5.24; its collators pass a mask of ones, which is left out, so no packed sequences are "
        "looked for. TRL's SFTTrainer of that time calls prepare_model_for_kbit_training and casts embedding and head back to "
        "bf16; that of TRL 1 does neither (trl models/utils.py prepare_peft_model, trainer/sft_trainer.py)"
    ),
)

HF_4_49 = HF_4._replace(
    version="4.52",
    mask_without_cache=False,
    since=(4, 49),
    source="transformers 4.49 loss/loss_utils.py shifts the labels; the search for packed sequences came with 4.53",
)
HF_TRAINER_4_49 = HF_TRAINER_4._replace(version="4.52", since=(4, 49), source=HF_4_49.source)

HF_4_46 = HF_4_49._replace(
    version="4.48",
    shifted_logits=True,
    since=(4, 46),
    source="transformers 4.48 loss/loss_utils.py copies the fp32 logits without their last position (transformers#35646)",
)
HF_TRAINER_4_46 = HF_TRAINER_4_49._replace(version="4.48", shifted_logits=True, since=(4, 46), source=HF_4_46.source)

TORCH = HF._replace(
    name="torch",
    version="2.13",
    whole_embedding=False,
    since=(2,),
    looked_at=(2, 13),
    description="a raw PyTorch loop over the same modules",
)
