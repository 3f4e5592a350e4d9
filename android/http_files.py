"""A small HTTP server that attackers cannot keep busy: one thread for all connections, a deadline on every wait.

A connection has WHOLE_S in total and REQUEST_S for its request, counted from when it opens and not from its latest
byte, so a client that trickles is cut off. At most CONNECTIONS are open, and PER_ADDRESS from one address; a further
one replaces one already answered, else the oldest without a complete request, else the oldest. A phone sends its
request at once, so it is served however many clients trickle, even from its own address (NAT). One request per
connection; `Answering` decides the answer.
"""

from __future__ import annotations

import errno
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from http import HTTPStatus

log = logging.getLogger(__name__)

WHOLE_S = 120.0  # 200 kB over a line of 14 kbit/s
REQUEST_S = 5.0  # for the request head: one packet, sent at once
LINGER_S = 2.0  # for the client to read the answer and close
CONNECTIONS, PER_ADDRESS = 256, 64  # many phones may share a router's address
HEAD_BYTES = 8192
READ_BYTES = 65536
LENGTH = "content-length"
ACCEPT_AT_ONCE = 64  # then existing connections get their turn
NO_ROOM, NO_ROOM_S = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM), 0.05
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain"


class Answering:
    """Decides the server's answers. Called in its thread, so it must not block."""

    def most_body_bytes(self, request: Request) -> int:
        """The longest body accepted; a longer one is refused."""
        return 0

    def answer(self, request: Request, body: bytes) -> Answer:
        raise NotImplementedError


class Stage(IntEnum):
    """A connection's progress; see `furthest_behind` for which one is closed when there are too many."""

    REQUEST = 0
    BODY = 1
    ANSWER = 2
    CLOSING = 3


@dataclass(slots=True, eq=False)
class Connection:
    socket: socket.socket
    host: str
    since_s: float
    deadline_s: float
    stage: Stage = Stage.REQUEST
    read: bytearray = field(default_factory=bytearray)
    request: Request | None = None
    rest: memoryview = field(default_factory=lambda: memoryview(b""))


class HttpFiles:
    """Serves in its own thread until `stop`. OSError if the address is not available."""

    def __init__(self, address: Address, answering: Answering, clock: Callable[[], float] = time.monotonic) -> None:
        self._answering, self._clock = answering, clock
        self._listener = socket.create_server(address, backlog=CONNECTIONS)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, Connection] = {}  # in order of arrival
        self._thread = threading.Thread(target=self._serve, name="bootstrap", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def stop(self) -> None:
        self._waker.send(b"!")
        self._thread.join()
        for connection in list(self._connections.values()):
            self._close(connection)
        for open_ in (self._listener, self._woken, self._waker, self._selector):
            open_.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._patience_s()):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, Connection) and key.data.socket in self._connections:
                    self._turn(key.data, events)
            now_s = self._clock()
            for late in [c for c in self._connections.values() if c.deadline_s <= now_s]:
                self._close(late)

    def _patience_s(self) -> float | None:
        earliest_s = min((c.deadline_s for c in self._connections.values()), default=None)
        return None if earliest_s is None else max(0.0, earliest_s - self._clock())

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except OSError as error:  # none left, or the client is gone already
                if error.errno in NO_ROOM:  # a limit of the process: make room, or accept fails again at once
                    self._make_room()
                return
            accepted.setblocking(False)
            now_s, host = self._clock(), str(address[0])
            same = [c for c in self._connections.values() if c.host == host]
            if len(same) >= PER_ADDRESS:
                self._close(furthest_behind(same))
            elif len(self._connections) >= CONNECTIONS:
                self._close(furthest_behind(self._connections.values()))
            connection = Connection(accepted, host, now_s, now_s + REQUEST_S)
            self._connections[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._turn(connection, selectors.EVENT_READ)  # the request has often arrived already

    def _make_room(self) -> None:
        if self._connections:
            self._close(furthest_behind(self._connections.values()))
        else:
            threading.Event().wait(NO_ROOM_S)

    def _turn(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            elif events & selectors.EVENT_WRITE:
                self._send(connection)
        except BlockingIOError:
            pass
        except OSError:
            log.debug("a phone at %s went away", connection.host)  # in the middle of a file; it will retry
            self._close(connection)

    def _receive(self, connection: Connection) -> None:
        data = connection.socket.recv(READ_BYTES)
        if not data:
            self._close(connection)
            return
        if connection.stage is Stage.CLOSING:
            return  # the rest of a refused request
        connection.read += data
        if connection.request is None:
            end = connection.read.find(b"\r\n\r\n", 0, HEAD_BYTES)
            if end < 0:
                if len(connection.read) >= HEAD_BYTES:
                    self._say(connection, Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
                return
            request = parse_request(bytes(connection.read[:end]))
            if request is None:
                self._say(connection, Answer(HTTPStatus.BAD_REQUEST))
                return
            if request.body_bytes > self._answering.most_body_bytes(request):
                self._say(connection, self._answering.answer(request, b""))
                return
            if b"\nexpect: 100-continue" in connection.read[:end].lower():  # curl sends it before a large body
                connection.socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            del connection.read[: end + 4]
            connection.request, connection.stage = request, Stage.BODY
            connection.deadline_s = connection.since_s + WHOLE_S
        if len(connection.read) >= connection.request.body_bytes:
            body = bytes(connection.read[: connection.request.body_bytes])
            self._say(connection, self._answering.answer(connection.request, body))

    def _say(self, connection: Connection, answer: Answer) -> None:
        bare = connection.request is not None and connection.request.method == "HEAD"
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            "Server: cleave",
            f"Content-Type: {answer.kind}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
        )
        head = "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
        connection.rest = memoryview(head if bare else head + answer.body)
        connection.stage, connection.read = Stage.ANSWER, bytearray()
        connection.deadline_s = connection.since_s + WHOLE_S
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        connection.rest = connection.rest[connection.socket.send(connection.rest) :]
        if not connection.rest:
            connection.stage = Stage.CLOSING  # closing at once could discard data that the client has not read
            connection.socket.shutdown(socket.SHUT_WR)
            connection.deadline_s = min(connection.deadline_s, self._clock() + LINGER_S)
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _close(self, connection: Connection) -> None:
        self._connections.pop(connection.socket, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()


def furthest_behind(connections: Iterable[Connection]) -> Connection:
    """The connection to close: one already answered, else the oldest without a complete request, else the oldest."""
    return min(connections, key=lambda c: (c.stage is not Stage.CLOSING, c.stage, c.since_s))


def parse_request(head: bytes) -> Request | None:
    """Parse a request's head, without its final empty line; None if it is malformed."""
    first, *others = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        return None
    lengths = [value.strip() for name, _, value in (line.partition(":") for line in others) if name.lower() == LENGTH]
    if len(lengths) > 1 or any(not re.fullmatch(r"[0-9]{1,12}", length) for length in lengths):
        return None
    return Request(words[0], words[1], int(lengths[0]) if lengths else 0)
