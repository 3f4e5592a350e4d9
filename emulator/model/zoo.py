"""The zoo: device kinds and access networks, read from the TOML files shipped with the project.

Scenarios refer to a file by its name. Files are checked once, here, so that no caller meets a missing figure or one
without a unit. Reads package data only; assumes that the files do not change while a process runs.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from agent.protocol.errors import UserError
from agent.protocol.units import parse_duration, parse_flops, parse_rate, parse_size
from emulator.model.performance import Performance, performance_from

KINDS = ("phone", "tablet", "board", "laptop", "mini-pc")
TECHNOLOGIES = (
    *("adsl", "fttc", "gfast", "cable", "fibre", "fixed-wireless", "satellite", "lte", "5g", "wifi"),
    "mixed",  # several, or not stated
)
BASES = ("measured", "published", "estimate")  # where a figure comes from, best first

Parsed = TypeVar("Parsed")


class UnknownName(UserError):
    """No file has that name; the message lists the nearest ones."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    name: str  # as used in scenarios
    title: str  # for display
    kind: str  # one of KINDS
    flops: float  # sustained float32 FLOP/s of a large product
    basis: str  # basis of `flops`, one of BASES
    overhead_s: float  # fixed cost per call; an estimate unless `performance` was fitted
    ram_bytes: int
    ram_basis: str
    budget_bytes: int  # memory its owner lends
    source: str
    performance: Performance | None = None  # fitted to samples; None: only overhead and rate are known


@dataclass(frozen=True, slots=True)
class RateSpread:
    """Percentiles over households, bit/s; all three equal the median where only the median is known."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not 0 < self.p10 <= self.p50 <= self.p90:
            raise ValueError(
                f"percentiles must be positive and rise, not {self.p10:g}, {self.p50:g}, {self.p90:g} bit/s"
            )


@dataclass(frozen=True, slots=True)
class Network:
    name: str
    title: str
    technology: str  # one of TECHNOLOGIES
    country: str  # ISO 3166 code, "world" or "unknown"
    samples: int | None  # number of measurements behind the percentiles, if any
    basis: str  # basis of the rates
    down: RateSpread
    up: RateSpread
    rtt_s: float  # idle
    rtt_basis: str
    jitter_s: float | None  # None: unknown
    jitter_up_s: float | None
    loss: float | None  # share of packets, 0 to 1
    rtt_loaded_down_s: float | None  # while a download fills the link
    rtt_loaded_up_s: float | None
    source: str


def device_names() -> list[str]:
    return _names(_devices())


def network_names() -> list[str]:
    return _names(_networks())


@cache
def load_device(name: str) -> DeviceKind:
    """A device kind by name, or from the user's own file: a path that ends in .toml."""
    if name.endswith(".toml"):
        return read_device(Path(name))
    return _load("device", _devices(), name, parse_device)


@cache
def load_network(name: str) -> Network:
    return _load("network", _networks(), name, parse_network)


def read_device(path: Path) -> DeviceKind:
    try:
        return parse_device(str(path), path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the device file {path}: {error.strerror}; `cleave calibrate` writes one"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; correct it, or write it again with `cleave calibrate`") from None


def parse_device(name: str, text: str) -> DeviceKind:
    """Parse a device file; ValueError names the wrong key."""
    table = _Table(tomllib.loads(text))
    device = DeviceKind(
        name=name,
        title=table.take("title", _text),
        kind=table.take("kind", _one_of(KINDS)),
        flops=table.take("gemm", _positive(parse_flops)),
        basis=table.take("basis", _one_of(BASES)),
        overhead_s=table.take("overhead", parse_duration),
        ram_bytes=table.take("ram", _positive(parse_size)),
        ram_basis=table.take("ram_basis", _one_of(BASES)),
        budget_bytes=table.take("budget", _positive(parse_size)),
        source=table.take("source", _text),
        performance=table.find("performance", _performance),
    )
    table.refuse_the_rest()
    if device.performance is not None and device.basis != "measured":
        raise ValueError('a device with a [performance] table has basis = "measured"')
    return device


