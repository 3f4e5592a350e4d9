"""Fifty uninvited connections send all they can for seconds: clients that are not admitted cost next to nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import flooding
import numpy as np
import psutil
import pytest
import zmq
from places import HELPERS
from processes import LIMIT_S, Multiplication, Stranger, agents, grid, pod

from agent.identity.keys import Curve, Keys, Password
from agent.protocol.entrance import EntranceConnection, enter
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import Heartbeat, Hello, Join, Leave, Message, Probe, Refused, Ticket, decode, encode
from ps.access.access_file import AccessFile
from ps.access.access_list import admit, invite
from ps.access.allowance import SPARE_JOINS
from ps.access.guard import MOST_PROBES
from ps.access.pending import Limits
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Start, Until

FLOODING = str(HELPERS / "flooding.py")
CONNECTIONS, SECONDS = 50, 6.0
PRODUCTS = 20
EMULATED = [2, 3, 4, 5]
MOST_BYTES = 50 << 20
SHAPE = (1, 320, 200, 320)


@pytest.fixture
def server(nothing_left_behind: None, tmp_path: Path) -> Iterator[Server]:
    server = Server(listen=["tcp://127.0.0.1:0"], access=AccessFile(tmp_path / "server"))
    server.notice = lambda text: None
    yield server.start()
    server.stop()
    assert server.error is None


def flood(start: Start, server: Server) -> Program:
    encrypted = [server.public_addresses[0], *getattr(server, "enrolment_addresses", [])]
    plain = [server.address, getattr(server, "data_address", server.address)]
    asked = {
        "plain": [*plain, *encrypted],
        "encrypted": encrypted,
        "key": server.public_key,
        "connections": CONNECTIONS,
        "seconds": SECONDS,
    }
    program = start.command(sys.executable, FLOODING, json.dumps(asked))
    program.expect("flooding")
    return program


@contextlib.contextmanager
def staying_alive(device: Stranger) -> Iterator[None]:
    """It receives its work, sends heartbeats, and answers nothing."""
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.2):
            device.send(Heartbeat())
            while device.socket.poll(0):
                device.socket.recv_multipart()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.alone
def test_a_flood_of_strangers_neither_stops_nor_fills_the_server(start: Start, server: Server) -> None:
    """Two agents, four emulated devices behind modelled links, as in a run, and one device that never answers."""
    agents(start, server, 2)
    pod(start, server, 4, links="model")

    def seconds(product: int, devices: list[int]) -> float:
        begun = time.perf_counter()
        Multiplication(server, SHAPE, grid(320, 320, 40, devices), seed=product).check()
        return time.perf_counter() - begun

    for product in range(PRODUCTS):  # the server now knows what is normal
        seconds(product, [0, 1])
    calm = [seconds(product, EMULATED) for product in range(PRODUCTS)]
    device = Stranger(server)
    device.join()
    with contextlib.closing(device), staying_alive(device):
        calm_copy_s = seconds(0, [0, 1, 6])
        process, heights = psutil.Process(), []
        before_bytes = process.memory_info().rss
        program = flood(start, server)
        flooded: list[float] = []
        copies: list[float] = []
        while "blocks" not in program.output:
            flooded.append(seconds(len(flooded), EMULATED))
            copies.append(seconds(len(copies), [0, 1, 6]))
            heights.append(process.memory_info().rss - before_bytes)
        heights.append(process.memory_info().rss - before_bytes)
    assert program.wait(LIMIT_S) == 0
    sent = json.loads(program.said[-1])
    calm_s, flooded_s = statistics.median(calm), statistics.median(flooded)
    print(
        f"product {1000 * calm_s:.1f} ms, in the flood {1000 * flooded_s:.1f} ms (most {1000 * max(flooded):.0f}); "
        f"withheld blocks {calm_copy_s:.2f} s, in the flood {statistics.median(copies):.2f} s, most "
        f"{max(copies):.2f} s; memory {max(heights) / 2**20:+.1f} MiB; {sent}; {len(flooded)} products"
    )
    assert sent["connections"] >= CONNECTIONS
    assert sent["blocks"] == 0
    assert set(np.unique(server.records.columns()["device"]).tolist()) <= {0, 1, *EMULATED}
    assert len(server.labels) == 7, "no other client has joined"
    assert max(heights) <= MOST_BYTES
    assert max(copies) <= 1.0
    assert flooded_s <= 1.5 * calm_s


@pytest.mark.alone
def test_deadlines_are_checked_however_busy_the_socket_is(start: Start, server: Server) -> None:
    """Lateness is judged even while admitted clients send more than the server can read; here pods of the run, which
    have no limit."""
    agents(start, server, 2)

    def seconds(product: int, devices: list[int]) -> float:
        begun = time.perf_counter()
        Multiplication(server, SHAPE, grid(320, 320, 40, devices), seed=product).check()
        return time.perf_counter() - begun

    for product in range(PRODUCTS):
        seconds(product, [0, 1])
    device = Stranger(server)
    device.join()
    with contextlib.closing(device), staying_alive(device):
        asked = {
            "plain": [server.data_address],
            "encrypted": [],
            "password": server.pod_pass["password"],
            "talkative": 8,
            "connections": 0,
            "seconds": 4.0,
        }
        program = start.command(sys.executable, FLOODING, json.dumps(asked))
        program.expect("flooding")
        assert server.wait_for_devices(3 + 8, LIMIT_S)
        copies: list[float] = []
        while "blocks" not in program.output:
            copies.append(seconds(len(copies), [0, 1, 2]))
    assert program.wait(LIMIT_S) == 0
    print(f"withheld blocks: {[round(s, 2) for s in copies]} s; {program.said[-1]}")
    assert max(copies) <= 1.0


def test_a_device_that_talks_too_much_is_cut_off(server: Server, until: Until) -> None:
    device = Stranger(server)
    said: list[str] = []
    server.notice = said.append
    with contextlib.closing(device):
        device.join()
        device.socket.setsockopt(zmq.SNDTIMEO, 200)  # it may be cut off before everything is sent
        with contextlib.suppress(zmq.Again):
            for _ in range(10_000):
                device.send(Heartbeat())
        until(lambda: server.devices == 0, "the device is cut off")
    assert [text for text in said if "more messages than a device has to say" in text]
    assert server.totals.dropped_messages < 2_000, "the rest is not read"


def test_an_admitted_client_that_does_not_join_is_answered_once_and_cut_off(server: Server, until: Until) -> None:
    device = Stranger(server)
    events = device.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    with contextlib.closing(device):
        for _ in range(500):
            device.send(Heartbeat())
        assert isinstance(device.receive(), Refused)
        assert events.poll(int(1000 * LIMIT_S)), "it is never cut off"
        assert not device.socket.poll(0), "the rest is not answered"
        device.socket.disable_monitor()
        events.close()


@pytest.mark.slow
def test_a_client_that_never_stops_measuring_is_cut_off(server: Server) -> None:
    device = Stranger(server)
    with contextlib.closing(device):
        answers = 0
        for token in range(2 * MOST_PROBES):
            device.send(Probe(token, 0, b""))
            if not device.socket.poll(2000):
                break
            assert isinstance(device.receive(), Probe)
            answers += 1
    assert 64 < answers <= MOST_PROBES + 2


def test_a_device_that_leaves_and_joins_again_and_again_is_cut_off(server: Server, until: Until) -> None:
    device = Stranger(server)
    with contextlib.closing(device):
        device.join()
        for index in range(SPARE_JOINS):
            device.send(Leave(np.array([index], "<u4"), "bye"))
            device.join()
        device.send(Leave(np.array([SPARE_JOINS], "<u4"), "bye"))
        device.send(Join(pack_profiles([Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 1000)]), ["stranger"], {}))
        assert isinstance(device.receive(), Refused)
        until(lambda: not server.peers, "the device is cut off")


def test_one_connection_gets_one_ticket(server: Server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        line.connect(server.address)
        for _ in range(5):
            line.send_multipart([bytes(frame) for frame in encode(Hello("evil"))])
        line.send_multipart([bytes(frame) for frame in encode(Heartbeat())])
        heard: list[Message] = []
        while not heard or not isinstance(heard[-1], Refused):  # the last message is answered last
            assert line.poll(int(1000 * LIMIT_S))
            heard.append(decode(line.recv_multipart()))
    assert [type(answer) for answer in heard] == [Ticket, Refused]


# ---- one message


def by_hand(address: str, mechanism: bytes) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=5.0)
    line.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
    return line


def client_at_the_entrance(server: Server) -> socket.socket:
    line = by_hand(server.address, b"NULL")
    line.sendall(flooding.READY)
    return line


def client_in_the_handshake(server: Server) -> socket.socket:
    """At the port where only ticket holders may speak."""
    return by_hand(server.data_address, b"PLAIN")


def client_with_a_ticket(server: Server) -> socket.socket:
    """Any local process gets one; this one does not join with it."""
    with zmq.Context() as context:
        where, credentials = enter(context, server.address, "evil")
    assert isinstance(credentials, Password)
    line = by_hand(where, b"PLAIN")
    hello = b"\x05HELLO\x04evil" + bytes([len(credentials.text)]) + credentials.text.encode()
    line.sendall(bytes([4, len(hello)]) + hello)
    heard = b""
    while b"WELCOME" not in heard:
        heard += line.recv(4096)
    initiate = b"\x08INITIATE\x0bSocket-Type\x00\x00\x00\x06DEALER"
    line.sendall(bytes([4, len(initiate)]) + initiate)
    return line


@pytest.mark.parametrize("begun", [b"", b"\x02" + (9000).to_bytes(8, "big") + bytes(100)], ids=["idle", "half"])
@pytest.mark.parametrize("client", ["entrance", "handshake", "ticket"])
def test_a_client_that_does_not_join_in_time_is_cut_off(
    nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch, client: str, begun: bytes
) -> None:
    limits = Limits(most=10, per_address=10, seconds=0.3)
    monkeypatch.setattr("ps.access.entrance.LOCAL", limits)
    monkeypatch.setattr("ps.access.guard.UNJOINED", limits)
    server = Server().start()
    server.notice = lambda text: None
    call = {"entrance": client_at_the_entrance, "handshake": client_in_the_handshake, "ticket": client_with_a_ticket}
    try:
        with call[client](server) as line:
            line.sendall(begun)
            heard = b"-"
            while heard:  # ZeroMQ's own messages, then the end; never a timeout
                with contextlib.suppress(ConnectionError):
                    heard = line.recv(4096)
                    continue
                break
    finally:
        server.stop()
    assert server.error is None


CALLERS = (client_at_the_entrance, client_in_the_handshake, client_with_a_ticket)
WORDS = (flooding.huge, flooding.unfinished, flooding.long_text, flooding.small)


@pytest.mark.alone
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.__name__)
def test_a_client_that_has_not_joined_is_cut_off_before_its_messages_cost_anything(
    server: Server, caller: Callable[[Server], socket.socket], words: Callable[[], Iterator[bytes]]
) -> None:
    process, before_bytes, sent = psutil.Process(), psutil.Process().memory_info().rss, 0
    deadline_s = time.monotonic() + LIMIT_S
    with caller(server) as line:
        line.settimeout(2.0)
        for part in words():
            try:
                line.sendall(part)
            except (ConnectionError, TimeoutError):
                break  # it is cut off, or the server does not read
            sent += len(part)
            assert process.memory_info().rss - before_bytes <= MOST_BYTES
            assert time.monotonic() < deadline_s, "it is never cut off"
        else:
            pytest.fail("everything was read")
    print(f"cut off after {sent / 2**20:.2f} MiB, {(process.memory_info().rss - before_bytes) / 2**20:+.1f} MiB")
    assert server.totals.longest_turn_s < 0.2
    assert server.devices <= 1


# ---- clients that only connect and leave


@pytest.mark.alone
def test_clients_that_only_connect_keep_no_other_from_the_entrance(
    start: Start, nothing_left_behind: None, tmp_path: Path
) -> None:
    """Silent ones, and ones that begin a greeting, 200 of each per second and address."""
    access = AccessFile(tmp_path / "server")
    access.change(lambda book: (invite(book, "i", "token", 100, 1e5, time.time()), None))
    server = Server(listen=["tcp://127.0.0.1:0"], access=access).start()
    server.notice = lambda text: None

    def enrol(limit_s: float) -> float:
        begun_s = time.monotonic()
        with zmq.Context() as context:
            curve = Curve(server.public_key, Keys.new())
            entrance = EntranceConnection(context, server.enrolment_addresses[0], Hello("phone", "token"), curve)
            try:
                while (answer := entrance.answer()) is None:
                    left_s = begun_s + limit_s - time.monotonic()
                    assert left_s > 0, "it is not admitted"
                    entrance.socket.poll(int(1000 * left_s) + 1)
            finally:
                entrance.close()
        assert not isinstance(answer, Refused)
        return time.monotonic() - begun_s

    def ticket() -> float:
        begun_s = time.monotonic()
        with zmq.Context() as context:
            enter(context, server.address, "device")
        return time.monotonic() - begun_s

    try:
        calm_s = enrol(LIMIT_S)
        asked = {
            "plain": [server.address],
            "encrypted": server.enrolment_addresses,
            "key": server.public_key,
            "coming": ["", (b"\xff" + bytes(8) + b"\x7f").hex()],
            "connections": 0,
            "seconds": 9.0,
        }
        program = start.command(sys.executable, FLOODING, json.dumps(asked))
        program.expect("flooding")
        time.sleep(5.0)  # until a queue would be long
        enrolled = [enrol(2.0) for _ in range(3)]
        tickets = [ticket() for _ in range(3)]
        assert program.running, "the flood ended too early"
        print(f"enrolled in {calm_s:.2f} s; while they come {enrolled}, a ticket {tickets}")
        assert max(tickets) <= 2.0
    finally:
        server.stop()
    assert server.error is None


# ---- admitted clients that measure


@pytest.mark.slow
def test_an_endless_message_after_a_measurement_does_not_fill_the_server(server: Server) -> None:
    """Forty connections of this machine, each after one small PROBE."""
    process, before_bytes = psutil.Process(), psutil.Process().memory_info().rss
    chunk, heights, sent = flooding.frame(bytes(1 << 18), more=True), [0], 0
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(client_with_a_ticket(server)) for _ in range(40)]
        for line in lines:
            line.settimeout(0.5)
            with contextlib.suppress(OSError):  # the server may hold too many connections already
                line.sendall(flooding.message(*flooding.PROBE))
                line.recv(4096)
        for _ in range(60):
            for line in list(lines):
                try:
                    line.sendall(chunk)
                    sent += len(chunk)
                except OSError:
                    lines.remove(line)
            heights.append(process.memory_info().rss - before_bytes)
        time.sleep(0.5)
        heights.append(process.memory_info().rss - before_bytes)
    print(f"sent {sent / 2**20:.0f} MiB; memory {max(heights) / 2**20:+.1f} MiB; {len(lines)} left")
    assert max(heights) <= MOST_BYTES


@pytest.mark.slow
def test_one_key_that_measures_over_many_connections_does_not_fill_the_server(
    start: Start, nothing_left_behind: None, tmp_path: Path
) -> None:
    keys, access = Keys.new(), AccessFile(tmp_path / "server")
    invited = invite(access.read(), "i", "token", 1, 1e5, time.time())
    access.change(lambda book: (admit(invited, keys.public, "token", "evil", time.time())[0], None))
    server = Server(listen=["tcp://127.0.0.1:0"], access=access).start()
    server.notice = lambda text: None
    try:
        process, before_bytes, heights = psutil.Process(), psutil.Process().memory_info().rss, [0]
        asked = {
            "plain": [],
            "encrypted": server.public_addresses,
            "key": server.public_key,
            "keys": [keys.public, keys.secret],
            "begun": 60,
            "connections": 0,
            "seconds": 8.0,
        }
        program = start.command(sys.executable, FLOODING, json.dumps(asked))
        program.expect("flooding")
        while "blocks" not in program.output:
            heights.append(process.memory_info().rss - before_bytes)
            time.sleep(0.02)
        assert program.wait(LIMIT_S) == 0
        print(f"memory {max(heights) / 2**20:+.1f} MiB; {program.said[-1]}")
        assert json.loads(program.said[-1])["answered"] >= 1
        assert max(heights) <= MOST_BYTES
    finally:
        server.stop()
    assert server.error is None


@pytest.mark.alone
def test_a_client_that_never_stops_measuring_does_not_keep_the_server_busy(start: Start, server: Server) -> None:
    agents(start, server, 2)

    def seconds(product: int) -> float:
        begun = time.perf_counter()
        Multiplication(server, SHAPE, grid(320, 320, 40, [0, 1]), seed=product).check()
        return time.perf_counter() - begun

    for product in range(PRODUCTS):
        seconds(product)
    calm = [seconds(product) for product in range(PRODUCTS)]
    asked = {"plain": [server.address], "encrypted": [], "measuring": 16, "connections": 0, "seconds": 5.0}
    program = start.command(sys.executable, FLOODING, json.dumps(asked))
    program.expect("flooding")
    busy_s, begun_s = server.totals.busy_s, time.monotonic()
    flooded: list[float] = []
    while "blocks" not in program.output:
        flooded.append(seconds(len(flooded)))
    busy = (server.totals.busy_s - busy_s) / (time.monotonic() - begun_s)
    assert program.wait(LIMIT_S) == 0
    calm_s, flooded_s = statistics.median(calm), statistics.median(flooded)
    print(
        f"product {1000 * calm_s:.1f} ms, while 16 measure {1000 * flooded_s:.1f} ms (most {1000 * max(flooded):.0f}); "
        f"{program.said[-1]}; the server is busy for {busy:.0%}"
    )
    assert flooded_s <= 2 * calm_s
    assert max(flooded) <= 1.0
