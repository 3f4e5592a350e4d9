"""Converts "20 Mbit", "35 ms", "512 MB" and "80 GFLOPS" to plain numbers and back.

In the code, quantities are plain numbers whose names carry the unit (`_bps`, `_s`, `_bytes`). In files and on the
command line they are text with a unit. A number without a unit is refused, because 20 could be Mbit or MB; so is the
wrong case, because "mb" could be either. Prefixes are decimal, except for KiB, MiB and GiB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from agent.protocol.errors import UserError


class UnitError(UserError):
    """A quantity that cannot be parsed; the message shows a correct one."""


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str  # as in "a rate"
    example: str
    units: Mapping[str, Decimal]  # unit -> factor to the base unit


def _units(**factors: str) -> dict[str, Decimal]:
    return {unit: Decimal(factor) for unit, factor in factors.items()}


_BYTES = _units(B="1", kB="1e3", MB="1e6", GB="1e9", TB="1e12", KiB="1024", MiB="1048576", GiB="1073741824")
_BITS = _units(bit="1", kbit="1e3", Mbit="1e6", Gbit="1e9", Tbit="1e12")

_RATE = _Quantity(
    "a rate",
    "20 Mbit",
    _BITS
    | {f"{unit}/s": factor for unit, factor in _BITS.items()}
    | {f"{unit}/s": 8 * f for unit, f in _BYTES.items()},
)
_DURATION = _Quantity(
    "a duration", "35 ms", _units(us="1e-6", µs="1e-6", ms="1e-3", s="1", min="60", h="3600", day="86400", days="86400")
)
_SIZE = _Quantity("a size", "512 MB", _BYTES)
_FLOPS = _Quantity(
    "a computing rate", "80 GFLOPS", _units(FLOPS="1", kFLOPS="1e3", MFLOPS="1e6", GFLOPS="1e9", TFLOPS="1e12")
)

_NUMBER_AND_UNIT = re.compile(
    r"\s*(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,4})?)\s*(?P<unit>\D*?)\s*", re.ASCII | re.I
)


def parse_rate(value: object) -> float:
    """Bit/s from "20 Mbit", "20 Mbit/s" or, in bytes, "10 MB/s"."""
    return float(_parse(value, _RATE))


def parse_duration(value: object) -> float:
    """Seconds from "35 ms"."""
    return float(_parse(value, _DURATION))


def parse_size(value: object) -> int:
    """Bytes from "512 MB" or "512 MiB", to the nearest byte."""
    return round(_parse(value, _SIZE))


def parse_flops(value: object) -> float:
    """FLOP/s from "80 GFLOPS"."""
    return float(_parse(value, _FLOPS))


def _parse(value: object, quantity: _Quantity) -> Decimal:
    def wrong(reason: str) -> UnitError:
        return UnitError(f'{value!r} is not {quantity.name}: {reason}; write for example "{quantity.example}"')

    if isinstance(value, (int, float)):
        raise wrong("it has no unit")
    if not isinstance(value, str):
        raise wrong("it is not text")
    if value.lstrip().startswith("-"):
        raise wrong("it is negative")
    match = _NUMBER_AND_UNIT.fullmatch(value)
    if not match:
        raise wrong("it is not a finite number followed by a unit")
    unit = match["unit"]
    if not unit:
        raise wrong("it has no unit")
    if unit not in quantity.units:
        same_letters = [known for known in quantity.units if known.lower() == unit.lower()]
        hint = f'is "{same_letters[0]}" meant?' if same_letters else f"known: {', '.join(quantity.units)}"
        raise wrong(f'unknown unit "{unit}" ({hint})')
    if float(match["number"]) > 1e200:  # a larger one could become an integer of a billion digits
        raise wrong("it is too large")
    return Decimal(match["number"]) * quantity.units[unit]


_PREFIXES = ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)


def format_rate(bits_per_second: float) -> str:
    return _format(bits_per_second, [(f"{prefix}bit/s", factor) for prefix, factor in _PREFIXES])


def format_size(size_bytes: float) -> str:
    return _format(size_bytes, [(f"{prefix}B", factor) for prefix, factor in _PREFIXES])


def format_flops(flops: float) -> str:
    return _format(flops, [(f"{prefix}FLOPS", factor) for prefix, factor in _PREFIXES])


def format_duration(seconds: float) -> str:
    if abs(seconds) >= 7200:  # people read 90 s and 90 min more easily than 1.5 of the next unit
        return _format(seconds, [("h", 3600.0)])
    if abs(seconds) >= 120:
        return _format(seconds, [("min", 60.0)])
    return _format(seconds, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)])


def format_count(count: float) -> str:
    """Below a million: exact, with thousands separators. Above: three digits and a prefix."""
    if abs(count) < 1e6:
        return f"{count:,.0f}"
    return _format(count, [(prefix, factor) for prefix, factor in _PREFIXES if prefix])


def _format(value: float, units: list[tuple[str, float]]) -> str:
    """Three significant digits, in the largest unit that gives at least 1."""
    if value == 0:
        return f"0 {next(unit for unit, factor in units if factor == 1.0)}"
    if not math.isfinite(value):
        return str(value)
    for unit, factor in units:
        scaled = float(f"{value / factor:.3g}")  # round first, so that 999.9 k becomes 1 M, not 1000 k
        if abs(scaled) >= 1 or (unit, factor) == units[-1]:
            return f"{scaled:g} {unit}"
    raise AssertionError("there is always a smallest unit")
