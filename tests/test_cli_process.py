"""The command line as a process: what start-up imports, closed pipes, interrupts, encodings, completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_main import LLAMA

import memfit

SOURCE = str(Path(memfit.__file__).parent.parent)
HEAVY = ("numpy", "rich", "rich_argparse", "argcomplete", "yaml", "huggingface_hub", "importlib.metadata", "importlib.resources",
         "torch", "difflib", "tempfile", "csv")  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONIOENCODING", "_ARGCOMPLETE", "MEMFIT_DEBUG")
    base = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**base, "PYTHONPATH": SOURCE, "HF_HUB_OFFLINE": "1", **changes}


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memfit", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment(**changes), check=False, timeout=120
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


JSON_LINES = ["infer CONFIG --on 4090 --json", "train CONFIG --json", "devices --json", "CONFIG --json", ""]


@pytest.mark.parametrize("line", JSON_LINES)
def test_the_json_path_imports_nothing_heavy(line: str, config: str) -> None:
    words = [config if word == "CONFIG" else word for word in line.split()]
    program = (
        "import sys, io; from memfit.cli import main; out = sys.stdout; sys.stdout = io.StringIO();"
        f"code = main({words!r}); text = sys.stdout.getvalue(); sys.stdout = out;"
        "import json; print(json.dumps([code, len(text), sorted(sys.modules)]))"
    )
    # -S: site-packages may hold .pth files that import things of their own.
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=environment(), check=True)
    code, length, modules = json.loads(done.stdout)
    assert code == 0
    assert length > 100
    found = {name for name in modules if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)}
    assert not found


def test_bare_memfit_loads_neither_the_fields_nor_argparse() -> None:
    program = (
        "import sys; from memfit.cli import main; main([]);"
        "print('memfit.job' in sys.modules, 'argparse' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=environment(), check=True)
    assert done.stderr.split() == ["False", "False"]


def test_a_closed_pipe_is_quiet_and_0() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "devices", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # like `| head`, before the first byte
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert error == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    for words in (["devices", "--json"], []):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "memfit", *words]
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False, timeout=120
            )
        assert done.returncode == 1
        assert done.stderr.startswith("memfit: error: cannot write the result to standard output")
        assert done.stderr.count("\n") == 1


def closed(redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command with one of the standard streams closed by the shell."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "memfit", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=120)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_closed_standard_streams_are_one_line(config: str, tmp_path: Path) -> None:
    for words in (["infer", config, "--json"], ["infer", config], ["devices"], [], ["infer", "-h"]):
        done = closed(">&-", *words)
        assert done.returncode == 1
        assert done.stderr == "memfit: error: standard output is closed: open it, or name a file with --output\n"
    done = closed("<&-", "infer", "-", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("memfit: error: standard input: closed")
    done = closed("2>&-", "infer", "no-such-model", "--json")
    assert (done.returncode, done.stdout) == (2, "")  # standard output is for results only
    path = tmp_path / "answer.json"
    assert closed(">&- 2>&- <&-", "infer", config, "--output", str(path)).returncode == 0
    assert json.loads(path.read_text(encoding="utf-8"))["schema_version"] == 1


def test_config_from_standard_input() -> None:
    command = [sys.executable, "-m", "memfit", "infer", "-", "--json"]
    done = subprocess.run(
        command, input=json.dumps(LLAMA), capture_output=True, text=True, env=environment(), check=True, timeout=120
    )
    assert json.loads(done.stdout)["model"]["parameters"] == 8_030_261_248


def test_an_ascii_terminal_gets_ascii(config: str) -> None:
    done = run("train", config, "--on", "4090", PYTHONIOENCODING="ascii", COLUMNS="80")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "###" in done.stdout
    commands = ("    memfit ", "    python: ", "    nvidia-smi ")  # are never broken
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(commands)) <= 80


def test_a_name_that_the_encoding_lacks_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    for form in ("table", "markdown", "csv", "json"):
        done = run("infer", str(folder), "--format", form, PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()


def test_output_in_a_pipe_has_no_colour_unless_forced(config: str) -> None:
    assert "\x1b" not in run("infer", config, "--on", "4090", TERM="xterm").stdout
    assert "\x1b[" in run("infer", config, "--on", "4090", FORCE_COLOR="1").stdout
    assert "\x1b" not in run("infer", config, "--on", "4090", "--no-color", FORCE_COLOR="1").stdout


def test_exit_codes_of_the_process() -> None:
    assert run("--version").returncode == 0
    assert run("infer", "missing/config.json").returncode == 1
    bad = run("trian", "7B")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "memfit: error: unknown command 'trian' (did you mean 'train'?)\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("memfit fin", "finetune"), ("memfit train --optimizer paged", "paged-adamw-8bit"), ("memfit infer --kv-d", "--kv-dtype")],
)
def test_shell_completion(line: str, expected: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    changes = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
               "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}  # fmt: skip
    run(**changes)
    assert expected in answers.read_text(encoding="utf-8")
