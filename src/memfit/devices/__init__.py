"""Accelerators: the catalogue as data, and how people write a cluster (`8xh100-80gb`, `v5p-16`, `24GiB`)."""

from memfit.devices.catalogue import Device, all_devices, common_devices, device_sources, find_device, smallest_holding
from memfit.devices.cluster import Cluster, parse_cluster

__all__ = [
    "Cluster",
    "Device",
    "all_devices",
    "common_devices",
    "device_sources",
    "find_device",
    "parse_cluster",
    "smallest_holding",
]
