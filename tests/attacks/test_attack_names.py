"""Names of connections, which ZeroMQ lets a client choose: no name ends the server, and none is taken from another."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq
from places import HELPERS
from processes import LIMIT_S, Stranger

from agent.identity.keys import Curve, Keys
from agent.protocol.entrance import enter
from agent.protocol.wire import Hello, Probe, Ticket, decode, encode
from ps.access.access_file import AccessFile
from ps.access.access_list import invite
from ps.access.admission import HANDSHAKES
from ps.access.guard import MOST_SILENT
from ps.transport.server import Server

LONE_SERVER = str(HELPERS / "lone_server.py")
# first names that an unseeded libzmq gives: of the first ROUTER of a process, and of the second
FIRST, SECOND = 0x6B8B4567, 0x2AE8944A
HELLO = [bytes(frame) for frame in encode(Hello("evil"))]
PROBE = [bytes(frame) for frame in encode(Probe(1, 0, b""))]
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Lone:
    address: str
    enrolment: str
    key: str
    data: str
    password: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def lone_server(folder: Path, *options: str) -> Iterator[Lone]:
    command = [sys.executable, LONE_SERVER, str(folder), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Lone(**json.loads(process.stdout.readline()), process=process)
        finally:
            process.stdin.close()
            process.wait(LIMIT_S)


def chosen(number: int) -> bytes:
    return b"\0" + (number % 2**32).to_bytes(4, "big")


def line(context: Context, where: str, name: bytes = b"", curve: str = "") -> zmq.Socket[bytes]:
    opened = context.socket(zmq.DEALER)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.RECONNECT_IVL, -1)
    if name:
        opened.setsockopt(zmq.ROUTING_ID, name)
    if curve:
        Curve(curve, Keys.new()).apply(opened)
    opened.connect(where)
    return opened


def at_the_entrance(lone: Lone, context: Context, name: bytes) -> zmq.Socket[bytes]:
    opened = line(context, lone.address, name)
    opened.send_multipart(HELLO)
    return opened


def at_the_encrypted_entrance(lone: Lone, context: Context, name: bytes) -> zmq.Socket[bytes]:
    opened = line(context, lone.enrolment, name, lone.key)
    opened.send_multipart(HELLO)
    return opened


def at_the_data_port(lone: Lone, context: Context, name: bytes) -> zmq.Socket[bytes]:
    where, credentials = enter(context, lone.address, "evil")
    opened = context.socket(zmq.DEALER)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.RECONNECT_IVL, -1)
    credentials.apply(opened)
    if name:
        opened.setsockopt(zmq.ROUTING_ID, name)
    opened.connect(where)
    opened.send_multipart(PROBE)
    return opened


Connect = Callable[[Lone, Context, bytes], "zmq.Socket[bytes]"]
PORTS: list[tuple[Connect, tuple[str, ...]]] = [
    (at_the_entrance, ("predictable",)),
    (at_the_encrypted_entrance, ("predictable",)),
    (at_the_data_port, ()),
]


@pytest.mark.parametrize(("connect", "options"), PORTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_client_that_takes_a_future_name_does_not_end_the_server(
    nothing_left_behind: None, tmp_path: Path, connect: Connect, options: tuple[str, ...]
) -> None:
    """The attacker holds names that the next connections would get, and then connects until the server would give them.
    At the entrance that is harmless even if the attacker knows them all; at the data port it does not know them."""
    with lone_server(tmp_path, *options) as lone, zmq.Context() as context:
        held = [connect(lone, context, chosen(first + 8 + n)) for first in (FIRST, SECOND) for n in range(4)]
        time.sleep(0.3)
        for _ in range(24):
            caller = connect(lone, context, b"")
            held.append(caller)
            assert caller.poll(int(1000 * LIMIT_S)), "no answer: the server is dead"
        assert lone.process.poll() is None
        for opened in held:
            opened.close()


def test_a_client_that_speaks_under_a_future_name_is_ignored(nothing_left_behind: None, tmp_path: Path) -> None:
    """Even if the guess is right, because the server knows which number it has reached."""
    with lone_server(tmp_path, "predictable") as lone, zmq.Context() as context:
        evil = at_the_data_port(lone, context, chosen(FIRST + 1000))
        ended = evil.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        assert ended.poll(int(1000 * LIMIT_S)), "it is not cut off"
        assert not evil.poll(0), "it was answered"
        honest = at_the_data_port(lone, context, b"")
        assert honest.poll(int(1000 * LIMIT_S))
        assert isinstance(decode(honest.recv_multipart()), Probe)
        evil.disable_monitor()
        for opened in (ended, evil, honest):
            opened.close(linger=0)


@pytest.mark.parametrize("taken", ["each other's", "a device's"])
def test_connections_that_take_a_name_and_send_much_leave_nothing_open(nothing_left_behind: None, taken: str) -> None:
    """A ROUTER accepts nothing from a second connection with a taken name. That connection must not stay open."""
    server = Server(heartbeat_s=0.2).start()
    server.notice = lambda text: None
    port = int(server.data_address.rpartition(":")[2])
    try:
        with zmq.Context() as context:
            honest = Stranger(server)
            honest.join()
            name = next(iter(server.peers)) if taken == "a device's" else b"same"
            many = []
            for _ in range(4):
                where, credentials = enter(context, server.address, "evil")
                evil = context.socket(zmq.DEALER)
                many.append(evil)
                evil.setsockopt(zmq.RECONNECT_IVL, -1)
                evil.setsockopt(zmq.ROUTING_ID, name)
                evil.setsockopt(zmq.SNDHWM, 0)
                credentials.apply(evil)
                evil.connect(where)
                for _ in range(2000):
                    evil.send(bytes(100))
            for evil in many:  # none is answered; by then all have sent what they can
                assert not evil.poll(200)
                evil.close(linger=0)
            honest.close()
            deadline_s = time.monotonic() + LIMIT_S
            while still := [one for one in psutil.Process().net_connections() if one.laddr.port == port and one.raddr]:
                assert time.monotonic() < deadline_s, still
                time.sleep(0.05)
            again = Stranger(server)  # devices can still join
            again.join()
            again.close()
    finally:
        server.stop()


def test_first_names_differ_between_processes(nothing_left_behind: None) -> None:
    given = []
    for _ in range(3):
        server = Server().start()
        device = Stranger(server)
        device.join()
        given.append(int.from_bytes(next(iter(server.peers))[1:], "big"))
        device.close()
        server.stop()
    few = 16  # at most this many names were given before the device's
    assert all((number - FIRST) % 2**32 > few for number in given), "names begin at the unseeded first one"
    assert all(abs(one - other) > few for one, other in itertools.combinations(given, 2))


def test_few_admitted_clients_may_stay_silent(nothing_left_behind: None) -> None:
    """Each holds a name, which may be chosen; so a machine may have only few such connections at a time."""
    server = Server().start()
    server.notice = lambda text: None
    try:
        with zmq.Context() as context, contextlib.ExitStack() as kept:
            events = []
            for _ in range(3 * MOST_SILENT):
                where, credentials = enter(context, server.address, "evil")
                silent = kept.enter_context(context.socket(zmq.DEALER))
                silent.setsockopt(zmq.RECONNECT_IVL, -1)
                credentials.apply(silent)
                events.append(kept.enter_context(silent.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
                kept.callback(silent.disable_monitor)
                silent.connect(where)
            deadline_s = time.monotonic() + 3.0  # less than the time limit of each
            while sum(bool(event.poll(0)) for event in events) < 2 * MOST_SILENT:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            honest = Stranger(server)
            honest.join()
            honest.close()
    finally:
        server.stop()


@pytest.mark.slow
def test_one_key_cannot_connect_again_and_again(nothing_left_behind: None, tmp_path: Path) -> None:
    access = AccessFile(tmp_path / "server")
    access.change(lambda book: (invite(book, "i", "token", 1, 1e5, time.time()), None))
    server = Server(listen=["tcp://127.0.0.1:0"], access=access).start()
    server.notice = lambda text: None
    keys = Keys.new()
    try:
        with zmq.Context() as context, contextlib.ExitStack() as kept:

            def opened(where: str) -> zmq.Socket[bytes]:
                fresh = kept.enter_context(context.socket(zmq.DEALER))
                fresh.setsockopt(zmq.LINGER, 0)
                fresh.setsockopt(zmq.RECONNECT_IVL, -1)
                Curve(server.public_key, keys).apply(fresh)
                fresh.connect(where)
                return fresh

            enrolling = opened(server.enrolment_addresses[0])
            enrolling.send_multipart([bytes(frame) for frame in encode(Hello("evil", "token"))])
            assert enrolling.poll(int(1000 * LIMIT_S))
            assert isinstance(decode(enrolling.recv_multipart()), Ticket)
            many = 2 * int(HANDSHAKES[0])
            succeeded = []
            for _ in range(many):
                fresh = kept.enter_context(context.socket(zmq.DEALER))
                fresh.setsockopt(zmq.RECONNECT_IVL, -1)
                Curve(server.public_key, keys).apply(fresh)
                succeeded.append(kept.enter_context(fresh.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)))
                kept.callback(fresh.disable_monitor)
                fresh.connect(server.public_addresses[0])
            time.sleep(2.0)
            count = sum(bool(event.poll(0)) for event in succeeded)
            assert HANDSHAKES[0] <= count <= HANDSHAKES[0] + 5
    finally:
        server.stop()
    assert server.error is None
