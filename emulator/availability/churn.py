"""Churn: when each device leaves and joins according to a trace of availability, and whether that happened.

Pure: no threads, no sockets, no clock. An injector asks the schedule what is due and carries it out; `audit` then
compares what was done with what was asked for.

A schedule reads the trace through a window that moves `speed_up` times as fast as the run and starts at `offset_s`. The
window wraps around at the end of the trace, so a run may have any length:

    device i is present at run time t  <=>  its trace device is present at (offset + shift_i + t speed_up) mod duration

A fleet smaller than the trace uses a subset of its devices, chosen by the seed. A larger fleet reuses them: the first
copies unchanged, each further copy shifted by its own uniform part of the trace (which flattens the daily rhythm).
`notes` records which. A device that returns keeps its index.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.protocol.units import format_duration
from emulator.availability.availability import AvailabilityTrace, Floats, Indices, Repairs, TraceError, trace_of
from emulator.availability.sessions import flash_sessions, poisson_churn, seti_sessions
from emulator.availability.trace_files import read_trace

__all__ = [
    "AvailabilityTrace",
    "ChurnAudit",
    "Event",
    "Repairs",
    "Schedule",
    "TraceError",
    "audit",
    "flash_sessions",
    "poisson_churn",
    "read_trace",
    "seti_sessions",
    "trace_of",
]

LEAVE, JOIN = "leave", "join"
EARLY_S = 1e-3  # an injector's clock may be ahead by this much


class Event(NamedTuple):
    at_s: float  # run time
    device: int  # index in the fleet
    what: str  # LEAVE or JOIN


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    events: tuple[Event, ...]  # of one pass through the trace, 0 < at_s <= period_s, sorted
    present: NDArray[np.bool_]  # present at time 0, by index in the fleet
    period_s: float  # run time after which the events repeat
    trace_device: Indices  # per device of the fleet
    shift_s: Floats  # per device of the fleet, in trace time
    notes: tuple[str, ...]  # how trace and fleet were matched, for people

    @classmethod
    def from_trace(
        cls, trace: AvailabilityTrace, devices: int, *, speed_up: float = 1.0, offset_s: float = 0.0, seed: int = 0
    ) -> Schedule:
        """The schedule of a fleet of `devices` devices; `offset_s` is in trace time."""
        if devices < 1:
            raise TraceError(f"a fleet needs at least 1 device, not {devices}")
        if not (speed_up > 0 and math.isfinite(speed_up)):
            raise TraceError(f"the speed-up is {speed_up}; it must be more than 0, e.g. 60 for an hour per minute")
        if not 0 <= offset_s < trace.duration_s:
            raise TraceError(
                f"the schedule would begin {offset_s:g} s into a trace of {trace.duration_s:g} s; "
                "it must be 0 or more and less than that"
            )
        source, shift_s, note = _match(trace, devices, seed)
        period_s = trace.duration_s / speed_up
        phase_s = np.mod(offset_s + shift_s, trace.duration_s)
        events, present = _events(trace, source, phase_s, speed_up)
        notes = (*note, f"after {format_duration(period_s)} of the run the trace begins again")
        return cls(events, present, period_s, source, shift_s, notes)

    def __repr__(self) -> str:
        there = int(self.present.sum())
        return (
            f"<Schedule of {len(self)} devices, {there} there at 0, {len(self.events)} events in {self.period_s:g} s>"
        )

    def __len__(self) -> int:
        return len(self.present)

    def forever(self) -> Iterator[Event]:
        """All events in order, pass after pass; ends only if there are none."""
        passes = 0
        while self.events:
            for event in self.events:
                yield event._replace(at_s=event.at_s + passes * self.period_s)
            passes += 1

    def until(self, end_s: float) -> list[Event]:
        """All events due up to this run time."""
        due = []
        for event in self.forever():
            if event.at_s > end_s:
                break
            due.append(event)
        return due

    def present_at(self, at_s: float) -> NDArray[np.bool_]:
        """Which devices are present at a run time."""
        present = self.present.copy()
        last = bisect_right(self.events, at_s % self.period_s, key=lambda event: event.at_s)
        for event in self.events[:last]:
            present[event.device] = event.what == JOIN
        return present


def _match(trace: AvailabilityTrace, devices: int, seed: int) -> tuple[Indices, Floats, tuple[str, ...]]:
    """Which device of the trace each device of the fleet follows, and its shift."""
    rng = np.random.default_rng(seed)
    have = len(trace)
    if devices <= have:
        if devices == have:
            return np.arange(have), np.zeros(have), ()
        told = f"{have:,} devices in the trace, {devices:,} in the fleet: {devices:,} of them chosen by seed {seed}"
        return rng.permutation(have)[:devices], np.zeros(devices), (told,)
    shift_s = np.concatenate((np.zeros(have), rng.uniform(0.0, trace.duration_s, devices - have)))
    told = (
        f"{have:,} devices in the trace, {devices:,} in the fleet: used up to {-(-devices // have)} times each, "
        f"the copies shifted by up to {format_duration(trace.duration_s)} by seed {seed}"
    )
    return np.arange(devices) % have, shift_s, (told,)


def _events(
    trace: AvailabilityTrace, source: Indices, phase_s: Floats, speed_up: float
) -> tuple[tuple[Event, ...], NDArray[np.bool_]]:
    of, start_s, end_s = trace.by_device()
    counts = np.bincount(of, minlength=len(trace))
    first = np.cumsum(counts) - counts
    mine = counts[source]
    owner = np.repeat(np.arange(len(source)), mine)
    row = np.arange(len(owner)) + np.repeat(first[source] - (np.cumsum(mine) - mine), mine)

    def run_time(moments: Floats) -> Floats:
        into = np.mod(moments[row] - phase_s[owner], trace.duration_s)
        at_s: Floats = np.where(into == 0, trace.duration_s, into) / speed_up  # an event due at 0 has happened
        return at_s

    # A session that spans the end of the trace leaves and joins at the same time, which is no event: events of one
    # device at the same time cancel.
    device, at_s = np.tile(owner, 2), np.concatenate((run_time(start_s), run_time(end_s)))
    change = np.repeat([1, -1], len(owner))
    order = np.lexsort((at_s, device))
    device, at_s, change = device[order], at_s[order], change[order]
    if len(order):
        new = np.concatenate(([True], (np.diff(device) != 0) | (np.diff(at_s) != 0)))
        change = np.add.reduceat(change, np.flatnonzero(new))
        device, at_s = device[new], at_s[new]
        device, at_s, change = device[change != 0], at_s[change != 0], change[change != 0]

    present = np.zeros(len(source), dtype=np.bool_)
    present[owner[(start_s[row] <= phase_s[owner]) & (phase_s[owner] < end_s[row])]] = True
    moving, earliest = np.unique(device, return_index=True)
    # a device whose first event is a leave is present at 0, even where rounding moved an edge
    present[moving] = change[earliest] < 0

    order = np.lexsort((device, at_s))
    rows = zip(at_s[order].tolist(), device[order].tolist(), change[order].tolist(), strict=True)
    return tuple(Event(at, index, JOIN if way > 0 else LEAVE) for at, index, way in rows), present


@dataclass(frozen=True, slots=True)
class ChurnAudit:
    """Injected against scheduled; delays of the events that are in both."""

    scheduled: int
    injected: int
    leaves: int  # scheduled
    joins: int  # scheduled
    missing: tuple[Event, ...]  # scheduled, not injected
    extra: tuple[Event, ...]  # injected, not scheduled
    mean_delay_s: float
    worst_delay_s: float
    worst: Event | None  # the scheduled event with the longest delay

    @property
    def complete(self) -> bool:
        return not self.missing and not self.extra

    def as_dict(self) -> dict[str, Any]:
        """For the results folder."""
        named = {"missing": [e._asdict() for e in self.missing], "extra": [e._asdict() for e in self.extra]}
        worst = self.worst._asdict() if self.worst else None
        return asdict(self) | named | {"worst": worst, "complete": self.complete}


def audit(
    injected: Iterable[tuple[float, int, str]],
    schedule: Schedule,
    until_s: float | None = None,
    early_s: float = EARLY_S,
) -> ChurnAudit:
    """`until_s` is when the injector last looked (None: one pass through the trace); later events do not count as
    missing. An injected event is matched with the latest unmatched scheduled event of its device and kind that was due
    by then, so that one omitted event does not make all later ones look late."""
    due = schedule.until(schedule.period_s if until_s is None else until_s)
    asked: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in reversed(due):
        asked[event.device, event.what].append(event)  # the earliest is last
    waiting: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    done = sorted(Event(*event) for event in injected)
    extra: list[Event] = []
    delays: list[tuple[float, Event]] = []
    for event in done:
        key = event.device, event.what
        while asked[key] and asked[key][-1].at_s <= event.at_s + early_s:
            waiting[key].append(asked[key].pop())
        if waiting[key]:
            answered = waiting[key].pop()
            delays.append((event.at_s - answered.at_s, answered))
        else:
            extra.append(event)
    missing = sorted(event for left in (asked, waiting) for events in left.values() for event in events)
    worst_s, worst = max(delays, default=(0.0, None), key=lambda delay: delay[0])
    return ChurnAudit(
        scheduled=len(due),
        injected=len(done),
        leaves=sum(event.what == LEAVE for event in due),
        joins=sum(event.what == JOIN for event in due),
        missing=tuple(missing),
        extra=tuple(extra),
        mean_delay_s=math.fsum(delay for delay, _ in delays) / len(delays) if delays else 0.0,
        worst_delay_s=worst_s,
        worst=worst,
    )
