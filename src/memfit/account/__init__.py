"""The account: a model is compiled into a profile of integer coefficients, and one function evaluates it.

`resolve` fills in a job, `estimate` gives the memory of its ranks.
"""

from memfit.account.compilation import compile_job
from memfit.account.engine import estimate, least_bytes
from memfit.account.policies import kernel_policy
from memfit.account.resolve import Resolved, resolve

__all__ = ["Resolved", "compile_job", "estimate", "kernel_policy", "least_bytes", "resolve"]
