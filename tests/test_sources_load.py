"""Which of its forms a MODEL argument has, and what is said when it has none."""

from __future__ import annotations

import io
import json
import os

import pytest

from memfit.errors import InputError, MemfitError, UsageError
from memfit.families import build_model
from memfit.sources import LoadedConfig, load_config

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, and no way to the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memfit.sources.hub.read_hub_config", lambda *arguments: pytest.fail(f"asked the Hub for {arguments}"))
    return tmp_path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub ids that were asked for."""
    from memfit.sources.hub import HubConfig

    asked = []
    monkeypatch.chdir(tmp_path)

    def read(repo_id, revision=None):
        asked.append((repo_id, revision))
        return HubConfig(dict(CONFIG), f"config.json of {repo_id}")

    monkeypatch.setattr("memfit.sources.hub.read_hub_config", read)
    return asked


def write(path, value=CONFIG) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return str(path)


def error(text: str, kind: type[MemfitError]) -> str:
    with pytest.raises(MemfitError) as caught:
        load_config(text)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def test_a_file_and_its_name(folder):
    for path, name in (("My-Model/config.json", "My-Model"), ("tiny.json", "tiny"), ("no-suffix", "no-suffix")):
        found = load_config(write(folder / path))
        assert found == LoadedConfig(config=CONFIG, name=name, source=str(folder / path))
    assert load_config("./tiny.json").source == "./tiny.json"
    assert load_config("My-Model").source == os.path.join("My-Model", "config.json")
    assert load_config("My-Model/").name == "My-Model"


def test_a_file_in_the_cache_of_the_hub_has_its_hub_id(folder):
    path = folder / "hub" / "models--org--my--model" / "snapshots" / ("a" * 40) / "config.json"
    assert load_config(write(path)).name == "org/my--model"


def test_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    write(folder / "m" / "config.json")
    assert load_config("~/m").name == "m"
    assert "~/nothing: no such file" in error("~/nothing", InputError)


def test_standard_input():
    found = load_config("-", stdin=io.BytesIO(json.dumps(CONFIG).encode()))
    assert (found.config, found.name, found.source) == (CONFIG, "standard input", "standard input")
    assert load_config("-", stdin=io.StringIO("{}")).config == {}


def test_standard_input_of_the_process(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}')))
    assert load_config("-").config == {"a": 1}
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input: closed" in error("-", InputError)


def test_a_path_wins_over_a_preset_and_a_size(folder):
    write(folder / "gpt2" / "config.json")
    write(folder / "7B")
    assert load_config("gpt2").config == CONFIG
    assert load_config("7B").config == CONFIG


def test_a_folder_without_a_model_does_not_hide_the_preset_of_its_name(folder):
    (folder / "gpt2").mkdir()
    assert load_config("gpt2").name == "gpt2"
    (folder / "gpt2" / "model.safetensors").touch()
    assert "has weights but no config.json" in error("gpt2", InputError)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "a folder without config.json"),
        (["notes.txt"], "a folder without config.json"),
        (["model-00001-of-00002.safetensors"], "has weights but no config.json"),
        (["pytorch_model.bin"], "has weights but no config.json"),
        (["model-q4.gguf"], "has weights but no config.json"),
        (["model_index.json"], "diffusers"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter (PEFT)"),
        (["params.json", "consolidated.00.pth"], "has params.json (the original format) but no config.json"),
    ],
)
def test_folders_without_config(folder, files, words):
    (folder / "model").mkdir()
    for name in files:
        (folder / "model" / name).touch()
    assert words in error("./model", InputError)


@pytest.mark.parametrize("name", ["./x", "../x/y", "/nowhere/x", "x.json", "a/b/c", "x.gguf", "deep/x.JSON", "./7B"])
def test_paths_that_do_not_exist(folder, name):
    assert f"{name}: no such file" in error(name, InputError)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "safetensors files are not read yet; give the config.json"),
        ("MODEL.GGUF", "GGUF files are not read yet; give the config.json"),
        ("net.yaml", "YAML"),
        ("net.yml", "YAML"),
        ("net.toml", "TOML"),
        ("pytorch_model.bin", "never opened; give the config.json"),
        ("model.safetensors.index.json", "the index of a checkpoint is not read; give the config.json"),
    ],
)
def test_suffixes_that_are_not_read(folder, name, words):
    (folder / name).write_text("{}")
    assert words in error(name, InputError)
    assert words in error(str(folder / name), InputError)


def test_broken_links_and_loops(folder):
    (folder / "dangling.json").symlink_to("nothing")
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    assert "no such file" in error("dangling.json", InputError)
    assert "symbolic links form a loop" in error("./a", InputError)


def test_a_folder_that_cannot_be_listed(folder, monkeypatch):
    (folder / "m").mkdir()

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", forbidden)
    assert "permission denied" in error("./m", InputError)


def test_presets(folder):
    found = load_config("Llama3.1-8B")
    assert found.name == "llama-3.1-8b"
    assert found.source == "preset llama-3.1-8b: config.json of meta-llama/Llama-3.1-8B on the Hugging Face Hub"
    assert found.config["num_key_value_heads"] == 8
    assert found.relative_uncertainty == 0
    assert load_config(" meta-llama/llama-3.1-8b ").name == "llama-3.1-8b"
    assert load_config("https://huggingface.co/Qwen/Qwen3-8B").name == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7e9), ("350M", 350e6), ("1.5B", 1.5e9), ("0.5b", 5e8), ("7e9", 7e9), ("70 B", 70e9), ("1T", 1e12)]
)
def test_sizes(folder, text, count):
    found = load_config(text)
    assert found.parameters == count
    assert found.relative_uncertainty == 0.25
    assert {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab"} <= {one.name for one in found.assumptions}
    model = build_model(found.config, name=found.name, source=found.source)
    assert abs(model.num_parameters / count - 1) < 0.03


def test_sizes_that_are_none(folder):
    assert "write 7B for seven billion" in error("7", UsageError)
    assert "write 7B for seven billion" in error("7000000000", UsageError)
    assert "no typical" in error("1M", UsageError)
    assert "no typical" in error("9e99", UsageError) or "too large" in error("9e99", UsageError)
    assert "a mixture of experts" in error("8x7B", UsageError)


def test_hub_ids(hub):
    for text in ("org/model", "org/model@main", "org/my.model_1-2@refs/pr/1", "https://huggingface.co/org/model/tree/v2",
                 "https://huggingface.co/org/model/blob/main/config.json", "hf.co/org", "Qwen/Qwen3-8B@main"):  # fmt: skip
        load_config(text)
    assert hub == [("org/model", None), ("org/model", "main"), ("org/my.model_1-2", "refs/pr/1"), ("org/model", "v2"),
                   ("org/model", "main"), ("hf.co/org", None), ("Qwen/Qwen3-8B", "main")]  # fmt: skip
    assert load_config("org/model@v1").name == "org/model@v1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lama-3.1-8b", "unknown model 'lama-3.1-8b' (did you mean 'llama-3.1-8b'"),
        ("qwen3-80b", "did you mean 'qwen3-8b'"),
        ("http://example.org/config.json", "only models on huggingface.co are read by address"),
        ("", "the model is empty"),
        ("   ", "the model is empty"),
        ("a\0b", "too long or holds a null character"),
        ("x" * 100_000, "too long or holds a null character"),
        ("what is this", "unknown model 'what is this'; name a preset"),
        ("a\nb", "unknown model 'a\\nb'"),
        ("org/model@", "unknown model"),
        ("-org/model", "unknown model"),
        ("org/model@a b", "unknown model"),
    ],
)
def test_what_is_not_known(folder, text, words):
    assert words in error(text, UsageError)
