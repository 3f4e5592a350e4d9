"""When a block is overdue: by the cost model, and by how wrong the cost model has been so far.

A block's expected time comes from the model. What it really took, as a multiple of that, is remembered for the latest
blocks of the whole fleet; overdue is what takes longer than nearly all of them did. No fixed timeout: on a host that
makes everything late, nobody is late. Pure: the time comes with every call.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

REMEMBERED = 2048  # blocks
ENOUGH = 128  # before so many are known nothing is overdue
QUANTILE = 0.99
BEYOND = 1.25  # overdue is what takes so many times the quantile

Key = tuple[int, int]  # job, block


class Deadlines:
    def __init__(self) -> None:
        self.margin = float("inf")
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._fresh = 0
        # heap of what was sent together, each sorted: its next deadline, a number, which one that is, all
        self._heap: list[tuple[float, int, int, list[tuple[float, int, Key]]]] = []
        self._sequence = itertools.count()
        self._unjudged: list[tuple[Key, int, float, float]] = []  # sent before anything was known

    def sent(self, keys: Sequence[Key], devices: Sequence[int], now_s: float, expected_s: Sequence[float]) -> None:
        """These blocks, each to its device."""
        if self.margin == float("inf"):
            self._unjudged += [(key, d, now_s, s) for key, d, s in zip(keys, devices, expected_s, strict=True)]
            return
        margin = self.margin
        batch = sorted(
            (now_s + margin * s, device, key) for key, device, s in zip(keys, devices, expected_s, strict=True)
        )
        if batch:
            heapq.heappush(self._heap, (batch[0][0], next(self._sequence), 0, batch))

    def returned(self, ratios: Sequence[float]) -> None:
        """What blocks took, as multiples of what was expected."""
        self._ratios.extend(ratios)
        self._fresh += len(ratios)
        if self._fresh >= (ENOUGH if self.margin == float("inf") else REMEMBERED // 2):
            self._fresh = 0
            self.margin = max(1.0, BEYOND * float(np.quantile(np.array(self._ratios), QUANTILE)))
            for key, device, now_s, expected_s in self._unjudged:
                self.sent([key], [device], now_s, [expected_s])
            self._unjudged.clear()

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def overdue(self, now_s: float, open_: Callable[[int, Key], bool], most: int) -> list[Key]:
        """Blocks whose deadline has passed and that are still open on their device, each told once."""
        found: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s and len(found) < most:
            _, number, place, batch = heapq.heappop(self._heap)
            _, device, key = batch[place]
            if place + 1 < len(batch):
                heapq.heappush(self._heap, (batch[place + 1][0], number, place + 1, batch))
            if open_(device, key):
                found.append(key)
        return found
