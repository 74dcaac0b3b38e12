"""A job as the command line that asks it, for "what to run next"."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from memfit.job import Hardware, Inference, Job, Overheads, Parallelism
from memfit.options import options_of

if TYPE_CHECKING:
    from memfit.devices import Cluster


def command_line(asked: Job, edited: Job | None = None, *, resolved: Job | None = None, on: str | None = None) -> str:
    """The command that asks `asked`, with what `edited` changes against `resolved`, on another device if `on` is given.

    Values that memfit itself decided are left out, so that the command stays as short as what the user typed.
    """
    target = edited or asked
    values = _given(asked.workload, target.workload)
    if edited is not None and resolved is not None:
        changed = _changed(resolved.workload, edited.workload)
        values |= {name: value for name, value in changed.items() if not _follows(name, asked.workload, edited.workload)}
    words = ["memfit", target.workload.kind, *model_words(asked)]
    words += _flags(type(target.workload), values)
    words += _flags(Parallelism, _parallelism(asked, edited, resolved))
    words += _flags(Overheads, _given(asked.overheads, asked.overheads))
    if asked.headroom != options_of(Hardware)["headroom"].default:
        words += ["--headroom", f"{asked.headroom:g}"]
    where = on if on is not None else cluster_word(asked)
    if where:
        words += ["--on", shlex.quote(where)]
    return " ".join(words)


def _parallelism(asked: Job, edited: Job | None, resolved: Job | None) -> dict[str, Any]:
    """What was said of the layout, and what an edit changes of it. What follows from the devices and the rest is left out."""
    given = asked.parallelism
    values = _given(given, given)
    if edited is None or resolved is None or edited.parallelism == resolved.parallelism:
        return values
    target = edited.parallelism
    values |= _changed(resolved.parallelism, target)
    if target.zero == 3 and target.sharding == "fsdp2":
        values |= {"fsdp": True, "zero": None, "sharding": given.sharding}
    elif target.sharding == "deepspeed":
        values["sharding"] = given.sharding
    values["dp_replicate" if not target.zero and not given.dp_replicate else "dp_shard"] = None
    if given.dp_replicate is None and target.dp_replicate == 1:
        values["dp_replicate"] = None
    if not given.sp and not target.sp:
        values["sp"] = None
    if isinstance(edited.workload, Inference):
        values["zero"] = None
    return {name: value for name, value in values.items() if value is True or value != 1 or name == "zero"}


def model_words(job: Job) -> list[str]:
    """The MODEL argument as the user gave it, else the model's name."""
    given = job.model.facts.get("arguments")
    words = [str(word) for word in given] if isinstance(given, tuple) else [job.model.name]
    return [shlex.quote(word) for word in words]


def cluster_word(job: Job) -> str:
    """What to write after `--on`: `nvidia-h100-sxm-80gb`, `8xnvidia-h100-sxm-80gb`; empty without a device."""
    if job.cluster is None:
        return ""
    return cluster_words(job.cluster)


def cluster_words(cluster: Cluster) -> str:
    """A cluster as `--on` takes it, in the machines that it has where those are not the catalogue's."""
    count, nodes, usual = cluster.count, cluster.nodes, cluster.device.devices_per_node
    if nodes > 1 and count % nodes == 0 and cluster.device.kind == "gpu" and nodes != -(-count // (usual or count)):
        return f"{nodes}x{count // nodes}x{cluster.device.id}"
    return device_word(cluster.device.id, count)


def device_word(identifier: str, count: int) -> str:
    """A device and how many of it, as `--on` takes them."""
    return identifier if count == 1 else f"{count}x{identifier}"


def _given(source: Any, target: Any) -> dict[str, Any]:
    """Values of `source` that are not the defaults of their fields, as far as the class of `target` has them."""
    known = options_of(type(target))
    values = {name: (getattr(source, name), one.default) for name, one in options_of(type(source)).items()}
    return {name: value for name, (value, default) in values.items() if value != default and name in known}


def _changed(before: Any, after: Any) -> dict[str, Any]:
    """Fields that differ, or that only `after` has with a value of its own; `method` always: its default is one of many."""
    found = {}
    for name, one in options_of(type(after)).items():
        value = getattr(after, name)
        if hasattr(before, name):
            if getattr(before, name) != value:
                found[name] = value
        elif value != one.default or name == "method":
            found[name] = value
    return found


def _follows(name: str, asked: Any, edited: Any) -> bool:
    """Whether memfit decides the same value itself, when the user left it open: it need not be said."""
    if getattr(asked, name, None) is not None:
        return False
    if name == "prompt":
        return bool(edited.prompt == edited.context)
    if name == "target_seq":
        return bool(edited.target_seq == edited.seq)
    if name == "ddp":
        return True
    if name == "weight_dtype" and edited.kind != "infer":
        return str(edited.precision).endswith("-true")
    return False


def _flags(cls: type, values: dict[str, Any]) -> list[str]:
    words = []
    for name, one in options_of(cls).items():
        if name not in values or values[name] is None:
            continue
        value = values[name]
        if isinstance(value, bool):
            words.append(one.flag if value else "--no-" + one.flag[2:])
        else:
            words += [one.flag, shlex.quote(f"{value:g}" if isinstance(value, float) else str(value))]
    return words
