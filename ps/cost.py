"""The cost model, written as the formula.

One block of `batch` x `rows` x `columns` cells over the inner length n, 4 bytes a value, on a device:

    down    = batch (rows + columns) n 32 bit / down_rate
    compute = overhead + 2 batch rows columns n / flops
    up      = batch rows columns 32 bit / up_rate
    time    = latency + down + compute + up + latency

A block's operands arrive whole before it is computed, so within one block the three add up; across the blocks of a
device they overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

BYTES = 4  # float32 on the wire


def block_seconds(profiles: NDArray[np.void], batch: Any, rows: Any, inner: int, columns: Any) -> Numbers:
    """Time of one block on each device of `profiles`, alone on that device."""
    down_bits = 8.0 * BYTES * batch * (rows + columns) * inner
    cells = 1.0 * batch * rows * columns
    seconds: Numbers = (
        2 * profiles["latency_s"]
        + down_bits / profiles["down_bps"]
        + profiles["overhead_s"]
        + 2 * cells * inner / profiles["flops"]
        + 8 * BYTES * cells / profiles["up_bps"]
    )
    return seconds


def block_bytes(batch: Any, rows: Any, inner: int, columns: Any) -> Any:
    """Memory of one block on its device: both operands and the output."""
    return BYTES * batch * ((rows + columns) * inner + rows * columns)


class Squares:
    """The largest square block that each device returns within a given time, for one inner length n.

    With the side x, the time is a quadratic: (2 n / flops + 32 / up) x^2 + (64 n / down) x + fixed.
    """

    def __init__(self, profiles: NDArray[np.void], inner: int, backlog_s: Numbers) -> None:
        self._fixed = backlog_s + 2 * profiles["latency_s"] + profiles["overhead_s"]
        self._twice_a = 2 * (2 * inner / profiles["flops"] + 8 * BYTES / profiles["up_bps"])
        self._b = 2 * 8 * BYTES * inner / profiles["down_bps"]
        self._b_squared = self._b**2

    def cells(self, seconds: float) -> Numbers:
        spare = np.maximum(seconds - self._fixed, 0.0)
        # the root in the form that does not subtract two nearly equal numbers
        side: Numbers = 2 * spare / (self._b + np.sqrt(self._b_squared + 2 * self._twice_a * spare))
        return side * side
