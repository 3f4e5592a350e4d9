"""How much slower than its profile each device has proved to be, learnt from what it delivers.

An overtaken device is taken to be four times slower than before, or as slow as it has shown itself to be: it did not
deliver, so nothing more is known. A device that is typically late, though never overdue, is taken to be as slow as it
typically is. If it then delivers sooner than expected, it is believed again. The only bound is the claim itself: a
profile says at most MAX_RATE, and no rate is taken to be less than 1. Devices that were never late cost nothing here.
Pure.
"""

from __future__ import annotations

from statistics import median

from agent.protocol.profile import MAX_RATE
from ps.scheduling import settings


class Slowness:
    def __init__(self) -> None:
        self.factor: dict[int, float] = {}  # of devices that are slower than they claimed
        self._answers: dict[int, list[float]] = {}
        self._changed: set[int] = set()
        # Factors in the present profiles, to which answers are compared. Hundreds of answers may come between two
        # corrections: if each changed the factor that the next one multiplies, one busy moment would make it 10^10.
        self._believed: dict[int, float] = {}
        self._judged_s: dict[int, tuple[float, float]] = {}  # device -> its factor, and since when

    def overtaken(self, device: int, ratio: float) -> None:
        """Another device was faster; `ratio` times the expected time had passed."""
        self._answers.pop(device, None)
        slower = self._believed.get(device, 1.0) * max(settings.NOW.far, ratio)
        self._set(device, max(slower, self.factor.get(device, 1.0)))

    def typically(self, device: int, ratio: float) -> None:
        """It repeatedly takes `ratio` times as long as it should. Ignored if it has a factor: its answers correct
        that."""
        if device not in self.factor:
            self._answers.pop(device, None)
            self._set(device, ratio)

    def answered(self, device: int, ratio: float) -> None:
        """It took `ratio` times what its believed factor makes expected, as a multiple of what a typical device takes.
        Of devices without a factor, call only for answers far too late: a device that does all the work alone is the
        typical one, so they are compared with the model itself."""
        answers = self._answers.setdefault(device, [])
        answers.append(ratio)
        if len(answers) < settings.NOW.answers:
            return
        typical = median(answers)
        answers.clear()
        self._judged_s.pop(device, None)
        if not 1 / settings.NOW.margin <= typical <= settings.NOW.margin:
            self._set(device, max(1.0, self._believed.get(device, 1.0) * typical))

    def _set(self, device: int, factor: float) -> None:
        self.factor[device] = min(MAX_RATE, factor)
        self._changed.add(device)

    def forget(self, device: int) -> None:
        for table in (self.factor, self._answers, self._believed, self._judged_s):
            table.pop(device, None)
        self._changed.discard(device)

    def forgive(self, now_s: float) -> None:
        """Give devices that were not heard of for a while another chance: a device that is taken to be slow gets little
        to do, often nothing, and so cannot show that it is not. Seen on a host overloaded by other programs: 37 of 600
        devices kept factors of up to 82 over 20 steps. One that is slow is overtaken again."""
        for device, factor in self.factor.items():
            judged, since_s = self._judged_s.setdefault(device, (factor, now_s))
            if judged != factor:
                self._judged_s[device] = factor, now_s
            elif now_s - since_s >= settings.NOW.forgiven_s:
                self.factor[device] = max(1.0, factor / 2)
                self._judged_s[device] = self.factor[device], now_s
                self._changed.add(device)

    def take_changes(self) -> dict[int, float]:
        """Devices whose factor has changed since the last call; 1: as fast as claimed. Profiles contain them now."""
        changes = {device: self.factor[device] for device in sorted(self._changed)}
        self._believed |= changes
        self._changed.clear()
        for device, factor in changes.items():
            if factor == 1.0:
                self.forget(device)
        return changes
