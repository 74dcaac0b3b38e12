"""What a process takes on a device beside its tensors: library workspaces, the driver's context, what the allocator holds unused.

Each has a source, an interval and a flag that sets it by hand.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from memfit.devices import Device
from memfit.units import KiB, MiB


class Overhead(NamedTuple):
    """Bytes with their bounds at 90 %, and where they come from."""

    bytes: int
    low: int
    high: int
    source: str


CUBLAS_BEFORE_HOPPER = 8 * MiB + 128 * KiB
CUBLAS_FROM_HOPPER = 32 * MiB
HOPPER = (9, 0)
_CUBLAS = "cuBLAS keeps one workspace per thread in torch's allocator: 8.125 MiB before compute capability 9.0, 32 MiB from it on"


def workspace(device: Device | None, *, training: bool) -> Overhead:
    """cuBLAS workspaces: one for the forward thread, one for autograd's thread. None where there is no CUDA."""
    threads = 2 if training else 1
    if device is not None and device.vendor != "nvidia":
        return _no_cublas(device.vendor)
    if device is None or device.compute_capability is None:
        return _cublas(threads, CUBLAS_BEFORE_HOPPER, CUBLAS_FROM_HOPPER)
    size = CUBLAS_FROM_HOPPER if device.compute_capability >= HOPPER else CUBLAS_BEFORE_HOPPER
    return _cublas(threads, size, size)


@cache
def _cublas(threads: int, low: int, high: int) -> Overhead:
    return Overhead(threads * high, threads * low, threads * high, _CUBLAS)


@cache
def _no_cublas(vendor: str) -> Overhead:
    return Overhead(0, 0, CUBLAS_FROM_HOPPER, f"no cuBLAS on {vendor}; other libraries' workspaces are not known")


_CONTEXT_UNKNOWN = Overhead(600 * MiB, 300 * MiB, 1200 * MiB, "assumed: no public reading of this driver's context")
_CONTEXT_HOPPER = Overhead(
    600 * MiB, 450 * MiB, 1000 * MiB, "CUDA context with lazy loading: 0.5 to 0.9 GiB reported on H100 and B200"
)
_CONTEXT = Overhead(
    460 * MiB,
    300 * MiB,
    700 * MiB,
    "CUDA context with lazy loading: 300 to 500 MiB (pytorch#107667), 451 to 456 MiB (llama.cpp#15860)",
)


def context(device: Device | None) -> Overhead:
    """The driver's context with lazily loaded kernels."""
    if device is None:
        return _CONTEXT
    if device.kind in ("tpu", "unified"):
        return Overhead(0, 0, 256 * MiB, f"the usable memory of a {device.kind} is stated without the runtime's own share")
    if device.vendor != "nvidia":
        return _CONTEXT_UNKNOWN
    return _CONTEXT_HOPPER if device.compute_capability is not None and device.compute_capability >= HOPPER else _CONTEXT


NCCL_FIRST = {2: 342 * MiB, 4: 392 * MiB}
"""A process's first communicator of so many devices or more (aiconfigurator systems/*.yaml: 342 MiB at 2, 392 MiB at 4 and 8)."""
NCCL_NEXT = 128 * MiB
"""Judgement: each further communicator has buffers of its own; published readings go from tens of MiB to 1.6 GB (nccl#864)."""
_NCCL = (
    "NCCL: 342 MiB for the first communicator of 2 devices, 392 MiB of 4 or more, about 128 MiB for each further one; published "
    "readings differ by a factor of four (NCCL_MAX_NCHANNELS, NVLS)"
)


def communication(device: Device | None, groups: tuple[int, ...]) -> Overhead:
    """Buffers of the communicators that a process takes part in; `groups`: the devices of each."""
    sizes = [size for size in groups if size > 1]
    if not sizes:
        return Overhead(0, 0, 0, "one device")
    if device is not None and device.kind in ("tpu", "unified"):
        return Overhead(0, 0, 256 * MiB, f"no NCCL on a {device.kind}")
    expected = NCCL_FIRST[4 if max(sizes) >= 4 else 2] + NCCL_NEXT * (len(sizes) - 1)
    return Overhead(expected, expected // 3, 3 * expected, _NCCL)


FRAGMENTATION_SHARE = (0, 10, 35)
"""Percent of what comes and goes (not weights, states, cache) that the allocator reserves beyond it: low, expected, high."""
FRAGMENTATION_SOURCE = (
    "assumed: blocks are rounded to 2 MiB and split remainders stay; below 2 % with expandable_segments, 12 to 27 % in published "
    "Trainer runs that give allocated and device memory"
)


GATHERED_SHARE = (0, 25, 120)
"""The same under DeepSpeed's ZeRO-3, which gathers and reduces on streams of its own."""
GATHERED_SOURCE = (
    "assumed: ZeRO-3 gathers and reduces tensors of many sizes on streams of their own, whose free blocks no other stream takes; "
    "a few percent with expandable_segments, 15 to 200 % in published runs that give both figures"
)


def fragmentation(dynamic_bytes: int, *, gathers: bool = False) -> Overhead:
    """reserved - allocated at the peak, as a share of the memory that is taken and given back within a step.

    `gathers`: DeepSpeed gathers the weights.
    """
    low, expected, high = GATHERED_SHARE if gathers else FRAGMENTATION_SHARE
    source = GATHERED_SOURCE if gathers else FRAGMENTATION_SOURCE
    return Overhead(dynamic_bytes * expected // 100, dynamic_bytes * low // 100, dynamic_bytes * high // 100, source)
