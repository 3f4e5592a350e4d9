"""A device's end of the line to the server: connect, join, heartbeats, silence.

Used by the agent (one device) and by pods (many). One socket, one thread. It never waits without a limit: `receive`
returns after its timeout, and `lost` says when the server has been silent for too long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from agent.arriving import NO_CONNECTION, arrived_within, descriptor
from agent.keys import Curve
from agent.wire import (
    MAX_FRAME_BYTES,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refused,
    VersionMismatch,
    Welcome,
    WireError,
    decode,
    encode,
    refusal_of_another_version,
    send_frames,
)

log = logging.getLogger(__name__)

RECONNECT_MS = (500, 10_000)  # of an encrypted line: whoever is turned away does not come back ten times a second
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SILENT_AFTER = 8  # heartbeats without a word from the other side


class Connection:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        join: Join | Leave,
        *,
        receive_ahead: int = 0,
        curve: Curve | None = None,
        count: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        arrived_within: Callable[[int, float], bool] = arrived_within,
    ) -> None:
        """`join`: what is said first. `receive_ahead`: messages taken off the network before they are asked for, at
        most; 0 is no limit. `curve`: keys of an encrypted line; without them it is plain. `count`: told the bytes of
        every message. `arrived_within`: see agent.arriving; it is the kernel's clock that tells."""
        self.endpoint = endpoint
        self.their_version: int | None = None  # of the protocol, where it is not ours
        self._count = count
        self.joined: Welcome | None = None
        self._clock, self._arrived_within = clock, arrived_within
        self._heartbeat_s = 2.0  # until the server says otherwise
        self._spoke = self._turned = clock()
        self._silent_s = 0.0  # see beat
        self._descriptor = NO_CONNECTION  # of the connection over which the latest message came
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # what waits here is bounded by the server's credit
        self.socket.setsockopt(zmq.RCVHWM, receive_ahead)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor: zmq.Socket[bytes] | None = None
        if curve is not None:
            curve.apply(self.socket)
            self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
            self._monitor = self.socket.get_monitor_socket(HANDSHAKE_FAILED)
        self.socket.connect(endpoint)
        self.send(join)

    def send(self, message: Message) -> None:
        frames = encode(message)
        send_frames(self.socket, frames)
        if self._count is not None:
            self._count(sum(memoryview(frame).nbytes for frame in frames))
        self._spoke = self._clock()

    def babble(self, nonsense: bytes) -> None:
        """Emulated faults: what is no message."""
        self.socket.send(nonsense)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None when there is none within the timeout. Heartbeats are dealt with here."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        frames = self.socket.recv_multipart(copy=False)
        if self._count is not None:
            self._count(sum(len(frame) for frame in frames))
        try:
            message = decode(frames)
        except VersionMismatch as error:
            self.their_version = error.theirs
            said = refusal_of_another_version(frames) or Refused("", final=True)
            return replace(said, reason=f"{error}; install the same release on both sides", final=True)
        except WireError as error:
            log.warning("dropped a message from %s: %s", self.endpoint, error)
            return None
        self._silent_s, self._descriptor = 0.0, descriptor(frames[0])
        match message:
            case Heartbeat():
                return None
            case Welcome():
                self.joined = message
                self._heartbeat_s = message.heartbeat_s
        return message

    def beat(self) -> None:
        """Once a turn of the caller's loop: say that we live, if nothing else has been said for a heartbeat. Silence is
        counted here. A turn that takes long (this process was stopped, or the machine slept) counts as one heartbeat,
        because words of the server may lie unread."""
        now = self._clock()
        self._silent_s += min(now - self._turned, self._heartbeat_s)
        self._turned = now
        if self.joined and now - self._spoke >= self._heartbeat_s:
            self.send(Heartbeat())

    def excuse(self) -> None:
        """Silence is our own doing: nothing is read at present."""
        self._silent_s = 0.0

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s

    @property
    def lost(self) -> bool:
        most_s = SILENT_AFTER * self._heartbeat_s
        return self._silent_s > most_s and not self._arrived_within(self._descriptor, most_s)

    @property
    def turned_away(self) -> bool:
        """Has the handshake of an encrypted line failed? Then the keys of both ends do not belong together."""
        return self._monitor is not None and self.joined is None and bool(self._monitor.poll(0))

    def close(self, linger_s: float = 0.0) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))
