"""Every field of `memfit.job` is known to every face: the parser, the help, the JSON Schema and the table in docs/cli.md."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from memfit.cli.commands import COMMANDS, Command, classes_of
from memfit.cli.docs import SECTIONS, section_text, updated
from memfit.cli.listings import INPUT_KINDS, input_schema
from memfit.cli.parser import command_options, help_parser, negative_strings, option_strings, parse
from memfit.cli.presentation import FORMATS, Presentation
from memfit.errors import InputError
from memfit.job import WORKLOADS, Dimensions, FineTuning, Hardware, Inference, Overheads, Parallelism, Training
from memfit.options import Option, options_of

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
ABOUT_JOBS = {"train": Training, "finetune": FineTuning, "infer": Inference}
EVERY_FIELD = [
    (name, one)
    for name, workload in ABOUT_JOBS.items()
    for cls in (workload, Parallelism, Hardware, Overheads, Dimensions)
    for one in options_of(cls).values()
]
by_name = {command.name: command for command in COMMANDS}


def field_id(value: object) -> str:
    return value.name if isinstance(value, Option) else str(value)


def test_the_walk_is_over_all_fields_of_the_job_module() -> None:
    import memfit.job
    from memfit.options import Options

    declared = {
        cls for cls in vars(memfit.job).values() if isinstance(cls, type) and issubclass(cls, Options) and cls is not Options
    }
    assert declared == {Training, FineTuning, Inference, Parallelism, Hardware, Overheads, Dimensions}
    assert len(EVERY_FIELD) > 80


def sample(option: Option) -> str:
    """A value in the spelling of the command line."""
    if option.choices:
        return option.choices[-1]
    return {"size": "1GiB", "count": "7B", "tokens": "8", "fraction": "10%", "number": "0.5", "text": "word"}[option.kind]


@pytest.mark.parametrize(("name", "option"), EVERY_FIELD, ids=field_id)
def test_a_field_is_an_option_in_all_its_spellings(name: str, option: Option) -> None:
    for spelling in option_strings(option):
        tokens = [spelling] if option.kind == "flag" else [spelling, sample(option)]
        values = parse(by_name[name], [*tokens, "MODEL"]).values
        assert values == {option.name: True if option.kind == "flag" else sample(option)}
    for spelling in negative_strings(option):
        assert parse(by_name[name], [spelling]).values == {option.name: False}
    if option.kind != "flag":
        underscored = "--" + option.name
        assert parse(by_name[name], [f"{underscored}={sample(option)}"]).values == {option.name: sample(option)}


@pytest.mark.parametrize(("name", "option"), EVERY_FIELD, ids=field_id)
def test_a_field_has_help_schema_and_docs(name: str, option: Option) -> None:
    text = " ".join(help_parser(by_name[name], Wide).format_help().split())
    assert option.flag in text
    assert option.help
    assert " ".join(option.help.split()) in text
    for alias in option.aliases:
        assert f"--{alias}" in text
    assert input_schema(name)["properties"][option.name]["description"] == option.help
    assert f"`{option.flag}`" in DOCS.read_text(encoding="utf-8")


class Wide(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=2000)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_spelling_means_two_things_in_one_command(command: Command) -> None:
    spellings = [text for one in command_options(command) for text in (*option_strings(one), *negative_strings(one))]
    assert sorted(spellings) == sorted(set(spellings))
    names = [one.name for one in command_options(command)]
    assert len(names) == len(set(names))
    assert classes_of(command)[-1] is Presentation


def test_the_options_table_in_the_docs_is_current() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert updated(text) == text, "run: python -m memfit.cli.docs docs/cli.md"


def test_a_stale_table_is_noticed_and_made_anew() -> None:
    text = DOCS.read_text(encoding="utf-8")
    stale = text.replace("`--lora-rank`", "`--lora-size`")
    assert stale != text
    assert updated(stale) == text
    with pytest.raises(InputError, match="markers"):
        updated(text.replace("<!-- model: end -->", ""))


def test_every_section_of_the_docs_has_text() -> None:
    for name in SECTIONS:
        assert section_text(name).count("\n") >= 3


def test_each_format_of_the_registry_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for one in FORMATS:
        assert f"`{one}`" in text


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_input_schemas_are_valid_json_schemas(kind: str) -> None:
    import jsonschema

    schema = input_schema(kind)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    validator.validate({"model": "gpt2", "on": "4090", "headroom": 0.1})
    assert set(options_of(WORKLOADS[kind])) < set(schema["properties"])
    for wrong in ({"batchh": 1}, {"model": 3}, {"headroom": 2}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)
