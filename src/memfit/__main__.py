"""`python -m memfit` is the same as the `memfit` command."""

from __future__ import annotations

from memfit.cli import run

if __name__ == "__main__":
    run()
