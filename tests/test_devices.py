"""The catalogue and the ways of writing a cluster. Expected values come from the sources named beside them, or by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.devices import (
    Device,
    all_devices,
    common_devices,
    device_sources,
    find_device,
    parse_cluster,
    smallest_holding,
)
from memfit.devices.catalogue import normal_form
from memfit.errors import UsageError

DATA = Path(__file__).parent.parent / "src" / "memfit" / "data"
GiB = 1 << 30
MiB = 1 << 20


def catalogue_file() -> dict:
    return json.loads((DATA / "devices.json").read_text())


def sources_file() -> dict:
    return json.loads((DATA / "device_sources.json").read_text())


# --- numbers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "usable_bytes"),
    [
        ("h100-80gb", 81082 * MiB),  # torch: 81082 MiB = 79.18 GiB
        ("h100-pcie", 81008 * MiB),
        ("4090", round(23.64 * GiB)),  # torch OOM text
        ("h200", 143156 * MiB),
        ("b200", 182642 * MiB),
        ("a100-80gb", round(79.25 * GiB)),
        ("a100-40gb", round(39.59 * GiB)),
        ("l4", round(22.04 * GiB)),
        ("mi300x", (192 * 1024 - 16) * MiB),  # HIP: 196592 MiB
        ("v5e", round(15.75 * GiB)),  # XLA
        ("v6e", round(31.25 * GiB)),
        ("v3", round(15.48 * GiB)),  # of one TensorCore
        ("m4-max-64", 55_662_790_000),  # Metal: recommendedMaxWorkingSetSize = 55662.79 MB, MB of 10^6 bytes
        ("m4-max-128", 115_448_730_000),
        ("m1-16", 11_453_250_000),
    ],
)
def test_usable_memory_is_what_the_driver_reports(name: str, usable_bytes: int) -> None:
    assert find_device(name).usable_bytes == usable_bytes


def test_labels_are_binary() -> None:
    assert find_device("h100").marketed_bytes == 85_899_345_920
    assert find_device("4090").marketed_bytes == 25_769_803_776
    # nvidia-smi shows 81559 MiB on an "80 GB" H100: more than 80e9 bytes, so the label cannot be decimal
    assert 81559 * MiB > 80 * 10**9


def test_v5p_has_96_gib_although_it_is_sold_as_95_gb() -> None:
    device = find_device("v5p")
    assert device.usable_bytes == round(95.74 * GiB) > 95 * GiB
    assert device.marketed_bytes == 96 * GiB


def test_share_of_an_apple_machine() -> None:
    device = find_device("m4-max-64")
    assert device.marketed_bytes == 64 * GiB
    assert device.usable_bytes / device.marketed_bytes == pytest.approx(0.81, abs=0.001)  # 53084 of 65536 MiB
    assert device.kind == "unified"


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.id)
def test_every_device_is_plausible(device: Device) -> None:
    assert 0 < device.usable_bytes <= device.marketed_bytes
    # Metal leaves a third of a small machine to the CPU (macOS 15: exactly 2/3); everyone else leaves at most 8 %
    assert device.usable_bytes >= device.marketed_bytes * (0.666 if device.vendor == "apple" else 0.91)
    assert device.usable_basis in ("measured", "assumed")
    assert device.usable_source
    assert device.kind in ("gpu", "tpu", "npu", "unified")
    rates = dict(device.peak_flops)
    assert set(rates) <= {"fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"}
    for low, high in (("bf16", "fp8"), ("fp8", "fp4"), ("fp32", "bf16")):
        if low in rates and high in rates:
            assert rates[low] <= rates[high], f"{low} above {high}: a sparse rate, or one of another unit?"
    if device.bandwidth_bytes_s is not None:
        assert 10**10 < device.bandwidth_bytes_s < 10**13


def test_peak_rates_are_dense() -> None:
    # NVIDIA's data sheet prints 1979 TFLOPS with sparsity for the H100 SXM
    assert find_device("h100").peak_rate("bf16") == pytest.approx(989.5e12, rel=0.001)
    assert find_device("a100").peak_rate("bf16") == 312 * 10**12
    assert find_device("h100").peak_rate("fp4") is None
    assert find_device("h100").bandwidth_bytes_s == pytest.approx(3.35e12, rel=0.01)
    assert find_device("h100").compute_capability == (9, 0)
    assert find_device("mi300x").architecture == "gfx942"


def test_two_devices_of_a_chip_share_it_in_halves() -> None:
    chip = {"v2": (16, 46e12), "v3": (32, 123e12), "v7x": (192, 2307e12)}  # Cloud TPU docs, per chip
    for name, (gib, rate) in chip.items():
        device = find_device(name)
        assert device.marketed_bytes == gib * GiB // 2
        assert device.peak_rate("bf16") == rate / 2


# --- the data files --------------------------------------------------------------------------------------------------------


def test_ids_and_names_are_unique_and_in_normal_form() -> None:
    ids = [device.id for device in all_devices()]
    assert len(ids) == len(set(ids)) > 98
    data = catalogue_file()
    assert len(data["devices"]) == 98
    names = [name for row in data["devices"] for name in row["names"]] + list(data["short"])
    assert len(names) == len(set(names))
    for name in names:
        assert normal_form(name) == name, f"write {normal_form(name)!r} instead of {name!r}"
    for row in data["devices"]:
        assert normal_form(row["id"]) in row["names"], row["id"]


def test_every_id_name_and_short_name_resolves() -> None:
    for device in all_devices():
        assert find_device(device.id) is device
    data = catalogue_file()
    for row in data["devices"]:
        for name in row["names"]:
            assert find_device(name).name.startswith(row["name"])
    for name, (device_id, _) in data["short"].items():
        assert find_device(name).id == device_id


def test_usable_memory_agrees_with_the_readings_kept_beside_it() -> None:
    """A measured value lies at most 3 % below the largest reading kept and never above it (0.1 % for rounding)."""
    sources = sources_file()["devices"]
    checked = 0
    for row in catalogue_file()["devices"]:
        readings = sources[row["id"]].get("readings", {})
        largest = max(readings.get("nvidia_smi_total_mib", 0) * MiB, readings.get("torch_total_gib", 0) * GiB)
        if largest:
            assert 0.97 * largest <= row["usable_bytes"] <= 1.001 * largest, row["id"]
            checked += 1
        if row.get("usable_basis") == "measured" and "torch_total_gib" in readings:
            assert row["usable_bytes"] == pytest.approx(readings["torch_total_gib"] * GiB, rel=0.003), row["id"]
    assert checked > 45


def test_every_number_has_a_source() -> None:
    sources = sources_file()["devices"]
    for row in catalogue_file()["devices"]:
        named = sources[row["id"]]["sources"]
        assert named.get("usable"), row["id"]
        assert named.get("marketed") or named.get("memories"), row["id"]
        if "bandwidth_gb_s" in row:
            assert named.get("bandwidth"), row["id"]
        for dtype in row.get("peak_tflops", {}):
            assert named.get(f"peak_{dtype}_tflops") or named.get(f"peak_{dtype}_tops"), (row["id"], dtype)
        for text in named.values():
            assert "file id" not in text


def test_sources_of_a_device() -> None:
    assert "81082 MiB" in device_sources(find_device("h100"))["sources"]["torch_total"]
    assert "Metal" in device_sources(find_device("m4-max-64"))["sources"]["usable"]
    assert device_sources(parse_cluster("24GiB").device) == {}


def test_sources_are_not_read_for_a_lookup() -> None:
    program = (
        "import builtins; opened = []; real = builtins.open\n"
        "def spy(file, *a, **k): opened.append(str(file)); return real(file, *a, **k)\n"
        "builtins.open = spy\n"
        "import sys; from memfit.devices import parse_cluster; parse_cluster('8xh100')\n"
        "assert [name for name in opened if name.endswith('devices.json')], opened\n"
        "assert not [name for name in opened if 'sources' in name], opened\n"
        "assert not {'numpy', 'rich', 'yaml', 'importlib.resources', 'importlib.metadata'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(DATA.parent.parent)}, timeout=60)


# --- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device_id"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("nvidia_rtx_4090_24gb", "rtx-4090"),
        ("4090-24", "rtx-4090"),
        ("3090", "rtx-3090"),
        ("5090", "rtx-5090"),
        ("h100", "h100-sxm-80gb"),
        ("H100-80GB", "h100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("h100 pcie", "h100-pcie-80gb"),
        ("h100-nvl", "h100-nvl-94gb"),
        ("a100", "a100-sxm-80gb"),
        ("a100-40", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("a10", "a10"),
        ("a10g", "a10g"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("v100-32", "v100-sxm2-32gb"),
        ("l4", "l4"),
        ("L40S", "l40s"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("rtx pro 6000", "rtx-pro-6000-blackwell"),
        ("h200", "h200-sxm-141gb"),
        ("h20", "h20"),
        ("gb200", "gb200"),
        ("DGX Spark", "gb10"),
        ("mi300x", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("7900 xtx", "rx-7900-xtx"),
        ("tpu-v5e", "tpu-v5e"),
        ("v5litepod", "tpu-v5e"),
        ("trillium", "tpu-v6e"),
        ("ironwood", "tpu-v7x"),
        ("gaudi2", "gaudi2"),
        ("Apple M4 Max 64GB", "m4-max-64gb"),
        ("m4max64", "m4-max-64gb"),
        ("m4-max", "m4-max-36gb"),
        ("m3-ultra-512", "m3-ultra-512gb"),
    ],
)
def test_names(text: str, device_id: str) -> None:
    assert find_device(text).id == device_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h1000", "did you mean 'h100'"),
        ("rtx-4909", "did you mean"),
        ("toaster", "unknown device 'toaster'"),
        ("4090-48gb", "is known with 24 GB"),
        ("a100-60", "is known with 40, 80 GB"),
        ("m4-max-96", "36, 48, 64, 128 GB"),
        ("24", "write 24GiB"),
        ("", "unknown device"),
        ("x" * 10_000, "unknown device"),
    ],
)
def test_unknown_names(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_device(text)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


# --- clusters --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "device_id", "count", "nodes"),
    [
        ("4090", "rtx-4090", 1, 1),
        ("8xh100-80gb", "h100-sxm-80gb", 8, 1),
        ("8 x H100", "h100-sxm-80gb", 8, 1),
        ("8*h100", "h100-sxm-80gb", 8, 1),
        ("h100-80gb:8", "h100-sxm-80gb", 8, 1),
        ("h100x8", "h100-sxm-80gb", 8, 1),
        ("2x8xh200", "h200-sxm-141gb", 16, 2),
        ("16xh100", "h100-sxm-80gb", 16, 2),  # machines of 8
        ("12xh100", "h100-sxm-80gb", 12, 2),
        ("72xgb200", "gb200", 72, 1),  # one NVL72 rack
        ("4xmi300x", "mi300x", 4, 1),
        ("mi300x", "mi300x", 1, 1),
        ("2xgb10", "gb10", 2, 2),
        ("v5p-16", "tpu-v5p", 8, 1),  # 16 TensorCores, two a chip
        ("v5p-8", "tpu-v5p", 4, 1),
        ("v4-8", "tpu-v4", 4, 1),
        ("v2-8", "tpu-v2", 8, 1),  # 4 chips, each core its own device
        ("v3-32", "tpu-v3", 32, 1),
        ("v5e-16", "tpu-v5e", 16, 1),  # counts chips
        ("v5litepod-4", "tpu-v5e", 4, 1),
        ("v6e-8", "tpu-v6e", 8, 1),
        ("TPU v6e 8", "tpu-v6e", 8, 1),
        ("tpu7x-128", "tpu-v7x", 128, 1),  # 64 chips, two devices each
        ("v5e-1", "tpu-v5e", 1, 1),
        ("2xv5p-16", "tpu-v5p", 16, 2),
        ("v5p-16:2", "tpu-v5p", 16, 2),
        ("8xv5e", "tpu-v5e", 8, 1),
        ("m4-max-64", "m4-max-64gb", 1, 1),
        ("1000000xh100", "h100-sxm-80gb", 1_000_000, 125_000),
    ],
)
def test_clusters(text: str, device_id: str, count: int, nodes: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.device.id, cluster.count, cluster.nodes) == (device_id, count, nodes)
    assert cluster.usable_bytes == find_device(device_id).usable_bytes


@pytest.mark.parametrize(
    ("text", "usable_bytes", "count"),
    [
        ("24GiB", 24 * GiB, 1),
        ("24g", 24 * GiB, 1),
        ("80GB", 80 * 10**9, 1),
        ("80 GB", 80 * 10**9, 1),
        ("512MiB", 512 * MiB, 1),
        ("8x24GiB", 24 * GiB, 8),
        ("1.5TiB", 3 * GiB * 512, 1),
    ],
)
def test_a_plain_size_is_an_unnamed_device(text: str, usable_bytes: int, count: int) -> None:
    cluster = parse_cluster(text)
    assert cluster.usable_bytes == cluster.marketed_bytes == usable_bytes
    assert cluster.count == count
    assert cluster.device.kind == "size"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4090", "GeForce RTX 4090 24GB"),
        ("h100", "h100-pcie-80gb"),
        ("a100", "a100-40gb"),
        ("m4-max", "m4-max-64"),
        ("v5p-16", "8 chips"),
        ("v5e-1", "1 chip, "),
        ("v3-8", "two devices a chip"),
        ("80GB", "80GiB"),
        ("2x8xh200", "2 nodes of 8"),
        ("gb200", "GB200 186GB"),
    ],
)
def test_the_reading_is_told(text: str, says: str) -> None:
    assert says in parse_cluster(text).reading


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write it like"),
        ("   ", "write it like"),
        ("x" * 1000, "write it like"),
        ("0xh100", "at least 1"),
        ("-1xh100", "at least 1"),
        ("h100:0", "at least 1"),
        ("h100:-3", "at least 1"),
        ("v5e-0", "at least 1"),
        ("1000001xh100", "1,000,000"),
        ("1000x1001xh100", "1,000,000"),
        ("9" * 60 + "xh100", "1,000,000"),
        ("v5p-15", "even"),
        ("v5e-512", "2xv5e-256"),
        ("0GiB", "24GiB"),
        ("900TiB", "24GiB"),
        ("8xtoaster", "unknown device 'toaster'"),
        ("h100:", "unknown device"),
        ("h100:many", "unknown device"),
        ("nanGiB", "unknown device"),
        ("-24GiB", "unknown device"),
    ],
)
def test_refused_clusters(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_cluster(text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_devices_and_clusters_can_be_keys_of_a_cache() -> None:
    assert len({parse_cluster("8xh100"), parse_cluster("8xh100"), parse_cluster("h100")}) == 2


# --- overviews -------------------------------------------------------------------------------------------------------------


def test_common_devices() -> None:
    ids = [device.id for device in common_devices()]
    assert len(ids) == len(set(ids)) == 12
    assert {"rtx-4090", "h100-sxm-80gb", "tpu-v5e", "m4-max-64gb"} <= set(ids)


def test_smallest_device_that_holds_a_size() -> None:
    def ids(num_bytes: int, headroom: float = 0.0) -> list[str]:
        return [device.id for device in smallest_holding(num_bytes, headroom)]

    assert ids(30 * GiB) == ["tpu-v6e", "rtx-5090", "m4-pro-48gb", "mi300x"]  # 31.25, 31.36, 37.44 and 191.98 GiB
    assert ids(30 * GiB, headroom=0.1)[0] == "m4-pro-48gb"  # 31.36 x 0.9 = 28.2
    assert ids(1 << 45) == []
