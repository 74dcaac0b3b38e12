"""The presets: exact parameter counts, names in every usual spelling, and quick to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.families import FAMILIES, build_model
from memfit.sources import all_presets, find_preset, preset_names

COUNTS = json.loads((Path(__file__).parent / "data" / "preset_parameters.json").read_text())
"""Preset -> parameters, tied ones once: counted in the transformers 5.24.0 class that the config names, on the meta device."""
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632, "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "gemma-2-27b": 27_227_128_320,
}  # fmt: skip
"""What the model cards on the Hub (sizes of the safetensors files) and the papers state."""


def test_every_preset_has_a_count_and_no_other():
    assert set(preset_names()) == set(COUNTS)
    assert len(preset_names()) >= 90


@pytest.mark.parametrize("name", preset_names())
def test_parameters_are_exact(name):
    preset = find_preset(name)
    model = build_model(preset.config, name=preset.name, source=preset.source)
    assert model.num_parameters == COUNTS[name] == preset.parameters == PUBLISHED.get(name, COUNTS[name])


def test_facts_are_complete():
    for preset in all_presets():
        assert preset.family in FAMILIES, preset.name
        assert preset.hub_ids
        assert all(hub_id.count("/") == 1 for hub_id in preset.hub_ids)
        assert preset.hub_id == preset.hub_ids[0]
        assert preset.hub_id in preset.source
        assert preset.name == preset.name.lower()
        assert isinstance(preset.config["architectures"], list)
        assert None not in [value for key, value in preset.config.items() if key != "sliding_window"]


def test_no_two_presets_share_a_name():
    owner: dict[str, str] = {}
    for preset in all_presets():
        for name in (preset.name, *preset.aliases, *preset.hub_ids):
            found = find_preset(name)
            assert found is not None
            assert found.name == preset.name, name
            assert owner.setdefault(name.lower(), preset.name) == preset.name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama3.1-8B", "llama-3.1-8b"),
        ("LLAMA_3_1_8B", "llama-3.1-8b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("META-LLAMA/meta-llama-3.1-8b-instruct", "llama-3.1-8b"),
        ("gpt-2", "gpt2"),
        ("GPT2 XL", "gpt2-xl"),
        ("pythia-1.4b", "pythia-1.4b"),
        ("pythia-14m", "pythia-14m"),
        ("qwen2.5:0.5b", "qwen2.5-0.5b"),
        ("bert-base", "bert-base-uncased"),
        ("BAAI/bge-large-en-v1.5", "bge-large-en"),
    ],
)
def test_spellings(spelling, name):
    found = find_preset(spelling)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "text", ["", "pythia-14b", "llama", "8b", "meta-llama/llama 3.1 8b", "llama-3.1-8b/", "l\u0142ama-3.1-8b", "x" * 1000]
)
def test_what_is_no_preset(text):
    assert find_preset(text) is None


def test_what_a_preset_says_of_the_checkpoint():
    """Facts that change memory and are easily mixed up between variants of one model."""
    assert find_preset("gemma-2-9b").config["torch_dtype"] == "float32"
    assert find_preset("gemma-2-9b-it").config["torch_dtype"] == "bfloat16"
    assert find_preset("mistral-7b-v0.1").config["sliding_window"] == 4096
    assert find_preset("mistral-7b-v0.3").config["sliding_window"] is None
    assert find_preset("qwen2.5-7b").config["max_position_embeddings"] == 131072
    assert find_preset("qwen2.5-7b-instruct").config["max_position_embeddings"] == 32768
    assert find_preset("bert-base-uncased").config["vocab_size"] == 30522
    assert find_preset("gpt2-medium").config["vocab_size"] == 50257
    assert find_preset("llama-2-13b").config["vocab_size"] == 32000
    assert find_preset("qwen3-8b-fp8").config["quantization_config"]["quant_method"] == "fp8"


def test_a_changed_config_does_not_change_the_preset():
    first = find_preset("llama-3.1-8b")
    first.config["hidden_size"] = 1
    first.config["rope_scaling"]["factor"] = 1
    second = find_preset("llama-3.1-8b")
    assert second.config["hidden_size"] == 4096
    assert second.config["rope_scaling"]["factor"] == 8.0


def test_a_preset_is_found_without_heavy_modules():
    code = (
        "import sys\n"
        "from memfit.sources import load_config\n"
        "load_config('llama-3.1-8b'); load_config('7B')\n"
        "heavy = {'numpy', 'rich', 'yaml', 'huggingface_hub', 'importlib.metadata', 'importlib.resources', 'torch', 'http'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout.strip() == "[]"


def _environment() -> dict[str, str]:
    import os

    import memfit

    return {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1])}
