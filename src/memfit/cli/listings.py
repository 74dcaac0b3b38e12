"""The commands that list what memfit knows: devices, models, schemas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memfit.cli.output import Document
from memfit.cli.parser import Request
from memfit.errors import UsageError, did_you_mean
from memfit.report import listing
from memfit.report.listing import Field, Listing
from memfit.report.payload import SCHEMA_VERSION, json_value
from memfit.report.text import version

if TYPE_CHECKING:
    from memfit.devices import Device

_ANSWER_SCHEMA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", "answer.schema.json")


def _document(made: Listing) -> Document:
    return Document(
        table=lambda look, explain: listing.listing_text(made, look),
        data=lambda: listing.listing_json(made),
        csv=lambda: listing.listing_csv(made),
        markdown=lambda: listing.listing_markdown(made),
    )


def _wrap(name: str, rows: Any) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "memfit_version": version(), name: rows}


def _details(title: str, values: Mapping[str, Any], data: Any) -> Listing:
    """One thing, field by field. Sizes and rates are shown with their unit, `_bytes` is dropped from the name."""
    rows = []
    for key, value in values.items():
        if value is None or value in ((), [], {}, ""):
            continue
        kinds = ((key.endswith("_bytes"), "bytes"), (key.endswith("_bytes_s"), "rate"), (key == "year", "number"), (True, "text"))
        kind = next(kind for matches, kind in kinds if matches)
        label = key.removesuffix("_bytes_s").removesuffix("_bytes").replace("_", " ")
        rows.append({"field": label, "value": listing.show(kind, value)})
    return Listing(title=title, fields=(Field("field", "field"), Field("value", "value", wrap=True)), rows=rows, data=data)


def _device_row(device: Device) -> dict[str, Any]:
    row = {name: json_value(getattr(device, name)) for name in device.field_names}
    return {**row, "peak_flops": dict(device.peak_flops)}


def devices(request: Request) -> Document:
    """The catalogue, or one device and how its name was read."""
    from memfit.devices import all_devices, parse_cluster

    if request.argument is None:
        rows = [{**_device_row(one), "title": one.title} for one in all_devices()]
        fields = (Field("id", "id"), Field("title", "name", wrap=True), Field("kind", "kind", in_table=False),
                  Field("marketed_bytes", "marketed", "bytes"), Field("usable_bytes", "usable", "bytes"),
                  Field("usable_basis", "basis", in_table=False), Field("bandwidth_bytes_s", "bandwidth", "rate"),
                  Field("year", "year", "number", in_table=False))  # fmt: skip
        note = "Usable is what one process is offered; 'memfit devices NAME' shows one device and where its figures come from."
        title = f"{len(rows)} devices"
        return _document(Listing(title=title, fields=fields, rows=rows, data=_wrap("devices", rows), notes=(note,)))
    from memfit.devices.catalogue import device_sources

    cluster = parse_cluster(request.argument)
    device = cluster.device
    sources = dict(device_sources(device))
    values = {"reading": cluster.reading, "count": cluster.count, "nodes": cluster.nodes, **_device_row(device)}
    data = _wrap("device", {**values, "sources": json_value(sources)})
    shown = {**values, "peak_flops": [f"{dtype} {rate / 10**12:g} TFLOP/s" for dtype, rate in device.peak_flops],
             "compute_capability": ".".join(str(part) for part in device.compute_capability or ())}  # fmt: skip
    shown.update({f"source of {key}": _source_text(value) for key, value in dict(sources.get("sources", {})).items()})
    return _document(_details(cluster.reading or device.title, shown, data))


def _source_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(_source_text(one) for one in value)
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_source_text(one)}" for key, one in value.items())
    return str(value)


def _kernel_rows(names: tuple[str, ...]) -> list[dict[str, Any]]:
    from memfit.kernels.sets import KERNEL_SETS

    rows = []
    for one in [KERNEL_SETS[name] for name in names]:
        other = "modelled, compared with no run" if one.widths else "compared with runs"
        compared = f"compared with {one.compared}" if one.compared else other
        rows.append({"name": one.name, "description": one.description, "families": list(one.families or ()), "basis": compared,
                     "source": one.source})  # fmt: skip
    return rows


def runtimes(request: Request) -> Document:
    """All runtimes, or one with its kernel sets and releases."""
    from memfit.precision import MIXED_SCHEMES
    from memfit.runtimes import EARLIER, RUNTIMES, find_runtime

    counted = {name: list(one.methods) or ["train", "finetune", "infer"] for name, one in RUNTIMES.items()}
    releases = {
        name: [".".join(map(str, row.since)) for row in EARLIER if row.name == name and any(row.since)] for name in RUNTIMES
    }
    if request.argument is None:
        rows = [
            {"name": one.name, "version": one.version, "kernels": one.kernels, "kernel_sets": list(one.kernel_sets),
             "counted_for": counted[one.name], "mixed_precision": one.mixed, "description": one.description,
             "earlier_releases": releases[one.name], "source": one.source}
            for one in RUNTIMES.values()
        ]  # fmt: skip
        fields = (Field("name", "name"), Field("version", "release"), Field("kernel_sets", "kernels"),
                  Field("counted_for", "counted for", wrap=True), Field("description", "what it is", wrap=True),
                  Field("mixed_precision", "mixed precision", in_table=False),
                  Field("kernels", "default kernels", in_table=False),
                  Field("earlier_releases", "earlier", in_table=False), Field("source", "source", in_table=False))  # fmt: skip
        note = "'memfit runtimes NAME' shows one with its sources; --runtime NAME@RELEASE asks for an earlier release."
        return _document(Listing(title=f"{len(rows)} runtimes", fields=fields, rows=rows,
            data={**_wrap("runtimes", rows), "kernel_sets": _kernel_rows(tuple(_all_sets()))}, notes=(note,)))  # fmt: skip
    name = request.argument.partition("@")[0]
    if name not in RUNTIMES:
        raise UsageError(f"no runtime {name[:64]!r}{did_you_mean(name, list(RUNTIMES))}; there are {', '.join(RUNTIMES)}")
    one = find_runtime(request.argument)
    sets = _kernel_rows(one.kernel_sets)
    values = {"name": one.name, "release": one.version, "description": one.description, "counted_for": counted[name],
              "adamw_means": one.adamw, "outputs": one.outputs, "mixed_precision": MIXED_SCHEMES[one.mixed].why or one.mixed,
              **{f"only_{field}": list(known) for field, known in one.only},
              "earlier_releases": [f"{name}@{release}" for release in releases[name]], "source": one.source}  # fmt: skip
    data = _wrap("runtime", {**values, "kernel_sets": sets})
    shown = dict(values)
    for row in sets:
        default = " (its default)" if row["name"] == one.kernels else ""
        families = f"; for {', '.join(row['families'])}" if row["families"] else ""
        shown[f"kernels {row['name']}"] = f"{row['description']}{families}; {row['basis']}{default}"
    return _document(_details(f"{one.name} {one.version}", shown, data))


def _all_sets() -> list[str]:
    from memfit.kernels.sets import KERNEL_SETS

    return list(KERNEL_SETS)


def models(request: Request) -> Document:
    """The presets, or one model in detail."""
    if request.argument is not None:
        return _model(request.argument)
    from memfit.families import FAMILIES
    from memfit.sources import all_presets

    rows = [
        {"name": one.name, "family": one.family, "parameters": one.parameters, "hub_id": one.hub_id, "aliases": list(one.aliases),
         "source": one.source}
        for one in all_presets()
    ]  # fmt: skip
    fields = (Field("name", "name"), Field("family", "family"), Field("parameters", "parameters", "count"),
              Field("hub_id", "on the Hub"), Field("aliases", "also", in_table=False))  # fmt: skip
    families = sorted(FAMILIES)
    return _document(Listing(title=f"{len(rows)} presets", fields=fields, rows=rows,
        data={**_wrap("models", rows), "families": families},
        notes=(f"Any config.json or Hub id of these architecture families works too: {', '.join(families)}.",)))  # fmt: skip


_MODEL_FIELDS = ("name", "family", "architecture", "kind", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
                 "vocab_size", "max_positions", "dtype", "source")  # fmt: skip


def _model(name: str) -> Document:
    from memfit import api

    model = api.load_model(name)
    values = {"num_parameters": model.num_parameters, **{key: getattr(model, key) for key in _MODEL_FIELDS}}
    assumed = [{"name": one.name, "value": json_value(one.value), "why": one.why, "flag": one.flag} for one in model.assumptions]
    data = _wrap("model", {**{key: json_value(value) for key, value in values.items()}, "assumptions": assumed})
    shown = {**values, **{f"assumed {one['name']}": f"{one['value']} ({one['why']})" for one in assumed}}
    return _document(_details(f"{model.name}: {model.num_parameters:,} parameters", shown, data))


INPUT_KINDS = ("train", "finetune", "infer")


def input_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of the inputs of `memfit train`, `finetune` or `infer`: the fields of the registry and `model`."""
    from memfit.job import WORKLOADS, Dimensions, Hardware, Overheads, Parallelism
    from memfit.options import json_schema

    schema = json_schema(WORKLOADS[kind], f"memfit {kind}")
    properties: dict[str, Any] = {
        "model": {
            "type": "string",
            "description": "A preset, a Hub id, a path to a config.json or its folder, or a size such as 7B",
        }
    }
    properties.update(schema["properties"])
    for cls in (Parallelism, Hardware, Overheads, Dimensions):
        properties.update(json_schema(cls, "")["properties"])
    return {**schema, "properties": properties}


