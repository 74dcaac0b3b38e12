"""The command line in one process: what is asked, what is answered, what is refused, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import memfit
from memfit.cli import main
from memfit.cli.commands import COMMANDS, EXAMPLES
from memfit.errors import InputError

# Llama-3.1-8B. By hand: embedding and head 2 x 128,256 x 4,096; a layer has q and o 2 x 4,096^2, k and v 2 x 4,096 x 1,024, the
# MLP 3 x 4,096 x 14,336 and two norms of 4,096; 32 layers and the last norm.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_PARAMETERS = 2 * 128_256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096) + 4096

Run = tuple[int, str, str]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "MEMFIT_DEBUG", "_ARGCOMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str) -> Run:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_hand_computed_size_is_the_published_one() -> None:
    assert LLAMA_PARAMETERS == 8_030_261_248


@pytest.mark.parametrize("command", ["infer", "serve", "train", "finetune", "fine-tune"])
def test_json_of_every_workload_follows_the_published_schema(ask: Any, config: str, command: str) -> None:
    code, out, err = ask(command, config, "--on", "h100", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    schema = json.loads((Path(memfit.__file__).parent / "data" / "answer.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(data)
    assert data["model"]["parameters"] == LLAMA_PARAMETERS
    peak = data["peak"]["device_bytes"]
    assert sum(one["at_peak_bytes"] for one in data["ranks"][0]["components"]) == peak
    assert data["verdict"]["headroom_bytes"] == data["device"]["usable_bytes"] - peak


def test_weights_and_cache_of_inference_are_the_hand_computed_ones(ask: Any, config: str) -> None:
    _, out, _ = ask("infer", config, "--context", "8k", "--json")
    data = json.loads(out)
    bytes_of = {one["name"]: one["bytes"] for one in data["ranks"][0]["components"]}
    assert bytes_of["weights"] // 2**16 == 2 * LLAMA_PARAMETERS // 2**16  # and a few hundred bytes of rotary frequencies
    assert bytes_of["kv_cache"] == 2**30  # 8,192 tokens x 32 layers x 2 x 8 heads x 128 x 2 B
    assert data["verdict"] is None
    assert data["smallest_devices"]


def test_does_not_fit_is_an_answer_with_exit_code_0(ask: Any, config: str) -> None:
    code, out, err = ask("train", config, "--on", "4090")
    assert (code, err) == (0, "")
    assert out.startswith("DOES NOT FIT: ")
    assert "\x1b" not in out


def test_the_model_may_stand_anywhere(ask: Any, config: str) -> None:
    orders = [
        ("infer", config, "--on", "4090", "--json"),
        ("infer", "--on", "4090", "--json", config),
        ("infer", "--json", config, "--on=4090"),
        ("--json", "infer", config, "--on", "4090"),
        (config, "infer", "--on", "4090", "--json"),
        ("infer", "--on", "4090", "--format", "json", "--", config),
    ]
    assert len({ask(*order) for order in orders}) == 1


def test_engine_names_and_underscores_are_taken(ask: Any, config: str) -> None:
    same = [
        ("train", config, "--batch", "2", "--seq", "512", "--checkpointing", "full", "--json"),
        (
            "train",
            config,
            "--per_device_train_batch_size",
            "2",
            "--max_seq_length=512",
            "--gradient_checkpointing",
            "true",
            "--json",
        ),
    ]
    assert len({ask(*one) for one in same}) == 1


def test_a_model_by_size_and_by_dimensions(ask: Any) -> None:
    sizes = [json.loads(ask("train", *words, "--json")[1]) for words in (("7B",), ("--params", "7e9"), ("--params=7B",))]
    assert {one["peak"]["device_bytes"] for one in sizes} == {sizes[0]["peak"]["device_bytes"]}
    words = ("--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336", "--vocab", "128256")
    code, out, _ = ask("infer", *words, "--gated", "--json")
    assert code == 0
    assert json.loads(out)["model"]["parameters"] == LLAMA_PARAMETERS
    code, out, err = ask("infer", *words, "--no-gated")
    assert (code, out) == (2, "")  # a decoder without gate has no grouped heads
    assert "--kv-heads" in err
    small = json.loads(ask("infer", "--layers", "4", "--hidden", "512", "--ffn", "2048", "--no-gated", "--json")[1])
    assert small["model"]["family"] == "gpt_neox"


def test_a_bare_model_is_the_overview(ask: Any, config: str) -> None:
    bare, named = ask(config, "--on", "4090"), ask("fit", config, "--on", "4090")
    assert bare == named
    code, out, _ = bare
    assert code == 0
    assert "inference, 16-bit" in out
    data = json.loads(ask(config, "--json")[1])
    assert len(data["devices"]) > 3
    assert all(len(way["cells"]) == len(data["devices"]) for way in data["ways"])
    full = next(way for way in data["ways"] if way["name"] == "full fine-tuning")
    small = next(index for index, one in enumerate(data["devices"]) if one["id"] == "rtx-4090")
    assert full["cells"][small]["fits"] == "no"
    assert full["cells"][small]["peak_bytes"] > 4 * LLAMA_PARAMETERS


@pytest.mark.parametrize("columns", ["60", "80", "100", "200"])
def test_the_overview_shows_every_device_at_every_width(
    ask: Any, config: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = ask(config)[1]
    devices = json.loads(ask(config, "--json")[1])["devices"]
    row = re.findall(r"^full fine-tuning .*", out, re.MULTILINE)
    words = [word for line in row for word in line.split() if re.fullmatch(r"fits|tight|no|\d+x", word)]
    assert len(words) == len(devices)
    # commands are never broken
    assert max(len(line) for line in out.splitlines() if not line.startswith("  • memfit ")) <= int(columns)


@pytest.mark.parametrize("on", ["24GiB", "2x4090", "2x24GiB", "1.5GiB", "m4-max-64"])
def test_the_commands_under_an_overview_can_be_run(ask: Any, on: str) -> None:
    for line in json.loads(ask("gpt2", "--on", on, "--json")[1])["ways"][:1]:
        out = ask("gpt2", "--on", on)[1]
        assert line["command"] in out
    word = re.findall(r"--on (\S+)", ask("gpt2", "--on", on, "--format", "csv")[1] + ask("gpt2", "--on", on)[1])[0]
    first = json.loads(ask("infer", "gpt2", "--on", on, "--json")[1])["device"]
    again = json.loads(ask("infer", "gpt2", "--on", word, "--json")[1])["device"]
    assert (first["usable_bytes"], first["count"]) == (again["usable_bytes"], again["count"])


def test_the_overview_of_two_named_devices_in_every_format(ask: Any, config: str) -> None:
    rows = ask(config, "--on", "4090,h100", "--format", "csv")[1].splitlines()
    assert rows[0] == "model,way,device,count,usable_bytes,fits,peak_bytes,phase,layout,devices"
    assert len(rows) == 1 + 2 * len(json.loads(ask(config, "--json")[1])["ways"])
    markdown = ask(config, "--on", "4090", "--format", "markdown")[1]
    assert "| full fine-tuning |" in markdown
    assert "--on rtx-4090`" in markdown


def test_bare_memfit_shows_six_lines_of_examples_that_work(ask: Any) -> None:
    code, out, err = ask()
    assert (code, err) == (0, "")
    assert out == EXAMPLES
    assert len(out.splitlines()) == 6
    names = {name for command in COMMANDS for name in (command.name, *command.aliases)}
    for line in out.splitlines():
        words = line.split("  ")[0].split()
        assert words[0] == "memfit"
        assert words[1] in names or words[1] == "llama-3.1-8b"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_examples_in_the_help_are_command_lines_that_work(ask: Any, command: Any, monkeypatch: pytest.MonkeyPatch,
                                                              tmp_path: Path) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for line, _ in command.examples:
        if command.name == "validate":
            continue
        code, out, err = ask(*line.split()[1:])
        assert (code, err) == (0, ""), line
        assert out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_examples_first(ask: Any, command: Any) -> None:
    code, out, err = ask(command.name, "-h")
    assert (code, err) == (0, "")
    assert out.index("examples:") < out.index("usage:") < out.index("output:")
    assert ask(command.name, "--help") == (code, out, err)


def test_overall_help_and_version(ask: Any) -> None:
    out = ask("-h")[1]
    for command in COMMANDS:
        assert f"  {command.name}" in out
    assert ask("--version") == (0, f"memfit {memfit.__version__}\n", "")


def test_a_help_text_in_colour_only_when_colour_is_wanted(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in ask("train", "-h")[1]
    assert "\x1b[" not in ask("train", "-h", "--no-color")[1]


BAD_USAGE = [
    (["train", "7B", "--bacth", "4"], "unknown option '--bacth'", "did you mean '--batch'"),
    (["train", "7B", "--lora-rank", "4"], "unknown option '--lora-rank'", "option of 'memfit finetune'"),
    (["trian", "7B"], "unknown command 'trian'", "did you mean 'train'"),
    (["devcies"], "unknown command 'devcies'", "did you mean 'devices'"),
    (["frobnicate", "gpt2"], "unknown command 'frobnicate'", "the commands are"),
    (["train", "7B", "--optimizer", "adamv"], "--optimizer does not know 'adamv'", "or 'adamw'"),
    (["train", "7B", "--batch", "-1"], "--batch cannot be negative", ""),
    (["train", "7B", "--batch", "0"], "--batch must be at least 1", ""),
    (["train", "7B", "--batch", "1e30"], "--batch: '1e30' is too large", ""),
    (["train", "7B", "--batch", "1e15"], "--batch must be at most", ""),
    (["train", "7B", "--batch", "two"], "--batch: cannot read 'two'", ""),
    (["train", "7B", "--batch", "nan"], "--batch: cannot read 'nan'", ""),
    (["train", "7B", "--headroom", "150%"], "--headroom", "below 1"),
    (["train", "7B", "--batch"], "--batch needs a value", "whole number"),
    (["train", "7B", "--loss"], "--loss needs a value: eager, chunked, chunked-output, fused, cut", ""),
    (["train", "7B", "--json=1"], "--json takes no value", ""),
    (["train", "7B", "8B"], "unexpected argument '8B'", "takes one MODEL"),
    (["schema", "train", "x"], "unexpected argument 'x'", "KIND"),
    (["validate", "x"], "unexpected argument 'x'", "no argument"),
    (["train"], "MODEL is missing", "--params"),
    (["fit"], "MODEL is missing", "memfit fit 7B"),
    (["train", ""], "empty MODEL", ""),
    (["train", "gpt2", "--layers", "3"], "--layers", "leave out one or the other"),
    (["infer", "gpt2", "--on", "h10"], "unknown device 'h10'", "did you mean"),
    (["devices", "nonesuch-9"], "unknown device", ""),
    (["schema", "trian"], "no schema 'trian'", "did you mean 'train'"),
    (["infer", "gpt2", "--format", "jsn"], "--format does not know 'jsn'", "did you mean 'json'"),
    (["infer", "gpt2", "--json", "--format", "csv"], "--json and --format csv contradict", ""),
    (["infer", "gpt2", "--output", "x.foo"], "the suffix '.foo' names no format", ".json"),
    (["infer", "gpt2", "-j"], "unknown option '-j'", ""),
    (["--frob"], "unknown option '--frob'", "memfit fit -h"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "what", "hint"), BAD_USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_usage_is_one_line_and_exit_code_2(ask: Any, arguments: list[str], what: str, hint: str) -> None:
    code, out, err = ask(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("memfit: error: ")
    assert err.count("\n") == 1
    assert what in err
    assert hint in err


def test_bad_input_is_one_line_and_exit_code_1(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"model_type": "llama",', encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "alien.json").write_text('{"model_type": "alien\\u001b[2J\\nx"}', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for name in ("missing/config.json", "broken.json", "list.json", "alien.json", "empty"):
        code, out, err = ask("infer", str(tmp_path / name))
        assert (code, out) == (1, ""), name
        assert err.startswith("memfit: error: ")
        assert err.count("\n") == 1
        assert "\x1b" not in err
        assert "Traceback" not in err


def test_output_takes_its_format_from_the_suffix(ask: Any, config: str, tmp_path: Path) -> None:
    starts = {"a.json": "{", "a.csv": "model,rank,count,component", "a.md": "**FITS", "a.txt": "FITS: ", "A.MARKDOWN": "**FITS"}
    for name, start in starts.items():
        path = tmp_path / name
        code, out, err = ask("infer", config, "--on", "h100", "--output", str(path))
        assert (code, out) == (0, "")
        assert err == f"memfit: wrote {path}\n"
        assert path.read_text(encoding="utf-8").startswith(start)
    assert sorted(os.listdir(tmp_path)) == sorted([*starts, "config.json"])


def test_an_explicit_format_wins_over_the_suffix_and_a_dash_is_standard_output(ask: Any, config: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert ask("infer", config, "--format", "json", "--output", str(path))[0] == 0
    json.loads(path.read_text(encoding="utf-8"))
    code, out, err = ask("infer", config, "--json", "--output", "-")
    assert (code, err) == (0, "")
    assert out == path.read_text(encoding="utf-8")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs /dev")
def test_output_into_anything_but_a_file_is_refused_and_nothing_is_lost(ask: Any, config: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("earlier lines\n", encoding="utf-8")
    pipe, link, folder = tmp_path / "pipe.json", tmp_path / "link.json", tmp_path / "dev"
    os.mkfifo(pipe)
    folder.symlink_to("/dev")
    with open(log, "ab") as appended:
        name = f"/dev/fd/{appended.fileno()}"
        link.symlink_to(name)
        targets = (name, f"/proc/self/fd/{appended.fileno()}", str(link), str(folder / name[5:]), str(pipe), "/dev/null")
        for target in targets:
            code, out, err = ask("infer", config, "--json", "--output", target)
            assert (code, out) == (1, ""), target
            assert "use the shell's redirection" in err
            assert err.count("\n") == 1
    assert log.read_text(encoding="utf-8") == "earlier lines\n"


def test_output_does_not_replace_what_is_read_only(
    ask: Any, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    path.write_text("kept", encoding="utf-8")
    monkeypatch.setattr(os, "access", lambda name, mode: not (os.fspath(name) == str(path) and mode == os.W_OK))
    code, _, err = ask("infer", config, "--output", str(path))
    assert (code, path.read_text(encoding="utf-8")) == (1, "kept")
    assert "is read-only" in err


def test_the_name_of_a_written_file_is_shown_without_control_characters(ask: Any, config: str, tmp_path: Path) -> None:
    code, _, err = ask("infer", config, "--output", str(tmp_path / "a\x1b[31m\nb\u202e.json"))
    assert code == 0
    assert err.endswith("a?[31m b?.json\n")
    assert err.count("\n") == 1


def test_output_follows_links_to_files(ask: Any, config: str, tmp_path: Path) -> None:
    real, link, new = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "new.json"
    real.write_text("old", encoding="utf-8")
    link.symlink_to("real.json")
    new.symlink_to(tmp_path / "not-there-yet.json")
    for target in (link, new):
        assert ask("infer", config, "--output", str(target))[0] == 0
        assert target.is_symlink()
        assert json.loads(target.read_text(encoding="utf-8"))["schema_version"] == 1
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert ask("infer", config, "--output", str(loop))[0] == 1


def test_output_into_a_missing_folder_is_refused_before_anything_is_computed(ask: Any, tmp_path: Path) -> None:
    code, _, err = ask("infer", str(tmp_path / "no-such-config.json"), "--output", str(tmp_path / "none" / "a.json"))
    assert code == 1
    assert "does not exist" in err
    assert not (tmp_path / "none").exists()
    code, _, err = ask("infer", "gpt2", "--json", "--output", str(tmp_path))
    assert code == 1
    assert "is a folder" in err


def test_an_existing_file_is_replaced_whole_or_not_at_all(
    ask: Any, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answer.json"
    path.write_text("precious", encoding="utf-8")
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", fail)
        code, _, err = ask("infer", config, "--output", str(path))
    assert code == 1
    assert "No space left on device" in err
    assert path.read_text(encoding="utf-8") == "precious"
    assert sorted(os.listdir(tmp_path)) == ["answer.json", "config.json", "link.json"]

    assert ask("infer", config, "--output", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(path.read_text(encoding="utf-8"))["schema_version"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_devices(ask: Any) -> None:
    data = json.loads(ask("devices", "--json")[1])
    assert {"h100-sxm-80gb", "rtx-4090"} <= {one["id"] for one in data["devices"]}
    table = ask("devices")[1]
    assert "rtx-4090" in table
    one = json.loads(ask("devices", "2xh100", "--json")[1])["device"]
    assert one["id"] == "h100-sxm-80gb"
    assert one["count"] == 2
    assert one["marketed_bytes"] == 80 * 2**30
    assert one["usable_bytes"] < one["marketed_bytes"]
    assert "h100" in one["reading"].lower()
    header = ask("devices", "--format", "csv")[1].splitlines()[0]
    assert header == "id,title,kind,marketed_bytes,usable_bytes,usable_basis,bandwidth_bytes_s,year"


def test_models(ask: Any) -> None:
    data = json.loads(ask("models", "--json")[1])
    parameters = {one["name"]: one["parameters"] for one in data["models"]}
    assert parameters["llama-3.1-8b"] == LLAMA_PARAMETERS
    assert "llama" in data["families"]
    one = json.loads(ask("models", "llama-3.1-8b", "--json")[1])["model"]
    assert (one["num_parameters"], one["num_layers"], one["num_kv_heads"]) == (LLAMA_PARAMETERS, 32, 8)
    assert "8,030,261,248" in ask("models", "llama-3.1-8b")[1]


def test_schema(ask: Any) -> None:
    for kind in ("train", "finetune", "infer", "answer"):
        code, out, _ = ask("schema", kind)
        assert code == 0
        assert json.loads(out) == json.loads(ask("schema", kind, "--json")[1])
    everything = json.loads(ask("schema")[1])
    jsonschema.Draft202012Validator.check_schema(everything)
    jsonschema.Draft202012Validator(everything).validate({"lora_rank": 8})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(everything).validate({"lora_rnak": 8})


def test_an_unexpected_error_is_one_line_unless_debugging(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("first line\nsecond \x1b[31mline")

    monkeypatch.setattr("memfit.api.answer", broken)
    code, out, err = ask("infer", "gpt2")
    assert (code, out) == (1, "")
    assert err == "memfit: internal error: ValueError: first line second ?[31mline (please report it)\n"
    monkeypatch.setenv("MEMFIT_DEBUG", "1")
    with pytest.raises(ValueError, match="first line"):
        main(["infer", "gpt2"])


def test_ctrl_c_is_130_without_a_traceback(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.api.answer", interrupted)
    code, out, err = ask("infer", "gpt2")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_errors_raised_on_purpose_keep_their_text(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InputError("the file x\nis broken")

    monkeypatch.setattr("memfit.api.answer", refuse)
    assert ask("infer", "gpt2") == (1, "", "memfit: error: the file x is broken\n")


def test_validate_shows_what_its_room_found(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        groups = (
            {"group": "kept", "rows": 12, "median_error_percent": 0.25},
            {"group": "traced", "rows": 3, "median_error_percent": 1.0},
        )
        worst = ({"row": "=x", "expected_bytes": 1 << 30, "computed_bytes": 3 << 29},)
        notes = ("2 rows are not expressible",)

    monkeypatch.setattr("memfit.cli.accuracy.import_module", lambda name: type("Room", (), {"run": staticmethod(Found)}))
    data = json.loads(ask("validate", "--json")[1])
    assert data["groups"][1] == {"group": "traced", "rows": 3, "median_error_percent": 1.0}
    assert data["worst"][0]["computed_bytes"] == 3 << 29
    table = ask("validate")[1]
    assert "1.50 GiB" in table
    assert "2 rows are not expressible" in table
    assert ask("validate", "--format", "csv")[1].splitlines() == [
        "group,rows,median_error_percent",
        "kept,12,0.25",
        "traced,3,1.0",
    ]


def test_the_tables_of_validate_fit_the_terminal(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "a long reason that a column of a terminal is too narrow for, so that it stands below the table"

    class Found:
        groups = ({"group": "held-out traced backward end", "metric": "device total", "rows": 112,
                   "median_percent": 0.0012, "p90_percent": 0.0123, "worst_percent": 12.34,
                   "bias_percent": -0.0001, "in_interval": "49 of 49"},)  # fmt: skip
        worst = ({"group": "litgpt lora", "row": "litgpt-hub-35-mistral-7b-v0.2-qlora", "measured_bytes": 1 << 30,
                  "predicted_bytes": 3 << 29, "error_percent": 50.0, "why": why},)  # fmt: skip
        notes = ()

    monkeypatch.setattr("memfit.cli.accuracy.import_module", lambda name: type("Room", (), {"run": staticmethod(Found)}))
    lines = ask("validate")[1].splitlines()
    assert lines[1].split("  ")[0] == "group"
    assert " ".join(lines[1].split()) == "group metric rows median % p90 % worst % bias % in 90 %"
    assert lines[3].startswith("held-out traced backward end  device total")
    assert max(map(len, lines)) <= 100
    assert len([line for line in lines if "litgpt-hub-35-mistral-7b-v0.2-qlora" in line]) == 2
    assert why in " ".join(lines)
    assert why in ask("validate", "--format", "markdown")[1]


def test_validate_without_a_corpus_is_one_line(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.cli.accuracy.import_module", lambda name: None)
    code, out, err = ask("validate")
    assert (code, out) == (1, "")
    assert err == "memfit: error: this installation of memfit has no validation corpus\n"
