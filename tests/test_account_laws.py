"""Laws that hold for every job: sums, order, monotony, additivity over layers."""

from __future__ import annotations

from typing import Any

import heart_models as models
from heart_strategies import (
    DECODER_MODELS,
    DECODERS,
    DEVICES,
    MODELS,
    WORKLOADS,
    changed,
    estimated,
    inferences,
    larger_vocabulary,
    model,
    peak,
    trainings,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memfit.account import estimate, resolve
from memfit.account.estimate import COMPONENTS
from memfit.devices import parse_cluster
from memfit.job import FineTuning, Inference, Job, Training
from memfit.model import Model

# ------------------------------------------------------------------ sums and order


@settings(max_examples=200, deadline=None)
@given(MODELS, WORKLOADS, DEVICES)
def test_sums_and_order(of: Model, workload: Any, device: str | None) -> None:
    job = resolve(Job(model=of, workload=workload, cluster=parse_cluster(device) if device else None)).job
    found = estimate(job)
    rank, top = found.worst, found.peak
    names = [one.name for one in rank.components]
    assert len(set(names)) == len(names)
    assert set(names) <= set(COMPONENTS)
    assert sum(one.at_peak_bytes for one in rank.components) == top.device_bytes
    assert top.allocated_bytes <= top.reserved_bytes <= top.device_bytes
    by_place = {"allocated": 0, "reserved": 0, "device": 0}
    for one in rank.components:
        by_place[one.counted_in] += one.at_peak_bytes
        assert 0 <= one.at_peak_bytes <= one.bytes
        assert 0 <= one.low_bytes <= one.bytes <= one.high_bytes
        assert one.basis in {"exact", "modelled", "calibrated", "assumed"}
        assert one.formula
    assert by_place["allocated"] == top.allocated_bytes
    assert by_place["allocated"] + by_place["reserved"] == top.reserved_bytes
    for phase in rank.phases:
        assert sum(phase.components.values()) == phase.allocated_bytes
        assert min(phase.components.values()) >= 0
        assert phase.allocated_bytes <= top.allocated_bytes
        for name, num_bytes in phase.components.items():
            assert num_bytes <= models.component(rank, name)
    assert top.allocated_bytes == max(phase.allocated_bytes for phase in rank.phases)
    assert top.phase in {phase.name for phase in rank.phases}
    assert 0 <= top.low_bytes <= top.device_bytes <= top.high_bytes <= top.safe_bytes
    assert all(isinstance(value, int) for value in (top.allocated_bytes, top.device_bytes, top.low_bytes, top.safe_bytes))


@settings(max_examples=60, deadline=None)
@given(MODELS, trainings())
def test_the_ends_of_forward_and_backward_lie_within_the_peak(of: Model, workload: Training) -> None:
    rank = estimated(of, workload).worst
    assert rank.kept_bytes is not None
    assert rank.forward_end_bytes is not None
    assert rank.backward_end_bytes is not None
    assert 0 < rank.kept_bytes < rank.forward_end_bytes <= rank.peak.allocated_bytes
    assert 0 < rank.backward_end_bytes <= rank.peak.allocated_bytes


@settings(max_examples=40, deadline=None)
@given(MODELS, WORKLOADS)
def test_the_same_question_has_the_same_answer(of: Model, workload: Any) -> None:
    assert estimated(of, workload).peak == estimated(of, changed(workload)).peak


# ------------------------------------------------------------------ monotony


@settings(max_examples=100, deadline=None)
@given(MODELS, trainings(), st.integers(1, 64))
def test_a_larger_batch_never_needs_less(of: Model, workload: Training, more: int) -> None:
    larger = changed(workload, batch=workload.batch + more)
    small, large = estimated(of, workload).worst, estimated(of, larger).worst
    assert small.peak.device_bytes <= large.peak.device_bytes
    assert small.kept_bytes <= large.kept_bytes  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(MODELS, trainings(), st.integers(1, 300))
def test_a_longer_sequence_never_needs_less(of: Model, workload: Training, more: int) -> None:
    longer = changed(workload, seq=(workload.seq or 1) + more)
    assert peak(of, workload) <= peak(of, longer)


@settings(max_examples=60, deadline=None)
@given(DECODER_MODELS, trainings(), st.integers(1, 64))
def test_a_larger_rank_never_needs_less(of: Model, workload: Training, more: int) -> None:
    assume("8bit" not in workload.optimizer)  # tensors of fewer than 4,096 elements have 32-bit states
    assume(isinstance(workload, FineTuning) and workload.method != "full")
    assert isinstance(workload, FineTuning)
    larger = changed(workload, lora_rank=workload.lora_rank + more)
    assert peak(of, workload) <= peak(of, larger)


@settings(max_examples=100, deadline=None)
@given(MODELS, inferences(), st.integers(1, 300), st.integers(1, 64))
def test_context_prompt_and_concurrency_never_need_less(of: Model, workload: Inference, tokens: int, sequences: int) -> None:
    """But where a window begins to bind: sdpa then gets a mask, and in fp32 another kernel, which may take less."""
    before, after = min(workload.context or 1, workload.prompt or 1), (workload.context or 1) + tokens
    assume(workload.attention != "sdpa" or not any(before <= window <= after for window in of.windows))
    assert peak(of, workload) <= peak(of, changed(workload, context=(workload.context or 1) + tokens))
    assert peak(of, workload) <= peak(of, changed(workload, concurrency=workload.concurrency + sequences))
    both = changed(workload, context=(workload.context or 1) + tokens, prompt=(workload.prompt or 1) + tokens)
    assert peak(of, workload) <= peak(of, both)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*DECODERS, "bert"]), trainings(), st.integers(1, 6), st.integers(1, 5))
