"""What the server's loop touches of the machine: clocks, chance, waiting, and the kernel's view of a connection.

One interface, two implementations: `Machine` is the real one; the simulated one is `testbed/faults/loop_network.py`,
where the same loop runs turn by turn in virtual time. Messages go through the ROUTER, whose methods the simulation
provides as well.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import time
from typing import Protocol

import zmq

from agent.protocol import arriving
from agent.protocol.arriving import Address


class Bell(Protocol):
    """Ends the loop's wait, from any thread."""

    def fileno(self) -> int: ...

    def ring(self) -> None: ...

    def heard(self) -> None: ...

    def close(self) -> None: ...


class Outside(Protocol):
    @property
    def random(self) -> random.Random:
        """For what devices must not foresee."""
        ...

    def now_s(self) -> float:
        """The host's monotonic clock."""
        ...

    def worked_s(self) -> float:
        """Processor time of this thread."""
        ...

    def calendar_s(self) -> float:
        """Seconds since 1970, for what lasts longer than a run."""
        ...

    def bell(self) -> Bell: ...

    def wait(self, router: zmq.Socket[bytes], bell: Bell, seconds: float) -> None:
        """Until a message has come, the bell has rung, or this time is over."""
        ...

    def other_end(self, connection: int) -> Address | None:
        """This and the following: see agent/protocol/arriving.py."""
        ...

    def local_port(self, connection: int) -> int: ...

    def bytes_received(self, connection: int) -> int: ...

    def arrived_within(self, connection: int, seconds: float) -> bool: ...

    def shut(self, connection: int) -> None:
        """End this TCP connection, which belongs to ZeroMQ."""
        ...


class SocketBell:
    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Readable once it has rung."""
        return self._read.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: the loop is about to wake anyway; closed: it has ended
            self._write.send(b"!")

    def heard(self) -> None:
        self._read.recv(4096)

    def close(self) -> None:
        self._read.close()
        self._write.close()


class Machine:
    """This host. Functions that need no state are used as they are: no further call per message."""

    random: random.Random = secrets.SystemRandom()
    now_s = staticmethod(time.monotonic)
    worked_s = staticmethod(time.thread_time)
    calendar_s = staticmethod(time.time)
    other_end = staticmethod(arriving.other_end)
    local_port = staticmethod(arriving.local_port)
    bytes_received = staticmethod(arriving.bytes_received)
    arrived_within = staticmethod(arriving.arrived_within)

    def __init__(self) -> None:
        self._poller: zmq.Poller | None = None

    def bell(self) -> Bell:
        return SocketBell()

    def wait(self, router: zmq.Socket[bytes], bell: Bell, seconds: float) -> None:
        if self._poller is None:
            self._poller = zmq.Poller()
            self._poller.register(router, zmq.POLLIN)
            self._poller.register(bell.fileno(), zmq.POLLIN)
        if bell.fileno() in dict(self._poller.poll(int(seconds * 1000))):
            bell.heard()

    def shut(self, connection: int) -> None:
        with contextlib.suppress(OSError):
            view = socket.socket(fileno=connection)
            try:
                view.shutdown(socket.SHUT_RDWR)
            finally:
                view.detach()
