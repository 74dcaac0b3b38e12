"""How a job is laid out: degrees that are decided, products that must be the devices, contradictions that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from memfit import account, api
from memfit.account.layout import Layout, layout_of
from memfit.account.ranks import groups_of
from memfit.errors import UsageError
from memfit.job import ALL_OPEN, Parallelism

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip


def resolved(on: str | None, kind: str = "train", **degrees: Any) -> account.Resolved:
    runtime = degrees.pop("runtime", None)
    workload = {"kind": kind, "context" if kind == "infer" else "seq": 64}
    overheads = {"runtime": runtime} if runtime else None
    return account.resolve(api.make_job(LLAMA, workload, on=on, parallelism=degrees, overheads=overheads))


def layout(on: str | None, kind: str = "train", **degrees: Any) -> Layout:
    return layout_of(resolved(on, kind, **degrees).job)


def test_nothing_said_on_one_device_leaves_nothing_to_decide() -> None:
    for on in (None, "h100"):
        assert layout(on) == Layout()
        assert resolved(on).job.parallelism is ALL_OPEN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dp_replicate": 8}),
        ({"fsdp": True}, {"dp_shard": 8, "zero": 3, "scheme": "fsdp2"}),
        ({"zero": 1}, {"dp_shard": 8, "zero": 1, "scheme": "deepspeed"}),
        ({"zero": 3, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4, "zero": 3, "scheme": "deepspeed"}),
        ({"dp_shard": 8}, {"dp_shard": 8, "zero": 3, "scheme": "fsdp2"}),
        ({"fsdp": True, "sharding": "fsdp1"}, {"dp_shard": 8, "zero": 3, "scheme": "fsdp1"}),
    ],
)
def test_what_is_left_open_takes_the_devices_that_are_left(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert layout("8xh100", **given) == Layout(**expected)


def test_without_devices_the_degrees_say_how_many_there_are() -> None:
    assert layout(None, dp_shard=16).devices == 16
    assert layout(None, dp_replicate=2, dp_shard=4, zero=2).devices == 8
    with pytest.raises(UsageError, match="say over how many with --on"):
        resolved(None, fsdp=True)


@pytest.mark.parametrize(
    ("on", "given", "said"),
    [
        ("8xh100", {"dp_replicate": 3}, "--dp-replicate 3 does not divide the 8 devices"),
        ("8xh100", {"dp_replicate": 2, "dp_shard": 2}, "--dp-replicate 2 x --dp-shard 2 = 4: --on has 8 devices"),
        ("8xh100", {"fsdp": True, "zero": 1}, "it excludes --zero 1"),
        ("8xh100", {"zero": 0, "dp_shard": 8}, "--zero 0 says that none are"),
        ("8xh100", {"sp": True}, "give --tp as well"),
        ("8xh100", {"virtual_stages": 2}, "belongs to --schedule interleaved"),
        ("8xh100", {"schedule": "gpipe"}, "give --pp as well"),
        ("8xh100", {"offload": "optimizer"}, "give --zero or --fsdp as well"),
        ("8xh100", {"offload": "params", "zero": 2}, "--zero 3 or --fsdp"),
        ("8xh100", {"fsdp": True, "zero_init": False}, "--no-zero-init is a habit of DeepSpeed's ZeRO"),
        ("8xh100", {"ep": 3}, "--ep 3 takes its devices from the 8 data-parallel ones"),
    ],
)
def test_contradictions_are_refused_in_one_line(on: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(on, **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cp", "dp_shard", "zero", "fsdp", "schedule"])
def test_inference_refuses_what_belongs_to_training(name: str) -> None:
    value = {"fsdp": True, "schedule": "gpipe"}.get(name, 2)
    beside = {"pp": 2} if name == "schedule" else {}
    with pytest.raises(UsageError, match="belongs to training"):
        resolved("8xh100", "infer", **{name: value}, **beside)


def test_decisions_are_assumptions_with_their_flags() -> None:
    found = {one.name: one for one in resolved("8xh100").assumptions}
    assert (found["dp_replicate"].value, found["dp_replicate"].flag) == (8, "--dp-replicate")
    assert found["ddp"].value == "copies"
    sharded = {one.name: one.value for one in resolved("8xh100", fsdp=True).assumptions}
    assert sharded["sharding"] == "fsdp2"
    assert "ddp" not in sharded


def test_ddp_buckets_and_sharding_exclude_each_other() -> None:
    job = api.make_job(LLAMA, {"kind": "train", "seq": 64, "ddp": "copies"}, on="8xh100", parallelism={"fsdp": True})
    with pytest.raises(UsageError, match="leave out one of them"):
        account.resolve(job)


def test_groups_of_a_rank() -> None:
    assert groups_of(resolved("8xh100").job) == (8,)
    assert groups_of(resolved("8xh100", fsdp=True, dp_replicate=2).job) == (2, 4)
    assert groups_of(resolved("h100").job) == ()


def test_communicators_are_a_component_only_where_there_are_some() -> None:
    names = {one.name for one in account.estimate(resolved("8xh100").job).worst.components}
    assert "communication" in names
    assert "communication" not in {one.name for one in account.estimate(resolved("h100").job).worst.components}


def test_the_parallelism_of_an_answer_is_the_layout() -> None:
    from memfit.report import to_json

    data = to_json(api.answer(LLAMA, {"kind": "train", "seq": 64}, on="8xh100", parallelism=Parallelism(fsdp=True)))
    assert data["parallelism"]["dp_shard"] == 8
    assert data["parallelism"]["zero"] == 3
    assert data["parallelism"]["sharding"] == "fsdp2"
    assert data["ranks"][0]["count"] == 8


@pytest.mark.parametrize(
    ("runtime", "given", "said"),
    [
        (None, {"zero": 2, "pp": 2}, "DeepSpeed's pipelines go with --zero 1 alone"),
        (None, {"zero": 1, "pp": 2, "schedule": "gpipe"}, "DeepSpeed's pipelines run 1f1b"),
        ("megatron", {"zero": 3}, "Megatron's distributed optimizer has --zero 1"),
        ("megatron", {"pp": 2, "schedule": "gpipe"}, "megatron has 1f1b and interleaved"),
        ("unsloth", {"tp": 2}, "--tp 2: unsloth has nothing of the kind"),
        ("unsloth", {"fsdp": True}, "--zero 3: unsloth has nothing of the kind"),
        ("hf-trainer", {"pp": 2}, "--pp 2: hf-trainer has nothing of the kind"),
    ],
)
def test_layouts_that_the_software_lacks_are_refused(runtime: str | None, given: dict[str, Any], said: str) -> None:
    workload = {"kind": "finetune", "method": "lora", "seq": 64} if runtime == "unsloth" else {"kind": "train", "seq": 64}
    job = api.make_job(LLAMA, workload, on="8xh100", parallelism=given, overheads={"runtime": runtime})
    with pytest.raises(UsageError) as caught:
        account.resolve(job)
    assert said in str(caught.value)


@pytest.mark.parametrize(("given", "shards"), [({}, 8), ({"tp": 2}, 4), ({"pp": 2}, 4), ({"cp": 2}, 8), ({"cp": 8}, 8)])
def test_torchtitan_shards_over_what_other_degrees_leave(given: dict[str, Any], shards: int) -> None:
    """data_parallel_shard_degree is -1: all that is left, and devices that share a sequence take part."""
    found = layout("8xh100", runtime="torchtitan", **given)
    assert (found.zero, found.shards, found.dp_replicate) == (3, shards, 1)


@pytest.mark.parametrize(
    ("on", "kind", "given"),
    [
        ("8x8xh100", "train", {"runtime": "megatron"}),
        ("8xh100", "train", {"runtime": "hf-trainer"}),
        ("8xh100", "train", {"runtime": "torchtitan", "tp": 2}),
        ("6xh100", "infer", {}),
        ("3xh100", "infer", {}),
        ("8xh100", "train", {"zero": 1, "pp": 2}),
    ],
)
def test_every_lever_leads_to_a_layout_that_is_accepted(on: str, kind: str, given: dict[str, Any]) -> None:
    """The edited job, asked as a new one, is not refused."""
    from memfit.fit.levers import levers_for

    job = resolved(on, kind, **given).job
    levers = [one for one in levers_for(job) if one.group in ("sharding", "tensor", "pipeline", "offload", "sequence-parallel")]
    assert levers
    for lever in levers:
        edited = lever.edit(job)
        decided = layout_of(account.resolve(edited).job)
        assert decided._replace(stage_layers="") == layout_of(edited)._replace(stage_layers=""), lever.name
