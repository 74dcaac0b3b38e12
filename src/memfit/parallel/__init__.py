"""A model as each device of a job holds it: passes from a model to the part of it that one rank runs.

Tensor parallelism, pipeline stages and expert parallelism change which tensors and operations a rank has, so each is a function
from `Model` to `Model`; what follows (kernels, account) counts the part like any model. Data parallelism, ZeRO and FSDP leave the
operations as they are: they are a matter of the account.
"""

from memfit.parallel.legality import largest_legal
from memfit.parallel.ranks import ALONE, Degrees, InFlight, RankModel, rank_models

__all__ = ["ALONE", "Degrees", "InFlight", "RankModel", "largest_legal", "rank_models"]