def test_more_layers_never_need_less(family: str, workload: Training, layers: int, more: int) -> None:
    if workload.checkpointing == "full" and layers >= 2:
        workload = changed(workload, checkpointing="every:2")
    assert peak(model(family, layers), workload) <= peak(model(family, layers + more), workload)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["llama", "qwen3", "phi", "bert"]), trainings())
def test_a_larger_vocabulary_never_needs_less(family: str, workload: Training) -> None:
    assert peak(model(family), workload) <= peak(larger_vocabulary(family), workload)


# ------------------------------------------------------------------ what changes what


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*DECODERS, "bert"]), trainings(), st.integers(2, 5))
def test_checkpointing_some_layers_keeps_between_all_and_none(family: str, workload: Training, number: int) -> None:
    of = model(family, 5)
    kinds = ("full", f"every:{number}", f"first:{number}", "none")
    full, every, first, none = (estimated(of, changed(workload, checkpointing=one)).worst for one in kinds)
    assert full.kept_bytes <= every.kept_bytes <= none.kept_bytes  # type: ignore[operator]
    assert full.kept_bytes <= first.kept_bytes <= none.kept_bytes  # type: ignore[operator]
    if number == 5:
        assert first.peak == full.peak
    if workload.attention != "eager" and workload.padding == "none":  # closures of checkpoints hold masks until they run
        assert every.forward_end_bytes <= none.forward_end_bytes  # type: ignore[operator]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*DECODERS, "bert"]), trainings(), st.integers(2, 5))
def test_larger_groups_keep_fewer_inputs(family: str, workload: Training, number: int) -> None:
    of = model(family, 5)
    groups, layers = (estimated(of, changed(workload, checkpointing=one)).worst for one in (f"group:{number}", "full"))
    assert groups.kept_bytes <= layers.kept_bytes  # type: ignore[operator]


@settings(max_examples=60, deadline=None)
@given(MODELS, trainings())
def test_stepping_within_backward_never_needs_more(of: Model, workload: Training) -> None:
    workload = changed(workload, grad_accum=1, zero_grad="none", optimizer="adamw-fused")
    if workload.precision == "fp16-mixed":  # whose scaler excludes it
        workload = changed(workload, precision="bf16-mixed")
    after, within = (estimated(of, changed(workload, optimizer_in_backward=one)).worst for one in (False, True))
    assert within.peak.allocated_bytes <= after.peak.allocated_bytes
    assert within.kept_bytes == after.kept_bytes


@settings(max_examples=60, deadline=None)
@given(MODELS, trainings())
def test_buckets_cost_the_gradients_once(of: Model, workload: Training) -> None:
    none, views, copies = (estimated(of, changed(workload, ddp=one)).worst for one in ("none", "views", "copies"))
    gradients = models.component(none, "gradients")
    assert copies.peak.allocated_bytes - none.peak.allocated_bytes == models.component(copies, "gradients") - gradients
    assert none.peak.allocated_bytes <= views.peak.allocated_bytes <= copies.peak.allocated_bytes


@settings(max_examples=80, deadline=None)
@given(MODELS, trainings())
def test_checkpointing_never_keeps_more(of: Model, workload: Training) -> None:
    none, full = (estimated(of, changed(workload, checkpointing=how)).worst for how in ("none", "full"))
    assert full.kept_bytes <= none.kept_bytes  # type: ignore[operator]
    chosen = estimated(of, changed(workload, checkpointing="selective")).worst
    offloaded = estimated(of, changed(workload, checkpointing="offloaded")).worst
    assert offloaded.kept_bytes <= full.kept_bytes <= chosen.kept_bytes  # type: ignore[operator]
    # the closures of checkpoint() hold a mask and the rotary tables beside what autograd keeps
    assert full.forward_end_bytes <= none.forward_end_bytes + 4 * workload.batch * (workload.seq or 1) ** 2 * 2 + 4096 * 512  # type: ignore[operator]


