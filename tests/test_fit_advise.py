"""Rule of thumb, warnings, verify steps, next commands, and the answer as a whole, over the toy account."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from fit_fakes import alone, cluster, estimate_of, finetuning_job, inference_job, model, peak, peak_only, toy, training_job

import memfit.fit.hardware
from memfit.account.estimate import Estimate, Phase, Rank
from memfit.devices import Device
from memfit.fit import judge_estimate
from memfit.fit.advise import first_step_bytes, verify, warnings
from memfit.fit.answer import Answer, Verdict
from memfit.fit.command import command_line
from memfit.fit.hardware import on_device, smallest_devices
from memfit.fit.thumb import rule_of_thumb
from memfit.job import Assumption, Job, Overheads, Parallelism
from memfit.units import GiB


class Resolved:
    """What `memfit.account.resolve` returns, for a job that needs nothing."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.assumptions = (Assumption(name="seq", value=1024, why="because", flag="--seq"),)
        self.warnings = (("note", "something"),)


def ask(job: Job) -> Answer:
    return judge_estimate(job, Resolved(job), toy)  # type: ignore[arg-type]


# --- rule of thumb: P = 1,000,000


@pytest.mark.parametrize(
    ("job", "num_bytes", "formula"),
    [
        (training_job(), 16_000_000, "16 B x 1.00M (weights 4 + gradients 4 + AdamW 8)"),
        (training_job(precision="bf16-true", weight_dtype="bf16"), 8_000_000, "8 B x 1.00M (weights 2 + gradients 2 + AdamW 4)"),
        (training_job(precision="32-true"), 16_000_000, "16 B x 1.00M (weights 4 + gradients 4 + AdamW 8)"),
        (finetuning_job(method="full"), 8_000_000, "8 B x 1.00M (weights 2 + gradients 2 + AdamW 4)"),
        # The toy's adapters have 40,000 B of gradients: 10,000 parameters in fp32.
        (finetuning_job(method="lora"), 2_160_000, "2 B x 1.00M frozen + 16 B x 10,000 in adapters"),
        (finetuning_job(method="qlora"), 710_000, "0.55 B x 1.00M frozen + 16 B x 10,000 in adapters"),
        (inference_job(), 2_400_000, "2 B x 1.00M x 1.2"),
        (inference_job(quantization="int8"), 1_200_000, "1 B x 1.00M x 1.2"),
        (inference_job(quantization="int4"), 600_000, "0.5 B x 1.00M x 1.2"),
    ],
)
def test_rules(job: Job, num_bytes: int, formula: str) -> None:
    rule = rule_of_thumb(job, toy(job))
    assert (rule.bytes, rule.formula) == (num_bytes, formula)


def test_the_two_largest_differences_are_named_with_their_bytes() -> None:
    # Backward: 4,096 tokens x 1,000 B = 3.91 MiB of activations and 500 B = 1.95 MiB of logits beside the 16 MB of the rule.
    rule = rule_of_thumb(training_job(), toy(training_job()))
    assert rule.differs_because == "at backward: activations of 3.91 MiB not in the rule and logits of 1.95 MiB not in the rule"
    # bf16-true in the toy with 8-bit states: 2 MB instead of 4 MB.
    job = training_job(precision="bf16-true", weight_dtype="bf16", optimizer="adamw-8bit", batch=1)
    assert "optimizer states of 1.91 MiB instead of 3.81 MiB" in rule_of_thumb(job, toy(job)).differs_because


def test_inference_difference_names_the_fifth_for_everything_else() -> None:
    # cache 8 x 2,048 x 200 B = 3.12 MiB; activations 102,400 B; the rule's fifth is 400,000 B
    rule = rule_of_thumb(inference_job(), toy(inference_job()))
    assert rule.differs_because == (
        "at prefill: KV cache of 3.12 MiB not in the rule and the rule's 20 % for everything else is 390.62 KiB"
    ).replace("390.62 KiB", "0.38 MiB")


def test_agreement_is_said() -> None:
    job = training_job()
    exact = estimate_of({"backward": {"weights": 4_000_000, "gradients": 4_000_000, "optimizer_states": 8_100_000}})
    assert rule_of_thumb(job, exact).differs_because == "they agree within 1 %"


