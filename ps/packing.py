"""Exact tilings near the fluid bound, for devices that stream: T = latency + max(download, compute, upload).

The geometry behind planning. Within a time T a device can download the rows and columns of rectangles whose sides add
up to `perimeter`, and compute and upload `cells` of output; so in a column of width w it covers the height

    h(w) = min(perimeter - w, cells / w).

A plain product: devices sorted by the side of their ideal square fill columns from top to bottom. Given who is in which
column, the widest w whose heights add up to the column's length is found for all columns at once, and T by bisection. A
few numbers of columns are tried, in both orientations. At last widths and heights become whole numbers, each column
giving its rows to those who end soonest.

A batched product: a device takes whole entries and one piece of a further entry. Pieces are gathered until they fill an
entry; a device that has download to spare may fill the rest of one entry and begin the next.

Pure functions of arrays; nothing here knows about networks or protocols.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]

PRECISION = 2e-4  # of T
ACCUMULATOR_BYTES = 4  # a cell of the output while it is added up
NEARLY = 1.01  # arrangements of columns this near to the best are looked at more closely
FINALISTS = 3
NEGLIGIBLE = 0.002  # of all cells; this and the next were chosen by trial on one seed, and checked on two others
SMALL_SIDE = 8
MOST_PARTS = 16  # rectangles of one device
COLUMN_COUNTS = (-1, 0, 1, 2)  # tried around the ideal number of columns


@dataclass(frozen=True, slots=True)
class Rates:
    """What each device does per second once its latency has passed, and the most cells it can hold."""

    latency_s: Numbers
    perimeter_per_s: Numbers
    cells_per_s: Numbers
    most_cells: Numbers

    @classmethod
    def of(cls, profiles: NDArray[np.void], inner: int, bytes_per_value: int) -> Rates:
        """Of devices that stream operands: only the output must fit into their memory, as float32."""
        return cls(
            latency_s=2 * profiles["latency_s"] + profiles["overhead_s"],
            perimeter_per_s=profiles["down_bps"] / (8 * bytes_per_value * inner),
            cells_per_s=np.minimum(profiles["up_bps"] / (8 * bytes_per_value), profiles["flops"] / (2 * inner)),
            most_cells=np.floor(profiles["memory_bytes"] / ACCUMULATOR_BYTES),
        )

    def __len__(self) -> int:
        return len(self.latency_s)

    def take(self, index: Integers) -> Rates:
        return Rates(
            self.latency_s[index], self.perimeter_per_s[index], self.cells_per_s[index], self.most_cells[index]
        )

    def within(self, span_s: float | Numbers) -> tuple[Numbers, Numbers]:
        """Perimeter and cells of each device."""
        spare_s = np.maximum(span_s - self.latency_s, 0.0)
        return self.perimeter_per_s * spare_s, np.minimum(self.cells_per_s * spare_s, self.most_cells)


@dataclass(frozen=True, slots=True)
class Tiling:
    tiles: Integers  # [k, 6]: batch, batches, row, rows, column, columns
    owner: Integers  # [k]: index of the device
    bound_s: float  # no tiling ends before this
    makespan_s: float


class PackingError(ValueError):
    """Nobody can do it, whatever the time."""


def tile(rates: Rates, batch: int, rows: int, columns: int) -> Tiling:
    """Rectangles that cover every cell of the product exactly once, each small enough for its device."""
    able = np.flatnonzero(rates.most_cells >= 1)
    if not len(able):
        raise PackingError(f"none of {len(rates)} devices can hold even one cell of the output")
    rates = rates.take(able)
    bound_s = fluid_bound(rates, batch, rows, columns)
    # A device whose share does not fit into its memory takes several rectangles: it counts as several smaller devices.
    parts = _parts(rates, bound_s, rows, columns)
    several = np.repeat(np.arange(len(rates)), parts)
    split = rates.take(several)
    split = replace(
        split,
        perimeter_per_s=split.perimeter_per_s / parts[several],
        cells_per_s=split.cells_per_s / parts[several],
    )
    ways = [_pack_plain] if batch == 1 else [_pack_entries]
    if batch > 1 and len(rates) >= 2 * batch:  # teams of one or two have no choice of shape
        ways.append(_pack_teams)
    made = []
    for pack in ways:
        try:
            tiles, owner = pack(split, batch, rows, columns, bound_s)
            owner = several[owner]
        except (
            PackingError
        ):  # so little memory that this fails: pack as if there were enough, and halve what is too big
            boundless = replace(rates, most_cells=np.full(len(rates), np.inf))
            tiles, owner = halved(
                *pack(boundless, batch, rows, columns, bound_s),
                lambda t, o: t[:, 1] * t[:, 3] * t[:, 5] > rates.most_cells[o],
            )
        made.append(Tiling(tiles, able[owner], bound_s, makespan(rates, tiles, owner)))
    return min(made, key=lambda tiling: tiling.makespan_s)


def _parts(rates: Rates, span_s: float, rows: int, columns: int) -> Integers:
    """Into how many rectangles each device's share must be divided to fit its memory."""
    spare_s = np.maximum(span_s - rates.latency_s, 0.0)
    share = np.minimum(
        most_area(rates.perimeter_per_s * spare_s, rates.cells_per_s * spare_s, rates.most_cells, rows, columns),
        float(rows) * columns,
    )
    parts = np.clip(np.ceil(1.02 * share / rates.most_cells), 1, MOST_PARTS)
    return parts.astype(np.int64)


