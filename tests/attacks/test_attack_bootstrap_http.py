"""The server of the bootstrap files under clients that trickle, stall or ask for too much: honest phones are served."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from android import http_files
from android.http_files import Answer, Answering, HttpFiles, Request
from android.serving import Serving

if TYPE_CHECKING:
    from conftest import Until

HONEST_S = 2.0  # for the whole bundle, at most


@pytest.fixture
def files(nothing_left_behind: None) -> Iterator[Serving]:
    with Serving("127.0.0.1") as served:
        yield served


class Tricklers:
    """Connections that send single bytes without end, and never a whole request."""

    def __init__(self, port: int, count: int, hosts: int = 1) -> None:
        self.lines = [
            socket.create_connection(("127.0.0.1", port), 10, source_address=(f"127.0.0.{2 + i % hosts}", 0))
            for i in range(count)
        ]
        self.cut = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._trickle)
        self._thread.start()

    def _trickle(self) -> None:
        left = list(self.lines)
        while not self._stop.wait(0.05) and left:
            for line in list(left):
                try:
                    line.send(b"G")
                except OSError:
                    left.remove(line)
                    self.cut += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for line in self.lines:
            line.close()


@pytest.fixture
def trickle(files: Serving) -> Iterator[Callable[..., Tricklers]]:
    made: list[Tricklers] = []

    def trickle(count: int, hosts: int = 1) -> Tricklers:
        made.append(Tricklers(files.port, count, hosts))
        return made[-1]

    yield trickle
    for tricklers in made:
        tricklers.close()


def fetch_s(files: Serving) -> float:
    """Seconds that an honest phone takes for the bundle."""
    begun = time.monotonic()
    with urllib.request.urlopen(f"{files.url}/agent.zip", timeout=HONEST_S) as answer:
        assert answer.read() == files.bundle.data
    return time.monotonic() - begun


@pytest.mark.parametrize(("count", "hosts"), [(32, 1), (200, 1), (400, 40)])
def test_clients_that_trickle_do_not_keep_a_phone_waiting(
    files: Serving, trickle: Callable[..., Tricklers], count: int, hosts: int
) -> None:
    trickle(count, hosts)
    slowest_s = max(fetch_s(files) for _ in range(5))
    print(f"{count} trickling from {hosts} addresses: the bundle took {slowest_s:.3f} s at most")
    assert slowest_s < HONEST_S


def test_a_phone_with_the_address_of_the_tricklers_is_served_too(
    files: Serving, trickle: Callable[..., Tricklers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one router, all have one address."""
    monkeypatch.setattr(http_files, "PER_ADDRESS", 8)
    ours = [socket.create_connection(("127.0.0.1", files.port), 10) for _ in range(20)]
    assert fetch_s(files) < HONEST_S
    for line in ours[:12]:  # the oldest were cut off
        assert line.recv(1) == b""
    for line in ours:
        line.close()


def test_time_is_counted_per_connection_not_per_byte(
    files: Serving, trickle: Callable[..., Tricklers], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_files, "REQUEST_S", 0.3)
    tricklers = trickle(10)
    until(lambda: tricklers.cut == 10, "all are cut off, although they never paused", 10.0)


def test_a_client_that_does_not_read_its_answer_is_cut_off(
    nothing_left_behind: None, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large(Answering):
        def answer(self, request: Request, body: bytes) -> Answer:
            return Answer(HTTPStatus.OK, bytes(32 << 20))  # more than fits into the kernel's buffers

    monkeypatch.setattr(http_files, "WHOLE_S", 0.3)
    served = HttpFiles(("127.0.0.1", 0), Large())
    try:
        with socket.create_connection(("127.0.0.1", served.port), 10) as line:
            line.sendall(b"GET /agent.zip HTTP/1.1\r\n\r\n")
            got = line.recv(1)
            until(lambda: not served.connections, "the client is cut off", 10.0)
            while piece := line.recv(1 << 20):
                got += piece
    finally:
        served.stop()
    assert len(got) < 32 << 20


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 3000 + b"\r\n", b"HTTP/1.1 431"),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 400"),
        (b"POST /agent.zip HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", b"HTTP/1.1 501"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
    ],
)
def test_a_header_that_is_too_long_or_invalid_is_answered_once_and_closed(
    files: Serving, head: bytes, answer: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", files.port), 10) as line:
        line.sendall(head)
        line.shutdown(socket.SHUT_WR)
        said = b""
        while piece := line.recv(65536):
            said += piece
    assert said.startswith(answer)
    assert fetch_s(files) < HONEST_S