def test_adapters_are_counted_by_the_estimate_when_it_does() -> None:
    job = finetuning_job(method="lora")
    counted = dataclasses.replace(toy(job), trainable_parameters=20_000)
    assert rule_of_thumb(job, counted).bytes == 2_320_000


# --- warnings


def codes(job: Job, current: Estimate | None = None, verdict: Verdict | None = None) -> dict[str, str]:
    return {one.code: one.text for one in warnings(job, toy, current or toy(job), verdict)}


def test_beyond_positions() -> None:
    assert "beyond-positions" not in codes(training_job(seq=4096))
    assert codes(training_job(seq=4097))["beyond-positions"] == "--seq 4,097 is beyond the model: it was made for 4,096"
    learned = model(hard_position_limit=True)
    assert "learned positions up to 4,096" in codes(inference_job(context=5000, of=learned))["beyond-positions"]
    assert "beyond-positions" not in codes(training_job(seq=10**6, of=model(max_positions=None)))


def test_padding_costs_what_the_padded_job_takes_more() -> None:
    # The toy doubles activations under padding: 4,096,000 B = 3.91 MiB.
    assert "3.91 MiB more" in codes(training_job())["padding-costs"]
    assert "padding-costs" not in codes(training_job(padding="right"))
    assert "padding-costs" not in codes(training_job(attention="flash"))
    assert "padding-costs" not in codes(inference_job())


def test_short_sequences() -> None:
    assert "--seq 128 is short" in codes(training_job(seq=128))["short-sequence"]
    assert "short-sequence" not in codes(training_job(seq=512))
    assert "short-sequence" not in codes(training_job(seq=77, of=model(max_positions=77)))


def _with_first_step(first: int, steady: int) -> Estimate:
    phases = (
        Phase(name="backward", allocated_bytes=steady, components={}),
        Phase(name="backward", allocated_bytes=first, components={}, first_step=True),
        Phase(name="optimizer-step", allocated_bytes=500, components={}),
    )
    return Estimate(ranks=(Rank(rank="all", count=1, components=(), phases=phases, peak=peak(steady)),))


def test_first_step() -> None:
    assert first_step_bytes(toy(training_job())) is None
    assert first_step_bytes(_with_first_step(700, 1000)) == 700
    assert first_step_bytes(_with_first_step(300, 1000)) == 500  # the step itself is the same in both
    assert "the first step peaks at" in codes(training_job(), _with_first_step(700, 1000))["first-step-lower"]
    assert "first-step-lower" not in codes(training_job(), _with_first_step(995, 1000))


def test_tight_is_said_with_the_interval() -> None:
    job = dataclasses.replace(training_job(), cluster=cluster(80 * GiB))
    current = alone(peak(79 * GiB, low=70 * GiB, safe=88 * GiB))
    verdict = Verdict(fits="tight", headroom_bytes=GiB, summary="")
    assert "between 70.00 GiB and 88.00 GiB" in codes(job, current, verdict)["tight"]
    assert "tight" not in codes(job, current, Verdict(fits="yes", headroom_bytes=GiB, summary=""))


# --- verify


def test_verify_names_the_number_to_compare_with() -> None:
    current = Estimate(
        ranks=(
            Rank(
                rank="all", count=1, components=(), phases=(),
                peak=dataclasses.replace(peak(13 * GiB), allocated_bytes=11 * GiB, reserved_bytes=12 * GiB),
            ),
        )
    )  # fmt: skip
    steps = verify(training_job(), current)
    assert [step.command.split("(")[-2].split(".")[-1] if "torch" in step.command else step.command for step in steps] == [
        "max_memory_allocated", "max_memory_reserved", "nvidia-smi --query-gpu=memory.used --format=csv",
    ]  # fmt: skip
    assert "two steps" in steps[0].why
    assert "11.00 GiB allocated" in steps[0].why
    assert "12.00 GiB reserved" in steps[1].why
    assert "13.00 GiB on the device" in steps[2].why
    trainer = dataclasses.replace(training_job(), overheads=Overheads(runtime="hf-trainer"))
    assert "--max_steps 2" in verify(trainer, current)[0].why
    radeon = dataclasses.replace(training_job(), cluster=cluster(80 * GiB, vendor="amd"))
    assert verify(radeon, current)[2].command.startswith("rocm-smi")
    tpu = dataclasses.replace(training_job(), cluster=cluster(80 * GiB, vendor="google"))
    (only,) = verify(tpu, current)
    assert "13.00 GiB" in only.why
    assert "memory_stats()" in only.command


