"""Counts the bytes that this device moves per day, both ways, and keeps the count in its state folder.

Only message bytes are counted; TCP, IP and encryption add about 4% to 8%. A killed agent loses about the last
2 s of the count (watch.KEEP_S).
"""

from __future__ import annotations

import threading
from datetime import date
from pathlib import Path

from agent.identity.files import locked
from agent.identity.state import read_json, write_json
from agent.protocol.errors import UserError


class Meter:
    """Written by the protocol thread, read by the watch thread. Several agents add to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fresh = 0  # bytes not yet written to the file
        self._kept: tuple[str, int] = ("", 0)

    def add(self, size: int) -> None:
        with self._lock:
            self._fresh += size

    def today(self, day: date) -> int:
        """Bytes moved on this day; those of this device's other agents as of the last `keep`."""
        with self._lock:
            return self._fresh + (self._kept[1] if self._kept[0] == day.isoformat() else 0)

    def keep(self, day: date) -> None:
        """Save the count. Bytes not yet saved at midnight count for the new day. UserError if the write fails."""
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
