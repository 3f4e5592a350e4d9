"""Load of the host during the steps: CPU time, steal time, and this run's share. Two samples, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from emulator.model.fidelity import HostLoad
from ps.transport.jobs import Totals


@dataclass(frozen=True, slots=True)
class Look:
    """CPU seconds so far."""

    total_s: float  # of all cores, busy or idle
    idle_s: float
    stolen_s: float
    own_s: float
    server_s: float
    now_s: float  # on the server's own clock


def look(pids: Sequence[int], totals: Totals, now_s: float) -> Look:
    times = psutil.cpu_times()  # on Linux from /proc/stat
    stolen_s = getattr(times, "steal", 0.0)
    # guest time is already part of user time
    total_s = sum(value for name, value in times._asdict().items() if not name.startswith("guest"))
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    own_s = 0.0
    for pid in pids:
        try:
            spent = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        own_s += spent.user + spent.system
    return Look(total_s, idle_s, stolen_s, own_s, totals.busy_s, now_s)


def between(before: Look, after: Look, longest_turn_s: float) -> HostLoad:
    total_s = max(after.total_s - before.total_s, 1e-9)
    stolen_s = after.stolen_s - before.stolen_s
    busy_s = total_s - (after.idle_s - before.idle_s) - stolen_s
    return HostLoad(
        busy=min(1.0, max(0.0, busy_s / total_s)),
        stolen=max(0.0, stolen_s / total_s),
        own=min(1.0, max(0.0, (after.own_s - before.own_s) / total_s)),
        server_busy=min(1.0, (after.server_s - before.server_s) / max(after.now_s - before.now_s, 1e-9)),
        server_turn_s=longest_turn_s,
    )
