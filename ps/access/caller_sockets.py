"""One ZeroMQ socket per caller at the entrance.

A ROUTER tells its peers apart by routing ids that they may choose, and libzmq 4.3 aborts the process when it generates
an id that a peer has already chosen. A DEALER with a single peer has no routing ids. It is bound to a local socket that
only this process (outside Linux: this user) may connect to, and is closed with the call. Each socket costs about
0.2 ms, encrypted or not.
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
AHEAD = 8  # unread messages per caller
LINUX = sys.platform.startswith("linux")
_IPC_FILTER_PID = 58  # ZMQ_IPC_FILTER_PID: only this process may connect


@dataclass(slots=True)
class CallerSocket:
    zmq_socket: zmq.Socket[bytes]
    line: socket.socket  # our end of the local socket: the caller's bytes go in here, the answers come out
    failures: zmq.Socket[bytes] | None  # monitor of failed handshakes; encrypted sockets only
    greeted: bool = False  # the caller's HELLO was answered

    def close(self, refusals: Refusals) -> None:
        """End the call, and log why its handshake failed, if it did."""
        if self.failures is not None:
            with contextlib.suppress(zmq.ZMQError):
                while self.failures.poll(0):
                    why_refused(*next_event(self.failures), refusals)
                self.zmq_socket.disable_monitor()
            self.failures.close(linger=0)
        self.zmq_socket.close(linger=0)
        self.line.close()


class CallerSockets:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: str = "") -> None:
        """`secret`: the server's key; if given, callers must encrypt."""
        self._context, self._secret = context, secret
        self._folder: Path | None = None

    def open(self) -> CallerSocket:
        """Raises OSError or ZMQError if no descriptors are left."""
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
            return CallerSocket(inside, line, failures)

    def _bind(self, inside: zmq.Socket[bytes]) -> str:
        """Bind to a local address, and return it as `connect` expects it. On Linux it is not in the file system, so a
        killed process leaves nothing behind."""
        name = f"cleave-{secrets.token_hex(16)}"
        if LINUX:
            inside.setsockopt(_IPC_FILTER_PID, os.getpid())
            inside.bind(f"ipc://@{name}")
            return f"\0{name}"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="cleave-", dir="/tmp"))  # socket paths must be short
        path = self._folder / name[-16:]
        inside.bind(f"ipc://{path}")
        return str(path)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
