"""Runs the whole corpus, or the groups that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memfit.errors import UsageError, did_you_mean
from memfit.validate import corpus, generations, operations, parameters, serving, sharded, torchtitan, traces, training
from memfit.validate.reasons import NO_CONFIG, reason_for
from memfit.validate.report import Group, LeftOut, Outcome, Report, Row

PARTS = (
    "parameters", "kept", "traced", "inference", "heldout", "releases", "kernels", "operations", "training", "sharded", "serving",
)  # fmt: skip
"""What `groups` may name: parts of the corpus."""

_KEPT = (
    "Bytes of tensors that autograd holds when forward and loss have run, without parameters and buffers: the real Hugging Face "
    "class under fake tensors on CUDA's dispatch path (torch 2.14, transformers 5.24)."
)
_TRACED = (
    "A whole training step of the real Hugging Face class under fake tensors and PyTorch's MemTracker: an ideal allocator, no "
    "libraries (torch 2.13, transformers 5.24). The error is a share of what is neither parameters nor optimizer states."
)
_KEPT_FAKE = "Bytes of tensors that autograd holds when forward and loss have run, under fake tensors on CUDA's dispatch path."
_TRACED_FAKE = "A whole training step under fake tensors and PyTorch's MemTracker: an ideal allocator, no libraries."
_HELDOUT = " These rows were made after the code, with varied settings, to find where it is wrong."


def _group(name: str, title: str, metric: str, kind: str, about: str, rows: list[Row]) -> list[Group]:
    """One group with its rows worst first and their reasons; none without rows."""
    if not rows:
        return []
    ordered = sorted(rows, key=lambda row: (-abs(row.error_percent), row.id))
    noted = tuple(replace(row, note=reason_for(name, row)) for row in ordered)
    return [Group(name=name, title=title, metric=metric, kind=kind, about=about, rows=noted)]


class _Collected:
    """What the parts add to."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.outcomes: list[Outcome] = []
        self.left_out: list[LeftOut] = []


def _parameters(into: _Collected) -> None:
    about = "Parameters of the class that the config names, tied ones once, against the real class built on the meta device."
    into.groups += _group("parameters", "Parameters", "parameters", "exact", about, parameters.parameter_rows())


def _kept_part(into: _Collected, file: str, name: str, title: str, about: str) -> None:
    rows, left_out = traces.kept_rows(corpus.rows(file), file)
    into.left_out += left_out
    into.groups += _group(name, title, "kept bytes", "exact", about, rows)


def _traced_part(into: _Collected, file: str, name: str, title: str, about: str) -> None:
    rows, left_out = traces.traced_rows(corpus.rows(file), file)
    into.left_out += left_out
    for moment in traces.MOMENTS:
        into.groups += _group(f"{name} {moment}", f"{title}: {moment}", "allocated", "traced", about, rows[moment])


def _kept(into: _Collected) -> None:
    _kept_part(into, "kept", "kept", "Kept for backward", _KEPT)


def _traced(into: _Collected) -> None:
    _traced_part(into, "traced", "traced", "Traced step", _TRACED)


def _inference(into: _Collected) -> None:
    rows, left_out = generations.compare(corpus.rows("traced_inference"), "traced_inference")
    into.left_out += left_out
    for phase in generations.PHASES:
        title = f"Traced inference: {phase}"
        into.groups += _group(f"traced inference {phase}", title, "allocated", "traced", generations.ABOUT, rows[phase])


def _heldout(into: _Collected) -> None:
    _kept_part(into, "heldout_kept", "held-out kept", "Held out, kept for backward", _KEPT + _HELDOUT)
    _traced_part(into, "heldout_traced", "held-out traced", "Held out, traced step", _TRACED + _HELDOUT)


_RELEASE = (
    " The classes of transformers 4.57, asked with `--runtime hf@4.57`: with the cache object that config.use_cache builds, and "
    "without it, where its search for packed sequences makes a mask."
)
_KERNEL_SET = " The same classes with Liger's kernels in place, asked with `--kernels liger`; the kernels write nothing."


def _releases(into: _Collected) -> None:
    _kept_part(into, "release_kept", "release kept", "transformers 4.57, kept for backward", _KEPT_FAKE + _RELEASE)
    _traced_part(into, "release_traced", "release traced", "transformers 4.57, traced step", _TRACED_FAKE + _RELEASE)


