"""The server's own float32 kernels: results that honest devices may return, in several orders of addition.

They compute few cells: sums of 131,072 terms in every order for a whole patch would stop the server for seconds.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Kernel = Callable[[Array, Array], Array]  # left [m, n], right [q, n] -> [m, q]

TERMS = 1 << 20  # computed at a time: 4 MiB


def blas(left: Array, right: Array) -> Array:
    result: Array = np.matmul(left, right.T)
    return result


def in_chunks(left: Array, right: Array) -> Array:
    """Sums of chunks of the inner dimension, the last chunk first."""
    out = np.zeros((len(left), len(right)), np.float32)
    chunk = max(32, left.shape[1] // 8)
    for start in range((left.shape[1] - 1) // chunk * chunk, -1, -chunk):
        out += np.matmul(left[:, start : start + chunk], right[:, start : start + chunk].T)
    return out


def in_lanes(left: Array, right: Array, lanes: tuple[int, ...]) -> tuple[Array, ...]:
    """For each number of lanes k: every k-th term goes into one sum, then the sums are added, as SIMD units do. One
    lane adds one term after the other, the worst order that counts as honest."""
    rows, columns, inner = len(left), len(right), left.shape[1]
    cells, most = rows * columns, max(lanes)
    one, two = np.ascontiguousarray(left.T), np.ascontiguousarray(right.T)
    whole = inner // most * most
    sums = [np.zeros(count * cells, np.float32) for count in lanes]
    step = max(1, TERMS // (cells * most)) * most
    for start in range(0, whole, step):
        end = min(start + step, whole)
        terms = (one[start:end, :, None] * two[start:end, None, :]).reshape(end - start, cells)
        for index, count in enumerate(lanes):
            by_lane = terms.reshape(-1, count * cells)
            first = by_lane[0].copy()
            by_lane[0] += sums[index]
            # along the first axis NumPy adds one row after the other; along the last axis it would add pairs
            sums[index] = np.add.reduce(by_lane, axis=0)
            by_lane[0] = first
    rest = (one[whole:, :, None] * two[whole:, None, :]).reshape(inner - whole, cells)
    return tuple(
        np.add.reduce(np.concatenate([total.reshape(-1, cells), rest]), axis=0).reshape(rows, columns) for total in sums
    )


def onnx(left: Array, right: Array) -> Array:
    """ONNX Runtime where it is installed, else BLAS again."""
    product = _onnx()
    return blas(left, right) if product is None else product(np.ascontiguousarray(left), right.T)


@functools.cache
def _onnx() -> Kernel | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    from agent.compute.kernels import OnnxKernel

    try:
        kernel = OnnxKernel()
        kernel.product(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32).T)
    except Exception:  # a package that does not load must not stop the server
        return None
    return kernel.product


NAMES = (
    "the server's own product",
    "the server's own product in chunks",
    "the server's own product by ONNX Runtime",
    "the server's own product, term by term,",
    "the server's own product in 4 lanes",
    "the server's own product in 16 lanes",
)


def own_products(left: Array, right: Array) -> tuple[Array, ...]:
    """The result of each kernel, in the order of NAMES."""
    return blas(left, right), in_chunks(left, right), onnx(left, right), *in_lanes(left, right, (1, 4, 16))
