"""The facade: texts and mappings become models and jobs; errors are one line; nothing is imported before it is needed."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit import api
from memfit.errors import InputError, MemfitError, UsageError
from memfit.job import Dimensions, FineTuning, Inference, Overheads, Training

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B: 8,030,261,248 parameters."""


# --- models


def test_model_from_a_mapping() -> None:
    model = api.load_model(LLAMA)
    assert (model.num_parameters, model.family, model.max_positions) == (8_030_261_248, "llama", 131_072)


def test_model_from_a_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for source in (file, str(file), tmp_path):
        assert api.load_model(source).num_parameters == 8_030_261_248
    assert api.load_model(file).facts["arguments"] == (str(file),)


def test_model_from_a_preset() -> None:
    assert api.load_model("llama-3.1-8b").num_parameters == 8_030_261_248


def test_model_from_a_size() -> None:
    model = api.load_model("7B")
    assert abs(model.num_parameters / 7e9 - 1) < 0.03
    assert model.relative_uncertainty > 0
    assert model.stated_parameters == 7_000_000_000
    assert any(one.name == "hidden" for one in model.assumptions)
    assert api.load_model(dimensions={"params": "7e9"}).num_parameters == model.num_parameters


def test_dimensions_beside_a_size_shape_it() -> None:
    assert api.load_model("7B", dimensions={"kv_heads": 8}).num_kv_heads == 8


def test_model_from_dimensions() -> None:
    given = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
    model = api.load_model(dimensions=given)
    assert model.num_parameters == 8_030_261_248
    words = " ".join(model.facts["arguments"])
    assert words == "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256"


def test_model_from_counts() -> None:
    model = api.load_model(dimensions=Dimensions(params=25_600_000, activation_elements=11_000_000))
    assert model.num_parameters == 25_600_000
    assert model.facts["arguments"] == ("--params", "25600000", "--activation-elements", "11000000")


@pytest.mark.parametrize(
    ("source", "dimensions", "words"),
    [
        (None, None, "which model?"),
        ("", {}, "which model?"),
        (None, {"activation_elements": 5}, "--activation-elements needs --params"),
        ("llama-3.1-8b", {"layers": 3, "vocab": 7}, "--layers, --vocab cannot change it"),
        (None, {"layrs": 3}, "did you mean 'layers'"),
        ({"model_type": "llama"}, {"hidden": 5}, "--hidden cannot change it"),
        ({}, None, "no model_type"),
        ({"model_type": "lama"}, None, "did you mean 'llama'"),
        (b"config.json", None, "not bytes"),
        ("./nowhere/config.json", None, "no such file"),
    ],
)
def test_what_is_no_model(source: Any, dimensions: Any, words: str) -> None:
    with pytest.raises(MemfitError) as caught:
        api.load_model(source, dimensions=dimensions)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- jobs


