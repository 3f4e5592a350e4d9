"""How much a device can do in a given time: the cost model of the packing.

A rectangle of w columns and h rows takes a device `fixed_s` and then the longer of two sums,

    T = fixed + max over j of (wide_j w + tall_j h + cell_j w h),      and it must hold w h cells.

For devices that stream everything (`cleave plan`), one sum is the download of the perimeter, the other the cells
computed or uploaded. The strips and chunks of the running system (ps/planning/pipeline.py) give other sums. Given T
and w, the height has a closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ps.planning import settings
from ps.planning.cost import Integers, Numbers

SHAPES = 2.0 ** np.arange(-2, 0.75, 0.25)  # of rectangles that are tried: the width, as a multiple of the square's
TINY = 1e-300  # in place of zero in a denominator


class PackingError(ValueError):
    """No time is long enough for these devices."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The coefficients, one per device in the last axis; the first axis of `wide`, `tall` and `cell` is j, the
    two sums (three in ps/planning/sharing.py)."""

    fixed_s: Numbers
    wide: Numbers  # seconds per column of the rectangle
    tall: Numbers  # seconds per row
    cell: Numbers  # seconds per cell
    most_cells: Numbers

    def __len__(self) -> int:
        return len(self.fixed_s)

    def take(self, index: Integers) -> CostModel:
        sums = self.wide[:, index], self.tall[:, index], self.cell[:, index]
        return CostModel(self.fixed_s[index], *sums, self.most_cells[index])

    def divided(self, parts: Integers) -> CostModel:
        """The model of devices that give 1 / `parts` of their time."""
        return replace(self, wide=self.wide * parts, tall=self.tall * parts, cell=self.cell * parts)

    def boundless(self) -> CostModel:
        return replace(self, most_cells=np.full(len(self), np.inf))

    def loads(self, heights: Numbers | Integers, widths: Numbers | Integers, batches: Integers | int = 1) -> Numbers:
        """The sums of a rectangle on each device."""
        return batches * (self.wide * widths + self.tall * heights + self.cell * (1.0 * widths * heights))

    def heights(self, span_s: float | Numbers, widths: Numbers | Integers) -> Numbers:
        """The height that each device covers at this width; negative if it cannot even download the columns."""
        spare_s = np.maximum(span_s - self.fixed_s, 0.0)
        both = (spare_s - self.wide * widths) / np.maximum(self.tall + self.cell * widths, TINY)
        heights: Numbers = np.minimum(np.minimum(both[0], both[1]), self.most_cells / widths)
        return heights

    def slopes(self, span_s: float | Numbers, widths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Heights, at least zero, and their derivatives by width and by time."""
        spare_s = np.maximum(span_s - self.fixed_s, 0.0)
        below = np.maximum(self.tall + self.cell * widths, TINY)
        both = (spare_s - self.wide * widths) / below
        second = both[1] < both[0]
        height = np.where(second, both[1], both[0])
        by_time = 1 / np.where(second, below[1], below[0])
        by_width = -by_time * (
            np.where(second, self.wide[1], self.wide[0]) + np.where(second, self.cell[1], self.cell[0]) * height
        )
        held = self.most_cells / widths
        full = held < height
        if full.any():
            height = np.where(full, held, height)
            by_time = np.where(full, 0.0, by_time)
            by_width = np.where(full, -held / widths, by_width)
        some = height > 0
        return height * some, by_width * some, by_time * some

    def ends_s(self, boxes: Integers, owner: Integers) -> float:
        """When the last device ends, if both sums add up over all its rectangles."""
        used, index = np.unique(owner, return_inverse=True)
        loads = self.take(owner).loads(boxes[:, 3], boxes[:, 5], boxes[:, 1])
        busy_s = np.maximum(np.bincount(index, loads[0]), np.bincount(index, loads[1]))
        return float((self.fixed_s[used] + busy_s).max())


class Areas:
    """The most cells that each device covers inside rows x columns, in rectangles of at most `most_cells` each.

    A larger rectangle has more cells per length of its sides. So the best is one rectangle with equally expensive
    sides, or one strip where the product is narrow. Beyond what fits the memory or the product (a batch has further
    matrices), it is as many of the largest rectangles as time allows. Each sum limits the cells; the smallest limit
    counts.
    """

    def __init__(self, cost_model: CostModel, rows: int, columns: int) -> None:
        self.cost_model, self.rows, self.columns = cost_model, rows, columns
        self._root = np.sqrt(cost_model.wide * cost_model.tall)
        self._aspect = np.where(cost_model.wide > 0, np.sqrt(cost_model.tall / np.maximum(cost_model.wide, TINY)), 1.0)
        self._largest = np.minimum(cost_model.most_cells, float(rows) * columns)
        widths = np.clip(np.sqrt(self._largest) * self._aspect, self._largest / rows, columns)
        heights = self._largest / np.maximum(widths, TINY)
        self._largest_s = np.maximum(
            cost_model.wide * widths + cost_model.tall * heights + cost_model.cell * self._largest, TINY
        )

    def within(self, span_s: float | Numbers) -> Numbers:
        cost_model, rows, columns = self.cost_model, self.rows, self.columns
        spare_s = np.maximum(span_s - cost_model.fixed_s, 0.0)
        # the root in the form that does not subtract two nearly equal numbers
        side = spare_s / np.maximum(self._root + np.sqrt(self._root * self._root + cost_model.cell * spare_s), TINY)
        low = (spare_s - cost_model.wide * columns) / np.maximum(cost_model.tall + cost_model.cell * columns, TINY)
        thin = (spare_s - cost_model.tall * rows) / np.maximum(cost_model.wide + cost_model.cell * rows, TINY)
        one = np.where(
            side * self._aspect > columns,
            columns * np.minimum(low, rows),
            np.where(side > rows * self._aspect, rows * np.minimum(thin, columns), side * side),
        )
        both = np.where(spare_s > self._largest_s, spare_s / self._largest_s * self._largest, one)
        cells: Numbers = both.min(axis=0)
        return cells

    def span_s(self, cells: float) -> float:
        """The relaxed bound: no tiling ends before this, even if every device had its best shape."""
        return least_span(
            lambda span_s: float(np.minimum(self.within(span_s), cells).sum()) >= cells,
            0.0,
            1e-3,
            settings.NOW.precision / 10,
        )


def least_span(possible: Callable[[float], object], low: float, high: float, precision: float) -> float:
    """The least time for which `possible` gives anything but None or False; it must not for `low`."""
    for _ in range(120):
        if possible(high):
            break
        low, high = high, high * 2 if high > 2 * low else high + 2 * (high - low)
    else:
        raise PackingError("no time is long enough: no device can hold or download even a cell")
    while high - low > precision * high:
        middle = (low + high) / 2
        if possible(middle):
            high = middle
        else:
            low = middle
    return high
