"""The one mechanism for a field: parsing, bounds, "did you mean", aliases, JSON Schema, for a small record and for every real
field."""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.job import Dimensions, FineTuning, Hardware, Inference, Overheads, Training
from memfit.options import Option, Options, build, json_schema, option, options_of

REAL = (Training, FineTuning, Inference, Hardware, Overheads, Dimensions)
FIELDS = [(cls, name) for cls in REAL for name in options_of(cls)]


class Tea(Options):
    """A record that declares every kind of field once."""

    cups: int = option(1, "Cups", kind="tokens", minimum=1, maximum=64, aliases=("number-of-cups",), group="pot")
    leaf: str = option("green", "Leaf", kind="choice", choices=("green", "black"), choice_aliases={"sencha": "green"})
    milk: bool = option(False, "Milk", kind="flag")
    pot: int | None = option(None, "Size of the pot", kind="size", minimum=0, unit="bytes")
    sugar: float = option(0.0, "Sugar as a share", kind="fraction", minimum=0, maximum=0.5)
    degrees: float = option(80, "Degrees", kind="number", minimum=0, maximum=100)
    blend: str = option("house", "Blend", kind="choice", choices=("house",), patterns=("custom:",))
    note: str = option("", "Note", kind="text")
    grains: int | None = option(None, "Grains", kind="count", minimum=1)


# ------------------------------------------------------------------ one small record, by hand


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("cups", "2", 2),
        ("cups", 2, 2),
        ("cups", 2.0, 2),
        ("cups", "0.0625k", 64),
        ("leaf", " Black ", "black"),
        ("leaf", "SENCHA", "green"),
        ("milk", True, True),
        ("milk", "yes", True),
        ("milk", "off", False),
        ("pot", "1KiB", 1024),
        ("pot", 0, 0),
        ("sugar", "10%", 0.1),
        ("sugar", 0.5, 0.5),
        ("degrees", "80.5", 80.5),
        ("blend", "custom:earl=1,grey=2", "custom:earl=1,grey=2"),
        ("note", 7, "7"),
        ("note", " kept as it is inside ", "kept as it is inside"),
        ("grains", "7B", 7_000_000_000),
    ],
)
def test_values_are_read(name: str, raw: Any, value: Any) -> None:
    assert getattr(build(Tea, {name: raw}), name) == value


@pytest.mark.parametrize(
    ("name", "raw", "complaint"),
    [
        ("cups", "0", r"--cups must be at least 1, not 0"),
        ("cups", 65, r"--cups must be at most 64, not 65"),
        ("cups", "-3", r"--cups cannot be negative \(-3\)"),
        ("cups", -3, r"--cups must be at least 1, not -3"),
        ("cups", 1.5, r"--cups takes a whole number, not 1.5"),
        ("cups", True, r"--cups takes a whole number, not True"),
        ("cups", [1], r"--cups takes a whole number, not \[1\]"),
        ("cups", "many", r"--cups: cannot read 'many'"),
        ("leaf", "blak", r"--leaf does not know 'blak' \(did you mean 'black'\?\); it takes green, black"),
        ("leaf", {"a": 1}, r"--leaf takes a text"),
        ("milk", "maybe", r"--milk takes true or false, not 'maybe'"),
        ("milk", 1, r"--milk takes true or false, not 1"),
        ("pot", "12 cups", r"--pot: cannot read '12 cups' as a size"),
        ("sugar", "60%", r"--sugar must be at most 0.5, not 0.6"),
        ("sugar", float("nan"), r"--sugar takes a number, not nan"),
        ("degrees", "hot", r"--degrees takes a number, not 'hot'"),
        ("degrees", "nan", r"--degrees takes a number, not nan"),
        ("degrees", "inf", r"--degrees must be at most 100"),
        ("blend", "costum:x=1", r"--blend does not know"),
        ("note", ["a"], r"--note takes a text"),
        ("grains", 0, r"--grains must be at least 1, not 0"),
    ],
)
def test_values_are_refused_by_field(name: str, raw: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        build(Tea, {name: raw})


def test_defaults_stand_where_nothing_or_null_is_given() -> None:
    assert build(Tea, {}) == build(Tea, {"cups": None, "leaf": None}) == Tea()
    assert Tea().cups == 1


def test_names_are_taken_with_hyphens_underscores_and_aliases() -> None:
    for name in ("cups", "number-of-cups", "number_of_cups"):
        assert build(Tea, {name: 3}).cups == 3


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"unknown option 'sugr' \(did you mean 'sugar'\?\)"):
        build(Tea, {"sugr": 0.1})
    with pytest.raises(UsageError, match=r"unknown option 'xyzzy'$"):
        build(Tea, {"xyzzy": 1})


def test_names_that_another_record_knows_are_passed_over() -> None:
    assert build(Tea, {"biscuits": 4}, known_elsewhere=["biscuits"]) == Tea()
    with pytest.raises(UsageError, match="did you mean 'biscuits'"):
        build(Tea, {"biscuit": 4}, known_elsewhere=["biscuits"])


def test_a_record_is_frozen_and_keyword_only() -> None:
    tea = Tea(cups=2)
    with pytest.raises(AttributeError):
        tea.cups = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Tea(2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="biscuits"):
        Tea(biscuits=1)  # type: ignore[call-arg]
    assert dataclasses.replace(tea, milk=True) == Tea(cups=2, milk=True) != tea
    assert hash(Tea(cups=2)) == hash(tea)