# --- commands


def test_a_command_says_only_what_was_asked_and_what_changed() -> None:
    asked = training_job(batch=4, seq=1024, precision=None, weight_dtype=None, outputs=None, dropout=None)
    resolved = training_job(batch=4, seq=1024)
    edited = dataclasses.replace(resolved, workload=dataclasses.replace(resolved.workload, checkpointing="full"))
    assert command_line(asked, edited, resolved=resolved) == (
        "memfit train tiny --batch 4 --seq 1024 --checkpointing full --runtime hf --headroom 0"
    )
    assert command_line(asked, on="rtx-4090") == "memfit train tiny --batch 4 --seq 1024 --runtime hf --headroom 0 --on rtx-4090"


def test_a_command_repeats_the_model_as_it_was_given() -> None:
    job = training_job(of=model(facts={"arguments": ("my model/config.json", "--head", "X")}))
    assert shlex.split(command_line(job))[:5] == ["memfit", "train", "my model/config.json", "--head", "X"]


def test_a_command_has_the_flags_of_an_edited_layout() -> None:
    asked = dataclasses.replace(training_job(), cluster=cluster(10**9, 8))
    alone = dataclasses.replace(asked, parallelism=Parallelism(dp_replicate=8, dp_shard=1, tp=1, pp=1, cp=1, ep=1, zero=0))
    split = alone.parallelism.replace(dp_replicate=1, dp_shard=4, tp=2, zero=3, sharding="fsdp2", sp=True)
    command = command_line(asked, dataclasses.replace(alone, parallelism=split), resolved=alone)
    assert {"--tp", "--sp", "--fsdp"} <= set(shlex.split(command))


def test_a_command_repeats_devices_headroom_and_flags() -> None:
    job = dataclasses.replace(finetuning_job(double_quant=False, method="qlora"), cluster=cluster(10**9, 8), headroom=0.05)
    words = shlex.split(command_line(job))
    assert words[-4:] == ["--headroom", "0.05", "--on", "8xtoy-1"]
    assert "--no-double-quant" in words
    assert words[words.index("--method") + 1] == "qlora"


def test_the_command_of_an_adapter_edit_is_a_finetune_with_its_method() -> None:
    # Weights and gradients alone are 4 MB at least; LoRA is 2,160,000 + 1,024 x 100.
    found = ask(training_job(2_400_000, batch=1, checkpointing="full", loss="fused"))
    command = next(step.command for step in found.next if "cheapest change" in step.why)
    words = shlex.split(command)
    assert words[:3] == ["memfit", "finetune", "tiny"]
    assert words[words.index("--method") + 1] == "lora"
    assert words[words.index("--checkpointing") + 1] == "full"


# --- devices


CATALOGUE = tuple(
    cluster(size, id=f"gpu-{size}", name=f"GPU {size}GB", kind=kind).device
    for size, kind in (
        (30_000_000, "gpu"), (10_000_000, "gpu"), (26_000_000, "gpu"), (25_000_000, "tpu"), (40_000_000, "gpu"),
        (22_144_000, "gpu"), (90_000_000, "gpu"), (60_000_000, "gpu"), (70_000_000, "gpu"),
    )
)  # fmt: skip


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, ...]:
    gpus = tuple(sorted((one for one in CATALOGUE if one.kind == "gpu"), key=lambda one: one.usable_bytes))
    monkeypatch.setattr(memfit.fit.hardware, "_candidates", lambda: gpus)
    return gpus


def test_smallest_devices_are_those_whose_verdict_is_yes(catalogue: tuple[Device, ...]) -> None:
    job = training_job()  # 22,144,000 B
    found = smallest_devices(job, toy, 22_144_000)
    assert [one.usable_bytes for one in found] == [22_144_000, 26_000_000, 30_000_000, 40_000_000, 60_000_000]
    careful = smallest_devices(training_job(headroom=0.2), toy, 22_144_000, most=2)
    assert [one.usable_bytes for one in careful] == [30_000_000, 40_000_000]


def test_a_device_is_put_in_place_of_another() -> None:
    job = dataclasses.replace(training_job(), cluster=cluster(10**9, 8))
    moved = on_device(job, CATALOGUE[0])
    assert moved.cluster is not None
    assert (moved.cluster.count, moved.cluster.usable_bytes) == (8, 30_000_000)