def halved(
    tiles: Integers, owner: Integers, too_large: Callable[[Integers, Integers], NDArray[np.bool_]]
) -> tuple[Integers, Integers]:
    """Halve whatever its device cannot hold, until it fits: the batch while there is one, then the longer side."""
    while (large := too_large(tiles, owner)).any():
        first, second = tiles[large].copy(), tiles[large].copy()
        axis = np.where(first[:, 1] > 1, 0, np.where(first[:, 3] >= first[:, 5], 2, 4))
        row = np.arange(len(first))
        half = first[row, axis + 1] // 2
        first[row, axis + 1] = half
        second[row, axis] += half
        second[row, axis + 1] -= half
        tiles = np.concatenate([tiles[~large], first, second])
        owner = np.concatenate([owner[~large], owner[large], owner[large]])
    return tiles, owner


def makespan(rates: Rates, tiles: Integers, owner: Integers) -> float:
    """When the last device ends: latency + max(perimeter, cells) over all that it has."""
    perimeter = np.bincount(owner, tiles[:, 1] * (tiles[:, 3] + tiles[:, 5]), len(rates))
    cells = np.bincount(owner, tiles[:, 1] * tiles[:, 3] * tiles[:, 5], len(rates))
    used = np.unique(owner)
    busy_s = np.maximum(perimeter[used] / rates.perimeter_per_s[used], cells[used] / rates.cells_per_s[used])
    return float((rates.latency_s[used] + busy_s).max())


def most_area(perimeter: Numbers, cells: Numbers, most_cells: Numbers, rows: int, columns: int) -> Numbers:
    """The most cells inside rows x columns with these limits, in rectangles of at most `most_cells` each.

    A larger rectangle has more cells for its perimeter. So the best is one square, or one strip where the product is
    narrow; and beyond what fits into memory, as many of the largest rectangles as the perimeter allows.
    """
    short, long = min(rows, columns), max(rows, columns)
    half = perimeter / 2
    one = np.where(half <= short, half * half, short * np.minimum(perimeter - short, long))
    side = np.sqrt(most_cells)
    largest = np.minimum(np.where(side <= short, 2 * side, short + most_cells / short), short + long)
    fits = np.minimum(most_cells, float(short) * long)
    return np.minimum(np.where(perimeter > largest, perimeter / largest * fits, one), cells)


def fluid_bound(rates: Rates, batch: int, rows: int, columns: int) -> float:
    """No tiling ends before this: even if every device had its best shape and nothing were cut off."""
    needed = float(batch) * rows * columns

    def covered(span_s: float) -> bool:
        spare_s = np.maximum(span_s - rates.latency_s, 0.0)
        perimeter, cells = rates.perimeter_per_s * spare_s, rates.cells_per_s * spare_s
        return float(np.minimum(most_area(perimeter, cells, rates.most_cells, rows, columns), needed).sum()) >= needed

    return _least(covered, 0.0, 1e-3, PRECISION / 10)


def _least(possible: Callable[[float], bool], low: float, high: float, precision: float) -> float:
    """The least argument for which it is possible, given that `low` is too little."""
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


