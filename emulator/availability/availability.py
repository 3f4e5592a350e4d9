"""When devices are available: a trace, its repair rules, and queries on it.

Pure. A trace gives the half-open intervals [start, end) in which each device is available. Its time 0 is the first
entry of the file (`origin_s` is that time in the file), and it ends at `duration_s`.

Input that is certainly wrong is refused: times that are not numbers, negative, or end before start. Input with one
sensible reading is repaired, counted in `repairs` and reported: rows out of order are sorted, overlapping or touching
intervals of one device are merged, empty intervals are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agent.protocol.errors import UserError

LATEST_S = 1e11  # three thousand years; Unix time in milliseconds is larger

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class TraceError(UserError):
    """A trace that cannot be read or is invalid; the message says where, what, and what to do."""


@dataclass(frozen=True, slots=True)
class Repairs:
    unsorted: int = 0  # rows that start before an earlier row of their device
    merged: int = 0  # intervals that overlapped or touched the one before
    empty: int = 0  # intervals of zero length
    silent: int = 0  # devices of an event trace without any available row

    def told(self) -> list[str]:
        """One line per kind of repair, for people; empty if nothing was repaired."""
        lines = (
            (self.unsorted, "rows out of order, sorted"),
            (self.merged, "intervals that overlapped or touched the one before, merged"),
            (self.empty, "intervals of no length, dropped"),
            (self.silent, "devices without any row of availability, left out"),
        )
        return [f"{count:,} {what}" for count, what in lines if count]


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class AvailabilityTrace:
    names: tuple[str, ...]  # of the devices
    device: Indices  # per interval: index into names
    start_s: Floats  # per interval; sorted
    end_s: Floats
    duration_s: float
    origin_s: float = 0.0  # time in the file at 0
    repairs: Repairs = Repairs()
    source: str = ""  # a file or a generator, for people

    def __post_init__(self) -> None:
        if not self.names:
            raise TraceError("a trace needs at least 1 device")
        if not len(self.device) == len(self.start_s) == len(self.end_s):
            raise TraceError("a trace needs one device, one start and one end for each interval")
        if not 0 < self.duration_s <= LATEST_S:
            raise TraceError(f"the trace lasts {self.duration_s:g} s; it must be more than 0 and at most {LATEST_S:g}")
        if not len(self.device):
            return
        if self.device.min() < 0 or self.device.max() >= len(self.names):
            raise TraceError(f"an interval names a device outside 0 to {len(self.names) - 1}")
        # also fails on NaN
        if not (self.start_s[0] >= 0 and (self.start_s < self.end_s).all() and self.end_s.max() <= self.duration_s):
            raise TraceError("every interval must begin at 0 or later, have a length, and end within the trace")
        if (np.diff(self.start_s) < 0).any():
            raise TraceError("the intervals must be sorted by start; trace_of() sorts them")
        if _gaps(*self.by_device()).min(initial=1.0) <= 0:
            raise TraceError("intervals of one device overlap or touch; trace_of() merges them")

    def __repr__(self) -> str:
        sessions = len(self.device)
        return (
            f"<AvailabilityTrace of {len(self)} devices, {sessions} sessions, {self.duration_s:g} s, {self.source!r}>"
        )

    def __len__(self) -> int:
        return len(self.names)

    def by_device(self) -> tuple[Indices, Floats, Floats]:
        """Device, start and end of each interval, device by device."""
        order = np.lexsort((self.start_s, self.device))
        return self.device[order], self.start_s[order], self.end_s[order]

    def gaps_s(self) -> Floats:
        """Gaps between consecutive sessions of each device."""
        return _gaps(*self.by_device())

    def present_at(self, at_s: float) -> NDArray[np.bool_]:
        """Which devices are present at a time."""
        present = np.zeros(len(self), dtype=np.bool_)
        present[self.device[(self.start_s <= at_s) & (at_s < self.end_s)]] = True
        return present

    def device_seconds(self, until_s: ArrayLike) -> Floats:
        """Total seconds of availability over all devices, from 0 to each of these times: the sum of (t - start) over
        intervals that have started, less the sum of (t - end) over intervals that have ended."""
        at_s = np.asarray(until_s, dtype=np.float64)

        def since(moments: Floats) -> Floats:
            passed = np.searchsorted(moments, at_s, side="right")
            total: Floats = passed * at_s - np.concatenate(([0.0], np.cumsum(moments)))[passed]
            return total

        return since(self.start_s) - since(np.sort(self.end_s))

    def availability(self, bins: int) -> Floats:
        """Mean share of devices present in each of `bins` equal parts of the trace."""
        edges = np.linspace(0.0, self.duration_s, bins + 1)
        shares: Floats = np.diff(self.device_seconds(edges)) / (self.duration_s / bins * len(self))
        return np.clip(shares, 0.0, 1.0)


def trace_of(
    names: Sequence[str],
    device: ArrayLike,
    start_s: ArrayLike,
    end_s: ArrayLike,
    *,
    window_s: tuple[float, float] | None = None,
    silent: int = 0,
    source: str = "",
) -> AvailabilityTrace:
    """A trace from intervals in any order, repaired by the rules above. `window_s` is the period during which the
    devices were observed; without it, from the first start to the last end."""
    of = np.asarray(device, dtype=np.intp)
    start, end = (np.asarray(times, dtype=np.float64) for times in (start_s, end_s))
    if not (np.isfinite(start).all() and np.isfinite(end).all() and (start >= 0).all() and (end >= start).all()):
        raise TraceError(f"{source or 'trace'}: times must be finite, not negative, and no end before its start")
    if window_s is None:
        if not len(start):
            raise TraceError(f"{source or 'trace'}: no interval, so no device is ever available")
        window_s = float(start.min()), float(end.max())
    begin_s, stop_s = window_s

    unsorted = 0
    if len(of):
        by_row = np.argsort(of, kind="stable")
        unsorted = int(((np.diff(start[by_row]) < 0) & (np.diff(of[by_row]) == 0)).sum())
    kept = end > start
    empty = int((~kept).sum())
    of, start, end = of[kept], start[kept] - begin_s, end[kept] - begin_s
    order = np.lexsort((start, of))
    of, start, end = of[order], start[order], end[order]
    before = len(of)
    if _gaps(of, start, end).min(initial=1.0) <= 0:
        of, start, end = _merged(of, start, end)
    order = np.lexsort((of, start))
    return AvailabilityTrace(
        names=tuple(names),
        device=of[order],
        start_s=start[order],
        end_s=end[order],
        duration_s=stop_s - begin_s,
        origin_s=begin_s,
        repairs=Repairs(unsorted=unsorted, merged=before - len(of), empty=empty, silent=silent),
        source=source,
    )


def _gaps(device: Indices, start_s: Floats, end_s: Floats) -> Floats:
    gaps: Floats = (start_s[1:] - end_s[:-1])[device[1:] == device[:-1]]
    return gaps


def _merged(device: Indices, start_s: Floats, end_s: Floats) -> tuple[Indices, Floats, Floats]:
    rows: list[tuple[int, float, float]] = []
    for of, start, end in zip(device.tolist(), start_s.tolist(), end_s.tolist(), strict=True):
        if rows and rows[-1][0] == of and start <= rows[-1][2]:
            rows[-1] = of, rows[-1][1], max(end, rows[-1][2])
        else:
            rows.append((of, start, end))
    devices, starts, ends = zip(*rows, strict=True)
    return np.array(devices, dtype=np.intp), np.array(starts), np.array(ends)
