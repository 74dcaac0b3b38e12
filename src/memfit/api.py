"""The public facade: the only place where a string becomes a model, a cluster or a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from memfit.errors import InputError, UsageError, did_you_mean
from memfit.job import WORKLOADS, Dimensions, Hardware, Inference, Job, Overheads, Parallelism, Training, Workload
from memfit.options import Options, build, checked, options_of
from memfit.units import format_count

if TYPE_CHECKING:
    from memfit.account.estimate import Estimate
    from memfit.devices import Cluster
    from memfit.fit.answer import Answer
    from memfit.fit.overview import Overview
    from memfit.job import Assumption
    from memfit.model import Model

T = TypeVar("T", Overheads, Parallelism)

__all__ = ["answer", "estimate", "load_model", "make_job", "make_workload", "overview"]


def load_model(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None, *, dimensions: Dimensions | Mapping[str, Any] | None = None
) -> Model:
    """A model from what the user names, or from its size or dimensions.

    Args:
        source: a preset, a Hub id, a path to a `config.json` or to a folder with one, `-`, a size such as `7B`, or the config
            itself as a mapping.
        dimensions: the model without a config (`params=7e9`, or `layers`, `hidden`, `heads` ...); beside a size they shape it,
            beside any other `source` only `head` is taken.

    Raises:
        InputError: the source cannot be read, or its architecture is not known.
        UsageError: neither or both are given, or the dimensions do not make a model.
    """
    given = _dimensions(dimensions)
    if source is None or source == "":
        return _model_without_config(given)
    from memfit.families import build_model

    if isinstance(source, Mapping):
        _refuse_both(given)
        name = source.get("_name_or_path") or source.get("model_type") or "model"
        return build_model(source, name=str(name)[:200], source="a config given as a mapping", head=given.head, image=given.image)
    text = os.fspath(source)
    if not isinstance(text, str):
        raise InputError("the path of a model is text, not bytes")
    from memfit.sources import load_config

    loaded = load_config(text)
    if loaded.parameters is not None and given.params is None:
        # A size: dimensions beside it are those of a model of that size.
        return _model_without_config(given.replace(params=loaded.parameters))
    _refuse_both(given)
    model = build_model(loaded.config, name=loaded.name, source=loaded.source, head=given.head, image=given.image)
    words = (text, *_given_flags(Dimensions(head=given.head, image=given.image)))
    return _said_how(model, words, loaded.assumptions)


def _dimensions(dimensions: Dimensions | Mapping[str, Any] | None) -> Dimensions:
    if dimensions is None:
        return Dimensions()
    return checked(dimensions) if isinstance(dimensions, Dimensions) else build(Dimensions, dimensions)


def _given_flags(dimensions: Dimensions) -> list[str]:
    """`--layers 32 --hidden 4096` in words, for the fields that were given."""
    words: list[str] = []
    for name, one in options_of(Dimensions).items():
        value = getattr(dimensions, name)
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(one.flag if value else "--no-" + one.flag[2:])
        else:
            words += [one.flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _refuse_both(dimensions: Dimensions) -> None:
    flags = [word for word in _given_flags(dimensions.replace(head=None, image=None)) if word.startswith("--")]
    if flags:
        raise UsageError(f"a model was named, so {', '.join(flags)} cannot change it: leave out one or the other")


def _model_without_config(given: Dimensions) -> Model:
    words = tuple(_given_flags(given))
    if not words:
        raise UsageError("which model? Name a preset, a Hub id or a config.json, or give --params, or --layers and --hidden")
    from memfit import families

    if given.activation_elements is not None:
        if given.params is None:
            raise UsageError("--activation-elements needs --params: the number of parameters")
        others = _given_flags(given.replace(params=None, activation_elements=None))
        if others:
            raise UsageError(f"counts say nothing of layers: leave out {others[0]} or --activation-elements")
        return _said_how(families.from_counts(given.params, given.activation_elements), words)
    from memfit.families.sizes import COUNT_TOLERANCE, config_for_dimensions

    sized = config_for_dimensions(given)
    by_dimensions = f"{sized.config['model_type']} by dimensions"
    name = format_count(given.params) if given.params is not None else by_dimensions
    source = "size and dimensions on the command line"
    model = families.build_model(sized.config, name=name, source=source, head=given.head, image=given.image)
    if given.params is not None and abs(model.num_parameters / given.params - 1) > COUNT_TOLERANCE:
        model = model.replace(name=by_dimensions)  # not the name of a size that the dimensions do not make
    model = model.replace(relative_uncertainty=sized.relative_uncertainty, stated_parameters=sized.parameters)
    return _said_how(model, words, sized.assumptions)


def _said_how(model: Model, words: tuple[str, ...], assumptions: Sequence[Assumption] = ()) -> Model:
    """The model with the words that name it on a command line (for "what to run next") and what its source assumed."""
    facts = {**model.facts, "arguments": words}
    return model.replace(facts=facts, assumptions=(*assumptions, *model.assumptions))


def make_workload(workload: Workload | Mapping[str, Any]) -> Workload:
    """A workload from a mapping with its `kind` (train, finetune or infer) and any of the fields of that kind.

    Raises:
        UsageError: it is neither a workload nor a mapping, the kind or a field is unknown, or a value is refused.
    """
    if isinstance(workload, Training | Inference):
        return checked(workload)
    if not isinstance(workload, Mapping):
        raise UsageError(f"a workload is Training, FineTuning, Inference or a mapping with a kind, not {workload!r:.100}")
    kind = str(workload.get("kind", ""))
    known = {**WORKLOADS, "serve": WORKLOADS["infer"]}
    if kind not in known:
        raise UsageError(f"unknown kind of workload {kind!r}{did_you_mean(kind, known)}; it is train, finetune or infer")
    return build(known[kind], {name: value for name, value in workload.items() if name != "kind"})


def make_job(
    model: Model | str | os.PathLike[str] | Mapping[str, Any],
    workload: Workload | Mapping[str, Any],
    *,
    on: str | Cluster | None = None,
    headroom: float | str | None = None,
    overheads: Overheads | Mapping[str, Any] | None = None,
    parallelism: Parallelism | Mapping[str, Any] | None = None,
) -> Job:
    """The whole question. Raises `InputError` or `UsageError` for what cannot be read."""
    share = options_of(Hardware)["headroom"]
    return Job(
        model=_as_model(model),
        workload=make_workload(workload),
        overheads=_as(Overheads, overheads),
        cluster=_as_cluster(on),
        headroom=share.default if headroom is None else share.parse(headroom),
        parallelism=_as(Parallelism, parallelism),
    )


def _as_model(model: Model | str | os.PathLike[str] | Mapping[str, Any]) -> Model:
    if isinstance(model, str | os.PathLike | Mapping):
        return load_model(model)
    if not hasattr(model, "num_parameters"):
        raise InputError(f"a model is a Model, a name, a path or a config as a mapping, not {model!r:.100}")
    return model


def _as(cls: type[T], given: T | Mapping[str, Any] | None) -> T:
    if given is None:
        return cls()
    return checked(given) if isinstance(given, Options) else build(cls, given)


def _as_cluster(on: str | Cluster | None) -> Cluster | None:
    if isinstance(on, str):
        from memfit.devices import parse_cluster

        if "," in on:
            raise UsageError(f"--on {on[:60]!r} names several devices: one here; the overview takes a list (memfit fit MODEL)")
        return parse_cluster(on)
    if on is not None and not hasattr(on, "usable_bytes"):
        raise UsageError(f"devices are a text such as 8xh100-80gb or a Cluster, not {on!r:.100}")
    return on


def answer(
    model: Model | str | os.PathLike[str] | Mapping[str, Any],
    workload: Workload | Mapping[str, Any],
    *,
    on: str | Cluster | None = None,
    headroom: float | str | None = None,
    overheads: Overheads | Mapping[str, Any] | None = None,
    parallelism: Parallelism | Mapping[str, Any] | None = None,
) -> Answer:
    """Will it fit, what are the limits, and what is the smallest change that makes it fit?

    Args:
        model: a model, or what `load_model` takes.
        workload: `Training`, `FineTuning`, `Inference`, or a mapping such as `{"kind": "train", "batch": 4}`.
        on: the devices (`"8xh100-80gb"`, `"4090"`, `"24GiB"`); without them there is no verdict.
        headroom: share of the usable memory that is to stay free; a tenth if not given.
        overheads: the runtime, and what it takes beside the tensors, set by hand.
        parallelism: degrees such as `{"tp": 8}` or `{"fsdp": True}`; what is left open is decided from the devices.

    Raises:
        InputError, UsageError: what cannot be read or used. A job that does not fit is an answer, not an error.
    """
    from memfit import fit

    return fit.answer(make_job(model, workload, on=on, headroom=headroom, overheads=overheads, parallelism=parallelism))


def estimate(
    model: Model | str | os.PathLike[str] | Mapping[str, Any],
    workload: Workload | Mapping[str, Any],
    *,
    on: str | Cluster | None = None,
    headroom: float | str | None = None,
    overheads: Overheads | Mapping[str, Any] | None = None,
    parallelism: Parallelism | Mapping[str, Any] | None = None,
) -> Estimate:
    """The memory alone: components, phases and peak of every rank. Arguments and errors as in `answer`."""
    from memfit import account

    job = make_job(model, workload, on=on, headroom=headroom, overheads=overheads, parallelism=parallelism)
    return account.estimate(account.resolve(job).job)


def overview(
    model: Model | str | os.PathLike[str] | Mapping[str, Any],
    on: str | Cluster | Sequence[str | Cluster] | None = None,
    *,
    headroom: float | str | None = None,
    overheads: Overheads | Mapping[str, Any] | None = None,
) -> Overview:
    """Which ways of using a model fit on the devices `on`, or on a row of common GPUs."""
    from memfit import account
    from memfit.fit import overview as table

    share = options_of(Hardware)["headroom"]
    return table.overview(
        _as_model(model),
        _clusters(on),
        overheads=_as(Overheads, overheads),
        headroom=share.default if headroom is None else share.parse(headroom),
        resolve=account.resolve,
        estimate=account.estimate,
    )


def _clusters(on: str | Cluster | Sequence[str | Cluster] | None) -> list[Cluster]:
    from memfit.devices import Cluster

    if on is None:
        from memfit.devices.catalogue import common_devices

        return [Cluster(device=one, reading=f"1 x {one.title}") for one in common_devices() if one.kind == "gpu"]
    if isinstance(on, str):
        # Several devices in one text: `--on 4090,h100`.
        found = [_as_cluster(part) for part in on.split(",")]
    elif isinstance(on, Sequence):
        found = [_as_cluster(part) for part in on]
    else:
        found = [on]
    return [one for one in found if one is not None]
