"""How the result is shown: the options that every command has and that are not part of the question."""

from __future__ import annotations

from memfit.options import Options, option

FORMATS = ("table", "json", "csv", "markdown")
SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown", ".markdown": "markdown", ".txt": "table"}
"""The format that the name of the file given to `--output` asks for."""


class Presentation(Options):
    """Declared with the same mechanism as the inputs of a job, so that help, docs and errors treat them alike."""

    format: str | None = option(
        None,
        "Form of the result",
        kind="choice",
        choices=FORMATS,
        group="output",
        choice_aliases={"md": "markdown", "text": "table", "txt": "table"},
    )
    json: bool = option(False, "Same as --format json", kind="flag", group="output")
    output: str | None = option(
        None, "Write the result to this file; its suffix (.json .csv .md .txt) gives the format", kind="text", group="output"
    )
    explain: bool = option(False, "Show the source of each formula in the table", kind="flag", group="output")
    color: bool = option(
        True,
        "Colour in the terminal (NO_COLOR and TERM=dumb turn it off as well)",
        kind="flag",
        group="output",
        aliases=("colour",),
    )
