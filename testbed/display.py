"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.25


class Display:
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._begun = time.monotonic()
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """A line that stays."""
        target = self._progress.console if self._progress is not None else self.console
        # not as markup: the text may hold names that strangers gave their devices
        target.print(Text.assemble((f"{time.monotonic() - self._begun:7.1f} s", "dim"), "  ", text), soft_wrap=True)

    @contextmanager
    def phase(self, title: str, fraction: Callable[[], float], status: Callable[[], str]) -> Iterator[None]:
        """Something that takes a while: shows how far it is and how long it will take, until the block ends."""
        stop = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(title, fraction, status, stop), daemon=True)
        if self.console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._progress.start()
        ticker.start()
        try:
            yield
        finally:
            stop.set()
            ticker.join()
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def _tick(
        self, title: str, fraction: Callable[[], float], status: Callable[[], str], stop: threading.Event
    ) -> None:
        begun = time.monotonic()
        if self._progress is not None:
            task = self._progress.add_task(title, total=1.0, status="")
            while not stop.wait(LIVE_EVERY_S):
                self._progress.update(task, completed=fraction(), status=status())
        else:
            while not stop.wait(PLAIN_EVERY_S):
                done, elapsed = fraction(), time.monotonic() - begun
                left = f", about {elapsed * (1 - done) / done:.0f} s left" if done > 0.02 else ""
                self.say(f"{title}: {100 * done:.0f}%, {status()}{left}")
