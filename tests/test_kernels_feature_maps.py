"""Operations of convolutional networks against PyTorch: shapes, parameters, and what autograd keeps of them.

fp32: the CPU keeps what CUDA keeps. In 16 bit group norm's statistics are compared on the meta device, which takes no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch_truth
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.kernels import KernelPolicy, lower
from memfit.model import SEQUENCE, BlockBuilder, Value
from memfit.model.ops import feature_maps as maps
from memfit.precision import training_policy

BATCH, CHANNELS = 3, 8

Build = Callable[[BlockBuilder, Value], Value]


def kept_by_memfit(sides: tuple[int, ...], build: Build, precision: str = "32-true") -> tuple[int, int, int]:
    """Bytes for each sample and bytes once that a block keeps, and its parameters."""
    b = BlockBuilder("block", CHANNELS * prod(sides), SEQUENCE)
    # a result of an operation, which one in place may overwrite
    block = b.done(build(b, b.scale(b.input)))
    policy = KernelPolicy(precision=training_policy(precision, None))
    lowered = lower(block, policy, input_requires_grad=True, input_dtype=policy.precision.weight)
    sizes = [lowered.tape.sizes[storage] for storage in {one for node in lowered.tape.nodes for one in node.saved}]
    of_samples = sum(num_bytes for axis, num_bytes in sizes if axis == SEQUENCE)
    return of_samples, sum(num_bytes for axis, num_bytes in sizes if axis != SEQUENCE), block.num_parameters


def kept_by_torch(sides: tuple[int, ...], run: Callable[[Tensor], Any], *modules: nn.Module) -> int:
    own = {one.untyped_storage()._cdata for module in modules for one in module.parameters()}
    x = torch.randn(BATCH, CHANNELS, *sides, requires_grad=True)
    return torch_truth.kept_by(lambda: run(x * 2), own)


CONVOLUTIONS = [
    (nn.Conv1d(8, 6, 3, stride=2, padding=1), (20,), (3,), (2,), (1,), 1),
    (nn.Conv1d(8, 8, 4, padding=3, groups=8, bias=False), (17,), (4,), (1,), (3,), 8),
    (nn.Conv2d(8, 4, (3, 5), stride=(2, 1), padding=(1, 2)), (11, 9), (3, 5), (2, 1), (1, 2), 1),
    (nn.Conv3d(8, 10, 3, stride=2, padding=1), (6, 7, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1), 1),
]


@pytest.mark.parametrize(("module", "sides", "kernel", "stride", "padding", "groups"), CONVOLUTIONS)
def test_convolutions(module: Any, sides: Any, kernel: Any, stride: Any, padding: Any, groups: int) -> None:
    after = maps.convolved(sides, kernel, stride, padding)
    channels = (module.in_channels, module.out_channels)
    assert tuple(module(torch.zeros(1, CHANNELS, *sides)).shape) == (1, channels[1], *after)

    def build(b: BlockBuilder, x: Value) -> Value:
        return maps.convolution(b, "c", x, channels, after, kernel=kernel, groups=groups, bias=module.bias is not None)

    of_samples, once, parameters = kept_by_memfit(sides, build)
    assert parameters == sum(one.numel() for one in module.parameters())
    assert BATCH * of_samples + once == kept_by_torch(sides, module, module)


TRANSPOSED = [
    (nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1), (9,), (4,), (2,), (1,), (0,), 1),
    (nn.ConvTranspose2d(8, 6, 2, stride=2), (5, 7), (2, 2), (2, 2), (0, 0), (0, 0), 1),
    (nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (5, 7), (3, 3), (2, 2), (1, 1), (1, 1), 2),
    (nn.ConvTranspose3d(8, 2, 2, stride=2, bias=False), (3, 4, 5), (2, 2, 2), (2, 2, 2), (0, 0, 0), (0, 0, 0), 1),
]


@pytest.mark.parametrize(("module", "sides", "kernel", "stride", "padding", "more", "groups"), TRANSPOSED)
def test_transposed_convolutions(module: Any, sides: Any, kernel: Any, stride: Any, padding: Any, more: Any, groups: int) -> None:
    after = maps.transposed(sides, kernel, stride, padding, more)
    channels = (module.in_channels, module.out_channels)
    assert tuple(module(torch.zeros(1, CHANNELS, *sides)).shape) == (1, channels[1], *after)

    def build(b: BlockBuilder, x: Value) -> Value:
        bias = module.bias is not None
        return maps.convolution(b, "c", x, channels, after, kernel=kernel, groups=groups, bias=bias, transposed=True)

    of_samples, once, parameters = kept_by_memfit(sides, build)
    assert parameters == sum(one.numel() for one in module.parameters())
    assert BATCH * of_samples + once == kept_by_torch(sides, module, module)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_group_norm_keeps_its_input_and_two_statistics_a_group(groups: int) -> None:
    module = nn.GroupNorm(groups, CHANNELS)
    of_samples, once, parameters = kept_by_memfit((6, 7), lambda b, x: maps.group_norm(b, "n", x, CHANNELS, groups))
    assert (of_samples, once, parameters) == (4 * CHANNELS * 42 + 2 * 4 * groups, 0, 2 * CHANNELS)
    assert BATCH * of_samples == kept_by_torch((6, 7), module, module)


def test_group_norm_in_16_bit() -> None:
    """Statistics in the format of x; under autocast a copy of x and the statistics in fp32."""
    x = torch.empty(BATCH, CHANNELS, 6, 7, device="meta", dtype=torch.bfloat16, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.nbytes), lambda one: one):
        nn.GroupNorm(4, CHANNELS, device="meta", dtype=torch.bfloat16)(x)
    build = lambda b, x: maps.group_norm(b, "n", x, CHANNELS, 4)  # noqa: E731
    of_samples, once, _ = kept_by_memfit((6, 7), build, "bf16-true")
    assert BATCH * of_samples == sum(saved) - 2 * CHANNELS  # the hooks see the weight
    assert once == 0
    assert kept_by_memfit((6, 7), build, "bf16-mixed")[:2] == (4 * CHANNELS * 42 + 2 * 4 * 4, 0)


@pytest.mark.parametrize(
    ("run", "sides", "after"),
    [
        (lambda x: F.avg_pool1d(x, 2), (9,), (4,)),
        (lambda x: F.avg_pool2d(x, 3, stride=2, padding=1), (8, 9), (4, 5)),
        (lambda x: F.avg_pool3d(x, 2), (4, 6, 5), (2, 3, 2)),
        (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (8, 9), (3, 2)),
    ],
)
def test_windowed_averages_keep_their_input(run: Any, sides: Any, after: Any) -> None:
    of_samples, once, _ = kept_by_memfit(sides, lambda b, x: maps.average_pool(b, x, CHANNELS, after))
    assert BATCH * of_samples + once == kept_by_torch(sides, run) == BATCH * 4 * CHANNELS * prod(sides)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling_keeps_nothing(mode: str) -> None:
    of_samples, once, _ = kept_by_memfit((4, 5), lambda b, x: maps.upsample(b, x, CHANNELS, (8, 10)))
    assert of_samples + once == kept_by_torch((4, 5), lambda x: F.interpolate(x, scale_factor=2, mode=mode)) == 0


@pytest.mark.parametrize("function", maps.IN_PLACE)
def test_activations_in_place(function: str) -> None:
    """One map is kept either way: the result in the input's place, or the copy of the input that SiLU makes."""
    apply = getattr(F, function)
    of_samples, once, _ = kept_by_memfit((5, 6), lambda b, x: maps.activation_in_place(b, function, x))
    assert BATCH * of_samples + once == kept_by_torch((5, 6), lambda x: apply(x, inplace=True)) == BATCH * 4 * CHANNELS * 30


def test_relu_in_place_after_a_convolution_adds_nothing_to_what_the_next_one_keeps() -> None:
    """conv, relu in place, conv: the input and the one map between them; not in place it is the same two, without a third."""
    module = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))

    def build(b: BlockBuilder, x: Value) -> Value:
        x = maps.convolution(b, "a", x, (8, 8), (6, 6), kernel=(3, 3))
        x = maps.activation_in_place(b, "relu", x)
        return maps.convolution(b, "b", x, (8, 8), (6, 6), kernel=(3, 3))

    of_samples, once, _ = kept_by_memfit((6, 6), build)
    assert BATCH * of_samples + once == kept_by_torch((6, 6), module, module) == BATCH * 2 * 4 * 8 * 36


def test_an_unknown_function_in_place_is_refused() -> None:
    b = BlockBuilder("block", 8, SEQUENCE)
    with pytest.raises(ValueError, match="tanh in place: known are relu, leaky_relu, silu"):
        maps.activation_in_place(b, "tanh", b.input)
