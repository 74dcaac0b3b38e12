"""A config.json from outside: what is refused, in one line that names the file, and what is tolerated."""

from __future__ import annotations

import io
import json
import os
import socket
import time

import pytest

from memfit.errors import InputError
from memfit.sources.files import MAX_CONFIG_BYTES, MAX_DEPTH, printable, read_config_file, read_config_stream


def write(folder, data: bytes | str, name: str = "config.json") -> str:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(InputError) as caught:
        read_config_file(path)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_reads_an_object(tmp_path):
    value = {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}, "architectures": ["A"], "window": None}
    assert read_config_file(write(tmp_path, json.dumps(value))) == value


def test_tolerates_a_byte_order_mark_and_takes_the_last_of_duplicate_keys(tmp_path):
    assert read_config_file(write(tmp_path, b'\xef\xbb\xbf{"a": 1, "a": 2}')) == {"a": 2}


def test_reads_any_legal_number(tmp_path):
    assert read_config_file(write(tmp_path, '{"a": -1, "b": 1e-5, "c": 1000000000000000019884624838656, "d": 5.0}')) == {
        "a": -1, "b": 1e-5, "c": 1000000000000000019884624838656, "d": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ('{"a": 1,\n "b": ', "line 2, column 7: not JSON, it ends too early"),
        ('{"a": 1,\n "b": x}', "line 2, column 7: not JSON ("),
        ('{"a": 1}}', "line 1, column 9: not JSON"),
        ('{"a": "x\ny"}', "line 1, column 9: not JSON"),
        ("[1]", "a JSON array, not an object"),
        ("3", "a JSON number, not an object"),
        ('"x"', "a JSON string, not an object"),
        ("null", "JSON null, not an object"),
        ("true", "a JSON boolean, not an object"),
        ('{\n"a": 1e999}', "line 2: the number 1e999 is too large"),
        ('{"a":\n' + "9" * 5000 + "}", "line 2: a whole number of 5,000 digits"),
        ('{"a":\n' + "9" * 101 + "}", "line 2: a whole number of 101 digits"),
        (b'{"a":\n"\xff"}', "line 2: not UTF-8 text (byte 0xff)"),
        (b"\xff\xfe{\x00}\x00", "UTF-16"),
        (b"\x80\x04\x95pickle", "not UTF-8"),
        (b"{\x00}", "not JSON"),
        ("{\n" + '"a": {' * 200 + "}" * 201, "line 2: nested too deep"),
        ("[" * 1_000_000, "line 1: nested too deep"),
        ('{"a": [' + "[]," * 10 + "\n" + "[" * MAX_DEPTH, "line 2: nested too deep"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, data, words):
    path = write(tmp_path, data)
    text = refusal(path)
    assert words in text
    assert text.startswith(path)


def test_brackets_in_strings_are_no_nesting(tmp_path):
    value = {"a": "[" * 1000, 'b\\"{{{': '\\"[[[' * 100, "c": "\\"}
    assert read_config_file(write(tmp_path, json.dumps(value))) == value


def test_depth_up_to_the_limit_is_read(tmp_path):
    assert read_config_file(write(tmp_path, '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"))


@pytest.mark.parametrize("data", ['{"a": "' + '\\"' * 1_000_000, '{"' + "\\" * 2_000_001, '"' * 2_000_001])
def test_hostile_strings_take_no_long_time(tmp_path, data):
    started = time.perf_counter()
    refusal(write(tmp_path, data))
    assert time.perf_counter() - started < 5


def test_a_large_file_is_refused_without_being_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)  # sparse: 100 MiB without taking them on disk
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was read"))
    text = refusal(str(path))
    assert "104,857,600 bytes" in text
    assert "4 MiB" in text


def test_the_largest_file_is_read_and_one_byte_more_is_not(tmp_path):
    body = b'{"a": 1}'
    assert read_config_file(write(tmp_path, body + b" " * (MAX_CONFIG_BYTES - len(body)))) == {"a": 1}
    assert "4,194,305 bytes" in refusal(write(tmp_path, body + b" " * (MAX_CONFIG_BYTES - len(body) + 1)))


def test_a_file_that_hides_its_size_is_read_up_to_the_limit():
    # procfs says 0 bytes for every file, so only the bounded read can stop.
    path = f"/proc/{os.getpid()}/maps"
    if not os.path.exists(path):
        path = os.devnull
    assert path in refusal(path)


def test_folders_pipes_devices_and_sockets_are_refused_without_a_wait(tmp_path):
    assert "a folder, not a file" in refusal(str(tmp_path))
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    assert "a named pipe, not a file; give a file, or - to read standard input" in refusal(str(pipe))
    assert "a device, not a file" in refusal("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert "a socket, not a file" in refusal(str(tmp_path / "s"))


def test_a_pipe_put_in_place_of_the_file_does_not_block(tmp_path, monkeypatch):
    real, pipe = write(tmp_path, "{}"), tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open
    monkeypatch.setattr("os.open", lambda path, flags: opened(pipe, flags))
    assert "a named pipe" in refusal(real)


def test_loops_missing_files_and_forbidden_files(tmp_path, monkeypatch):
    loop = tmp_path / "loop.json"
    loop.symlink_to(tmp_path / "back.json")
    (tmp_path / "back.json").symlink_to(loop)
    assert "symbolic links form a loop" in refusal(str(loop))
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing.json")
    assert "no such file" in refusal(str(tmp_path / "dangling.json"))
    assert "no such file" in refusal(str(tmp_path / "none.json"))
    path = write(tmp_path, "{}")

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", forbidden)  # chmod would not stop the root user
    assert "permission denied" in refusal(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"metadata": {}, "weight_map": {}}, "the index of a checkpoint's weight files; give the config.json beside it"),
        ({"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "not of a model; give its base model (org/base)"),
        ({"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.30"}, "diffusers"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32}, "params.json of the original release"),
        ({"tokenizer_class": "LlamaTokenizer"}, "the config of a tokenizer"),
    ],
)
def test_other_json_files_are_named_for_what_they_are(tmp_path, value, words):
    assert words in refusal(write(tmp_path, json.dumps(value)))


def test_a_name_cannot_break_the_line(tmp_path):
    path = write(tmp_path, "[]", "a\nb\x1b[31m.json")
    assert "a\\nb\\x1b[31m.json" in refusal(path)
    assert printable("x" * 1000) == "x" * 100 + "..." + "x" * 100
    assert printable(os.fsdecode(b"\xff")) == "\\udcff"


def test_standard_input(monkeypatch):
    assert read_config_stream(io.BytesIO(b'{"a": 1}')) == {"a": 1}
    assert read_config_stream(io.StringIO('{"a": "é"}')) == {"a": "é"}
    with pytest.raises(InputError, match="standard input: empty"):
        read_config_stream(io.BytesIO(b""))
    with pytest.raises(InputError, match=r"standard input: more, but a config\.json has at most 4,194,304 bytes"):
        read_config_stream(io.BytesIO(b" " * (MAX_CONFIG_BYTES + 1)))
    terminal = io.BytesIO(b"{}")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    with pytest.raises(InputError, match="a terminal, nothing is piped into it"):
        read_config_stream(terminal)


def test_infinity_is_read_as_pythons_json_writes_it(tmp_path):
    # config.json of Mamba-2 checkpoints: "time_step_limit": [0.0, Infinity]
    config = {"model_type": "mamba2", "time_step_limit": [0.0, float("inf")], "a": float("nan")}
    found = read_config_file(write(tmp_path, json.dumps(config)))
    assert found["time_step_limit"] == [0.0, float("inf")]
    assert found["a"] != found["a"]
