"""Watches a run: its pods, its wait for devices, and whether this process stood still.

One thread. The watchdog restarts pods that have ended, so its thread lives until the last pod is gone: Linux ends a
child with the thread that started it. The wait for devices is limited (`training.wait_for_devices`): when the limit is
reached, the training thread gets an error, and the run keeps its results so far. The watchdog raises an interrupt
again if foreign code has swallowed it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from agent.protocol.errors import Failure
from agent.protocol.units import format_duration
from ps.transport.jobs import Totals
from testbed.runs import interrupts

EVERY_S = 0.25
STOOD_STILL_S = 0.7  # a check this late means that this process did not run; hitches of a busy host are shorter
SWALLOWED_S = 2.0  # `Server.collect` raises an interrupt within 0.5 s; after this long, foreign code swallowed it


class WaitedInVain(Failure):
    """No device that could go on joined within the scenario's limit."""


class WatchedServer(Protocol):
    """What the watchdog needs of a server."""

    totals: Totals

    @property
    def devices(self) -> int: ...
    @property
    def waiting(self) -> str:
        """What the server waits for; empty while a device can go on."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Raise this error in every thread that waits for products."""
        ...


class Patience:
    """How long no block has returned for lack of a device. Pure: every call passes the time."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._blocks = -1
        self._since_s: float | None = None

    def look(self, now_s: float, blocks: int, waiting: bool) -> None:
        if blocks != self._blocks or not waiting:
            self._blocks, self._since_s = blocks, None
        if waiting and self._since_s is None:
            self._since_s = now_s

    def stood_still(self, seconds: float) -> None:
        """This process did not run for this long, and could not see devices join: do not count the time."""
        if self._since_s is not None:
            self._since_s += seconds

    def waited_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def over(self, now_s: float) -> bool:
        return self.waited_s(now_s) > self.limit_s


class Watchdog:
    def __init__(self, server: WatchedServer, wait_s: float, notice: Callable[[str], None]) -> None:
        """`wait_s`: longest wait for a device that can go on."""
        self._server, self._notice = server, notice
        self._patience = Patience(wait_s)
        self._look_after: Callable[[], list[str]] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.stood_still_s: list[float] = []  # standstills: this process did not run at all
        self.error: BaseException | None = None

    def begin(self, look_after: Callable[[], list[str]]) -> None:
        """All devices have joined: look after the pods from now on."""
        self._look_after = look_after

    def rest(self) -> None:
        """The run is over: pods may end from now on."""
        self._look_after = None

    @property
    def told(self) -> str:
        """Text for the display while the run waits for devices."""
        waited_s = self._patience.waited_s(time.monotonic())
        if waited_s < 1.0:
            return ""
        return f"waits for a device, {waited_s:.0f} s of at most {format_duration(self._patience.limit_s)}"

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._end.wait(EVERY_S):
            now_s = time.monotonic()
            if now_s - last_s > EVERY_S + STOOD_STILL_S:
                self.stood_still_s.append(now_s - last_s - EVERY_S)
                self._patience.stood_still(self.stood_still_s[-1])
            try:
                self._look(now_s)
            except BaseException as error:
                self.error = error
                self._server.give_up(error)
                self._end.wait()  # pods end with this thread
            last_s = time.monotonic()  # the time of the check itself is no standstill

    def _look(self, now_s: float) -> None:
        if (look_after := self._look_after) is None:
            return
        for text in look_after():
            self._notice(text)
        if (since_s := interrupts.asked_s()) is not None and now_s - since_s > SWALLOWED_S:
            self._server.give_up(KeyboardInterrupt())
        waiting = self._server.waiting or ("no device is there" if not self._server.devices else "")
        self._patience.look(now_s, self._server.totals.blocks, bool(waiting))
        if self._patience.over(now_s):
            self._server.give_up(
                WaitedInVain(
                    f"no device that could go on came within {format_duration(self._patience.limit_s)} ({waiting}); "
                    "to wait longer: --set training.wait_for_devices='1 h'"
                )
            )

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10.0)
