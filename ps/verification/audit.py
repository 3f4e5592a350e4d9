"""Random cells of a product in float64, a few per product: signed errors, which no sum over cells can hide.

Some audited cells are the cells nearest zero of their blocks. There an error as small as rounding does most harm: it
flips the sign, and with a gradient's sign AdamW flips its step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.verification.recompute import FAR_TIMES, in_units
from ps.verification.rounding import EPSILON, LARGEST, Floats, floor, level_squared

Array = NDArray[np.float32]

BLOCKS_PER_AUDIT = 4  # one cell per four blocks, ...
FEWEST = 24  # ... at least this many cells per product, ...
MOST_TERMS = 1 << 20  # ... and at most this many terms in their sums: 2 ms
NEAR_ZERO = 8  # this many audited cells, at most a third, are the cell nearest zero of their block ...
WINDOW = 64  # ... or of a window of this many of its rows and columns


@dataclass(frozen=True, slots=True)
class Audits:
    blocks: Integers  # the block of each cell
    errors: Floats  # signed, in honest levels; NaN where undefined
    wrong: NDArray[np.bool_]  # the error exceeds honest rounding
    cells: Integers  # batch, row and column of each

    @classmethod
    def of(
        cls, left: Array, right: Array, out: Array, boxes: Integers, norms: tuple[Floats, Floats], random: Generator
    ) -> Audits:
        """`norms`: of the rows of left and right."""
        inner = left.shape[2]
        count = max(-(-len(boxes) // BLOCKS_PER_AUDIT), FEWEST)
        count = max(1, min(count, MOST_TERMS // inner))
        blocks = random.integers(len(boxes), size=count)
        b, bs, r, rs, c, cs = boxes[blocks].T
        batch, row, column = (start + random.integers(size) for start, size in ((b, bs), (r, rs), (c, cs)))
        some = slice(min(NEAR_ZERO, count // 3))
        row[some], column[some] = nearest_zero(out, norms, boxes[blocks[some]], batch[some], row[some], column[some])
        with np.errstate(all="ignore"):
            terms = np.multiply(left[batch, row], right[batch, column], dtype=np.float64)
            truth = terms.sum(axis=1)
            rows, columns = norms[0][batch, row], norms[1][batch, column]
            size, lost = rows * columns, floor(rows, columns, inner)
            most = (inner + 8) * EPSILON * size + lost
            off = out[batch, row, column] - truth
            level = np.sqrt(level_squared((truth / size) ** 2, inner))
            errors = in_units(off, size, lost) / level
            normal = np.isfinite(truth) & (size < LARGEST)
            wrong = np.where(normal, ~(np.abs(off) <= most) | (np.abs(errors) > FAR_TIMES), False)
        return cls(blocks, np.where(normal & (size > 0), errors, np.nan), wrong, np.stack([batch, row, column], axis=1))


def nearest_zero(
    out: Array, norms: tuple[Floats, Floats], boxes: Integers, batch: Integers, row: Integers, column: Integers
) -> tuple[Integers, Integers]:
    """Row and column of each block's cell nearest zero, relative to its norms; in a large block, within a window around
    the given cell. Skips cells that are zero: most of them had nothing to compute."""
    r, rs, c, cs = boxes[:, 2:].T
    r, c = (
        np.maximum(start, np.minimum(at - WINDOW // 2, start + size - WINDOW))
        for start, size, at in ((r, rs, row), (c, cs, column))
    )
    high, wide = np.minimum(rs, WINDOW), np.minimum(cs, WINDOW)
    i = r[:, None] + np.minimum(np.arange(high.max()), high[:, None] - 1)
    j = c[:, None] + np.minimum(np.arange(wide.max()), wide[:, None] - 1)
    b = batch[:, None]
    with np.errstate(all="ignore"):
        size = norms[0][b, i][:, :, None] * norms[1][b, j][:, None]
        near = np.abs(out[b[:, None], i[:, :, None], j[:, None]]) / size
    near[~(near > 0)] = np.inf
    found = near.reshape(len(boxes), -1).argmin(axis=1)
    down, along = np.divmod(found, near.shape[2])
    k = np.arange(len(boxes))
    return i[k, down], j[k, along]
