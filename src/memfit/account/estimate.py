"""The memory of every rank: what `evaluate` returns. Integers of bytes; see section "three numbers" in docs/concepts.md."""

from __future__ import annotations

from memfit.records import Record

COMPONENTS = (
    "weights",
    "gradients",
    "master_weights",
    "optimizer_states",
    "activations",
    "logits",
    "kv_cache",
    "recurrent_state",
    "inputs",
    "temporary",
    "communication",
    "workspace",
    "cuda_graphs",
    "context",
    "fragmentation",
)
COUNTED_IN = {"context": "device", "communication": "device", "cuda_graphs": "device", "fragmentation": "reserved"}
"""At which of the three numbers a component enters; `allocated` when not named here."""


class Component(Record):
    """One row of the answer. `bytes` is its own maximum over the phases, `at_peak_bytes` what it holds in the binding phase."""

    name: str
    bytes: int
    at_peak_bytes: int
    low_bytes: int
    high_bytes: int
    basis: str
    """exact | modelled | calibrated | assumed"""
    formula: str
    """With the numbers in it: `8,030,261,248 x 2 B`."""
    source: str = ""

    @property
    def counted_in(self) -> str:
        """allocated | reserved | device"""
        return COUNTED_IN.get(self.name, "allocated")


class Phase(Record):
    """A moment of the run: the largest allocation within it and the components that make it up."""

    name: str
    allocated_bytes: int
    components: dict[str, int]
    first_step: bool = False


class Peak(Record):
    """The three numbers at the binding phase. `low`/`high` bound `device_bytes` at 90 %; `safe` is its one-sided 99 % bound."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    safe_bytes: int
    where: str = ""
    """In words: which block of which phase binds."""


class Rank(Record):
    """One device of the mesh; ranks with equal memory are reported once, with their count."""

    rank: str
    count: int
    components: tuple[Component, ...]
    phases: tuple[Phase, ...]
    peak: Peak
    kept_bytes: int | None = None
    """Training: what autograd holds when forward and loss have run (no parameters, no buffers)."""
    forward_end_bytes: int | None = None
    """Training: everything allocated at that moment."""
    backward_end_bytes: int | None = None
    """Training: everything allocated when backward has run and the optimizer has not."""
    holds: str = ""
    """The part of the model that it has, in words, where ranks differ by it."""


class CacheUse(Record):
    """The KV cache of one device: `bytes_per_token` is what the last token of the context adds."""

    bytes_per_token: int
    bytes_per_sequence: int
    state_bytes_per_sequence: int = 0
    """Recurrent states beside it, which do not grow with the context."""
    pool_bytes: int | None = None
    pool_tokens: int | None = None
    max_concurrency: float | None = None


class Estimate(Record):
    """The memory of every rank of a job."""

    ranks: tuple[Rank, ...]
    host_bytes: int = 0
    cache: CacheUse | None = None
    notes: tuple[str, ...] = ()
    trainable_parameters: int | None = None
    """Parameters that the optimizer updates, adapters included; `None` if not counted."""

    @property
    def worst(self) -> Rank:
        """The rank that binds."""
        return max(self.ranks, key=lambda rank: rank.peak.device_bytes)

    @property
    def peak(self) -> Peak:
        """The peak of the rank that binds."""
        return self.worst.peak
