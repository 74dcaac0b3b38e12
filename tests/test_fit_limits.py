"""Limits against a brute-force scan, on straight and on bent estimates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fit_fakes import inference_job, model, peak_only, toy, training_job
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from memfit.account.estimate import Estimate
from memfit.fit.answer import Answer
from memfit.fit.limits import MAX_EVALUATIONS, largest, number, numbers_of, solve_limit, solve_limits, with_number
from memfit.job import Job
from memfit.model.description import TOKEN, Block, CacheSpec, Segment, Value


def scan(margin: Callable[[int], int], minimum: int, maximum: int) -> int:
    """The largest value that fits, by trying every one."""
    fitting = [value for value in range(minimum, maximum + 1) if margin(value) >= 0]
    return max(fitting, default=minimum - 1)


SHAPES: dict[str, Callable[[int], int]] = {
    "straight": lambda v: 1000 + 7 * v,
    "square": lambda v: 1000 + 3 * v + 2 * v * v,
    "flat then straight": lambda v: max(5000, 1000 + 40 * v),
    "window": lambda v: 1000 + 50 * min(v, 64) + v,
    "steps of 16": lambda v: 1000 + 100 * -(-v // 16),
    "cliff": lambda v: 1000 if v < 777 else 10**9,
    "flat": lambda v: 1000,
    "cube": lambda v: 1000 + v**3,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capacity", [0, 999, 1000, 1007, 5000, 9000, 123_456])
@pytest.mark.parametrize("start", [1, 5, 300, 2000])
def test_largest_equals_the_scan(shape: str, capacity: int, start: int) -> None:
    looked_at: list[int] = []

    def margin(value: int) -> int:
        looked_at.append(value)
        return capacity - SHAPES[shape](value)

    found = largest(margin, start=start, maximum=2000)
    assert found == scan(lambda value: capacity - SHAPES[shape](value), 1, 2000)
    assert len(looked_at) <= (28 if shape in ("cliff", "steps of 16") else 18)
    assert len(looked_at) == len(set(looked_at)), "nothing is evaluated twice"


@settings(max_examples=300, deadline=None)
@given(
    increments=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    capacity=st.integers(0, 200_000),
    start=st.integers(1, 300),
    minimum=st.integers(1, 5),
)
def test_largest_equals_the_scan_for_any_monotone_estimate(
    increments: list[int], capacity: int, start: int, minimum: int
) -> None:
    total, bytes_at = 0, [0]
    for increment in increments:
        total += increment
        bytes_at.append(total)
    maximum = len(increments)
    found = largest(lambda value: capacity - bytes_at[value], start=start, minimum=minimum, maximum=maximum)
    assert found == scan(lambda value: capacity - bytes_at[value], minimum, maximum)


@pytest.mark.parametrize("slope", [0, 1, 1000, 10**6])
@pytest.mark.parametrize("start", [1, 4096, 1 << 20])
def test_a_straight_line_takes_few_evaluations_up_to_the_largest_bound(slope: int, start: int) -> None:
    looked_at: list[int] = []

    def margin(value: int) -> int:
        looked_at.append(value)
        return 80 * 2**30 - slope * value

    expected = min(1 << 27, 80 * 2**30 // slope) if slope else 1 << 27
    assert largest(margin, start=start, maximum=1 << 27) == expected
    assert len(looked_at) <= (25 if slope == 0 else 8)


def test_a_square_takes_few_evaluations() -> None:
    looked_at: list[int] = []

    def margin(value: int) -> int:
        looked_at.append(value)
        return 80 * 2**30 - 10**9 - 10**5 * value - 12 * value * value

    found = largest(margin, start=2048, maximum=1 << 27)
    assert margin(found) >= 0 > margin(found + 1)
    assert len(looked_at) - 2 <= 8


def test_it_stops_on_an_estimate_that_is_not_monotone() -> None:
    count = 0

    def margin(value: int) -> int:
        nonlocal count
        count += 1
        return 1 if value % 2 else -1

    largest(margin, start=10**6, maximum=1 << 27)
    assert count <= MAX_EVALUATIONS + 2


# --- limits of a job. The toy: 16 MB of weights, gradients and states; 1,500 B a token in backward; 4 MB of scratch in the step.


def test_batch_limit_by_hand() -> None:
    # 1024 tokens x 1,500 B = 1,536,000 B a sequence; 30,000,000 - 16,000,000 = 14,000,000 = 9.11 sequences.
    job = training_job(30_000_000)
    limit = solve_limit(job, "batch", toy, toy(job))
    assert (limit.max, limit.likely, limit.binds) == (9, 9, "backward")
    assert (limit.fixed_bytes, limit.bytes_per_unit) == (16_000_000, 1_536_000)


def test_seq_limit_by_hand() -> None:
    # 4 sequences x 1,500 B = 6,000 B a position; 14,000,000 / 6,000 = 2333.3.
    job = training_job(30_000_000)
    limit = solve_limit(job, "seq", toy, toy(job))
    assert (limit.max, limit.fixed_bytes, limit.bytes_per_unit) == (2333, 16_000_000, 6_000)
    assert limit.remark == ""


def test_likely_ignores_headroom() -> None:
    # Headroom 20 %: 24,000,000 allowed -> 5.2 sequences; likely counts all of 30,000,000.
    job = training_job(30_000_000, headroom=0.2)
    limit = solve_limit(job, "batch", toy, toy(job))
    assert (limit.max, limit.likely) == (5, 9)


def test_when_not_even_one_fits() -> None:
    job = training_job(17_000_000)
    limit = solve_limit(job, "batch", toy, toy(job))
    assert (limit.max, limit.likely) == (0, 0)
    assert limit.fixed_bytes == 16_000_000


def test_the_fixed_part_is_that_of_the_phase_that_binds_now() -> None:
    # At batch 1 the optimizer step binds (20 MB against 17.5 MB); at batch 4 backward does, whose fixed part is 16 MB.
    # (At batch 4 the line of backward goes through 16 MB at zero.)
    assert toy(training_job(batch=1)).peak.phase == "optimizer-step"
    limit = solve_limit(training_job(), "batch", toy, toy(training_job()))
    assert limit.fixed_bytes + 4 * limit.bytes_per_unit == toy(training_job()).peak.device_bytes == 22_144_000


def test_the_fixed_part_of_a_square_is_not_the_tangents() -> None:
    job = training_job(seq=1000, batch=1)
    square = peak_only(lambda one: 1_000_000 + 10 * number(one, "seq") ** 2)
    limit = solve_limit(job, "seq", square, square(job))
    assert limit.bytes_per_unit == 10 * (1001**2 - 1000**2) == 20_010
    assert limit.fixed_bytes == 1_000_000  # a tangent at 1000 would say -9,010,000


def test_the_fixed_part_where_a_line_becomes_a_steeper_one() -> None:
    job = training_job(seq=1000, batch=1)
    bend = peak_only(lambda one: max(5_000_000 + 100 * number(one, "seq"), 1_000_000 + 3_900 * number(one, "seq")))
    # At 1,000 the first line binds (5,100,000 against 4,900,000), from 1,053 on the second.
    limit = solve_limit(job, "seq", bend, bend(job))
    assert (limit.fixed_bytes, limit.bytes_per_unit) == (5_000_000, 100)


def test_the_fixed_part_is_not_shaken_by_rounding() -> None:
    job = training_job(seq=4096, batch=1)
    rounded = peak_only(lambda one: 1_000_000 + number(one, "seq") * 333 + number(one, "seq") * 7 // 100)
    limit = solve_limit(job, "seq", rounded, rounded(job))
    assert abs(limit.fixed_bytes - 1_000_000) <= 4096


def test_without_a_device_there_is_no_largest_value() -> None:
    limits = solve_limits(training_job(), toy, toy(training_job()))
    assert {(one.max, one.likely) for one in limits.values()} == {(None, None)}
    assert limits["batch"].bytes_per_unit == 1_536_000


def test_numbers_of_each_kind() -> None:
    assert set(solve_limits(training_job(30_000_000), toy, toy(training_job()))) == {"batch", "seq"}
    assert set(solve_limits(inference_job(30_000_000), toy, toy(inference_job()))) == {"concurrency", "context", "prompt"}
    assert numbers_of(inference_job(of=model(kind="encoder"))) == ("concurrency", "context")


def test_context_limit_moves_a_prompt_that_fills_it() -> None:
    # 2,000,000 + (8 x 200 + 50) x context <= 12,000,000 -> 6060.6
    job = inference_job(12_000_000)
    limit = solve_limit(job, "context", toy, toy(job))
    assert (limit.max, limit.bytes_per_unit, limit.fixed_bytes) == (6060, 1650, 2_000_000)
    assert limit.remark == "with prompts as long as the context; memory allows it, but the model's config names 4,096 positions"
    shorter = inference_job(12_000_000, prompt=1000)
    # 2,000,000 + 50 x 1,000 + 1,600 x context <= 12,000,000 -> 6218.75
    assert solve_limit(shorter, "context", toy, toy(shorter)).max == 6218
    assert number(with_number(shorter, "context", 500), "prompt") == 500
    assert number(with_number(shorter, "context", 3000), "prompt") == 1000


@pytest.mark.parametrize("given", [{}, {"target_seq": 100}], ids=["as long as the source", "of its own length"])
def test_a_sequence_limit_moves_a_target_that_is_as_long(given: dict[str, int]) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "d_kv": 16,
              "num_heads": 4, "num_layers": 2, "vocab_size": 1000}  # fmt: skip

    def asked(seq: int) -> Answer:
        return memfit.answer(config, {"kind": "train", "seq": seq, **given}, on="4GiB")

    found = asked(512)
    limit = found.limits["seq"]
    assert limit.max is not None
    assert asked(limit.max).verdict.fits == "yes"
    assert asked(limit.max + 1).verdict.fits != "yes"
    assert ("with targets as long as the source" in limit.remark) == (not given)
    assert not [one.command for one in found.next if ("--target-seq" in one.command) != bool(given)]


def test_a_context_limit_says_what_becomes_of_the_prompt() -> None:
    """A prompt costs 50 B a token, so 100,000 B hold one of 2,000 tokens."""
    kept = model(segments=(Segment((Block("block", Value(0, TOKEN, 1), Value(1, TOKEN, 1), (), CacheSpec(2)),)),))
    filled = inference_job(100_000, of=kept, context=1024, prompt=1024, concurrency=1)
    account = peak_only(lambda job: 50 * (job.workload.prompt or 0))  # type: ignore[union-attr]
    found = solve_limit(filled, "context", account, account(filled))
    assert (found.max, found.remark) == (2000, "with prompts as long as the context")
    longer = inference_job(100_000, of=kept, context=4096, prompt=3000, concurrency=1)
    cut = solve_limit(longer, "context", account, account(longer))
    assert (cut.max, cut.remark) == (2000, "with prompts cut to the context")
    shorter = inference_job(100_000, of=kept, context=4096, prompt=1000, concurrency=1)
    assert "prompts" not in solve_limit(shorter, "context", account, account(shorter)).remark


def test_learned_positions_that_only_the_likely_value_meets_are_said() -> None:
    learned = model(max_positions=1000, hard_position_limit=True)
    job = training_job(100_000, headroom=0.5, of=learned, batch=1, seq=100)
    account = peak_only(lambda job: 80 * (job.workload.seq or 0))  # type: ignore[union-attr]
    limit = solve_limit(job, "seq", account, account(job))
    assert (limit.max, limit.likely) == (625, 1000)  # 50,000 / 80; 100,000 / 80 is beyond the table
    assert limit.remark == "memory allows more than the likely value; the model has 1,000 learned positions"


def test_prompt_cannot_exceed_the_context() -> None:
    job = inference_job(12_000_000, prompt=100)
    assert solve_limit(job, "prompt", toy, toy(job)).max == 2048


def test_learned_positions_are_a_hard_limit() -> None:
    job = training_job(10**9, of=model(max_positions=2048, hard_position_limit=True))
    limit = solve_limit(job, "seq", toy, toy(job))
    assert (limit.max, limit.remark) == (2048, "memory allows more; the model has 2,048 learned positions")


@settings(max_examples=60, deadline=None)
@given(usable=st.integers(1_000_000, 10**9), more=st.integers(0, 10**8), name=st.sampled_from(["batch", "seq"]))
def test_more_memory_never_lowers_a_limit(usable: int, more: int, name: str) -> None:
    small, large = training_job(usable, headroom=0.1), training_job(usable + more, headroom=0.1)
    low, high = (solve_limit(job, name, toy, toy(job)).max for job in (small, large))
    assert low is not None
    assert high is not None
    assert low <= high


@settings(max_examples=60, deadline=None)
@given(usable=st.integers(1_000_000, 10**9), batch=st.integers(1, 2000))
def test_the_limit_does_not_depend_on_the_current_value(usable: int, batch: int) -> None:
    one, other = training_job(usable, batch=1), training_job(usable, batch=batch)
    assert solve_limit(one, "batch", toy, toy(one)).max == solve_limit(other, "batch", toy, toy(other)).max


def test_number_of_estimates_for_all_limits() -> None:
    calls = 0

    def counted(job: Job) -> Estimate:
        nonlocal calls
        calls += 1
        return toy(job)

    job = inference_job(12_000_000, headroom=0.1)
    solve_limits(job, counted, toy(job))
    assert calls <= 3 * 12
