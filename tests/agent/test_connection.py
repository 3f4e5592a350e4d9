"""A device's end of the connection: when it takes the server for gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq

from agent.identity.keys import Password
from agent.protocol.arriving import NO_CONNECTION, arrived_within, descriptor
from agent.protocol.connection import SILENT_AFTER, Connection
from agent.protocol.profile import PROFILE, Profile, pack_profiles
from agent.protocol.wire import Heartbeat, Join, Welcome, encode, send_frames
from ps.transport.server import Server

HEARTBEAT_S = 0.5


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """A connection with its server, both controlled by the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.clock = HandClock()
        self.server = context.socket(zmq.ROUTER)
        port = self.server.bind_to_random_port("tcp://127.0.0.1")
        join = Join(np.zeros(1, PROFILE), ["one"])
        self.arrives = False  # parts of a message arrive
        self.connection = Connection(
            context, f"tcp://127.0.0.1:{port}", join, clock=self.clock, arrived_within=lambda *_: self.arrives
        )
        self._identity = self.server.recv_multipart()[0]
        self.say(Welcome(HEARTBEAT_S, "a run"))

    def say(self, message: Heartbeat | Welcome) -> None:
        send_frames(self.server, [self._identity, *encode(message)])
        assert self.connection.socket.poll(30_000)
        self.connection.receive(0)

    def turn(self, seconds: float) -> bool:
        self.clock.now_s += seconds
        self.connection.beat()
        return self.connection.lost


@pytest.fixture
def line() -> Iterator[Line]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield Line(context)
    context.destroy(linger=0)


def test_a_silent_server_is_lost_after_the_limit_of_heartbeats(line: Line) -> None:
    turns = 4 * SILENT_AFTER
    assert not any(line.turn(HEARTBEAT_S / 4) for _ in range(turns))
    assert line.turn(HEARTBEAT_S / 4)


def test_any_message_ends_the_silence(line: Line) -> None:
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER))
    line.say(Heartbeat())
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER))


def test_time_while_this_process_was_stopped_does_not_count_as_silence(line: Line) -> None:
    assert not line.turn(1000 * HEARTBEAT_S)
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER - 1))
    assert line.turn(HEARTBEAT_S)


def test_a_server_whose_message_is_arriving_is_not_silent(line: Line) -> None:
    """On a slow line a message may take longer than the silence limit."""
    line.arrives = True
    assert not any(line.turn(HEARTBEAT_S) for _ in range(4 * SILENT_AFTER))
    line.arrives = False
    assert line.turn(HEARTBEAT_S)


def test_the_kernel_knows_when_bytes_last_came() -> None:
    """Even a part of a message counts, which ZeroMQ does not show."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"\xff" + bytes(7) + b"\1\x7f\3\0" + b"NULL".ljust(52, b"\0"))  # ZMTP 3.0, no security
        assert len(raw.recv(64, socket.MSG_WAITALL)) == 64
        ready = b"\5READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        raw.sendall(bytes([4, len(ready)]) + ready + b"\0\4some")
        assert router.poll(30_000)
        connection = descriptor(router.recv_multipart(copy=False)[1])
        while arrived_within(connection, 0.05):  # until the complete message is old
            assert not router.poll(1)
        raw.sendall(b"\0\4half"[:-2])
        until = time.monotonic() + 30
        while not arrived_within(connection, 0.05):
            assert time.monotonic() < until
        assert not arrived_within(connection, 0.0)
        assert not router.poll(0), "ZeroMQ shows a part"
    context.destroy(linger=0)
    assert not arrived_within(NO_CONNECTION, 60.0)


def test_a_descriptor_that_is_no_tcp_connection_gives_no_answer() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not arrived_within(one.fileno(), 60.0)
        assert one.fileno() >= 0, "it was closed"
    with Path(__file__).open() as file:
        assert not arrived_within(file.fileno(), 60.0)
        assert file.readline()


def test_a_listener_to_joins_finds_the_new_devices_in_the_servers_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    server, context = Server(), zmq.Context[zmq.Socket[bytes]]()
    found: list[tuple[int, int]] = []
    joined = server.attendance.joined

    def told(ids: Sequence[int], labels: Sequence[str], about: Mapping[str, str], at_s: float) -> None:
        found.append((len(server.profiles), len(server.labels)))
        joined(ids, labels, about, at_s)

    monkeypatch.setattr(server.attendance, "joined", told)
    server.start()
    try:
        profile = Profile(1e9, 0.0, 1e7, 1e7, 0.01, 1 << 30, 4)
        join, pass_ = Join(pack_profiles([profile] * 3), ["a", "b", "c"]), Password(server.pod_pass["password"])
        connection = Connection(context, server.data_address, join, credentials=pass_)
        assert server.wait_for_devices(3, 30.0)
        connection.close()
    finally:
        server.stop()
        context.destroy(linger=0)
    assert found == [(3, 3)]
