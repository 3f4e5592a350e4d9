"""Ctrl-C and SIGTERM. The first is raised as KeyboardInterrupt in the main thread and remembered: an exception raised
inside foreign code may be swallowed there, a flag is not. From then on everything is being ended, and no further
signal interrupts that. Cleaning up at the end of an undisturbed run (`held`) is not interrupted either: the signal is
raised when it is done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked_s: float | None = None  # when the first signal came, on the monotonic clock
_holding = 0
_due = False  # a signal came while it was held back
STILL_ENDING = b"\ncleave: ending what was started; a moment\n"


def install() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def ending() -> None:
    """Everything has ended but this process. Python gives signals their default meaning back while it shuts down: one
    more would kill it, and its exit code would be lost."""
    if _asked_s is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def asked_s() -> float | None:
    """When it was asked for, if it was."""
    return _asked_s


def check() -> None:
    """Raise KeyboardInterrupt if it has been asked for, now or earlier."""
    if _asked_s is not None:
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """What happens here is not interrupted: ending processes, removing containers. Only for what takes seconds."""
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
        os.write(2, STILL_ENDING)  # not print: the signal may have come in the middle of one
        return
    _asked_s = time.monotonic()
    if _holding:
        _due = True
        return
    raise KeyboardInterrupt