def parse_network(name: str, text: str) -> Network:
    """Parse a network file; ValueError names the wrong key."""
    table = _Table(tomllib.loads(text))
    network = Network(
        name=name,
        title=table.take("title", _text),
        technology=table.take("technology", _one_of(TECHNOLOGIES)),
        country=table.take("country", _text),
        samples=table.find("samples", _positive_count),
        basis=table.take("basis", _one_of(BASES)),
        down=table.take("down", _rate_spread),
        up=table.take("up", _rate_spread),
        rtt_s=table.take("rtt", parse_duration),
        rtt_basis=table.take("rtt_basis", _one_of(BASES)),
        jitter_s=table.find("jitter", parse_duration),
        jitter_up_s=table.find("jitter_up", parse_duration),
        loss=table.find("loss_percent", _share_from_percent),
        rtt_loaded_down_s=table.find("rtt_loaded_down", parse_duration),
        rtt_loaded_up_s=table.find("rtt_loaded_up", parse_duration),
        source=table.take("source", _text),
    )
    table.refuse_the_rest()
    return network


def _devices() -> Traversable:
    return resources.files("emulator") / "devices"


def _networks() -> Traversable:
    return resources.files("netem_profiles")


def _names(folder: Traversable) -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def _load(what: str, folder: Traversable, name: str, parse: Callable[[str, str], Parsed]) -> Parsed:
    names = _names(folder)
    if name not in names:  # also keeps "../x" from leaving the folder
        nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.4)
        raise UnknownName(
            f'unknown {what} "{name}"; nearest: {", ".join(nearest) or "none"}; '
            f"all {len(names)} are the .toml files in {folder}"
        )
    file = folder / f"{name}.toml"
    try:
        return parse(name, file.read_text(encoding="utf-8"))
    except ValueError as error:  # TOMLDecodeError is a ValueError, and gives the line
        raise ValueError(f"{file}: {error}") from error


class _Table:
    """A TOML table whose keys are taken one by one, so that unknown keys are left over and can be refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def take(self, key: str, parse: Callable[[Any], Parsed]) -> Parsed:
        if key not in self._values:
            raise ValueError(f'missing key "{key}"')
        try:
            return parse(self._values.pop(key))
        except ValueError as error:
            raise ValueError(f'key "{key}": {error}') from error

    def find(self, key: str, parse: Callable[[Any], Parsed]) -> Parsed | None:
        return self.take(key, parse) if key in self._values else None

    def refuse_the_rest(self) -> None:
        for key in self._values:
            raise ValueError(f'unknown key "{key}"')


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not text")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return parse


def _positive(parse: Callable[[object], Parsed]) -> Callable[[object], Parsed]:
    def parse_positive(value: object) -> Parsed:
        parsed = parse(value)
        if not parsed:  # the unit parsers refuse negative values
            raise ValueError(f"{value!r} must be more than zero")
        return parsed

    return parse_positive


def _positive_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value


def _share_from_percent(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 100:
        raise ValueError(f"{value!r} is not a number from 0 to 100")
    return value / 100


def _performance(value: object) -> Performance:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table; `cleave calibrate` writes one")
    return performance_from(value)


def _rate_spread(value: object) -> RateSpread:
    if not isinstance(value, dict):
        raise ValueError(f'{value!r} is not a table such as {{ p10 = "5 Mbit", p50 = "12 Mbit", p90 = "19 Mbit" }}')
    table = _Table(value)
    p50 = table.take("p50", parse_rate)
    p10, p90 = table.find("p10", parse_rate), table.find("p90", parse_rate)
    table.refuse_the_rest()
    return RateSpread(p50 if p10 is None else p10, p50, p50 if p90 is None else p90)
