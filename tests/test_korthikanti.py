"""Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*: what a first stage's device holds.

Layers only, as published: neither embedding nor head. The paper leaves out the statistics of LayerNorm (mean and deviation in
fp32, two norms a layer: 16 B a token), biases and norm weights; they are taken off here by their own count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import memfit
from memfit.account.estimate import Rank
from memfit.parallel.stages import in_flight
from memfit.units import GiB

SEQ = 2048
STATISTICS = 16


class Published(NamedTuple):
    """A model of the paper, and GiB on the first pipeline stage."""

    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    chunks: int
    batch: int
    states: float
    """Weights, gradients and optimizer states: 18 B a parameter."""
    whole: float
    """Activations of tensor parallelism alone."""
    selective: float
    """Activations with sequence parallelism, attention scores recomputed."""

    def config(self, layers: int) -> dict[str, Any]:
        """GPT-2's class has the paper's layer: biases, GELU, dropout of 0.1."""
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 51200, "n_embd": self.hidden,
            "n_head": self.heads, "n_layer": layers, "n_positions": SEQ,
        }  # fmt: skip

    @property
    def held(self) -> int:
        """Layers whose activations are alive: L (1 + (p - 1)/(p v)) of an interleaved schedule."""
        schedule = "interleaved" if self.chunks > 1 else "1f1b"
        return in_flight(schedule, self.pp, 0, self.chunks, 10 * self.pp).chunks * self.layers // (self.pp * self.chunks)


TABLE = {
    "22B": Published(48, 6144, 64, 8, 1, 1, 4, 45.5625, 59.25, 9.5625),
    "175B": Published(96, 12288, 96, 8, 8, 3, 1, 45.5625, 66.84, 12.35),
    "530B": Published(105, 20480, 128, 8, 35, 3, 1, 31.64, 114.02, 23.08),
    "1T": Published(128, 25600, 160, 8, 64, 1, 1, 32.96, 131.25, 26.56),
}


def _first_stage(of: Published, layers: int, *, sequence: bool, checkpointing: str) -> Rank:
    workload = {
        "kind": "train", "seq": SEQ, "batch": of.batch, "attention": "eager", "checkpointing": checkpointing,
        "precision": "bf16-mixed", "grad_accum": 10 * of.pp if of.pp > 1 else 1,
    }  # fmt: skip
    degrees: dict[str, Any] = {"tp": of.tp, "sp": sequence, "pp": of.pp}
    if of.pp > 1:
        degrees["stage_layers"] = "even"
    if of.chunks > 1:
        degrees |= {"schedule": "interleaved", "virtual_stages": of.chunks}
    return memfit.estimate(of.config(layers), workload, overheads={"runtime": "megatron"}, parallelism=degrees).ranks[0]


def _layers(of: Published, **given: Any) -> int:
    """What the layers keep: twice as many keep twice as much, and what the embedding keeps stays the same."""
    kept = [_first_stage(of, number, **given).kept_bytes or 0 for number in (of.layers, 2 * of.layers)]
    return kept[1] - kept[0]


@pytest.mark.parametrize("name", TABLE)
def test_the_closed_forms_are_the_published_figures(name: str) -> None:
    """s b h (10 + 24/t + 5 a s/(h t)), 34 s b h / t, 18 x 12 h^2 L / (t p), to the digits that are printed."""
    of = TABLE[name]
    tokens = SEQ * of.batch
    whole = of.held * tokens * (10 * of.hidden + (24 * of.hidden + 5 * of.heads * SEQ) / of.tp)
    assert whole / GiB == pytest.approx(of.whole, abs=0.01)
    assert of.held * 34 * tokens * of.hidden / of.tp / GiB == pytest.approx(of.selective, abs=0.005)
    assert 18 * 12 * of.hidden**2 * of.layers / of.tp / of.pp / GiB == pytest.approx(of.states, abs=0.005)


@pytest.mark.parametrize("name", TABLE)
def test_activations_of_tensor_parallelism_alone(name: str) -> None:
    """Exactly s b h (10 + 24/t + 5 a s/(h t)) a layer, beside the statistics."""
    of = TABLE[name]
    tokens = SEQ * of.batch
    expected = of.held * tokens * (10 * of.hidden + (24 * of.hidden + 5 * of.heads * SEQ) // of.tp + STATISTICS)
    assert _layers(of, sequence=False, checkpointing="none") == expected


@pytest.mark.parametrize("name", TABLE)
def test_activations_with_sequence_parallelism_and_selective_recomputation(name: str) -> None:
    """34 s b h / t a layer; statistics are between their share of the tokens and all of them."""
    of = TABLE[name]
    tokens = SEQ * of.batch
    found = _layers(of, sequence=True, checkpointing="selective:core_attn")
    least = of.held * 34 * tokens * of.hidden // of.tp
    assert least <= found <= least + of.held * tokens * STATISTICS


@pytest.mark.parametrize("name", TABLE)
def test_weights_gradients_and_states_of_the_layers(name: str) -> None:
    """18 B x (12 h^2 / t matrices + biases 7 h / t + 2 h, norms 4 h) a layer of the stage."""
    of = TABLE[name]
    names = ("weights", "gradients", "master_weights", "optimizer_states")
    sums = [
        sum(one.bytes for one in _first_stage(of, number, sequence=False, checkpointing="none").components if one.name in names)
        for number in (of.layers, 2 * of.layers)
    ]
    layers = of.layers // of.pp
    vectors = 7 * of.hidden // of.tp + 6 * of.hidden
    assert sums[1] - sums[0] == 18 * layers * (12 * of.hidden**2 // of.tp + vectors)
    assert (sums[1] - sums[0] - 18 * layers * vectors) / GiB == pytest.approx(of.states, abs=0.005)
