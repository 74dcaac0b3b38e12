"""torch.compile (inductor): chains of element-wise operations and reductions become one kernel, and are run again in backward.

The min-cut partitioner keeps what matrix products read and write, the rows of reductions and graph inputs. It bans the
recomputation of what a product of backward reads (`ban_recompute_materialized_backward`), so that a norm's result and a gated
product stay, but not what lies between them: a norm's fp32 copies, the activation, rotary's products, the upcast of the logits.
Source: torch/_functorch/partitioners.py, torch/_inductor/decomposition.py.
"""

from __future__ import annotations

from memfit.kernels import torchtitan
from memfit.kernels.context import Context
from memfit.kernels.liger import handed_on
from memfit.kernels.modules import weight_grads
from memfit.kernels.sets import Kernels
from memfit.kernels.tape import Tape, Tensor
from memfit.model.description import ONCE, Op
from memfit.precision import DTYPE_BYTES


def _stored(tape: Tape, x: Tensor) -> Tensor:
    """What stands for x in backward: the narrower summand of a residual stream, which is kept anyway and added again."""
    for node in reversed(tape.nodes):
        if any(one is x for one in node.outputs):
            narrow = [one for one in node.inputs if DTYPE_BYTES[one.dtype] < DTYPE_BYTES[x.dtype] and one.size[0] == x.axis]
            return narrow[0] if node.alias and len(node.inputs) == 2 and narrow else x
    return x


def _norm(context: Context, op: Op, x: Tensor, rows: int) -> list[Tensor]:
    tape = context.tape
    stored = _stored(tape, x)
    out = tape.tensor(x.axis, x.width, tape.policy.compute if tape.policy.autocast else x.dtype)
    statistics = tape.tensor(x.axis, rows, "fp32")
    grads = sum((weight_grads(context, one) for one in op.parameters), ())
    tape.record((x,), (out, statistics), saved=(stored, statistics), weight_grads=grads)
    statistics.requires_grad = False
    return [out]


def rms_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Keeps x, in the format that it has, and 1 / rms (4 B a row); the result has the format that the products read."""
    return _norm(context, op, x, op.attributes.get("heads", 1))


def layer_norm(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Keeps x, the mean and the reciprocal deviation."""
    return _norm(context, op, x, 2 * op.attributes.get("rows", 1))


def rotary(context: Context, op: Op, q: Tensor, k: Tensor) -> list[Tensor]:
    """One kernel each, read and written once: attention keeps the results, which it reads."""
    tape = context.tape
    results = []
    for one in (q, k):
        out = tape.tensor(one.axis, one.width, tape.policy.compute if tape.policy.autocast else one.dtype)
        tape.record((one,), (out,))
        results.append(out)
    return results


def activation(context: Context, op: Op, x: Tensor) -> list[Tensor]:
    """Whatever Python spells it out in: keeps its input."""
    out = context.tape.tensor(x.axis, x.width, x.dtype)
    context.tape.record((x,), (out,), saved=(x,))
    return [out]


def gated_product(context: Context, op: Op, gate: Tensor, up: Tensor) -> list[Tensor]:
    """activation(gate) * up: keeps gate and up, runs the activation again."""
    tape = context.tape
    out = tape.tensor(gate.axis, gate.width, gate.dtype)
    tape.record((gate, up), (out,), saved=(gate, up))
    return [out]


def cross_entropy(context: Context, op: Op, logits: Tensor) -> list[Tensor]:
    """Keeps the logits in their own format and two fp32 numbers a row (maximum, logarithm of the sum); no fp32 copy exists."""
    tape = context.tape
    rows = tape.tensor(logits.axis, 2, "fp32")
    labels = tape.tensor(logits.axis, 1, "int64")
    value = tape.tensor(ONCE, 1, "fp32")
    tape.record((logits, labels), (value, rows), saved=(logits, rows, labels))
    rows.requires_grad = False
    return [value]


KERNELS: Kernels = {
    "attention": torchtitan.attention,
    "rms_norm": rms_norm,
    "rms_norm_fp32": rms_norm,
    "layer_norm": layer_norm,
    "rotary": rotary,
    "activation": activation,
    "gated_product": gated_product,
    "handed_on": handed_on,
    "eager loss": cross_entropy,
}
