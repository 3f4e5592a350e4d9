"""How long a device computes on a block. Pure; handles many blocks on many devices at once.

The time of a product of `batch` matrices, rows x inner times inner x columns, is

    overhead + batch (matrix + left rows' inner + right columns' inner + output rows columns
                      + work rows' inner columns')

seconds, where rows' and columns' are rounded up to whole tiles of the device's kernel: loading, packing and multiplying
add up. The result is multiplied by an efficiency that depends on the shape: how measured times near this shape differ
from the formula, interpolated between the measured shapes and 1 far away from them. This is the typical time. On top of
it come

    link     every byte received and sent keeps the processor busy, if no other core does that work
    pauses   the processor is taken away for `pause_s` after every `run_s` of running (a CPU quota)
    spread   each block's time is multiplied by a factor drawn from the measured ones, seeded per device
    warmth   a rested device takes `rested` times as long; the effect wears off with `warm_up_s` of computing

A device known only by published figures has just an overhead and a rate: `figures_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Shapes = NDArray[np.int64]  # [k, 4]: batch, rows, inner, columns

TERMS = ("overhead_s", "matrix_s", "left_s", "right_s", "output_s", "work_s")  # seconds per call, matrix, cell ..., FMA
SMALL = 1e6  # up to this many multiplications per matrix BLAS uses a different path (OpenBLAS: 100^3)
COORDINATES = 7
SPREAD_AT = np.array([0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])  # quantiles held in `spread`


@dataclass(frozen=True, slots=True)
class Performance:
    """One device's model. `shapes` and `weights` hold the interpolated efficiency, `lengths` how far it reaches."""

    overhead_s: float
    work_s: float  # per multiply-add: 2 / FLOP/s
    matrix_s: float = 0.0
    left_s: float = 0.0
    right_s: float = 0.0
    output_s: float = 0.0
    tile_rows: int = 1
    tile_columns: int = 1
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    weights: tuple[float, ...] = ()
    lengths: tuple[float, ...] = (1.0,) * COORDINATES
    spread: tuple[float, ...] = (1.0,) * len(SPREAD_AT)
    down_s: float = 0.0  # processor time per byte received
    up_s: float = 0.0  # and per byte sent
    run_s: float = 0.0  # between two pauses; 0: no pauses
    pause_s: float = 0.0
    rested: float = 1.0
    warm_up_s: float = 1.0

    def __post_init__(self) -> None:
        numbers = [*(getattr(self, term) for term in TERMS), *self.weights, *self.lengths, *self.spread]
        numbers += [self.down_s, self.up_s, self.run_s, self.pause_s, self.rested, self.warm_up_s]
        if not all(np.isfinite(number) for number in numbers):
            raise ValueError("a figure of the performance model is not a finite number")
        if min(getattr(self, term) for term in TERMS) < 0 or self.work_s <= 0:
            raise ValueError(f"{', '.join(TERMS)} must not be negative, and work_s not zero")
        if self.tile_rows < 1 or self.tile_columns < 1:
            raise ValueError("tiles have at least 1 row and column")
        if len(self.weights) != len(self.shapes) or len(self.lengths) != COORDINATES or min(self.lengths) <= 0:
            raise ValueError(f"every shape needs a weight, and there are {COORDINATES} lengths above zero")
        if any(len(shape) != 4 or min(shape) < 1 for shape in self.shapes):
            raise ValueError("a shape is batch, rows, inner and columns, each at least 1")
        if len(self.spread) != len(SPREAD_AT) or min(self.spread) <= 0 or list(self.spread) != sorted(self.spread):
            raise ValueError(f"spread is {len(SPREAD_AT)} factors above zero that rise")
        if self.down_s < 0 or self.up_s < 0:
            raise ValueError("down_s and up_s must not be negative")
        if self.run_s < 0 or self.pause_s < 0 or (self.pause_s > 0) != (self.run_s > 0):
            raise ValueError("run_s and pause_s are both above zero, or both zero")
        if not 0 < self.rested <= 1 or self.warm_up_s <= 0:
            raise ValueError("rested is above 0 and at most 1, and warm_up_s above 0")

    def seconds(self, shapes: Shapes, places: Floats | None = None) -> Floats:
        """Typical times, including pauses on average. Frequent callers pass `places`, computed once by `places()`."""
        result: Floats = terms(shapes, self.tile_rows, self.tile_columns) @ [getattr(self, term) for term in TERMS]
        if self.shapes:
            here = coordinates(shapes, self.tile_rows, self.tile_columns)
            near = closeness(here, self.places() if places is None else places, self.lengths)
            result *= np.exp(near @ np.array(self.weights))
        return result

    def places(self) -> Floats:
        """Coordinates of the measured shapes."""
        return coordinates(np.array(self.shapes, np.int64).reshape(-1, 4), self.tile_rows, self.tile_columns)


def figures_seconds(profiles: NDArray[np.void], shapes: Shapes) -> Floats:
    """Seconds on devices known by two figures: a fixed overhead per block, and a rate."""
    flops = 2.0 * shapes.prod(axis=1)
    seconds: Floats = profiles["overhead_s"] + flops / profiles["flops"]
    return seconds


def terms(shapes: Shapes, tile_rows: int, tile_columns: int) -> Floats:
    """[k, 6]: the factors of TERMS."""
    batch, rows, inner, columns = shapes.T.astype(np.float64)
    full_rows, full_columns = np.ceil(rows / tile_rows) * tile_rows, np.ceil(columns / tile_columns) * tile_columns
    one = np.ones_like(batch)
    parts = (one, one, full_rows * inner, full_columns * inner, rows * columns, full_rows * full_columns * inner)
    return np.stack([parts[0], *(batch * part for part in parts[1:])], axis=1)


