"""`memfit validate`: the statistics, how rows become jobs, the acceptance limits, and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError, UsageError
from memfit.job import FineTuning, Inference, Training
from memfit.validate import Group, LeftOut, Outcome, Report, Row, corpus, docs, run, serving, tables, text, traces, training
from memfit.validate.report import half_digit, percentile

GiB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report() -> Report:
    return run()


def row(measured: int, predicted: int, **more: Any) -> Row:
    return Row(
        id=more.pop("id", "a"), measured=measured, predicted=predicted, relative_to=more.pop("relative_to", measured), **more
    )


# statistics, by hand


def test_an_error_is_predicted_minus_measured_as_a_share_of_what_it_is_relative_to() -> None:
    assert (row(200, 190).error, row(200, 190).error_percent) == (-10, -5.0)
    assert row(200, 190, relative_to=50).error_percent == -20.0


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (1.0, 10.0)])
def test_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.9)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(14.38, GiB, 5368709), (8.7, 10**9, 50_000_000), (5281.0, 1 << 20, 1 << 19), (22781362176, 1, 0), (12, 10**9, 500_000_000)],
)
def test_half_of_the_last_digit(value: float, unit: int, expected: int) -> None:
    assert half_digit(value, unit) == expected


def test_a_value_is_covered_as_far_as_its_digits_go() -> None:
    assert row(100, 110, low=105, high=115).covered is False
    assert row(100, 110, low=105, high=115, rounding=5).covered is True
    assert row(116, 110, low=105, high=115).covered is False
    assert row(100, 110).covered is None


def group(*rows: Row) -> Group:
    return Group(name="g", title="G", metric="allocated", kind="measured", about="about", rows=rows)


def test_statistics_of_a_group() -> None:
    made = group(row(100, 110, low=100, high=120), row(100, 96, low=97, high=99), row(100, 101))
    assert made.errors == [10.0, 4.0, 1.0]
    assert (made.mean_percent, made.median_percent, made.p90_percent, made.worst_percent) == (5.0, 4.0, 10.0, 10.0)
    assert made.bias_percent == pytest.approx(7 / 3)
    assert made.coverage == (1, 2)
    assert group(row(1, 1)).coverage is None
    assert group(row(1, 1), row(2, 3)).num_exact == 1


def test_the_worst_rows_of_all_groups_come_first_and_reasons_are_counted() -> None:
    left = (
        LeftOut(id="1", file="f", reason="r", detail="b"),
        LeftOut(id="2", file="f", reason="r", detail="a"),
        LeftOut(id="many", file="f", reason="s", count=7),
    )
    made = Report(groups=(group(row(100, 101, id="x")), group(row(100, 80, id="y"), row(100, 103, id="z"))), left_out=left)
    assert [one.id for _, one in made.worst] == ["y", "z", "x"]
    assert made.reasons == [("f", "s", (), 7), ("f", "r", ("a", "b"), 2)]


# from rows to jobs


LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip


def kept_row(**run: Any) -> dict[str, Any]:
    return {"id": "row", "cls": "LlamaForCausalLM", "config": LLAMA_1B, "batch": 2, "seq": 2048, "run": run, "made_with": "torch"}


def test_a_row_without_settings_is_bf16_with_fused_adamw_and_outputs_kept() -> None:
    job = traces.job_of(kept_row())
    workload = job.workload
    assert type(workload) is Training
    assert (workload.batch, workload.seq, workload.precision, workload.optimizer) == (2, 2048, "bf16-true", "adamw-fused")
    assert (workload.attention, workload.checkpointing, workload.padding, workload.outputs) == ("sdpa", "none", "none", "kept")
    assert (job.overheads.workspace, job.overheads.cuda_context, job.overheads.fragmentation) == (0, 0, 0)


def test_a_rows_settings_reach_the_job() -> None:
    lora = {"r": 8, "targets": ["q_proj", "v_proj"], "fp32": False, "dropout": 0.1}
    job = traces.job_of(kept_row(precision="bf16_amp", attn="eager", ckpt=True, pad=True, opt="sgdm", lora=lora))
    workload = job.workload
    assert isinstance(workload, FineTuning)
    assert (workload.precision, workload.weight_dtype, workload.optimizer) == ("bf16-mixed", "bf16", "sgd-momentum")
    assert (workload.attention, workload.checkpointing, workload.padding) == ("eager", "full", "right")
    assert (workload.lora_rank, workload.lora_targets, workload.lora_dtype, workload.lora_dropout) == (
        8,
        "q_proj,v_proj",
        "bf16",
        0.1,
    )


def test_kept_bytes_go_the_public_way_and_agree_with_a_sum_by_hand() -> None:
    # 4,096 tokens x (16 layers x (2 norms 8h+4, attention 2(2q+2kv)+4a, MLP 8f) + final norm + fp32 log-softmax)
    norm, attention, mlp = 8 * 2048 + 4, 2 * (2 * 2048 + 2 * 512) + 4 * 32, 8 * 8192
    by_hand = 4096 * (16 * (2 * norm + attention + mlp) + norm + 4 * 128256)
    (found,), left_out = traces.kept_rows([{**kept_row(), "kept_bytes": by_hand}], "kept")
    assert not left_out
    assert abs(found.error_percent) < 0.01
    (wrong,), _ = traces.kept_rows([{**kept_row(), "kept_bytes": 2 * by_hand}], "kept")
    assert wrong.error_percent == pytest.approx(-50, abs=0.01)


def test_an_unknown_architecture_is_left_out_by_name() -> None:
    found, left_out = traces.kept_rows([{**kept_row(), "config": {"model_type": "rwkv"}, "kept_bytes": 1}], "kept")
    assert found == []
    assert (left_out[0].reason, left_out[0].detail) == ("not expressible yet: another architecture", "rwkv")


def stated(**change: Any) -> dict[str, Any]:
    made = {
        "id": "litgpt-x",
        "model": "llama-2-7b",
        "mode": "LoRA",
        "precision": "bf16-true",
        "optimizer": "torch.optim.AdamW",
        "micro_batch": 2,
        "seq_len": 512,
        "grad_accum": 4,
        "lora": {"rank": 32, "targets": ["query", "mlp", "head"]},
        "framework": "LitGPT",
        "metric": "peak_allocated",
        "value": 19.77,
        "unit": "GB (1e9)",
        "notes": "",
        "source": "s",
        "config": "meta-llama/Llama-2-7b-hf",
        "on": "a10g",
    }
    made.update(change)
    return {key: value for key, value in made.items() if value is not None}


def test_a_measured_row_becomes_the_job_that_it_states() -> None:
    job = training.job_of(stated(), "allocated")
    workload = job.workload
    assert isinstance(workload, FineTuning)
    assert (workload.method, workload.batch, workload.seq, workload.grad_accum) == ("lora", 2, 512, 4)
    assert (workload.lora_rank, workload.lora_targets) == (32, "q_proj,gate_proj,up_proj,down_proj")
    assert (workload.precision, workload.optimizer, workload.checkpointing) == ("bf16-true", "adamw", "none")
    assert job.cluster is not None
    assert job.cluster.device.id == "a10g"


def test_overheads_beyond_the_metric_are_nothing() -> None:
    found = {metric: training.job_of(stated(), metric).overheads for metric in ("allocated", "reserved", "device total")}
    assert [(one.cuda_context, one.fragmentation) for one in found.values()] == [(0, 0), (0, None), (None, None)]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (19.77, "GB (1e9)", 19_770_000_000),
        (4.5, "GiB", 4_831_838_208),
        (100, "MiB", 104_857_600),
        (22781362176, "bytes", 22781362176),
    ],
)
def test_units_are_those_of_the_source(value: float, unit: str, expected: int) -> None:
    assert training.measured_bytes(stated(value=value, unit=unit)) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"metric": "peak_unspecified"}, "the source does not say which memory figure it is"),
        ({"metric": "peak_active"}, "the metric is none of allocated, reserved and device total"),
        ({"mode": "PEFT:OFT"}, "the method is not expressible"),
        ({"framework": "torchtune full_finetune_single_device"}, "the program's kernels or modelling code are not known"),
        ({"seq_len": None}, "a setting that decides memory is not stated"),
        ({"optimizer": "lion"}, "the optimizer is not expressible"),
        ({"precision": "fp8"}, "the precision is not expressible"),
        ({"unit": "GB"}, "the unit is not clear"),
        ({"on": None}, "the device is not stated"),
    ],
)
def test_what_a_row_does_not_say_leaves_it_out(change: dict[str, Any], reason: str) -> None:
    found = training.left_out(stated(**change), "training")
    assert (found.reason if found else "") == reason


def test_the_rank_follows_from_the_trained_parameters_that_are_stated() -> None:
    # 32 layers x rank x (4096 + 4096 for q, the same for v)
    model = corpus.model_of("meta-llama/Llama-2-7b-hf")
    assert training.rank_of(model, 32 * 8 * (4096 + 4096 + 4096 + 4096)) == 8
    with pytest.raises(ValueError, match="not adapters on query and value"):
        training.rank_of(model, 4194305)


def test_metrics_are_compared_with_their_own_figure() -> None:
    rows = [stated(id=metric, metric=metric, value=1, unit="GiB") for metric in ("peak_allocated", "peak_reserved", "nvidia_smi")]
    allocated, reserved, total = training.compare(rows, "training").rows["litgpt lora"]
    assert allocated.predicted < reserved.predicted < total.predicted


def test_a_trainer_row_also_states_what_stays_between_steps_and_the_device_total() -> None:
    notes = "steady allocated 1000 bytes; nvidia-smi peak 77256.0 MiB (mean over GPUs)"
    framework = "fms-acceleration bench, framework_config=none (HF SFTTrainer)"
    found = training.compare([stated(notes=notes, framework=framework, precision="weights bfloat16")], "training").rows
    assert [one.measured for one in found["trainer steady"]] == [1000]
    assert [one.measured for one in found["trainer device"]] == [77256 << 20]
    # 6.74e9 weights in 16 bit and some adapters: nothing that comes and goes
    assert 13_476_831_232 < found["trainer steady"][0].predicted < 15 * 10**9


@pytest.mark.parametrize(
    ("change", "predicted"), [({"mode": "full", "lora": None}, "oom"), ({"seq_len": 64, "micro_batch": 1}, "fits")]
)
def test_outcomes_are_judged_on_the_device(change: dict[str, Any], predicted: str) -> None:
    (found,) = training.compare([stated(metric="oom", value=None, unit=None, **change)], "training").outcomes
    assert (found.observed, found.predicted, found.right) == ("oom", predicted, predicted == "oom")


def test_a_verdict_that_decides_nothing_is_not_right() -> None:
    assert not Outcome(id="a", observed="oom", predicted="tight").right


def test_a_generation_row_becomes_an_inference_job() -> None:
    other = {"input_len": 6144, "output_len": 2048, "batch_size": 1, "peak_memory_reported": 15.38, "peak_memory_unit": "GB"}
    made = {
        "id": "q",
        "n_gpus": 1,
        "config": "Qwen/Qwen2.5-7B",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "other": other,
        "on": "a100-80gb",
        "source": "s",
    }
    workload = serving.job_of(made).workload
    assert isinstance(workload, Inference)
    assert (workload.context, workload.prompt, workload.concurrency, workload.quantization) == (8192, 6144, 1, "none")
    found, _ = serving.compare([made], "serving")
    assert found["generate 16-bit"][0].measured == round(15.38 * GiB)
    _, left_out = serving.compare([{**made, "quantization": "fp8"}], "serving")
    assert (left_out[0].reason, left_out[0].detail) == ("the weight format is not expressible", "fp8")


# the corpus and the limits that memfit holds


def test_every_parameter_count_is_exact(report: Report) -> None:
    found = report.group("parameters")
    assert len(found.rows) == corpus.collection()["parameters"]["carried"] == 69
    assert [(one.id, one.error) for one in found.rows if one.error] == []


@pytest.mark.parametrize(("name", "rows"), [("kept", 36), ("held-out kept", 466)])
def test_kept_bytes_are_within_one_percent(report: Report, name: str, rows: int) -> None:
    found = report.group(name)
    assert len(found.rows) == rows
    assert [(one.id, one.error_percent) for one in found.rows if abs(one.error_percent) > 1] == []


@pytest.mark.parametrize("moment", traces.MOMENTS)
@pytest.mark.parametrize(("name", "rows"), [("traced", 33), ("held-out traced", 256)])
def test_traced_moments_are_within_three_percent(report: Report, name: str, rows: int, moment: str) -> None:
    found = report.group(f"{name} {moment}")
    assert len(found.rows) == rows
    assert [(one.id, one.error_percent) for one in found.rows if abs(one.error_percent) > 3] == []


def test_traced_peaks_lie_in_their_intervals(report: Report) -> None:
    assert report.group("traced peak").coverage == (33, 33)
    assert report.group("held-out traced peak").coverage == (254, 256)  # two checkpointed scans come out 2.2 and 2.8 % high


def test_full_fine_tuning_and_what_stays_between_steps_agree_with_measured_runs(report: Report) -> None:
    assert report.group("trainer full").worst_percent < 0.1
    assert report.group("trainer steady").worst_percent < 0.1


def test_sharded_steps_agree_with_the_tracker_and_with_measured_runs(report: Report) -> None:
    for moment in ("peak", "after forward", "after backward"):
        assert report.group(f"fsdp2 traced {moment}").worst_percent < 0.5
    for name in ("zero-2 allocated", "zero-3 allocated"):
        assert report.group(f"deepspeed {name}").median_percent < 3


def test_every_row_of_the_corpus_is_compared_or_left_out_with_a_reason(report: Report) -> None:
    compared = {one.name: len(one.rows) for one in report.groups}
    outcomes = len(report.outcomes)
    without = {
        file: sum(one.num_rows for one in report.reasons if one.file == file)
        for file in ("kept", "traced", "training", "serving")
    }
    assert compared["kept"] + without["kept"] == len(corpus.rows("kept"))
    assert compared["traced peak"] + without["traced"] == len(corpus.rows("traced"))
    peaks = sum(
        number
        for name, number in compared.items()
        if name.split()[0] in ("litgpt", "peft", "trainer", "trainer-liger") and name.split()[1] in ("full", "lora", "qlora")
    )
    others = sum(len(corpus.rows(file)) for file in ("operations", "sharded_training", "torchtitan"))  # of the same collection
    assert peaks + outcomes + others + without["training"] == corpus.collection()["training"]["rows"]
    generated = compared["generate 16-bit"] + compared["generate 4-bit"]
    assert generated + without["serving"] == corpus.collection()["serving"]["rows"]


def test_every_row_names_its_source(report: Report) -> None:
    assert [one.id for group in report.groups for one in group.rows if not one.source] == []


def test_rows_come_worst_first(report: Report) -> None:
    for one in report.groups:
        assert one.errors == sorted(one.errors, reverse=True), one.name


def test_parts_of_the_corpus_can_be_asked_for_alone() -> None:
    assert [one.name for one in run(["kept"]).groups] == ["kept"]
    with pytest.raises(UsageError, match=r"no part 'keept'.*did you mean 'kept'"):
        run(["keept"])


def test_a_missing_corpus_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "FOLDER", str(tmp_path))
    with pytest.raises(InputError, match=r"kept\.jsonl cannot be read"):
        run(["kept"])


# how it is shown


def small() -> Report:
    rows = (row(2 * GiB, 3 * GiB, id="a|b", note="why not", low=GiB, high=4 * GiB, source="s"),)
    left = (LeftOut(id="1", file="kept", reason="not yet", detail="t5"),)
    return Report(
        groups=(group(*rows),), outcomes=(Outcome(id="o", observed="oom", predicted="fits"),), left_out=left, notes=("note",)
    )


def test_text_has_the_group_the_worst_row_the_outcome_and_what_was_left_out() -> None:
    shown = text.to_text(small())
    for words in (
        "G      allocated     1   50.00",
        "1 of 1",
        "2.000 GiB  3.000 GiB  1.000 GiB   +50.00  why not",
        "0 of 1 right",
        "1  kept  not yet",
    ):
        assert words in shown


def test_markdown_escapes_what_would_break_a_table() -> None:
    assert "| a\\|b | 2.000 GiB | 3.000 GiB | 1.000 GiB | +50.00 | why not |" in text.to_markdown(small())


def test_json_is_plain_data() -> None:
    made = json.loads(json.dumps(text.to_json(small()), allow_nan=False))
    assert made["groups"][0]["coverage"] == {"in_interval": 1, "of": 1}
    assert made["groups"][0]["worst_rows_first"][0]["error"] == GiB
    assert made["outcomes"][0]["right"] is False
    assert made["left_out"] == [{"file": "kept", "reason": "not yet", "details": ["t5"], "rows": 1}]


def test_flat_rows_have_the_same_keys() -> None:
    made = tables.tables_of(small())
    assert made.groups[0]["worst_percent"] == 50.0
    assert made.worst[0] == {
        "group": "g",
        "row": "a|b",
        "measured_bytes": 2 * GiB,
        "predicted_bytes": 3 * GiB,
        "error_percent": 50.0,
        "why": "why not",
    }
    assert "Left out: 1 of kept: not yet" in made.notes


def test_the_accuracy_page_is_current(report: Report) -> None:
    found = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert found == docs.page(report), "run python -m memfit.validate.docs"


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.md"
    assert docs.main([str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("# Accuracy\n")
    assert capsys.readouterr().out == ""


def test_operations_of_the_benchmark_are_counted_as_it_measures_them() -> None:
    """Transformers' own operations to 0.6 %, Liger's within 2.1 %, but for its loss of 0.4.2, of which 0.8 is counted."""
    (found,) = run(["operations"]).groups
    assert len(found.rows) == 28
    for row in found.rows:
        if row.id.endswith("huggingface"):
            assert abs(row.error_percent) < 0.6, row.id
        elif "fused_linear" not in row.id:
            assert abs(row.error_percent) < 2.1, row.id
        else:
            assert row.note
