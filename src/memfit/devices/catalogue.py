"""The accelerators that memfit knows: one row of `data/devices.json` each, found by the many ways in which people write a name.

`devices.json` holds the numbers; `device_sources.json` holds where each number comes from and is read only when asked for.
Marketed and usable memory are kept apart: see docs/devices.md.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from memfit.errors import UsageError, did_you_mean
from memfit.records import Record
from memfit.units import GiB

_DATA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data")

LONGEST_NAME = 100
"""Characters; nothing that names a device or a cluster is longer."""

_VENDOR_WORDS = ("nvidia", "geforce", "rtx", "tesla", "radeon", "instinct", "apple", "google", "tpu")
_NOISE = frozenset((*_VENDOR_WORDS, "quadro", "amd", "intel", "aws", "cloud", "gb", "gib", "generation", "edition", "series"))


class Device(Record):
    """One accelerator as the software that runs a job sees it: a GPU, a TPU device, a chip with unified memory."""

    id: str
    name: str
    vendor: str
    kind: str
    """gpu | tpu | npu | unified (memory shared with the CPU) | size (an unnamed device of a given size)"""
    marketed_bytes: int
    """The vendor's label in units of 2^30 bytes: every vendor's GB of device memory is binary."""
    usable_bytes: int
    """What the driver, torch, XLA or Metal offers to one process."""
    usable_basis: str
    """measured (a reading of this device) | assumed (derived from a sibling)"""
    usable_source: str
    """The reading or the rule behind `usable_bytes`, in words."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA only."""
    architecture: str | None = None
    """AMD only: the compiler target, `gfx942`."""
    memory_type: str | None = None
    bandwidth_bytes_s: int | None = None
    peak_flops: tuple[tuple[str, int], ...] = ()
    """Dense peak rates in operations per second, by format."""
    interconnect: str | None = None
    host_bus: str | None = None
    native_dtypes: tuple[str, ...] = ()
    year: int | None = None
    devices_per_node: int = 8
    """How many share one machine and its fast interconnect; 0 when the number of them is the buyer's choice (a TPU slice)."""

    def peak_rate(self, dtype: str) -> int | None:
        """Dense peak operations per second in `dtype` (`bf16`, `fp8`, ...), or `None` where it is not known."""
        return dict(self.peak_flops).get(dtype)

    @property
    def title(self) -> str:
        """The name with its marketed memory: `GeForce RTX 4090 24GB`."""
        _, label, behind = self.name.partition("GB")
        has_memory = bool(label) and not behind[:1].isdigit()  # not the GB of GB200
        return self.name if has_memory or self.kind == "size" else f"{self.name} {self.marketed_bytes / GiB:g}GB"


def normal_form(text: str) -> str:
    """What two spellings of one name have in common: `NVIDIA GeForce RTX 4090`, `rtx_4090` and `4090` all give `4090`.

    Lower case; vendor words, separators and the unit after a memory size are dropped. No regular expressions: this runs at
    every start, and compiling one costs more than the whole lookup.
    """
    spaced = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower())
    name = "".join(_without_unit(word) for word in spaced.split() if word not in _NOISE)
    for vendor in _VENDOR_WORDS:
        name = name.removeprefix(vendor)
    return _without_unit(name) if name.endswith("b") else name


def _without_unit(word: str) -> str:
    """`80gb` -> `80`; also `h10080gb` -> `h10080`, but `a10g` stays: a lone `g` is a unit only behind nothing but digits."""
    for unit in ("gib", "gb"):
        if word.endswith(unit) and word.removesuffix(unit)[-1:].isdigit():
            return word.removesuffix(unit)
    return word[:-1] if word.endswith("g") and word[:-1].isdigit() else word


class _Catalogue(NamedTuple):
    rows: Mapping[str, Mapping[str, Any]]
    names: Mapping[str, str]
    """Normal form of a name -> id."""
    short: Mapping[str, tuple[str, str]]
    """Normal form of a name that several devices share -> id of the one it is read as, and what else it could mean."""


@functools.cache
def _catalogue() -> _Catalogue:
    with open(os.path.join(_DATA, "devices.json"), encoding="utf-8") as file:
        data = json.load(file)
    rows: dict[str, Mapping[str, Any]] = {}
    names: dict[str, str] = {}
    short: dict[str, tuple[str, str]] = {name: (found[0], found[1]) for name, found in data["short"].items()}
    for row in data["devices"]:
        if "memories" not in row:
            rows[row["id"]] = row
            for name in row["names"]:
                names[name] = row["id"]
            continue
        sizes = [memory[0] for memory in row["memories"]]
        for size in sizes:
            rows[f"{row['id']}-{size}gb"] = row
            for name in row["names"]:
                names[f"{name}{size}"] = f"{row['id']}-{size}gb"
        others = ", ".join(f"{row['id']}-{size}" for size in sizes[1:])
        note = f"the smallest memory; also sold as {others}" if others else ""
        for name in row["names"]:
            short[name] = (f"{row['id']}-{sizes[0]}gb", note)
    return _Catalogue(rows, names, short)


