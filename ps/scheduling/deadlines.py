"""When a block is overdue: by the cost model, and by how wrong the cost model has been so far.

The cost model gives a block's expected time. The ratio of actual to expected time is remembered for the latest blocks
of the whole fleet. A block is overdue when its ratio is above that of nearly all of them, or several times that of
most: with many slow devices, the quantile alone would call slow normal. Blocks are compared with blocks of similar
length: a hitch of the server multiplies the time of the shortest ones, which says nothing about the others. There is no
fixed timeout: on a host that makes everything late, no device is late.

Until enough answers are known, the cost model alone sets the deadline: a multiple of the expected time, plus a floor.

A single device cannot define what is normal. Each device's typical lateness is tracked. Blocks of devices that are
typically later than most are left out, as long as fewer than a minority of the devices are like that. Pure: the time
comes with every call.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ps.scheduling import settings

FRESH = (1.0, 0)  # an unknown device: typical lateness, blocks
UNKNOWN = -1  # device of blocks that are reported without one

Key = tuple[int, int]  # job, block


class Typical:
    """Each device's typical lateness, as a multiple of what most blocks of the fleet take: a moving average over its
    latest blocks, each capped at `tail`."""

    def __init__(self) -> None:
        self._score: dict[int, tuple[float, int]] = {}  # device -> average, blocks
        self._late: set[int] = set()  # devices that are typically late
        self._found: set[int] = set()  # of those, the ones not reported yet

    def add(self, devices: Sequence[int], ratios: Sequence[float], most: float) -> None:
        """Add blocks of similar length; most blocks of that length take at most `most` times what is expected."""
        now = settings.NOW
        scores, keep, weight = self._score, 1.0 - now.memory, now.memory / most
        highest = now.tail * most
        late, get = self._late, scores.get
        for device, ratio in zip(devices, ratios, strict=True):
            average, blocks = get(device, FRESH)
            average = keep * average + weight * (ratio if ratio < highest else highest)
            scores[device] = average, blocks + 1
            if average > now.outlier and blocks * now.memory >= 1:
                late.add(device)
                self._found.add(device)
            elif late:
                late.discard(device)

    def take_found(self) -> dict[int, float]:
        """Devices found to be typically late since the last call, and how late they typically are."""
        if not self._found:
            return {}
        found = {device: self._score[device][0] for device in sorted(self._found & self._late) if device != UNKNOWN}
        self._found.clear()
        return found

    def outliers(self, among: Sequence[int]) -> list[int]:
        """Devices that are typically late; none if their share is too large."""
        if not self._late:
            return []
        devices = set(among)
        found = sorted(self._late & devices)
        return found if len(found) < settings.NOW.minority * len(devices) else []

    def forget(self, device: int) -> None:
        self._score.pop(device, None)
        self._late.discard(device)
        self._found.discard(device)


class _Normal:
    """How many times its expected time a block may take."""

    def __init__(self, typical: Typical) -> None:
        self.margin = float("inf")
        self.most = 1.0
        self._typical = typical
        self._ratios: deque[float] = deque(maxlen=16 * settings.NOW.enough)
        self._devices: deque[int] = deque(maxlen=16 * settings.NOW.enough)
        self._fresh = 0

    @property
    def known(self) -> int:
        return len(self._ratios)

    def add(self, ratios: Sequence[float], devices: Sequence[int]) -> None:
        self._ratios.extend(ratios)
        self._devices.extend(devices)
        self._fresh += len(ratios)
        now = settings.NOW
        if self._fresh >= (now.enough if self.margin == float("inf") else 4 * now.enough):
            self._fresh = 0
            counted = np.array(self._ratios)
            if outliers := self._typical.outliers(self._devices):
                counted = counted[~np.isin(np.array(self._devices), outliers)]
            most, nearly_all = np.quantile(counted, [now.most, now.quantile]).tolist()
            self.most = max(most, 1e-9)
            self.margin = max(1.0, now.margin * min(nearly_all, now.tail * most))


class Deadlines:
    def __init__(self) -> None:
        self.typical = Typical()
        self._all = _Normal(self.typical)
        self._by_length: dict[int, _Normal] = {}
        # heap of batches sent together, each sorted: next deadline, sequence number, index in the batch, batch
        self._heap: list[tuple[float, int, int, list[tuple[float, int, Key]]]] = []
        self._sequence = itertools.count()
        self._unjudged: list[tuple[Key, int, float, float]] = []  # sent before the margin was known
        self._quickest = 1.0  # smallest ratio of actual to expected time so far ...
        self._slowest = 0.0  # ... and the largest

    @property
    def cold(self) -> bool:
        """Too few answers are known to say what is normal."""
        return self._all.margin == float("inf")

    def sent(self, keys: Sequence[Key], devices: Sequence[int], now_s: float, expected_s: Sequence[float]) -> None:
        """These blocks went out, each to its device."""
        if self.cold:
            self._unjudged += [(key, d, now_s, s) for key, d, s in zip(keys, devices, expected_s, strict=True)]
        allowed: dict[float, float] = {}  # blocks of one product often have the same expected time
        for seconds in expected_s:
            if seconds not in allowed:
                allowed[seconds] = now_s + min(self.allowed_s(seconds), self.proven_s(seconds))
        self._push(sorted(zip(map(allowed.__getitem__, expected_s), devices, keys, strict=True)))

    def allowed_s(self, expected_s: float) -> float:
        """How long a block with this expected time may take. If even the quickest block so far took several times what
        was expected, the devices are not the cause."""
        if self.cold:
            return max(1.0, self._quickest) * settings.NOW.far * expected_s + settings.NOW.hitch_s
        return self.margin(expected_s) * expected_s

    def proven_s(self, expected_s: float) -> float:
        """How long such a block took at most on the devices that have answered, with the same allowances; infinity
        unless all of them were far faster than expected. Then what is expected follows from false claims: that a
        device is very slow, and so that a typical one is."""
        few = self._all.known < settings.NOW.answers
        if not self.cold or few or self._slowest > 1 / settings.NOW.far:
            return float("inf")
        return settings.NOW.far * self._slowest * expected_s + settings.NOW.hitch_s

    def postpone(self, keys: Sequence[Key], devices: Sequence[int], until_s: float) -> None:
        """Give these overdue blocks until `until_s`."""
        self._push([(until_s, device, key) for key, device in zip(keys, devices, strict=True)])

    def _push(self, batch: list[tuple[float, int, Key]]) -> None:
        if batch:
            heapq.heappush(self._heap, (batch[0][0], next(self._sequence), 0, batch))

    def margin(self, expected_s: float) -> float:
        """The margin of blocks with this expected time; that of all blocks if too little is known of this length."""
        alike = self._by_length.get(_length(expected_s))
        return self._all.margin if alike is None or alike.margin == float("inf") else alike.margin

    def usual(self, expected_s: float) -> float:
        """The ratio that most blocks of about this length stay below, at least 1; 1 if too little is known."""
        alike = self._by_length.get(_length(expected_s))
        return max(1.0, (self._all if alike is None or alike.margin == float("inf") else alike).most)

    def returned(
        self,
        ratios: Sequence[float],
        expected_s: Sequence[float],
        devices: Sequence[int] | None = None,
        certain: Sequence[float] | None = None,
    ) -> None:
        """Ratios of actual to expected time of returned blocks, with their expected times and devices. `certain`: the
        ratios without the time for which the server left the answers unread, if that is known. A block is overdue by
        what is normal with the server's delay; a device is late only by what it did itself."""
        groups: dict[int, tuple[list[float], list[int], list[float]]] = {}
        devices = devices if devices is not None else [UNKNOWN] * len(ratios)
        certain = certain if certain is not None else ratios
        lengths = np.frexp(expected_s)[1].tolist()
        if len(set(lengths)) == 1:
            groups[lengths[0]] = list(ratios), list(devices), list(certain)
        else:
            for ratio, length, device, own in zip(ratios, lengths, devices, certain, strict=True):
                of_length, whose, owned = groups.setdefault(length, ([], [], []))
                of_length.append(ratio)
                whose.append(device)
                owned.append(own)
        for length, (of_length, whose, owned) in groups.items():
            normal = self._by_length.get(length)
            if normal is None:
                normal = self._by_length[length] = _Normal(self.typical)
            if normal.margin < float("inf"):
                self.typical.add(whose, owned, normal.most)
            normal.add(of_length, whose)
        few = self._all.known < settings.NOW.answers
        if ratios and self.cold:
            self._quickest = min(ratios) if not self._all.known else min(self._quickest, *ratios)
            self._slowest = max(self._slowest, *ratios)
        self._all.add(ratios, devices)
        if few and self.proven_s(0.0) < float("inf"):
            self._push(sorted((at_s + self.proven_s(s), device, key) for key, device, at_s, s in self._unjudged))
        if self._unjudged and not self.cold:
            together: dict[float, list[tuple[Key, int, float]]] = {}
            for key, device, now_s, seconds in self._unjudged:
                together.setdefault(now_s, []).append((key, device, seconds))
            self._unjudged = []
            for now_s, sent in together.items():
                keys, to, expected = zip(*sent, strict=True)
                self.sent(keys, to, now_s, expected)

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def drop_answered(self, open_: Callable[[int, Key], bool]) -> None:
        """Drop the next deadlines of blocks that are no longer open on their device: `next_s` is then that of an open
        block."""
        while self._heap:
            _, number, place, batch = self._heap[0]
            while place < len(batch) and not open_(batch[place][1], batch[place][2]):
                place += 1
            if place == self._heap[0][2]:
                return
            if place < len(batch):
                heapq.heapreplace(self._heap, (batch[place][0], number, place, batch))
            else:
                heapq.heappop(self._heap)

    def overdue(self, now_s: float, open_: Callable[[int, Key], bool], most: int) -> list[Key]:
        """Blocks past their deadline that are still open on their device, each reported once."""
        found: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s and len(found) < most:
            _, number, place, batch = heapq.heappop(self._heap)
            _, device, key = batch[place]
            if open_(device, key):
                found.append(key)
            place += 1
            # most blocks were answered long ago: these cost no turn of the heap
            while place < len(batch) and batch[place][0] <= now_s and not open_(batch[place][1], batch[place][2]):
                place += 1
            if place < len(batch):
                heapq.heappush(self._heap, (batch[place][0], number, place, batch))
        return found


def _length(expected_s: float) -> int:
    """The length class: a factor of two each."""
    return math.frexp(expected_s)[1]


def after_a_turn_s(free_s: float, woke_s: float, now_s: float) -> float:
    """When lateness may be judged after a turn of the server from `woke_s` to `now_s`. Answers that could not be read
    during the turn, and the devices that send them, may need as long again. `free_s`: when lateness could last be
    judged. The delay is limited, so a server with no time between its turns still judges."""
    took_s = now_s - woke_s
    return min(now_s + took_s, free_s + took_s + settings.NOW.hitch_s)
