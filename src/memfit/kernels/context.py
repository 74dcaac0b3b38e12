"""What kernels need to know of a job: precision, what is trained, how attention is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.kernels.tape import Tape
from memfit.model.description import Parameter
from memfit.precision import PrecisionPolicy, QuantizedFormat

ALL_LINEAR = "all-linear"
"""Targets every linear layer but the head."""


class Adapter(NamedTuple):
    """A low-rank pair beside a frozen linear layer: A is rank x in, B is out x rank."""

    rank: int
    dtype: str
    dropout: float


class KernelPolicy(NamedTuple):
    """Everything that decides how operations run; the same for every block of a job, so it can be a key."""

    precision: PrecisionPolicy
    attention: str = "sdpa"
    """flash | sdpa | eager"""
    loss: str = "eager"
    """eager | fused (with the head) | in-place (its gradient is written over the logits in forward)"""
    kernels: str = "eager"
    """The kernel set: see kernels/sets.py."""
    norms_apart: bool = False
    """That set's norms make a gradient of their own instead of writing it over that of their output."""
    shifted: bool = False
    """The loss copies the logits without the last position, instead of shifting the labels."""
    training: bool = True
    padded: bool = False
    binding_windows: tuple[int, ...] = ()
    """Sliding windows that are not longer than the sequence: their layers get a mask."""
    dropout: float | None = None
    """In place of the config's probabilities."""
    quantized: QuantizedFormat | None = None
    """Format of the linear layers' weights."""
    train_all: bool = True
    adapter: Adapter | None = None
    adapter_targets: tuple[str, ...] = ()
    """Module names (the last part) that get an adapter; (ALL_LINEAR,) for every linear layer but the head."""
    one_sequence: bool = False
    """A batch of one: eager attention's products take strided operands as views instead of copying them."""
    device_capability: tuple[int, int] | None = None
    logits_last: bool = False
    """Inference: the head reads the last position only."""
    generating: bool = False
    """Inference: the logits are sampled from."""
    checkpointed: bool = False
    """The layers run under checkpoints, which T5's cross-attention looks at: its untrained bias then gets a gradient."""
    cache: str = ""
    """Training with a cache object, whose copies attention reads: "" (none) | own (each in its format) | keys (values in the
    keys' format)."""
    decoding: bool = False
    """Inference: one new token per sequence, for which sdpa needs no repeated keys and values."""
    kv_cache: str = ""
    """Inference: dynamic (keys and values are concatenated) | static (buffers for the whole context); empty without a cache."""
    kv_dtype: str = ""
    """The cache's format."""
    filled: bool = False
    """Inference: the cache holds earlier tokens."""
    causal_mask: bool = False
    """Inference: fewer queries than keys, so that causality needs a mask."""


def target_of(parameter: Parameter) -> str:
    """The module name that --lora-targets means: `q_proj` of `self_attn.q_proj.weight`."""
    return parameter.name.rsplit(".", 2)[-2] if parameter.name.count(".") else parameter.name


class Context(NamedTuple):
    """One block being lowered: the tape it is written to and the policy in force."""

    tape: Tape
    policy: KernelPolicy

    def trained(self, parameter: Parameter) -> bool:
        """Whether this parameter itself gets a gradient."""
        return self.policy.train_all and self.policy.training

    def adapter(self, parameter: Parameter) -> Adapter | None:
        """The adapter beside this linear weight, if it has one."""
        policy = self.policy
        if policy.adapter is None or parameter.role != "linear":
            return None
        if policy.adapter_targets == (ALL_LINEAR,) or target_of(parameter) in policy.adapter_targets:
            return policy.adapter
        return None

    def quantized(self, parameter: Parameter) -> QuantizedFormat | None:
        """The storage format of this weight, `None` if it keeps the policy's weight format."""
        return self.policy.quantized if parameter.role == "linear" else None

    def probability(self, stated: float) -> float:
        """The dropout probability in force: 0 outside training, the override if there is one."""
        if not self.policy.training:
            return 0.0
        return stated if self.policy.dropout is None else self.policy.dropout


Kernel = Callable[..., None]
