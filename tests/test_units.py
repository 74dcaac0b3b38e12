"""Sizes, counts, tokens and shares from text: the units by hand, the bounds, and that junk is only ever a `UsageError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.units import format_count, format_gib, parse_count, parse_fraction, parse_size, parse_tokens

PARSERS: tuple[Callable[[str], Any], ...] = (parse_size, parse_count, parse_tokens, parse_fraction)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("1_000", 1000),
        ("1,024", 1024),
        ("512B", 512),
        ("1K", 1024),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2m", 2 * 1024 * 1024),
        ("2MB", 2_000_000),
        ("24G", 25_769_803_776),
        ("24GiB", 25_769_803_776),
        ("24 gib", 25_769_803_776),
        ("80GB", 80_000_000_000),
        ("24576MiB", 25_769_803_776),
        ("1.5G", 1_610_612_736),
        ("1T", 1_099_511_627_776),
        ("1TB", 1_000_000_000_000),
        ("8.125MiB", 8_519_680),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7_000_000_000),
        ("7e9", 7_000_000_000),
        ("350M", 350_000_000),
        ("1.5b", 1_500_000_000),
        ("2k", 2000),
        ("1T", 10**12),
        ("12", 12),
    ],
)
def test_counts_are_powers_of_a_thousand(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("128k", 131_072), ("128K", 131_072), ("1M", 1_048_576), ("0.5k", 512)]
)
def test_tokens_are_powers_of_1024(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.1", 0.1), ("0", 0.0), (" 25 % ", 0.25), ("0.999", 0.999)])
def test_shares(text: str, share: float) -> None:
    assert parse_fraction(text) == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "12 parsecs", "-1", "1e", "0x10", "1..2", "nan", "inf", "1e400", "9" * 65, "1 2", "1\n2", "١٢", "²"]
)
@pytest.mark.parametrize("parse", [parse_size, parse_count, parse_tokens])
def test_what_is_no_quantity_is_refused_with_an_example(parse: Callable[[str], int], text: str) -> None:
    with pytest.raises(UsageError, match="write it like") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["100%", "1", "1.0", "-0.1", "-1%", "nan", "inf", "ten", "", "%", "1e400"])
def test_a_share_is_at_least_0_and_below_1(text: str) -> None:
    with pytest.raises(UsageError, match="share"):
        parse_fraction(text)


def test_nothing_above_two_to_the_60_is_taken() -> None:
    assert parse_size(str(1 << 60)) == 1 << 60
    for parse, text in ((parse_size, str((1 << 60) + 1)), (parse_size, "2e6T"), (parse_count, "1e99"), (parse_tokens, "1e20")):
        with pytest.raises(UsageError, match="too large"):
            parse(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_plain_numbers_round_trip_exactly(number: int) -> None:
    assert parse_size(str(number)) == parse_count(str(number)) == parse_tokens(f"{number:,}") == number


@given(st.integers(min_value=0, max_value=(1 << 30) - 1), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30)]))
def test_binary_units_round_trip_exactly(number: int, unit: tuple[str, int]) -> None:
    name, shift = unit
    assert parse_size(f"{number}{name}") == parse_size(f"{number} {name[0]}") == number << shift


@given(st.text(max_size=80))
def test_junk_raises_nothing_but_a_usage_error(text: str) -> None:
    for parse in PARSERS:
        try:
            value = parse(text)
        except UsageError:
            continue
        assert 0 <= value <= 1 << 60


@given(st.text(alphabet="0123456789.,_eE+-kKmMgGtTbBiI% ", max_size=20))
def test_near_misses_raise_nothing_but_a_usage_error(text: str) -> None:
    for parse in PARSERS:
        try:
            value = parse(text)
        except UsageError:
            continue
        assert 0 <= value <= 1 << 60


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.00 GiB"),
        (1024, "1.00 KiB"),
        (5 * 1024 * 1024, "5.00 MiB"),
        (1 << 30, "1.00 GiB"),
        (17_136_349_184, "15.96 GiB"),
        (-(1 << 31), "-2.00 GiB"),
    ],
)
def test_gib(num_bytes: int, text: str) -> None:
    assert format_gib(num_bytes) == text


def test_a_small_number_does_not_print_as_zero() -> None:
    assert format_gib(100) == "0.10 KiB"
    assert format_gib(1 << 20, digits=0) == "1 MiB"


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_030_261_248, "8.03B"), (124_439_808, "124.44M"), (4096, "4,096"), (1_800_000_000_000, "1.80T"), (0, "0")],
)
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize("read", [parse_count, parse_tokens, parse_size])
def test_a_fraction_without_a_unit_is_refused_and_with_one_is_rounded(read: Callable[[str], int]) -> None:
    with pytest.raises(UsageError, match="not a whole number"):
        read("1.5")
    assert read("1.5k") in (1500, 1536)
