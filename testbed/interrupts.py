"""Ctrl-C and SIGTERM, remembered: an exception raised inside foreign code may be swallowed there, a flag is not."""

from __future__ import annotations

import signal
from types import FrameType

_asked = False


def install() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if somebody has asked for it, now or earlier."""
    if _asked:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt
