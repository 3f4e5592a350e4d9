"""Watches how many bytes arrive before ZeroMQ delivers them.

ZeroMQ delivers whole messages. It limits the size of a frame but not the number of frames, and holds all frames until
the last one arrives, so a server that sends one endless message would fill this device's memory and use up its owner's
data plan. The kernel counts the bytes of each TCP connection (on Linux, and so on Android); bytes that it has counted
and that no message has delivered belong to an unfinished message. A thread checks every LOOK_S and shuts the connection
down when there are too many. The bytes of a message that is still unfinished when its connection ends have been moved,
too: they are reported once. Where the kernel does not count, only the limit per frame remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

LOOK_S = 0.02  # 300 Mbit/s Wi-Fi brings 0.75 MB in that time; 50 checks per second cost 0.2% of a core
HANDSHAKE_BYTES = 2048  # upper bound on greeting and handshake of one connection
_BYTES_RECEIVED = 128  # tcpi_bytes_received, in struct tcp_info of linux/tcp.h since 4.1


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Bytes of incomplete messages."""

    arrived_bytes: int  # at this device
    held_bytes: int  # the part held by this process; the rest is in the kernel's buffer, whose size the kernel limits


class InboundLimit(threading.Thread):
    def __init__(
        self,
        endpoint: str,
        encrypted: bool,
        judge: Callable[[Unfinished], str],
        ring: Callable[[], object],
        count: Callable[[int], object],
    ) -> None:
        """`judge`: returns why the connection must end; empty: it may go on. `ring`: called when the connection is
        shut down or lost. `count`: called, in this thread, with the bytes that had arrived without being delivered when
        a connection ended. Messages that were complete by then may still be delivered, and are then counted twice."""
        super().__init__(name="gate", daemon=True)
        self.cut = ""  # why the connection was shut down
        self.losses = 0  # watched connections that are gone; ZeroMQ reconnects each time
        self._count = count
        self._arrived = 0  # over the watched connection, as of the last check
        self._port, self._encrypted, self._judge, self._ring = int(endpoint.rpartition(":")[2]), encrypted, judge, ring
        self._ended = threading.Event()
        self._delivered = 0  # message bytes, as on the wire
        self._descriptor, self._base = -1, 0  # the connection watched, and the bytes delivered before it

    def heard(self, frames: Sequence[zmq.Frame]) -> None:
        """Count a delivered message."""
        self._delivered += sum(on_wire(len(frame), self._encrypted) for frame in frames)

    def end(self) -> None:
        self._ended.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        try:
            while not self._ended.wait(LOOK_S):
                # check twice: bytes delivered between the two readings would count both as unfinished and as held
                if self._why() and (why := self._why()):
                    self.cut = why
                    self._shut()
                    self._ring()
                    return
        finally:
            self._count_unfinished(self._delivered)

    def _why(self) -> str:
        """Why the connection must end now; empty if it need not."""
        delivered = self._delivered  # read before asking the kernel: bytes in between count as unfinished
        found = self._look()
        if found is None:
            return ""
        self._arrived, unread = found
        arrived = self._unfinished(delivered)
        return self._judge(Unfinished(arrived, max(0, arrived - unread)))

    def _unfinished(self, delivered: int) -> int:
        return max(0, self._arrived - HANDSHAKE_BYTES - (delivered - self._base))

    def _count_unfinished(self, delivered: int) -> None:
        """The watched connection has ended."""
        if unfinished := self._unfinished(delivered):
            self._count(unfinished)
        self._arrived = 0

    def _look(self) -> tuple[int, int] | None:
        """`counted_bytes` of the current connection; None if there is none."""
        found = counted_bytes(self._descriptor, self._port)
        if found is None:
            if self._descriptor >= 0:
                self.losses += 1
                self._count_unfinished(self._delivered)
                self._base = self._delivered  # the first connection has base 0: all its bytes count
                self._ring()
            self._descriptor = next((fd for fd in _descriptors() if counted_bytes(fd, self._port) is not None), -1)
            found = counted_bytes(self._descriptor, self._port)
        return found

    def _shut(self) -> None:
        """Shut the connection down under ZeroMQ, which then discards the unfinished message."""
        with contextlib.suppress(OSError):
            view = socket.socket(fileno=self._descriptor)
            try:
                view.shutdown(socket.SHUT_RDWR)
            finally:
                view.detach()


def on_wire(size: int, encrypted: bool) -> int:
    """Bytes of a frame with ZMTP's header and, if encrypted, CURVE's MESSAGE command."""
    if encrypted:
        size += 33
    return size + (9 if size > 255 else 2)


def counted_bytes(descriptor: int, port: int) -> tuple[int, int] | None:
    """Bytes that the kernel has received over this TCP connection to that port, and how many ZeroMQ has not read yet.
    None if there is no such connection or the kernel does not count. The descriptor belongs to ZeroMQ, which may close
    it at any time, so it is only inspected."""
    if descriptor < 0 or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        view = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if view.type != socket.SOCK_STREAM or view.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if view.getpeername()[1] != port:
            return None
        info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        (unread,) = struct.unpack("=i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))
    except OSError:
        return None
    finally:
        view.detach()
    if len(info) < _BYTES_RECEIVED + 8:
        return None
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]), int(unread)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    except OSError:
        return []
