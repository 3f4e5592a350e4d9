"""What other threads ask of the server's thread, and how they wake it."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable


class Requests:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._read.fileno()

    def add(self, request: Callable[[], None]) -> None:
        self._waiting.append(request)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the server is about to wake anyway; closed: it has ended
            self._write.send(b"!")

    def heard(self) -> None:
        self._read.recv(4096)

    def do_one(self) -> None:
        if self._waiting:
            self._waiting.popleft()()

    def close(self) -> None:
        self._read.close()
        self._write.close()
