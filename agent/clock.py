"""One clock, passed in: all stamps of blocks and all waiting for modelled moments go through it.

Modelled time is device time. On the wall clock it is the host's. On a scaled clock it goes k times slower, so that a
host that is too slow keeps up: whatever the model says takes k times as long here, and is told in device time. On a
virtual clock nobody waits: it jumps from one event to the next.

Wall and scaled clocks count from the zero of the host's monotonic clock, which the server and all pods of one host
share: two processes with the same scale agree on the time without a word.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Device time."""
        ...

    def wait_s(self, until_ns: int) -> float:
        """How long, in seconds of the host, to wait until that moment; 0 if it has come."""
        ...


class ScaledClock:
    """Device time goes `scale` times slower than the host's. `offset_ns`: to be added to this host's clock to get that
    of the host where the server is, if it is another one."""

    def __init__(self, scale: float = 1.0, offset_ns: int = 0) -> None:
        if not 1.0 <= scale < float("inf"):
            raise ValueError(f"a clock cannot be scaled by {scale}; it must be at least 1")
        self.scale = scale
        self._offset_ns = offset_ns

    def now_ns(self) -> int:
        return int((time.monotonic_ns() + self._offset_ns) / self.scale)

    def wait_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns * self.scale - time.monotonic_ns() - self._offset_ns) / 1e9)


class WallClock(ScaledClock):
    """The host's own time."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """Stands still until somebody sets it forward."""

    scale = 1.0

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def wait_s(self, until_ns: int) -> float:
        return 0.0

    def jump(self, to_s: float) -> None:
        """Never back."""
        self.now_s = max(self.now_s, to_s)
