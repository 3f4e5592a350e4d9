"""A weighted grid: the plain way to cut a product, as a baseline and for the quick re-cut of a lost rectangle.

The cost model says how many cells a device gets: all devices that take part should end at the same time T, which is
found by bisection. Devices sorted by size fill columns from top to bottom; a column is as wide as its devices' share of
the output, and within it each device's height is its share of the column. Cuts are rounded cumulatively, so the
rectangles tile the output for any shares. A pure function: same input, same plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import BYTES, Integers, Numbers, chunk_length, least_bytes, usable_bytes
from ps.planning.packing import halved
from ps.planning.pipeline import chunks_of, device_ends, made_plan
from ps.planning.plans import Plan, PlanError, Shape

# Using every device for a small product costs bytes and messages and saves nothing: among teams that end within this
# factor of the best, the smallest is taken.
SLACK = 1.05


class _Squares:
    """The largest square block that each device returns within a given time, for one inner length n.

    With the side x, the time is a quadratic: (2 n / flops + 32 / up) x^2 + (64 n / down) x + fixed.
    """

    def __init__(self, profiles: NDArray[np.void], inner: int, backlog_s: Numbers) -> None:
        self._fixed = backlog_s + 2 * profiles["latency_s"] + profiles["overhead_s"]
        self._twice_a = 2 * (2 * inner / profiles["flops"] + 8 * BYTES / profiles["up_bps"])
        self._b = 2 * 8 * BYTES * inner / profiles["down_bps"]
        self._b_squared = self._b**2

    def cells(self, seconds: float) -> Numbers:
        spare = np.maximum(seconds - self._fixed, 0.0)
        # the root in the form that does not subtract two nearly equal numbers
        side: Numbers = 2 * spare / (self._b + np.sqrt(self._b_squared + 2 * self._twice_a * spare))
        return side * side


def able_devices(shape: Shape, profiles: NDArray[np.void]) -> Integers:
    """Devices with the memory for at least one cell."""
    if min(shape.batch, shape.rows, shape.inner, shape.columns) < 1:
        raise PlanError(f"a product of size zero cannot be planned: {shape}")
    need = least_bytes(shape.inner)
    able = np.flatnonzero(usable_bytes(profiles) >= need)
    if not able.size:
        raise PlanError(
            f"none of {len(profiles)} devices has the {2 * need} bytes of memory that one cell of {shape} needs: "
            f"{need} for the block, and as much again for what is kept"
        )
    return able


def grid_plan(shape: Shape, profiles: NDArray[np.void], backlog_s: Numbers, count: int | None = None) -> Plan:
    """`backlog_s`: modelled seconds of work each device already has. `count`: the most devices to use."""
    boxes, device = grid_boxes(shape, profiles, backlog_s, count)
    made = made_plan(boxes, device, shape, profiles)
    if not backlog_s.any():
        return made
    used, ends_s = device_ends(boxes, device, made.fresh, shape, profiles, chunks_of(boxes, device, shape, profiles))
    return Plan(boxes, device, made.fresh, float((ends_s + backlog_s[used]).max()))


def grid_boxes(
    shape: Shape, profiles: NDArray[np.void], backlog_s: Numbers, count: int | None = None
) -> tuple[Integers, Integers]:
    """The blocks of a grid plan, and their devices."""
    able = able_devices(shape, profiles)
    chosen, cells = _shares(shape, profiles[able], backlog_s[able], count)
    chosen = able[chosen]
    boxes, owner = divided(shape, profiles[chosen], cells)
    return boxes, chosen[owner]


def divided(shape: Shape, profiles: NDArray[np.void], cells: Numbers) -> tuple[Integers, Integers]:
    """Blocks of about `cells` cells for each of these devices, largest first; and the index of each block's device."""
    if shape.batch == 1:
        boxes, owner = _grid(shape.rows, shape.columns, cells)
        boxes = np.column_stack([np.zeros(len(boxes), np.int64), np.ones(len(boxes), np.int64), boxes])
    elif len(profiles) <= shape.batch:
        boxes, owner = _batch_ranges(shape, cells)
    else:
        boxes, owner = _grid_each(shape, cells)
    budget = usable_bytes(profiles)
    return halved(boxes, owner, lambda t, o: chunk_length(t[:, 1], t[:, 3], shape.inner, t[:, 5], budget[o]) == 0)


