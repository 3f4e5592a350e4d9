"""Promises of agent.protocol.units."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.units import (
    UnitError,
    format_count,
    format_duration,
    format_flops,
    format_rate,
    format_size,
    parse_duration,
    parse_flops,
    parse_rate,
    parse_size,
)

PARSERS: list[Callable[[object], float]] = [parse_rate, parse_duration, parse_size, parse_flops]


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("20 Mbit", 20e6),
        ("20Mbit/s", 20e6),
        ("1.5 Gbit/s", 1.5e9),
        ("800 kbit", 800e3),
        ("64 bit", 64.0),
        ("10 MB/s", 80e6),
        ("1 MiB/s", 8 * 2**20),
    ],
)
def test_rates_are_read_in_bits_per_second(text: str, bits_per_second: float) -> None:
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("35 ms", 0.035), ("39 us", 39e-6), ("2 s", 2.0), ("1.5 min", 90.0), ("2h", 7200.0), ("0 s", 0)],
)
def test_durations_are_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512 MB", 512_000_000),
        ("512 MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("7 B", 7),
        ("9007199254740993 B", 2**53 + 1),
    ],
)
def test_sizes_are_read_in_whole_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


def test_computing_rates_are_read_in_flop_per_second() -> None:
    assert parse_flops("140.9 GFLOPS") == 140.9e9


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "wrong",
    ["", "20", 20, 2.5, True, None, [], "Mbit", "-3 s", "-1 MB", "nan s", "inf GFLOPS", "1e999 B", "5 parsec", "٣ s"],
)
def test_anything_but_a_finite_quantity_with_a_unit_is_refused(parse: Callable[[object], float], wrong: object) -> None:
    with pytest.raises(UnitError, match="write for example"):
        parse(wrong)


def test_a_unit_in_the_wrong_case_is_refused_with_the_right_one() -> None:
    with pytest.raises(UnitError, match='is "Mbit" meant'):
        parse_rate("20 mbit")


def test_bytes_without_per_second_are_not_a_rate() -> None:
    with pytest.raises(UnitError, match="unknown unit"):
        parse_rate("10 MB")


@pytest.mark.slow
@given(st.text())
def test_any_text_gives_a_finite_number_or_a_unit_error(text: str) -> None:
    for parse in PARSERS:
        with contextlib.suppress(UnitError):
            assert math.isfinite(parse(text))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_rate(20e6), "20 Mbit/s"),
        (format_rate(999_900), "1 Mbit/s"),
        (format_rate(0), "0 bit/s"),
        (format_duration(0.0353), "35.3 ms"),
        (format_duration(90), "90 s"),
        (format_duration(400), "6.67 min"),
        (format_duration(9000), "2.5 h"),
        (format_duration(2e-9), "0.002 us"),
        (format_duration(-0.25), "-250 ms"),
        (format_size(512_000_000), "512 MB"),
        (format_flops(140.9e9), "141 GFLOPS"),
        (format_count(0), "0"),
        (format_count(123_456), "123,456"),
        (format_count(1_500_000_000), "1.5 G"),
    ],
)
def test_quantities_are_shown_with_three_digits_and_a_unit(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(min_value=1e-6, max_value=1e15))
def test_a_shown_quantity_reads_back_within_half_a_percent(value: float) -> None:
    assert parse_duration(format_duration(value)) == pytest.approx(value, rel=5.1e-3)
    assert parse_rate(format_rate(value)) == pytest.approx(value, rel=5.1e-3)
    assert parse_flops(format_flops(value)) == pytest.approx(value, rel=5.1e-3)
