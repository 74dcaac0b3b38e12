"""How ZeRO and FSDP split weights, gradients and optimizer states over data-parallel devices."""

from __future__ import annotations

from typing import NamedTuple


class Sharding(NamedTuple):
    """Over how many devices what is split, and by whose rules."""

    scheme: str = ""
    """fsdp2 | fsdp1 | deepspeed | megatron; empty: nothing is split."""
    stage: int = 0
    """ZeRO: 1 optimizer states, 2 gradients as well, 3 weights as well."""
    degree: int = 1
    replicas: int = 1
    """Replicas of the sharded group (HSDP)."""
    offload: str = "none"
    """none | optimizer | params: what waits in host memory."""


UNSHARDED = Sharding()
