"""How many devices, of which type: the text after `--on`.

`4090` `8xh100-80gb` `h100-80gb:8` `2x8xh200` (2 machines of 8) `v5p-16` (a TPU slice) `m4-max-64` `24GiB` (an unnamed device)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memfit.devices.catalogue import LONGEST_NAME, Device, find_device, read_device
from memfit.errors import UsageError
from memfit.records import Record
from memfit.units import GiB, MiB, TiB, format_gib, parse_size

LARGEST_COUNT = 1_000_000
"""Devices; no cluster that exists is larger."""


class Cluster(Record):
    """`count` devices of one type, altogether, in `nodes` groups that share a fast interconnect (machines, TPU slices)."""

    device: Device
    count: int = 1
    nodes: int = 1
    reading: str = ""
    """What the text was read as, in one sentence."""

    @property
    def usable_bytes(self) -> int:
        """Usable memory of one device."""
        return self.device.usable_bytes

    @property
    def marketed_bytes(self) -> int:
        """Marketed memory of one device."""
        return self.device.marketed_bytes

    @property
    def devices_per_node(self) -> int:
        """Devices of one node; of the fullest one where they do not divide evenly."""
        return -(-self.count // self.nodes)


class _Slice(NamedTuple):
    """How one TPU generation counts: what the number after the hyphen means, and what the software sees of a chip."""

    device_id: str
    cores_per_number: int
    """2 where the number counts TensorCores (two a chip), 1 where it counts chips."""
    devices_per_chip: int
    """2 where each TensorCore has its own memory; 1 where the cores of a chip act as one (megacore) or there is one."""
    max_chips: int
    """Chips of the largest slice, a whole pod."""


_V5E = _Slice(device_id="tpu-v5e", cores_per_number=1, devices_per_chip=1, max_chips=256)
_V7X = _Slice(device_id="tpu-v7x", cores_per_number=2, devices_per_chip=2, max_chips=9216)
# Cloud TPU documentation (docs.cloud.google.com/tpu/docs: v2, v3, v4, v5e, v5p, v6e, tpu7x) and xpk's system characteristics,
# where tpu7x-128 is the 4x4x4 topology of 64 chips.
_SLICES = {
    "v2": _Slice(device_id="tpu-v2", cores_per_number=2, devices_per_chip=2, max_chips=256),
    "v3": _Slice(device_id="tpu-v3", cores_per_number=2, devices_per_chip=2, max_chips=1024),
    "v4": _Slice(device_id="tpu-v4", cores_per_number=2, devices_per_chip=1, max_chips=4096),
    "v5p": _Slice(device_id="tpu-v5p", cores_per_number=2, devices_per_chip=1, max_chips=8960),
    "v5e": _V5E,
    "v5litepod": _V5E,
    "v6e": _Slice(device_id="tpu-v6e", cores_per_number=1, devices_per_chip=1, max_chips=256),
    "v7x": _V7X,
    "v7": _V7X,
    "7x": _V7X,
}

_SIZE_UNITS = ("gib", "gb", "g", "mib", "mb", "m", "tib", "tb", "t")


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes; `reading` tells what it was read as.

    Raises:
        UsageError: an unknown device, a count that is not between 1 and 1,000,000, or a slice that does not exist.
    """
    stripped = text.strip().lower().replace("*", "x").replace("\u00d7", "x")  # the multiplication sign
    if not stripped or len(stripped) > LONGEST_NAME:
        raise UsageError(f"cannot read {text[:LONGEST_NAME]!r} as devices: write it like 4090, 8xh100-80gb, v5p-16 or 24GiB")
    rest, counts = _split_counts(stripped)
    for count in counts:
        _check_count(count, text)
    try:
        one = _unit(rest)
    except UsageError:
        rest, _, after = rest.rpartition("x")
        if not (rest and after.strip().isdecimal()):
            raise
        counts.append(int(after))
        _check_count(counts[-1], text)
        one = _unit(rest.strip())
    total = math.prod((one.num_devices, *counts))
    _check_count(total, text)
    return _assemble(one, counts, total)


