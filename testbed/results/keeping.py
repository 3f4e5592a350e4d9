"""Keeps as much of a run's results as possible when the file system is full or fails, and notes what is missing.

Training matters more than its files: a full disk is reported once, the run goes on, and its results are marked
incomplete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path


class Keeping:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.missing: list[str] = []  # missing or incomplete files, in order of discovery
        self.why = ""  # the first error
        self._say = say

    @property
    def told(self) -> str:
        """Text for the verdict; empty if no file is missing."""
        return f"results are incomplete: {', '.join(self.missing)} ({self.why})" if self.missing else ""

    def lost(self, name: str, error: OSError) -> None:
        """Note that this file could not be written completely."""
        why = error.strerror or str(error)
        if not self.missing:
            self.why = why
            self._say(f"cannot write {name}: {why}. The run goes on; its results will be marked as incomplete")
        if name not in self.missing:
            self.missing.append(name)

    def without(self, *names: str) -> None:
        """Note that these files cannot be made because another file is missing."""
        self.missing += [name for name in names if name not in self.missing]

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write to a temporary file and rename it when it is complete: half a table is useless and takes space that
        other files need. The earlier version stays until then. A folder that has disappeared is created again."""
        part = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(part)
            part.replace(path)
        except OSError as error:
            self.lost(path.name, error)
            with contextlib.suppress(OSError):
                part.unlink()
