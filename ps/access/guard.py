"""Connections to the data endpoints that have not joined: how many, for how long, how much they send; how one is cut.

ZeroMQ tells of each connection that it accepts (its descriptor) and of each that is closed. A connection is ended by
shutting down its TCP socket, which belongs to ZeroMQ: it is looked at first, because the number of a descriptor is soon
given to another one. Limits of what comes before a key or a password is known: `Limits`, `FIRST_BYTES`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import zmq

from agent.protocol.arriving import Address, bytes_received, local_port, other_end
from agent.protocol.connection import HANDSHAKE_FAILED, next_event
from ps.access.admission import Refusals
from ps.access.visitors import Limits, Visitors

WATCHED = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
EVENTS_A_TURN = 256
UNJOINED = Limits(most=96, of_an_address=96, seconds=10.0)
# Beside them, as many as are enrolled, or whose key or ticket was found good in these seconds: a fleet that comes back
# all at once connects before ZeroMQ asks who it is. (300 devices took 56 s and 1,579 connections without.)
MOST_LET_IN = 4000
# Of this machine, past its password, and silent for so long although all that came was read: few, because their names
# may be chosen ones (ps/access/names.py). An agent's first word is right behind its ticket.
MOST_SILENT, SILENT_S = 8, 0.25
PASSWORD_BYTES = 100  # a greeting and a password take more
STALLED_S = 30.0  # so long a connection is borne whose JOIN may lie unread because the server's thread is busy
FIRST_BYTES = 1 << 20  # before its first message has been read
CROWDED_BYTES = 1 << 17  # the same, if there are many; joining takes up to 96 KiB
MORE_BYTES = 9 << 20  # after each message of one that does not join, but measures its line: the next one, encrypted
ALL_BYTES = 24 << 20  # of all that have not joined, what they have sent and nobody has read; then the largest go
MEASURING, MEASURING_LOCALLY = 1, 2  # connections of one key, and of this machine: the latest; it takes a second or two
MOST_PROBES = 100  # of one that does not join; measuring a line takes less than 64
LAST_BYTES = 1 << 16  # of one that is sent away before it has joined
LATER_S = 0.2  # what was said to a connection before it is cut gets so long to arrive

_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another server's key, or repeats what somebody else has sent",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not encrypt, or has no ticket of the entrance",
}


def why_refused(event: int, value: int, refusals: Refusals) -> None:
    """Whose handshake failed, as far as ZeroMQ says."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        refusals.refuse("", "a connection", _HANDSHAKES.get(value, "what it sent is no handshake"))
    elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        refusals.refuse("", "a connection", "it broke off the handshake: it does not encrypt, or is no device")


@dataclass(frozen=True, slots=True)
class _Joined:
    address: Address
    # More than one: a message of a connection that is closed was read after its number had been given to another one.
    identities: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Quota:
    """Of a connection that has not joined."""

    most_bytes: int  # that may have come over it
    read_bytes: int = 0  # that had come with what was read of it last
    probes: int = 0


