"""Ctrl-C and SIGTERM. The first signal raises KeyboardInterrupt in the main thread and also sets a flag, because
foreign code may swallow the exception. From then on the run is ending, and further signals do not interrupt its end.
Nor does a signal interrupt the cleanup after an undisturbed run (`held`): KeyboardInterrupt is raised afterwards.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked_s: float | None = None  # time of the first signal, on the monotonic clock
_holding = 0
_due = False  # a signal arrived while signals were held back
STILL_ENDING = b"\ncleave: ending what was started; a moment\n"


def install() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def ending() -> None:
    """Call when everything but this process has ended. Python restores the default signal handlers while it shuts
    down: one more signal would kill the process, and its exit code would be lost."""
    if _asked_s is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def asked_s() -> float | None:
    """Time of the first signal; None if there was none."""
    return _asked_s


def check() -> None:
    """Raise KeyboardInterrupt if an interrupt was requested, now or earlier."""
    if _asked_s is not None:
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Do not interrupt this block: ending processes, removing containers. Only for work of a few seconds."""
    global _holding, _due
    _holding += 1
    try:
        yield
    finally:
        _holding -= 1
        if _due and not _holding:
            _due = False
            raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _asked_s, _due
    if _asked_s is not None:
        os.write(2, STILL_ENDING)  # not print: the signal may have interrupted one
        return
    _asked_s = time.monotonic()
    if _holding:
        _due = True
        return
    raise KeyboardInterrupt
