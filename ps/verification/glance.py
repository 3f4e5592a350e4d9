"""The cheap part of the check, for every product: C s against A (B s), row by row.

A glance costs a tenth of the sketch in patches (ps/verification/sketch.py) and accuses no device: a suspicious product
is sketched, and so is one of every ten, at random. A large error shows at once, in its row. A small one hides in the
rounding of whole rows until one of its products is drawn: several times per step. The first products of a run are all
sketched: nothing is known of the devices yet, and in AdamW's first step only the sign of a gradient counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.verification.rounding import EPSILON, TINY, Floats, level_squared, norms, upper
from ps.verification.sketch import SMALLEST_NORM, random_vector

Array = NDArray[np.float32]

ONE_OF = 10  # one of this many products is sketched, whatever the glance finds
FIRST = 20  # this many products at the start of a run are all sketched
ROW_DEVIATIONS = 6.0
MEAN_DEVIATIONS = 5.0


@dataclass(frozen=True, slots=True)
class Glance:
    vector: Array  # s, divided by the norms of the columns: [batch, columns]
    image: Floats  # A (B s): [batch, rows]
    unit: Floats  # one error of eps |a_i| |b_j| in each cell, with random signs
    flushed: Floats  # the most that flushing to zero may change
    inner: int

    @classmethod
    def of(cls, left: Array, right: Array, seed: int | Sequence[int]) -> Glance:
        with np.errstate(all="ignore"):
            rows, columns = norms(left), norms(right)
            exact = random_vector(columns.shape, np.random.default_rng(seed)) / np.maximum(columns, SMALLEST_NORM)
            vector: Array = exact.astype(np.float32)
            summed = np.matmul(vector[:, None, :], right)  # [batch, 1, inner]
            image = np.matmul(left, summed.transpose(0, 2, 1))[..., 0].astype(np.float64)
            size, root = np.where(columns > 0, np.abs(exact), 0.0), np.sqrt(left.shape[2])
            share = size * columns
            unit = np.maximum(rows, SMALLEST_NORM) * np.sqrt(np.maximum((share * share).sum(1), 0.25))[:, None]
            count = size.sum(1)[:, None]
            flushed = TINY * ((left.shape[2] + root * rows) * count + root * share.sum(1)[:, None])
            return cls(vector, image, unit, flushed, left.shape[2])

    def suspicious(self, out: Array) -> bool:
        with np.errstate(all="ignore"):
            found = np.matmul(out, self.vector[:, :, None])[..., 0]
            off = np.maximum(np.abs(found - self.image) - self.flushed, 0.0)
            kappa = (self.image / self.unit) ** 2
            energy = (off / (EPSILON * self.unit)) ** 2 / level_squared(np.maximum(kappa, kappa.mean()), self.inner)
            few = energy.max(initial=0.0) <= upper(1.0, ROW_DEVIATIONS)
            return not (few and energy.mean() <= upper(float(energy.size), MEAN_DEVIATIONS))  # True for NaN


class Lot:
    """Draws the products to sketch: one of every ten, not each with probability 0.1, because then one step in sixty of
    a small model would have none."""

    def __init__(self, random: Callable[[int], int]) -> None:
        """`random(n)`: a whole number below n that devices cannot know."""
        self._random = random
        self._product = self._drawn = 0

    def draw(self) -> bool:
        """Whether to sketch the next product."""
        place = self._product % ONE_OF
        if not place:
            self._drawn = self._random(ONE_OF)
        self._product += 1
        return self._product <= FIRST or place == self._drawn
