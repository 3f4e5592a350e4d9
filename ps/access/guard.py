"""Limits the number, time and bytes of connections to the data endpoints that have not joined, and cuts them.

ZeroMQ reports each connection that it accepts (with its descriptor) and each that is closed. A connection is ended by
shutting down its TCP socket, which belongs to ZeroMQ. The peer's address is checked first, because descriptors are soon
reused. Limits before a key or password is known: `Limits`, `FIRST_BYTES`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field

import zmq

from agent.protocol.arriving import Address
from agent.protocol.connection import HANDSHAKE_FAILED, next_event
from ps.access.admission import Refusals
from ps.access.pending import Limits, PendingConnections
from ps.outside import Machine, Outside

WATCHED = HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
EVENTS_PER_TURN = 256
UNJOINED = Limits(most=96, per_address=96, seconds=10.0)
# Limit on connections allowed beyond UNJOINED: one per enrolled device, or per key and ticket accepted in the last
# UNJOINED.seconds. A fleet that returns all at once connects before ZeroMQ checks its keys. (Without this, 300 devices
# took 56 s and 1,579 connections.)
MOST_LET_IN = 4000
# Limit on local connections that have sent a password and stay silent although the server has read everything: few,
# because the clients may have chosen their routing ids (ps/access/routing_ids.py). An agent sends its first message
# right after its ticket.
MOST_SILENT, SILENT_S = 8, 0.25
PASSWORD_BYTES = 100  # a greeting and a password take more
STALLED_S = 30.0  # longest wait for a connection whose JOIN may be unread because the server's thread is busy
FIRST_BYTES = 1 << 20  # per connection, before its first message has been read
# The same, if there are many connections, or one has sent too many frames; joining takes up to 96 KiB
CROWDED_BYTES = 1 << 17
MORE_BYTES = 9 << 20  # after each message of a connection that measures its link before joining: one more, encrypted
ALL_BYTES = 24 << 20  # unread bytes of all connections that have not joined; beyond this the largest are cut
MEASURING, MEASURING_LOCALLY = 1, 2  # newest connections per key, and on this machine, that may measure (1-2 s each)
# Unread for SILENT_S although the server has read everything, from a client of this machine: a message that it does not
# finish. ZeroMQ keeps its frames, and a frame of 2 bytes, unencrypted, costs 32 times as much; an agent sends at once.
UNFINISHED_BYTES = 1 << 16
MOST_PROBES = 100  # per connection that has not joined; measuring a link takes fewer than 64
LAST_BYTES = 1 << 16  # from a connection that is dismissed before it has joined
LATER_S = 0.2  # time for the last message to arrive before a connection is cut

_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another server's key, or replays messages of another connection",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not encrypt, or has no ticket from the entrance",
}


def why_refused(event: int, value: int, refusals: Refusals) -> None:
    """Log why a handshake failed, as far as ZeroMQ says."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        refusals.refuse("", "a connection", _HANDSHAKES.get(value, "what it sent is no handshake"))
    elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        refusals.refuse("", "a connection", "it broke off the handshake: it does not encrypt, or is no device")


@dataclass(frozen=True, slots=True)
class _Joined:
    address: Address
    # More than one: a message of a closed connection was read after its descriptor had been reused.
    identities: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Quota:
    """Limits of a connection that has not joined."""

    most_bytes: int  # limit on bytes arrived
    read_bytes: int = 0  # bytes arrived when its last message was read
    probes: int = 0
    is_local: bool = False
    unfinished_s: float = math.inf  # since when it has had UNFINISHED_BYTES unread


