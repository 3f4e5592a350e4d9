"""How many bytes this device has moved today, both ways: counted while it works, kept in its state folder.

Bytes of messages. What TCP, IP and encryption add is not in it, about 4% to 8%. An agent that is killed forgets two
seconds at most.
"""

from __future__ import annotations

import threading
from datetime import date
from pathlib import Path

from agent.errors import UserError
from agent.files import locked
from agent.state import read_json, write_json


class Meter:
    """Counted by the thread that speaks, read by the one that watches. Several agents add up in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fresh = 0  # not written yet
        self._kept: tuple[str, int] = ("", 0)

    def add(self, size: int) -> None:
        with self._lock:
            self._fresh += size

    def today(self, day: date) -> int:
        """Bytes of this day so far, those of other agents of this device as of the last `keep`."""
        with self._lock:
            return self._fresh + (self._kept[1] if self._kept[0] == day.isoformat() else 0)

    def keep(self, day: date) -> None:
        """Write it down. What was counted around midnight belongs to the new day. UserError if it cannot be written."""
        with self._lock:
            fresh, self._fresh = self._fresh, 0
        try:
            with locked(self._path.with_suffix(".lock")):
                known = read_json(self._path)
                total = known.get("bytes")
                before = total if known.get("day") == day.isoformat() and isinstance(total, int) else 0
                if fresh:
                    write_json(self._path, {"day": day.isoformat(), "bytes": before + fresh}, durable=False)
        except UserError:
            with self._lock:
                self._fresh += fresh
            raise
        with self._lock:
            self._kept = (day.isoformat(), before + fresh)
