"""Connections that are not admitted yet: how many, from which address, and for how long. Pure: no sockets, no clock.

Beyond a limit, each new connection displaces the oldest of its own address (limit per address) or of the address with
the most (limit in total). So silent connections never keep others out: a device that speaks promptly gets in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    most: int  # at the same time
    per_address: int
    seconds: float  # until a connection is admitted or cut


@dataclass(slots=True)
class _Pending:
    address: str
    until_s: float


class PendingConnections:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._here: OrderedDict[int, _Pending] = OrderedDict()  # in the order of their deadlines
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._here)

    def __contains__(self, who: int) -> bool:
        return who in self._here

    @property
    def all(self) -> list[int]:
        return list(self._here)

    def came(self, who: int, address: str, now_s: float, spare: int = 0) -> list[int]:
        """Add a connection, and return those that it displaces. `spare`: connections allowed beyond the limits."""
        self.gone(who)
        self._here[who] = _Pending(address, now_s + self.limits.seconds)
        self._from[address] += 1
        crowded = ""
        if self._from[address] > self.limits.per_address + spare:
            crowded = address
        elif len(self._here) > self.limits.most + spare:
            crowded = self._from.most_common(1)[0][0]
        if not crowded:
            return []
        oldest = next(number for number, pending in self._here.items() if pending.address == crowded)
        self.gone(oldest)
        return [oldest]

    def heard(self, who: int, now_s: float) -> None:
        """Restart the connection's time limit."""
        if (pending := self._here.get(who)) is not None:
            pending.until_s = now_s + self.limits.seconds
            self._here.move_to_end(who)

    def gone(self, who: int) -> None:
        """Remove a connection that was admitted, cut or closed."""
        if (pending := self._here.pop(who, None)) is not None:
            self._from[pending.address] -= 1
            if not self._from[pending.address]:
                del self._from[pending.address]

    def overdue(self, now_s: float) -> list[int]:
        """Connections whose time is up; they are removed."""
        due = []
        for who, pending in self._here.items():
            if pending.until_s > now_s:
                break
            due.append(who)
        for who in due:
            self.gone(who)
        return due
