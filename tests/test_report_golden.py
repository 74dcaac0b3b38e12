"""Whole outputs for answers built by hand.

`REGENERATE_GOLDENS=1 pytest tests/test_report_golden.py` rewrites the files: read the diff before you keep it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from report_answers import inference, too_large, training

from memfit.report import to_csv, to_json, to_markdown
from memfit.report.look import Look
from memfit.report.terminal import render

GOLDEN = Path(__file__).parent / "golden"
ASCII = Look(width=80, unicode=False)

CASES: dict[str, Callable[[], str]] = {
    "training.txt": lambda: render(training(), Look()),
    "training-explain.txt": lambda: render(training(), Look(), explain=True),
    "training-narrow-ascii.txt": lambda: render(training(), Look(width=60, unicode=False)),
    "training-color.txt": lambda: render(training(), Look(color=True)),
    "training.json": lambda: json.dumps(to_json(training()), indent=1) + "\n",
    "training.csv": lambda: to_csv(training()),
    "training.md": lambda: to_markdown(training()),
    "too-large.txt": lambda: render(too_large(), Look()),
    "inference-no-device.txt": lambda: render(inference(), ASCII),
    "inference-no-device.json": lambda: json.dumps(to_json(inference()), indent=1) + "\n",
    "inference-no-device.md": lambda: to_markdown(inference()),
}


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit._version.__version__", "1.2.3")
    made = CASES[name]()
    path = GOLDEN / name
    if os.environ.get("REGENERATE_GOLDENS") == "1":
        path.write_text(made, encoding="utf-8")
    assert made == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(CASES)
