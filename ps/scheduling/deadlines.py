"""When a block is overdue: by the cost model, and by how wrong the cost model has been so far.

The cost model gives a block's expected time. The ratio of actual to expected time is remembered for the latest blocks
of the whole fleet. A block is overdue when its ratio is above that of nearly all of them, or several times that of
most: with many slow devices, the quantile alone would call slow normal. It must also be later, in seconds, than nearly
all answers are, up to a quarter of a second: short blocks on a busy host take several times what is expected, and
copies of them make it busier. There is no fixed timeout: on a host that makes everything late, no device is late.

Until enough answers are known, the cost model alone sets the deadline: a multiple of the expected time, plus a floor.

A single device cannot define what is normal. Each device's typical lateness is tracked. Blocks of devices that are
typically later than most are left out, as long as fewer than a minority of the devices are like that. Pure: the time
comes with every call.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ps.scheduling import settings

FRESH = (1.0, 0)  # an unknown device: typical lateness, blocks
UNKNOWN = -1  # device of blocks that are reported without one

Key = tuple[int, int]  # job, block


class Typical:
    """Each device's typical lateness, as a multiple of what most blocks of the fleet take: a moving average over its
    latest blocks, each capped at `tail`.

    Devices that are later than most blocks are left out of what is normal, as long as they are few. Slower than their
    profile are all that are later than a typical device, even if they are half of the fleet."""

    def __init__(self) -> None:
        self._score: dict[int, tuple[float, int]] = {}  # device -> average, blocks
        self._most = 1.0
        self._typical, self._since = 1.0, 0  # the average of a typical device, and the answers since it was computed
        self._late: set[int] = set()  # devices that are typically late
        self._slow: set[int] = set()  # devices that have become slower than expected, and are not reported yet

    def add(self, devices: Sequence[int], ratios: Sequence[float], most: float) -> None:
        """Most blocks take at most `most` times what is expected."""
        now = settings.NOW
        scores, keep, weight = self._score, 1.0 - now.memory, now.memory / most
        highest, slow = now.tail * most, now.outlier * min(1.0, 1.0 / most)
        self._most = most
        self._since += len(devices)
        late, get = self._late, scores.get
        for device, ratio in zip(devices, ratios, strict=True):
            average, blocks = get(device, FRESH)
            average = keep * average + weight * (ratio if ratio < highest else highest)
            scores[device] = average, blocks + 1
            if average > slow and blocks * now.memory >= 1:
                self._slow.add(device)
                if average > now.outlier:
                    late.add(device)
                    continue
            if late:
                late.discard(device)

    @property
    def ratio(self) -> float:
        """How many times as long as expected the blocks of a typical device take, at least 1."""
        if self._since >= len(self._score) > 0:
            averages = sorted(average for average, _ in self._score.values())
            self._typical, self._since = averages[(len(averages) - 1) // 2], 0  # of two devices, the faster one
        return max(1.0, min(1.0, self._typical) * self._most)

    def take_slow(self) -> dict[int, float]:
        """Devices found since the last call to be typically slower than expected and than a typical device, and how
        many times."""
        if not self._slow:
            return {}
        typical = self.ratio / self._most
        slow = {device: self._score[device][0] / typical for device in sorted(self._slow) if device != UNKNOWN}
        self._slow.clear()
        return {device: times for device, times in slow.items() if times > settings.NOW.outlier}

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
        self._slow.discard(device)


class Deadlines:
    def __init__(self) -> None:
        self.typical = Typical()
        self.margin = float("inf")  # how many times its expected time a block may take; infinity: too little is known
        self.late_s = 0.0  # how much later than expected answers are, at most, whatever their blocks take
        self._most = 1.0  # the ratio that most blocks stay below
        self._ratios: deque[float] = deque(maxlen=16 * settings.NOW.enough)
        self._lateness_s: deque[float] = deque(maxlen=16 * settings.NOW.enough)
        self._devices: deque[int] = deque(maxlen=16 * settings.NOW.enough)
        self._fresh = 0
        self._heap: list[tuple[float, int, Key]] = []  # deadline, device, block
        self._unjudged: list[tuple[Key, int, float, float]] = []  # sent before the margin was known

    @property
    def cold(self) -> bool:
        """Too few answers are known to say what is normal."""
        return self.margin == float("inf")

    @property
    def usual(self) -> float:
        """The ratio that most blocks stay below, at least 1; 1 if too little is known."""
        return max(1.0, self._most)

    def sent(self, keys: Sequence[Key], devices: Sequence[int], now_s: float, expected_s: Sequence[float]) -> None:
        if self.cold:
            self._unjudged += [(key, d, now_s, s) for key, d, s in zip(keys, devices, expected_s, strict=True)]
        for key, device, seconds in zip(keys, devices, expected_s, strict=True):
            due_s = now_s + min(self.allowed_s(seconds), self.proven_s(seconds))
            heapq.heappush(self._heap, (due_s, device, key))

    def allowed_s(self, expected_s: float) -> float:
        """How long a block with this expected time may take. If even the quickest block so far took several times what
        was expected, the devices are not the cause."""
        if self.cold:
            quickest = min(self._ratios, default=1.0)
            return max(1.0, quickest) * settings.NOW.far * expected_s + settings.NOW.hitch_s
        return max(self.margin * expected_s, expected_s + self.late_s)

    def proven_s(self, expected_s: float) -> float:
        """How long such a block took at most on the devices that have answered, with the same allowances; infinity
        unless all of them were far faster than expected. Then what is expected follows from false claims: that a
        device is very slow, and so that a typical one is."""
        if not self.cold or len(self._ratios) < settings.NOW.answers:
            return float("inf")
        slowest = max(self._ratios)
        if slowest > 1 / settings.NOW.far:
            return float("inf")
        return settings.NOW.far * slowest * expected_s + settings.NOW.hitch_s

    def postpone(self, key: Key, device: int, until_s: float) -> None:
        heapq.heappush(self._heap, (until_s, device, key))

    def returned(
        self,
        ratios: Sequence[float],
        devices: Sequence[int] | None = None,
        certain: Sequence[float] | None = None,
        lateness_s: Sequence[float] | None = None,
    ) -> None:
        """Ratios of actual to expected time of returned blocks, their devices, and by how many seconds they were late.
        `certain`: the ratios without the time for which the server left the answers unread, if that is known. A block
        is overdue by what is normal with the server's delay; a device is late only by what it did itself."""
        devices = devices if devices is not None else [UNKNOWN] * len(ratios)
        cold, now = self.cold, settings.NOW
        if not cold:
            self.typical.add(devices, certain if certain is not None else ratios, self._most)
        few = len(self._ratios) < now.answers
        self._ratios.extend(ratios)
        self._lateness_s.extend(lateness_s if lateness_s is not None else [0.0] * len(ratios))
        self._devices.extend(devices)
        if few and self.proven_s(0.0) < float("inf"):
            for key, device, sent_s, expected_s in self._unjudged:
                heapq.heappush(self._heap, (sent_s + self.proven_s(expected_s), device, key))
        self._fresh += len(ratios)
        if self._fresh < (now.enough if cold else 4 * now.enough):
            return
        self._fresh = 0
        counted = np.array([self._ratios, self._lateness_s])
        if outliers := self.typical.outliers(self._devices):
            counted = counted[:, ~np.isin(np.array(self._devices), outliers)]
        most, nearly_all = np.quantile(counted, [now.most, now.quantile], axis=1)
        nearly_all = np.minimum(nearly_all, now.tail * most)
        self._most = max(float(most[0]), 1e-9)
        self.margin = now.margin * max(1.0, float(nearly_all[0]))
        self.late_s = min(now.far_s, now.margin * max(0.0, float(nearly_all[1])))
        unjudged, self._unjudged = self._unjudged, []
        for key, device, sent_s, expected_s in unjudged:
            self.sent([key], [device], sent_s, [expected_s])

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def drop_answered(self, open_: Callable[[int, Key], bool]) -> None:
        """Drop the next deadlines of blocks that are no longer open on their device: `next_s` is then that of an open
        block."""
        while self._heap and not open_(*self._heap[0][1:]):
            heapq.heappop(self._heap)

    def overdue(self, now_s: float, open_: Callable[[int, Key], bool], most: int) -> list[Key]:
        """Blocks past their deadline that are still open on their device, each reported once."""
        found: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s and len(found) < most:
            _, device, key = heapq.heappop(self._heap)
            if open_(device, key):
                found.append(key)
        return found


def after_a_turn_s(free_s: float, woke_s: float, now_s: float) -> float:
    """When lateness may be judged after a turn of the server from `woke_s` to `now_s`. Answers that could not be read
    during the turn, and the devices that send them, may need as long again. `free_s`: when lateness could last be
    judged. The delay is limited, so a server with no time between its turns still judges."""
    took_s = now_s - woke_s
    return min(now_s + took_s, free_s + took_s + settings.NOW.hitch_s)
