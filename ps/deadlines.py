"""When a block is overdue: by the cost model, and by how wrong the cost model has been so far.

A block's expected time comes from the model. What it really took, as a multiple of that, is remembered for the latest
blocks of the whole fleet; overdue is what takes longer than nearly all of them did, or several times as long as most:
many may be slow, and would be what is normal. Blocks are compared with blocks that are about as long: a hitch of the
server makes the shortest ones many times as long, and that says nothing about others. No fixed timeout: on a host that
makes everything late, nobody is late. Pure: the time comes with every call.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

REMEMBERED = 2048  # blocks of a length
AGAIN = 512  # more of them, and what is normal is judged anew
ENOUGH = 128  # before so many are known nothing is overdue
OCTAVES = 2  # blocks that differ by less than a factor of two to this are about as long
QUANTILE = 0.99
BEYOND = 1.25  # overdue is what takes so many times the quantile
MOST = 0.75  # of the blocks are normal, whatever the others take
TAIL = 3.0  # and what takes so many times as long as they do is not; chosen by trial with 10% and 20% of slow devices
MOST_PATIENCE_S = 1.0  # for hitches of the server, one after another

Key = tuple[int, int]  # job, block


class _Normal:
    """How many times as long as expected may a block take?"""

    def __init__(self) -> None:
        self.margin = float("inf")
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._fresh = 0

    def add(self, ratios: Sequence[float]) -> None:
        self._ratios.extend(ratios)
        self._fresh += len(ratios)
        if self._fresh >= (ENOUGH if self.margin == float("inf") else AGAIN):
            self._fresh = 0
            most, nearly_all = np.quantile(np.array(self._ratios), [MOST, QUANTILE]).tolist()
            self.margin = max(1.0, BEYOND * min(nearly_all, TAIL * most))


class Deadlines:
    def __init__(self) -> None:
        self._all = _Normal()
        self._by_length: dict[int, _Normal] = {}
        # heap of what was sent together, each sorted: its next deadline, a number, which one that is, all
        self._heap: list[tuple[float, int, int, list[tuple[float, int, Key]]]] = []
        self._sequence = itertools.count()
        self._unjudged: list[tuple[Key, int, float, float]] = []  # sent before anything was known

    def sent(self, keys: Sequence[Key], devices: Sequence[int], now_s: float, expected_s: Sequence[float]) -> None:
        """These blocks, each to its device."""
        if self._all.margin == float("inf"):
            self._unjudged += [(key, d, now_s, s) for key, d, s in zip(keys, devices, expected_s, strict=True)]
            return
        batch = sorted(
            (now_s + self.margin(s) * s, device, key) for key, device, s in zip(keys, devices, expected_s, strict=True)
        )
        self._push(batch)

    def postpone(self, keys: Sequence[Key], devices: Sequence[int], until_s: float) -> None:
        """These, which were overdue, are not before that."""
        self._push([(until_s, device, key) for key, device in zip(keys, devices, strict=True)])

    def _push(self, batch: list[tuple[float, int, Key]]) -> None:
        if batch:
            heapq.heappush(self._heap, (batch[0][0], next(self._sequence), 0, batch))

    def margin(self, expected_s: float) -> float:
        """For a block that is expected to take so long. Of lengths of which too little is known: as for all."""
        alike = self._by_length.get(_length(expected_s))
        return self._all.margin if alike is None or alike.margin == float("inf") else alike.margin

    def returned(self, ratios: Sequence[float], expected_s: Sequence[float]) -> None:
        """What blocks took, as multiples of what was expected, and that."""
        groups: dict[int, list[float]] = {}
        for ratio, length in zip(ratios, map(_length, expected_s), strict=True):
            groups.setdefault(length, []).append(ratio)
        for length, of_length in groups.items():
            self._by_length.setdefault(length, _Normal()).add(of_length)
        self._all.add(ratios)
        if self._unjudged and self._all.margin < float("inf"):
            unjudged, self._unjudged = self._unjudged, []
            for key, device, now_s, seconds in unjudged:
                self.sent([key], [device], now_s, [seconds])

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


def _length(expected_s: float) -> int:
    return math.frexp(expected_s)[1] // OCTAVES


def after_a_turn_s(free_s: float, woke_s: float, now_s: float) -> float:
    """When to judge, after a turn of the server from `woke_s` to `now_s`: what it kept from being heard, and those who
    had to bring that, may take as long again to come. `free_s`: when lateness could be judged last; a server that has
    no time between its turns judges all the same."""
    took_s = now_s - woke_s
    return min(now_s + took_s, free_s + took_s + MOST_PATIENCE_S)
