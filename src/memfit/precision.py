"""Number formats, quantised storage (bits with scales and zero points) and precision policies."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.errors import UsageError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of one element."""

TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "float64": "fp64"}
"""How configs spell the formats."""


class QuantizedFormat(NamedTuple):
    """A storage format of linear weights: `bits` per element, plus scales (and zero points) per block of elements.

    bytes(n) = n x bits / 8 + ceil(n / block) x scale_bytes [+ ceil(ceil(n / block) / outer_block) x outer_bytes]
    """

    name: str
    bits: int
    block: int
    """Elements that share a scale; 0: one scale per output row."""
    scale_bytes_x2: int
    """Twice the bytes of scales and zero points per block (half bytes occur: a 4-bit zero point)."""
    outer_block: int = 0
    """Double quantisation: first-level scales that share a second-level scale."""
    outer_bytes: int = 0
    experts_only: bool = False
    """Linear layers keep the weights' format, only experts are stored in this one."""
    dequantized: bool = False
    """The kernel writes a 16-bit copy of one weight at a time (bitsandbytes 4-bit at more than one token)."""
    keeps_input: bool = False
    """Its products keep their input for backward although the weight is frozen (bitsandbytes before 0.43.2)."""
    source: str = ""

    def weight_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one out x in matrix with its scales."""
        elements = out_features * in_features
        blocks = -(-elements // self.block) if self.block else out_features
        total = -(-elements * self.bits // 8) + -(-blocks * self.scale_bytes_x2 // 2)
        if self.outer_block:
            total += -(-blocks // self.outer_block) * self.outer_bytes
        return total


_BNB = "bitsandbytes functional.py: quantize_4bit, blocksize 64; absmax fp32, nested: 8 bits per block and fp32 per 256 blocks"
QUANTIZED = {
    one.name: one
    for one in (
        QuantizedFormat("nf4", 4, 64, 8, dequantized=True, source=_BNB),
        QuantizedFormat("nf4-dq", 4, 64, 2, 256, 4, dequantized=True, source=_BNB),
        QuantizedFormat("int4", 4, 128, 5, source="GPTQ and AWQ, group 128: fp16 scale and 4-bit zero point per group"),
        QuantizedFormat("mxfp4", 4, 32, 2, experts_only=True, source="OCP MX: an 8-bit scale for 32 elements; gpt-oss's experts"),
        QuantizedFormat("int8", 8, 0, 8, source="bitsandbytes LLM.int8(): one byte and an fp32 scale per output row"),
        QuantizedFormat("fp8", 8, 0, 8, source="per-channel fp8: one byte and an fp32 scale per output row"),
    )
}
"""Formats of linear layers' weights by name."""

KV_BYTES_X2 = {"fp32": 8, "bf16": 4, "fp16": 4, "fp8": 2, "int8": 2, "int4": 1}
"""Twice the bytes of one element of a KV cache."""


class MixedScheme(NamedTuple):
    """What a mixed precision means to a runtime: where the numbers of full precision are."""

    name: str
    master: str = ""
    """Format of the numbers that the optimizer updates, where they are not the weights that operations read."""
    beside: bool = False
    """They are a copy beside those weights; otherwise they are the weights, and a copy in the compute format exists of a unit
    (embedding, layer, head) only while that runs."""
    precisions: tuple[str, ...] = ()
    """The precisions that it knows; empty: all."""
    why: str = ""
    """What the answer says of the precision that it takes where none is given."""
    source: str = ""


MIXED_SCHEMES = {
    one.name: one
    for one in (
        MixedScheme("autocast", source="torch.autocast over the weights"),
        MixedScheme(
            "fsdp2",
            master="fp32",
            precisions=("bf16-mixed", "bf16-true", "32-true"),
            why="FSDP2's mixed precision: fp32 weights, of which each unit is cast while it runs, gradients reduced in fp32",
            source="torch 2.13 distributed/fsdp/_fully_shard: MixedPrecisionPolicy, _fsdp_param_group.py, _fsdp_collectives.py",
        ),
        MixedScheme(
            "megatron",
            master="fp32",
            beside=True,
            precisions=("bf16-mixed", "32-true"),
            why="16-bit weights, and fp32 gradients, main weights and moments: 2 + 4 + 12 bytes for every parameter",
            source="NVIDIA/Megatron-LM core/optimizer/optimizer.py Float16OptimizerWithFloat16Params, "
            "core/distributed/param_and_grad_buffer.py",
        ),
    )
}
"""By the name that a runtime gives in its field `mixed`."""


class PrecisionPolicy(NamedTuple):
    """In which format weights are stored and matrix products computed; `autocast`: torch casts at each operation."""

    name: str
    weight: str
    """Of the weights that operations read, and of the gradients that they make."""
    compute: str
    autocast: bool
    master: str = ""
    """See `MixedScheme`."""
    beside: bool = False

    @property
    def by_unit(self) -> bool:
        """The weights are the master's; each unit is cast while it runs."""
        return bool(self.master) and not self.beside

    @property
    def stored(self) -> str:
        """Format in which the weights are there all the time."""
        return self.master if self.by_unit else self.weight

    @property
    def updated(self) -> str:
        """Format of what the optimizer updates, and of the gradients that it reads."""
        return self.master or self.weight


@lru_cache(maxsize=64)
def training_policy(precision: str, weight_dtype: str | None, scheme: str = "autocast") -> PrecisionPolicy:
    """The policy of a training loop: `x-true` stores and computes in x; `x-mixed` is what the scheme makes of it.

    Autocast: torch casts weights in `weight_dtype` (fp32) at each operation.

    Raises:
        UsageError: a weight format that contradicts a true precision or a scheme, a precision that the scheme does not know.
    """
    width, _, kind = precision.partition("-")
    compute = {"32": "fp32"}.get(width, width)
    mixed = MIXED_SCHEMES[scheme]
    if mixed.precisions and precision not in mixed.precisions:
        raise UsageError(f"--precision {precision} is not what this runtime does: it has {', '.join(mixed.precisions)}")
    if kind == "mixed" and not mixed.master:
        return PrecisionPolicy(precision, weight_dtype or "fp32", compute, True)
    if kind == "mixed":
        made = PrecisionPolicy(precision, compute, compute, False, mixed.master, mixed.beside)
        if weight_dtype not in (None, made.stored):
            raise UsageError(f"--weight-dtype {weight_dtype} contradicts --precision {precision}: it keeps them in {made.stored}")
        return made
    if weight_dtype not in (None, compute):
        raise UsageError(
            f"--weight-dtype {weight_dtype} contradicts --precision {precision}: use a mixed precision, or leave it out"
        )
    return PrecisionPolicy(precision, compute, compute, False)
