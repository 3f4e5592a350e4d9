"""Is a product what it claims to be? Freivalds' check of a whole product at once, then of single blocks.

For a random vector s, C s must equal A (B s). That reads A, B and C once, whoever computed which block, while computing
them took n times as long. A wrong row escapes only if its errors happen to cancel in C s to less than rounding. So s
has random signs and magnitudes between 0.5 and 1.5: no pattern of errors cancels often (with signs alone two equal ones
would half the time), and an error in a single column is never hidden by a small factor, as it is now and then with a
normal distribution. Its seed is not known to devices. Row i is right within

    |C s - A (B s)|_i  <=  ROUNDING eps sqrt(n) |a_i| |B|        (Euclidean norms)

Rounding errors of the cells of a row are independent after the multiplication with s, so they add up like |B|; each is
at most about eps sqrt(n) |a_i| |b_j|. ROUNDING is several times what real activations and gradients showed (see
tests/test_verify.py). A block that fails is computed again here, in float64, before anybody is accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.cost import Integers

Array = NDArray[np.float32]
Flags = NDArray[np.bool_]

EPSILON = float(np.finfo(np.float32).eps)
ROUNDING = 4.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a product before it is there: most of the check, done while the devices work."""

    vector: Array
    image: Array  # A (B s): [batch, rows]
    allowed: NDArray[np.float64]  # of each row

    @classmethod
    def of(cls, left: Array, right: Array, seed: int | Sequence[int]) -> Expectation:
        vector = random_vector(right.shape[1], seed)
        with np.errstate(invalid="ignore", over="ignore"):
            image: Array = np.matmul(left, np.matmul(vector, right)[..., None])[..., 0]
            return cls(vector, image, tolerance(left, right))

    def suspicious_rows(self, out: Array) -> Flags:
        """[batch, rows]: where the check fails, or cannot be made because values are not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            # within: a comparison with NaN is False
            within: Flags = np.abs(np.matmul(out, self.vector) - self.image) <= self.allowed
        return ~within


def wrong_blocks(left: Array, right: Array, out: Array, tiles: Integers, expected: Expectation) -> list[int]:
    """Indices of the tiles whose cells are not those of left [b, m, n] times right [b, q, n] transposed."""
    vector, bad = expected.vector, expected.suspicious_rows(out)
    if not bad.any():
        return []
    return [
        index
        for index, (b, bs, r, rs, c, cs) in enumerate(tiles.tolist())
        if bad[b : b + bs, r : r + rs].any()
        and block_is_wrong(
            left[b : b + bs, r : r + rs],
            right[b : b + bs, c : c + cs],
            out[b : b + bs, r : r + rs, c : c + cs],
            vector[c : c + cs],
        )
    ]


def random_vector(count: int, seed: int | Sequence[int]) -> Array:
    vector: Array = 2 * np.random.default_rng(seed).random(count, dtype=np.float32) - 1
    return vector + np.copysign(np.float32(0.5), vector)


def tolerance(left: Array, right: Array) -> NDArray[np.float64]:
    """Of each row."""
    row = np.sqrt(np.einsum("bmn,bmn->bm", left, left, dtype=np.float32))
    whole = np.sqrt(np.einsum("bqn,bqn->b", right, right, dtype=np.float32))
    scale: NDArray[np.float64] = ROUNDING * EPSILON * np.sqrt(left.shape[2]) * row * whole[:, None]
    return scale


def block_is_wrong(left: Array, right: Array, out: Array, vector: Array) -> bool:
    """Checked on its own, and if it fails computed again."""
    with np.errstate(invalid="ignore", over="ignore"):
        image: Array = np.matmul(left, np.matmul(vector, right)[..., None])[..., 0]
        alone = Expectation(vector, image, tolerance(left, right))
    if not alone.suspicious_rows(out).any():
        return False
    one, two = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        truth = np.matmul(one, two.transpose(0, 2, 1))
        rows, columns = (np.sqrt((x * x).sum(axis=2)) for x in (one, two))
        allowed = ROUNDING * EPSILON * np.sqrt(left.shape[2]) * rows[:, :, None] * columns[:, None, :]
        known = np.isfinite(truth) & (np.abs(truth) <= np.finfo(np.float32).max)
        right_cells = np.where(known, np.abs(out - truth) <= allowed, ~np.isfinite(out))
    return not bool(right_cells.all())