# ---- a plain product


def _pack_plain(rates: Rates, batch: int, rows: int, columns: int, bound_s: float) -> tuple[Integers, Integers]:
    tiles, owner = pack_columns(rates, rows, columns, bound_s)
    return np.column_stack([np.zeros(len(tiles), np.int64), np.ones(len(tiles), np.int64), tiles]), owner


@dataclass(frozen=True, slots=True)
class Columns:
    """Who is in which column: ranked devices, column by column."""

    rates: Rates  # in the order of the ranking
    order: Integers  # their indices
    starts: Integers  # first member of each column
    member: Integers  # column of each device
    length: int  # what the heights of a column add up to
    breadth: int  # what the widths add up to

    def widths(self, span_s: float, steps: int) -> Numbers:
        """The widest width of each column whose heights still add up to its length."""
        perimeter, cells = self.rates.within(span_s)
        low = np.zeros(len(self.starts))
        high = np.minimum(np.maximum.reduceat(perimeter, self.starts), self.breadth * 1.01)
        for _ in range(steps):
            width = (low + high) / 2
            spread = width[self.member]
            heights = np.maximum(np.minimum(perimeter - spread, cells / np.maximum(spread, 1e-300)), 0.0)
            enough = np.add.reduceat(heights, self.starts) >= self.length
            low, high = np.where(enough, width, low), np.where(enough, high, width)
        return low

    def whole_heights(self, widths: Integers, spans_s: Numbers) -> Integers:
        """Whole rows that each device covers at its column's width within its column's time."""
        perimeter, cells = self.rates.within(spans_s[self.member])
        spread = widths[self.member]
        heights = np.minimum(np.minimum(perimeter - spread, cells / spread), self.length)
        return np.maximum(np.floor(heights * (1 + 1e-12) + 1e-9), 0.0).astype(np.int64)

    def whole_spans(self, widths: Integers, near_s: float) -> Numbers:
        """The least time in which each column, at this whole width, is covered by whole rows."""

        def enough(spans_s: Numbers) -> NDArray[np.bool_]:
            return np.add.reduceat(self.whole_heights(widths, spans_s), self.starts) >= self.length

        low, high = np.zeros(len(self.starts)), np.full(len(self.starts), near_s * 1.02)
        for _ in range(200):
            if (short := ~enough(high)).any():
                low, high = np.where(short, high, low), np.where(short, high * 1.3, high)
            else:
                break
        else:
            raise PackingError("a column cannot be covered in any time")
        while ((high - low) > PRECISION * high).any():
            middle = (low + high) / 2
            good = enough(middle)
            low, high = np.where(good, low, middle), np.where(good, middle, high)
        return high


def pack_columns(rates: Rates, rows: int, columns: int, bound_s: float) -> tuple[Integers, Integers]:
    """Tiles [k, 4] (row, rows, column, columns) and their owners."""
    sides = np.sqrt(most_area(*rates.within(bound_s * 1.005), rates.most_cells, rows, columns))
    order = np.argsort(-sides, kind="stable")
    order = order[sides[order] > 0]
    # Rectangles of a few cells suffer most from whole numbers, and add next to nothing.
    tail = np.cumsum(sides[order][::-1] ** 2)[::-1]
    order = order[(tail > NEGLIGIBLE * tail[0]) | (sides[order] >= SMALL_SIDE)]
    ranked, sides = rates.take(order), sides[order]
    found: list[tuple[float, Columns]] = []
    for length, breadth in ((rows, columns), (columns, rows)):
        ideal = int(sides.sum() / length)
        for count in sorted({max(1, min(ideal + more, len(order), breadth)) for more in COLUMN_COUNTS}):
            starts = _column_starts(sides, count)
            member = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order))))
            made = Columns(ranked, order, starts, member, length, breadth)

            def wide_enough(span_s: float, made: Columns = made) -> bool:
                return float(made.widths(span_s, steps=18).sum()) >= made.breadth

            best_s = min((span_s for span_s, _ in found), default=bound_s * 1.01)
            if found and not wide_enough(best_s * NEARLY):
                continue
            with contextlib.suppress(PackingError):  # some column has too little memory, whatever the time
                found.append((_least(wide_enough, bound_s * 0.999, best_s * NEARLY, PRECISION), made))
    if not found:
        raise PackingError("no arrangement of columns covers the output in any time")
    # whole numbers cost each of them something else: the best is known only afterwards
    found.sort(key=lambda candidate: candidate[0])
    exact = [_in_whole_numbers(span_s, made, made.length != rows) for span_s, made in found[:FINALISTS]]

    def ends_s(tiles: Integers, owner: Integers) -> float:
        return makespan(rates, np.column_stack([np.broadcast_to([0, 1], (len(tiles), 2)), tiles]), owner)

    return min(exact, key=lambda tiling: ends_s(*tiling))


