"""What the server's loop touches of the machine: clocks, chance, waiting, threads for long work, and the kernel's view
of a connection.

One interface, two implementations: `Machine` is the real one; the simulated one is `testbed/faults/loop_network.py`,
where the same loop runs turn by turn in virtual time. Messages go through the ROUTER, whose methods the simulation
provides as well.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, PriorityQueue
from typing import Any, Protocol, TypeVar

import zmq

from agent.protocol import arriving
from agent.protocol.arriving import Address

Done = TypeVar("Done")
HandBack = Callable[[Callable[[], None]], None]  # makes the loop call a function soon

END_S = 5.0  # the longest that the end of the server waits for work in progress; the rest ends with the process


class Bell(Protocol):
    """Ends the loop's wait, from any thread."""

    def fileno(self) -> int: ...

    def ring(self) -> None: ...

    def heard(self) -> None: ...

    def close(self) -> None: ...


class Background(Protocol):
    """Does long work for the loop, one piece at a time, outside its thread."""

    busy: int  # pieces not handed back yet; counted by the loop alone

    def do(self, work: Callable[[], Done], then: Callable[[Done], None], rank: int = 0) -> None:
        """The loop calls `then` with the result. Work of a lower rank is done first, equal ranks in order."""
        ...

    def end(self) -> None:
        """Start no further work; the server ends."""
        ...


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

    def background(self, name: str, hand_back: HandBack) -> Background: ...

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


class BackgroundThread:
    """A thread that is started on first use. Its queue is as long as the loop lets it become: the loop counts what it
    has not got back."""

    def __init__(self, name: str, hand_back: HandBack) -> None:
        self.busy = 0
        self._name, self._hand_back = name, hand_back
        self._number = itertools.count()
        self._waiting: PriorityQueue[tuple[float, int, Callable[[], Any] | None, Callable[[Any], None] | None]]
        self._waiting = PriorityQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], Done], then: Callable[[Done], None], rank: int = 0) -> None:
        self.busy += 1
        self._waiting.put((rank, next(self._number), work, then))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            _, _, work, then = self._waiting.get()
            if work is None or then is None:
                return
            try:
                result = work()
            except BaseException as error:
                self._hand_back(lambda error=error: _raise(error))  # type: ignore[misc]
                return
            self._hand_back(lambda result=result, then=then: self._done(result, then))  # type: ignore[misc]
            del work, then, result  # or the arrays of the last piece would live until the next one

    def _done(self, result: Done, then: Callable[[Done], None]) -> None:
        self.busy -= 1
        then(result)

    def end(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(Empty):
                while True:
                    self._waiting.get_nowait()
            self._waiting.put((-1, next(self._number), None, None))
            self._thread.join(END_S)


def _raise(error: BaseException) -> None:
    raise error


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

    def background(self, name: str, hand_back: HandBack) -> Background:
        return BackgroundThread(name, hand_back)

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
