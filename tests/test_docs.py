"""The documentation is executed: commands, the output that is shown, Python blocks, worked numbers, links.

How a page is written so that this file can hold it to its word:

- A line of a `console` block that starts with `memfit` is run. A `text` block right after it shows (part of) its output: every
  line must occur in the real output in that order; `...` stands for lines left out. `python tests/doc_pages.py` updates it.
- The `python` blocks of README.md, docs/python.md and docs/extending.md are run in order in one namespace. A comment
  `<!-- file: src/memfit/families/NAME.py -->` before a block makes it that module, registered as the family NAME.
- `1,234 <!-- check: EXPRESSION -->` compares the number before the comment with an expression over the functions below.
- A line `32,776 + 10,368 = 43,144` in a `text` block is calculated.
"""

from __future__ import annotations

import functools
import io
import re
import socket
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from doc_pages import (
    EXAMPLES,
    FORMULAS,
    LINK,
    NOT_RUN,
    PAGES,
    ROOT,
    Command,
    calculated,
    checks,
    commands,
    lay_out,
    missing_lines,
    name_of,
    prose,
    run,
    slug,
    sums,
    with_output,
)

import memfit
from memfit import families, kernels
from memfit.account import overheads
from memfit.account.estimate import COMPONENTS, CacheUse, Component, Estimate, Peak, Phase, Rank
from memfit.account.forms import Form, parts
from memfit.account.intervals import SAFE_OVER_HIGH_PERCENT
from memfit.account.liveness import Accumulation, BlockMemory, measure
from memfit.account.optimizers import OPTIMIZERS, Trained, find_optimizer
from memfit.account.sharding import Buckets
from memfit.account.states import state_bytes, step_scratch
from memfit.fit.answer import Answer, Kernel, Limit, Recommendation, RuleOfThumb, Step, Verdict
from memfit.fit.answer import Warning as Caution
from memfit.job import Assumption, Hardware, Overheads, Parallelism
from memfit.kernels import Adapter, KernelPolicy, lower
from memfit.kernels import modules as kernel_modules
from memfit.kernels.ring import Ring, scratch
from memfit.kernels.tape import Tape
from memfit.model import AXES, TOKEN, Model
from memfit.parallel.stages import in_flight
from memfit.parallel.tensor import split_tensors
from memfit.precision import QUANTIZED, training_policy
from memfit.runtimes import RUNTIMES
from memfit.units import GiB, KiB, MiB

EXECUTED = ("README.md", "docs/python.md", "docs/extending.md")


# Commands and what they print


