"""What is kept of a run when the file system has no room, or fails: as much as can be, and a note of what is missing.

Training is worth more than its files: a full disk is said once, the run goes on, and its results are marked incomplete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path


class Keeping:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.missing: list[str] = []  # files, in the order in which they turned out to be incomplete
        self.why = ""  # the first time
        self._say = say

    @property
    def told(self) -> str:
        """For the verdict; empty if all is there."""
        return f"results are incomplete: {', '.join(self.missing)} ({self.why})" if self.missing else ""

    def lost(self, name: str, error: OSError) -> None:
        """This file could not be written, or not all of it."""
        why = error.strerror or str(error)
        if not self.missing:
            self.why = why
            self._say(f"cannot write {name}: {why}. The run goes on; its results will be marked as incomplete")
        if name not in self.missing:
            self.missing.append(name)

    def without(self, *names: str) -> None:
        """These cannot be made, since another one is missing."""
        self.missing += [name for name in names if name not in self.missing]

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Written aside and put in its place when it is complete: half a table cannot be read, and takes room that
        the others need; what was there before stays until then. A folder that has gone is made again."""
        part = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(part)
            part.replace(path)
        except OSError as error:
            self.lost(path.name, error)
            with contextlib.suppress(OSError):
                part.unlink()
