"""Attack: messages of very many frames. A frame may be two bytes long, and each costs its receiver far more.

The clients are on this machine and have a ticket: no uninvited client elsewhere can send a message at all.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import zmq
from processes import Multiplication, grid, pod

from agent.identity.keys import Password
from agent.protocol.entrance import enter
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import Join, encode
from ps.access.admission import MOST_SHUT_OUT_HERE_S
from ps.access.guard import FIRST_BYTES, UNJOINED
from ps.transport.receiving import READING_S
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Serve, Start, Until

FRAMES = 400_000  # 800 KB
LINES = 20
EMPTY, LAST = b"\x01\x00", b"\x00\x00"


class Line:
    """A raw connection that has got through ZMTP's handshake."""

    def __init__(self, server: Server) -> None:
        with zmq.Context() as context:
            where, credentials = enter(context, server.address, "test")
        assert isinstance(credentials, Password)
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10.0)
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32))
        secret = credentials.text.encode()
        self.command(b"\x05HELLO\x06device" + bytes([len(secret)]) + secret)
        self.hears(b"WELCOME")
        self.command(b"\x08INITIATE\x0bSocket-Type\x00\x00\x00\x06DEALER")

    def command(self, body: bytes) -> None:
        self.socket.sendall(b"\x04" + bytes([len(body)]) + body)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(
            b"".join(
                bytes([2 | (index + 1 < len(frames))]) + len(part).to_bytes(8, "big") + part
                for index, part in enumerate(frames)
            )
        )

    def send_frames(self, count: int) -> None:
        self.socket.sendall(EMPTY * (count - 1) + LAST)

    def hears(self, text: bytes) -> None:
        heard = b""
        while text not in heard:
            data = self.socket.recv(4096)
            assert data, f"cut before {text!r}"
            heard += data

    @property
    def cut(self) -> bool:
        try:
            while self.socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


JOIN = [bytes(f) for f in encode(Join(pack_profiles([Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 9)]), ["evil"], {}))]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("joined", [False, True])
def test_a_message_of_very_many_frames_is_not_kept_and_holds_up_nobody(
    joined: bool, start: Start, serve: Serve, until: Until
) -> None:
    """Read as a whole it took one turn of three seconds and 140 MiB."""
    server = serve()
    pod(start, server, 4)
    Multiplication(server, (1, 96, 32, 96)).check()
    line = Line(server)
    if joined:
        line.send(*JOIN)
        line.hears(b"heartbeat_s")
    before = server.totals.dropped_messages
    server.totals.longest_turn_s = 0.0
    line.send_frames(FRAMES)
    until(lambda: server.totals.dropped_messages > before, "the message is refused")
    for seed in range(3):
        Multiplication(server, (1, 96, 32, 96), grid(96, 96, 24, [0, 1, 2, 3]), seed=seed).check()
    assert line.cut
    assert server.totals.longest_turn_s < 20 * READING_S
    assert server.devices == 4
    line.socket.close()


@pytest.mark.slow
def test_clients_of_this_machine_pay_for_frames_that_are_discarded(serve: Serve, until: Until) -> None:
    """Otherwise ticket after ticket, 100 per second, would keep the server's thread busy."""
    server = serve()
    line = Line(server)
    line.send_frames(FRAMES)
    assert line.cut

    def waits() -> bool:
        """A new client waits, and is let in all the same, on the connection that it made: libzmq would otherwise leave
        it alone for ten seconds, until its ticket has expired."""
        begun_s = time.monotonic()
        Line(server).socket.close()
        took_s = time.monotonic() - begun_s
        assert took_s < MOST_SHUT_OUT_HERE_S + 2.0
        return took_s > 0.2

    until(waits, "clients of this machine wait")


@pytest.mark.slow
def test_a_message_that_is_never_finished_is_not_waited_for(serve: Serve, until: Until) -> None:
    """ZeroMQ keeps such frames until the last has come, and each costs 32 times what it takes on the line."""
    server = serve()
    lines = [Line(server) for _ in range(LINES)]
    ends = {line.socket.getsockname() for line in lines}
    for line in lines:
        line.socket.sendall(EMPTY * (FIRST_BYTES * 3 // 8))  # three quarters of what a connection may send at first

    def are_cut() -> bool:
        held = {found.raddr for found in psutil.Process().net_connections() if found.status == "ESTABLISHED"}
        return not ends & held

    begun_s = time.monotonic()
    until(are_cut, "all are cut")
    assert time.monotonic() < begun_s + UNJOINED.seconds / 2, "long before they would be cut for not joining"
    for line in lines:
        line.socket.close()
