"""Levers one by one, and the ladder that is built of them. The toy account's bytes are in fit_fakes."""

from __future__ import annotations

import dataclasses

import pytest
from fit_fakes import cluster, finetuning_job, inference_job, model, peak_only, toy, training_job
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.account.estimate import Estimate
from memfit.fit.ladder import MOST_SHOWN, Trial, climb
from memfit.fit.levers import LEVERS, Lever, levers_for
from memfit.fit.verdict import job_fits
from memfit.job import FineTuning, Inference, Job, Overheads, Parallelism, Training
from memfit.options import options_of

BY_NAME = {lever.name: lever for table in LEVERS.values() for lever in table}

JOBS = {
    "training": training_job(),
    "trainer": dataclasses.replace(training_job(), overheads=Overheads(runtime="hf-trainer")),
    "on a device": training_job(10**9),
    "fine-tuning": finetuning_job(method="full"),
    "lora": finetuning_job(method="lora"),
    "inference": inference_job(),
}


def names(levers: tuple[Lever, ...]) -> list[str]:
    return [lever.name for lever in levers]


def test_the_order_is_the_cost() -> None:
    # What costs nothing, then throughput, then rounding, then what is trained.
    assert names(LEVERS["train"]) == [
        "sdpa", "mixer-kernels", "adamw-fused", "fused-loss", "eval-accumulation", "zero-1", "zero-2", "fsdp", "micro-batch",
        "optimizer-in-backward", "selective-checkpointing", "checkpointing", "offloaded-checkpointing", "sequence-parallel",
        "tp-2", "tp-4", "tp-8", "tp-16", "adamw-8bit", "paged-adamw-8bit", "adafactor", "offload-optimizer",
        "pp-2", "pp-3", "pp-4", "pp-5", "pp-6", "pp-7", "pp-8", "pp-12", "pp-16",
        "bf16-true", "offload-params", "lora", "qlora",
    ]  # fmt: skip
    assert names(LEVERS["infer"]) == [
        "sdpa", "mixer-kernels", "prefill-chunk", "tp-2", "tp-4", "tp-8", "tp-16",
        "pp-2", "pp-3", "pp-4", "pp-5", "pp-6", "pp-7", "pp-8", "pp-12", "pp-16",
        "kv-fp8", "int8-weights", "concurrency", "int4-weights", "context",
    ]  # fmt: skip
    assert all(lever.why_here for table in LEVERS.values() for lever in table)


def test_names_are_unique_within_a_table() -> None:
    for table in LEVERS.values():
        assert len(set(names(table))) == len(table)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_no_lever_applies_to_its_own_result(job: Job) -> None:
    assert levers_for(job)
    for lever in levers_for(job):
        edited = lever.edit(job)
        assert edited != job
        assert not lever.applies(edited), lever.name


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_an_edit_leaves_a_resolved_legal_job(job: Job) -> None:
    for lever in levers_for(job):
        work = lever.edit(job).workload
        for name, one in options_of(type(work)).items():
            value = getattr(work, name)
            before = getattr(job.workload, name, None)
            assert value is not None or before is None, (lever.name, name)
            assert one.parse(value) == value, (lever.name, name)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_lever_says_what_it_changes_costs_and_how_it_is_spelled(job: Job) -> None:
    for lever in levers_for(job):
        after = lever.edit(job)
        assert lever.change(job, after)
        assert lever.cost(job, after)
        assert lever.flags(after)
        assert all(flag.strip() == flag and flag for flag in lever.flags(after))


