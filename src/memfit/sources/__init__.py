"""From a MODEL argument to a config dict: files, standard input, presets, sizes and the Hugging Face Hub."""

from __future__ import annotations

from memfit.sources.load import LoadedConfig, load_config
from memfit.sources.presets import Preset, all_presets, find_preset, preset_names

__all__ = ["LoadedConfig", "Preset", "all_presets", "find_preset", "load_config", "preset_names"]