def coordinates(shapes: Shapes, tile_rows: int, tile_columns: int) -> Floats:
    """[k, 7]: the coordinates of a shape; shapes close to each other have similar efficiency."""
    batch, rows, inner, columns = shapes.T.astype(np.float64)
    filled = [np.ceil(size / tile) * tile / size for size, tile in ((rows, tile_rows), (columns, tile_columns))]
    small = (rows * inner * columns <= SMALL).astype(np.float64)
    return np.stack([*(np.log2(x) for x in (batch, rows, inner, columns, *filled)), small], axis=1)


def closeness(one: Floats, two: Floats, lengths: Sequence[float]) -> Floats:
    """Matern 3/2: 1 for the same shape, 0 far away."""
    one, two = one / np.array(lengths), two / np.array(lengths)
    squared = (one**2).sum(1)[:, None] + (two**2).sum(1)[None] - 2 * one @ two.T
    distance = np.sqrt(3 * np.maximum(squared, 0.0))
    result: Floats = (1 + distance) * np.exp(-distance)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Which devices of a fleet have a fitted model; the others have the two figures of their profile."""

    kinds: tuple[Performance, ...]
    of: NDArray[np.int64]  # per device: index into `kinds`, -1 without a model
    seeds: tuple[tuple[int, int], ...]  # per device; its random factors do not depend on the other devices in its pod

    def part(self, devices: Sequence[int]) -> Models:
        return Models(self.kinds, self.of[list(devices)], tuple(self.seeds[device] for device in devices))

    def as_json(self) -> dict[str, Any]:
        return {"kinds": [asdict(kind) for kind in self.kinds], "of": self.of.tolist(), "seeds": self.seeds}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Models:
        kinds = tuple(performance_from(kind) for kind in value["kinds"])
        return Models(kinds, np.array(value["of"], np.int64), tuple((one, two) for one, two in value["seeds"]))


def performance_from(value: Mapping[str, Any]) -> Performance:
    """From decoded JSON or TOML; ValueError if it is not a performance model."""
    known = {f.name for f in fields(Performance)}
    for key in value:
        if key not in known:
            raise ValueError(f'unknown key "{key}"')
    try:
        lists = {key: tuple(float(x) for x in value[key]) for key in ("weights", "lengths", "spread") if key in value}
        shapes = tuple((int(b), int(r), int(i), int(c)) for b, r, i, c in value.get("shapes", ()))
        tiles = {key: int(value[key]) for key in ("tile_rows", "tile_columns") if key in value}
        rest = {key: float(x) for key, x in value.items() if key not in {*lists, *tiles, "shapes"}}
        return Performance(**{**rest, **lists, **tiles, "shapes": shapes})  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"the performance model is incomplete or damaged: {error}") from None


class Processors:
    """The processors of many devices and their state: warmth, time since the last pause, random factors."""

    def __init__(self, models: Models) -> None:
        count = len(models.of)
        self._models = models
        self._places = [kind.places() for kind in models.kinds]
        self._luck: dict[int, np.random.Generator] = {}
        self._warmth, self._ran_s, self._slower = np.zeros(count), np.zeros(count), np.ones(count)

    def slow(self, devices: list[int], factor: float) -> None:
        """Make these devices `factor` times slower than the model."""
        self._slower[devices] = factor

    def seconds(
        self,
        device: NDArray[np.int64],
        shapes: Shapes,
        moved_bytes: NDArray[np.int64],
        idle_s: Floats,
        figures_s: Floats,
    ) -> Floats:
        """Seconds of one block on each of several devices, which were idle for `idle_s` before it. `moved_bytes`: [k,
        2], bytes received and sent. `figures_s`: the time for devices without a model."""
        result = figures_s.copy()
        of = self._models.of[device]
        for number, kind in enumerate(self._models.kinds):
            at = np.flatnonzero(of == number)
            if len(at):
                typical_s = kind.seconds(shapes[at], self._places[number]) + moved_bytes[at] @ [kind.down_s, kind.up_s]
                result[at] = self._slower[device[at]] * self._live(kind, device[at], typical_s, idle_s[at])
        return result

    def receiving_s(self, device: NDArray[np.int64], down_bytes: NDArray[np.int64]) -> Floats:
        """The part of `seconds` spent, on average, on receiving the messages that bring these blocks."""
        by_kind = np.array([*(kind.down_s for kind in self._models.kinds), 0.0])  # last: no model
        result: Floats = self._slower[device] * by_kind[self._models.of[device]] * down_bytes
        return result

    def _live(self, model: Performance, device: NDArray[np.int64], typical_s: Floats, idle_s: Floats) -> Floats:
        """Actual times on these devices now, from typical times."""
        seconds = typical_s
        if model.spread[0] != model.spread[-1]:
            seconds = seconds * np.interp([self._draw(d) for d in device.tolist()], SPREAD_AT, model.spread)
        if model.rested < 1:
            warmth = self._warmth[device] * np.exp(-idle_s / model.warm_up_s)
            seconds = seconds * (model.rested + (1 - model.rested) * warmth)
            self._warmth[device] = 1 - (1 - warmth) * np.exp(-seconds / model.warm_up_s)
        if model.pause_s:
            before_s = np.where(idle_s >= model.pause_s, 0.0, self._ran_s[device])
            running_s = seconds * model.run_s / (model.run_s + model.pause_s)
            pauses = np.floor((before_s + running_s) / model.run_s)
            self._ran_s[device] = before_s + running_s - pauses * model.run_s
            seconds = running_s + pauses * model.pause_s
        return seconds

    def _draw(self, device: int) -> float:
        if device not in self._luck:
            self._luck[device] = np.random.Generator(np.random.PCG64(self._models.seeds[device]))
        return float(self._luck[device].random())
