"""How far the claims of new devices are believed: a profile is a claim, and belief grows with what is delivered.

A newcomer first gets one small block of a product (ps/planning/trial_blocks.py). Once that is answered and found right,
the device is believed a small part of a typical device's rates, and several times as much with every product to which
it contributed in time. It is never believed more than it claims; once it reaches its claim, it is a device like any
other. If it does not deliver what it was believed, it falls back to what it delivered, and grows in smaller steps from
there. So its work follows from what it did; a claim, however large, only says where growth ends.

"In time": at most `in_time` times as long as expected, on average, or as is usual at present, or as the devices needed
that are believed already and contributed to the same product: where all take longer than modelled, a newcomer is not to
blame. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE
from ps.planning import settings as planning_settings
from ps.planning.cost import Integers
from ps.scheduling import settings
from ps.scheduling.deadlines import UNKNOWN

RATES = ("flops", "down_bps", "up_bps")
LEAST = 1 / MAX_RATE  # of a typical device


Rates = tuple[float, ...]  # in the order of RATES


@dataclass(slots=True)
class Belief:
    typical: Rates  # of a typical device, when this one joined
    times: float  # it is believed at most this multiple of them
    growth: float = field(default_factory=lambda: settings.NOW.growth)

    def rates(self, told: Rates) -> Rates:
        return tuple(min(claim, self.times * typical) for claim, typical in zip(told, self.typical, strict=True))


class Newcomers:
    def __init__(self) -> None:
        self.beliefs: dict[int, Belief] = {}
        # job -> device, UNKNOWN for all without a belief -> sum of ratios, blocks
        self._answers: dict[int, dict[int, tuple[float, int]]] = {}
        self._changed: set[int] = set()

    def begin(self, device: int, typical: Rates, times: float | None = None) -> None:
        """`times`: multiple of a typical device that it is believed at first; the product of its first block makes it
        grow once."""
        self.beliefs[device] = Belief(typical, times or 1 / planning_settings.NOW.trials)
        self._changed.add(device)

    def answered(self, device: int, job: int, ratio: float) -> None:
        """It took `ratio` times what was expected, relative to what is usual. Devices without a belief count together,
        for comparison."""
        answers = self._answers.setdefault(job, {})
        of = device if device in self.beliefs else UNKNOWN
        total, count = answers.get(of, (0.0, 0))
        answers[of] = total + ratio, count + 1

    def finished(self, job: int) -> None:
        """All blocks of the job were found right: devices that were in time are believed more, the others less. Both
        follow what was delivered, or noise alone would take a device's work away bit by bit."""
        answers = self._answers.pop(job, {})
        total, count = answers.pop(UNKNOWN, (0.0, 0))
        usual = max(1.0, total / count) if count else 1.0
        for device, (total, count) in answers.items():
            ratio = total / count / usual
            if ratio > settings.NOW.in_time:
                self.failed(device, ratio)
            elif (belief := self.beliefs.get(device)) is not None:
                if belief.times >= 1.0:  # beyond a typical device it grows half as fast
                    belief.growth = min(belief.growth, settings.NOW.growth**0.5)
                belief.times *= max(belief.growth, 1 / max(ratio, 1 / settings.NOW.growth))
                self._changed.add(device)

    def failed(self, device: int, ratio: float) -> None:
        """It did not deliver what it was believed: it took `ratio` times as long, or another device was faster."""
        if (belief := self.beliefs.get(device)) is not None:
            belief.times = max(LEAST, belief.times / max(1.0, ratio))
            belief.growth = max(planning_settings.NOW.later, belief.growth**0.5)  # devices also get faster
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
    return tuple(float(profiles[rate][device]) for rate in RATES)


def typical_rates(profiles: NDArray[np.void], devices: Integers | Iterable[int]) -> Rates:
    """The median of each rate by itself; of two devices the slower one, so that one claim among two has no effect."""
    rows = profiles[np.asarray(devices, np.int64)]
    return tuple(float(np.sort(rows[rate])[(len(rows) - 1) // 2]) for rate in RATES)
