"""Measures what a device's link carries: rate down, rate up and round trip, over TCP from the device's address.

The server's end (`ProbeServer`) is a thread that streams, counts or echoes, as requested by the first byte of a
connection. The device's end (`measure`) runs all devices of a group at once, in both directions, so that each is
measured under the load of the others. Groups keep the total rate within what a small host can carry.

A rate is bytes received between two arrivals, after a warm-up; the receiver counts.

    python -m emulator.links.probe --server HOST:PORT     in a pod; the devices to measure as JSON on standard input
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

WARM_UP_S, WARM_UP_PACKETS = 1.0, 40  # at least, before counting starts
LEAST_S, PACKETS = 2.0, 60  # at least, for a rate
MOST_S = 20.0  # limit of warm-up and of measuring; a link too slow for that many packets is measured with fewer
GROUP_BPS = 150e6  # total of links measured at once, both directions
ROUND_TRIPS = 7
CONNECT_S = 30.0
DOWN, UP, ECHO = b"D", b"U", b"E"
_CHUNK = bytes(1 << 16)
_RATE = struct.Struct("!d")


@dataclass(frozen=True, slots=True)
class Asked:
    address: str
    down_bps: float
    up_bps: float


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    address: str
    down_bps: float
    up_bps: float
    round_trip_s: float


def spans_s(rate_bps: float) -> tuple[float, float]:
    """Warm-up and measuring time of a link."""
    packet_s = 8 * 1500 / rate_bps
    spans = (max(WARM_UP_S, WARM_UP_PACKETS * packet_s), max(LEAST_S, PACKETS * packet_s))
    return min(MOST_S, spans[0]), min(MOST_S, spans[1])


def groups(devices: Sequence[Asked], most_bps: float = GROUP_BPS) -> Iterator[list[Asked]]:
    """Groups of as many devices as fit; a device faster than the limit is measured alone. Devices of similar rates
    share a group, because they take equally long."""
    group: list[Asked] = []
    total = 0.0
    for device in sorted(devices, key=lambda one: min(one.down_bps, one.up_bps)):
        rate = device.down_bps + device.up_bps
        if group and total + rate > most_bps:
            yield group
            group, total = [], 0.0
        group.append(device)
        total += rate
    if group:
        yield group


class Rate:
    """Rate of the bytes that have arrived since the warm-up."""

    def __init__(self, line_bps: float) -> None:
        self._warm_up_s, self._needs_s = spans_s(line_bps)
        self._first_s: float | None = None
        self._begun_s = self._last_s = 0.0
        self._bytes = 0

    def arrived(self, count: int, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        if not self._begun_s:
            if now_s >= self._first_s + self._warm_up_s:
                self._begun_s = self._last_s = now_s
            return
        self._bytes += count
        self._last_s = now_s

    @property
    def enough(self) -> bool:
        return bool(self._begun_s) and self._last_s - self._begun_s >= self._needs_s

    @property
    def bps(self) -> float:
        return 8 * self._bytes / max(self._last_s - self._begun_s, 1e-9)


class ProbeServer:
    """Answers probes at an address until it is closed."""

    def __init__(self, listening: socket.socket) -> None:
        """Takes a socket that already listens, so that it can belong to another namespace."""
        self._listening = listening
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._uploads: dict[socket.socket, Rate] = {}
        self._ending = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def _serve(self) -> None:
        while not self._ending:
            for key, events in self._selector.select(0.1):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listening:
                    self._accept()
                    continue
                try:
                    self._serve_one(connection, key.data, events)
                except BlockingIOError:
                    continue
                except OSError:  # the client has finished and closed the connection
                    self._drop(connection)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, b"")

    def _serve_one(self, connection: socket.socket, doing: bytes, events: int) -> None:
        if doing == DOWN and events & selectors.EVENT_WRITE:
            connection.send(_CHUNK)
            return
        read = connection.recv(1 << 20)
        if not read:
            raise ConnectionError
        if not doing:
            doing, read = read[:1], read[1:]
            wants = selectors.EVENT_WRITE if doing == DOWN else selectors.EVENT_READ
            self._selector.modify(connection, wants, doing)
            if doing == UP:
                self._uploads[connection] = Rate(_RATE.unpack_from(read)[0])
                return
        if doing == ECHO:
            connection.send(read)
        elif doing == UP:
            rate = self._uploads[connection]
            told = rate.enough
            rate.arrived(len(read), time.monotonic())
            if rate.enough and not told:
                connection.send(_RATE.pack(rate.bps))

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._uploads.pop(connection, None)
        connection.close()

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            self._drop(key.fileobj)
        self._selector.close()

    def __enter__(self) -> ProbeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- the device's end


def measure(
    server: tuple[str, int], devices: Sequence[Asked], new_socket: Callable[[], socket.socket] = socket.socket
) -> list[MeasuredLink]:
    """Results in the order of `devices`. `new_socket` may make sockets in another namespace."""
    found: dict[str, MeasuredLink] = {}
    for group in groups(devices):
        quiet_s = {one.address: _round_trip_s(server, one.address, new_socket) for one in group}
        rates = _rates(server, group, new_socket)
        for one in group:
            down, up = rates[one.address]
            found[one.address] = MeasuredLink(one.address, down, up, quiet_s[one.address])
    return [found[one.address] for one in devices]


def _connected(server: tuple[str, int], address: str, new_socket: Callable[[], socket.socket]) -> socket.socket:
    made = new_socket()
    try:
        made.settimeout(CONNECT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.bind((address, 0))
        made.connect(server)
    except BaseException:
        made.close()
        raise
    return made


def _round_trip_s(server: tuple[str, int], address: str, new_socket: Callable[[], socket.socket]) -> float:
    """The median of ROUND_TRIPS, on an idle link."""
    took = []
    with _connected(server, address, new_socket) as connection:
        connection.sendall(ECHO)
        for _ in range(ROUND_TRIPS):
            begun = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            took.append(time.monotonic() - begun)
    return sorted(took)[len(took) // 2]


def _rates(
    server: tuple[str, int], group: Sequence[Asked], new_socket: Callable[[], socket.socket]
) -> dict[str, tuple[float, float]]:
    """Rates down and up of each device, all at the same time, each direction on its own connection. Devices that are
    done keep sending until all are done, as load for the others."""
    deadline = time.monotonic() + 2 * CONNECT_S
    downs: dict[str, float] = {}
    ups: dict[str, float] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for one in group:
                slower_bps = min(one.down_bps, one.up_bps)  # both directions settle together
                down, up = (_connected(server, one.address, new_socket) for _ in range(2))
                selector.register(down, selectors.EVENT_READ, (one, Rate(slower_bps)))
                selector.register(up, selectors.EVENT_READ | selectors.EVENT_WRITE, (one, None))
                down.sendall(DOWN)
                up.sendall(UP + _RATE.pack(slower_bps))
                down.setblocking(False)
                up.setblocking(False)
            while len(downs) + len(ups) < 2 * len(group):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(downs)} rates down and {len(ups)} up of {len(group)} after a minute")
                for key, events in selector.select(0.1):
                    (one, rate), connection = key.data, key.fileobj
                    assert isinstance(connection, socket.socket)
                    try:
                        if events & selectors.EVENT_READ:
                            read = connection.recv(1 << 20)
                            if rate is None:
                                ups.setdefault(one.address, _RATE.unpack(read)[0])
                            else:
                                rate.arrived(len(read), time.monotonic())
                                if rate.enough:
                                    downs.setdefault(one.address, rate.bps)
                        if events & selectors.EVENT_WRITE:
                            connection.send(_CHUNK)
                    except BlockingIOError:
                        continue
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    return {one.address: (downs[one.address], ups[one.address]) for one in group}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.links.probe", description=__doc__)
    parser.add_argument("--server", required=True, help="HOST:PORT of a ProbeServer")
    options = parser.parse_args(arguments)
    host, _, port = options.server.rpartition(":")
    devices = [Asked(**one) for one in json.loads(sys.stdin.read())]
    try:
        found = measure((host, int(port)), devices)
    except OSError as error:
        print(f"link probe: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
