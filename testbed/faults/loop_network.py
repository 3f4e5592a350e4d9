"""A simulated machine for the real server's loop: network, clocks and disk, in virtual time and without threads.

`Network` is the server's `Outside` (ps/outside.py). `Router` has the methods of a ZeroMQ ROUTER that the server uses,
with ZeroMQ's promises and no more: whole messages, in order on each connection, in any order between connections; a
full buffer refuses a message (EAGAIN), a name without a connection is not reachable (EHOSTUNREACH), and messages that
arrived before a connection was closed are still read. Descriptors are reused at once, as by the kernel.

Server time is world time plus jumps. Everything is drawn from one seeded generator.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from agent.identity.files import Busy
from agent.protocol.arriving import Address
from agent.protocol.errors import UserError
from ps.outside import Background, Bell, Done, HandBack

AHEAD = 4  # messages that a connection's send buffer takes; ZeroMQ's is larger, and fills up the same way
STEP_S = 20e-6  # server time of a wait that ends at once, and of each message
FIRST_DESCRIPTOR = 20
FIRST_NAME = 0xFFFFFFF8  # so that names wrap around soon
LOCAL_PORT = 7000
WAIT, RECEIVE, SEND = range(3)  # where the server can be stopped


class Connection:
    """One TCP connection to the server, from its device's side. `heard` takes a message; `closed` is called at its
    end."""

    def __init__(
        self,
        network: Network,
        user: str,
        descriptor: int,
        name: bytes,
        address: Address,
        heard: Callable[[Connection, list[bytes]], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self.network, self.user, self.descriptor, self.name, self.address = network, user, descriptor, name, address
        self.heard, self.closed = heard, closed
        self.open = True
        self.latency_s, self.up_bps = 0.002, 1e7
        self.deaf_until_s = 0.0  # the device does not read before this time
        self.offered_s = network.ran_s  # when the server last tried to send something; in the server's running time
        self.arrived_s = network.ran_s  # when the last message arrived; in the server's running time
        self.unread: deque[list[bytes]] = deque()  # arrived at the server, not yet read
        self._buffer: deque[tuple[float, list[Any]]] = deque()  # when it arrives; sent, not read by the device
        self._reading = False
        self._arriving: deque[tuple[float, float, int]] = deque()  # messages on their way: begin, end, bytes
        self._bytes, self._last_s = 0, network.now

    # ---- to the server

    def say(self, frames: Sequence[Any], extra_s: float = 0.0) -> None:
        """`extra_s`: how much longer the message's bytes take."""
        message = [bytes(memoryview(frame)) for frame in frames]
        size, now = sum(map(len, message)) + 10, self.network.now
        begin = max(now + self.latency_s, self._arriving[-1][1] if self._arriving else 0.0)
        end = begin + 8 * size / self.up_bps + extra_s
        self._arriving.append((begin, end, size))
        if extra_s:
            self.network.seen["messages that arrived in parts"] += 1
        self.network.at(end, lambda: self._arrived(message))

    def _arrived(self, message: list[bytes]) -> None:
        _, end, size = self._arriving.popleft()
        if self.open:
            self._bytes, self._last_s, self.arrived_s = self._bytes + size, end, self.network.ran_s
            self.unread.append(message)
            self.network.router.ready(self)

    @property
    def arriving(self) -> bool:
        return bool(self._arriving)

    @property
    def received(self) -> tuple[float, float]:
        """Bytes received, and when the last one arrived, as the kernel would report."""
        begin, end, size = self._arriving[0] if self._arriving else (self.network.now, self.network.now, 0)
        if begin >= self.network.now or end <= begin:
            return self._bytes, self._last_s
        return self._bytes + size * (self.network.now - begin) / (end - begin), self.network.now

    # ---- from the server

    @property
    def full(self) -> bool:
        return len(self._buffer) >= AHEAD

    def offer(self, frames: list[Any]) -> None:
        self._buffer.append((self.network.now + self.latency_s, frames))
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._reading and self._buffer:
            self._reading = True
            when = max(self.network.now, self._buffer[0][0], self.deaf_until_s)
            self.network.at(when, self._read)

    def _read(self) -> None:
        self._reading = False
        if self.network.now < self.deaf_until_s:
            self._read_soon()
        elif self._buffer and self.open:
            _, frames = self._buffer.popleft()
            self.heard(self, [bytes(memoryview(frame)) for frame in frames])  # the first copy
            self._read_soon()

    def end(self) -> None:
        """Close the connection, from either side."""
        if self.open:
            self.open = False
            self._buffer.clear()
            self.network.ended(self)
            self.network.at(self.network.now + self.latency_s, lambda: self.closed(self))


