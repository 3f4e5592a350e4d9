"""How long this thread was stopped: a stopped process, a busy host, or a lock that another thread held for long.

Answers that arrived meanwhile could not be read, so lateness is not the devices' fault. The dispatcher's clock leaves
such times out: all that was under way keeps the time it had left. Counted is the time that neither intended waiting nor
this thread's own work explains. Pure: the times come with every call.
"""

from __future__ import annotations

SHORTEST_S = 0.25  # shorter hitches are covered by margins; a stop of half a second and more is not


class Standstill:
    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: tuple[float, float] | None = None

    def look(self, wall_s: float, worked_s: float, waited_s: float = 0.0) -> float:
        """How long the thread was stopped since the last look, by the host's clock and its own processor time.
        `waited_s`: how much of that time it may have waited for work."""
        before, self._seen = self._seen, (wall_s, worked_s)
        if before is None:
            return 0.0
        still_s = wall_s - before[0] - (worked_s - before[1]) - waited_s
        if still_s < SHORTEST_S:
            return 0.0
        self.total_s += still_s
        return still_s
