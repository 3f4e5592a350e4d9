"""A device's end of the line: when it takes the server for gone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from agent.connection import SILENT_AFTER, Connection
from agent.profile import PROFILE
from agent.wire import Heartbeat, Join, Welcome, encode, send_frames

HEARTBEAT_S = 0.5


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Line:
    """A connection with its server, both in our hands."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.clock = HandClock()
        self.server = context.socket(zmq.ROUTER)
        port = self.server.bind_to_random_port("tcp://127.0.0.1")
        join = Join(np.zeros(1, PROFILE), ["one"])
        self.connection = Connection(context, f"tcp://127.0.0.1:{port}", join, clock=self.clock)
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


def test_a_silent_server_is_lost_after_so_many_heartbeats(line: Line) -> None:
    turns = 4 * SILENT_AFTER
    assert not any(line.turn(HEARTBEAT_S / 4) for _ in range(turns))
    assert line.turn(HEARTBEAT_S / 4)


def test_a_word_ends_the_silence(line: Line) -> None:
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER))
    line.say(Heartbeat())
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER))


def test_time_in_which_this_process_was_stopped_is_not_the_servers_silence(line: Line) -> None:
    assert not line.turn(1000 * HEARTBEAT_S)
    assert not any(line.turn(HEARTBEAT_S) for _ in range(SILENT_AFTER - 1))
    assert line.turn(HEARTBEAT_S)