def _split_counts(text: str) -> tuple[str, list[int]]:
    """`2x8xh200` -> `h200`, [2, 8]; `h100:8` -> `h100`, [8]. At most two counts in front and one behind."""
    counts: list[int] = []
    for _ in range(2):
        head, sign, tail = text.partition("x")
        if not (sign and tail and _is_number(head)):
            break
        counts.append(int(head))
        text = tail.strip()
    head, sign, tail = text.rpartition(":")
    if sign and head and _is_number(tail):
        counts.append(int(tail))
        text = head.strip()
    return text, counts


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _check_count(count: int, text: str) -> None:
    if count < 1:
        raise UsageError(f"{text.strip()!r}: the number of devices must be at least 1")
    if count > LARGEST_COUNT:
        raise UsageError(f"{text.strip()!r}: more than {LARGEST_COUNT:,} devices is taken for a typing error")


class _Unit(NamedTuple):
    """What stands behind the counts: one device, or one TPU slice of several."""

    device: Device
    num_devices: int
    group: str
    """What several of it are counted in: nodes | slices"""
    note: str
    """What the text could also have meant, or how it was counted."""


def _unit(text: str) -> _Unit:
    words = text.replace("_", "-").replace(" ", "-").removeprefix("google-").removeprefix("cloud-").removeprefix("tpu").strip("-")
    generation, _, number = words.partition("-")
    if generation in _SLICES and number.isdecimal():
        return _slice(generation, int(number), text)
    digits = text.rstrip("abgimt")
    if text[len(digits) :] in _SIZE_UNITS and digits[:1].isdecimal() and not digits.strip("0123456789_., "):
        return _Unit(_unnamed(text), 1, "nodes", _decimal_note(text))
    device, note = read_device(text)
    return _Unit(device, 1, "nodes", note)


def _slice(generation: str, number: int, name: str) -> _Unit:
    """A TPU slice: chips = number / (2 where it counts TensorCores), devices = chips x devices a chip."""
    kind = _SLICES[generation]
    if number < 1:
        raise UsageError(f"{name!r}: the number of devices must be at least 1")
    if number % kind.cores_per_number:
        raise UsageError(f"{name!r} is not a TPU slice: {generation} counts TensorCores, two a chip, so the number is even")
    chips = number // kind.cores_per_number
    if chips > kind.max_chips:
        largest = f"{generation}-{kind.max_chips * kind.cores_per_number}"
        raise UsageError(f"{name!r} is larger than a pod ({largest}): write several slices, such as 2x{largest}")
    counted = f"{chips} chip" if chips == 1 else f"{chips} chips"
    if kind.cores_per_number == 2:
        counted = f"{number} TensorCores, {counted}"
    seen = "two devices a chip" if kind.devices_per_chip == 2 else "one device a chip"
    note = f"the slice {name} has {counted}, {seen}"
    return _Unit(find_device(kind.device_id), chips * kind.devices_per_chip, "slices", note)


def _unnamed(text: str) -> Device:
    """A device of which only the usable memory is known."""
    size = parse_size(text)
    if not MiB <= size <= 16 * TiB:
        raise UsageError(f"{text!r} is no memory of one device: write it like 24GiB or 80GB")
    return Device(
        id=text.replace(" ", ""),
        name=f"unnamed device of {format_gib(size)}",
        vendor="",
        kind="size",
        marketed_bytes=size,
        usable_bytes=size,
        usable_basis="measured",
        usable_source="given",
    )


def _decimal_note(text: str) -> str:
    if text.endswith("ib") or not text.endswith("b"):
        return ""
    digits, letter = text[:-2].strip(), text[-2].upper()
    return f"{letter}B counts in powers of 1000, as written; {digits}{letter}iB is the binary size"


def _assemble(one: _Unit, counts: list[int], total: int) -> Cluster:
    device = one.device
    if one.group == "slices":
        nodes = total // one.num_devices
    elif len(counts) > 1:
        nodes = counts[0]
    elif device.devices_per_node:
        nodes = -(-total // device.devices_per_node)
    else:
        nodes = 1
    per_node = "" if nodes in (1, total) else f" in {nodes} {one.group} of {-(-total // nodes)}"
    usable = "" if device.kind == "size" else f", {device.usable_bytes / GiB:.2f} GiB usable" + (" each" if total > 1 else "")
    note = f" ({one.note})" if one.note else ""
    return Cluster(device=device, count=total, nodes=nodes, reading=f"{total:,} x {device.title}{per_node}{usable}{note}")