class Frame(zmq.Frame):
    """The first frame of a message, which knows its connection."""

    connection: Connection | None = None

    def get(self, option: Any) -> Any:
        if self.connection is None:
            raise zmq.ZMQError(errno.EINVAL)  # the message came from within the process
        return self.connection.user if option == "User-Id" else self.connection.descriptor


class Monitor:
    def __init__(self) -> None:
        self.events: deque[list[bytes]] = deque()

    def put(self, event: int, descriptor: int) -> None:
        self.events.append([struct.pack("=hi", event, descriptor), b""])

    def poll(self, _: int) -> bool:
        return bool(self.events)

    def recv_multipart(self, _: int = 0) -> list[bytes]:
        return self.events.popleft()

    def close(self, linger: int = 0) -> None:
        self.events.clear()


class Router:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.read = 0  # messages since the start
        self._ready: list[Connection] = []  # connections with unread messages
        self._rest: deque[Frame] = deque()  # of the message that is being received
        self._own: deque[tuple[bytes, bytes]] = deque()  # from within the process: name, message
        self._sending: tuple[Connection, list[Any]] | None = None
        self.monitor = Monitor()

    def __bool__(self) -> bool:
        return bool(self._ready or self._own)

    def ready(self, connection: Connection) -> None:
        if connection not in self._ready:
            self._ready.append(connection)

    def own(self, name: bytes, message: bytes) -> None:
        self._own.append((name, message))

    # ---- ZeroMQ's methods

    def bind(self, where: str) -> None:
        pass

    def poll(self, _: int) -> bool:
        return bool(self)

    def recv_multipart(self) -> list[Any]:
        name, *frames = self._received()
        return [name.bytes, *frames]

    def recv(self, flags: int = 0, copy: bool = True) -> Frame:
        """The next frame; the rest of its message comes first."""
        if not self._rest:
            first, *frames = self._received()
            self._rest.extend([first, *map(Frame, frames)])
        frame = self._rest.popleft()
        frame.more = bool(self._rest)
        return frame

    def _received(self) -> list[Any]:
        self._network.step(RECEIVE)
        choice = self._network.dice.randrange(len(self._ready) + len(self._own)) if self else -1
        if choice < 0:
            raise zmq.Again
        self.read += 1
        first: Frame
        if choice >= len(self._ready):
            name, message = self._own.popleft()
            frames = [message]
            first = Frame(name)
        else:
            connection = self._ready[choice]
            frames = connection.unread.popleft()
            if not connection.unread:
                self._ready.remove(connection)
            if choice:
                self._network.seen["messages that overtook others"] += 1
            first = Frame(connection.name)
            first.connection = connection
        return [first, *frames]

    def send(self, frame: Any, flags: int = 0, copy: bool = True, track: bool = False) -> None:
        if self._sending is None:
            self._network.step(SEND)
            connection = self._network.named.get(bytes(frame))
            if connection is None:
                self._network.seen["messages to unknown peers"] += 1
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            connection.offered_s = self._network.ran_s
            if connection.full:
                self._network.seen["messages that a full buffer refused"] += 1
                raise zmq.Again
            self._sending = connection, []
            return
        connection, frames = self._sending
        frames.append(frame)
        if not flags & zmq.SNDMORE:
            self._sending = None
            connection.offer(frames)

    def get_monitor_socket(self, events: int) -> Monitor:
        return self.monitor

    def disable_monitor(self) -> None:
        pass

    def close(self) -> None:
        pass