def schema(request: Request) -> Document:
    """The JSON Schema of an input, of all of them, or of the answer."""
    import json

    kind = request.argument
    known = (*INPUT_KINDS, "answer")
    if kind is not None and kind not in known:
        raise UsageError(f"no schema {kind[:64]!r}{did_you_mean(kind, known)}; there are {', '.join(known)}")
    if kind == "answer":
        with open(_ANSWER_SCHEMA, encoding="utf-8") as file:
            made = json.load(file)
    elif kind is not None:
        made = input_schema(kind)
    else:
        made = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "memfit",
            "oneOf": [{"$ref": f"#/$defs/{one}"} for one in INPUT_KINDS],
            "$defs": {one: {key: value for key, value in input_schema(one).items() if key != "$schema"} for one in INPUT_KINDS},
        }
    properties = made.get("properties", {})
    rows = [
        {"name": name, "type": _type_text(one), "default": one.get("default"), "description": one.get("description")}
        for name, one in properties.items()
    ]
    fields = (Field("name", "name"), Field("type", "type"), Field("default", "default"),
              Field("description", "description", wrap=True))  # fmt: skip
    rows_listing = Listing(title=str(made["title"]), fields=fields, rows=rows, data=made)
    # A schema is for programs: its plain form is the JSON text itself.
    text = json.dumps(made, indent=2) + "\n"
    return Document(
        table=lambda look, explain: text,
        data=lambda: made,
        csv=lambda: listing.listing_csv(rows_listing),
        markdown=lambda: listing.listing_markdown(rows_listing),
    )


def _type_text(one: Mapping[str, Any]) -> str:
    kind = one.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
