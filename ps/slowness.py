"""How much slower than its profile each device has turned out to be, learnt from what it delivers.

Whoever was overtaken is taken for four times as slow as before, or for as slow as it has shown itself to be: it did not
deliver, so nobody knows. If it then delivers sooner than it is now expected to, it is believed again. Devices that
were never overtaken cost nothing here. Pure.
"""

from __future__ import annotations

import numpy as np

AT_LEAST = 4.0
MOST = 1000.0
ANSWERS = 4  # of a device that was overtaken, before they say something
SAME = 1.25  # a correction of less is none


class Slowness:
    def __init__(self) -> None:
        self.factor: dict[int, float] = {}  # of devices that are slower than they said
        self._answers: dict[int, list[float]] = {}
        self._changed: set[int] = set()

    def overtaken(self, device: int, ratio: float) -> None:
        """Somebody else was faster, after `ratio` times what was expected."""
        self._answers.pop(device, None)
        self.factor[device] = min(MOST, self.factor.get(device, 1.0) * max(AT_LEAST, ratio))
        self._changed.add(device)

    def answered(self, device: int, ratio: float) -> None:
        """It took `ratio` times what was expected of it by now. To be called for devices that have a factor."""
        answers = self._answers.setdefault(device, [])
        answers.append(ratio)
        if len(answers) < ANSWERS:
            return
        typical = float(np.median(answers))
        answers.clear()
        if 1 / SAME <= typical <= SAME:
            return
        self.factor[device] = min(MOST, max(1.0, self.factor[device] * typical))
        self._changed.add(device)

    def forget(self, device: int) -> None:
        for table in (self.factor, self._answers):
            table.pop(device, None)
        self._changed.discard(device)

    def take_changes(self) -> dict[int, float]:
        """Devices whose factor has changed since the last call; 1 is as fast as they said."""
        changes = {device: self.factor[device] for device in sorted(self._changed)}
        self._changed.clear()
        for device, factor in changes.items():
            if factor == 1.0:
                self.forget(device)
        return changes