@functools.cache
def _device(device_id: str) -> Device:
    row = _catalogue().rows[device_id]
    name = row["name"]
    if "memories" in row:
        size = int(device_id.rsplit("-", 1)[1].removesuffix("gb"))
        _, usable, basis, source = next(memory for memory in row["memories"] if memory[0] == size)
        marketed: float = size
        name = f"{name} {size}GB"
    else:
        marketed, usable, basis, source = (row[key] for key in ("marketed_gib", "usable_bytes", "usable_basis", "usable_source"))
    capability = row.get("compute_capability")
    bandwidth = row.get("bandwidth_gb_s")
    whole_machine = {"unified": 1, "tpu": 0}.get(row["kind"], 8)
    return Device(
        id=device_id,
        name=name,
        vendor=row["vendor"],
        kind=row["kind"],
        marketed_bytes=round(marketed * GiB),
        usable_bytes=usable,
        usable_basis=basis,
        usable_source=source,
        compute_capability=(capability[0], capability[1]) if capability else None,
        architecture=row.get("architecture"),
        memory_type=row.get("memory_type"),
        bandwidth_bytes_s=round(bandwidth * 10**9) if bandwidth else None,
        peak_flops=tuple((dtype, round(rate * 10**12)) for dtype, rate in row.get("peak_tflops", {}).items()),
        interconnect=row.get("interconnect"),
        host_bus=row.get("host_bus"),
        native_dtypes=tuple(row.get("native_dtypes", ())),
        year=row.get("year"),
        devices_per_node=row.get("per_node", whole_machine),
    )


def all_devices() -> tuple[Device, ...]:
    """Every device of the catalogue, in its order; a chip with unified memory once per memory size."""
    return tuple(_device(device_id) for device_id in _catalogue().rows)


def read_device(text: str) -> tuple[Device, str]:
    """The device that `text` names, and what else the text could have meant (empty when it is exact).

    Raises:
        UsageError: no device of the catalogue has such a name, or it has another memory size.
    """
    catalogue = _catalogue()
    name = normal_form(text) if len(text) <= LONGEST_NAME and ":" not in text else ""
    if name in catalogue.names:
        return _device(catalogue.names[name]), ""
    if name in catalogue.short:
        device_id, note = catalogue.short[name]
        return _device(device_id), note
    raise UsageError(_unknown(text, name, catalogue))


def find_device(name: str) -> Device:
    """The device of a name or an id: `4090`, `NVIDIA A100-SXM4-80GB`, `h100`, `m4-max-64`. Raises `UsageError`."""
    return read_device(name)[0]


def _unknown(text: str, name: str, catalogue: _Catalogue) -> str:
    """The refusal: another memory size of a known device, a size without its unit, or an unknown name."""
    shown = text.strip()[:LONGEST_NAME]
    sized = re.match(r"^(.*[^\s_-])[\s_-]+([0-9]+)\s*(?:gib|gb|g)?$", shown.lower())
    if sized:
        base, size = sized.groups()
        known = sorted({_device(one).marketed_bytes // GiB for one in _of_family(normal_form(base), catalogue)})
        if known:
            sizes = ", ".join(str(one) for one in known)
            return f"{base!r} is known with {sizes} GB, not {size} GB; write {size}GiB for an unnamed device of that size"
    if shown.isdecimal():
        return f"{shown!r} is no device and has no unit: write {shown}GiB for an unnamed device with that much usable memory"
    hint = did_you_mean(shown, [*catalogue.rows, *catalogue.short])
    return f"unknown device {shown!r}{hint}; `memfit devices` lists them, and a size such as 24GiB stands for an unnamed device"


def _of_family(name: str, catalogue: _Catalogue) -> Iterator[str]:
    """Ids of the devices called `name`, or `name` and a memory size."""
    if not name:
        return
    for known, device_id in catalogue.names.items():
        if known == name or (known.startswith(name) and known[len(name) :] == str(_device(device_id).marketed_bytes // GiB)):
            yield device_id
    if name in catalogue.short:
        yield catalogue.short[name][0]


def device_sources(device: Device) -> Mapping[str, Any]:
    """Where each number of `device` comes from: `sources` by field, `readings`, `other_readings` and `notes`."""
    found = _sources()["devices"].get(_catalogue().rows[device.id]["id"] if device.id in _catalogue().rows else device.id, {})
    return dict(found)


@functools.cache
def _sources() -> dict[str, Any]:
    with open(os.path.join(_DATA, "device_sources.json"), encoding="utf-8") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


COMMON = ("rtx-4090", "rtx-5090", "l40s", "a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200", "mi300x",
          "tpu-v5e", "tpu-v6e", "m4-max-64gb")  # fmt: skip
"""The row of an overview."""

_OFFERED = (*COMMON, "t4", "l4", "rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-3090", "rtx-pro-6000-blackwell", "b300",
            "mi325x", "mi355x", "tpu-v5p", "tpu-v7x", "m4-32gb", "m4-pro-48gb", "m4-max-128gb", "m3-ultra-256gb",
            "m3-ultra-512gb")  # fmt: skip
"""Beside them, what one can commonly rent or buy: the devices among which the smallest is looked for."""


def common_devices() -> tuple[Device, ...]:
    """A row of common devices for an overview, small to large within a vendor."""
    return tuple(_device(device_id) for device_id in COMMON)


def smallest_holding(num_bytes: int, headroom: float = 0.0) -> tuple[Device, ...]:
    """The smallest commonly offered device of each vendor that holds `num_bytes` with a share `headroom` left free.

    Ordered by usable memory; empty when no single device holds it.
    """
    smallest: dict[str, Device] = {}
    for device in sorted((_device(one) for one in _OFFERED), key=lambda one: one.usable_bytes):
        if device.usable_bytes * (1 - headroom) >= num_bytes:
            smallest.setdefault(device.vendor, device)
    return tuple(smallest.values())