def test_the_real_catalogue_is_in_order() -> None:
    sizes = [one.usable_bytes for one in memfit.fit.hardware._candidates()]
    assert len(sizes) > 20
    assert sizes == sorted(sizes)


# --- the whole answer


@pytest.mark.usefixtures("catalogue")
def test_answer_without_a_device() -> None:
    found = ask(training_job())
    assert found.verdict is None
    assert found.smallest_devices[0] == ("gpu-22144000", 1)
    assert len(found.smallest_devices) == 5
    assert {one.fits for one in found.recommendations} == {None}
    assert found.next[0].command.endswith("--on gpu-22144000")
    assert {limit.max for limit in found.limits.values()} == {None}


@pytest.mark.usefixtures("catalogue")
def test_answer_that_fits_proposes_to_use_the_room() -> None:
    found = ask(training_job(30_000_000))
    assert found.verdict is not None
    assert found.verdict.fits == "yes"
    assert found.smallest_devices == ()
    assert found.limits["batch"].max == 9
    assert "--batch 9" in found.next[0].command


@pytest.mark.usefixtures("catalogue")
def test_answer_that_does_not_fit_names_the_change_and_the_device() -> None:
    found = ask(training_job(20_100_000))
    assert found.verdict is not None
    assert found.verdict.fits == "no"
    assert "cheapest change that makes it fit: fused-loss" in found.next[0].why
    assert "--loss fused" in found.next[0].command
    assert "GPU 22144000GB is the smallest device" in found.next[1].why
    assert found.next[1].command.endswith("--on gpu-22144000")


@pytest.mark.usefixtures("catalogue")
def test_answer_when_nothing_fits_says_so_and_names_devices() -> None:
    found = ask(training_job(500_000))
    assert {one.fits for one in found.recommendations} == {"no"}
    whys = [step.why for step in found.next]
    assert whys[0].startswith("no change that memfit knows makes it fit on 1x Toy 1GB; without a change: GPU 22144000GB")
    # bf16-true, and the 8-bit optimizer of weights that are not trained any more, would change nothing.
    assert whys[1].startswith("with fused-loss + micro-batch + offloaded-checkpointing + qlora: ")
    assert "GPU 10000000GB" in whys[1]
    assert found.next[1].command.endswith("--on gpu-10000000")


@pytest.mark.usefixtures("catalogue")
def test_answer_when_no_device_of_the_catalogue_is_large_enough() -> None:
    job = training_job(10**6)
    huge = peak_only(lambda one: 10**12)
    found = judge_estimate(job, Resolved(job), huge)  # type: ignore[arg-type]
    assert "split over several devices" in found.next[0].why


def test_answer_carries_what_resolving_found_and_each_code_once() -> None:
    found = ask(training_job(30_000_000, seq=5000, batch=1))
    assert [one.name for one in found.assumptions] == ["seq"]
    assert found.warnings[0].code == "note"
    assert len({one.code for one in found.warnings}) == len(found.warnings)
    assert found.rule_of_thumb is not None
    assert found.verify


# --- the allocator's part


def _held(usable: int, *, device: int = 1000, held: int = 100, low: int = 800, vendor: str = "nvidia") -> list[str]:
    """Commands of `next` for a training whose peak of `device` bytes has `held` bytes of fragmentation."""

    def account(job: Job) -> Estimate:
        both = estimate_of({"backward": {"activations": device - held, "fragmentation": held}})
        rank = both.worst
        return Estimate(ranks=(rank.replace(peak=rank.peak.replace(low_bytes=low)),))

    job = training_job(usable)
    job = dataclasses.replace(job, cluster=cluster(usable, vendor=vendor))
    found = judge_estimate(job, Resolved(job), account)  # type: ignore[arg-type]
    return [one.command for one in found.next]


SEGMENTS = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_the_allocators_setting_is_named_where_its_part_decides() -> None:
    assert _held(901)[-1] == SEGMENTS  # tight: 99 bytes over, 100 of them held unused
    assert _held(901, low=950)[-1] == SEGMENTS  # does not fit, by less than that part
    assert SEGMENTS not in _held(900)  # it would not be enough
    assert SEGMENTS not in _held(995, held=9)  # not visible: below 1 % of the peak
    assert SEGMENTS not in _held(2000)  # fits
    assert SEGMENTS not in _held(901, vendor="google")  # another allocator
