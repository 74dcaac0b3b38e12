"""The formula of a component, computed, is the number beside it."""

from __future__ import annotations

import re
from typing import Any

import pytest

import memfit

TIED = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
BUFFERS = 2 * 4 * 16 // 2
"""inv_freq and original_inv_freq of rotary embedding, 4 B for half a head: not in the formula of the weights."""


def computed(formula: str) -> int:
    """The sum of products in a formula, without its words."""
    text = re.sub(r"\([^()]*[a-z]{2}[^()]*\)", "", formula.replace(",", ""))
    text = re.sub(r" (trained parameters|in adapters( of rank \d+)?|made a second time and not yet added)| B", "", text)
    assert re.fullmatch(r"[0-9x+() ]+", text.strip()), formula
    return int(eval(text.replace("x", "*")))


WORKLOADS: list[dict[str, Any]] = [
    {"kind": "train"},
    {"kind": "train", "grad_accum": 2},
    {"kind": "train", "ddp": "copies"},
    {"kind": "train", "ddp": "views"},
    {"kind": "train", "ema": "device", "ema_dtype": "bf16"},
    {"kind": "train", "optimizer": "lion"},
    {"kind": "finetune", "method": "lora"},
    {"kind": "finetune", "method": "dora", "ema": "device"},
    {"kind": "finetune", "method": "ia3"},
    {"kind": "finetune", "method": "prompt"},
    {"kind": "finetune", "method": "prefix", "prefix_projection": True},
    {"kind": "finetune", "method": "freeze", "freeze": "layers:1"},
    {"kind": "finetune", "method": "lora", "lora_dtype": "bf16", "optimizer": "sgd-momentum"},
    {"kind": "finetune", "method": "lora", "modules_to_save": "lm_head"},
    {"kind": "finetune", "method": "lora", "unfreeze": "embedding,norm"},
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: " ".join(str(value) for value in one.values()))
def test_a_formula_computes_to_the_number_beside_it(workload: dict[str, Any]) -> None:
    found = {one.name: one for one in memfit.answer(TIED, {"seq": 64, **workload}).estimate.worst.components}
    for name in ("weights", "gradients", "optimizer_states"):
        one = found[name]
        assert computed(one.formula) == one.bytes - BUFFERS * (name == "weights"), one.formula


def test_a_tied_matrix_has_a_second_gradient_until_it_is_added() -> None:
    def gradients(config: dict[str, Any]) -> str:
        found = memfit.answer(config, {"kind": "train", "seq": 64}).estimate.worst.components
        return next(one.formula for one in found if one.name == "gradients")

    count = 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert gradients(TIED).startswith(f"{count:,} x 4 B + {1000 * 64 * 4:,} B made a second time")
    assert "second" not in gradients(TIED | {"tie_word_embeddings": False})
