"""Levers: the kinds of change that make a job smaller. One record type, one table per kind of workload, in order of cost.

Nothing outside the tables knows a lever by its name: the ladder, and whatever else proposes changes, walks `levers_for(job)`.
"""

from memfit.fit.levers.lever import Lever
from memfit.fit.levers.table import LEVERS, levers_for

__all__ = ["LEVERS", "Lever", "levers_for"]
