"""Product + fleet -> plan: rectangles that tile the output exactly, each with its device.

A weighted grid. How many cells a device gets follows from the cost model: all devices that take part should end at the
same moment T, so T is found by bisection. Devices sorted by size fill columns from top to bottom; a column is as wide
as its devices' share of the output, and within it each device's height is its share of the column. Cuts are rounded
cumulatively, so the rectangles tile whatever the shares. A pure function: same input, same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.cost import Squares, block_bytes, block_seconds
from ps.packing import halved

Integers = NDArray[np.int64]

# Using every device for a small product costs bytes and messages and saves nothing: among fleets that end within this
# factor of the best, the smallest is taken.
SLACK = 1.10


class PlanError(ValueError):
    """No device can take part; the text says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """C[batch, rows, columns] = A[batch, rows, inner] B[batch, inner, columns]"""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def cells(self) -> int:
        return self.batch * self.rows * self.columns

    @property
    def flops(self) -> int:
        return 2 * self.cells * self.inner


@dataclass(frozen=True, slots=True)
class Plan:
    tiles: Integers  # [k, 6]: batch, batches, row, rows, column, columns
    device: Integers  # [k]: index into the profiles given to the planner
    makespan_s: float  # modelled
    count: int  # devices chosen; a later plan of the same shape and fleet may start from it


def plan(shape: Shape, profiles: NDArray[np.void], backlog_s: NDArray[np.float64], count: int | None = None) -> Plan:
    """`backlog_s`: modelled seconds of work each device already has. `count`: how many devices, if that is known."""
    if min(shape.batch, shape.rows, shape.inner, shape.columns) < 1:
        raise PlanError(f"a product of size zero cannot be planned: {shape}")
    able = np.flatnonzero(profiles["memory_bytes"] >= block_bytes(1, 1, shape.inner, 1))
    if not able.size:
        need = block_bytes(1, 1, shape.inner, 1)
        raise PlanError(f"none of {len(profiles)} devices has the {need} bytes that one cell of {shape} needs")
    chosen, cells = _shares(shape, profiles[able], backlog_s[able], count)
    chosen = able[chosen]
    if shape.batch == 1:
        tiles, owner = _grid(shape.rows, shape.columns, cells)
        tiles = np.column_stack([np.zeros(len(tiles), np.int64), np.ones(len(tiles), np.int64), tiles])
    elif len(chosen) <= shape.batch:
        tiles, owner = _batch_ranges(shape, cells)
    else:
        tiles, owner = _grid_each(shape, cells)
    memory_bytes = profiles["memory_bytes"][chosen]
    tiles, owner = halved(
        tiles, owner, lambda t, o: block_bytes(t[:, 1], t[:, 3], shape.inner, t[:, 5]) > memory_bytes[o]
    )
    device = chosen[owner]
    times = block_seconds(profiles[device], tiles[:, 1], tiles[:, 3], shape.inner, tiles[:, 5])
    finish = np.bincount(owner, weights=times, minlength=len(chosen)) + backlog_s[chosen]
    return Plan(tiles, device, float(finish.max()), len(chosen))


def _shares(
    shape: Shape, profiles: NDArray[np.void], backlog_s: NDArray[np.float64], count: int | None
) -> tuple[Integers, NDArray[np.float64]]:
    """Who takes part, and how many cells each, largest first."""
    best_s, cells = _level(shape, profiles, backlog_s)
    order = np.argsort(-cells, kind="stable")
    useful = min(int(np.count_nonzero(cells >= 1.0)), shape.cells)
    if count is not None:
        useful = min(count, useful)
    order = order[: max(1, useful)]
    _, mine = _level(shape, profiles[order], backlog_s[order])
    while count is None and len(order) > 1:
        fewer = order[: max(1, len(order) * 3 // 4)]
        span_s, cells = _level(shape, profiles[fewer], backlog_s[fewer])
        if span_s > best_s * SLACK:
            break
        order, mine = fewer, cells
    ranking = np.argsort(-mine, kind="stable")
    return order[ranking], np.maximum(mine[ranking], 1.0)


def _level(
    shape: Shape, profiles: NDArray[np.void], backlog_s: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """The moment T at which these devices, all ending together, have covered the output; and the cells of each."""
    squares = Squares(profiles, shape.inner, backlog_s)
    low, high = 0.0, 1e-3
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


def _cuts(weights: NDArray[np.float64], length: int) -> Integers:
    """Boundaries that divide `length` in proportion to the weights, rounded without losing or doubling a cell."""
    cumulative = np.cumsum(weights)
    return np.concatenate([[0], np.rint(cumulative * (length / cumulative[-1])).astype(np.int64)])


def _grid(rows: int, columns: int, cells: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Tiles [k, 4] of row, rows, column, columns, and the index of each tile's owner."""
    count = int(np.clip(round(columns / np.sqrt(rows * columns / len(cells))), 1, min(len(cells), columns)))
    cumulative = np.cumsum(cells)
    column_of = np.minimum((cumulative - cells / 2) * (count / cumulative[-1]), count - 1).astype(np.int64)
    members, starts = np.unique(column_of, return_index=True)
    ends = np.append(starts[1:], len(cells))
    widths = _cuts(np.add.reduceat(cells, starts), columns)
    tiles, owners = [], []
    for index in range(len(members)):
        heights = _cuts(cells[starts[index] : ends[index]], rows)
        left, width = widths[index], widths[index + 1] - widths[index]
        height = np.diff(heights)
        tiles.append(np.column_stack([heights[:-1], height, np.full(len(height), left), np.full(len(height), width)]))
        owners.append(np.arange(starts[index], ends[index]))
    table, owner = np.concatenate(tiles), np.concatenate(owners)
    kept = (table[:, 1] > 0) & (table[:, 3] > 0)
    return table[kept], owner[kept]


def _batch_ranges(shape: Shape, cells: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """Fewer devices than products: each device takes whole products."""
    cuts = _cuts(cells, shape.batch)
    count = np.diff(cuts)
    owner = np.flatnonzero(count)
    full = np.broadcast_to([0, shape.rows, 0, shape.columns], (len(owner), 4))
    return np.column_stack([cuts[:-1][owner], count[owner], full]), owner


def _grid_each(shape: Shape, cells: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """More devices than products: deal the devices out, largest first, so that the products' teams resemble each other,
    and cut every product like the average team's."""
    team = len(cells) // shape.batch
    dealt = np.arange(team * shape.batch).reshape(team, shape.batch)  # [place in the team, product]
    grid, place = _grid(shape.rows, shape.columns, cells[dealt].mean(axis=1))
    entry = np.repeat(np.arange(shape.batch), len(grid))
    tiles = np.column_stack([entry, np.ones(len(entry), np.int64), np.tile(grid, (shape.batch, 1))])
    return tiles, dealt[np.tile(place, shape.batch), entry]