@pytest.mark.parametrize(
    ("name", "job", "edits"),
    [
        ("sdpa", training_job(attention="eager"), {"attention": "sdpa"}),
        ("sdpa", inference_job(attention="eager"), {"attention": "sdpa"}),
        ("sdpa", training_job(attention="eager", of=model(attention_kernels=("flash", "eager"))), {"attention": "flash"}),
        ("adamw-fused", training_job(), {"optimizer": "adamw-fused"}),
        ("fused-loss", training_job(), {"loss": "fused"}),
        ("micro-batch", training_job(batch=6, grad_accum=2), {"batch": 1, "grad_accum": 12}),
        ("optimizer-in-backward", training_job(batch=1), {"optimizer_in_backward": True}),
        ("selective-checkpointing", training_job(), {"checkpointing": "selective"}),
        ("checkpointing", training_job(), {"checkpointing": "full"}),
        ("checkpointing", training_job(checkpointing="every:2"), {"checkpointing": "full"}),
        ("offloaded-checkpointing", training_job(checkpointing="full"), {"checkpointing": "offloaded"}),
        ("adamw-8bit", training_job(), {"optimizer": "adamw-8bit"}),
        ("paged-adamw-8bit", training_job(optimizer="adamw-8bit"), {"optimizer": "paged-adamw-8bit"}),
        ("bf16-true", training_job(), {"precision": "bf16-true", "weight_dtype": "bf16"}),
        ("bf16-true", training_job(precision="32-true"), {"precision": "bf16-true", "weight_dtype": "bf16"}),
        ("prefill-chunk", inference_job(context=8192, prompt=8192), {"prefill_chunk": 2048}),
        ("kv-fp8", inference_job(), {"kv_dtype": "fp8"}),
        ("int8-weights", inference_job(), {"quantization": "int8"}),
        ("int4-weights", inference_job(quantization="int8"), {"quantization": "int4"}),
        ("concurrency", inference_job(), {"concurrency": 1}),
        ("context", inference_job(), {"context": 512, "prompt": 512}),
    ],
)
def test_what_a_lever_edits(name: str, job: Job, edits: dict[str, object]) -> None:
    lever = BY_NAME[name]
    assert lever.applies(job)
    assert lever.edit(job) == dataclasses.replace(job, workload=dataclasses.replace(job.workload, **edits))


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("sdpa", training_job(attention="flash")),
        ("sdpa", training_job(attention="eager", of=model(attention_kernels=("eager",)))),
        ("adamw-fused", training_job(optimizer="adamw-fused")),
        ("adamw-fused", training_job(optimizer="sgd")),
        ("fused-loss", training_job(of=model(loss="masked-lm"))),
        ("micro-batch", training_job(batch=1)),
        ("micro-batch", training_job(batch=8, optimizer_in_backward=True)),  # which excludes accumulation
        ("optimizer-in-backward", training_job(batch=1).replace(parallelism=Parallelism(zero=3, dp_shard=8, sharding="fsdp2"))),
        ("adamw-8bit", training_job(optimizer="custom:states=2,bytes=4")),
        ("adamw-8bit", finetuning_job(method="lora")),
        ("bf16-true", training_job(precision="bf16-true", weight_dtype="bf16")),
        ("bf16-true", training_job(precision="fp16-mixed")),
        ("lora", finetuning_job(method="lora")),
        ("lora", finetuning_job(method="qlora")),
        ("qlora", finetuning_job(method="qlora")),
        ("prefill-chunk", inference_job(context=8192, prompt=8192, prefill_chunk=1024)),
        ("prefill-chunk", inference_job(context=2048)),
        ("kv-fp8", inference_job(kv_dtype="int4")),
        ("kv-fp8", inference_job(of=model(kind="encoder"))),
        ("int8-weights", inference_job(quantization="nf4")),
        ("int4-weights", inference_job(quantization="nf4-dq")),
        ("concurrency", inference_job(concurrency=1)),
        ("context", inference_job(context=512)),
    ],
)
def test_where_a_lever_does_not_apply(name: str, job: Job) -> None:
    assert not BY_NAME[name].applies(job)


def test_adapters_need_linear_layers() -> None:
    from memfit.families import from_counts

    counts = training_job(of=from_counts(1_000_000, 5_000_000))
    assert not {"lora", "qlora"} & set(names(levers_for(counts)))
    assert {"lora", "qlora"} <= set(names(levers_for(training_job())))


