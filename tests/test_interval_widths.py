"""Widths of intervals: made from residuals as they say they are, carried as data, and used by the estimate."""

from __future__ import annotations

import json

import heart_models as models
import pytest

from memfit.account.intervals import ANY, UNKNOWN, WORKING_SET, combine, kind_of, working_width
from memfit.job import FineTuning, Inference, Overheads, Training
from memfit.validate import widths
from memfit.validate.reasons import contradicts
from memfit.validate.widths import Residual


def rows(group: str, *shares: float, runtime: str = "hf") -> list[Residual]:
    return [Residual(group, runtime, "train", share) for share in shares]


@pytest.fixture(scope="module")
def residuals() -> list[Residual]:
    return widths.residuals()


def test_the_file_is_what_the_corpus_gives(residuals: list[Residual]) -> None:
    with open(widths.PATH, encoding="utf-8") as file:
        assert file.read() == widths.text(widths.table(residuals)), "run python -m memfit.validate.widths"


def test_each_width_holds_nine_of_ten_of_the_weight(residuals: list[Residual]) -> None:
    for row in widths.table(residuals):
        mine = [one for one in residuals if one.kind == row["kind"] and row["runtime"] in (ANY, one.runtime)]
        sizes = {one.group: sum(other.group == one.group for other in mine) for one in mine}
        inside = sum(1 / sizes[one.group] for one in mine if -row["below"] <= 100 * one.share <= row["above"])
        assert inside / len(sizes) >= 0.9 - 1e-9


def test_a_quantile_leaves_a_share_of_the_weight_beyond() -> None:
    """20 rows of 5 % each: one may lie beyond 5 %."""
    twenty = [(float(value), 0.05) for value in range(20)]
    assert widths.quantile(twenty, 0.05) == 18
    assert widths.quantile(twenty, 0.04) == 19
    with pytest.raises(ValueError, match="at least one"):
        widths.quantile([], 0.05)


def test_groups_weigh_alike_however_many_rows_they_have() -> None:
    """99 rows of one group without an error, one row of another with +40 %: half of the weight is off by 40 %."""
    assert widths.width(rows("many", *[0.0] * 99)) == (1, 1)
    assert widths.width([*rows("many", *[0.0] * 99), *rows("one", 0.4)]) == (1, 40)
    assert widths.width(rows("low", -0.101)) == (11, 1)


def test_what_a_width_would_have_held_without_the_group() -> None:
    """Without `one` the width is 1 % and does not hold it; without `many` it is 40 % above and holds all four."""
    both = [*rows("many", *[0.0] * 4), *rows("one", 0.4)]
    assert widths.left_out_coverage(both) == 4 / 5
    assert widths.left_out_coverage(rows("alone", 0.1, 0.2)) is None


def test_a_runtime_has_a_width_of_its_own_with_rows_enough() -> None:
    few, enough = rows("a", *[0.1] * 15, runtime="hf"), rows("b", *[0.3] * 16, runtime="torch")
    assert [row["runtime"] for row in widths.table([*few, *enough])] == [ANY, "torch"]
    traced = rows("c", *[0.0] * 50, runtime=widths.TRACED)
    assert [row["runtime"] for row in widths.table([*few, *traced])] == [ANY]


def test_a_figure_below_what_is_always_there_contradicts_itself() -> None:
    assert contradicts(99, 100)
    assert not contradicts(100, 100)


LLAMA = models.make(models.LLAMA_1B)


@pytest.mark.parametrize(
    ("workload", "kind"),
    [
        (Training(), "train"),
        (FineTuning(method="full"), "train"),
        (FineTuning(method="lora"), "adapters"),
        (FineTuning(method="qlora"), "quantized-adapters"),
        (Inference(context=64), "inference"),
        (Inference(context=64, quantization="int4"), "quantized-inference"),
    ],
)
def test_every_kind_of_job_has_a_width_from_runs(workload: Training | Inference, kind: str) -> None:
    job = models.job(LLAMA, workload)
    assert kind_of(job) == kind
    assert working_width(job) != UNKNOWN
    with open(widths.PATH, encoding="utf-8") as file:
        data = {(row["runtime"], row["kind"]): row for row in json.load(file)["widths"]}
    for runtime in ("hf", "hf-trainer@4.57", "torch"):
        row = data.get((runtime.partition("@")[0], kind), data[(ANY, kind)])
        found = working_width(job.replace(overheads=Overheads(runtime=runtime)))
        assert (found.below, found.above) == (row["below"], row["above"])


def test_activations_logits_and_temporaries_go_together() -> None:
    """Nothing else is uncertain here: the bounds of the peak are those shares of their sum."""
    job = models.job(LLAMA, Training(batch=2, seq=128, precision="bf16-true"))
    rank = models.estimate(job).worst
    working = sum(one.at_peak_bytes for one in rank.components if one.name in WORKING_SET)
    width = working_width(job)
    below, above = working * width.below // 100, working * width.above // 100
    assert (rank.peak.device_bytes - rank.peak.low_bytes, rank.peak.high_bytes - rank.peak.device_bytes) == (below, above)
    assert combine(100, [(50, 40, 90)], certain_model=True)[:2] == (90, 140)
