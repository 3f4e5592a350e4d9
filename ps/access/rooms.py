"""A socket of its own for each caller at the entrance, where ZeroMQ speaks with that caller alone.

A ROUTER keeps its callers by names that they may choose, and libzmq 4.3 ends the whole process when it gives out a name
that somebody has chosen before. A DEALER with one caller has no names. It is bound to a local socket that nobody but
this process may connect to, and ends with the call. One costs about 0.2 ms, encrypted or not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from agent.protocol.connection import HANDSHAKE_FAILED, next_event
from ps.access.admission import ENCRYPTED, Refusals
from ps.access.guard import why_refused

FRAME_BYTES = 8 << 10
AHEAD = 8  # messages of a caller that wait for us
LINUX = sys.platform.startswith("linux")
_IPC_FILTER_PID = 58  # ZMQ_IPC_FILTER_PID: only this process may connect


@dataclass(slots=True)
class Room:
    zmq_socket: zmq.Socket[bytes]
    line: socket.socket  # what the caller sends goes in here, and what is answered comes out
    failures: zmq.Socket[bytes] | None  # of encrypted ones
    greeted: bool = False  # its HELLO was answered

    def close(self, refusals: Refusals) -> None:
        """The call is over; if its handshake failed, that is told."""
        if self.failures is not None:
            with contextlib.suppress(zmq.ZMQError):
                while self.failures.poll(0):
                    why_refused(*next_event(self.failures), refusals)
                self.zmq_socket.disable_monitor()
            self.failures.close(linger=0)
        self.zmq_socket.close(linger=0)
        self.line.close()


class Rooms:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: str = "") -> None:
        """`secret`: the server's key; with it callers have to encrypt."""
        self._context, self._secret = context, secret
        self._folder: Path | None = None

    def open(self) -> Room:
        """OSError or ZMQError: there is no room."""
        with contextlib.ExitStack() as undo:
            inside = self._context.socket(zmq.DEALER)
            undo.callback(inside.close, linger=0)
            for option, value in (
                (zmq.MAXMSGSIZE, FRAME_BYTES),
                (zmq.RCVHWM, AHEAD),
                (zmq.SNDHWM, AHEAD),
                (zmq.BACKLOG, 1),
            ):
                inside.setsockopt(option, value)
            failures: zmq.Socket[bytes] | None = None
            if self._secret:
                inside.setsockopt(zmq.CURVE_SERVER, 1)
                inside.setsockopt(zmq.CURVE_SECRETKEY, self._secret.encode())
                inside.setsockopt(zmq.ZAP_DOMAIN, ENCRYPTED)
                failures = inside.get_monitor_socket(HANDSHAKE_FAILED)
                undo.callback(failures.close, linger=0)
            where = self._bind(inside)
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(line.close)
            line.setblocking(False)
            line.connect(where)
            undo.pop_all()
            return Room(inside, line, failures)

    def _bind(self, inside: zmq.Socket[bytes]) -> str:
        """Its name, as connect takes it. On Linux nothing of it is in the file system, where a process that was killed
        would leave it."""
        name = f"cleave-{secrets.token_hex(16)}"
        if LINUX:
            inside.setsockopt(_IPC_FILTER_PID, os.getpid())
            inside.bind(f"ipc://@{name}")
            return f"\0{name}"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cleave-", dir="/tmp"))  # a name must be short
        path = self._folder / name[-16:]
        inside.bind(f"ipc://{path}")
        return str(path)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
