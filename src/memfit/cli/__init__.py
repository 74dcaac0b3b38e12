"""The command line: arguments in, an answer on standard output, one line on standard error when something is wrong."""

from memfit.cli.entry import main, run

__all__ = ["main", "run"]
