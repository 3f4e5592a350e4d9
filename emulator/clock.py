"""One clock, passed in: all waiting and all stamps of the emulator go through it.

`now_ns` counts modelled time from the server's stamps. The wall clock is the host's monotonic clock, which the server
and all pods of one host share. A scaled clock would stretch it, a virtual one would jump; both fit this interface.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Modelled time, on the server's scale."""
        ...

    def wait_s(self, until_ns: int) -> float:
        """How long, in seconds of the host, to wait until that moment; 0 if it has come."""
        ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wait_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - time.monotonic_ns()) / 1e9)

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)
