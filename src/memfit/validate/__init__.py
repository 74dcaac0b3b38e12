"""Compare memfit with exact, traced and measured runs: what `memfit validate` prints and docs/accuracy.md shows.

Every row goes the way that a user's question goes: a config becomes a model, the row's settings become a job, the job is resolved
and estimated. Nothing here reaches into the account's private parts, and no number is fitted to a row.
"""

from __future__ import annotations

from memfit.validate.report import Group, LeftOut, Outcome, Report, Row
from memfit.validate.runner import run

__all__ = ["Group", "LeftOut", "Outcome", "Report", "Row", "run"]
