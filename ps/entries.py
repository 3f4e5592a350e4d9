"""Batched products with many entries: a device takes whole entries and one piece of a further entry.

Pieces are gathered until they fill an entry; a device that has download to spare may fill the rest of one entry and
begin the next.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from ps.law import PRECISION, Integers, Law, PackingError, least_span

ENTRY_PRECISION = 5e-4  # of T: whole entries make it a staircase anyway

Piece = tuple[int, int]  # device, rows
Entries = tuple[Integers, list[list[Piece]]]  # whole entries of each device; pieces that fill one entry each


def pack_entries(
    laws: tuple[Law, Law], batch: int, rows: int, columns: int, bound_s: float
) -> tuple[Integers, Integers, bool]:
    """Whole entries for the fast, pieces of entries for everybody: tiles [k, 6], owners, and whether pieces are cut
    along the columns."""
    best: tuple[float, bool, Integers, list[list[Piece]]] | None = None
    for turned, law in enumerate(laws):
        length, breadth = (columns, rows) if turned else (rows, columns)

        def attempt(span_s: float, law: Law = law, length: int = length, breadth: int = breadth) -> Entries | None:
            return _fill_entries(law, span_s, batch, length, breadth)

        if best is not None and attempt(best[0] * (1 - 2 * PRECISION)) is None:
            continue
        try:
            high = best[0] if best else bound_s * 1.01
            span_s = least_span(
                lambda s, attempt=attempt: attempt(s) is not None,  # type: ignore[misc]
                bound_s * 0.999,
                high,
                ENTRY_PRECISION,
            )
        except PackingError:
            continue
        made = attempt(span_s)
        assert made is not None
        best = (span_s, bool(turned), *made)
    if best is None:
        raise PackingError("no time is long enough: no device can take even one row of an entry")
    _, turned, whole, groups = best
    return *_entry_tiles(batch, rows, columns, turned, whole, groups), turned


def _fill_entries(law: Law, span_s: float, batch: int, length: int, breadth: int) -> Entries | None:
    """Whole entries of each device, and the groups of pieces that fill the rest. None if they do not suffice."""
    spare_s = np.maximum(span_s - law.fixed_s, 0.0)
    entry_s = law.wide * breadth + law.tall * length + law.cell * (float(length) * breadth)
    possible = np.minimum((spare_s / entry_s).min(axis=0), law.most_cells / (float(length) * breadth))
    whole = np.floor(np.minimum(possible, batch) + 1e-9).astype(np.int64)
    missing = batch - int(whole.sum())
    if missing <= 0:
        return whole, []
    left_s = spare_s - whole * entry_s
    held = law.most_cells / breadth - whole * length
    row_s = law.tall + law.cell * breadth

    def rows_of(columns_loaded: int) -> Integers:
        rows = np.minimum(((left_s - columns_loaded * breadth * law.wide) / row_s).min(axis=0), held)
        whole_rows: Integers = np.floor(np.clip(rows + 1e-9, 0, length)).astype(np.int64)
        return whole_rows

    piece = rows_of(1)
    if int(piece.sum()) < missing * length:
        return None
    groups = _gather(piece, rows_of(2) >= piece, length, missing)
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
    batch: int, rows: int, columns: int, turned: bool, whole: Integers, groups: list[list[Piece]]
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
            tiles.append((entry, 1, 0, rows, at, size) if turned else (entry, 1, at, size, 0, columns))
            owner.append(device)
            at += size
        entry += 1
    return np.array(tiles, np.int64), np.array(owner, np.int64)
