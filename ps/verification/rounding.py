"""The errors that rounding may cause in an honest float32 product. The unit everywhere: eps |a_i| |b_j| of a cell.

An honest kernel rounds to nearest and adds the n terms of a cell in float32, in any order: by blocks and lanes, as BLAS
does, in chunks, or one after the other, which is the worst order. Measured on real activations and gradients (NumPy,
ONNX Runtime, one after the other; OPT and Llama, n = 32 to 3,072): 0.03 to 1.04 root mean square. Most of that follows
from the size of the sum, kappa = |c_ij| / (|a_i| |b_j|): terms of one sign make partial sums, and so errors, grow with
sqrt(n). `level_squared` is at least 1.7 times the mean square that these kernels showed. Kernels that truncate, or that
answer with fewer bits than float32 has, are not honest in this sense.

Below the smallest normal number a kernel may flush terms, sums and operands to zero: `floor` bounds that loss.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EPSILON = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)

PLAIN = 0.3  # rms of terms with random signs; honest kernels: 0.03 to 0.17
COHERENT = 1 / 6  # of kappa sqrt(n): n terms of one size and sign, added one after the other


def level_squared(kappa_squared: Floats, inner: int) -> Floats:
    """The largest mean square of honest errors, given the mean square of kappa."""
    result: Floats = np.minimum(kappa_squared, 1.0) * (COHERENT**2 * inner) + PLAIN**2
    return result


def floor(rows: Floats, columns: Floats, inner: int) -> Floats:
    """The most that flushing to zero loses in cells with these norms, which may be broadcast; absolute."""
    result: Floats = (rows + columns) * (TINY * np.sqrt(inner)) + TINY * inner
    return result


def upper(count: Floats | float, deviations: float) -> Floats:
    """The value that the mean of `count` squares of standard normal numbers exceeds as rarely as one number exceeds
    `deviations` (Wilson and Hilferty's approximation of chi squared)."""
    spread: Floats = 2 / (9 * np.maximum(np.asarray(count, np.float64), 1.0))
    result: Floats = (1 - spread + deviations * np.sqrt(spread)) ** 3
    return result


def norms(array: NDArray[np.float32]) -> Floats:
    """Euclidean norms along the last axis. Nothing overflows or vanishes: values that float32 cannot square are squared
    in float64. A norm is not finite only where a value is not."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares: Floats = np.einsum("bmn,bmn->bm", array, array).astype(np.float64)
        again = ~((squares > 1e-25) & (squares < 1e35))
        if again.any():
            rows = array[again].astype(np.float64)
            squares[again] = np.einsum("mn,mn->m", rows, rows)
        result: Floats = np.sqrt(squares)
    return result