def test_bf16_is_not_proposed_where_the_device_has_none() -> None:
    job = training_job(10**9)
    old = dataclasses.replace(job, cluster=cluster(10**9, native_dtypes=("fp32", "fp16")))
    assert BY_NAME["bf16-true"].applies(job)
    assert not BY_NAME["bf16-true"].applies(old)
    lora = BY_NAME["lora"].edit(old).workload
    assert isinstance(lora, FineTuning)
    assert (lora.precision, lora.weight_dtype) == ("fp16-true", "fp16")


def test_adapters_keep_the_numbers_of_the_training() -> None:
    before = training_job(batch=3, seq=777, grad_accum=5, attention="eager", checkpointing="full", loss="fused")
    after = BY_NAME["qlora"].edit(before).workload
    assert isinstance(after, FineTuning)
    assert (after.method, after.batch, after.seq, after.grad_accum, after.attention) == ("qlora", 3, 777, 5, "eager")
    assert (after.checkpointing, after.loss) == ("full", "fused")
    assert BY_NAME["qlora"].edit(finetuning_job(method="lora", lora_rank=64)).workload.lora_rank == 64


@given(batch=st.integers(2, 5000), grad_accum=st.integers(1, 64), value=st.integers(1, 5000))
def test_a_smaller_micro_batch_keeps_the_global_batch_exactly(batch: int, grad_accum: int, value: int) -> None:
    lever = BY_NAME["micro-batch"]
    assert lever.edit_to is not None
    after = lever.edit_to(training_job(batch=batch, grad_accum=grad_accum), value).workload
    assert isinstance(after, Training)
    assert after.batch * after.grad_accum == batch * grad_accum
    assert after.batch <= max(value, 1)
    assert after.batch == max(one for one in range(1, min(batch, value) + 1) if batch % one == 0)


def test_costs_hold_their_numbers() -> None:
    before = training_job(batch=8, seq=1024)
    cost = BY_NAME["micro-batch"].cost(before, BY_NAME["micro-batch"].edit(before))
    assert "8 micro-batches of 1" in cost
    assert "1,024 tokens instead of 8,192" in cost
    assert "33 % more compute" in BY_NAME["checkpointing"].cost(before, before)
    # 2 + 8/256 B x 1,000,000 = 2,031,250 B = 1.94 MiB
    assert "1.94 MiB" in BY_NAME["paged-adamw-8bit"].cost(before, before)
    serving = inference_job(concurrency=8)
    assert "1 instead of 8 sequences" in BY_NAME["concurrency"].cost(serving, BY_NAME["concurrency"].edit(serving))


def test_flags_are_those_of_the_runtime() -> None:
    loop, trainer = training_job(), JOBS["trainer"]
    assert BY_NAME["checkpointing"].flags(loop) == ("model.gradient_checkpointing_enable()",)
    assert BY_NAME["checkpointing"].flags(trainer) == ("--gradient_checkpointing true",)
    assert BY_NAME["micro-batch"].flags(BY_NAME["micro-batch"].edit(trainer)) == (
        "--per_device_train_batch_size 1",
        "--gradient_accumulation_steps 4",
    )
    assert BY_NAME["context"].flags(inference_job(context=1000)) == ("--max-model-len 1000",)


# --- the ladder. Toy training job, batch 4 x 1,024 tokens: backward 4 + 4 + 8 MB + 4,096 x 1,500 B = 22,144,000 B; step 20 MB.


def peaks(trials: tuple[Trial, ...]) -> dict[str, int]:
    return {trial.levers[0].name: trial.estimate.peak.device_bytes for trial in trials}


