"""How many devices do, and the levers over those that a job has, with an account that a reader can work out in the head."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fit_fakes import cluster, inference_job, peak_only, training_job

from memfit.account.estimate import Estimate
from memfit.account.layout import layout_of
from memfit.families import build_model
from memfit.fit.devices import enough, more_devices, spread
from memfit.fit.ladder import climb
from memfit.fit.levers import levers_for
from memfit.fit.levers.spread import layout_words, with_layout
from memfit.job import Job, Training
from memfit.model import Model

MILLION = 10**6


def sharded(job: Job) -> Estimate:
    """4 MB of weights, 12 MB of gradients and states, 1 MB of activations; a tenth of it where layers are recomputed."""
    one = layout_of(job)
    weights = 4 * MILLION // (one.shards if one.zero == 3 else 1)
    states = 12 * MILLION // (one.shards if one.zero else 1)
    assert isinstance(job.workload, Training)
    activations = MILLION // (10 if job.workload.checkpointing in ("full", "offloaded") else 1)
    return peak_only(lambda _: (weights + states) // (one.tp * one.pp) + activations)(job)


def on(usable: int, count: int) -> Job:
    return with_layout(dataclasses.replace(training_job(usable), cluster=cluster(usable, count)))


def test_the_smallest_power_of_two_that_holds_it() -> None:
    # 16 MB / n + 1 MB <= 3 MB: n = 8; with everything on one: 17 MB
    found = enough(on(3 * MILLION, 1), sharded, 1)
    assert found is not None
    assert (found.count, layout_of(found.job).zero, layout_of(found.job).dp_shard) == (8, 3, 8)
    assert found.estimate.peak.device_bytes == 3 * MILLION
    assert enough(on(17 * MILLION, 1), sharded) is not None
    assert enough(on(MILLION, 1), sharded, 1) is None  # the activations alone


def test_one_device_is_enough_where_it_is() -> None:
    found = enough(on(17 * MILLION, 1), sharded)
    assert found is not None
    assert found.count == 1


def test_more_devices_as_it_is_and_with_what_every_large_run_does() -> None:
    # 16 MB / n + 1 MB <= 1.2 MB: 80 -> 128. With checkpointing 16 MB / n + 0.1 MB <= 1.2 MB: 14.5 -> 16.
    job = on(1_200_000, 1)
    found = [one.recommendation for one in more_devices(job, sharded, sharded(job))]
    assert [one.flags[:2] for one in found] == [("--on 128xtoy-1", "--fsdp"), ("--on 16xtoy-1", "--fsdp")]
    assert found[1].peak_bytes == MILLION + MILLION // 10
    assert found[0].change.startswith("128x Toy 1GB (dp-shard 128, weights, gradients and states split)")
    assert "128 devices in 16 machines instead of 1" in found[0].cost
    assert "33 % more compute" in found[1].cost
    assert {one.fits for one in found} == {"yes"}


def test_nothing_is_said_where_no_number_does() -> None:
    job = on(50_000, 1)
    assert more_devices(job, sharded, sharded(job)) == ()


@pytest.mark.parametrize(
    ("name", "zero", "scheme"), [("zero-1", 1, "deepspeed"), ("zero-2", 2, "deepspeed"), ("fsdp", 3, "fsdp2")]
)
def test_sharding_levers_take_the_data_parallel_devices(name: str, zero: int, scheme: str) -> None:
    job = on(10 * MILLION, 8)
    assert job.workload.ddp == "copies"  # type: ignore[union-attr]
    lever = next(one for one in levers_for(job) if one.name == name)
    after = lever.edit(job)
    one = layout_of(after)
    assert (one.zero, one.scheme, one.dp_shard, one.dp_replicate, one.devices) == (zero, scheme, 8, 1, 8)
    assert after.workload.ddp == "none"  # type: ignore[union-attr]
    assert not lever.applies(after)
    # A million parameters. DeepSpeed: gradients and weights in 16 bits, 4 MB. FSDP2: weights twice in 16 bits, gradients in fp32,
    # 8 MB.
    # Replicas under autocast over fp32 weights: an all-reduce of fp32 gradients, 8 MB.
    assert ("3.81 MiB" if zero < 3 else "7.63 MiB") in lever.cost(job, after)
    assert "replicas (DDP) take 7.63 MiB" in lever.cost(job, after)


def test_there_is_nothing_to_share_on_one_device() -> None:
    assert not {"zero-1", "zero-2", "fsdp", "tp-2", "pp-2"} & {one.name for one in levers_for(training_job(MILLION))}
    assert not {"tp-2", "pp-2"} & {one.name for one in levers_for(inference_job(MILLION))}


def _llama(heads: int) -> Model:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8 * heads, "num_hidden_layers": 8,
        "intermediate_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 256,
    }  # fmt: skip
    return build_model(config, name="tiny", source="by hand")


def _on_machines(of: Model, machines: int, **workload: Any) -> Job:
    job = training_job(MILLION, of=of, **workload)
    return with_layout(dataclasses.replace(job, cluster=cluster(MILLION, 8).replace(nodes=machines)))


def test_tensor_parallelism_stays_within_a_machine_and_divides_the_heads() -> None:
    names = {one.name for one in levers_for(_on_machines(_llama(8), 2))}
    assert {"tp-2", "tp-4"} <= names
    assert "tp-8" not in names  # four devices a machine
    assert not {"tp-2", "tp-4"} & {one.name for one in levers_for(_on_machines(_llama(3), 2))}


def test_pipelines_have_no_more_stages_than_layers() -> None:
    names = {one.name for one in levers_for(_on_machines(_llama(8), 1))}
    assert {"pp-2", "pp-4"} <= names
    assert "pp-8" not in names  # embedding and head weigh as a layer each


def test_the_idle_share_of_a_pipeline() -> None:
    job = _on_machines(_llama(8), 1, grad_accum=13)
    lever = next(one for one in levers_for(job) if one.name == "pp-4")
    # 3 / (13 + 3) = 18.75 %
    assert "idle 19 % of the time with 13 micro-batches" in lever.cost(job, lever.edit(job))


def test_what_is_left_of_the_devices_replicates_or_shards() -> None:
    job = on(MILLION, 16)
    assert layout_words(layout_of(job)) == "dp-replicate 16"
    assert layout_words(layout_of(with_layout(job, tp=2, zero=3, scheme="fsdp2"))) == "tp 2 x dp-shard 8"
    assert layout_of(with_layout(job, tp=2, pp=4)).dp_replicate == 2
    assert spread(dataclasses.replace(job, workload=job.workload.replace(optimizer_in_backward=True)), 32) is None


def test_what_leaves_devices_to_others_is_tried_before_pipelines() -> None:
    # 17 MB on one. FSDP over 8 and recomputed layers: 16 / 8 + 0.1 = 2.1 MB. A pipeline of 4 alone: 16 / 4 + 1 = 5 MB; with FSDP
    # over the two devices that are left, and recomputed layers, 2.1 MB as well.
    job = with_layout(dataclasses.replace(training_job(2_200_000, of=_llama(8)), cluster=cluster(2_200_000, 8)))
    ladder = climb(job, sharded, sharded(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["fsdp", "checkpointing"]


def test_8_bit_states_under_fsdp2_are_torchaos() -> None:
    """bitsandbytes' kernels do not take DTensors."""
    lever = next(one for one in levers_for(on(MILLION, 8)) if one.name == "adamw-8bit")
    sharded_job = with_layout(on(MILLION, 8), zero=3, scheme="fsdp2")
    assert lever.flags(sharded_job) == ("torchao.optim.AdamW8bit(...)",)
    assert lever.flags(on(MILLION, 8)) == ("bitsandbytes.optim.AdamW8bit(...)",)
