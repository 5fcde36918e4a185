"""Sizes and times, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.display import format_bytes, format_flops, format_percent, format_seconds, parse_bytes
from autoplan.errors import OptionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40GB", 40 * 10**9), ("40G", 40 * 10**9), ("40gb", 40 * 10**9), (" 40 GB ", 40 * 10**9),
        ("512MiB", 512 * 2**20), ("1.5GiB", 3 * 2**29), ("2Ti", 2**41), ("1.5kB", 1500), ("123", 123), (456, 456),
        ("80e9", 80 * 10**9), (".5GB", 5 * 10**8), ("7B", 7),
    ],
)  # fmt: skip
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "4XB", "-1GB", "40 GB of memory", "1,5GB", "iB", "5iB", "nan", "inf", "0x10"]
)
def test_parse_bytes_says_what_the_form_is(text: str) -> None:
    with pytest.raises(OptionError, match=r"40GB .* 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.2B"])
def test_nothing_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="less than one byte"):
        parse_bytes(text)


@given(st.integers(1, 10**18))
def test_written_sizes_can_be_read_again(n: int) -> None:
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=6e-3)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1000, "1 kB"), (12_345, "12.3 kB"), (84_900_000_000, "84.9 GB"),
     (999_999_999, "1 GB"), (1.005e12, "1 TB"), (10**9 * 100, "100 GB"), (2e18, "2000 PB")],
)  # fmt: skip
def test_format_bytes(n: float, expected: str) -> None:
    assert format_bytes(n) == expected


@pytest.mark.parametrize(
    ("s", "expected"),
    [(0, "0 us"), (4e-6, "4 us"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (99.0, "99 s"), (100, "1 min 40 s"),
     (119.7, "2 min 00 s"), (3725, "1 h 02 min")],
)  # fmt: skip
def test_format_seconds(s: float, expected: str) -> None:
    assert format_seconds(s) == expected


def test_format_others() -> None:
    assert format_flops(1.234e12) == "1.23 TFLOP"
    assert [format_percent(x) for x in (0, 1e-6, 0.0005, 0.788, 1.575)] == [
        "0 %", "< 0.01 %", "0.05 %", "78.8 %", "157.5 %"
    ]  # fmt: skip
