"""Asking for admission at the server's entrance: HELLO, answered with a TICKET that says where to join, or REFUSED.

A device asks in two cases: on the server's own machine, where it gets a password for its connection, and with an
invitation, which enrols its key. A device whose key is enrolled joins directly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq

from agent.identity.keys import Credentials, Curve, Password
from agent.protocol.connection import HANDSHAKE_FAILED, not_ours
from agent.protocol.errors import UserError
from agent.protocol.wire import Hello, Refused, Ticket, VersionMismatch, WireError, decode, encode, send_frames

MAX_BYTES = 1 << 16  # of an answer
PATIENCE_S = 16.0  # the silence allowed to a server that has not announced its heartbeat interval


class EntranceConnection:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        hello: Hello,
        curve: Curve | None = None,
        count: Callable[[int], None] | None = None,
    ) -> None:
        """`curve`: keys, if the entrance is encrypted. `count`: called with the bytes of every message."""
        self.endpoint = endpoint
        self.their_version: int | None = None  # the server's protocol version, if it differs from ours
        self._curve, self._count = curve, count
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if curve is not None:
            curve.apply(self.socket)
            self.socket.setsockopt(zmq.RECONNECT_IVL, 500)
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(HANDSHAKE_FAILED)
        self.socket.connect(endpoint)
        frames = encode(hello)
        send_frames(self.socket, frames)
        self._counted(sum(map(len, frames)))

    def _counted(self, size: int) -> None:
        if self._count is not None:
            self._count(size)

    def answer(self) -> tuple[str, Credentials] | Refused | None:
        """Where to join and with which credentials, or the refusal; None while there is no answer."""
        with contextlib.suppress(zmq.Again):
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._counted(sum(len(frame) for frame in frames))
            try:
                match decode(frames):
                    case Ticket(port=port, password=password):
                        return self._entered(port, password)
                    case Refused() as refused:
                        return refused
            except VersionMismatch as error:
                self.their_version = error.theirs
                return not_ours(error, frames)
            except WireError:
                pass  # not a Cleave server; treat it as silence
        return None

    def _entered(self, port: int, password: str) -> tuple[str, Credentials]:
        if self._curve is not None:
            return "", self._curve  # join at the endpoint of the invitation
        return with_port(self.endpoint, port), Password(password)

    @property
    def turned_away(self) -> bool:
        """True if the handshake failed."""
        return bool(self._monitor.poll(0))

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)


def with_port(endpoint: str, port: int) -> str:
    return f"{endpoint.rpartition(':')[0]}:{port}"


def enter(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> tuple[str, Credentials]:
    """Where to join on this machine and with which credentials, or UserError."""
    entrance, deadline_s = EntranceConnection(context, endpoint, Hello(name)), time.monotonic() + PATIENCE_S
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            entrance.socket.poll(int(1000 * left_s) + 1)
            match entrance.answer():
                case (where, credentials):
                    return where, credentials
                case Refused(reason=reason):
                    raise UserError(f"{endpoint} refused: {reason}")
        raise UserError(f"no answer from {endpoint} within {PATIENCE_S:.0f} s: is a server running there?")
    finally:
        entrance.close()
