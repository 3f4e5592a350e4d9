"""One sample of a device's speed: a series of calls of one product. `agent.measure.command` repeats it over a grid.

Operands come from memory that was not touched recently, like those of a block that has just arrived. Quartiles of
single calls are kept for wall time and CPU time: another process that briefly takes the CPU lengthens a sum but barely
moves a median.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent.compute.kernels import Kernel

EACH = 8  # limit on single call times kept per sample
POOL_BYTES = 64 << 20  # operands cycle through this; larger than the caches of a phone or a core
Shape = Sequence[int]  # batch, rows, inner, columns


class Sampler:
    def __init__(self, seed: int) -> None:
        self._pool = np.random.default_rng(seed).random(POOL_BYTES // 4, dtype=np.float32)
        self._at = 0

    def sample(self, kernel: Kernel, shape: Shape, at_least_s: float) -> list[Any]:
        """Number of calls, their total wall seconds, wall seconds of up to EACH single calls, total CPU seconds; then
        quartiles of single calls, wall and CPU."""
        each: list[float] = []
        processor: list[float] = []
        opened = time.perf_counter()
        while not each or time.perf_counter() < opened + at_least_s:
            seconds, running_s = self.call(kernel, shape)
            each.append(seconds)
            processor.append(running_s)
        step = -(-len(each) // EACH)
        return [len(each), sum(each), each[::step], sum(processor), quartiles(each), quartiles(processor)]

    def call(self, kernel: Kernel, shape: Shape) -> tuple[float, float]:
        """Wall and CPU seconds of one call."""
        batch, rows, inner, columns = shape
        left, right = self._take(batch * rows * inner), self._take(batch * columns * inner)
        one, two = left.reshape(batch, rows, inner), right.reshape(batch, columns, inner).transpose(0, 2, 1)
        factors = (one[0], two[0]) if batch == 1 else (one, two)
        running, begin = time.process_time(), time.perf_counter()
        kernel.product(*factors)
        seconds = time.perf_counter() - begin
        return seconds, time.process_time() - running

    def copy_rate(self) -> float:
        """Bytes read and written per second."""
        half = len(self._pool) // 2
        best_s = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            self._pool[:half].copy()
            best_s = min(best_s, max(time.perf_counter() - begin, 1e-9))
        return 2 * 4 * half / best_s

    def _take(self, cells: int) -> Any:
        if self._at + cells > len(self._pool):
            self._at = 0
        self._at += cells
        return self._pool[self._at - cells : self._at]


def quartiles(values: list[float]) -> list[float]:
    found: list[float] = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return found
