"""Sizes, times and flops as people write and read them."""

from __future__ import annotations

import re

from autoplan.errors import OptionError

_POWERS: dict[str, int] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(e\d+)?\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Reads a size: ``40GB`` and ``40G`` are 40·10⁹ bytes, ``40GiB`` and ``40Gi`` are 40·2³⁰, a bare number is bytes.

    Raises:
        OptionError: Not of this form, or less than one byte.
    """
    match = _SIZE.fullmatch(str(text))
    if not match or (match[4] and not match[3]):
        raise OptionError(
            f"size {str(text)!r} is not of the form 40GB (10^9 bytes), 512MiB (2^20 bytes) or a number of bytes"
        )
    unit = (1024.0 if match[4] else 1000.0) ** _POWERS[match[3].lower()]
    n = round(float(match[1] + (match[2] or "")) * unit)
    if n < 1:
        raise OptionError(f"size {str(text)!r} is less than one byte")
    return n


def format_bytes(n: float) -> str:
    """``12.3 GB``; decimal units, three digits."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_flops(n: float) -> str:
    """``1.23 TFLOP``."""
    return _scaled(n, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_rate(n: float, unit: str) -> str:
    """``312 Tflop/s`` for ``format_rate(312e12, "flop/s")``."""
    return _scaled(n, tuple(p + unit for p in ("", "k", "M", "G", "T", "P")))


def format_seconds(s: float) -> str:
    """``12.3 ms``; three digits, ``us`` for microseconds, minutes from 100 s on."""
    if s >= 100:
        minutes, rest = divmod(round(s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    if s >= 1:
        return f"{_digits(s)} s"
    if s >= 1e-3:
        return f"{_digits(s * 1e3)} ms"
    return f"{_digits(s * 1e6)} us"


def format_percent(fraction: float) -> str:
    """``12.3 %``; an exact zero is ``0 %``, and what is small but not zero says so."""
    if 0 < abs(fraction) < 5e-5:
        return "< 0.01 %"
    return "0 %" if not fraction else f"{fraction * 100:.2f} %" if abs(fraction) < 0.1 else f"{fraction * 100:.1f} %"


def _scaled(n: float, units: tuple[str, ...]) -> str:
    i = 0
    while abs(n) >= 999.5 and i < len(units) - 1:
        n /= 1000
        i += 1
    return f"{_digits(n)} {units[i]}"


def _digits(x: float) -> str:
    """Three significant digits, no exponent, no trailing zeros."""
    if not x:
        return "0"
    text = f"{x:.0f}" if abs(x) >= 99.95 else f"{x:.1f}" if abs(x) >= 9.995 else f"{x:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
