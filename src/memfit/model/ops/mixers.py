"""State-space mixers: a causal convolution and a recurrence over the tokens, in place of attention."""

from __future__ import annotations

from memfit.model.builder import BlockBuilder
from memfit.model.description import Parameter, StateSpec, Value

Shape = tuple[str, tuple[int, ...], str]
"""A parameter's name within the mixer, its shape and its role."""


def _parameters(name: str, shapes: list[Shape]) -> tuple[Parameter, ...]:
    return tuple([Parameter(f"{name}.{part}", shape, role) for part, shape, role in shapes])


def _biases(convolution: int, output: int) -> list[Shape]:
    """Biases of the convolution and of the output projection, where they have some."""
    widths = (("conv1d.bias", convolution), ("out_proj.bias", output))
    return [(part, (width,), "bias") for part, width in widths if width]


def mask_padding(b: BlockBuilder, x: Value) -> Value:
    """x with zeros at padding, where the batch has a mask."""
    return b.op("mask_padding", "mask", (x,), x.width)


def to_fp32(b: BlockBuilder, x: Value) -> Value:
    """x in fp32."""
    return b.op("to_fp32", "float", (x,), x.width)


def selective_state_space(
    b: BlockBuilder,
    name: str,
    xz: Value,
    hidden: int,
    *,
    states: int,
    rank: int,
    taps: int,
    activation: str,
    bias: bool,
    conv_bias: bool,
    normed: bool,
) -> Value:
    """Mamba's mixer behind its input projection: convolution, x_proj, the scan with `states` a channel, gate, out_proj.

    `normed`: the time step, B and C are divided by their root mean square (Falcon Mamba). A sequence's state: `taps` columns of
    the convolution in the weights' format, `states` numbers a channel in fp32.
    """
    inner = xz.width // 2
    shapes: list[Shape] = [
        ("A_log", (inner, states), "matrix"),
        ("D", (inner,), "vector"),
        ("conv1d.weight", (inner, 1, taps), "convolution"),
        ("x_proj.weight", (rank + 2 * states, inner), "linear"),
        ("dt_proj.weight", (inner, rank), "matrix"),
        ("dt_proj.bias", (inner,), "bias"),
        ("out_proj.weight", (hidden, inner), "linear"),
    ]
    shapes += _biases(conv_bias and inner, bias and hidden)
    b.keep_state(StateSpec(inner * taps, inner * states))
    return b.op(
        "mamba_mixer",
        name,
        (xz,),
        hidden,
        _parameters(name, shapes),
        states=states,
        rank=rank,
        activation=activation,
        normed=normed,
    )


DELTA_CHUNK = 64
"""Tokens of a chunk in transformers' gated delta rule."""


def gated_delta(
    b: BlockBuilder,
    name: str,
    qkvz: Value,
    ba: Value,
    hidden: int,
    *,
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    activation: str,
) -> Value:
    """Qwen3-Next's mixer behind its input projections: convolution, gated delta rule, gated norm, out_proj.

    A sequence's state: `taps` columns of the convolution in the weights' format, a key_dim x value_dim matrix a head in fp32.
    """
    channels = 2 * key_heads * key_dim + heads * value_dim
    shapes: list[Shape] = [
        ("dt_bias", (heads,), "bias"),
        ("A_log", (heads,), "vector"),
        ("conv1d.weight", (channels, 1, taps), "convolution"),
        ("norm.weight", (value_dim,), "norm"),
        ("out_proj.weight", (hidden, heads * value_dim), "linear"),
    ]
    b.keep_state(StateSpec(channels * taps, heads * key_dim * value_dim))
    return b.op(
        "gated_delta",
        name,
        (qkvz, ba),
        hidden,
        _parameters(name, shapes),
        heads=heads,
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        activation=activation,
        chunk=DELTA_CHUNK,
    )


def output_gate(b: BlockBuilder, x: Value, gate: Value) -> Value:
    """x * sigmoid(gate)"""
    return b.op("output_gate", "gate", (x, gate), x.width)


def chunked_state_space(
    b: BlockBuilder,
    name: str,
    projected: Value,
    hidden: int,
    *,
    heads: int,
    head_dim: int,
    states: int,
    groups: int,
    taps: int,
    chunk: int,
    activation: str,
    bias: bool,
    conv_bias: bool,
) -> Value:
    """Mamba-2's mixer behind its input projection: convolution, the scan by chunks, gated norm, out_proj.

    A sequence's state: `taps` columns of the convolution in the weights' format, `states` numbers a channel in fp32.
    """
    inner = heads * head_dim
    channels = inner + 2 * groups * states
    shapes: list[Shape] = [
        ("dt_bias", (heads,), "bias"),
        ("A_log", (heads,), "vector"),
        ("D", (heads,), "vector"),
        ("conv1d.weight", (channels, 1, taps), "convolution"),
        ("norm.weight", (inner,), "norm"),
        ("out_proj.weight", (hidden, inner), "linear"),
    ]
    shapes += _biases(conv_bias and channels, bias and hidden)
    b.keep_state(StateSpec(channels * taps, inner * states))
    return b.op(
        "mamba2_mixer",
        name,
        (projected,),
        hidden,
        _parameters(name, shapes),
        heads=heads,
        head_dim=head_dim,
        states=states,
        groups=groups,
        chunk=chunk,
        activation=activation,
    )
