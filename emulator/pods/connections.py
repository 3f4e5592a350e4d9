"""A pod's devices, each with its own connection from its own address, as kernel links require.

To the pod this looks like its usual single connection: device indices are never reused, messages name devices by index,
and the pieces of all devices have distinct numbers. To the server every device is a connection with one device, index
0. One ROUTER carries all of them: thousands of sockets would cost more.

Received messages carry their arrival time instead of the server's stamp: the time on the line is real here.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import numpy as np
import zmq

from agent.identity.keys import Credentials
from agent.protocol.arriving import arrived_within, descriptor, established
from agent.protocol.clock import Clock
from agent.protocol.connection import SILENT_AFTER
from agent.protocol.limits import raise_file_limit
from agent.protocol.wire import (
    BLOCK,
    MAX_FRAME_BYTES,
    PIECE,
    Cancel,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refused,
    Result,
    VersionMismatch,
    Welcome,
    WireError,
    Work,
    decode,
    encode,
    send_frames,
)

log = logging.getLogger(__name__)

GONE_AFTER_S = 1.0  # delay before a departed device's connection is closed, so that its last messages get out


def _wide(table: np.dtype[np.void], *names: str) -> np.dtype[np.void]:
    """The same rows, with room for numbers made unique per device."""
    return np.dtype([(name, "<u8" if name in names else kind[0]) for name, kind in (table.fields or {}).items()])


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The server has dropped this device: it has to join again."""

    device: int


WIDE_PIECE, WIDE_BLOCK = _wide(PIECE, "piece"), _wide(BLOCK, "left", "right")


