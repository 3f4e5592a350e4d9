"""Cells recomputed in float64, as evidence for or against the answer of a device.

Errors are counted in eps |a_i| |b_j| (ps/verification/rounding.py) and compared with the server's own float32 kernels
(ps/verification/own_kernels.py) on some of the same cells. A device is wrong if no kernel could have given one of its
cells, or if its errors exceed those of the worst own kernel by a factor: as a mean square, as a mean (honest errors
have no sign), in a single cell, or, by a smaller factor, in single cells of several patches.

Operands that repeat need care. Cells with equal rows and columns share one error, so they count as one cell. Terms that
repeat within a sum are rounded the same way each time: such errors grow with n and not with sqrt(n), and an own kernel
shows them only by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.verification.own_kernels import own_products
from ps.verification.rounding import COHERENT, EPSILON, LARGEST, PLAIN, Floats, floor, norms, upper

Array = NDArray[np.float32]
Flags = NDArray[np.bool_]

SAMPLED_TERMS = 1 << 21  # that own kernels add up per patch: about 10 ms
AT_A_TIME = 4096  # terms converted to float64 at once, so that they stay in the cache
SAMPLED_SIDE = 16  # most rows, and most columns, for own kernels
TIMES_SQUARED = 3.0  # mean square of errors: wrong above this multiple of the worst own kernel's, ...
DEVIATIONS = 6.5  # ... beyond chance: one in 10^10
CELL_TIMES = 12.0  # limit of one cell's error, as a multiple of its level; honest kernels: up to 5.7
FAR_TIMES = 6.0  # a cell whose error exceeds this multiple is far off; ...
FAR_PATCHES = 3  # ... this many patches with such a cell are as bad as one cell beyond the limit
OWN_TIMES = 3.0  # a cell is not wrong if it is off by less than this multiple of the worst cell of own kernels
BIAS_SHARE = 0.35  # mean error, relative to the root mean square of the worst own kernel (honest: up to 0.06) ...
BIAS_CELLS = 400  # ... over at least this many cells: seven standard deviations
QUIET_SQUARED = 0.2**2  # an own kernel with less error than this may have been lucky
FEW = 64  # cells: with fewer, the own kernels' errors say little
SAME = 1e-5  # errors closer than this count as one: float64 rounds, too
TERMS_SEEN = 1024  # terms of a sum that are examined for repeats
SUMS_SEEN = 4
CHANCE = 2.0  # terms repeat this often by chance, in the longest sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence from the cells of some patches."""

    cells: float = 0.0  # number of cells whose errors do not repeat
    square: float = 0.0  # mean square of errors
    mean: float = 0.0  # of errors, signed
    own_square: float = 0.0  # of the worst own kernel
    own_mean: float = 0.0  # absolute mean error of an own kernel, the largest: operands that repeat give errors a sign
    extreme: float = 0.0  # largest error, as a share of a single cell's limit
    impossible: int = 0  # cells that no order of additions gives
    far: int = 0  # patches with a cell far off

    @classmethod
    def of(cls, patches: Sequence[Patch]) -> Evidence:
        errors = np.concatenate([patch.errors for patch in patches]) if patches else np.empty(0)
        impossible = sum(patch.impossible for patch in patches)
        if not errors.size:
            return cls(impossible=impossible)
        counts = np.array([patch.errors.size for patch in patches]) / errors.size
        cells = independent(errors)
        own_square = float(counts @ [patch.own_square for patch in patches])
        if cells < FEW:
            own_square = max(own_square, float(counts @ [patch.level_square for patch in patches]))
        return cls(
            cells,
            float(np.mean(errors * errors)),
            float(errors.mean()),
            own_square,
            float(counts @ [patch.own_mean for patch in patches]),
            max(patch.extreme for patch in patches) / CELL_TIMES,
            impossible,
            sum(patch.extreme > FAR_TIMES for patch in patches),
        )

    @property
    def against(self) -> str:
        """The evidence against the device; empty if the errors are rounding."""
        return self.against_its_size or self.against_its_sign

    @property
    def against_its_size(self) -> str:
        if self.impossible:
            return f"{self.impossible:,} cells are what no float32 kernel gives"
        if not self.cells:
            return ""
        own = max(self.own_square, QUIET_SQUARED)
        if self.square > TIMES_SQUARED * float(upper(self.cells, DEVIATIONS)) * own:
            times = np.sqrt(self.square / own)
            return f"its errors are {times:,.1f} times those of rounding, over {self.cells:,.0f} cells"
        if self.extreme > 1:
            return f"a cell is off by {self.extreme * CELL_TIMES:,.0f} times what rounding does"
        if self.far >= FAR_PATCHES:
            return f"cells of {self.far} patches are off by more than {FAR_TIMES:g} times what rounding does"
        return ""

    @property
    def against_its_sign(self) -> str:
        """Honest errors have no sign, unless the operands repeat: then own kernels show one, too."""
        if self.cells < BIAS_CELLS:
            return ""
        own = np.sqrt(max(self.own_square, QUIET_SQUARED))
        if abs(self.mean) - self.own_mean > BIAS_SHARE * own:
            return f"its errors have a sign: {self.mean / own:+.2f} of rounding on average"
        return ""


