"""Relays a few KiB between unknown clients and ZeroMQ: the only published sockets that they can reach.

ZeroMQ limits the size of frames, not of messages: a message that never ends grows until its connection is closed. So
unknown clients do not talk to ZeroMQ directly. Each has a TCP connection here, over which a few KiB pass each way
within a few seconds, and then it is closed. Behind it is a ZeroMQ socket for this call alone
(`ps/access/caller_sockets.py`).

Every connection is accepted at once, which costs almost nothing: if connections waited in the kernel, clients that only
connect would keep out all later ones. What costs more is rate-limited, in total and per address, and reserved for
clients that have sent something and are still connected.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import zmq

from ps.access.access_list import Budget
from ps.access.admission import Refusals
from ps.access.caller_sockets import CallerSocket
from ps.access.pending import Limits, PendingConnections

CARRIED_BYTES = 1 << 14  # each way: a handshake takes 1 KiB, a HELLO less, its answer up to 4
READ_BYTES = 4096
AT_ONCE = 256  # connections accepted before other work gets its turn
SECONDS = 10.0
LOCAL = Limits(most=128, per_address=128, seconds=SECONDS)
REMOTE = Limits(most=64, per_address=16, seconds=SECONDS)
MOST_ADDRESSES = 4096  # whose budgets are kept


@dataclass(frozen=True, slots=True)
class CallRate:
    """Limits on relayed calls: burst and per second, in total and per address. One call costs 0.7 ms of Python."""

    all: tuple[float, float]
    per_address: tuple[float, float]


LOCAL_CALLS = CallRate((128.0, 100.0), (128.0, 100.0))
REMOTE_CALLS = CallRate((64.0, 40.0), (24.0, 10.0))


@dataclass(slots=True)
class Call:
    outside: socket.socket
    address: str
    said: bytes = b""  # the client's first bytes, until the call's inner socket is open
    inside: CallerSocket | None = None
    up_left: int = CARRIED_BYTES
    down_left: int = CARRIED_BYTES


class Relay:
    def __init__(
        self,
        listener: socket.socket,
        open_socket: Callable[[], CallerSocket],
        refusals: Refusals,
        limits: Limits,
        calls: CallRate,
        now_s: float,
    ) -> None:
        """`open_socket`: opens the socket of one caller; may raise OSError or ZMQError."""
        listener.setblocking(False)
        self._listener, self._open_socket, self._refusals = listener, open_socket, refusals
        # separate, so that silent clients never displace one that has spoken
        self._silent, self._heard = (
            PendingConnections(replace(limits, seconds=limits.seconds / 2)),
            PendingConnections(limits),
        )
        self._rate, self._budget = calls, Budget.full(*calls.all, now_s)
        self._budgets: OrderedDict[str, Budget] = OrderedDict()  # by address
        self._calls: dict[int, Call] = {}  # by the descriptors of both ends
        self._waiting: dict[int, Call] = {}  # for an inner socket, by the descriptor outside

    @property
    def waiting(self) -> bool:
        """Whether calls wait for an inner socket."""
        return bool(self._waiting)

    def register(self, poller: zmq.Poller) -> None:
        """Register what to wait for in this turn."""
        poller.register(self._listener.fileno(), zmq.POLLIN)
        for descriptor, call in self._calls.items():
            if descriptor not in self._waiting:
                poller.register(descriptor, zmq.POLLIN)
            if call.inside is not None and descriptor == call.outside.fileno():
                poller.register(call.inside.zmq_socket, zmq.POLLIN)

    def attend(self, ready: Mapping[Any, int], now_s: float) -> bool:
        """Relay what has arrived. True if there was any work."""
        carried = False
        for descriptor in [d for d in self._calls if d in ready]:
            if (call := self._calls.get(descriptor)) is not None:
                carried = True
                if call.inside is None:
                    self._first_words(call, now_s)
                elif not _carry(call, call.inside, up=descriptor == call.outside.fileno()):
                    self._hang_up(call)
        for who in (*self._silent.overdue(now_s), *self._heard.overdue(now_s)):
            self._hang_up(self._calls[who])
        if self._waiting:
            carried = True
            self._open_sockets(now_s)
        if self._listener.fileno() in ready:
            carried = True
            self._accept(now_s)
        return carried

    def speaking(self, ready: Mapping[Any, int]) -> list[CallerSocket]:
        """Sockets with an incoming message."""
        sockets = [call.inside for d, call in self._calls.items() if call.inside and d == call.outside.fileno()]
        return [inside for inside in sockets if inside.zmq_socket in ready]

    def _accept(self, now_s: float) -> None:
        for _ in range(AT_ONCE):
            try:
                outside, address = self._listener.accept()
            except OSError:  # the client is gone, or no descriptors are left
                return
            outside.setblocking(False)
            self._calls[outside.fileno()] = Call(outside, address[0])
            for who in self._silent.came(outside.fileno(), address[0], now_s):
                self._hang_up(self._calls[who])

    def _first_words(self, call: Call, now_s: float) -> None:
        try:
            call.said = call.outside.recv(READ_BYTES)
        except OSError:
            call.said = b""
        if not call.said:  # the client closed without sending anything
            self._hang_up(call)
            return
        who = call.outside.fileno()
        self._waiting[who] = call
        self._silent.gone(who)
        for crowded in self._heard.came(who, call.address, now_s):
            self._hang_up(self._calls[crowded])

    def _open_sockets(self, now_s: float) -> None:
        """Open inner sockets as budgets allow, in random order: a flooding client cannot arrange to be first."""
        for call in random.sample(list(self._waiting.values()), len(self._waiting)):
            of_its_address = self._of_address(call.address, now_s)
            if not _is_there(call.outside):
                self._hang_up(call)
            elif of_its_address.take(1, now_s):
                if not self._budget.take(1, now_s):
                    of_its_address.left += 1
                    return
                self._let_in(call)

    def _of_address(self, address: str, now_s: float) -> Budget:
        if address not in self._budgets:
            self._budgets[address] = Budget.full(*self._rate.per_address, now_s)
            if len(self._budgets) > MOST_ADDRESSES:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(address)
        return self._budgets[address]

    def _let_in(self, call: Call) -> None:
        self._waiting.pop(call.outside.fileno())
        try:
            call.inside = self._open_socket()
            self._calls[call.inside.line.fileno()] = call
            sent = call.inside.line.send(call.said)
        except (OSError, zmq.ZMQError):  # no descriptors are left
            sent = -1
        call.up_left -= len(call.said)
        if sent != len(call.said):
            self._hang_up(call)
        call.said = b""

    def _hang_up(self, call: Call) -> None:
        who = call.outside.fileno()
        self._silent.gone(who)
        self._heard.gone(who)
        self._waiting.pop(who, None)
        self._calls.pop(who, None)
        if call.inside is not None:
            self._calls.pop(call.inside.line.fileno(), None)
            call.inside.close(self._refusals)
        with contextlib.suppress(OSError):
            call.outside.close()

    def close(self) -> None:
        while self._calls:
            self._hang_up(next(iter(self._calls.values())))
        self._listener.close()


def _carry(call: Call, inside: CallerSocket, up: bool) -> bool:
    """Relay once; False if the call is over. The total fits into the kernel's buffers, so nothing is queued here."""
    source, target = (call.outside, inside.line) if up else (inside.line, call.outside)
    left = call.up_left if up else call.down_left
    try:
        data = source.recv(min(READ_BYTES, left))
        if not data or target.send(data) != len(data):
            return False
    except OSError:
        return False
    if up:
        call.up_left -= len(data)
    else:
        call.down_left -= len(data)
    return left > len(data)


def _is_there(outside: socket.socket) -> bool:
    """False if the client has closed or reset the connection."""
    try:
        return bool(outside.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
