"""Single operations: forward and backward of one module, as Liger's own benchmark measures them.

The script calls `y.backward(retain_graph=True)` again and again without freeing gradients: what is saved stays, and the gradients
of the call before are there. Its module's weights are held, and those of both modules where it makes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memfit.account.crossing import Accumulation
from memfit.account.forms import per_axis
from memfit.account.liveness import measure
from memfit.account.overheads import CUBLAS_BEFORE_HOPPER
from memfit.account.profile import Numbers, amount, monomials
from memfit.kernels import KernelPolicy, lower
from memfit.model import TOKEN, Block, BlockBuilder
from memfit.precision import DTYPE_BYTES, PrecisionPolicy
from memfit.units import MiB
from memfit.validate.report import Row, half_digit

ABOUT = (
    "Peak allocated of one operation's forward and backward: rows of Liger's benchmark (0.2.1 and 0.4.2, A100), each with its "
    "own kernel and with that of transformers. Not a job: the operation is measured as a block is, with the weights, their "
    "gradients of the call before and all that is saved held, as the script does."
)
PROVIDERS = {"liger": "liger", "huggingface": "eager"}


class _Case(NamedTuple):
    """One row's operation: its block, rows of its input, format, and how many modules' weights the script holds."""

    block: Block
    rows: int
    dtype: str
    modules: int
    loss: str = "eager"


def _cross_entropy(x: int, config: Mapping[str, Any], kernels: str) -> _Case:
    b = BlockBuilder("cross_entropy", x, TOKEN)
    block = b.done(b.loss(b.input, upcast=False))
    return _Case(block, config["B"] * config["T"], "fp32", 1, "in-place" if kernels == "liger" else "eager")


def _fused_linear_cross_entropy(x: int, config: Mapping[str, Any], kernels: str) -> _Case:
    b = BlockBuilder("fused_linear_cross_entropy", config["H"], TOKEN)
    block = b.done(b.loss(b.head("lm_head", b.input, config["V"]), upcast=False))
    return _Case(block, x, "bf16", 2, "fused" if kernels == "liger" else "eager")


def _swiglu(x: int, config: Mapping[str, Any], kernels: str) -> _Case:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    b = BlockBuilder("swiglu", hidden, TOKEN)
    gate = b.activation("silu", b.linear("gate_proj", b.input, ffn))
    product = b.multiply(gate, b.linear("up_proj", b.input, ffn))
    return _Case(b.done(b.linear("down_proj", product, hidden)), config["B"] * x, "bf16", 1)


OPERATIONS: dict[str, Callable[[int, Mapping[str, Any], str], _Case]] = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "swiglu": _swiglu,
}


def predicted(row: Mapping[str, Any]) -> int:
    """The largest state of the operation's forward and backward, and what the script holds beside it."""
    kernels = PROVIDERS[row["provider"]]
    case = OPERATIONS[row["operation"]](row["x"], row["config"], kernels)
    policy = KernelPolicy(PrecisionPolicy("", case.dtype, case.dtype, False), loss=case.loss, kernels=kernels, dropout=0.0)
    lowered = lower(case.block, policy, input_requires_grad=True, input_dtype=case.dtype)
    ends_in_loss = case.block.ops[-1].kind == "loss"
    # the gradient that backward begins with is an argument, which the caller holds to the end
    memory = measure(lowered, accumulation=Accumulation(persist=True), outputs_kept=False, is_last=True, retained=True)
    counts = monomials(Numbers(1, case.rows, case.rows))
    size = DTYPE_BYTES[case.dtype]
    held: int = amount(per_axis(memory.input), counts)
    weights = sum(one.num_elements for one in case.block.parameters) * size
    # the input is a leaf; its gradient of the call before is there, or is the input itself, over which Liger's loss writes it
    beside = weights * (case.modules + 1) + (2 * CUBLAS_BEFORE_HOPPER if weights else 0)
    beside += 0 if case.loss == "in-place" else held
    forward: int = max(amount(per_axis(one), counts) for one in memory.forward)
    backward: int = max(amount(per_axis(one), counts) for one in memory.backward)
    backward += 0 if memory.input_saved else held
    # a name holds the result
    backward += 0 if ends_in_loss else 2 * amount(per_axis(memory.output), counts)
    return beside + max(forward, backward)


def compare(rows: list[dict[str, Any]]) -> list[Row]:
    """Every row of `operations.jsonl`."""
    found = []
    for row in rows:
        measured = round(row["value"] * MiB)
        found.append(
            Row(
                id=row["id"],
                measured=measured,
                predicted=predicted(row),
                relative_to=measured,
                rounding=half_digit(row["value"], MiB),
                source=row["source"],
            )
        )
    return found
