"""What kernels need to know of a job: precision, what is trained, how attention is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.kernels.ring import Ring
from memfit.kernels.tape import Tape
from memfit.model.description import Parameter
from memfit.precision import PrecisionPolicy, QuantizedFormat

ALL_LINEAR = "all-linear"
"""Targets every linear layer but the head."""


class Adapter(NamedTuple):
    """What is trained beside a frozen linear layer: a low-rank pair, A rank x in and B out x rank; or a vector."""

    rank: int
    dtype: str
    dropout: float
    kind: str = "lora"
    """lora | dora (with a magnitude for every output) | ia3 (a vector that scales the outputs, or the inputs)"""
    scales_input: tuple[str, ...] = ()
    """(IA)3: the modules whose input is scaled, not their output."""


class Choice(NamedTuple):
    """Which of the model's own parameters are trained: `base`, less `freeze`, and `unfreeze`, and the `saved` modules' copies.

    Each is a list of selectors, which `account.selection` reads.
    """

    base: bool
    freeze: tuple[str, ...] = ()
    unfreeze: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    """Modules of which a copy is trained while the original stays (PEFT's modules_to_save)."""


class Prefix(NamedTuple):
    """Prefix tuning: trained keys and values of `tokens` virtual tokens in every layer."""

    tokens: int
    width: int
    """Elements of keys and values of one token in all layers."""
    layer_width: int
    """Elements of the keys of one token in one layer."""
    projection: int = 0
    """The inner width of the two layers that make them from a table of the keys' width; 0: the table holds them themselves."""
    dtype: str = "fp32"


class KernelPolicy(NamedTuple):
    """Everything that decides how operations run; the same for every block of a job, so it can be a key."""

    precision: PrecisionPolicy
    attention: str = "sdpa"
    """flash | sdpa | eager"""
    loss: str = "eager"
    """eager | uncompiled (eager beside compiled layers) | chunked-output | chunked | fused | cut | in-place (its gradient is
    written over the logits in forward)"""
    loss_chunks: int = 8
    loss_upcast: bool | None = None
    """In place of what the model's class does."""
    evaluating: bool = False
    """A forward pass with its loss between steps: no autograd, no dropout."""
    kernels: str = "eager"
    """The kernel set: see kernels/sets.py."""
    norms_apart: bool = False
    """That set's norms make a gradient of their own instead of writing it over that of their output."""
    recomputed: tuple[str, ...] = ()
    """Parts of a layer that run again in backward: names of `account.checkpoints.PARTS`."""
    attention_copies: bool = False
    """Fused attention copies what it is given and its result into another order of dimensions."""
    repeated_heads: bool = False
    """The model's code repeats keys and values before attention (torchtitan's repeat_kv)."""
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
    choice: Choice | None = None
    """Which of the model's own parameters are trained, where it is neither all nor none."""
    trained: frozenset[str] | None = None
    """`choice` in one block: the names of the parameters that are trained there; `None`: `train_all` says it."""
    norm_dtype: str | None = None
    """Format of the norms' weights, where it is not that of all weights (k-bit preparation)."""
    adapter: Adapter | None = None
    virtual_tokens: int = 0
    """Prompt tuning: trained tokens before each sequence, in `virtual_dtype`."""
    virtual_dtype: str = "fp32"
    prefix: Prefix | None = None
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
    fused_mixers: bool = False
    """State spaces and gated delta rules run in fused kernels (mamba-ssm, causal-conv1d, flash-linear-attention)."""
    decoding: bool = False
    """Inference: one new token per sequence, for which sdpa needs no repeated keys and values."""
    kv_cache: str = ""
    """Inference: dynamic (keys and values are concatenated) | static (buffers for the whole context); empty without a cache."""
    kv_dtype: str = ""
    """The cache's format."""
    filled: bool = False
    """Inference: the cache holds earlier tokens."""
    ring: Ring | None = None
    """Context parallelism: the devices that share each sequence."""
    collectives: str = ""
    """Tensor parallelism: functional (results are new tensors, as DTensor makes them) | in-place; empty without it."""
    regathers: bool = False
    """Products by columns keep their part of the tokens, and gather the others once more for the weights' gradient."""
    split_logits: bool = False
    """The loss works on each device's part of the vocabulary; otherwise logits are gathered."""
    causal_mask: bool = False
    """Fewer queries than keys, so that causality needs a mask: of a later chunk of a prompt, or behind virtual tokens."""


def target_of(parameter: Parameter) -> str:
    """The module name that --lora-targets means: `q_proj` of `self_attn.q_proj.weight`."""
    return parameter.name.rsplit(".", 2)[-2] if parameter.name.count(".") else parameter.name


class Context(NamedTuple):
    """One block being lowered: the tape it is written to and the policy in force."""

    tape: Tape
    policy: KernelPolicy

    def trained(self, parameter: Parameter) -> bool:
        """Whether this parameter itself gets a gradient."""
        policy = self.policy
        if policy.trained is None:
            return policy.train_all and policy.training
        return parameter.name in policy.trained and policy.training

    def format(self, parameter: Parameter) -> str:
        """The format in which this parameter is stored."""
        policy = self.policy
        if parameter.dtype:
            return parameter.dtype
        return policy.norm_dtype if policy.norm_dtype and parameter.role == "norm" else policy.precision.weight

    def gradient_name(self, parameter: Parameter) -> str:
        """Under which name its gradient is known: that of the tensor it is tied to, unless a copy is trained in its place."""
        saved = self.policy.choice.saved if self.policy.choice else ()
        return parameter.name if not parameter.tied_to or target_of(parameter) in saved else parameter.tied_to

    def adapter(self, parameter: Parameter) -> Adapter | None:
        """The adapter beside this weight, if it has one: every targeted linear layer, and an embedding or head that is named."""
        policy = self.policy
        if policy.adapter is None or parameter.role not in ("linear", "head", "embedding") or len(parameter.shape) != 2:
            return None
        if target_of(parameter) in policy.adapter_targets:
            return policy.adapter
        return policy.adapter if policy.adapter_targets == (ALL_LINEAR,) and parameter.role == "linear" else None

    def quantized(self, parameter: Parameter) -> QuantizedFormat | None:
        """The storage format of this weight, `None` if it keeps the policy's weight format."""
        quantized = self.policy.quantized
        return None if quantized is None or quantized.experts_only or parameter.role != "linear" else quantized

    def probability(self, stated: float) -> float:
        """The dropout probability in force: 0 outside training, the override if there is one."""
        if not self.policy.training or self.policy.evaluating:
            return 0.0
        return stated if self.policy.dropout is None else self.policy.dropout


Kernel = Callable[..., None]
