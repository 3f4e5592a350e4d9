"""A sketch of a whole product, compared with the same sketch of its operands: is the product right?

A grid that respects all blocks and is no coarser than PATCH cells each way cuts the output. For random vectors t and s,
the part of t^T C s that lies in a patch must equal (t^T A)(B s) of its rows and columns. That reads A, B and C once,
while computing C took n times as long. Rows and columns count as if their norms were 1, so that an error in a row of
small numbers stands out like one in a row of large numbers. The entries of t and s have random signs and magnitudes
between 0.5 and 1.5: no pattern of errors cancels often, no single cell is ever hidden. Devices do not know the seed.

In an honest product only rounding differs: the square of a patch's difference, divided by the number of its cells,
estimates the mean square of its cells' errors (in eps |a_i| |b_j|, see ps/verification/rounding.py), however they are
spread over the patch. The sum over the patches of a block is its `energy`. If an energy is too large,
ps/verification/verifier.py recomputes cells in float64 and decides whether to accuse the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.verification.rounding import EPSILON, LARGEST, TINY, Floats, floor, level_squared, norms

Array = NDArray[np.float32]

PATCH = 64  # cells each way: a single wrong cell is compared with the rounding of at most 64 x 64
STRIP = 64  # rows summed by one small product: a larger one would consist mostly of zeros
SMALLEST_NORM = 1e-30  # a norm below this counts as this
MOST = 1e8  # energy of a patch: larger values and NaN count as this, otherwise sums would lose the smaller ones


@dataclass(frozen=True, slots=True)
class Side:
    """Rows of A, or columns of B, as the check sees them; [batch, extent] and [batch, intervals]."""

    bounds: Integers
    norms: Floats
    vector: Array  # t or s, divided by the norms
    sums: Array  # of t_i a_i over each interval: [batch, intervals, inner]
    weight: Floats  # sum of squares of t_i |a_i|
    flushed: tuple[Floats, Floats]  # sums of |t_i| and of |t_i| |a_i|: for the bound on flushing to zero

    @classmethod
    def of(cls, array: Array, bounds: Integers, random: np.random.Generator) -> Side:
        size = norms(array)
        divided = random_vector(size.shape, random) / np.maximum(size, SMALLEST_NORM)
        divided[~np.isfinite(size)] = 0.0
        vector: Array = divided.astype(np.float32)
        share = np.abs(divided) * size
        share[~np.isfinite(size)] = 0.0
        flushed = np.where(size > 0, np.abs(divided), 0.0)
        starts = bounds[:-1]
        return cls(
            bounds,
            size,
            vector,
            sums_of(array, vector, bounds),
            np.add.reduceat(share * share, starts, axis=1),
            (np.add.reduceat(flushed, starts, axis=1), np.add.reduceat(share, starts, axis=1)),
        )


@dataclass(frozen=True, slots=True)
class Expectation:
    """The part of the check that needs only the operands: most of it, done while the devices work."""

    rows: Side
    columns: Side
    image: Floats  # (t^T A)(B s) of each patch: [batch, row intervals, column intervals]
    flushed: Floats | None  # how much flushing to zero may change the image; None: negligible
    inner: int
    special: bool  # a value is not finite or may overflow: every cell has to be checked

    @classmethod
    def of(cls, left: Array, right: Array, boxes: Integers, seed: int | Sequence[int]) -> Expectation:
        """For the product left [b, m, n] times right [b, q, n] transposed, cut into these blocks."""
        random, inner = np.random.default_rng(seed), left.shape[2]
        with np.errstate(all="ignore"):
            rows = Side.of(left, grid_bounds(boxes[:, 2], boxes[:, 3], left.shape[1]), random)
            columns = Side.of(right, grid_bounds(boxes[:, 4], boxes[:, 5], right.shape[1]), random)
            image = np.matmul(rows.sums.astype(np.float64), columns.sums.astype(np.float64).transpose(0, 2, 1))
            largest = rows.norms.max(initial=0.0) * columns.norms.max(initial=0.0)
            flushed = _flushed(rows, columns, inner)
        return cls(rows, columns, image, flushed, inner, not largest < LARGEST)

    def fits(self, boxes: Integers) -> bool:
        """False if a block has been cut since."""
        return all(
            np.isin(boxes[:, i], side.bounds).all() and np.isin(boxes[:, i] + boxes[:, i + 1], side.bounds).all()
            for side, i in ((self.rows, 2), (self.columns, 4))
        )

    def patches(self, out: Array) -> tuple[Floats, Floats]:
        """Per patch: the energy, in (eps |a_i| |b_j|)^2; and the mean square of kappa."""
        with np.errstate(all="ignore"):
            halfway = sums_of(out.transpose(0, 2, 1), self.columns.vector, self.columns.bounds)  # [b, columns, m]
            found = sums_of(halfway.transpose(0, 2, 1), self.rows.vector, self.rows.bounds).astype(np.float64)
            cells = np.maximum(self.rows.weight[:, :, None] * self.columns.weight[:, None, :], 0.25)
            difference = np.abs(found - self.image)
            if self.flushed is not None:
                difference = np.maximum(difference - self.flushed, 0.0)
            energy = (difference / EPSILON) ** 2 / cells
            kappa = self.image * self.image / cells
        return np.where(energy < MOST, energy, MOST), np.where(kappa < 1.0, kappa, 1.0)


@dataclass(frozen=True, slots=True)
class Energies:
    """Energies of a product's blocks: sums over their patches, as multiples of the most that honest rounding gives."""

    total: Floats
    patches: Floats  # number of patches, as a float
    patch: Floats  # [batch, row intervals, column intervals]: energy per patch, as such a multiple
    kappa_squared: Floats  # mean per block

    @classmethod
    def of(cls, expected: Expectation, out: Array, boxes: Integers) -> Energies:
        energy, kappa = expected.patches(out)
        box = patch_ranges(expected, boxes)
        count = np.prod(box[:, 1::2] - box[:, ::2], axis=1).astype(np.float64)
        # one patch says little about its kappa: no block gets less than the product's mean
        least = mean_kappa_squared(expected, out)
        mean = np.maximum(box_sums(kappa, box) / count, least)
        allowed = level_squared(mean, expected.inner)
        per_patch = level_squared(np.maximum(kappa, least), expected.inner)
        return cls(box_sums(energy, box) / allowed, count, energy / per_patch, mean)


