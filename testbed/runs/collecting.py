"""Runs Python's garbage collector between steps, when no device waits for this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_between_steps() -> Iterator[None]:
    """The garbage collector would occasionally stop the server for a quarter of a second. Freeze the objects that
    exist now; collect each step's garbage between steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def not_collecting() -> Iterator[None]:
    """Disable the garbage collector while devices join: thousands of new objects would make it scan all of PyTorch's
    objects, which takes 0.3 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