def test_singles_by_hand() -> None:
    ladder = climb(training_job(), toy, toy(training_job()))
    assert peaks(ladder.trials) == {
        "adamw-fused": 22_144_000,  # the scratch is in the step, backward binds
        "fused-loss": 20_096_000,  # 16 MB + 4,096 x 1,000; the step is 20 MB
        "micro-batch": 20_000_000,  # half of 4 without a device: 16 MB + 2,048 x 1,500 = 19,072,000; the step binds
        "selective-checkpointing": 21_734_400,  # 16 MB + 4,096 x 1,400
        "offloaded-checkpointing": 20_000_000,
        "checkpointing": 20_000_000,  # 16 MB + 4,096 x 600 = 18,457,600; the step binds
        "adamw-8bit": 16_144_000,  # states 2 MB instead of 8
        "paged-adamw-8bit": 14_144_000,
        "adafactor": 14_144_000,  # the toy's factored states are nothing
        "bf16-true": 14_144_000,  # 2 + 2 + 4 MB
        "lora": 8_304_000,  # 2,000,000 + 40,000 + 40,000 + 80,000 + 6,144,000
        "qlora": 6_804_000,
    }
    assert all(one.fits is None for one in ladder.recommendations)
    assert ladder.best is None


def test_the_cheapest_single_that_fits_comes_first() -> None:
    job = training_job(20_100_000)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["fused-loss"]
    fits = [one.fits for one in ladder.recommendations]
    assert fits[0] == "yes"
    assert fits == sorted(fits, key=["yes", "tight", "no"].index)
    assert ladder.recommendations[0].peak_bytes == 20_096_000
    assert ladder.recommendations[0].saves_bytes == 22_144_000 - 20_096_000


def test_a_micro_batch_is_not_cut_into_more_than_a_run_may_accumulate() -> None:
    """2^20 micro-batches are the most that --grad-accum takes."""
    assert "micro-batch" in [one.name for one in levers_for(training_job(batch=8, grad_accum=1 << 17))]
    assert "micro-batch" not in [one.name for one in levers_for(training_job(batch=8, grad_accum=(1 << 17) + 1))]


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    # 12 sequences: 16 MB + 12 x 1,536,000 = 34.4 MB; 24 MB holds 5.2 of them, and 4 is the next divisor of 12.
    job = training_job(24_000_000, batch=12)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    work = ladder.best.job.workload
    assert isinstance(work, Training)
    assert (ladder.best.levers[0].name, work.batch, work.grad_accum) == ("micro-batch", 4, 3)
    assert ladder.recommendations[0].change == "micro-batch 4 with 3 accumulation steps"


def test_the_context_is_the_largest_that_fits() -> None:
    # KV fp8 + 4-bit weights would still leave 0.5 + 1.6 MB; alone, the context must fall: 2,000,000 + 1,650 x c <= 4,000,000.
    job = inference_job(4_000_000, quantization="nf4", kv_dtype="fp8", concurrency=1, context=30_000, prompt=30_000)
    work = dataclasses.replace(job.workload, quantization="none", weight_dtype="bf16")
    job = dataclasses.replace(job, workload=work)
    # 2,000,000 + (100 + 50) x c <= 4,000,000 -> 13,333
    ladder = climb(job, toy, toy(job))
    found = {trial.levers[0].name: trial for trial in ladder.trials}
    assert found["context"].job.workload.context == 13_333
    assert found["context"].job.workload.prompt == 13_333
    assert found["context"].fits == "yes"


def test_combination_when_no_single_lever_is_enough() -> None:
    # 6 MB: the best single is QLoRA with 6,804,000. Up to paged 8-bit, 8 MB of weights and gradients stay; with bf16-true they
    # are 4 MB, so the set ends there. Stripped from its dear end: without paged, 8 MB stay; without checkpointing, fused logits
    # and micro-batch 1 leave 5,024,000; without micro-batch, 8,096,000; without fused logits, 4 MB + 1,536,000.
    job = training_job(6_000_000)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["micro-batch", "paged-adamw-8bit", "bf16-true"]
    assert ladder.best.job.workload.batch == 1  # two sequences would be 7,072,000
    first = ladder.recommendations[0]
    assert (first.fits, first.peak_bytes, first.saves_bytes) == ("yes", 5_536_000, 22_144_000 - 5_536_000)
    assert first.change == "micro-batch 1 with 4 accumulation steps + paged 8-bit AdamW + weights, gradients and states in bf16"
    assert "bitsandbytes.optim.PagedAdamW8bit(...)" in first.flags