def mean_kappa_squared(expected: Expectation, out: Array) -> float:
    """Mean over all cells, weighted by t and s. A row counts at most its largest possible value: one huge error must
    not make room for small ones."""
    rows, columns = expected.rows, expected.columns
    with np.errstate(all="ignore"):
        scaled = out * columns.vector[:, None, :]
        weights = rows.vector.astype(np.float64) ** 2
        found = np.einsum("bmq,bmq->bm", scaled, scaled) * weights
        most = weights * rows.norms**2 * columns.weight.sum(1)[:, None]
        total = float(np.nansum(most))
        return float(np.nansum(np.fmin(found, most))) / total if total > 0 else 0.0


def patch_ranges(expected: Expectation, boxes: Integers) -> Integers:
    """[k, 6]: first and last + 1 of the batch, row and column intervals of each block."""
    rows, columns = expected.rows.bounds, expected.columns.bounds
    b, bs, r, rs, c, cs = boxes.T
    return np.stack(
        [
            b,
            b + bs,
            np.searchsorted(rows, r),
            np.searchsorted(rows, r + rs),
            np.searchsorted(columns, c),
            np.searchsorted(columns, c + cs),
        ],
        axis=1,
    )


def impossible_cells(expected: Expectation, out: Array) -> NDArray[np.bool_]:
    """Cells that are NaN, or larger than any sum of these terms."""
    with np.errstate(all="ignore"):
        rows, columns = expected.rows.norms[:, :, None], expected.columns.norms[:, None, :]
        most = (1 + (expected.inner + 8) * EPSILON) * rows * columns + floor(rows, columns, expected.inner)
        result: NDArray[np.bool_] = ~(np.abs(out) <= most)
        return result


def grid_sums(expected: Expectation, values: NDArray[np.bool_]) -> Floats:
    """Sums over each patch."""
    by_rows = np.add.reduceat(values.astype(np.float64), expected.rows.bounds[:-1], axis=1)
    result: Floats = np.add.reduceat(by_rows, expected.columns.bounds[:-1], axis=2)
    return result


def box_sums(values: Floats, box: Integers) -> Floats:
    """Sums over boxes of a three-dimensional array, by its integral image."""
    whole = np.zeros(tuple(extent + 1 for extent in values.shape))
    whole[1:, 1:, 1:] = values
    for axis in range(3):
        if values.shape[axis] > 1:
            np.cumsum(whole, axis=axis, out=whole)
    b0, b1, r0, r1, c0, c1 = box.T
    upper = _corners(whole, b1, r0, r1, c0, c1)
    return upper if len(values) == 1 else upper - _corners(whole, b0, r0, r1, c0, c1)


def _corners(whole: Floats, b: Integers, r0: Integers, r1: Integers, c0: Integers, c1: Integers) -> Floats:
    _, rows, columns = whole.shape
    flat, upper, lower = whole.ravel(), (b * rows + r1) * columns, (b * rows + r0) * columns
    result: Floats = flat[upper + c1] - flat[lower + c1] - flat[upper + c0] + flat[lower + c0]
    return result


def grid_bounds(starts: Integers, sizes: Integers, extent: int) -> Integers:
    """Bounds wherever a block begins or ends, at most PATCH apart."""
    return np.unique(np.concatenate([starts, starts + sizes, np.arange(0, extent, PATCH), [extent]]))


def sums_of(array: Array, vector: Array, bounds: Integers) -> Array:
    """Sums of vector_i array_i over the intervals: [batch, intervals, inner]. Uses products with matrices of mostly
    zeros, STRIP rows at a time: five times as fast as adding up rows where these are short."""
    batch, _, inner = array.shape
    out = np.empty((batch, len(bounds) - 1, inner), np.float32)
    first = 0
    while first < len(bounds) - 1:
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + STRIP, side="right")) - 1)
        begin, end = int(bounds[first]), int(bounds[last])
        if end - begin == last - first:  # every row by itself
            np.multiply(array[:, begin:end], vector[:, begin:end, None], out=out[:, first:last])
            first = last
            continue
        where = np.searchsorted(bounds[first : last + 1], np.arange(begin, end), side="right") - 1
        spread = np.zeros((batch, last - first, end - begin), np.float32)
        spread[:, where, np.arange(end - begin)] = vector[:, begin:end]
        np.matmul(spread, array[:, begin:end], out=out[:, first:last])
        first = last
    return out


def random_vector(shape: tuple[int, ...], random: np.random.Generator) -> Floats:
    vector = 2 * random.random(shape) - 1
    return vector + np.copysign(0.5, vector)


def _flushed(rows: Side, columns: Side, inner: int) -> Floats | None:
    """The sum of |t_i| |s_j| floor_ij over each patch."""
    (t, ta), (s, sb) = rows.flushed, columns.flushed
    root = np.sqrt(inner)
    if TINY * inner * (t.max() + root) * (s.max() + root) < EPSILON * 1e-3:
        return None
    t, ta, s, sb = t[:, :, None], ta[:, :, None], s[:, None, :], sb[:, None, :]
    result: Floats = TINY * (inner * t * s + root * (ta * s + t * sb))
    return result
