"""How many devices are present, so that other threads can wait for them; which are real, and why some have left.

The planner needs none of this. A pod declares itself as one; every other peer is a real device. What devices say of
themselves is kept within bounds, however often they come and go.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.protocol.units import format_duration
from ps.scheduling.events import NameStragglers

MOST = 1000  # departures and devices that are kept
MOST_PROFILE = 1 << 16  # characters of a profile
MOST_DEVICE = 512  # characters of a device's own name; agents send 33 and the name that people read
NAMED = 5  # devices per notice
LOST, LEFT, SUSPENDED = "lost", "left", "suspended"  # how devices go


@dataclass(slots=True)
class Departure:
    """A real device that left politely."""

    name: str
    reason: str
    until_s: float | None  # seconds after it left, as far as its owner knows
    blocks: int  # blocks that it handed back
    at_s: float
    back_s: float | None = None  # when it joined again


class Attendance:
    def __init__(self) -> None:
        self.count = 0  # devices there now, of both kinds
        self.real: set[int] = set()  # ids of devices that are not emulated
        self.present: set[int] = set()  # those of them that are there now
        self.forgotten = 0  # real devices that left without having returned anything, and whose number was reused
        self.departures: list[Departure] = []
        self.departed: Counter[str] = Counter()  # devices of both kinds, by how: LOST, LEFT, SUSPENDED
        self.departed_real: Counter[str] = Counter()  # those of them that are real
        self.arrived = 0  # devices of both kinds, ever
        self.least = self.least_real = 0  # fewest devices at a time, emulated and real, since `mark`
        self.about: dict[str, dict[str, str]] = {}  # what they say of themselves, by name: a stranger's text
        self.away: dict[str, str] = {}  # devices that have not joined because their owner does not allow it -> why
        self._connection: dict[str, bytes] = {}  # device by its own name -> its connection
        self._over = False
        self._changed = threading.Condition()

    # ---- for other threads

    def wait_for(self, count: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count or self._over, timeout_s)

    def wait_for_real(self, count: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.present) >= count or self._over, timeout_s)

    # ---- the server's thread

    def moved(self, about: Mapping[str, str], identity: bytes) -> bytes:
        """A device comes by this connection. Returns the earlier connection of the same real device, if there is
        another: a phone that changes its network is back before its old connection is missed."""
        device = about.get("device", "")
        if not device or len(device) > MOST_DEVICE or about.get("kind") == "pod":
            return b""
        before = self._connection.pop(device, b"")
        if len(self._connection) < MOST:
            self._connection[device] = identity
        return before if before != identity else b""

    def joined(self, ids: Sequence[int], labels: Sequence[str], about: Mapping[str, str], at_s: float) -> None:
        """These devices take part from now on."""
        self.forgotten += len(self.real.intersection(ids))
        if about.get("kind") == "pod":
            self.real.difference_update(ids)
        else:
            self.real.update(ids)
            for label in labels:
                self.away.pop(label, None)
            for departure in self.departures:
                if departure.back_s is None and departure.name in labels:
                    departure.back_s = at_s
            if len(self.about) < MOST:
                kept = {key: about[key] for key in ("profile", "system") if key in about}
                self.about[labels[0]] = {key: text for key, text in kept.items() if len(text) <= MOST_PROFILE}
        with self._changed:
            self.count += len(ids)
            self.arrived += len(ids)
            self.present.update(self.real.intersection(ids))
            self._changed.notify_all()

    def gone(self, ids: Sequence[int], how: str = LOST) -> None:
        real = len(self.present.intersection(ids))
        self.departed[how] += len(ids)
        self.departed_real[how] += real
        with self._changed:
            self.count -= len(ids)
            self.present.difference_update(ids)
            self.least = min(self.least, self.count - len(self.present))
            self.least_real = min(self.least_real, len(self.present))

    def mark(self) -> None:
        """Start recording the fewest devices at a time."""
        with self._changed:
            self.least, self.least_real = self.count - len(self.present), len(self.present)

    def end(self) -> None:
        """No device will join from now on: release waiting threads."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def left(self, device: int, name: str, reason: str, until_s: float | None, blocks: int, at_s: float) -> str:
        """A message for people; empty for an emulated device."""
        if device not in self.real:
            return ""
        if len(self.departures) < MOST:
            self.departures.append(Departure(name, reason, until_s, blocks, at_s))
        back = _back(until_s)
        handed = f"; its {blocks} blocks go to the others" if blocks else ""
        return f"{name} has left: {reason}{back}{handed}"

    def stays_away(self, name: str, reason: str, until_s: float | None) -> str:
        """A message for people about a device that would like to join and may not; empty if it was given before."""
        if self.away.get(name) == reason or (name not in self.away and len(self.away) >= MOST):
            return ""
        self.away[name] = reason
        return f"{name} stays away: {reason}{_back(until_s)}"


def _back(until_s: float | None) -> str:
    return "" if until_s is None else f"; it may be back in {format_duration(until_s)}"


def stragglers_named(found: NameStragglers, labels: Sequence[str]) -> str:
    """Text for people; names only some of the devices if there are many."""
    waited_s, expected_s = found.waited_s[0], found.expected_s[0]
    names = ", ".join(labels[device] for device in found.devices[:NAMED])
    more = len(found.devices) - NAMED
    others = f" and {more:,} others have" if more > 0 else " has" if len(found.devices) == 1 else " have"
    return f"{names}{others} not answered a block for {waited_s:.1f} s ({expected_s:.1f} s expected): " + (
        "no other device is there to compute it" if found.alone else "others compute it too"
    )
