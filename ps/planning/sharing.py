"""Shares boxes over devices: the one way in which whole products of the grid, lost blocks, speculative copies and the
blocks of a plan whose devices are gone are cut.

A device's three queues are busy first with the blocks it was sent, then with the blocks that wait for it. Both
determine when the device ends. But shared blocks overtake the waiting ones, so only the sent blocks determine when they
return. So there are two times: the common end, which is the earliest by which all devices together can compute the
cells beside their own blocks, or the end of the product if that is later; and the earliest at which all cells can be
back, if no device takes more than it can compute by the common end.

Each box is then cut like a weighted grid. Devices sorted by size fill columns from top to bottom; a column is as wide
as its devices' share of the box, and within it each device's height is its share of the column. Cuts are rounded
cumulatively, so the blocks tile the box for any shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import Areas, CostModel, least_span
from ps.planning.cost import BYTES, Integers, Numbers, chunk_of, least_bytes, usable_bytes
from ps.planning.packing import halved
from ps.planning.pipeline import made_plan
from ps.planning.plans import Plan, PlanError, Shape, whole


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


def grid_plan(shape: Shape, profiles: NDArray[np.void]) -> Plan:
    """The plain way to cut a product, as a baseline."""
    able = able_devices(shape, profiles)
    idle = np.zeros((3, len(able)))
    boxes, owner, _ = shared(whole(shape), shape.inner, profiles[able], idle, idle, 0.0, len(able))
    return made_plan(boxes, able[owner], shape, profiles)


def shared(
    boxes: Sequence[Integers] | Integers,
    inner: int,
    profiles: NDArray[np.void],
    sent_s: Numbers,
    all_s: Numbers,
    ends_s: float,
    most: int,
) -> tuple[Integers, Integers, Integers]:
    """Blocks that cover these boxes; the index of each block's device; and that of its box, in order. `sent_s`,
    `all_s`: [3, devices], how long their queues are busy with the blocks they were sent, and with all their blocks;
    `ends_s`: when the product ends without these boxes; `most`: devices per box."""
    needed = np.array([float(box[1] * box[3] * box[5]) for box in boxes])
    total, rows, columns = float(needed.sum()), max(int(t[3]) for t in boxes), max(int(t[5]) for t in boxes)
    few = most * len(boxes)
    chosen = np.arange(len(profiles))
    while True:
        share = _shares(profiles[chosen], inner, sent_s[:, chosen], all_s[:, chosen], ends_s, (rows, columns), total)
        ranking = np.argsort(-share, kind="stable")
        ranking = ranking[: 1 + int(np.searchsorted(np.cumsum(share[ranking]), total))]
        if len(ranking) <= few:
            break
        chosen = chosen[ranking[:few]]  # fewer devices need longer, so each can do more
    share, chosen = share[ranking], chosen[ranking]
    made, owner, counts = [], [], []
    teams = dealt(needed, np.broadcast_to(share, (len(boxes), len(share))))
    for index, (box, team) in enumerate(zip(boxes, teams, strict=True)):
        team = team if len(team) else np.array([index % len(share)])  # fewer devices than boxes
        mine = chosen[team]
        shape = Shape(int(box[1]), int(box[3]), inner, int(box[5]))
        part, place = _divided(shape, profiles[mine], np.maximum(share[team], 1.0))
        made.append(part + np.array([box[0], 0, box[2], 0, box[4], 0]))
        owner.append(mine[place])
        counts.append(len(part))
    return np.concatenate(made), np.concatenate(owner), np.repeat(np.arange(len(boxes)), counts)


def _shares(
    profiles: NDArray[np.void],
    inner: int,
    sent_s: Numbers,
    all_s: Numbers,
    ends_s: float,
    largest: tuple[int, int],
    total: float,
) -> Numbers:
    """Cells for each device; together at least `total`."""
    now = settings.NOW
    soon, late = (Areas(_cost_model(profiles, inner, busy_s), *largest) for busy_s in (sent_s, all_s))

    def within(span_s: float) -> bool:
        return float(np.minimum(late.within(span_s), total).sum()) >= total

    end_s = ends_s if within(ends_s) else least_span(within, ends_s, max(1e-3, 2 * ends_s), now.precision)
    most = np.minimum(late.within(now.later * end_s), total)

    def back(span_s: float) -> Numbers:
        return np.minimum(soon.within(span_s), most)

    span_s = least_span(lambda span_s: float(back(span_s).sum()) >= total, 0.0, now.later * end_s, now.precision)
    return back(span_s)


def _cost_model(profiles: NDArray[np.void], inner: int, busy_s: Numbers) -> CostModel:
    """A block passes the three queues in order, each after the work in it: three sums, and the longest counts."""
    side_s, nothing = 8.0 * BYTES * inner / profiles["down_bps"], np.zeros(len(profiles))
    compute_s, up_s = 2.0 * inner / profiles["flops"], 8.0 * BYTES / profiles["up_bps"]
    back_s = profiles["latency_s"]
    sides = np.stack([side_s, nothing, nothing])
    return CostModel(
        busy_s + np.stack([2 * back_s + profiles["overhead_s"], back_s + profiles["overhead_s"], back_s]),
        sides,
        sides,
        np.stack([compute_s + up_s, compute_s + up_s, up_s]),
        np.maximum(1.0, usable_bytes(profiles) / BYTES),
    )


def dealt(missing: Numbers, offers: Numbers) -> list[Integers]:
    """Deal devices, in order, always to the box or product with most missing that still needs one. `offers`: [boxes,
    devices], how much of it each device does."""
    lacking = missing.tolist()
    teams: list[list[int]] = [[] for _ in lacking]
    for device, parts in enumerate(offers.T.tolist()):
        open_ = [box for box, part in enumerate(parts) if part > 0 and lacking[box] > 0]
        if open_:
            box = max(open_, key=lacking.__getitem__)
            teams[box].append(device)
            lacking[box] -= parts[box]
        elif max(lacking) <= 0:
            break
    return [np.array(team, np.int64) for team in teams]


def _divided(shape: Shape, profiles: NDArray[np.void], cells: Numbers) -> tuple[Integers, Integers]:
    """Blocks of about `cells` cells for each of these devices, largest first; and the index of each block's device.
    Each group of devices takes some matrices of a batch, or one; a group may be a single device."""
    groups = min(shape.batch, len(cells))  # largest first in turn, so that they resemble each other
    dealt = [np.arange(group, len(cells), groups) for group in range(groups)]
    cuts = _cuts(np.array([cells[group].sum() for group in dealt]), shape.batch)
    made, owners = [], []
    for group, begin, end in zip(dealt, cuts[:-1], cuts[1:], strict=True):
        if end > begin:
            grid, place = _grid(shape.rows, shape.columns, cells[group])
            made.append(np.column_stack([np.full(len(grid), begin), np.full(len(grid), end - begin), grid]))
            owners.append(group[place])
    boxes, owner = np.concatenate(made), np.concatenate(owners)
    return halved(boxes, owner, lambda t, o: chunk_of(t, o, shape.inner, profiles) == 0)


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
