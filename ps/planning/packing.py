"""Exact tilings near the relaxed bound: the geometry behind planning.

The cost model of ps/planning/capacity.py gives the cells that a device covers in a time. A plain product is covered by
columns of devices (ps/planning/columns.py). A device of a batched product takes whole matrices and one piece of a
further matrix; pieces are gathered until they fill a matrix. With many more devices than matrices there is one team per
matrix.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import Areas, CostModel, PackingError, least_span
from ps.planning.columns import pack_columns
from ps.planning.cost import BYTES, Integers


def streaming_model(profiles: NDArray[np.void], inner: int, bytes_per_value: int) -> CostModel:
    """The model of devices that stream operands (`cleave plan`), with T = latency + max(download, compute, upload):
    only the output must fit their memory, as float32."""
    side_s, nothing = 8 * bytes_per_value * inner / profiles["down_bps"], np.zeros(len(profiles))
    cell_s = np.maximum(8 * bytes_per_value / profiles["up_bps"], 2 * inner / profiles["flops"])
    sides = np.stack([side_s, nothing])
    return CostModel(
        2 * profiles["latency_s"] + profiles["overhead_s"],
        sides,
        sides,
        np.stack([nothing, cell_s]),
        np.floor(profiles["memory_bytes"] / BYTES),
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    boxes: Integers  # [k, 6]: batch, batches, row, rows, column, columns
    owner: Integers  # [k]: index of the device
    bound_s: float  # no tiling ends before this
    makespan_s: float  # by the cost model
    turned: bool = False  # the devices of a column lie side by side along the columns, not one below the other


def packed(cost_models: Sequence[CostModel], batch: int, rows: int, columns: int) -> Tiling:
    """Rectangles that cover every cell of the product exactly once, each small enough for its device. `cost_models`:
    upright, and turned, where its columns are the product's rows."""
    able = np.flatnonzero(cost_models[0].most_cells >= 1)
    if not len(able):
        raise PackingError(f"none of {len(cost_models[0])} devices can hold even one cell of the output")
    cost_models = [model.take(able) for model in cost_models]
    areas = Areas(cost_models[0], rows, columns)
    bound_s = areas.span_s(float(batch) * rows * columns)
    # A device whose share does not fit its memory takes several rectangles: it counts as several smaller devices.
    share = np.minimum(areas.within(bound_s), float(rows) * columns)
    parts = np.clip(
        np.ceil(settings.NOW.slack * share / cost_models[0].most_cells), 1, settings.NOW.most_pieces
    ).astype(np.int64)
    several = np.repeat(np.arange(len(able)), parts)
    split = [model.take(several).divided(parts[several]) for model in cost_models]
    best: Tiling | None = None
    for by_teams in (False, True) if batch > 1 else (True,):
        # teams of one or two have no choice of shape
        if best and (len(able) < 2 * batch or best.makespan_s <= settings.NOW.slack * bound_s):
            break
        pack = pack_columns if by_teams else pack_batch
        try:
            boxes, owner, turned = pack(split, batch, rows, columns, bound_s)
            owner = several[owner]
        except PackingError:
            # too little memory: pack as if there were enough, and halve the rectangles that are too large
            if best:
                break
            boundless = [model.boundless() for model in cost_models]
            boxes, owner, turned = pack(boundless, batch, rows, columns, bound_s)
            most_cells = cost_models[0].most_cells
            boxes, owner = halved(boxes, owner, lambda t, o: t[:, 1] * t[:, 3] * t[:, 5] > most_cells[o])  # noqa: B023
        seen = boxes[:, [0, 1, 4, 5, 2, 3]] if turned else boxes
        made = Tiling(boxes, able[owner], bound_s, cost_models[turned].ends_s(seen, owner), turned)
        if best is None or made.makespan_s < best.makespan_s:
            best = made
    assert best is not None
    return best


def halved(
    boxes: Integers, owner: Integers, too_large: Callable[[Integers, Integers], NDArray[np.bool_]]
) -> tuple[Integers, Integers]:
    """Halve the rectangles that a device cannot hold until they fit: first along the batch, then along the longer
    side."""
    while (large := too_large(boxes, owner)).any():
        first, second = boxes[large].copy(), boxes[large].copy()
        axis = np.where(first[:, 1] > 1, 0, np.where(first[:, 3] >= first[:, 5], 2, 4))
        row = np.arange(len(first))
        half = first[row, axis + 1] // 2
        first[row, axis + 1] = half
        second[row, axis] += half
        second[row, axis + 1] -= half
        boxes = np.concatenate([boxes[~large], first, second])
        owner = np.concatenate([owner[~large], owner[large], owner[large]])
    return boxes, owner


# ---- batched products

Piece = tuple[int, int]  # device, rows


