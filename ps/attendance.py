"""How many devices are there, and how another thread waits for them."""

from __future__ import annotations

import threading


class Attendance:
    def __init__(self) -> None:
        self.present = 0
        self._over = False
        self._changed = threading.Condition()

    def change(self, by: int) -> None:
        with self._changed:
            self.present += by
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody will come any more: whoever waits need not."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.present >= count or self._over, timeout_s)
