"""The core needs nothing but the standard library, computes without input or output, and costs little to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import memfit

SOURCE = Path(memfit.__file__).parent
CORE = (
    "memfit.errors",
    "memfit.units",
    "memfit.options",
    "memfit.precision",
    "memfit.model",
    "memfit.families",
    "memfit.devices",
    "memfit.job",
    "memfit.runtimes",
    "memfit.kernels",
    "memfit.account",
    "memfit.fit",
    "memfit.records",
)
HEAVY = (
    "numpy",
    "rich",
    "rich_argparse",
    "argcomplete",
    "yaml",
    "huggingface_hub",
    "torch",
    "transformers",
    "importlib.metadata",
    "importlib.resources",
    "dataclasses",
    "inspect",
    "asyncio",
    "email",
    "urllib.request",
    "http.client",
)


def run(code: str, *options: str) -> str:
    """The output of a fresh interpreter that knows the package's source and nothing of this process."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SOURCE.parent), "PATH": ""}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(statements: str, *options: str) -> set[str]:
    """Modules that are there after the statements and were not before."""
    code = f"import json, sys\nbefore = set(sys.modules)\n{statements}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    return set(json.loads(run(code, *options)))


def test_the_core_imports_nothing_that_must_be_installed() -> None:
    """`-S`: no site-packages at all, so that a third-party import would fail; and only the standard library is loaded."""
    everything = "\n".join(f"import {name}" for name in CORE)
    found = {name.partition(".")[0] for name in loaded(everything, "-S")}
    assert found <= {*sys.stdlib_module_names, "memfit"}


def test_a_whole_answer_is_made_without_site_packages() -> None:
    code = """
from memfit.families import build_model
from memfit.devices import parse_cluster
from memfit.job import Job, Training, Inference, FineTuning
from memfit import fit
config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
"num_attention_heads": 4}
model = build_model(config, name="tiny", source="test")
for workload in (Training(), FineTuning(), Inference()):
    answer = fit.answer(Job(model=model, workload=workload, cluster=parse_cluster("4090")))
    print(answer.verdict.fits)
"""
    assert run(code, "-S").split() == ["yes", "yes", "yes"]


def test_importing_memfit_takes_nothing_heavy() -> None:
    found = loaded("import memfit")
    assert not found & set(HEAVY)
    assert {name for name in found if name.startswith("memfit")} <= {"memfit", "memfit._version"}


def test_importing_the_core_takes_nothing_heavy() -> None:
    found = loaded("import memfit.fit, memfit.account, memfit.devices, memfit.families, memfit.job")
    assert not found & set(HEAVY)


def test_a_family_is_imported_when_it_is_named() -> None:
    families = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "bert"}
    found = loaded("import memfit.fit, memfit.account, memfit.families")
    assert not found & {f"memfit.families.{name}" for name in families}
    config = '{"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_head": 2, "n_layer": 1}'
    found = loaded(
        f"import json\nfrom memfit.families import build_model\nbuild_model(json.loads('{config}'), name='t', source='t')"
    )
    assert {name.removeprefix("memfit.families.") for name in found} & families == {"gpt2"}


def test_the_core_neither_prints_nor_opens_anything_but_its_own_data() -> None:
    """Every file that is opened while an answer is made lies in the package; nothing is written, no socket, no process."""
    code = f"""
import sys
events = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        events.append((event, arguments[0], arguments[1]))
    elif event.partition(".")[0] in ("socket", "subprocess") or event in ("os.system", "os.remove", "os.mkdir"):
        events.append((event, "", ""))
from memfit.families import build_model
from memfit.devices import parse_cluster
from memfit.job import Job, Inference
from memfit import fit
sys.addaudithook(watch)
config = {{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
"num_attention_heads": 4}}
fit.answer(Job(model=build_model(config, name="tiny", source="test"), workload=Inference(), cluster=parse_cluster("4090")))
import os
library = os.path.dirname(os.__file__)
allowed = ({str(SOURCE)!r}, library)
for event, path, mode in events:
    assert event == "open" and path.startswith(allowed) and "w" not in (mode or "r"), (event, path, mode)
"""
    assert run(code, "-B") == ""