def pack_batch(
    cost_models: Sequence[CostModel], batch: int, rows: int, columns: int, bound_s: float
) -> tuple[Integers, Integers, bool]:
    """Whole matrices for fast devices, pieces of matrices for all: blocks [k, 6], their devices, and whether pieces are
    cut along the columns."""
    best: tuple[float, bool, Integers, list[list[Piece]]] | None = None
    for turned, cost_model in enumerate(cost_models):
        length, breadth = (columns, rows) if turned else (rows, columns)
        attempt = partial(_fill_batch, cost_model, batch, length, breadth)
        if best is not None and attempt(best[0] * (1 - 2 * settings.NOW.precision)) is None:
            continue
        with suppress(PackingError):
            high = best[0] if best else bound_s * 1.01
            span_s = least_span(attempt, bound_s * 0.999, high, settings.NOW.precision)
            made = attempt(span_s)
            assert made is not None
            best = (span_s, bool(turned), *made)
    if best is None:
        raise PackingError("no time is long enough: no device can take even one row of a matrix")
    _, turned, whole, groups = best
    return *_matrix_boxes(batch, rows, columns, turned, whole, groups), turned


def _fill_batch(
    cost_model: CostModel, batch: int, length: int, breadth: int, span_s: float
) -> tuple[Integers, list[list[Piece]]] | None:
    """Whole matrices of each device, and groups of pieces that fill one matrix each. None if they do not suffice."""
    spare_s = np.maximum(span_s - cost_model.fixed_s, 0.0)
    entry_s = cost_model.wide * breadth + cost_model.tall * length + cost_model.cell * (float(length) * breadth)
    possible = np.minimum((spare_s / entry_s).min(axis=0), cost_model.most_cells / (float(length) * breadth))
    whole = np.floor(np.minimum(possible, batch) + 1e-9).astype(np.int64)
    missing = batch - int(whole.sum())
    if missing <= 0:
        return whole, []
    left_s = spare_s - whole * entry_s
    held = cost_model.most_cells / breadth - whole * length
    row_s = cost_model.tall + cost_model.cell * breadth

    def rows_of(columns_loaded: int) -> Integers:
        rows = np.minimum(((left_s - columns_loaded * breadth * cost_model.wide) / row_s).min(axis=0), held)
        whole_rows: Integers = np.floor(np.clip(rows + 1e-9, 0, length)).astype(np.int64)
        return whole_rows

    piece = rows_of(1)
    if int(piece.sum()) < missing * length:
        return None
    groups = _gather(piece, rows_of(2) >= piece, length, missing)
    return None if groups is None else (whole, groups)


def _gather(piece: Integers, divisible: NDArray[np.bool_], length: int, wanted: int) -> list[list[Piece]] | None:
    """`wanted` groups of pieces that add up to `length` each: always the largest piece that fits, or if none does, part
    of a divisible one, whose rest stays, or of the smallest, whose rest is lost."""
    by_size = sorted((size, device) for device, size in enumerate(piece.tolist()) if size)
    may_divide = divisible.tolist()
    # two sorted lists, so that finding a piece takes as long in a large fleet as in a small one
    once = [entry for entry in by_size if may_divide[entry[1]]]
    never = [entry for entry in by_size if not may_divide[entry[1]]]
    groups: list[list[Piece]] = []
    for _ in range(wanted):
        group: list[Piece] = []
        missing = length
        while missing:
            if not (once or never):
                return None
            above = (missing, len(piece))  # all pieces that fit
            fits_once, fits_never = bisect.bisect_left(once, above), bisect.bisect_left(never, above)
            if fits_once and not (fits_never and never[fits_never - 1] > once[fits_once - 1]):
                chosen, at = once, fits_once - 1
            elif fits_never:
                chosen, at = never, fits_never - 1
            else:
                chosen, at = once or never, 0
            size, device = chosen.pop(at)
            taken = min(size, missing)
            group.append((device, taken))
            missing -= taken
            if size > taken and chosen is once:  # a piece is divided at most once
                bisect.insort(never, (size - taken, device))
        groups.append(group)
    return groups


def _matrix_boxes(
    batch: int, rows: int, columns: int, turned: bool, whole: Integers, groups: list[list[Piece]]
) -> tuple[Integers, Integers]:
    boxes: list[tuple[int, int, int, int, int, int]] = []
    owner: list[int] = []
    matrix = 0
    for device in np.flatnonzero(whole).tolist():
        count = min(int(whole[device]), batch - len(groups) - matrix)
        if count > 0:
            boxes.append((matrix, count, 0, rows, 0, columns))
            owner.append(device)
            matrix += count
    for group in groups:
        at = 0
        for device, size in group:
            boxes.append((matrix, 1, 0, rows, at, size) if turned else (matrix, 1, at, size, 0, columns))
            owner.append(device)
            at += size
        matrix += 1
    return np.array(boxes, np.int64), np.array(owner, np.int64)
