"""Progress of a run for people: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
        """Print a line that stays."""
        # no markup: the text may contain names that device owners chose
        self.print(Text.assemble((f"{time.monotonic() - self._begun:7.1f} s", "dim"), "  ", text))

    def print(self, what: object) -> None:
        """Training matters more than its log: if the disk is full or the reader is gone, the run continues silently."""
        target = self._progress.console if self._progress is not None else self.console
        try:
            target.print(what, soft_wrap=isinstance(what, str | Text))
        except (OSError, ValueError, SystemExit):  # Rich ends the program when the reader is gone
            if target.file is sys.stdout:
                with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())  # buffered output must go somewhere
            target.quiet = True

    @contextmanager
    def phase(self, title: str, fraction: Callable[[], float], status: Callable[[], str]) -> Iterator[None]:
        """Show the progress of a long phase and the time left, until the block ends."""
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
            before = 0.0
            while not stop.wait(PLAIN_EVERY_S):
                done, elapsed = fraction(), time.monotonic() - begun
                # no estimate while nothing moves
                moving = done > before and done > 0.02
                left = f", about {elapsed * (1 - done) / done:.0f} s left" if moving else ""
                self.say(f"{title}: {100 * done:.0f}%, {status()}{left}")
                before = done