class Guard:
    """`attend` runs in the entrance's thread, everything else in the server's."""

    def __init__(self, router: zmq.Socket[bytes], refusals: Refusals, outside: Outside | None = None) -> None:
        self._outside: Outside = outside or Machine()
        self.monitor: zmq.Socket[bytes] = router.get_monitor_socket(WATCHED)
        self.expected = 0  # connections of pods that may come at once
        self._router, self._refusals = router, refusals
        self.local_port = 0  # where local devices connect with tickets
        self.enrolled = 0  # enrolled devices that may come at once
        self.all_read_s = self._outside.now_s()  # when the server's thread had last read everything
        self.idle = False  # the server's thread waits for something to read
        self._wary_until_s = 0.0  # until then, new connections have fewer bytes
        self._let_in_s: deque[float] = deque(maxlen=MOST_LET_IN)
        self._lock = threading.Lock()
        self._unjoined = PendingConnections(UNJOINED)
        self._peer: dict[int, Address] = {}  # descriptor -> address of the other end
        self._line = 0  # number of the latest connection that was let in
        self._before: dict[int, int] = {}  # descriptor -> that number when its connection was accepted
        self._failed = False  # a handshake failed, which `attend` has not reported yet
        self._joined: dict[int, _Joined] = {}
        self._quotas: dict[int, _Quota] = {}  # of connections that have not joined
        self._measuring: dict[int, str] = {}  # connections that measure their link -> key; the newest last
        self._silent_s: dict[int, float] = {}  # local connections without a message read yet -> since when
        self._cut_s: dict[int, tuple[float, Address]] = {}  # when to cut, and which connection

    # ---- the server's thread

    def probed(self, descriptor: int, key: str) -> bool:
        """An admitted connection measures its link before it joins, and gets more time and more bytes; few may do so at
        the same time. False if it measures too often."""
        with self._lock:
            self._silent_s.pop(descriptor, None)
            if (quota := self._quotas.get(descriptor)) is None:
                return True  # the entrance's thread has not seen it yet
            quota.probes += 1
            if quota.probes > MOST_PROBES:
                return False
            self._unjoined.heard(descriptor, self._outside.now_s())
            quota.read_bytes = self._outside.bytes_received(descriptor)
            quota.most_bytes = quota.read_bytes + MORE_BYTES
            if descriptor not in self._measuring:
                self._measuring[descriptor] = key
                others = [other for other, of in self._measuring.items() if of == key]
                for other in others[: -MEASURING if key else -MEASURING_LOCALLY]:
                    self._end(other, self._peer.get(other))
            return True

    def other_end(self, descriptor: int, line: int | None) -> Address | None:
        """The other end of the connection that was let in as number `line`; None if it is gone. When its last message
        is read, its descriptor may belong to the connection of another client, even to one at the entrance."""
        with self._lock:
            end = self._peer.get(descriptor)
            another = line is not None and line <= self._before.get(descriptor, 0)
            return None if another or self._outside.other_end(descriptor) != end else end

    def send_away(self, descriptor: int, line: int | None) -> None:
        """Cut a connection that has not joined; until then, allow it few further bytes."""
        if (end := self.other_end(descriptor, line)) is None:
            return
        self.cut(descriptor, end)
        with self._lock:
            if (quota := self._quotas.get(descriptor)) is not None:
                quota.most_bytes = min(quota.most_bytes, self._outside.bytes_received(descriptor) + LAST_BYTES)

    def joined(self, descriptor: int, identity: bytes) -> Address | None:
        """Record that devices joined over this connection. Returns the peer's address, which distinguishes it from the
        next connection with this descriptor; None if the connection is gone."""
        with self._lock:
            if (peer := self._outside.other_end(descriptor)) is None:
                return None
            held = self._joined.get(descriptor)
            if held is None or held.address != peer:
                held = self._joined[descriptor] = _Joined(peer)
            held.identities.add(identity)
            self._no_more(descriptor)
            self._cut_s.pop(descriptor, None)
            return peer

    def left(self, descriptor: int, address: Address | None, identity: bytes) -> None:
        """Record that the devices of this connection have left."""
        with self._lock:
            held = self._joined.get(descriptor)
            if held is None or held.address != address:
                return  # the connection is gone; the descriptor may be in use again
            held.identities.discard(identity)
            if held.identities:
                return
            del self._joined[descriptor]
            if self._peer.get(descriptor) == address:
                self._come(descriptor, str(held.address[0]), self._outside.bytes_received(descriptor), FIRST_BYTES)

    def cut(self, descriptor: int, address: Address | None, at_once: bool = False) -> None:
        """Cut the connection soon, unless devices have joined over it by then. `at_once`: its last message need not
        reach it."""
        with self._lock:
            if (
                address is not None
                and descriptor not in self._joined
                and self._outside.other_end(descriptor) == address
            ):
                now_s = self._outside.now_s()
                if at_once:
                    self._cut_s[descriptor] = now_s, address
                self._cut_s.setdefault(descriptor, (now_s + LATER_S, address))

    def be_wary(self, seconds: float) -> None:
        """A connection has sent what costs most per byte: for a while, all that are new have few bytes."""
        with self._lock:
            self._wary_until_s = max(self._wary_until_s, self._outside.now_s() + seconds)
            for quota in self._quotas.values():
                if not quota.read_bytes:
                    quota.most_bytes = min(quota.most_bytes, CROWDED_BYTES)

    # ---- the entrance's thread

    @property
    def busy(self) -> bool:
        """Whether any connection needs watching."""
        return bool(self._unjoined) or bool(self._cut_s)

    def let_in(self, now_s: float, line: int) -> None:
        """Allow one more connection, number `line`, whose key or ticket is valid: it may take its time to join without
        displacing others."""
        self._let_in_s.append(now_s)
        self._line = line

    def _spare(self, now_s: float) -> int:
        while self._let_in_s and self._let_in_s[0] <= now_s - self._unjoined.limits.seconds:
            self._let_in_s.popleft()
        return self.expected + min(MOST_LET_IN, max(self.enrolled, len(self._let_in_s)))

    def attend(self) -> bool:
        """Handle ZeroMQ's reports and check limits. True if a handshake failed or a connection was cut."""
        self.hear()
        failed, self._failed = self._failed, False
        return self.look(self._outside.now_s()) or failed

    def hear(self) -> bool:
        """Handle ZeroMQ's reports. False if there are more."""
        for _ in range(EVENTS_PER_TURN):
            if not self.monitor.poll(0):
                return True
            event, value = next_event(self.monitor)
            match event:
                case zmq.EVENT_ACCEPTED:
                    self._accepted(value)
                case zmq.EVENT_DISCONNECTED:
                    self._gone(value)
                case failed:
                    self._failed = True
                    why_refused(failed, value, self._refusals)
        return False

    def _accepted(self, descriptor: int) -> None:
        peer = self._outside.other_end(descriptor)
        with self._lock:
            if self._cut_s.get(descriptor, (0.0, peer))[1] != peer:
                del self._cut_s[descriptor]
            if peer is None:
                return  # the connection is gone already
            self._peer[descriptor], self._before[descriptor] = peer, self._line
            held = self._joined.get(descriptor)
            if held is None or held.address != peer:  # devices may join before ZeroMQ reports the connection
                few = len(self._unjoined) < self._unjoined.limits.most and self._outside.now_s() >= self._wary_until_s
                is_local = bool(self.local_port) and self._outside.local_port(descriptor) == self.local_port
                self._come(descriptor, str(peer[0]), 0, FIRST_BYTES if few else CROWDED_BYTES, is_local)
                if is_local:
                    self._silent_s[descriptor] = self._outside.now_s()

    def _come(self, descriptor: int, address: str, read_bytes: int, more_bytes: int, is_local: bool = False) -> None:
        self._no_more(descriptor)
        self._quotas[descriptor] = _Quota(read_bytes + more_bytes, read_bytes, is_local=is_local)
        now_s = self._outside.now_s()
        for crowded in self._unjoined.came(descriptor, address, now_s, self._spare(now_s)):
            self._end(crowded, self._peer.get(crowded))

    def _no_more(self, descriptor: int) -> None:
        """Stop treating this as a connection that has not joined."""
        self._unjoined.gone(descriptor)
        self._quotas.pop(descriptor, None)
        self._measuring.pop(descriptor, None)
        self._silent_s.pop(descriptor, None)

    def _gone(self, descriptor: int) -> None:
        """Forget a closed connection. The server's thread may already know the next one with this descriptor."""
        with self._lock:
            self._no_more(descriptor)
            peer = self._peer.pop(descriptor, None)
            self._before.pop(descriptor, None)
            if (held := self._joined.get(descriptor)) is not None and held.address == peer:
                del self._joined[descriptor]
            if (cut := self._cut_s.get(descriptor)) is not None and cut[1] == peer:
                del self._cut_s[descriptor]

    def look(self, now_s: float) -> bool:
        """Cut the connections that exceed their limits. True if there were any."""
        with self._lock:
            over = self._unjoined.overdue(max(self.all_read_s, now_s - STALLED_S))
            over += self._too_much(now_s)
            over += self._too_silent()
            ends = [(descriptor, self._peer.get(descriptor)) for descriptor in over]
            ends += [(descriptor, address) for descriptor, (at_s, address) in self._cut_s.items() if at_s <= now_s]
            for descriptor, address in ends:
                self._end(descriptor, address)
        return bool(ends)

    def _too_much(self, now_s: float) -> list[int]:
        """Connections that sent more than they may, or do not finish a message, and the largest ones if the total is
        too large."""
        waiting, over = [], []
        read_s = now_s if self.idle else self.all_read_s
        for descriptor in self._unjoined.all:
            quota, received = self._quotas[descriptor], self._outside.bytes_received(descriptor)
            unread = received - quota.read_bytes
            quota.unfinished_s = min(quota.unfinished_s, now_s) if unread > UNFINISHED_BYTES else math.inf
            unfinished = quota.is_local and quota.unfinished_s < read_s - SILENT_S
            if received > quota.most_bytes or unfinished:
                over.append(descriptor)
            else:
                waiting.append((unread, descriptor))
        total_bytes = sum(unread for unread, _ in waiting)
        for unread, descriptor in sorted(waiting, reverse=True) if total_bytes > ALL_BYTES else ():
            over.append(descriptor)
            total_bytes -= unread
            if total_bytes <= ALL_BYTES:
                break
        return over

    def _too_silent(self) -> list[int]:
        """The oldest silent connections, if there are too many."""
        before_s = self.all_read_s - SILENT_S
        silent = [
            descriptor
            for descriptor, since_s in self._silent_s.items()
            if since_s < before_s and self._outside.bytes_received(descriptor) > PASSWORD_BYTES
        ]
        return silent[: max(0, len(silent) - MOST_SILENT)]

    def _end(self, descriptor: int, address: Address | None) -> None:
        """Shut the connection down, if the descriptor still belongs to it."""
        if self._peer.get(descriptor) == address:
            self._no_more(descriptor)
        if (cut := self._cut_s.get(descriptor)) is not None and cut[1] == address:
            del self._cut_s[descriptor]
        if address is None or self._outside.other_end(descriptor) != address:
            return  # it is closed
        self._outside.shut(descriptor)

    def close(self) -> None:
        self._router.disable_monitor()
        self.monitor.close(linger=0)
