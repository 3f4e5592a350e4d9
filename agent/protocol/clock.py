"""One clock, passed in: every block timestamp and every wait for modelled time goes through it.

Modelled time is device time. On the wall clock it is the host's time. On a scaled clock it runs k times slower, so that
a slow host keeps up: a modelled duration takes k times as long on the host, and is reported in device time. A virtual
clock jumps from one event to the next without waiting.

Wall and scaled clocks count from the zero of the host's monotonic clock, which the server and all pods of one host
share, so processes with the same scale agree on the time without exchanging messages.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    scale: float  # host seconds per second of device time

    def now_ns(self) -> int:
        """Device time."""
        ...

    def wait_s(self, until_ns: int) -> float:
        """Host seconds until that device time; 0 if it has passed."""
        ...


class ScaledClock:
    """Device time runs `scale` times slower than the host's. `offset_ns`: the server host's clock minus this host's, if
    they are different hosts."""

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
    """Advances only by `jump`."""

    scale = 1.0

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def wait_s(self, until_ns: int) -> float:
        return 0.0

    def jump(self, to_s: float) -> None:
        """Move forward to this time; never back."""
        self.now_s = max(self.now_s, to_s)
