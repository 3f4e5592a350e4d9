"""Columns of devices that cover a product, or each matrix of a batched one.

Devices sorted by the side of their ideal rectangle fill columns from top to bottom. Once the members of each column are
chosen, all widths and the time T follow from two conditions: the heights of every column add up to the product's
length, and the widths to its breadth. A few numbers of columns are tried, in both orientations. Finally widths and
heights are rounded to whole numbers; each column gives its rows to the devices that end soonest.

A batched product with many more devices than matrices is covered by one team per matrix. Teams dealt from a ranking
resemble each other, so all have the same columns, and are solved at once, each with a time of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import SHAPES, Areas, CostModel, PackingError
from ps.planning.cost import Integers, Numbers


@dataclass(frozen=True, slots=True)
class Columns:
    """Which device is in which column: devices column by column, columns team by team."""

    cost_model: CostModel  # in the order of the columns
    order: Integers  # indices of the devices
    starts: Integers  # first member of each column
    member: Integers  # column of each device
    team_starts: Integers  # first column of each team
    team: Integers  # team of each column
    length: int  # what the heights of each column add up to
    breadth: int  # what the widths of each team add up to

    def rough(self, near_s: float) -> tuple[Numbers, Numbers]:
        """A time for each team, and widths in proportion to what the columns cover in it."""
        areas = np.add.reduceat(Areas(self.cost_model, 1 << 40, 1 << 40).within(near_s), self.starts)
        widths = areas * self.breadth / np.maximum(np.add.reduceat(areas, self.team_starts), 1e-300)[self.team]
        return np.full(len(self.team_starts), near_s), np.maximum(widths, 1e-6 * self.breadth)

    def solved(self, near_s: float) -> tuple[Numbers, Numbers] | None:
        """The time of each team and the width of each column, as real numbers: Newton's method on all of them at once.
        None if it does not converge, mostly because a column is too weak for its length at any width."""
        spans_s, widths = self.rough(near_s)
        for _ in range(24):  # Newton converges in a few steps, or not at all
            heights, by_width, by_time = self.cost_model.slopes(spans_s[self.team][self.member], widths[self.member])
            excess = np.add.reduceat(heights, self.starts) - self.length
            missing = self.breadth - np.add.reduceat(widths, self.team_starts)
            if (np.abs(excess) <= 1e-6 * self.length).all() and (np.abs(missing) <= 1e-6 * self.breadth).all():
                return spans_s, widths
            per_width = np.minimum(np.add.reduceat(by_width, self.starts), -1e-300)
            per_time = np.add.reduceat(by_time, self.starts)
            wider = excess / per_width
            rate = np.maximum(np.add.reduceat(-per_time / per_width, self.team_starts), 1e-300)
            later = missing + np.add.reduceat(wider, self.team_starts)
            later = np.clip(later, -0.3 * spans_s * rate, 0.5 * spans_s * rate) / rate
            change = -wider - per_time / per_width * later[self.team]
            spans_s = spans_s + later
            widths = widths + np.clip(change, -0.6 * widths, 1.5 * widths)
        return None

    def whole_heights(self, widths: Integers, spans_s: Numbers) -> Integers:
        """Whole rows that each device covers at its column's width within its column's time."""
        heights = np.minimum(self.cost_model.heights(spans_s[self.member], widths[self.member]), self.length)
        return np.maximum(np.floor(heights * (1 + 1e-12) + 1e-9), 0.0).astype(np.int64)

    def whole_spans(self, widths: Integers, near_s: Numbers) -> Numbers:
        """The least time in which each column, at this whole width, is covered by whole rows."""

        def enough(spans_s: Numbers) -> NDArray[np.bool_]:
            return np.add.reduceat(self.whole_heights(widths, spans_s), self.starts) >= self.length

        low, high = 0.9 * near_s, 1.1 * near_s  # rounding seldom costs more, if Newton converged
        low = np.where(enough(low), 0.0, low)
        for _ in range(200):
            if (short := ~enough(high)).any():
                low, high = np.where(short, high, low), np.where(short, high * 1.3, high)
            else:
                break
        else:
            raise PackingError("a column cannot be covered in any time")
        while ((high - low) > settings.NOW.precision * high).any():
            middle = (low + high) / 2
            good = enough(middle)
            low, high = np.where(good, low, middle), np.where(good, middle, high)
        return high


_Solution = tuple[Numbers, Numbers, Columns, bool]  # time of each team, width of each column; and whether it is turned


def pack_columns(
    cost_models: Sequence[CostModel], teams: int, rows: int, columns: int, bound_s: float
) -> tuple[Integers, Integers, bool]:
    """Columns of devices, in each of `teams` equal products, the matrices of a batch: blocks [k, 6], their devices, and
    whether the columns of devices lie along the rows. `cost_models`: upright, and turned (columns are rows)."""
    areas = Areas(cost_models[0], rows, columns).within(bound_s * 1.005)
    dealt = _dealt(areas, teams)
    found: list[tuple[float, _Solution]] = []  # and when the last team ends
    rough: list[tuple[float, _Solution]] = []  # where Newton's method fails
    for turned, cost_model in enumerate(cost_models):
        length, breadth = (columns, rows) if turned else (rows, columns)
        heights = _ideal_heights(cost_model, areas, length, breadth, bound_s)
        seats = dealt
        if teams == 1:  # all devices in a column share one width
            seats = dealt[np.argsort(-(areas / np.maximum(heights, 1e-300))[dealt[:, 0]], kind="stable")]
        sides = heights[seats[seats[:, -1] >= 0]].mean(axis=1)
        ideal = int(sides.sum() / length)
        counts = [ideal + more for more in range(-1, settings.NOW.arrangements - 1)]
        for count in sorted({max(1, min(count, len(sides), breadth)) for count in counts}):
            made = _columns(cost_model, seats, sides, count, length, breadth)
            solution = made.solved(min((span_s for span_s, _ in found), default=bound_s * 1.01))
            if solution is None:
                rough.append((np.inf, (*made.rough(bound_s * 1.01), made, bool(turned))))
            else:
                found.append((float(solution[0].max()), (*solution, made, bool(turned))))
    found.sort(key=lambda one: one[0])
    # rounding to whole numbers costs each arrangement differently: the best is known only afterwards
    exact = []
    for span_s, candidate in found[: settings.NOW.arrangements] or rough:
        if not found or span_s <= found[0][0] * settings.NOW.slack:
            with contextlib.suppress(PackingError):
                exact.append(_in_whole_numbers(*candidate))
    if not exact:
        raise PackingError("no arrangement of columns covers the output in any time")
    return min(exact, key=lambda one: one[0])[1]


def _ideal_heights(cost_model: CostModel, areas: Numbers, length: int, breadth: int, span_s: float) -> Numbers:
    """The approximate height of the rectangle with which each device covers most in this time, among a few shapes."""
    squares = np.sqrt(areas * cost_model.tall[0] / cost_model.wide[0])  # a slab that is used often is cheap
    widths = np.clip(SHAPES[:, None] * squares, 1e-9, breadth)
    heights = np.stack([np.clip(cost_model.heights(span_s, width), 0, length) for width in widths])
    # among equals, the rectangle nearest to a square
    covered = heights * widths / np.maximum(SHAPES, 1 / SHAPES)[:, None] ** 1e-3
    best: Numbers = heights[covered.argmax(axis=0), np.arange(len(areas))]
    best[best <= 0] = (areas / np.maximum(squares, 1e-300))[best <= 0]  # less than a row: as if there were more time
    return best


def _dealt(areas: Numbers, teams: int) -> Integers:
    """Devices [round, team], the largest first, in alternating direction so that no team gets the best of every round;
    -1 for empty seats of the last round. The smallest devices are left out: rectangles of a few cells suffer most from
    rounding, and add next to nothing."""
    ranking = np.argsort(-areas, kind="stable")
    ranking = ranking[areas[ranking] > 0]
    ranked = areas[ranking]
    tail = np.cumsum(ranked[::-1])[::-1]
    kept = (tail > 0.002 * tail[:1]) | (ranked >= 64)
    kept[:teams] = True
    ranking = ranking[kept]
    if len(ranking) < teams:
        raise PackingError(f"{len(ranking)} devices of any use are too few for {teams} teams")
    rounds = -(-len(ranking) // teams)
    seats: Integers = np.full((rounds, teams), -1, np.int64)
    seats.flat[: len(ranking)] = ranking
    seats[1:-1:2] = seats[1:-1:2, ::-1]  # the last round may be incomplete, and stays as it is
    return seats


def _columns(cost_model: CostModel, seats: Integers, sides: Numbers, count: int, length: int, breadth: int) -> Columns:
    """At most `count` columns per team, whose sides add up to about the same. `sides`: mean of each complete round."""
    rounds, teams = seats.shape
    total = np.cumsum(sides)
    column = np.minimum(((total - sides / 2) * (count / total[-1])).astype(np.int64), count - 1)
    starts = np.unique(column, return_index=True)[1]  # first rounds
    column = np.searchsorted(starts, np.arange(rounds), side="right") - 1
    place = (column[:, None] + len(starts) * np.arange(teams)).T.ravel()  # column of each seat, team by team
    order = seats.T.ravel()
    present = order >= 0
    order, member = order[present], place[present]
    first = np.searchsorted(member, np.arange(len(starts) * teams))
    return Columns(
        cost_model=cost_model.take(order),
        order=order,
        starts=first,
        member=member,
        team_starts=np.arange(teams) * len(starts),
        team=np.repeat(np.arange(teams), len(starts)),
        length=length,
        breadth=breadth,
    )


def _in_whole_numbers(
    spans_s: Numbers, exact: Numbers, made: Columns, turned: bool
) -> tuple[float, tuple[Integers, Integers, bool]]:
    """The blocks, and when the last device ends."""
    total = np.add.reduceat(exact, made.team_starts)[made.team]
    widths = np.maximum(np.floor(exact * made.breadth / total * (1 + 1e-12)).astype(np.int64), 1)
    near_s = spans_s[made.team]
    while (missing := made.breadth - np.add.reduceat(widths, made.team_starts)).any():
        # widen the columns that then end soonest, narrow those where it helps most
        change = np.sign(missing)[made.team]
        ends_s = made.whole_spans(np.maximum(widths + change, 1), near_s)
        willing = (change > 0) | ((change < 0) & (widths > 1))
        ranking = np.lexsort((np.where(willing, np.where(change > 0, ends_s, -ends_s), np.inf), made.team))
        rank = np.empty(len(ranking), np.int64)
        rank[ranking] = np.arange(len(ranking))
        rank -= made.team_starts[made.team]
        widths = widths + np.where(willing & (rank < np.abs(missing)[made.team]), change, 0)
    heights = fitted_heights(made, widths, made.whole_spans(widths, near_s))
    ends_s = made.cost_model.fixed_s + made.cost_model.loads(heights, widths[made.member]).max(axis=0)
    running = np.cumsum(widths)
    left = running - widths - made.breadth * made.team
    bottom = np.cumsum(heights)
    top = bottom - heights - made.length * made.member
    down, across = [top, heights], [left[made.member], widths[made.member]]
    team = made.team[made.member]
    sides = across + down if turned else down + across
    kept = heights > 0
    boxes = np.column_stack([team, np.ones_like(team), *sides])[kept]
    return float(ends_s[kept].max()), (boxes, made.order[kept], turned)


def fitted_heights(made: Columns, widths: Integers, spans_s: Numbers) -> Integers:
    """Whole heights that add up to exactly the length of each column, given times in which they reach at least that
    length."""
    heights = made.whole_heights(widths, spans_s)
    while (excess := np.add.reduceat(heights, made.starts) - made.length).any():  # the last to end gets a row less
        busy_s = made.cost_model.fixed_s + made.cost_model.loads(heights, widths[made.member]).max(axis=0)
        ranking = np.lexsort((-np.where(heights > 0, busy_s, -np.inf), made.member))
        rank = np.arange(len(ranking)) - made.starts[made.member[ranking]]
        cut = ranking[rank < excess[made.member[ranking]]]
        heights[cut[heights[cut] > 0]] -= 1
    return heights
