"""How an answer is shown: JSON, CSV, Markdown and the terminal. Nothing here computes memory."""

from memfit.report.csv import to_csv
from memfit.report.markdown import to_markdown
from memfit.report.payload import to_json

__all__ = ["to_csv", "to_json", "to_markdown"]