class Dealer:
    """How the process asks its own ROUTER for a name (ps/access/routing_ids.py)."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def connect(self, where: str) -> None:
        pass

    def send(self, message: bytes) -> None:
        self._network.router.own(self._network.next_name(), message)

    def close(self, linger: int = 0) -> None:
        pass


class Context:
    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, kind: int) -> Dealer:
        return Dealer(self._network)

    def term(self) -> None:
        pass


class SilentBell:
    """Never rings: there is one thread, which need not be woken."""

    def fileno(self) -> int:
        return -1

    def ring(self) -> None:
        pass

    def heard(self) -> None:
        pass

    def close(self) -> None:
        pass


class Unthreaded:
    """Does work when it is asked for; the server's loop gets the result in a later turn."""

    def __init__(self, hand_back: HandBack) -> None:
        self.busy, self._hand_back = 0, hand_back

    def do(self, work: Callable[[], Done], then: Callable[[Done], None], rank: int = 0) -> None:
        self.busy += 1
        result = work()
        self._hand_back(lambda: self._done(result, then))

    def _done(self, result: Done, then: Callable[[Done], None]) -> None:
        self.busy -= 1
        then(result)

    def end(self) -> None:
        pass


class Network:
    def __init__(self, seed: int) -> None:
        self.now = 0.0  # world time
        self.until_s = 0.0  # no wait ends later
        self.ran_s = 0.0  # the server's running time, without stops and long turns
        self.seen: Counter[str] = Counter()
        self.dice, self.random = random.Random(f"network {seed}"), random.Random(f"server {seed}")
        self.router, self.context = Router(self), Context(self)
        self.named: dict[bytes, Connection] = {}
        self.beside: Callable[[], None] = lambda: None  # the entrance's thread: gets its turn while the server waits
        self._open: dict[int, Connection] = {}
        self._used: set[int] = set()  # descriptors used so far
        self._names, self._ports = itertools.count(FIRST_NAME), itertools.count(40000)
        self._jumped_s, self._calendar_s, self._worked_s = 0.0, 1.8e9, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._stop: dict[int, float] = {}  # where the server will be stopped -> seconds
        self._hitch_s = 0.0

    # ---- the world

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now), next(self._sequence), what))

    def connect(
        self,
        user: bytes,
        heard: Callable[[Connection, list[bytes]], None],
        closed: Callable[[Connection], None],
    ) -> Connection:
        descriptor = next(n for n in itertools.count(FIRST_DESCRIPTOR) if n not in self._open)
        self.seen["descriptors used again"] += descriptor in self._used
        self._used.add(descriptor)
        address = ("127.0.0.1", next(self._ports))
        made = Connection(self, user.decode(), descriptor, self.next_name(), address, heard, closed)
        self._open[descriptor] = self.named[made.name] = made
        self.router.monitor.put(zmq.EVENT_ACCEPTED, descriptor)
        return made

    def ended(self, connection: Connection) -> None:
        del self._open[connection.descriptor], self.named[connection.name]
        self.router.monitor.put(zmq.EVENT_DISCONNECTED, connection.descriptor)

    def next_name(self) -> bytes:
        return b"\0" + (next(self._names) % (1 << 32)).to_bytes(4, "big")

    def stop_server(self, where: int, seconds: float) -> None:
        """Stop the server when it next comes to this place; devices go on."""
        self._stop[where] = self._stop.get(where, 0.0) + seconds

    def delay_server(self, seconds: float) -> None:
        """Make the server's next turn this much longer; its thread works all the time."""
        self._hitch_s += seconds

    def calm(self) -> None:
        """Cancel all pending stops and long turns."""
        self._stop, self._hitch_s = {}, 0.0

    def jump(self, seconds: float) -> None:
        """The host's clocks jump; for the devices no time passes."""
        self._jumped_s += seconds
        self._calendar_s += seconds

    def set_calendar(self, seconds: float) -> None:
        """The date is corrected, forwards or back."""
        self._calendar_s += seconds

    def pass_until(self, until_s: float, alert: bool = False) -> None:
        """Run the devices until this time; `alert`: or until the server has something to read."""
        while self._events and self._events[0][0] <= until_s and not (alert and self.router):
            self.now, _, what = heapq.heappop(self._events)
            what()
        if not (alert and self.router):
            self.now = max(self.now, until_s)

    def step(self, where: int) -> None:
        """The server's thread does something that takes STEP_S."""
        self.now += STEP_S
        self.ran_s += STEP_S
        self._worked_s += STEP_S
        if (stop_s := self._stop.pop(where, 0.0)) > 0:
            self.pass_until(self.now + stop_s)
        if where == RECEIVE and self._hitch_s:
            hitch_s, self._hitch_s = self._hitch_s, 0.0
            self._worked_s += hitch_s
            self.pass_until(self.now + hitch_s)

    # ---- the server's Outside

    def now_s(self) -> float:
        return self.now + self._jumped_s

    def worked_s(self) -> float:
        return self._worked_s

    def calendar_s(self) -> float:
        return self.now + self._calendar_s

    def now_ns(self) -> int:
        return round(self.now_s() * 1e9)

    def bell(self) -> Bell:
        return SilentBell()

    def background(self, name: str, hand_back: HandBack) -> Background:
        return Unthreaded(hand_back)

    def wait(self, router: zmq.Socket[bytes], bell: Bell, seconds: float) -> None:
        self.step(WAIT)
        begun = self.now
        self.pass_until(min(begun + seconds, max(begun, self.until_s)), alert=True)
        self.ran_s += self.now - begun
        self.beside()

    def other_end(self, connection: int) -> Address | None:
        found = self._open.get(connection)
        return found.address if found is not None else None

    def local_port(self, connection: int) -> int:
        return LOCAL_PORT if connection in self._open else -1

    def bytes_received(self, connection: int) -> int:
        found = self._open.get(connection)
        return int(found.received[0]) if found is not None else 0

    def arrived_within(self, connection: int, seconds: float) -> bool:
        found = self._open.get(connection)
        return found is not None and self.now - found.received[1] < seconds

    def shut(self, connection: int) -> None:
        if (found := self._open.get(connection)) is not None:
            self.seen["connections cut by the server"] += 1
            found.end()