@dataclass(frozen=True, slots=True)
class Patch:
    """Errors of a patch's cells, and those of honest rounding there."""

    errors: Floats  # of cells in which an error is defined
    impossible: int
    extreme: float = 0.0  # largest error, as a multiple of its cell's level
    level_square: float = 0.0  # mean
    own_square: float = 0.0
    own_mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Own:
    """Own kernels on some rows and columns of a patch."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    outs: tuple[Array, ...]
    square: float  # mean square of the worst kernel's errors
    mean: float  # absolute mean error of the kernel with the largest
    each: Floats  # the largest error in each cell
    repeats: float  # how often terms of a sum repeat
    share: float  # the mean square, as a share of its level


class Exact:
    """Rows of A times columns of B in float64, and their norms."""

    def __init__(self, left: Array, right: Array, rows: Floats, columns: Floats) -> None:
        self.left, self.right, self.inner = left, right, left.shape[1]
        with np.errstate(all="ignore"):
            self.truth: Floats = np.zeros((len(left), len(right)))
            for start in range(0, self.inner, AT_A_TIME):
                one, two = (x[:, start : start + AT_A_TIME].astype(np.float64) for x in (left, right))
                self.truth += one @ two.T
            self.size: Floats = rows[:, None] * columns
            self.lost = floor(rows[:, None], columns, self.inner)
            # holds for any order of addition: the terms' magnitudes add up to |a_i| |b_j| at most
            self.most: Floats = (self.inner + 8) * EPSILON * self.size + self.lost
            self.regular: Flags = np.isfinite(self.truth) & (self.size < LARGEST)  # no partial sum overflows
            self.kappa: Floats = np.where(self.size > 0, np.abs(self.truth) / self.size, 0.0)

    def errors(self, out: Array) -> tuple[Floats, int]:
        """Errors in eps |a_i| |b_j|, NaN where undefined; and the number of cells that no kernel gives."""
        with np.errstate(all="ignore"):
            off = out.astype(np.float64) - self.truth
            near = np.abs(off) <= self.most
            possible = np.where(self.regular, near, ~np.isfinite(out) | (np.isfinite(self.truth) & near))
            counted = self.regular & possible & (self.size > 0)
            return np.where(counted, in_units(off, self.size, self.lost), np.nan), int((~possible).sum())

    def own(self, random: np.random.Generator, cell: tuple[int, int] | None = None) -> Own:
        """Errors of own kernels in some of the cells, including `cell`."""
        side = sampled_side(self.inner)
        i, j = (
            _some(random, extent, side, None if cell is None else cell[k]) for k, extent in enumerate(self.truth.shape)
        )
        left, right, at = self.left[i], self.right[j], np.ix_(i, j)
        with np.errstate(all="ignore"):
            outs = own_products(left, right)
            errors = np.stack([in_units(out - self.truth[at], self.size[at], self.lost[at]) for out in outs])
        means = self.regular[at] & (self.size[at] > 0)
        errors = np.where(means & np.isfinite(errors), errors, 0.0)
        count, times = max(1, int(means.sum())), repeats(left, right, random)
        square = float((errors * errors).sum(axis=(1, 2)).max() / count)
        level = PLAIN**2 + float(np.mean(self._coherent(self.kappa[at], times)))
        mean = float(np.abs(errors.sum(axis=(1, 2))).max() / count)
        return Own(i, j, outs, square, mean, np.abs(errors).max(axis=0), times, square / level)

    def glimpse(self, out: Array) -> Patch:
        """The patch judged without own kernels, as if they hardly rounded: cells that pass need no comparison with
        them."""
        errors, kappa, impossible = self._counted(out)
        if not errors.size:
            return Patch(errors, impossible)
        coherent = (COHERENT * kappa) ** 2 * self.inner
        extreme = float((np.abs(errors) / np.sqrt(PLAIN**2 + coherent)).max())
        return Patch(errors, impossible, extreme, PLAIN**2 + float(coherent.mean()))

    def typical(self, seen: Sequence[Own]) -> Own:
        """Errors that own kernels may have here, from those in other patches of the product; never less than the level,
        because these are other cells."""
        some = max(seen, key=lambda own: own.share)
        none = np.empty(0, np.int64)
        share, times = max(1.0, some.share), max(own.repeats for own in seen)
        square = share * (PLAIN**2 + float(np.mean(self._coherent(self.kappa, times))))
        mean = max(own.mean / np.sqrt(max(own.square, QUIET_SQUARED)) for own in seen) * np.sqrt(square)
        return Own(none, none, (), square, float(mean), np.empty((0, 0)), times, share)

    def patch(self, out: Array, own: Own) -> Patch:
        """The evidence for and against these cells."""
        errors, kappa, impossible = self._counted(out)
        if not errors.size:
            return Patch(errors, impossible)
        coherent = self._coherent(kappa, own.repeats)
        level_square = PLAIN**2 + float(coherent.mean())
        own_square, own_mean = own.square, own.mean
        if errors.size < FEW or own.repeats > CHANCE:
            own_square = max(own_square, level_square)
        if own.repeats > CHANCE:  # an own kernel may be lucky in any number of cells
            own_mean = max(own_mean, float(np.sqrt(level_square)))
        extreme = float((np.abs(errors) / np.sqrt(max(own_square, PLAIN**2) + coherent)).max())
        at = np.ix_(own.rows, own.columns)
        single = np.sqrt(PLAIN**2 + self._coherent(self.kappa[at], own.repeats))
        explained = max(1.0, OWN_TIMES / CELL_TIMES * float((own.each / single).max(initial=0.0)))
        return Patch(errors, impossible, extreme / explained, level_square, own_square, own_mean)

    def worst(self, out: Array) -> tuple[int, int]:
        """The cell with the largest error."""
        where, _ = self.errors(out)
        row, column = np.unravel_index(int(np.nan_to_num(np.abs(where)).argmax()), where.shape)
        return int(row), int(column)

    def _coherent(self, kappa: Floats, times: float) -> Floats:
        """The part of a mean square that comes from partial sums and repeated terms. With terms that repeat `times`
        times, partial sums may be large although the whole sum is small."""
        result: Floats = (COHERENT**2 * self.inner) * (kappa * kappa + max(0.0, times - CHANCE))
        return result

    def _counted(self, out: Array) -> tuple[Floats, Floats, int]:
        where, impossible = self.errors(out)
        counted = np.isfinite(where)
        return where[counted], self.kappa[counted], impossible


def examine(left: Array, right: Array, out: Array, random: np.random.Generator) -> Evidence:
    """Compare the cells out [m, q] with left [m, n] times right [q, n] transposed."""
    exact = Exact(left, right, norms(left[None])[0], norms(right[None])[0])
    return Evidence.of([exact.patch(out, exact.own(random, exact.worst(out)))])


def independent(errors: Floats) -> float:
    """The number of independent errors: repeated errors count as one. (Kish's effective sample size: a few others do
    not make up for an error that repeats a thousand times.)"""
    _, counts = np.unique(np.rint(errors / SAME), return_counts=True)
    return float(errors.size**2 / (counts.astype(np.float64) ** 2).sum())


def repeats(left: Array, right: Array, random: np.random.Generator) -> float:
    """How often a term occurs in its sum, on average, in the worst of some sums; 1 if no term repeats. Terms that are
    zero do not count: they are not rounded."""
    inner, most = left.shape[1], 1.0
    seen = np.arange(inner) if inner <= TERMS_SEEN else np.sort(random.choice(inner, TERMS_SEEN, replace=False))
    for index in range(min(SUMS_SEEN, max(len(left), len(right)))):
        with np.errstate(all="ignore"):
            terms: Array = left[index % len(left), seen] * right[index % len(right), seen]
        terms = terms[(terms != 0) & np.isfinite(terms)]
        if len(terms) < 2:
            continue
        _, counts = np.unique(terms.view(np.int32) >> 3, return_counts=True)  # 21 bits are close enough
        pairs = float((counts.astype(np.float64) * (counts - 1)).sum()) / (len(terms) * (len(terms) - 1))
        most = max(most, 1 + pairs * (inner * len(terms) / len(seen) - 1))
    return most


def sampled_side(inner: int) -> int:
    """Number of rows, and of columns, for own kernels."""
    return int(max(1, min(SAMPLED_SIDE, np.sqrt(SAMPLED_TERMS // inner))))


def _some(random: np.random.Generator, extent: int, count: int, one: int | None) -> NDArray[np.int64]:
    """Up to `count` indices below `extent`; `one`, if given, comes first."""
    chosen = random.permutation(extent)[:count] if count < extent else np.arange(extent)
    if one is None:
        return chosen
    return np.concatenate([[one], chosen[chosen != one]])[:count]


def in_units(off: Floats, size: Floats, lost: Floats) -> Floats:
    """Errors in eps |a_i| |b_j|, less the most that flushing to zero may have lost."""
    result: Floats = np.copysign(np.maximum(np.abs(off) - lost, 0.0), off) / (EPSILON * size)
    return result


def one_after_the_other(left: Array, right: Array) -> Array:
    """Sums of the rows of left * right in float32, the first term first."""
    result: Array = np.cumsum(left * right, axis=-1, dtype=np.float32)[..., -1]
    return result
