"""Unsloth's functions against PyTorch: the same products, saved tensors and gradients in place, on small real tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch_truth
from torch import Tensor, nn

import memfit
from memfit.account.forms import per_axis
from memfit.account.liveness import Accumulation, measure
from memfit.kernels import Adapter, KernelPolicy, lower
from memfit.kernels.context import ALL_LINEAR
from memfit.model import AXES
from memfit.precision import training_policy

H, F, HEADS, KV_HEADS, RANK, BATCH, SEQ = 128, 352, 4, 2, 8, 2, 256
D = H // HEADS
KV = KV_HEADS * D
Pair = tuple[Tensor, Tensor, Tensor]
"""A frozen weight and the factors of its adapter."""


def adapted(x: Tensor, pair: Pair) -> Tensor:
    weight, low, high = pair
    out = x @ weight.t()
    out.addmm_(x @ low.t().to(x.dtype), high.t().to(x.dtype))
    return out


def factors(x: Tensor, grad: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    _, low, high = (one.to(x.dtype) for one in pair)
    d_low, d_high = torch.empty_like(low.t()), torch.empty_like(high.t())
    d_low.addmm_(x.t(), grad @ high, beta=0)
    d_high.addmm_(low @ x.t(), grad, beta=0)
    return d_low.t(), d_high.t()


def add_input_gradient(out: Tensor, grad: Tensor, pair: Pair) -> None:
    weight, low, high = (one.to(out.dtype) for one in pair)
    out.addmm_(grad, weight)
    out.addmm_(grad @ high, low)


class Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        pairs = [tensors[place : place + 3] for place in (0, 3, 6)]
        ctx.weights = tensors[::3]
        ctx.save_for_backward(x, *tensors[1::3], *tensors[2::3])
        return tuple(adapted(x, pair) for pair in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        pairs = list(zip(ctx.weights, rest[:3], rest[3:], strict=True))
        made = [factors(x, grad, pair) for grad, pair in zip(grads, pairs, strict=True)]
        torch.matmul(grads[0], pairs[0][0], out=x)
        x.addmm_(grads[0] @ pairs[0][2].to(x.dtype), pairs[0][1].to(x.dtype))
        for grad, pair in zip(grads[1:], pairs[1:], strict=True):
            add_input_gradient(x, grad, pair)
        return (x, *[one for pair in made for one in (None, *pair)])


class Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        gate, up, down = (tensors[place : place + 3] for place in (0, 3, 6))
        e, g = adapted(x, gate), adapted(x, up)
        ctx.weights = tensors[::3]
        ctx.save_for_backward(x, *tensors[1::3], *tensors[2::3], e, g)
        return adapted(torch.empty_like(e), down)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest, e, g = ctx.saved_tensors
        gate, up, down = zip(ctx.weights, rest[:3], rest[3:], strict=True)
        product = grad @ down[0]
        product.addmm_(grad @ down[2].to(x.dtype), down[1].to(x.dtype))
        made = [factors(product, grad, down), factors(x, g, up), factors(x, e, gate)]
        torch.matmul(g, up[0], out=x)
        x.addmm_(g @ up[2].to(x.dtype), up[1].to(x.dtype))
        add_input_gradient(x, e, gate)
        return (x, *[one for pair in reversed(made) for one in (None, *pair)])


class Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *pair: Tensor) -> Tensor:
        ctx.weight = pair[0]
        ctx.save_for_backward(x, *pair[1:])
        return adapted(x, pair)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, high = ctx.saved_tensors
        made = factors(x, grad, (ctx.weight, low, high))
        out = grad @ ctx.weight
        out.addmm_(grad @ high.to(x.dtype), low.to(x.dtype))
        return (out, None, *made)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.empty(x.shape[0]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def pairs() -> dict[str, list[Tensor]]:
    shapes = {"q": (H, H), "k": (KV, H), "v": (KV, H), "o": (H, H), "gate": (F, H), "up": (F, H), "down": (H, F)}
    return {
        name: [
            torch.randn(rows, width, dtype=torch.bfloat16),
            nn.Parameter(torch.randn(RANK, width)),
            nn.Parameter(torch.randn(rows, RANK)),
        ]
        for name, (rows, width) in shapes.items()
    }


def layer(x: Tensor, of: dict[str, list[Tensor]]) -> Tensor:
    hidden = Norm.apply(x)
    q, k, v = Qkv.apply(hidden, *of["q"], *of["k"], *of["v"])
    q, k = Rope.apply(q), Rope.apply(k)
    heads = [one.view(BATCH, SEQ, -1, D).transpose(1, 2) for one in (q, k, v)]
    context = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    hidden = Output.apply(context.transpose(1, 2).reshape(BATCH * SEQ, H), *of["o"])
    x = x + hidden
    hidden = Norm.apply(x)
    hidden = Mlp.apply(hidden, *of["gate"], *of["up"], *of["down"])
    return x + hidden


def measured() -> tuple[int, int]:
    """Bytes kept, and the largest sum in backward, the output's gradient included; without weights and adapters."""
    of = pairs()
    x = torch.randn(BATCH * SEQ, H, dtype=torch.bfloat16, requires_grad=True)
    live = torch_truth.LiveMemory()
    parameters = sum(one.nbytes for pair in of.values() for one in pair)  # views of them are counted
    with torch_truth.flash_attention(), live:
        out = layer(x * 1, of)
        kept = live.now - out.nbytes
        grad = torch.empty_like(out)
        live.count(grad)
        live.peak = 0
        torch.autograd.backward(out, grad)
        return kept - parameters, live.peak - parameters - out.nbytes


def modelled() -> tuple[int, int]:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": H,
        "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    }  # fmt: skip
    block = next(one for one in memfit.load_model(config).segments if one.role == "layers").blocks[0]
    policy = KernelPolicy(
        precision=training_policy("bf16-true", None), attention="flash", kernels="unsloth", train_all=False,
        adapter=Adapter(RANK, "fp32", 0.0), adapter_targets=(ALL_LINEAR,),
    )  # fmt: skip
    lowered = lower(block, policy, input_requires_grad=True, input_dtype="bf16")
    memory = measure(lowered, accumulation=Accumulation(), outputs_kept=False, is_last=False)
    counts = {"once": 1, "token": BATCH * SEQ}

    def total(form: int) -> int:
        return sum(num_bytes * counts[AXES[axis]] for axis, num_bytes in per_axis(form))

    return total(memory.kept), max(total(one) for one in memory.backward)


def test_a_layer_keeps_and_needs_what_unsloths_functions_do() -> None:
    kept, backward = measured()
    found = modelled()
    assert found[0] == kept
    # counted with all else of the MLP's function: its adapters' gradients in fp32, which are cast when its scratch is gone
    assert 0 <= found[1] - backward <= 4 * RANK * 3 * (H + F)
