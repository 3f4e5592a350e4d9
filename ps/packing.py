"""Exact tilings near the fluid bound.

The geometry behind planning. What a device covers in a time is a law (ps/law.py); a plain product is covered by columns
of devices (ps/columns.py), a batched one by whole entries and pieces of entries (ps/entries.py), or, with many more
devices than entries, by a team an entry. `Rates` is the law of devices that stream everything, that of `cleave plan`:
T = latency + max(download, compute, upload).

Pure functions of arrays; nothing here knows about networks or protocols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.columns import pack_columns
from ps.entries import pack_entries
from ps.law import Areas, Integers, Law, Numbers, PackingError

__all__ = ["PackingError", "Rates", "Tiling", "halved", "packed", "tile"]

ACCUMULATOR_BYTES = 4  # a cell of the output while it is added up
MOST_PARTS = 16  # rectangles of one device
GOOD_ENOUGH = 1.02  # of the bound: another way of packing is not tried


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

    def law(self) -> Law:
        side_s, cell_s, nothing = 1 / self.perimeter_per_s, 1 / self.cells_per_s, np.zeros(len(self))
        sides = np.stack([side_s, nothing])
        return Law(self.latency_s, sides, sides, np.stack([nothing, cell_s]), self.most_cells)


@dataclass(frozen=True, slots=True)
class Tiling:
    tiles: Integers  # [k, 6]: batch, batches, row, rows, column, columns
    owner: Integers  # [k]: index of the device
    bound_s: float  # no tiling ends before this
    makespan_s: float  # by the law
    turned: bool = False  # devices stand side by side along the columns, not one below the other


def tile(rates: Rates, batch: int, rows: int, columns: int) -> Tiling:
    """Rectangles that cover every cell of the product exactly once, each small enough for its device."""
    law = rates.law()
    return packed((law, law), batch, rows, columns)


def packed(laws: tuple[Law, Law], batch: int, rows: int, columns: int) -> Tiling:
    """The same for any law; `laws`: upright, and turned, where the columns of the law are the product's rows."""
    able = np.flatnonzero(laws[0].most_cells >= 1)
    if not len(able):
        raise PackingError(f"none of {len(laws[0])} devices can hold even one cell of the output")
    if len(able) < len(laws[0]):
        laws = laws[0].take(able), laws[1].take(able)
    areas = Areas(laws[0], rows, columns)
    bound_s = areas.span_s(float(batch) * rows * columns)
    # A device whose share does not fit into its memory takes several rectangles: it counts as several smaller devices.
    share = np.minimum(areas.within(bound_s), float(rows) * columns)
    parts = np.clip(np.ceil(1.02 * share / laws[0].most_cells), 1, MOST_PARTS).astype(np.int64)
    several = np.repeat(np.arange(len(able)), parts)
    split = laws
    if len(several) > len(able):
        split = laws[0].take(several).divided(parts[several]), laws[1].take(several).divided(parts[several])
    best: Tiling | None = None
    for by_teams in (False, True) if batch > 1 else (True,):
        # teams of one or two have no choice of shape
        if best and (len(able) < 2 * batch or best.makespan_s <= GOOD_ENOUGH * bound_s):
            break
        pack = _pack_teams if by_teams else pack_entries
        try:
            tiles, owner, turned = pack(split, batch, rows, columns, bound_s)
            owner = several[owner]
        except PackingError:
            # so little memory that this fails: pack as if there were enough, and halve what is too big
            if best:
                break
            tiles, owner, turned = pack((laws[0].boundless(), laws[1].boundless()), batch, rows, columns, bound_s)
            most_cells = laws[0].most_cells
            tiles, owner = halved(tiles, owner, lambda t, o: t[:, 1] * t[:, 3] * t[:, 5] > most_cells[o])  # noqa: B023
        seen = tiles[:, [0, 1, 4, 5, 2, 3]] if turned else tiles
        made = Tiling(tiles, able[owner], bound_s, laws[turned].ends_s(seen, owner), turned)
        if best is None or made.makespan_s < best.makespan_s:
            best = made
    assert best is not None
    return best


def _pack_teams(
    laws: tuple[Law, Law], batch: int, rows: int, columns: int, bound_s: float
) -> tuple[Integers, Integers, bool]:
    """A team an entry; a plain product has one entry, and a team of everybody."""
    made = pack_columns(laws, batch, rows, columns, bound_s)
    return np.column_stack([made.team, np.ones_like(made.team), made.tiles]), made.owner, made.turned


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