def test_a_pair_is_preferred_to_the_longer_set_with_the_same_dearest_lever() -> None:
    # 2 x 5,300 tokens, 16.4 MB. Without 8-bit states 16 MB + 530,000 at best. With them, 10 MB and per token of the whole batch:
    # fused loss 1,000 B, micro-batch 1 half of 1,500 B, both 500 B (15.3 MB, fits); checkpointing alone 600 B (16.36 MB, fits).
    # Stripping gives fused loss + micro-batch + 8-bit; the pair is one change less. QLoRA: 660,000 + 15.9 MB does not fit.
    job = training_job(16_400_000, batch=2, seq=5300)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["checkpointing", "adamw-8bit"]
    assert ladder.recommendations[0].peak_bytes == 16_360_000


def test_a_combination_goes_before_a_single_lever_that_changes_the_task() -> None:
    # 9 MB: LoRA alone is 8,304,000 and QLoRA 6,804,000, but with paged states (8 MB of weights and gradients) everything can be
    # trained. Stripped from the dear end: fused logits and micro-batch 1 leave 9,024,000, so checkpointing stays; micro-batch
    # goes (8,409,600); fused logits stay (10,457,600 without). Micro-batch and paged states alone: 9,536,000.
    job = training_job(9_000_000)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["fused-loss", "checkpointing", "paged-adamw-8bit"]
    assert [(one.fits, one.peak_bytes) for one in ladder.recommendations][:3] == [
        ("yes", 8_409_600),
        ("yes", 8_304_000),
        ("yes", 6_804_000),
    ]


def test_a_combination_takes_the_cheapest_of_each_group_that_is_enough() -> None:
    # 7.6 MB. Stripping finds micro-batch 1 + paged + bf16-true (5,536,000); plain 8-bit states are enough: 7,536,000.
    job = training_job(7_600_000)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert [lever.name for lever in ladder.best.levers] == ["micro-batch", "adamw-8bit", "bf16-true"]
    assert ladder.best.estimate.peak.device_bytes == 7_536_000


def test_when_nothing_fits_it_says_so() -> None:
    job = training_job(500_000)
    ladder = climb(job, toy, toy(job))
    assert ladder.best is None
    assert ladder.closest is not None
    assert {one.fits for one in ladder.recommendations} == {"no"}
    # QLoRA 660,000 + one sequence of 1,024 tokens x 90 B (offloaded checkpointing, fused): 752,160
    assert ladder.recommendations[0].peak_bytes == 752_160
    assert "still short by 0.24 MiB" in ladder.recommendations[0].cost  # 262,400 B
    assert ladder.recommendations[0].peak_bytes == min(one.peak_bytes for one in ladder.recommendations)


def test_a_job_that_fits_gets_only_what_is_free() -> None:
    job = training_job(10**9)
    ladder = climb(job, toy, toy(job))
    assert [trial.levers[0].name for trial in ladder.trials] == ["adamw-fused", "fused-loss"]
    assert [one.change for one in ladder.recommendations] == ["loss fused with the head, logits never stored"]  # saves 9 %
    serving = inference_job(10**9)
    assert climb(serving, toy, toy(serving)).recommendations == ()


def test_a_tight_job_gets_what_makes_it_fit() -> None:
    job = training_job(23_000_000, headroom=0.1)
    assert job_fits(toy(job).peak, job) == "tight"
    ladder = climb(job, toy, toy(job))
    assert ladder.best is not None
    assert ladder.recommendations[0].fits == "yes"


