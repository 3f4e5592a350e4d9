"""How far the claims of new devices are believed: a profile is a claim, and belief grows with what is delivered.

A newcomer first gets one small block of a product (ps/planning/trial_blocks.py). Once that is answered and found right,
the device is believed a small part of a typical device's rates, and several times as much with every product to which
it contributed in time. It is never believed more than it claims; once it reaches its claim, it is a device like any
other. If it does not deliver what it was believed, it falls back to what it delivered, and grows in smaller steps from
there. So its work follows from what it did; a claim, however large, only says where growth ends.

"In time": at most IN_TIME times as long as expected, or as is usual at present, on average. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE
from ps.planning.cost import Integers

RATES = ("flops", "down_bps", "up_bps")
START = 1 / 16  # of a typical device; the product of its first block makes it grow once
GROWTH = 4.0  # per product, up to a typical device
BEYOND = 2.0  # the same beyond that; a laptop 100 times as fast as typical phones is believed after nine products
IN_TIME = (
    1.1  # on average over its blocks of a product; with 2.0 a boaster hovered at twice its rate, steps took 45% more
)
LEAST_GROWTH = 1.05  # after any number of failures, since devices also get faster; 130 times in a step of 100 products
LEAST = 1 / MAX_RATE  # of a typical device

Rates = tuple[float, float, float]


@dataclass(slots=True)
class Belief:
    typical: Rates  # of a typical device, when this one joined
    times: float  # it is believed at most this multiple of them
    growth: float = GROWTH

    def rates(self, told: Rates) -> Rates:
        down, up = (min(told[i], self.times * self.typical[i]) for i in (1, 2))
        return min(told[0], self.times * self.typical[0]), down, up


class Newcomers:
    def __init__(self) -> None:
        self.beliefs: dict[int, Belief] = {}
        self._answers: dict[int, dict[int, tuple[float, int]]] = {}  # job -> device -> sum of ratios, blocks
        self._changed: set[int] = set()

    def begin(self, device: int, typical: Rates, times: float = START) -> None:
        self.beliefs[device] = Belief(typical, times)
        self._changed.add(device)

    def answered(self, device: int, job: int, ratio: float) -> None:
        """It took `ratio` times what was expected, relative to what is usual. Call only for devices with a belief."""
        answers = self._answers.setdefault(job, {})
        total, count = answers.get(device, (0.0, 0))
        answers[device] = total + ratio, count + 1

    def finished(self, job: int) -> None:
        """All blocks of the job were found right: devices that were in time are believed more, the others less."""
        for device, (total, count) in self._answers.pop(job, {}).items():
            if total > IN_TIME * count:
                self.failed(device, total / count)
            elif (belief := self.beliefs.get(device)) is not None:
                if belief.times >= 1.0:
                    belief.growth = min(belief.growth, BEYOND)
                belief.times *= belief.growth
                self._changed.add(device)

    def failed(self, device: int, ratio: float) -> None:
        """It did not deliver what it was believed: it took `ratio` times as long, or another device was faster."""
        if (belief := self.beliefs.get(device)) is not None:
            belief.times = max(LEAST, belief.times / max(1.0, ratio))
            belief.growth = max(LEAST_GROWTH, belief.growth**0.5)
            self._changed.add(device)

    def forget(self, device: int) -> None:
        self.beliefs.pop(device, None)
        self._changed.discard(device)
        for answers in self._answers.values():
            answers.pop(device, None)

    def take_changes(self, told: NDArray[np.void]) -> list[int]:
        """Devices whose belief has changed since the last call. Beliefs that have reached the claim are dropped."""
        changed = sorted(self._changed)
        self._changed.clear()
        for device in changed:
            claim = rates_of(told, device)
            if self.beliefs[device].rates(claim) == claim:
                del self.beliefs[device]
        return changed


def rates_of(profiles: NDArray[np.void], device: int) -> Rates:
    flops, down_bps, up_bps = (float(profiles[rate][device]) for rate in RATES)
    return flops, down_bps, up_bps


def typical_rates(profiles: NDArray[np.void], devices: Integers | Iterable[int]) -> Rates:
    """The median of each rate by itself; of two devices the slower one, so that one claim among two has no effect."""
    rows = profiles[np.asarray(devices, np.int64)]
    flops, down_bps, up_bps = (float(np.sort(rows[rate])[(len(rows) - 1) // 2]) for rate in RATES)
    return flops, down_bps, up_bps
