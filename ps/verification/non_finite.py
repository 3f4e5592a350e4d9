"""Products with values that are not finite or may overflow: every cell is checked, in float64.

A row of A (or a column of B) with a value that is not finite makes all its cells not finite. Where partial sums may
exceed the largest float32, an honest kernel gives infinity, NaN or the sum, depending on its order of additions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.verification.recompute import CELL_TIMES
from ps.verification.rounding import COHERENT, EPSILON, LARGEST, PLAIN, Floats, floor
from ps.verification.sketch import MOST, Expectation, grid_sums

Array = NDArray[np.float32]

CHUNK_CELLS = 1 << 20


def failing_patches(left: Array, right: Array, out: Array, expected: Expectation) -> Floats:
    """[batch, row intervals, column intervals]: MOST where a cell is wrong, else 0."""
    rows, columns = expected.rows, expected.columns
    fails = np.empty(out.shape, np.float32)
    known_rows, known_columns = np.isfinite(rows.norms), np.isfinite(columns.norms)
    for b in range(len(out)):
        fails[b] = np.isfinite(out[b])  # correct for cells whose true value is not finite
        i, j = np.flatnonzero(known_rows[b]), np.flatnonzero(known_columns[b])
        if not i.size or not j.size:
            continue
        two = right[b, j].astype(np.float64)
        for some in np.array_split(i, -(-i.size * j.size // CHUNK_CELLS)):
            cells = _fails(left[b, some], two, out[b][np.ix_(some, j)], rows.norms[b, some], columns.norms[b, j])
            fails[b][np.ix_(some, j)] = cells
    return np.where(grid_sums(expected, fails > 0) > 0, MOST, 0.0)


def _fails(left: Array, two: Floats, out: Array, rows: Floats, columns: Floats) -> NDArray[np.bool_]:
    with np.errstate(all="ignore"):
        truth = left.astype(np.float64) @ two.T
        size, inner = rows[:, None] * columns, left.shape[1]
        kappa = np.where(size > 0, np.abs(truth) / size, 0.0)
        single = np.sqrt(PLAIN**2 + (COHERENT * kappa) ** 2 * inner)
        allowed = CELL_TIMES * EPSILON * size * single + floor(rows[:, None], columns, inner)
        right: NDArray[np.bool_] = (np.abs(out - truth) <= allowed) | ((size >= LARGEST) & ~np.isfinite(out))
    return ~right
