"""What alternatives of one job share: measured once, and the same as if measured for each alone."""

from __future__ import annotations

from typing import Any

import heart_models as models
import pytest
from heart_strategies import SHRUNK

from memfit.account import estimate
from memfit.account.blocks import Conditions, measure_segment
from memfit.account.crossing import Accumulation
from memfit.account.policies import kernel_policy
from memfit.account.standing import totals_of, totals_of_stored
from memfit.job import FineTuning, Job, Training, Workload

WORKLOADS: list[Workload] = [
    Training(batch=2, seq=64),
    Training(batch=2, seq=64, loss="fused", attention="eager", padding="right", precision="bf16-true"),
    FineTuning(method="qlora", seq=64, kbit_prep="norms"),
    FineTuning(method="lora", seq=64, modules_to_save="lm_head", lora_bias="all"),
    FineTuning(method="dora", seq=64, loss="fused", checkpointing="full"),
    FineTuning(method="prompt", seq=64),
    FineTuning(method="prefix", seq=64),
    FineTuning(method="freeze", seq=64, unfreeze="layers:1,norm"),
]


def job(workload: Workload) -> Job:
    """About a model object that nothing has been measured of."""
    return models.job(models.make(models.FAMILY_CONFIGS["llama"], **SHRUNK["llama"]), workload)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: f"{getattr(one, 'method', 'train')}-{one.loss}")
def test_what_is_stored_is_the_same_for_all_kernels_that_it_does_not_depend_on(workload: Workload) -> None:
    one = job(workload)
    kernels = kernel_policy(one)
    assert totals_of(one.model, kernels) == totals_of_stored.__wrapped__(one.model, kernels)
    assert totals_of(one.model, kernels._replace(loss="cut", attention="flash", padded=True)) is totals_of(one.model, kernels)


@pytest.mark.parametrize("edits", [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"loss": "fused"}])
def test_an_alternative_measures_only_what_it_changes(edits: dict[str, Any]) -> None:
    """The embedding is the same under all of them; the estimates are those of jobs whose models nobody has seen."""
    base, alone = job(Training(batch=64, seq=64)), job(Training(batch=64, seq=64, **edits))
    first = estimate(base)
    after = estimate(base.replace(workload=alone.workload))
    assert after.worst.phases == estimate(alone).worst.phases
    assert after.worst.phases != first.worst.phases
    conditions = Conditions(kernel_policy(base), Accumulation(), False, False, "fp32")
    changed = conditions._replace(kernels=kernel_policy(base.replace(workload=alone.workload)))
    found, _ = measure_segment(base.model, 0, conditions, checkpointed=False)
    again, _ = measure_segment(base.model, 0, changed, checkpointed=False, operators=("mm",), once=False)
    assert again is found