class Clock:
    """The server's clock of blocks."""

    scale = 1.0

    def __init__(self, network: Network) -> None:
        self._network = network

    def now_ns(self) -> int:
        return self._network.now_ns()

    def wait_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self.now_ns()) / 1e9)


class MemoryDisk:
    """Files in memory; `full` or `busy` for a while."""

    def __init__(self, seen: Counter[str]) -> None:
        self.full = self.busy = False  # no space left; another process holds the lock
        self.writes = 0
        self._files: dict[Path, tuple[int, str]] = {}
        self._seen = seen

    def stamp(self, path: Path) -> tuple[int, int, int]:
        if path not in self._files:
            raise FileNotFoundError(path)
        number, text = self._files[path]
        return number, 0, len(text)

    def read(self, path: Path) -> str:
        return self._files[path][1]

    @contextmanager
    def locked(self, path: Path, wait_s: float) -> Iterator[bool]:
        if self.busy:
            self._seen["locks that another process had"] += 1
            raise Busy(f"{path} is locked by another process")
        yield True

    def write(self, path: Path, lines: Iterable[str], durable: bool) -> None:
        if self.full:
            self._seen["writes to a full disk"] += 1
            raise UserError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}")
        self.writes += 1
        self._files[path] = self.writes, "".join(lines)
