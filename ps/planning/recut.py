"""Cuts lost rectangles anew over working devices: lost blocks return soon, and no device ends later than necessary.

A device's three queues are busy first with the blocks it was sent, then with the blocks that wait for it. Both
determine when the device ends. But lost blocks overtake the waiting ones, so only the sent blocks determine when lost
blocks return. So there are two times: the common end, which is the earliest by which all devices together can compute
the lost cells beside their own blocks, or the end of the product if that is later; and the earliest at which all lost
cells can be back, if no device takes more than it can compute by the common end.

Pure functions of arrays: same input, same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.planning.capacity import Areas, CostModel, least_span
from ps.planning.cost import BYTES, Integers, Numbers, usable_bytes
from ps.planning.plans import Shape
from ps.planning.weighted_grid import SLACK, divided

PRECISION = 5e-3  # of a time
MANY = 4  # candidates, as a multiple of the devices that may be used
LATER = 1.05  # may finish up to 5% late, seen from now, if lost blocks return sooner


def recut(
    lost: Sequence[Integers],
    inner: int,
    profiles: NDArray[np.void],
    sent_s: Numbers,
    all_s: Numbers,
    ends_s: float,
    most: int,
) -> tuple[Integers, Integers, Integers]:
    """Blocks that cover the rectangles `lost`; the index of each block's device; and that of its rectangle, in order.
    `sent_s`, `all_s`: [3, devices], how long their queues are busy with the blocks they were sent, and with all
    their blocks; `ends_s`: when the product ends without the lost rectangles; `most`: devices per rectangle."""
    needed = np.array([float(box[1] * box[3] * box[5]) for box in lost])
    total, rows, columns = float(needed.sum()), max(int(t[3]) for t in lost), max(int(t[5]) for t in lost)
    few = most * len(lost)
    chosen = _soonest(profiles, inner, all_s, total / few, MANY * few)
    while True:
        share = _shares(profiles[chosen], inner, sent_s[:, chosen], all_s[:, chosen], ends_s, (rows, columns), total)
        ranking = np.argsort(-share, kind="stable")
        ranking = ranking[: 1 + int(np.searchsorted(np.cumsum(share[ranking]), total))]
        if len(ranking) <= few:
            break
        chosen = chosen[ranking[:few]]  # fewer devices need longer, so each can do more
    share, chosen = share[ranking], chosen[ranking]
    teams = _teams(needed, share)
    boxes, owner, counts = [], [], []
    for box, team in zip(lost, teams, strict=True):
        mine = chosen[team]
        shape = Shape(int(box[1]), int(box[3]), inner, int(box[5]))
        part, place = divided(shape, profiles[mine], np.maximum(share[team], 1.0))
        boxes.append(part + np.array([box[0], 0, box[2], 0, box[4], 0]))
        owner.append(mine[place])
        counts.append(len(part))
    return np.concatenate(boxes), np.concatenate(owner), np.repeat(np.arange(len(lost)), counts)


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
    soon, late = (Areas(_cost_model(profiles, inner, busy_s), *largest) for busy_s in (sent_s, all_s))

    def within(span_s: float) -> bool:
        return float(np.minimum(late.within(span_s), total).sum()) >= total

    end_s = ends_s if within(ends_s) else least_span(within, ends_s, max(1e-3, 2 * ends_s), PRECISION)
    most = np.minimum(late.within(LATER * end_s), total)

    def back(span_s: float) -> Numbers:
        return np.minimum(soon.within(span_s), most)

    span_s = least_span(lambda span_s: float(back(span_s).sum()) >= total, 0.0, LATER * end_s, PRECISION)
    return back(SLACK * span_s)


def _soonest(profiles: NDArray[np.void], inner: int, busy_s: Numbers, cells: float, most: int) -> Integers:
    """The devices that would end soonest with a square of this many cells; the others need no closer look."""
    if len(profiles) <= most:
        return np.arange(len(profiles))
    cost_model, side = _cost_model(profiles, inner, busy_s), np.array([max(1.0, cells**0.5)])
    ends_s = (cost_model.fixed_s + cost_model.loads(side, side)).max(axis=0)
    return np.sort(np.argsort(ends_s, kind="stable")[:most])


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


def _teams(needed: Numbers, share: Numbers) -> list[Integers]:
    """Deal the devices, largest first, always to the rectangle with the most cells missing."""
    missing = needed.copy()
    teams: list[list[int]] = [[] for _ in needed]
    for device, cells in enumerate(share.tolist()):
        rectangle = int(missing.argmax())
        teams[rectangle].append(device)
        missing[rectangle] -= cells
    # with fewer devices than rectangles, some rectangles have no device yet
    return [np.array(team or [index % len(share)], np.int64) for index, team in enumerate(teams)]
