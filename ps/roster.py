"""Which number each device has, what it is called, and over which connection it is reached.

Numbers are for the results: whatever a device returned stays under its number and its name. Of those that leave without
having returned anything the latest are remembered, `MOST_IDLE` of them; then their numbers are given to others. So what
the server keeps grows with the work that was done for it, and not with how often somebody comes and goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ps.events import DevicesJoined
from ps.peers import Peer

MOST_IDLE = 1000


class Roster:
    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self.labels: list[str] = []  # one a number
        self.peer_of: list[Peer] = []  # by number
        self.suspended: dict[int, str] = {}  # who gets no more work -> why
        self.joined = 0  # devices, ever
        self.most_idle = most_idle
        self._idle: deque[int] = deque()  # numbers of those who left and have returned nothing, the latest last

    @property
    def forgotten(self) -> int:
        """Devices of which no name is known any more."""
        return self.joined - len(self.labels)

    def enter(self, peer: Peer, labels: Sequence[str], profiles: NDArray[np.void]) -> DevicesJoined:
        """Devices of this connection get numbers that others had, if there are any to be had, and then new ones."""
        again: list[int] = []
        while len(self._idle) > self.most_idle and len(again) < len(labels):
            again.append(self._idle.popleft())
        for number, label in zip(again, labels, strict=False):
            self.peer_of[number].drop(number)
            self.peer_of[number], self.labels[number] = peer, label
            self.suspended.pop(number, None)
        first, new = len(self.labels), labels[len(again) :]
        self.labels += new
        self.peer_of += [peer] * len(new)
        self.joined += len(labels)
        joined = DevicesJoined(first, profiles, again)
        peer.add(joined.devices)
        return joined

    def left_idle(self, numbers: Iterable[int]) -> None:
        """They are gone for good and have returned nothing; who comes back is somebody new."""
        self._idle.extend(numbers)

    def closed(self, peer: Peer) -> None:
        """All its devices are gone, and nothing is kept of the connection."""
        for number in peer.index:
            self.peer_of[number] = NOBODY
        peer.close()


NOBODY = Peer(b"", {})  # what those who are gone are reached by