def _column_starts(sides: Numbers, count: int) -> Integers:
    """First members of `count` columns, whose sides add up to about the same."""
    total = np.cumsum(sides)
    column = np.minimum(((total - sides / 2) * (count / total[-1])).astype(np.int64), count - 1)
    return np.unique(column, return_index=True)[1]


def _in_whole_numbers(span_s: float, made: Columns, transposed: bool) -> tuple[Integers, Integers]:
    exact = made.widths(span_s, steps=40)
    widths = np.maximum(np.floor(exact * made.breadth / exact.sum()).astype(np.int64), 1)
    missing = made.breadth - int(widths.sum())
    while missing:  # one more for those columns that end soonest with it, one less where it helps most
        change = 1 if missing > 0 else -1
        spans_s = made.whole_spans(np.maximum(widths + change, 1), span_s)
        ranking = np.argsort(spans_s if change > 0 else -np.where(widths > 1, spans_s, -np.inf), kind="stable")
        chosen = ranking[: min(abs(missing), int((widths > 1).sum()) if change < 0 else len(widths))]
        widths[chosen] += change
        missing -= change * len(chosen)
    spans_s = made.whole_spans(widths, span_s)
    heights = made.whole_heights(widths, spans_s)
    excess = np.add.reduceat(heights, made.starts) - made.length
    while excess.any():  # a row less for those who would end last
        perimeter = (heights + widths[made.member]) / made.rates.perimeter_per_s
        busy_s = made.rates.latency_s + np.maximum(perimeter, heights * widths[made.member] / made.rates.cells_per_s)
        ranking = np.lexsort((-np.where(heights > 0, busy_s, -np.inf), made.member))
        rank = np.arange(len(ranking)) - made.starts[made.member[ranking]]
        cut = ranking[rank < excess[made.member[ranking]]]
        heights[cut[heights[cut] > 0]] -= 1
        excess = np.add.reduceat(heights, made.starts) - made.length
    left = np.concatenate([[0], np.cumsum(widths)[:-1]])
    bottom = np.cumsum(heights)
    top = bottom - heights - made.length * made.member
    tiles = np.column_stack([top, heights, left[made.member], widths[made.member]])
    kept = heights > 0
    tiles = tiles[kept]
    return (tiles[:, [2, 3, 0, 1]] if transposed else tiles), made.order[kept]


# ---- a batched product

Piece = tuple[int, int]  # device, rows
Entries = tuple[Integers, list[list[Piece]]]  # whole entries of each device; pieces that fill one entry each


def _pack_entries(rates: Rates, batch: int, rows: int, columns: int, bound_s: float) -> tuple[Integers, Integers]:
    """Whole entries for the fast, pieces of entries for everybody."""
    best: tuple[float, bool, Integers, list[list[Piece]]] | None = None
    for transposed in (False, True):
        length, breadth = (columns, rows) if transposed else (rows, columns)

        def attempt(span_s: float, length: int = length, breadth: int = breadth) -> Entries | None:
            return _fill_entries(*rates.within(span_s), batch, length, breadth)

        if best is not None and attempt(best[0] * (1 - 2 * PRECISION)) is None:
            continue
        try:
            high = best[0] if best else bound_s * 1.01
            span_s = _least(lambda s, attempt=attempt: attempt(s) is not None, bound_s * 0.999, high, 5e-4)  # type: ignore[misc]
        except PackingError:
            continue
        made = attempt(span_s)
        assert made is not None
        best = (span_s, transposed, *made)
    if best is None:
        raise PackingError("no time is long enough: no device can take even one row of an entry")
    _, transposed, whole, groups = best
    return _entry_tiles(batch, rows, columns, transposed, whole, groups)