class Guard:
    """`attend` in the entrance's thread, the rest in the server's."""

    def __init__(self, router: zmq.Socket[bytes], refusals: Refusals) -> None:
        self.monitor: zmq.Socket[bytes] = router.get_monitor_socket(WATCHED)
        self.expected = 0  # connections of pods that may come all at once
        self._router, self._refusals = router, refusals
        self.local_port = 0  # where those of this machine come in with tickets
        self.enrolled = 0  # devices that may come all at once, likewise
        self.all_read_s = time.monotonic()  # when the server's thread had read all that had come
        self._let_in_s: deque[float] = deque(maxlen=MOST_LET_IN)
        self._lock = threading.Lock()
        self._unjoined = Visitors(UNJOINED)
        self._peer: dict[int, Address] = {}  # descriptor -> the other end's address
        self._joined: dict[int, _Joined] = {}
        self._quotas: dict[int, _Quota] = {}  # of those that have not joined
        self._measuring: dict[int, str] = {}  # of them, those that measure their line -> key; the latest last
        self._silent_s: dict[int, float] = {}  # of this machine, no word read yet -> since when
        self._cut_s: dict[int, tuple[float, Address]] = {}  # when, and which

    # ---- the server's thread

    def probed(self, descriptor: int, key: str) -> bool:
        """It was let in, and measures its line before it joins, for which it gets more time and more bytes; few do so
        at the same time. False: too often."""
        with self._lock:
            self._silent_s.pop(descriptor, None)
            if (quota := self._quotas.get(descriptor)) is None:
                return True  # the entrance's thread has not heard of it yet
            quota.probes += 1
            if quota.probes > MOST_PROBES:
                return False
            self._unjoined.heard(descriptor, time.monotonic())
            quota.read_bytes = bytes_received(descriptor)
            quota.most_bytes = quota.read_bytes + MORE_BYTES
            if descriptor not in self._measuring:
                self._measuring[descriptor] = key
                others = [other for other, of in self._measuring.items() if of == key]
                for other in others[: -MEASURING if key else -MEASURING_LOCALLY]:
                    self._end(other, self._peer.get(other))
            return True

    def send_away(self, descriptor: int) -> None:
        """It has not joined: what it still sends is not worth reading."""
        self.cut(descriptor, other_end(descriptor))
        with self._lock:
            if (quota := self._quotas.get(descriptor)) is not None:
                quota.most_bytes = min(quota.most_bytes, bytes_received(descriptor) + LAST_BYTES)

    def joined(self, descriptor: int, identity: bytes) -> Address | None:
        """The other end of its connection, which tells it from the next one with this descriptor; None: it is gone."""
        with self._lock:
            if (peer := other_end(descriptor)) is None:
                return None
            held = self._joined.get(descriptor)
            if held is None or held.address != peer:
                held = self._joined[descriptor] = _Joined(peer)
            held.identities.add(identity)
            self._no_more(descriptor)
            self._cut_s.pop(descriptor, None)
            return peer

    def left(self, descriptor: int, address: Address | None, identity: bytes) -> None:
        """It has joined no more."""
        with self._lock:
            held = self._joined.get(descriptor)
            if held is None or held.address != address:
                return  # its connection is gone, whatever has the number now
            held.identities.discard(identity)
            if held.identities:
                return
            del self._joined[descriptor]
            if self._peer.get(descriptor) == address:
                self._come(descriptor, str(held.address[0]), bytes_received(descriptor), FIRST_BYTES)

    def cut(self, descriptor: int, address: Address | None) -> None:
        """In a moment, unless another one has joined over it."""
        with self._lock:
            if address is not None and descriptor not in self._joined and other_end(descriptor) == address:
                self._cut_s.setdefault(descriptor, (time.monotonic() + LATER_S, address))

    # ---- the entrance's thread

    @property
    def busy(self) -> bool:
        """Is there somebody to be watched?"""
        return bool(self._unjoined) or bool(self._cut_s)

    def let_in(self, now_s: float) -> None:
        """One more, whose key or ticket is good: it may take its time to join, and keeps out nobody else."""
        self._let_in_s.append(now_s)

    def _spare(self, now_s: float) -> int:
        while self._let_in_s and self._let_in_s[0] <= now_s - self._unjoined.limits.seconds:
            self._let_in_s.popleft()
        return self.expected + min(MOST_LET_IN, max(self.enrolled, len(self._let_in_s)))

    def attend(self) -> bool:
        """True if a stranger was dealt with."""
        refused = False
        for _ in range(EVENTS_A_TURN):
            if not self.monitor.poll(0):
                break
            event, value = next_event(self.monitor)
            match event:
                case zmq.EVENT_ACCEPTED:
                    self._accepted(value)
                case zmq.EVENT_DISCONNECTED:
                    self._gone(value)
                case failed:
                    refused = True
                    why_refused(failed, value, self._refusals)
        return self.look(time.monotonic()) or refused

    def _accepted(self, descriptor: int) -> None:
        peer = other_end(descriptor)
        with self._lock:
            if self._cut_s.get(descriptor, (0.0, peer))[1] != peer:
                del self._cut_s[descriptor]
            if peer is None:
                return  # it is gone again
            self._peer[descriptor] = peer
            held = self._joined.get(descriptor)
            if held is None or held.address != peer:  # it may have joined before we heard that it came
                few = len(self._unjoined) < self._unjoined.limits.most
                self._come(descriptor, str(peer[0]), 0, FIRST_BYTES if few else CROWDED_BYTES)
                if self.local_port and local_port(descriptor) == self.local_port:
                    self._silent_s[descriptor] = time.monotonic()

    def _come(self, descriptor: int, address: str, read_bytes: int, more_bytes: int) -> None:
        self._no_more(descriptor)
        self._quotas[descriptor] = _Quota(read_bytes + more_bytes, read_bytes)
        now_s = time.monotonic()
        for crowded in self._unjoined.came(descriptor, address, now_s, self._spare(now_s)):
            self._end(crowded, self._peer.get(crowded))

    def _no_more(self, descriptor: int) -> None:
        """It is not one of those who have not joined."""
        self._unjoined.gone(descriptor)
        self._quotas.pop(descriptor, None)
        self._measuring.pop(descriptor, None)
        self._silent_s.pop(descriptor, None)

    def _gone(self, descriptor: int) -> None:
        """The server's thread may have spoken of the next one with its number before we hear that this is gone."""
        with self._lock:
            self._no_more(descriptor)
            peer = self._peer.pop(descriptor, None)
            if (held := self._joined.get(descriptor)) is not None and held.address == peer:
                del self._joined[descriptor]
            if (cut := self._cut_s.get(descriptor)) is not None and cut[1] == peer:
                del self._cut_s[descriptor]

    def look(self, now_s: float) -> bool:
        """Cut those that have to go. True if there were any."""
        with self._lock:
            over = self._unjoined.overdue(max(self.all_read_s, now_s - STALLED_S))
            over += self._too_much()
            over += self._too_silent()
            ends = [(descriptor, self._peer.get(descriptor)) for descriptor in over]
            ends += [(descriptor, address) for descriptor, (at_s, address) in self._cut_s.items() if at_s <= now_s]
            for descriptor, address in ends:
                self._end(descriptor, address)
        return bool(ends)

    def _too_much(self) -> list[int]:
        """Those who sent more than they may, and the largest, if it is too much in all."""
        waiting, over = [], []
        for descriptor in self._unjoined.all:
            quota, received = self._quotas[descriptor], bytes_received(descriptor)
            if received > quota.most_bytes:
                over.append(descriptor)
            else:
                waiting.append((received - quota.read_bytes, descriptor))
        total_bytes = sum(unread for unread, _ in waiting)
        for unread, descriptor in sorted(waiting, reverse=True) if total_bytes > ALL_BYTES else ():
            over.append(descriptor)
            total_bytes -= unread
            if total_bytes <= ALL_BYTES:
                break
        return over

    def _too_silent(self) -> list[int]:
        """The oldest of them, if there are too many."""
        before_s = self.all_read_s - SILENT_S
        silent = [
            descriptor
            for descriptor, since_s in self._silent_s.items()
            if since_s < before_s and bytes_received(descriptor) > PASSWORD_BYTES
        ]
        return silent[: max(0, len(silent) - MOST_SILENT)]

    def _end(self, descriptor: int, address: Address | None) -> None:
        """Shut it down, if it is still the connection that was meant."""
        if self._peer.get(descriptor) == address:
            self._no_more(descriptor)
        if (cut := self._cut_s.get(descriptor)) is not None and cut[1] == address:
            del self._cut_s[descriptor]
        if address is None or other_end(descriptor) != address:
            return  # it is closed
        with contextlib.suppress(OSError):
            view = socket.socket(fileno=descriptor)
            try:
                view.shutdown(socket.SHUT_RDWR)
            finally:
                view.detach()

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(linger=0)
