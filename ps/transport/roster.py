"""The number, name and connection of each device.

Numbers are for the results: what a device returned stays under its number and its name. Of the devices that leave
without having returned anything, the latest `MOST_IDLE` are remembered; the numbers of older ones are given to others.
So what the server keeps grows with the work done for it, not with how often devices come and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ps.scheduling.events import DevicesJoined
from ps.transport.peers import Peer

MOST_IDLE = 1000


class Roster:
    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self.labels: list[str] = []  # by number
        self.peer_of: list[Peer] = []  # by number
        self.suspended: dict[int, str] = {}  # devices that get no more work -> why
        self.joined = 0  # devices, ever
        self.most_idle = most_idle
        self._idle: deque[int] = deque()  # numbers of devices that left and have returned nothing, the latest last

    @property
    def forgotten(self) -> int:
        """Devices whose name is forgotten."""
        return self.joined - len(self.labels)

    def enter(self, peer: Peer, labels: Sequence[str], profiles: NDArray[np.void]) -> DevicesJoined:
        """Devices of this connection get numbers that can be reused, if there are any, and then new ones."""
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
        """These devices have left without returning anything. If one comes back, it counts as new."""
        self._idle.extend(numbers)

    def closed(self, peer: Peer) -> None:
        """All devices of this connection are gone; keep nothing of it."""
        for number in peer.index:
            self.peer_of[number] = NO_PEER
        peer.close()


NO_PEER = Peer(b"", {})  # the peer of devices that are gone
