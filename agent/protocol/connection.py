"""The device's end of the connection to the server: connect, join, send heartbeats, detect silence.

Used by the agent (one device) and by pods (many). One socket, one thread. No wait is unbounded: `receive` returns after
its timeout, and `lost` is true when the server has been silent for too long.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import zmq

from agent.identity.keys import Credentials, Curve
from agent.protocol.arriving import NO_CONNECTION, arrived_within, descriptor, established
from agent.protocol.wire import (
    JOIN_DEVICES,
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

RECONNECT_MS = (500, 10_000)  # encrypted: a rejected device must not retry ten times per second
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SILENT_AFTER = 8  # heartbeat intervals without a message from the server
LOOK_S = 0.1  # how often to check for a failed handshake; a check takes a few microseconds
UNKNOWN, NOT_THE_SERVER = "unknown", "not the server"  # why a handshake failed


class Connection:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        join: Join | Leave,
        *,
        receive_ahead: int = 0,
        credentials: Credentials | None = None,
        count: Callable[[int], None] | None = None,
        heard: Callable[[Sequence[zmq.Frame]], None] | None = None,
        most_frame_bytes: int = MAX_FRAME_BYTES,
        clock: Callable[[], float] = time.monotonic,
        arrived_within: Callable[[int, float], bool] = arrived_within,
    ) -> None:
        """`join`: the first message sent. `receive_ahead`: messages buffered before they are read, at most; 0 is no
        limit. `credentials`: keys of an encrypted connection, or a password. `count`: called with the bytes of every
        message. `heard`: called with the frames of every message received. `most_frame_bytes`: a larger frame ends the
        connection before it is read. `arrived_within`: see agent.protocol.arriving; it uses the kernel's clock."""
        self.endpoint = endpoint
        self.their_version: int | None = None  # the server's protocol version, if it differs from ours
        self._count, self._heard = count, heard
        self.joined: Welcome | None = None
        self._clock, self._arrived_within = clock, arrived_within
        self._heartbeat_s = 2.0  # until the server says otherwise
        self._spoke = self._turned = clock()
        self._silent_s = 0.0  # see beat
        self._descriptor = NO_CONNECTION  # of the connection that delivered the latest message
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # unlimited: the queue is bounded by the server's credit
        self.socket.setsockopt(zmq.RCVHWM, receive_ahead)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, min(most_frame_bytes, MAX_FRAME_BYTES))
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._monitor: zmq.Socket[bytes] | None = None
        self._turned_away, self._looked = "", clock()
        if isinstance(credentials, Curve):
            self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        if credentials is not None:
            credentials.apply(self.socket)
            self._monitor = self.socket.get_monitor_socket(HANDSHAKE_FAILED)
        self.socket.connect(endpoint)
        self.send(join)

    def send(self, message: Message, track: bool = False) -> zmq.MessageTracker | None:
        """`track`: return a tracker that says when the last frame has left this process."""
        if isinstance(message, Join) and len(message.labels) > JOIN_DEVICES:
            for start in range(0, len(message.labels), JOIN_DEVICES):
                some = slice(start, start + JOIN_DEVICES)
                self.send(replace(message, profiles=message.profiles[some], labels=message.labels[some]))
            return None
        frames = encode(message)
        tracker = send_frames(self.socket, frames, track=track)
        if self._count is not None:
            self._count(sum(memoryview(frame).nbytes for frame in frames))
        self._spoke = self._clock()
        return tracker

    def babble(self, nonsense: bytes) -> None:
        """Send bytes that are not a message, to emulate a faulty device."""
        self.socket.send(nonsense)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None if there is none within the timeout. Heartbeats are handled here."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        frames = self.socket.recv_multipart(copy=False)
        if self._count is not None:
            self._count(sum(len(frame) for frame in frames))
        if self._heard is not None:
            self._heard(frames)
        try:
            message = decode(frames)
        except VersionMismatch as error:
            self.their_version = error.theirs
            return not_ours(error, frames)
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
        """Call once per iteration of the caller's loop. Sends a heartbeat if nothing else was sent for one interval,
        and counts the server's silence. A long iteration (this process was stopped, or the machine slept) counts as
        one interval only, because messages of the server may lie unread."""
        now = self._clock()
        self._silent_s += min(now - self._turned, self._heartbeat_s)
        self._turned = now
        silent = self._silent_s > SILENT_AFTER * self._heartbeat_s  # our messages may lie unread, too: send few
        if self.joined and now - self._spoke >= self._heartbeat_s * (SILENT_AFTER if silent else 1):
            self.send(Heartbeat())

    def excuse(self) -> None:
        """Reset the silence count: we are not reading at present, so the silence is ours."""
        self._silent_s = 0.0

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s

    @property
    def lost(self) -> bool:
        most_s = SILENT_AFTER * self._heartbeat_s
        return self._silent_s > most_s and not self._arrived_within(self._descriptor, most_s)

    @property
    def stands(self) -> bool:
        """True if the kernel considers the connection alive, however silent the server is."""
        return established(self._descriptor)

    @property
    def turned_away(self) -> str:
        """Why the handshake failed; empty if it did not. UNKNOWN: the server does not know our key or password, or has
        revoked it. NOT_THE_SERVER: the keys of the two ends do not match, or the handshake was cut off."""
        if self._monitor is None or self._clock() < self._looked + LOOK_S:
            return self._turned_away
        self._looked = self._clock()
        while self._monitor.poll(0):
            event, _ = next_event(self._monitor)
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._turned_away = UNKNOWN
            elif self.joined is None and not self._turned_away:
                self._turned_away = NOT_THE_SERVER
        return self._turned_away

    def close(self, linger_s: float = 0.0) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))


def next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """The monitor's next event, and its value. pyzmq's own function turns every value, such as a descriptor, into an
    enum member, which Python never frees: 0.5 KiB per descriptor number ever used."""
    event, value = struct.unpack("=Hi", monitor.recv_multipart()[0])
    return event, value


def not_ours(error: VersionMismatch, frames: Sequence[zmq.Frame]) -> Refused:
    """A final refusal for a server of another version, with the server's own refusal if it sent one."""
    said = refusal_of_another_version(frames) or Refused("", final=True)
    return replace(said, reason=f"{error}; install the same release on both sides", final=True)