COMMANDS = [one for page in PAGES for one in commands(page)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config.json as a user has it, no network, a terminal of 100 columns without colour."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "MEMFIT_DEBUG", "_ARGCOMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", _no_network)
    return tmp_path


def _no_network(self: socket.socket, address: Any) -> None:
    raise AssertionError(f"an example went to the network: {address!r}")


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{name_of(one.page)}:{one.number}:{one.text[:60]}" for one in COMMANDS])
def test_every_command_in_the_documentation_works(command: Command, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command.text in NOT_RUN:
        pytest.skip(NOT_RUN[command.text])
    code, printed = run(command.text)
    errors = capsys.readouterr().err
    assert code == 0, errors
    if command.shown is not None:
        missing = missing_lines(command.shown.lines, printed)
        where = f"{name_of(command.page)}:{command.shown.number}"
        assert not missing, f"{where} shows what is not printed (python tests/doc_pages.py updates it): {missing}"


def test_what_is_not_run_is_still_there() -> None:
    assert set(NOT_RUN) <= {one.text for one in COMMANDS}


REFUSED = [
    tuple(re.findall(r"`([^`]+)`", line)[:2])
    for line in (ROOT / "docs/tasks/several-devices.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `memfit ")
]


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_what_is_refused_says_so(command: str, message: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(command)
    assert code == 2
    assert capsys.readouterr().err.strip() == f"memfit: error: {message}"


# Python blocks


@pytest.mark.parametrize("name", EXECUTED)
def test_every_python_block_runs(name: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    monkeypatch.setattr(kernel_modules, "ACTIVATIONS", dict(kernel_modules.ACTIVATIONS))
    namespace: dict[str, Any] = {}
    ran = 0
    for block, shown in with_output((ROOT / name).read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        code = compile("\n".join(block.lines) + "\n", f"{name}:{block.number}", "exec", dont_inherit=True)
        ran += 1
        if block.comment.startswith("<!-- file: "):
            register_family(block.comment.removeprefix("<!-- file: ").removesuffix(" -->"), code, monkeypatch)
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, namespace)
        if shown is not None:
            assert not missing_lines(shown.lines, printed.getvalue()), f"{name}:{shown.number}: {printed.getvalue()}"
    assert ran


def register_family(path: str, code: types.CodeType, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, file = path.rpartition("/")
    assert folder == "src/memfit/families"
    family = file.removesuffix(".py")
    module = types.ModuleType(f"memfit.families.{family}")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    families.FAMILIES[family] = family


# Worked numbers


@functools.cache
def answer_of(model: str, kind: str, on: str | None, given: tuple[tuple[str, Any], ...]) -> memfit.Answer:
    words = dict(given)
    parallelism = {name: words.pop(name) for name in list(words) if name in Parallelism.options}
    overheads = {name: words.pop(name) for name in list(words) if name in Overheads.options}
    return memfit.answer(model, {"kind": kind, **words}, on=on, parallelism=parallelism, overheads=overheads)


def job(model: str, kind: str, on: str | None = None, **given: Any) -> memfit.Answer:
    """The answer for a model and a workload; degrees and the runtime are given beside the workload's inputs."""
    return answer_of(model, kind, on, tuple(given.items()))


def part(component: str, model: str, kind: str, on: str | None = None, **given: Any) -> int:
    """Bytes of one component, at its largest."""
    return next(one.bytes for one in job(model, kind, on, **given).estimate.worst.components if one.name == component)


def model_states(model: str, kind: str, on: str | None = None, **given: Any) -> int:
    """Bytes of weights, gradients, master weights and optimizer states, as they meet in the optimizer's step."""
    phases = job(model, kind, on, **given).estimate.worst.phases
    step = next(one.components for one in phases if one.name == "optimizer-step" and not one.first_step)
    return sum(step.get(name, 0) for name in ("weights", "gradients", "master_weights", "optimizer_states"))


@functools.cache
def _ranks(model: str, kind: str, degrees: tuple[tuple[str, Any], ...], given: tuple[tuple[str, Any], ...]) -> tuple[Rank, ...]:
    return memfit.estimate(model, {"kind": kind, **dict(given)}, parallelism=dict(degrees)).ranks


def rank(number: int, model: str, kind: str, degrees: dict[str, Any], **given: Any) -> Rank:
    """One of the distinct ranks of a job over several devices."""
    return _ranks(model, kind, tuple(degrees.items()), tuple(given.items()))[number]


def component(of: Rank, name: str) -> int:
    """Bytes of one component of a rank, at its largest."""
    return next(one.bytes for one in of.components if one.name == name)


def ring_bytes(implementation: str, degree: int, q: int, kv: int, heads: int) -> int:
    """What a token of 16-bit attention takes in forward for the keys of the other devices."""
    tape = Tape(training_policy("bf16-true", None))
    tensors = [tape.tensor(TOKEN, width, "bf16") for width in (q, kv, kv)]
    [(_, size)], _ = scratch(Ring(implementation, degree), *tensors, heads)
    return size


def phase(name: str, model: str, kind: str, on: str | None = None, **given: Any) -> int:
    """Allocated bytes at the largest moment of one phase, in steady state."""
    phases = job(model, kind, on, **given).estimate.worst.phases
    return next(one.allocated_bytes for one in phases if one.name == name and not one.first_step)


def measured(model: str, role: str = "layers", precision: str = "bf16-true", outputs: bool = True, **policy: Any) -> BlockMemory:
    """The first block of a part of a model, run symbolically."""
    found = memfit.load_model(model)
    segment = next(one for one in found.segments if one.role == role)
    rules = KernelPolicy(precision=training_policy(precision, None), **policy)
    lowered = lower(segment.blocks[0], rules, input_requires_grad=True, input_dtype=rules.precision.weight)
    return measure(lowered, accumulation=Accumulation(), outputs_kept=outputs, is_last=role == "head")


def kept(model: str, axis: str = "token", role: str = "layers", precision: str = "bf16-true", **policy: Any) -> int:
    """Bytes that one block keeps for backward, for each unit of an axis."""
    return sum(value for _, at, value in parts(measured(model, role, precision, **policy).kept) if AXES[at] == axis)


def chain(model: str, when: str, precision: str = "bf16-true", outputs: bool = True) -> float:
    """Bytes of the logits' chain for each token and vocabulary entry at its largest: `forward`, `kept` or `backward`."""
    memory = measured(model, "head", precision, outputs)
    states: tuple[Form, ...] = (memory.kept,) if when == "kept" else getattr(memory, when)
    tokens = [sum(value for name, axis, value in parts(state) if name == "logits" and AXES[axis] == "token") for state in states]
    return max(tokens) // memfit.load_model(model).vocab_size


def on_one_of(degree: int, model: str, sequence: bool = False) -> Model:
    """A model as one of so many tensor-parallel devices holds it."""
    return split_tensors(memfit.load_model(model), degree, sequence=sequence)


def kept_on_one_of(degree: int, model: str, sequence: bool = False, **policy: Any) -> int:
    """Bytes that a layer on one of them keeps for backward, for each token."""
    (block,) = on_one_of(degree, model, sequence).segments[1].blocks
    rules = KernelPolicy(precision=training_policy("bf16-true", None), collectives="functional", **policy)
    lowered = lower(block, rules, input_requires_grad=True, input_dtype="bf16")
    memory = measure(lowered, accumulation=Accumulation(), outputs_kept=False, is_last=False)
    return sum(value for _, at, value in parts(memory.kept) if AXES[at] == "token")


ADAPTER = {"train_all": False, "adapter": Adapter(16, "fp32", 0.0), "adapter_targets": ("all-linear",)}
ADAPTER_BF16 = {**ADAPTER, "adapter": Adapter(16, "bf16", 0.0)}
ADAPTER_DROPOUT = {**ADAPTER, "adapter": Adapter(16, "fp32", 0.05)}
CHECKED = {
    **{name: value for name, value in globals().items() if isinstance(value, types.FunctionType)},
    "QUANTIZED": QUANTIZED, "Trained": Trained, "state_bytes": state_bytes, "step_scratch": step_scratch, "memfit": memfit,
       "Hardware": Hardware,
       "find_optimizer": find_optimizer, "overheads": overheads, "Buckets": Buckets, "GiB": GiB, "MiB": MiB, "KiB": KiB,
       "SAFE_OVER_HIGH_PERCENT": SAFE_OVER_HIGH_PERCENT, "ADAPTER": ADAPTER, "ADAPTER_BF16": ADAPTER_BF16,
       "ADAPTER_DROPOUT": ADAPTER_DROPOUT, "kernels": kernels, "in_flight": in_flight,
}  # fmt: skip
"""What a check may use."""

CHECKS = [one for page in PAGES for one in checks(page)]


@pytest.mark.parametrize(("stated", "expression", "where"), CHECKS, ids=[f"{where} {text[:60]}" for _, text, where in CHECKS])
def test_worked_numbers_are_what_memfit_computes(stated: str, expression: str, where: str) -> None:
    value = eval(expression, dict(CHECKED))
    digits = len(stated.partition(".")[2])
    assert f"{value:.{digits}f}" == stated, f"{where}: {expression} is {value}"


VERDICTS = {"yes": "yes", "fits": "yes", "tight": "tight", "no": "no", "does not fit": "no"}
VERDICT = re.compile(r"check: (job\([^>]*?\))\.estimate\.peak\.device_bytes.*\| (yes|fits|tight|no|does not fit)\b[^|]*\|$")
JUDGED = [
    (*found.groups(), f"{name_of(page)}:{number}")
    for page in EXAMPLES
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    if (found := VERDICT.search(line))
]


@pytest.mark.parametrize(("expression", "stated", "where"), JUDGED, ids=[where for _, _, where in JUDGED])
def test_the_verdict_of_a_table_is_that_of_its_peak(expression: str, stated: str, where: str) -> None:
    assert eval(expression, dict(CHECKED)).verdict.fits == VERDICTS[stated], where


SUMS = sums()


@pytest.mark.parametrize(("text", "result", "where"), SUMS, ids=[where for _, _, where in SUMS])
def test_worked_sums_add_up(text: str, result: str, where: str) -> None:
    stated = result.replace(",", "").rstrip(".")
    digits = len(stated.partition(".")[2])
    assert f"{calculated(text):.{digits}f}" == stated, where


def test_the_calculator_knows_the_order_of_operations() -> None:
    assert calculated("2 x (8 x 2,048 + 4) + 12 / 4 - 1") == 32_778


# What every page must have


@pytest.mark.parametrize("page", FORMULAS, ids=[page.stem for page in FORMULAS])
def test_a_formula_page_has_a_checked_number_a_source_and_its_limits(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert list(checks(page))
    assert [where for _, _, where in SUMS if where.startswith(name_of(page) + ":")]
    assert re.search(r"^## Sources?$", text, re.MULTILINE)
    assert re.search(r"^## Not covered$", text, re.MULTILINE)


STEPS_OF_AN_EXAMPLE = [
    "Inputs", "By hand", "What memfit says", "What to do", "What is assumed, and the interval", "Verify",
]  # fmt: skip


@pytest.mark.parametrize("page", EXAMPLES, ids=[page.stem for page in EXAMPLES])
def test_a_worked_example_goes_from_the_inputs_to_a_number_by_hand_to_what_to_do(page: Path) -> None:
    headings = [line.removeprefix("## ") for line in prose(page.read_text(encoding="utf-8")) if line.startswith("## ")]
    assert [one for one in headings if one in STEPS_OF_AN_EXAMPLE] == STEPS_OF_AN_EXAMPLE
    assert list(checks(page))
    assert [one for one in commands(page) if one.shown is not None]
    assert [where for _, _, where in SUMS if where.startswith(name_of(page) + ":")]
    assert f"({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


def words_in(page: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8")))


def test_the_pages_name_everything_there_is() -> None:
    assert set(COMPONENTS) <= words_in("docs/concepts.md")
    assert set(OPTIMIZERS) <= words_in("docs/formulas/gradients-and-optimizer.md")
    assert set(QUANTIZED) <= words_in("docs/formulas/weights.md")
    assert set(RUNTIMES) <= words_in("docs/concepts.md")
    assert set(kernel_modules.ACTIVATIONS) <= words_in("docs/formulas/activations.md")


RESULTS: list[type[Any]] = [
    Answer, Verdict, Limit, Recommendation, RuleOfThumb, Caution, Step, Assumption, Estimate, Rank, Component, Phase, Peak,
    CacheUse, Kernel,
]  # fmt: skip


@pytest.mark.parametrize("record", RESULTS, ids=[record.__name__ for record in RESULTS])
def test_the_python_page_names_every_field_of_every_result(record: Any) -> None:
    missing = set(record.field_names) - words_in("docs/python.md")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose(page.read_text(encoding="utf-8"))))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{name_of(page)}: {target}"
        if anchor:
            headings = [one.lstrip("#") for one in prose(goal.read_text(encoding="utf-8")) if one.startswith("#")]
            assert anchor in {slug(one) for one in headings}, f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=name_of)
def test_the_project_speaks_of_itself_alone(page: Path) -> None:
    found = re.findall(r"(?i)/work\b|\bshared/|\bhelpers?\b|\bsessions?\b", page.read_text(encoding="utf-8"))
    assert not found
