"""One arithmetic: the profile of a job gives the same bytes for integers, for integer arrays and in the estimate."""

from __future__ import annotations

from typing import Any

import heart_models as models
import numpy as np
import pytest
from heart_strategies import DECODER_MODELS, DECODERS, MODELS, WORKLOADS, inferences, model, trainings
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.account import compile_job, estimate, resolve
from memfit.account.profile import Numbers, evaluate
from memfit.devices import parse_cluster
from memfit.job import Inference, Job, Overheads, Training
from memfit.model import Model


@settings(max_examples=120, deadline=None)
@given(MODELS, trainings(), st.data())
def test_arrays_give_what_integers_give_in_training(of: Model, workload: Training, data: st.DataObject) -> None:
    compiled = compile_job(models.job(of, workload))
    batches = np.array(data.draw(st.lists(st.integers(1, 4096), min_size=5, max_size=5)), dtype=np.int64)
    tokens = np.array(data.draw(st.lists(st.integers(1, 4096), min_size=5, max_size=5)), dtype=np.int64)
    together = evaluate(compiled.profile, Numbers(batches, tokens, tokens), maximum=np.maximum)
    for index in range(5):
        b, s = int(batches[index]), int(tokens[index])
        alone = evaluate(compiled.profile, Numbers(b, s, s))
        assert alone.peak == together.peak[index]
        for one, many in zip(alone.moments, together.moments, strict=True):
            assert one == np.broadcast_to(many, (5,))[index]


@settings(max_examples=120, deadline=None)
@given(DECODER_MODELS, inferences(), st.data())
def test_arrays_give_what_integers_give_in_inference_with_sliding_windows(
    of: Model, workload: Inference, data: st.DataObject
) -> None:
    """Contexts on both sides of the windows of 32 and 64 tokens."""
    compiled = compile_job(models.job(of, workload))
    sequences = np.array(data.draw(st.lists(st.integers(1, 4096), min_size=5, max_size=5)), dtype=np.int64)
    prompts = np.array(data.draw(st.lists(st.integers(1, 200), min_size=5, max_size=5)), dtype=np.int64)
    contexts = prompts + np.array(data.draw(st.lists(st.integers(0, 200), min_size=5, max_size=5)), dtype=np.int64)
    ones = np.ones_like(prompts)
    together = evaluate(
        compiled.profile, Numbers(sequences, prompts, prompts), Numbers(sequences, ones, contexts), maximum=np.maximum
    )
    for index in range(5):
        b, p, c = int(sequences[index]), int(prompts[index]), int(contexts[index])
        alone = evaluate(compiled.profile, Numbers(b, p, p), Numbers(b, 1, c))
        assert alone.peak == together.peak[index]
        for one, many in zip(alone.moments, together.moments, strict=True):
            assert one == np.broadcast_to(many, (5,))[index]


@settings(max_examples=60, deadline=None)
@given(MODELS, WORKLOADS)
def test_the_estimate_is_the_evaluation_of_the_profile(of: Model, workload: Any) -> None:
    job = models.job(of, workload)
    compiled = compile_job(job)
    assert estimate(job).peak.allocated_bytes == evaluate(compiled.profile, *compiled.numbers).peak


def test_a_python_integer_never_overflows() -> None:
    """A batch and a sequence at their bounds: more than 2^63 bytes, exactly."""
    job = models.job(model("llama"), Training(batch=1 << 24, seq=1 << 27, precision="bf16-true", attention="eager"))
    rank = estimate(job).worst
    assert rank.kept_bytes is not None
    # 4 layers x 6 a s s b of score matrices alone
    assert rank.kept_bytes > 4 * 6 * 8 * (1 << 24) * (1 << 54)


def test_profiles_are_compiled_once_for_all_numbers() -> None:
    of = model("llama")
    one, two = (compile_job(models.job(of, Training(batch=batch, seq=100, precision="bf16-true"))) for batch in (1, 64))
    assert one.profile is two.profile
    assert compile_job(models.job(of, Training(batch=1, seq=101, precision="bf16-true"))).profile is one.profile
    assert compile_job(models.job(of, Training(batch=1, seq=100, precision="32-true"))).profile is not one.profile


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_overheads_alone_do_not_hide_in_a_family(family: str) -> None:
    """With nothing given by hand a GPU's estimate has a context and fragmentation, each with an interval that contains it."""
    job = resolve(
        Job(model=model(family), workload=Training(batch=2, seq=64), overheads=Overheads(), cluster=parse_cluster("4090"))
    ).job
    rank = estimate(job).worst
    for name in ("context", "fragmentation", "workspace"):
        row = next(one for one in rank.components if one.name == name)
        assert row.low_bytes <= row.bytes <= row.high_bytes
        assert row.bytes > 0
        assert row.source
