"""How an answer is shown: JSON, CSV, Markdown and the terminal. Nothing here computes memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.fit.answer import Answer

__all__ = ["to_csv", "to_json", "to_markdown", "to_terminal"]


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain dicts, lists, strings and numbers; bytes are integers. The keys are a contract."""
    from memfit.report import payload

    return payload.to_json(answer)


def to_csv(answer: Answer) -> str:
    """One row for each rank and component, then the totals."""
    from memfit.report import csv

    return csv.to_csv(answer)


def to_markdown(answer: Answer) -> str:
    """GitHub-flavoured Markdown: the component table, and the rest folded away."""
    from memfit.report import markdown

    return markdown.to_markdown(answer)


def to_terminal(answer: Answer, *, width: int = 100, color: bool = False, explain: bool = False) -> str:
    """The answer as the command line shows it."""
    from memfit.report.look import Look
    from memfit.report.terminal import render

    return render(answer, Look(width=width, color=color), explain)