class OwnConnections:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        join: Join,
        addresses: Mapping[str, str],
        clock: Clock,
        *,
        credentials: Credentials | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`addresses`: of devices, by label. `clock`: for the stamps. `credentials`: keys, or a pass of the run."""
        raise_file_limit()
        server = urlsplit(endpoint)
        self.endpoint = endpoint
        self.joined: Welcome | None = None
        self._server = server.netloc
        self._addresses, self._clock, self._now_s = addresses, clock, now_s
        self._heartbeat_s = 2.0  # until the server says otherwise
        self._silent_s, self._turned_s = 0.0, now_s()  # see agent.protocol.connection
        self._descriptors: dict[int, int] = {}  # per device's connection
        self._spoke_s: OrderedDict[int, float] = OrderedDict()  # by device, most recent sender last
        self._endpoints: list[str] = []  # by device index
        self._device_at: dict[str, int] = {}  # the inverse, for open connections
        self._leaving: OrderedDict[int, float] = OrderedDict()  # device -> when its connection is closed
        self.socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),  # both are bounded by the server's credit
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self.socket.setsockopt(option, value)
        if credentials is not None:
            credentials.apply(self.socket)
        self.send(join)

    # ---- sending

    def send(self, message: Message) -> None:
        """Send each device concerned its part."""
        match message:
            case Join():
                self._join(message)
            case Leave(devices=devices):
                for device in devices.tolist():
                    self._tell(device, Leave(np.zeros(1, "<u4"), message.reason))
                    self._spoke_s.pop(device, None)
                    self._leaving[device] = self._now_s() + GONE_AFTER_S
            case Result():
                self._answer(message)
            case _:
                raise TypeError(f"{type(message).__name__} is not about devices")

    def _join(self, join: Join) -> None:
        for at, label in enumerate(join.labels):
            device = len(self._endpoints)
            endpoint = f"tcp://{self._addresses[label]}:0;{self._server}"
            if endpoint in self._device_at:
                self._close(self._device_at[endpoint])
            self._endpoints.append(endpoint)
            self._device_at[endpoint] = device
            self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, _identity(device))
            self.socket.connect(endpoint)
            self._tell(device, Join(join.profiles[at : at + 1], [label], join.about))

    def _answer(self, result: Result) -> None:
        """Send answers one by one: on a slow line the first would otherwise wait for all the others."""
        cells = np.concatenate(([0], np.cumsum(result.answers["cells"], dtype=np.int64))).tolist()
        data = np.asarray(result.data).reshape(-1)
        for at, device in enumerate(result.answers["device"].tolist()):
            answers = result.answers[at : at + 1].copy()
            answers["device"] = 0
            self._tell(device, Result(answers, data[cells[at] : cells[at + 1]], result.stamp_ns))

    def _tell(self, device: int, message: Message) -> None:
        try:
            self.socket.send(_identity(device), zmq.SNDMORE)
            send_frames(self.socket, encode(message))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._spoke_s.pop(device, None)  # the device has no connection, so it sends no heartbeats
            return
        self._spoke_s[device] = self._now_s()
        self._spoke_s.move_to_end(device)

    def babble(self, nonsense: bytes) -> None:
        """Send nonsense from the first device present."""
        device = next(iter(self._spoke_s), None)
        if device is not None:
            self.socket.send_multipart([_identity(device), nonsense])

    # ---- receiving

    def receive(self, timeout_s: float) -> Message | Forgotten | None:
        """The next message, as if all devices shared one connection."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        identity, *frames = self.socket.recv_multipart(copy=False)
        device = int.from_bytes(identity.bytes[1:], "big")
        try:
            message = decode(frames)
        except VersionMismatch as error:
            return Refused(f"{error}; install the same release on both sides", final=True)
        except WireError as error:
            log.warning("dropped a message to %s: %s", self._endpoints[device], error)
            return None
        self._silent_s, self._descriptors[device] = 0.0, descriptor(identity)
        match message:
            case Welcome():
                self.joined, self._heartbeat_s = message, message.heartbeat_s
            case Heartbeat():
                return None
            case Work():
                return self._taken(device, message)
            case Cancel():
                blocks = message.blocks.copy()
                blocks["device"] = device
                return Cancel(blocks)
            case Refused(final=False) if self.joined is not None:
                return Forgotten(device) if device not in self._leaving else None
        return message

    def _taken(self, device: int, work: Work) -> Work:
        offset = np.uint64(device << 32)
        pieces, blocks = work.pieces.astype(WIDE_PIECE), work.blocks.astype(WIDE_BLOCK)
        pieces["piece"] += offset
        blocks["device"] = device
        for side in ("left", "right"):
            blocks[side] += offset
        released = work.released.astype(np.uint64) + offset
        return replace(work, stamp_ns=self._clock.now_ns(), released=released, pieces=pieces, blocks=blocks)

    # ---- staying

    def beat(self) -> None:
        """Send a heartbeat for every device that has sent nothing else for one heartbeat interval."""
        now_s = self._now_s()
        self._silent_s += min(now_s - self._turned_s, self._heartbeat_s)
        self._turned_s = now_s
        while self._leaving and next(iter(self._leaving.values())) <= now_s:
            self._close(next(iter(self._leaving)))
        if self.joined is None:
            return
        while self._spoke_s:
            device, spoke_s = next(iter(self._spoke_s.items()))
            if now_s - spoke_s < self._heartbeat_s:
                return
            self._tell(device, Heartbeat())

    def _close(self, device: int) -> None:
        self._spoke_s.pop(device, None)
        self._leaving.pop(device, None)
        self._descriptors.pop(device, None)
        endpoint = self._endpoints[device]
        if self._device_at.get(endpoint) == device:
            del self._device_at[endpoint]
            self.socket.disconnect(endpoint)

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s

    @property
    def lost(self) -> bool:
        most_s = SILENT_AFTER * self._heartbeat_s
        return self._silent_s > most_s and not any(arrived_within(d, most_s) for d in self._descriptors.values())

    @property
    def stands(self) -> bool:
        return any(established(d) for d in self._descriptors.values())

    def close(self, linger_s: float = 0.0) -> None:
        self.socket.close(linger=int(linger_s * 1000))


def _identity(device: int) -> bytes:
    return b"d" + device.to_bytes(4, "big")
