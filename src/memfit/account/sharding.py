"""How ZeRO and FSDP split weights, gradients and optimizer states over data-parallel devices: the rules of each implementation.

With psi parameters of two bytes, fp32 master weights and Adam's two states (12 bytes), over n devices (Rajbhandari et al. 2020):

    nothing split    2 psi +  2 psi + 12 psi
    stage 1          2 psi +  2 psi + 12 psi / n
    stage 2          2 psi + (2 psi + 12 psi) / n
    stage 3         (2 psi +  2 psi + 12 psi) / n
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.precision import DTYPE_BYTES, PrecisionPolicy

MILLION = 10**6


class Scheme(NamedTuple):
    """An implementation: which stages it has, what it keeps beside the weights, in which format gradients travel."""

    name: str
    title: str
    stages: tuple[int, ...]
    stage_names: tuple[str, ...]
    """What each of its stages is called there."""
    master: bool = False
    """16-bit weights are copies of fp32 ones, which the optimizer updates."""
    flat: bool = False
    """Tensors are cut as one flat tensor; otherwise each on its first dimension."""
    gathers: bool = False
    """Weights are gathered unit by unit, also where they stay gathered after forward."""
    main_gradients: bool = False
    """Gradients add up in an fp32 buffer that is there all the time."""
    adamw: str = ""
    """Which implementation `adamw` means under it; empty: the runtime's."""
    source: str = ""