def test_few_lines() -> None:
    for usable in (None, 500_000, 6_000_000, 15_000_000, 21_000_000):
        job = training_job(usable)
        assert len(climb(job, toy, toy(job)).recommendations) <= MOST_SHOWN


def test_a_model_of_which_nothing_can_be_changed() -> None:
    job = finetuning_job(1, method="qlora", batch=1, checkpointing="offloaded", loss="fused", optimizer="paged-adamw-8bit")
    assert climb(job, toy, toy(job)).recommendations == ()


training_jobs = st.builds(
    training_job,
    st.integers(400_000, 60_000_000),
    headroom=st.sampled_from([0.0, 0.1]),
    batch=st.integers(1, 64),
    seq=st.integers(64, 4096),
    precision=st.sampled_from(["bf16-true", "bf16-mixed"]),
    optimizer=st.sampled_from(["adamw", "adamw-fused", "adamw-8bit", "sgd"]),
    checkpointing=st.sampled_from(["none", "full"]),
    loss=st.sampled_from(["eager", "fused"]),
)
inference_jobs = st.builds(
    inference_job,
    st.integers(400_000, 60_000_000),
    context=st.integers(1, 20_000),
    concurrency=st.integers(1, 300),
    quantization=st.sampled_from(["none", "int8", "int4"]),
    kv_dtype=st.sampled_from(["bf16", "fp8"]),
)


@settings(max_examples=150, deadline=None)
@given(job=st.one_of(training_jobs, inference_jobs))
def test_every_recommendation_is_the_estimate_of_an_edited_job(job: Job) -> None:
    current = toy(job)
    ladder = climb(job, toy, current)
    for trial in (*ladder.trials, *(one for one in (ladder.best, ladder.closest) if one is not None)):
        assert trial.estimate == toy(trial.job)
        assert trial.fits == job_fits(toy(trial.job).peak, trial.job)
        used = [lever.name for lever, _, _ in trial.steps]
        groups = [lever.group for lever, _, _ in trial.steps]
        assert len(set(used)) == len(used)
        assert len(set(groups)) == len(groups)
        job_then = job
        for lever, before, after in reversed(trial.steps):
            assert lever.applies(before)
            assert before == job_then
            job_then = after
        assert job_then == trial.job
    for one in ladder.recommendations:
        assert one.saves_bytes == current.peak.device_bytes - one.peak_bytes
    if ladder.best is not None:
        assert ladder.best.fits == "yes"
        assert ladder.recommendations[0].peak_bytes == ladder.best.estimate.peak.device_bytes


@settings(max_examples=100, deadline=None)
@given(job=st.one_of(training_jobs, inference_jobs))
def test_it_says_none_only_when_all_levers_together_do_not_fit(job: Job) -> None:
    ladder = climb(job, toy, toy(job))
    if job_fits(toy(job).peak, job) == "yes":
        return
    everything = job
    for lever in LEVERS["infer" if isinstance(job.workload, Inference) else "train"]:
        if lever.applies(everything):
            everything = lever.edit(everything)
    assert (ladder.best is not None) == (job_fits(toy(everything).peak, everything) == "yes")


@pytest.mark.parametrize("usable", [None, 500_000, 6_000_000, 15_000_000, 21_000_000, 10**9])
def test_the_number_of_estimates_is_bounded(usable: int | None) -> None:
    calls = 0

    def counted(job: Job) -> Estimate:
        nonlocal calls
        calls += 1
        return toy(job)

    job = training_job(usable, batch=64)
    climb(job, counted, toy(job))
    assert calls <= 36


def test_a_job_that_ignores_every_lever_is_told_what_was_tried() -> None:
    job = training_job(1000)
    constant = peak_only(lambda one: 2000)
    ladder = climb(job, constant, constant(job))
    assert ladder.best is None
    assert [one.fits for one in ladder.recommendations] == ["no"]