def _kernels(into: _Collected) -> None:
    _kept_part(into, "liger_kept", "liger kept", "Liger, kept for backward", _KEPT_FAKE + _KERNEL_SET)
    _traced_part(into, "liger_traced", "liger traced", "Liger, traced step", _TRACED_FAKE + _KERNEL_SET)


def _operations(into: _Collected) -> None:
    rows = operations.compare(corpus.rows("operations"))
    into.groups += _group("operations", "Liger's benchmark of operations", "allocated", "measured", operations.ABOUT, rows)


_MODE_TITLES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def _training(into: _Collected) -> None:
    found = training.compare(corpus.rows("training"), "training")
    for framework in training.FRAMEWORKS:
        metric = "reserved" if framework.name == "peft" else "allocated"
        for mode in training.MODES.values():
            name = f"{framework.name} {mode}"
            title, rows = f"{framework.title}, {_MODE_TITLES[mode]}", found.rows.get(name, [])
            into.groups += _group(name, title, metric, "measured", framework.about, rows)
    about = "Allocated between steps, as the Trainer reports it: weights, optimizer states and cuBLAS workspaces."
    steady = found.rows.get("trainer steady", [])
    into.groups += _group("trainer steady", "Hugging Face SFTTrainer, between steps", "allocated", "measured", about, steady)
    about = "The peak that nvidia-smi showed for the same runs: the allocator's unused blocks and the driver's context are in it."
    device = found.rows.get("trainer device", [])
    into.groups += _group("trainer device", "Hugging Face SFTTrainer, nvidia-smi", "device total", "measured", about, device)
    into.outcomes += found.outcomes
    into.left_out += found.left_out
    counts = corpus.collection()["training"]
    for key, reason in (("several_devices", "it ran on several devices"), ("other_models", NO_CONFIG)):
        into.left_out.append(LeftOut(id=key.replace("_", " "), file="training", reason=reason, count=counts[key]))


def _sharded(into: _Collected) -> None:
    for moment, rows in sharded.traced_rows(corpus.rows("sharded_traced")).items():
        title = f"Traced step under fully_shard: {moment}"
        into.groups += _group(f"fsdp2 traced {moment}", title, "allocated", "traced", sharded.TRACED_ABOUT, rows)
    found = sharded.measured_rows(corpus.rows("sharded_training"))
    for name, (title, metric, about) in sharded.GROUPS.items():
        into.groups += _group(name, title, metric, "measured", about, found[name])
    reserved = torchtitan.rows(corpus.rows("torchtitan"))
    into.groups += _group("torchtitan", "torchtitan's benchmarks", "reserved", "measured", torchtitan.ABOUT, reserved)


def _serving(into: _Collected) -> None:
    rows, left_out = serving.compare(corpus.rows("serving"), "serving")
    for name, weights in (("generate 16-bit", "16-bit weights"), ("generate 4-bit", "GPTQ and AWQ")):
        into.groups += _group(
            name, f"Generation with transformers, {weights}", "allocated", "measured", serving.ABOUT, rows[name]
        )
    into.left_out += left_out
    engines = corpus.collection()["serving"]["other_engines"]
    into.left_out.append(LeftOut(id="other engines", file="serving", reason="it ran on another engine", count=engines))


_RUNNERS: dict[str, Callable[[_Collected], None]] = {
    "parameters": _parameters,
    "kept": _kept,
    "traced": _traced,
    "inference": _inference,
    "heldout": _heldout,
    "releases": _releases,
    "kernels": _kernels,
    "operations": _operations,
    "training": _training,
    "sharded": _sharded,
    "serving": _serving,
}


def run(groups: Sequence[str] | None = None) -> Report:
    """Compare memfit with the corpus.

    Args:
        groups: parts of the corpus, of `PARTS`; all if not given.

    Raises:
        UsageError: a part that does not exist.
        InputError: this installation does not carry the corpus.
    """
    wanted = PARTS if groups is None else tuple(groups)
    for name in wanted:
        if name not in _RUNNERS:
            raise UsageError(f"no part {name[:64]!r} of the corpus{did_you_mean(name, PARTS)}; there are {', '.join(PARTS)}")
    into = _Collected()
    for name in PARTS:
        if name in wanted:
            _RUNNERS[name](into)
    return Report(groups=tuple(into.groups), outcomes=tuple(into.outcomes), left_out=tuple(into.left_out), notes=NOTES)


NOTES = (
    "Errors are predicted - measured; statistics are over their size. Nothing is fitted to a row.",
    "A measured run is one figure of a program that differs from the counted one in the ways that its group names.",
)