# a seventh of the workloads stores in fp32: the filter is meant
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(MODELS, trainings())
def test_8_bit_states_are_smaller_and_the_paged_ones_on_the_host(of: Model, workload: Training) -> None:
    """Of fp32 weights: small tensors have 32-bit states even when their weights have 16."""
    assume(workload.weight_dtype == "fp32" or workload.precision == "32-true")
    assume(workload.checkpointing != "offloaded")  # which has bytes of its own on the host
    assume(getattr(workload, "lora_dtype", "fp32") == "fp32")

    def states(optimizer: str) -> tuple[int, int]:
        found = estimated(of, changed(workload, optimizer=optimizer))
        return models.component(found.worst, "optimizer_states"), found.host_bytes

    full, full_host = states("adamw-fused")
    eight, eight_host = states("adamw-8bit")
    paged, paged_host = states("paged-adamw-8bit")
    assert eight <= full
    assert (full_host, eight_host, paged) == (0, 0, 0)
    assert paged_host == eight


@settings(max_examples=60, deadline=None)
@given(MODELS, trainings())
def test_a_fused_loss_and_dropped_outputs_never_keep_more(of: Model, workload: Training) -> None:
    kept, dropped = (estimated(of, changed(workload, outputs=how)).worst for how in ("kept", "dropped"))
    assert dropped.peak.device_bytes <= kept.peak.device_bytes
    assert dropped.kept_bytes == kept.kept_bytes
    assume(of.family != "bert" or workload.loss == "eager")
    eager, fused = (estimated(of, changed(workload, loss=how)).worst for how in ("eager", "fused"))
    assert models.component(fused, "logits") <= models.component(eager, "logits")


@settings(max_examples=60, deadline=None)
@given(DECODER_MODELS, inferences())
def test_smaller_formats_need_less(of: Model, workload: Inference) -> None:
    def weights(quantization: str) -> int:
        return models.component(estimated(of, changed(workload, quantization=quantization)).worst, "weights")

    assert weights("nf4-dq") < weights("nf4") < weights("int8") < weights("none")
    assert weights("nf4-dq") < weights("int4") < weights("int8")

    def cache(kv_dtype: str) -> int:
        found = estimated(of, changed(workload, kv_dtype=kv_dtype)).cache
        assert found is not None
        return found.bytes_per_sequence

    assert cache("int4") * 2 == cache("fp8") == cache("int8")
    assert cache("int8") * 2 == cache("bf16") == cache("fp16")
    assert cache("bf16") * 2 == cache("fp32")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DECODERS), trainings())
def test_an_untied_head_costs_its_weights(family: str, workload: Training) -> None:
    tied, untied = model(family, 4, True), model(family, 4, False)
    head = 1000 * 256
    assert untied.num_parameters - tied.num_parameters == head
    weights = [models.component(estimated(one, workload).worst, "weights") for one in (tied, untied)]
    assert weights[1] - weights[0] in (2 * head, 4 * head)
    assert peak(tied, workload) <= peak(untied, workload)
    kept = [estimated(one, workload).worst.kept_bytes for one in (tied, untied)]
    if workload.loss == "eager":
        assert kept[0] == kept[1]


@settings(max_examples=60, deadline=None)
@given(MODELS, WORKLOADS, st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_overheads_given_by_hand_are_added_as_they_are(
    of: Model, workload: Any, workspace: int, context: int, fragmentation: int
) -> None:
    bare = estimated(of, workload).peak
    found = estimated(of, workload, workspace=workspace, cuda_context=context, fragmentation=fragmentation).peak
    assert found.allocated_bytes == bare.allocated_bytes + workspace
    assert found.reserved_bytes == found.allocated_bytes + fragmentation
    assert found.device_bytes == found.reserved_bytes + context


# ------------------------------------------------------------------ additive over layers


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["llama", "mistral", "qwen3", "gpt2", "gpt_neox", "bert"]), trainings())
def test_every_layer_keeps_the_same(family: str, workload: Training) -> None:
    """From the second layer on: the first may see an input that needs no gradient, or another format."""
    assume(workload.checkpointing not in ("first:2", "group:3", "offloaded"))
    kept = [estimated(model(family, layers), workload).worst.kept_bytes for layers in (2, 3, 4, 11)]
    layer = kept[1] - kept[0]  # type: ignore[operator]
    assert layer > 0
    assert kept[2] - kept[1] == layer  # type: ignore[operator]
    assert kept[3] - kept[0] == 9 * layer  # type: ignore[operator]


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_every_pair_of_alternating_layers_keeps_the_same(workload: Training) -> None:
    assume(workload.checkpointing not in ("first:2", "group:3", "offloaded"))
    kept = [estimated(model("gemma2", layers), workload).worst.kept_bytes for layers in (2, 4, 6, 20)]
    pair = kept[1] - kept[0]  # type: ignore[operator]
    assert kept[2] - kept[1] == pair  # type: ignore[operator]
    assert kept[3] - kept[0] == 9 * pair  # type: ignore[operator]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["llama", "gpt2", "gpt_neox"]), inferences())
def test_every_layer_adds_its_weights_and_its_cache(family: str, workload: Inference) -> None:
    ranks = [estimated(model(family, layers), workload).worst for layers in (2, 3, 4, 11)]
    for name in ("weights", "kv_cache"):
        first, second, third, last = (models.component(rank, name) for rank in ranks)
        assert third - second == second - first > 0
        assert last - first == 9 * (second - first)