def test_auto_leaves_a_field_open_that_is_decided_from_the_rest() -> None:
    open_fields = build(Inference, {"dtype": "auto", "kv_cache_dtype": "AUTO", "quantization": "auto"})
    assert open_fields == Inference()
    with pytest.raises(UsageError, match="--attention does not know 'auto'"):
        build(Inference, {"attention": "auto"})  # its default is a choice of its own


def test_a_flag_is_spelled_with_hyphens() -> None:
    assert options_of(Dimensions)["kv_heads"].flag == "--kv-heads"


def test_a_subclass_adds_to_the_fields_of_its_base_in_order() -> None:
    inherited = list(options_of(Training))
    assert list(options_of(FineTuning))[: len(inherited)] == inherited
    assert "method" in options_of(FineTuning)
    assert "method" not in options_of(Training)


# ------------------------------------------------------------------ JSON Schema


def test_the_schema_of_the_small_record() -> None:
    schema = json_schema(Tea, "tea")
    assert schema["additionalProperties"] is False
    assert schema["properties"]["cups"] == {"type": "integer", "description": "Cups", "minimum": 1, "maximum": 64, "default": 1}
    assert schema["properties"]["leaf"]["enum"] == ["green", "black"]
    assert "enum" not in schema["properties"]["blend"]
    assert "default" not in schema["properties"]["pot"]


@pytest.mark.parametrize("cls", REAL)
def test_every_schema_is_valid_and_takes_the_defaults(cls: type[Options]) -> None:
    schema = json_schema(cls, cls.__name__)
    jsonschema.Draft202012Validator.check_schema(schema)
    defaults = {name: one.default for name, one in options_of(cls).items() if one.default is not None}
    jsonschema.validate(defaults, schema)
    assert build(cls, defaults) == cls()


def test_a_schema_refuses_what_the_parser_refuses() -> None:
    schema = json_schema(Training, "training")
    for wrong in ({"batch": 0}, {"batch": "many"}, {"precision": "bf17"}, {"bach": 1}, {"attention": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        with pytest.raises(UsageError):
            build(Training, wrong)


# ------------------------------------------------------------------ every real field


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_every_field_is_declared_whole(cls: type[Options], name: str) -> None:
    one = options_of(cls)[name]
    assert one.help
    assert one.help[0].isupper() or not one.help[0].isalpha()
    assert not one.help.endswith(".")
    assert one.group
    assert one.kind in {"size", "count", "tokens", "fraction", "number", "text", "choice", "flag"}
    assert bool(one.choices) == (one.kind == "choice")
    if one.default is not None:
        assert one.parse(one.default) == one.default
    for alias in one.choice_aliases:
        assert alias == alias.lower()
        assert one.parse(alias) in (*one.choices, *one.patterns)
    for choice in one.choices:
        assert one.parse(choice.upper()) == choice


@pytest.mark.parametrize("cls", REAL)
def test_no_two_fields_share_a_name_or_an_alias(cls: type[Options]) -> None:
    names = [alias.replace("-", "_") for one in options_of(cls).values() for alias in (one.name, *one.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_a_misspelled_field_is_refused_by_name(cls: type[Options], name: str) -> None:
    with pytest.raises(UsageError, match="unknown option"):
        build(cls, {name + "x": 1})


JUNK = st.one_of(
    st.text(max_size=40),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(
        [10**400, -(10**400), 2**63, "1e999", "²", "٣", "\x00", "custom:", "custom:states=²", float("inf"), b"bytes"]
    ),
)


@settings(max_examples=300)
@given(st.sampled_from(FIELDS), JUNK)
def test_junk_is_read_or_refused_never_a_crash(field: tuple[type[Options], str], raw: Any) -> None:
    cls, name = field
    one = options_of(cls)[name]
    try:
        value = getattr(build(cls, {name: raw}), name)
    except UsageError:
        return
    if raw is None:
        assert value == one.default
    elif one.kind not in ("text", "choice", "flag"):
        assert one.minimum is None or value >= one.minimum
        assert one.maximum is None or value <= one.maximum


@given(st.sampled_from(FIELDS), st.data())
def test_a_value_that_was_read_reads_again_as_itself(field: tuple[type[Options], str], data: st.DataObject) -> None:
    cls, name = field
    one: Option = options_of(cls)[name]
    low, high = int(one.minimum or 0), int(min(one.maximum or 1 << 60, 1 << 60))
    if one.kind == "choice":
        raw: Any = data.draw(st.sampled_from(one.choices))
    elif one.kind == "flag":
        raw = data.draw(st.booleans())
    elif one.kind == "text":
        raw = data.draw(st.text(max_size=20)).strip()
    elif one.kind in ("fraction", "number"):
        raw = data.draw(st.floats(float(one.minimum or 0), min(float(one.maximum or 1), 0.999)))
    else:
        raw = data.draw(st.integers(low, high))
    value = one.parse(raw)
    assert value == raw
    assert one.parse(value) == value
    if one.kind in ("size", "count", "tokens"):
        assert one.parse(str(value)) == value


def test_a_message_stays_one_line_of_reasonable_length_whatever_was_given() -> None:
    for name, raw in (("precision", "x" * 100_000), ("batch", "9" * 100_000), ("optimizer", "line\n" * 1000)):
        with pytest.raises(UsageError) as caught:
            build(Training, {name: raw})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