SCHEMES = {
    one.name: one
    for one in (
        Scheme(
            "fsdp2",
            "FSDP2 (fully_shard)",
            (2, 3),
            ("reshard_after_forward=False", "reshard_after_forward=True"),
            gathers=True,
            source="torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py, _fsdp_collectives.py, _fsdp_param.py",
        ),
        Scheme(
            "fsdp1",
            "FSDP1 (FullyShardedDataParallel)",
            (2, 3),
            ("SHARD_GRAD_OP", "FULL_SHARD"),
            flat=True,
            gathers=True,
            source="torch/distributed/fsdp: _flat_param.py, _runtime_utils.py (BACKWARD_PRE prefetch, the root stays gathered)",
        ),
        Scheme(
            "deepspeed",
            "DeepSpeed's ZeRO",
            (0, 1, 2, 3),
            ("no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
            master=True,
            flat=True,
            adamw="adamw-fused",
            source="deepspeed/runtime/zero: stage_1_and_2.py, stage3.py, partitioned_param_coordinator.py, config.py",
        ),
        Scheme(
            "megatron",
            "Megatron's distributed optimizer",
            (0, 1),
            ("one optimizer", "the distributed optimizer"),
            master=True,
            flat=True,
            main_gradients=True,
            adamw="adamw-fused",
            source="Megatron-LM docs/user-guide/features/dist_optimizer.md; core/distributed/param_and_grad_buffer.py",
        ),
    )
}
"""Schemes by the name that --sharding takes."""


class Buckets(NamedTuple):
    """DeepSpeed's buffers, in elements, as its config has them where nothing is said (runtime/zero/config.py)."""

    reduce: int = 500 * MILLION
    """reduce_bucket_size: gradients that are reduced together."""
    live: int = 1000 * MILLION
    """stage3_max_live_parameters: gathered at once."""
    prefetch: int = 50 * MILLION
    """stage3_prefetch_bucket_size: gathered ahead in one call."""
    sub_group: int = 1000 * MILLION
    """sub_group_size: elements of a device's part that one step of the optimizer takes at a time."""


class Sharding(NamedTuple):
    """Over how many devices what is split, and by whose rules."""

    scheme: str = ""
    """fsdp2 | fsdp1 | deepspeed | megatron; empty: nothing is split, and weights are their own masters."""
    stage: int = 0
    """ZeRO: 1 optimizer states, 2 gradients as well, 3 weights as well."""
    degree: int = 1
    replicas: int = 1
    """Replicas of the sharded group (HSDP)."""
    expert_degree: int = 1
    """Devices over which experts are split: those that expert parallelism has not split them over already."""
    offload: str = "none"
    """none | optimizer | params: what waits in host memory."""
    stored: str = ""
    """Format of the weights that stay: those that operations read are gathered from them."""
    reduced: str = ""
    """Format in which gradients are reduced."""
    gradient: str = ""
    """Format of the gradients that the optimizer finds; empty: their parameters'."""
    master: str = ""
    """Format of the master weights; empty: there are none."""
    resident: bool = False
    """Weights stay gathered for all micro-batches of a pipeline."""
    unsynced: bool = False
    """Gradients of the micro-batches before the last add up unsharded."""
    separate: bool = False
    """Embedding and head are units of their own (torchtitan); otherwise what is not in a layer is one unit, the root."""
    zero_init: bool = True
    """Built under zero.Init: its linear layers do not keep gathered weights for backward."""
    buckets: Buckets = Buckets()

    @property
    def rules(self) -> Scheme:
        """The rules of the scheme."""
        return SCHEMES[self.scheme]

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered while operations run."""
        return bool(self.scheme) and self.degree > 1 and (self.rules.gathers or self.stage == 3)

    @property
    def splits_weights(self) -> bool:
        """Whether a device keeps only its part of the weights."""
        return self.gathers

    @property
    def splits_gradients(self) -> bool:
        """Whether a device keeps only its part of the gradients."""
        return bool(self.scheme) and self.degree > 1 and self.stage >= 2

    @property
    def splits_states(self) -> bool:
        """Whether a device keeps only its part of the optimizer's states and of the master weights."""
        return bool(self.scheme) and self.degree > 1 and self.stage >= 1

    @property
    def gradients_stand(self) -> bool:
        """Whether a buffer for gradients is there all the time: Megatron's, and the partitions of ZeRO-3."""
        return bool(self.scheme) and (self.rules.main_gradients or (self.scheme == "deepspeed" and self.stage == 3))

    def standing_buffers(self, largest: int) -> int:
        """Bytes of buffers that are there all the time; `largest`: elements of the largest tensor.

        ZeRO-3's reduce bucket, and the tensor through which ZeRO-1 and 2 move gradients to the host.
        """
        if self.scheme != "deepspeed":
            return 0
        element = DTYPE_BYTES[self.stored]
        return element * (self.buckets.reduce if self.stage == 3 else largest if self.offload != "none" else 0)


UNSHARDED = Sharding()


class Formats(NamedTuple):
    """What a precision means under a scheme: how operations compute, and in which format what is kept."""

    kernels: PrecisionPolicy
    stored: str
    reduced: str
    gradient: str
    master: str


def formats_of(scheme: Scheme, policy: PrecisionPolicy, *, trainer: bool) -> Formats:
    """The formats of a scheme under a precision.

    FSDP: `x-mixed` is MixedPrecisionPolicy(param_dtype=x, reduce_dtype=fp32) over weights as they are stored: operations run in
    x, without autocast and its cached casts. accelerate (`trainer`) reduces in x, and keeps autocast around the gathered x.
    DeepSpeed and Megatron: 16-bit weights and fp32 masters under either kind of 16-bit precision; Megatron's gradients are fp32.
    """
    half = DTYPE_BYTES[policy.compute] == 2
    if scheme.master:
        kernels = PrecisionPolicy(policy.name, policy.compute, policy.compute, False)
        gradient = "fp32" if half and scheme.main_gradients and policy.compute == "bf16" else policy.compute
        return Formats(kernels, policy.compute, gradient, gradient, "fp32" if half else "")
    if not policy.autocast:
        return Formats(policy, policy.weight, policy.weight, policy.weight, "")
    kernels = PrecisionPolicy(policy.name, policy.compute, policy.compute, trainer)
    return Formats(kernels, policy.weight, policy.compute if trainer else "fp32", policy.weight, "")