def _fill_entries(perimeter: Numbers, cells: Numbers, batch: int, length: int, breadth: int) -> Entries | None:
    """Whole entries of each device, and the groups of pieces that fill the rest. None if they do not suffice."""
    whole = np.floor(np.minimum(perimeter / (length + breadth), cells / (length * breadth)) + 1e-9).astype(np.int64)
    whole = np.minimum(whole, batch)
    missing = batch - int(whole.sum())
    if missing <= 0:
        return whole, []
    spare = perimeter - whole * (length + breadth)
    rows_by_cells = cells / breadth - whole * length
    piece = np.clip(np.floor(np.minimum(spare - breadth, rows_by_cells) + 1e-9), 0, length).astype(np.int64)
    in_two = np.clip(np.floor(np.minimum(spare - 2 * breadth, rows_by_cells) + 1e-9), 0, length).astype(np.int64)
    if int(piece.sum()) < missing * length:
        return None
    groups = _gather(piece, in_two >= piece, length, missing)
    return None if groups is None else (whole, groups)


def _gather(piece: Integers, divisible: NDArray[np.bool_], length: int, wanted: int) -> list[list[Piece]] | None:
    """`wanted` groups of pieces that add up to `length` each. A divisible piece may end one and begin the next."""
    ranking = np.argsort(piece, kind="stable")
    ranking = ranking[piece[ranking] > 0]
    rigid = ranking[~divisible[ranking]]
    sizes, names = piece[rigid].tolist(), rigid.tolist()
    soft = ranking[divisible[ranking]]
    fillers = list(zip(soft.tolist(), piece[soft].tolist(), strict=True))
    begun: Piece | None = None  # what is left of a divided piece
    groups: list[list[Piece]] = []
    for _ in range(wanted):
        group: list[Piece] = []
        missing = length
        if begun is not None:
            group.append(begun)
            missing -= begun[1]
            begun = None
        while sizes and sizes[-1] <= missing:
            size = sizes.pop()
            group.append((names.pop(), size))
            missing -= size
        while missing and fillers:
            name, size = fillers.pop()
            taken = min(size, missing)
            group.append((name, taken))
            missing -= taken
            if size > taken:
                begun = (name, size - taken)
        if missing:
            at = bisect.bisect_left(sizes, missing)
            if at == len(sizes):
                return None
            group.append((names.pop(at), missing))  # it could do more, which is lost
            sizes.pop(at)
        groups.append(group)
    return groups


def _entry_tiles(
    batch: int, rows: int, columns: int, transposed: bool, whole: Integers, groups: list[list[Piece]]
) -> tuple[Integers, Integers]:
    tiles: list[tuple[int, int, int, int, int, int]] = []
    owner: list[int] = []
    entry = 0
    for device in np.flatnonzero(whole).tolist():
        count = min(int(whole[device]), batch - len(groups) - entry)
        if count > 0:
            tiles.append((entry, count, 0, rows, 0, columns))
            owner.append(device)
            entry += count
    for group in groups:
        at = 0
        for device, size in group:
            tiles.append((entry, 1, 0, rows, at, size) if transposed else (entry, 1, at, size, 0, columns))
            owner.append(device)
            at += size
        entry += 1
    return np.array(tiles, np.int64), np.array(owner, np.int64)


def _pack_teams(rates: Rates, batch: int, rows: int, columns: int, bound_s: float) -> tuple[Integers, Integers]:
    """Many more devices than entries: teams of about the same strength, each tiles its own entry."""
    area = most_area(*rates.within(bound_s * 1.005), rates.most_cells, rows, columns)
    ranking = np.argsort(-area, kind="stable")
    # there and back again, so that no team gets the best of every round
    rounds = -(-len(ranking) // batch)
    seat = np.arange(rounds * batch).reshape(rounds, batch)
    seat[1::2] = seat[1::2, ::-1]
    tiles, owner = [], []
    for entry in range(batch):
        team = ranking[seat[:, entry][seat[:, entry] < len(ranking)]]
        mine = rates.take(team)
        grid, place = pack_columns(mine, rows, columns, fluid_bound(mine, 1, rows, columns))
        head = np.broadcast_to([entry, 1], (len(grid), 2))
        tiles.append(np.column_stack([head, grid]))
        owner.append(team[place])
    return np.concatenate(tiles), np.concatenate(owner)