def _shares(
    shape: Shape, profiles: NDArray[np.void], backlog_s: Numbers, count: int | None
) -> tuple[Integers, Numbers]:
    """The devices that take part, and the cells of each, largest first."""
    best_s, cells = _level(shape, profiles, backlog_s)
    order = np.argsort(-cells, kind="stable")
    useful = min(int(np.count_nonzero(cells >= 1.0)), shape.cells)
    if count is not None:
        useful = min(count, useful)
    order = order[: max(1, useful)]
    _, mine = _level(shape, profiles[order], backlog_s[order], near_s=best_s)
    while count is None and len(order) > 1:
        fewer = order[: max(1, len(order) * 3 // 4)]
        span_s, cells = _level(shape, profiles[fewer], backlog_s[fewer], near_s=best_s)
        if span_s > best_s * SLACK:
            break
        order, mine = fewer, cells
    ranking = np.argsort(-mine, kind="stable")
    return order[ranking], np.maximum(mine[ranking], 1.0)


def _level(
    shape: Shape, profiles: NDArray[np.void], backlog_s: Numbers, near_s: float | None = None
) -> tuple[float, Numbers]:
    """The time T at which these devices, all ending together, have covered the output; and the cells of each. `near_s`:
    T of a larger fleet, to within the precision below; this fleet needs at least as long."""
    squares = _Squares(profiles, shape.inner, backlog_s)
    low, high = (0.0, 1e-3) if near_s is None else (0.98 * near_s, SLACK * near_s)
    while (cells := squares.cells(high)).sum() < shape.cells:
        low, high = high, high * 2
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        got = squares.cells(middle)
        if got.sum() >= shape.cells:
            high, cells = middle, got
        else:
            low = middle
    return high, cells


def _cuts(weights: Numbers, length: int) -> Integers:
    """Boundaries that divide `length` in proportion to the weights, rounded without losing or doubling a cell."""
    cumulative = np.cumsum(weights)
    return np.concatenate([[0], np.rint(cumulative * (length / cumulative[-1])).astype(np.int64)])


def _grid(rows: int, columns: int, cells: Numbers) -> tuple[Integers, Integers]:
    """Blocks [k, 4] of row, rows, column, columns, and the index of each block's device."""
    count = int(np.clip(round(columns / np.sqrt(rows * columns / len(cells))), 1, min(len(cells), columns)))
    cumulative = np.cumsum(cells)
    column_of = np.minimum((cumulative - cells / 2) * (count / cumulative[-1]), count - 1).astype(np.int64)
    members, starts = np.unique(column_of, return_index=True)
    ends = np.append(starts[1:], len(cells))
    widths = _cuts(np.add.reduceat(cells, starts), columns)
    boxes, owners = [], []
    for index in range(len(members)):
        heights = _cuts(cells[starts[index] : ends[index]], rows)
        left, width = widths[index], widths[index + 1] - widths[index]
        height = np.diff(heights)
        boxes.append(np.column_stack([heights[:-1], height, np.full(len(height), left), np.full(len(height), width)]))
        owners.append(np.arange(starts[index], ends[index]))
    table, owner = np.concatenate(boxes), np.concatenate(owners)
    kept = (table[:, 1] > 0) & (table[:, 3] > 0)
    return table[kept], owner[kept]


def _batch_ranges(shape: Shape, cells: Numbers) -> tuple[Integers, Integers]:
    """Fewer devices than matrices of the batch: each device takes whole matrices."""
    cuts = _cuts(cells, shape.batch)
    count = np.diff(cuts)
    owner = np.flatnonzero(count)
    full = np.broadcast_to([0, shape.rows, 0, shape.columns], (len(owner), 4))
    return np.column_stack([cuts[:-1][owner], count[owner], full]), owner


def _grid_each(shape: Shape, cells: Numbers) -> tuple[Integers, Integers]:
    """More devices than matrices of the batch: deal the devices out, largest first, so that the teams of the matrices
    resemble each other, and cut every matrix for the average team."""
    team = len(cells) // shape.batch
    dealt = np.arange(team * shape.batch).reshape(team, shape.batch)  # [place in the team, matrix]
    grid, place = _grid(shape.rows, shape.columns, cells[dealt].mean(axis=1))
    matrix = np.repeat(np.arange(shape.batch), len(grid))
    boxes = np.column_stack([matrix, np.ones(len(matrix), np.int64), np.tile(grid, (shape.batch, 1))])
    return boxes, dealt[np.tile(place, shape.batch), matrix]