def test_workloads_from_mappings() -> None:
    assert api.make_workload({"kind": "train", "batch": "4", "seq-len": "2k"}) == Training(batch=4, seq=2048)
    assert api.make_workload({"kind": "finetune", "method": "QLoRA"}) == FineTuning(method="qlora")
    assert api.make_workload({"kind": "infer", "max-model-len": 8192}) == Inference(context=8192)
    assert api.make_workload({"kind": "serve"}) == Inference()
    ready = Training(batch=3)
    assert api.make_workload(ready) == ready


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ({}, "unknown kind of workload ''"),
        ({"kind": "trian"}, "did you mean 'train'"),
        ({"kind": "train", "batchh": 1}, "did you mean 'batch'"),
        ({"kind": "train", "batch": 0}, "at least 1"),
        ({"kind": "train", "batch": -4}, "at least 1"),
        ({"kind": "train", "batch": 1e30}, "at most"),
        ({"kind": "train", "batch": []}, "takes a whole number"),
        ({"kind": "train", "method": "lora"}, "unknown option 'method'"),
        ({"kind": ["train"]}, "unknown kind"),
        ("train", "a workload is"),
        (None, "a workload is"),
    ],
)
def test_what_is_no_workload(workload: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        api.make_workload(workload)
    assert words in str(caught.value)


def test_a_job_from_texts() -> None:
    job = api.make_job(LLAMA, {"kind": "train"}, on="2x h100", headroom="5%", overheads={"cuda_context": "500MiB"})
    assert job.cluster is not None
    assert (job.cluster.count, job.headroom, job.overheads.cuda_context) == (2, 0.05, 500 << 20)
    assert api.make_job(LLAMA, Training()).headroom == 0.1
    assert api.make_job(LLAMA, Training()).cluster is None
    same = Overheads(runtime="hf-trainer")
    assert api.make_job(LLAMA, Training(), on=job.cluster, overheads=same).overheads == same


@pytest.mark.parametrize(
    "changes",
    [
        {"on": "h1000"},
        {"on": ""},
        {"on": 5},
        {"headroom": 1.5},
        {"headroom": -0.1},
        {"headroom": "much"},
        {"overheads": {"x": 1}},
    ],
)
def test_what_is_no_job(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        api.make_job(LLAMA, Training(), **changes)


def test_what_is_no_model_argument() -> None:
    with pytest.raises(InputError, match="a model is"):
        api.make_job(5, Training())  # type: ignore[arg-type]


# --- answers


def test_answer_and_estimate_agree() -> None:
    found = memfit.answer(LLAMA, Inference(context=8192), on="h100")
    alone = memfit.estimate(LLAMA, Inference(context=8192), on="h100")
    assert found.verdict is not None
    assert found.verdict.fits == "yes"
    assert found.estimate.peak == alone.peak
    weights = next(one for one in alone.worst.components if one.name == "weights")
    assert weights.bytes == 16_060_522_496 + 512  # 2 B x 8,030,261,248, and two fp32 buffers of 64 rotary frequencies
    assert alone.cache is not None
    assert alone.cache.bytes_per_token == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 B


def test_a_training_that_does_not_fit_gets_changes_that_do() -> None:
    found = memfit.answer(LLAMA, {"kind": "train", "batch": 8, "seq": 4096}, on="h100")
    assert found.verdict is not None
    assert found.verdict.fits == "no"
    assert found.recommendations[0].fits == "yes"
    assert found.next[0].command.startswith("memfit ")
    assert len(found.next[0].command.splitlines()) == 1


def test_proposed_commands_are_understood_by_the_command_line() -> None:
    from memfit.cli.commands import command_names
    from memfit.cli.parser import parse

    asked = memfit.answer("llama-3.1-8b", {"kind": "train", "batch": 8, "seq": 4096}, on="h100")
    for step in asked.next:
        words = step.command.split()
        request = parse(command_names()[words[1]], words[2:])
        assert request.argument == "llama-3.1-8b"


def test_a_recommended_command_gives_the_recommended_peak() -> None:
    """The command line and the lever mean the same job."""
    from memfit.cli.commands import command_names
    from memfit.cli.parser import parse
    from memfit.job import WORKLOADS, Hardware

    for asked in (
        memfit.answer("llama-3.1-8b", {"kind": "train", "batch": 8, "seq": 4096}, on="h100"),
        memfit.answer("llama-3.1-8b", {"kind": "train", "batch": 2, "seq": 4096}, on="4090"),
        memfit.answer("llama-3.1-8b", {"kind": "infer", "context": 65536, "concurrency": 16}, on="4090"),
    ):
        best = asked.recommendations[0]
        assert best.fits == "yes"
        words = asked.next[0].command.split()
        request = parse(command_names()[words[1]], words[2:])
        again = memfit.answer(request.argument or "", request.build(WORKLOADS[words[1]]), on=request.build(Hardware).on)
        assert again.verdict is not None
        assert again.verdict.fits == "yes"
        assert again.estimate.peak.device_bytes == best.peak_bytes


def test_limits_hold_when_they_are_asked() -> None:
    training = {"kind": "train", "checkpointing": "full", "seq": 1024}
    for workload, field in ((training, "batch"), ({"kind": "infer", "context": 4096}, "concurrency")):
        limit = memfit.answer("qwen2.5-0.5b", workload, on="4090").limits[field].max
        assert limit is not None
        assert limit > 1
        asked = ({**workload, field: value} for value in (limit, limit + 1))
        at, beyond = (memfit.answer("qwen2.5-0.5b", one, on="4090").verdict for one in asked)
        assert at is not None
        assert beyond is not None
        assert (at.fits, beyond.fits != "yes") == ("yes", True)


def test_without_a_device_the_smallest_that_hold_it() -> None:
    found = memfit.answer(LLAMA, Inference(context=8192))
    assert found.verdict is None
    assert 1 <= len(found.smallest_devices) <= 5
    for identifier, count in found.smallest_devices:
        there = memfit.answer(LLAMA, Inference(context=8192), on=identifier).verdict
        assert (count, there is not None and there.fits) == (1, "yes")


def test_overview() -> None:
    table = memfit.overview(LLAMA, "4090,h200")
    assert [one.device.id for one in table.clusters] == ["rtx-4090", "h200-sxm-141gb"]
    ways = {way.name: way for way in table.ways}
    assert list(ways) == ["inference, 16-bit", "inference, 8-bit", "inference, 4-bit", "QLoRA", "LoRA", "full fine-tuning"]
    assert [cell.fits for cell in ways["full fine-tuning"].cells] == ["no", "yes"]
    assert [cell.fits for cell in ways["QLoRA"].cells] == ["yes", "yes"]
    peaks = [way.peak_bytes or 0 for way in table.ways]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[3] < peaks[4] < peaks[5]
    assert ways["inference, 16-bit"].note == "context 8,192, 1 sequence"
    same = memfit.answer(LLAMA, Inference(context=8192), on="4090")
    assert ways["inference, 16-bit"].cells[0].peak_bytes == same.estimate.peak.device_bytes
    assert len(memfit.overview(LLAMA).clusters) >= 6


def test_overview_is_kept_within_the_models_positions() -> None:
    table = memfit.overview("gpt2", "4090")
    assert {way.note for way in table.ways[:3]} == {"context 1,024, 1 sequence"}


# --- import


def test_importing_memfit_imports_nothing_else() -> None:
    code = "import sys, memfit; memfit.__version__; print(sorted(m for m in sys.modules if m.startswith('memfit')))"
    assert _printed(code) == "['memfit', 'memfit._version']"


def test_an_answer_imports_nothing_heavy() -> None:
    code = (
        "import sys, memfit; memfit.answer('llama-3.1-8b', memfit.Inference(context=8192), on='4090');"
        "heavy = ('numpy', 'rich', 'yaml', 'huggingface_hub', 'importlib.metadata', 'importlib.resources', 'torch');"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert _printed(code) == "[]"


def _printed(code: str) -> str:
    source = str(Path(memfit.__file__).resolve().parents[1])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source})
    return run.stdout.strip()


def test_public_names() -> None:
    for name in memfit.__all__:
        assert getattr(memfit, name) is not None
    assert set(memfit.__all__) <= set(dir(memfit))
    assert memfit.Training is Training
    with pytest.raises(AttributeError, match="no attribute 'traning'"):
        memfit.traning  # noqa: B018


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": -5}, "--batch must be at least 1"),
        ({"batch": 1.5}, "--batch takes a whole number"),
        ({"optimizer": "nope"}, "--optimizer does not know"),
    ],
)
def test_a_workload_built_by_hand_is_checked_like_a_typed_one(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        api.make_workload(Training(**wrong))  # type: ignore[arg-type]


def test_overheads_and_dimensions_built_by_hand_are_checked_too() -> None:
    with pytest.raises(UsageError, match="--workspace must be at least 0"):
        api.make_job(LLAMA, Training(), overheads=Overheads(workspace=-1))
    with pytest.raises(UsageError, match="--layers must be at least 1"):
        api.load_model(dimensions=Dimensions(layers=0, hidden=64))
    with pytest.raises(UsageError, match="--dropout is a share"):
        api.make_workload({"kind": "train", "dropout": 5})


def test_what_is_no_mapping_of_names_is_refused() -> None:
    for refused in (
        lambda: api.make_workload({"kind": "train", 1: 2}),
        lambda: api.make_job(LLAMA, Training(), overheads=5),  # type: ignore[arg-type]
        lambda: api.load_model(dimensions=3),  # type: ignore[arg-type]
        lambda: api.make_workload(Training(batch=10**5000)),
        lambda: api.load_model({**LLAMA, "hidden_size": 10**5000}),
    ):
        with pytest.raises(MemfitError) as caught:
            refused()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_dimensions_that_do_not_make_the_size_are_warned_of() -> None:
    def codes(**dimensions: Any) -> list[str]:
        return [one.code for one in api.answer(api.load_model("7B", dimensions=dimensions), Training()).warnings]

    assert "size-mismatch" not in codes()
    assert "size-mismatch" in codes(layers=1000, hidden=8192)


def test_a_command_for_another_device_keeps_the_formats_that_were_counted() -> None:
    """fp16 for a P100 may become bf16 elsewhere, which takes other memory: the command has to say fp16."""
    answer = api.answer("7B", {"kind": "train", "weight_dtype": "fp16"}, on="p100-pcie-16gb")
    elsewhere = [one.command for one in answer.next if "without a change" in one.why]
    assert len(elsewhere) == 1
    assert "--precision fp16-mixed" in elsewhere[0]


def test_several_devices_are_refused_where_one_is_asked() -> None:
    with pytest.raises(UsageError, match="names several devices: one here"):
        api.make_job(LLAMA, Training(), on="4090,h100")
    assert len(api.overview(LLAMA, "4090,h100").clusters) == 2


def test_a_size_that_the_dimensions_do_not_make_names_no_model() -> None:
    assert api.load_model("7B").name == "7.00B"
    assert api.load_model("7B", dimensions={"layers": 1000, "hidden": 8192}).name == "llama by dimensions"


def test_a_workload_built_by_hand_is_read_like_a_typed_one() -> None:
    assert api.make_workload(Training(seq="8k", batch="4")) == Training(seq=8192, batch=4)  # type: ignore[arg-type]


def test_an_answer_can_be_pickled() -> None:
    from memfit.report.payload import to_json

    found = memfit.answer("gpt2", Training())
    assert to_json(pickle.loads(pickle.dumps(found))) == to_json(found)
