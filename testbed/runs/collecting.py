"""Python's search for cycles, at moments when nothing waits for this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_between_steps() -> Iterator[None]:
    """Python's search for cycles would stop the server for a quarter of a second now and then. What there is by now
    stays; what a step leaves behind is looked for between steps."""
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
    """While devices join: thousands of new objects would make Python search all of PyTorch's, which takes 0.3 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
