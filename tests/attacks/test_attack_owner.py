"""A hostile server and an owner's limits: whatever it sends, the agent's memory stays within what is lent, and its
traffic within the daily cap. The server is a bare ROUTER, the agent a real process."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from processes import FAST

from agent.__main__ import is_loopback
from agent.compute.memory_budget import MEMORY_SLACK, MemoryBudget, output_bytes
from agent.owner.rules import DataPlan
from agent.protocol.incoming import LOOK_S, on_wire
from agent.protocol.wire import (
    BLOCK,
    DONE,
    PIECE,
    TOO_LARGE,
    Cancel,
    Join,
    Leave,
    Message,
    Result,
    Ticket,
    Welcome,
    Work,
    decode,
    encode,
)

if TYPE_CHECKING:
    from conftest import Program, Start, Until

LIMIT_S = 30.0
MB, MIB = 1_000_000, 1 << 20
LENT = 16 * MB
# Beyond MEMORY_SLACK times the lent memory: the interpreter's own growth (first messages, first product, BLAS's
# buffers) and, for an endless message, what arrives between two checks of the gate at 100 MB/s.
SLACK = 48 * MB


class HostileServer:
    """Admits the agent, and sends it anything."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._entrance, self._authenticator = self._context.socket(zmq.ROUTER), self._context.socket(zmq.REP)
        self._authenticator.bind("inproc://zeromq.zap.01")
        self.address = f"tcp://127.0.0.1:{self._entrance.bind_to_random_port('tcp://127.0.0.1')}"
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)  # unread answers stay with the agent
        self.socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._stopped = threading.Event()
        self._doorkeeper = threading.Thread(target=self._let_in)
        self._doorkeeper.start()
        self.agent = b""
        self.said: list[str] = []
        self.offered: list[int] = []  # bytes of memory, one entry per join
        self.left: list[Leave] = []
        self.blocks = itertools.count(1)

    def _let_in(self) -> None:
        """Every client gets a ticket, and every ticket is valid."""
        poller = zmq.Poller()
        for line in (self._entrance, self._authenticator):
            poller.register(line, zmq.POLLIN)
        while not self._stopped.is_set():
            for line, _ in poller.poll(20):
                frames = line.recv_multipart()
                if line is self._authenticator:
                    line.send_multipart([frames[0], frames[1], b"200", b"OK", b"", b""])
                else:
                    line.send_multipart([frames[0], *encode(Ticket(self._port, "come in"))])

    def receive(self, limit_s: float = LIMIT_S) -> Message:
        """The agent's next message; whenever it joins, it is admitted."""
        assert self.socket.poll(int(1000 * limit_s)), f"the agent says nothing more; so far {self.said}"
        self.agent, *frames = self.socket.recv_multipart()
        message = decode(frames)
        self.said.append(type(message).__name__)
        if isinstance(message, Join):
            self.offered.append(int(message.profiles["memory_bytes"][0]))
            self.send(Welcome(10.0, "hostile"))  # allows 80 s of silence
        if isinstance(message, Leave):
            self.left.append(message)
        return message

    def until(self, kind: type[Message]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if isinstance(message := self.receive(), kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def send(self, message: Message) -> None:
        self.socket.send_multipart([self.agent, *(bytes(frame) for frame in encode(message))])

    def work(self, rows: int, inner: int, columns: int, count: int = 1, chunks: int = 1) -> None:
        """`count` blocks of one product, with operands of ones; the previous product is released."""
        first = 2 * next(self.blocks)
        pieces = np.array([(first, 0, 1, rows, inner), (first + 1, 0, 1, columns, inner)], PIECE)
        down = 4 * inner * chunks * (rows + columns)
        blocks = [(0, first, n, first, first + 1, 0, 0, 0, 0, 1, rows, columns, 0, chunks, down) for n in range(count)]
        data = [np.ones(rows * inner, np.float32), np.ones(columns * inner, np.float32)]
        self.send(Work(1, np.array([first - 2, first - 1], np.uint32), pieces, np.array(blocks, BLOCK), data))

    def close(self) -> None:
        self._stopped.set()
        self._doorkeeper.join()
        self._context.destroy(linger=0)


def read_exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += peer.recv(size - len(found))
    return found


class RawServer:
    """Speaks ZMTP 3.0 without a library: libzmq itself would send no message before it is complete."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def endless_message(
        self, agent: Program, words: str, frame_bytes: int, most_bytes: int, at_the_entrance: bool = False
    ) -> int:
        """Admit the agent, then send one endless message at about 100 MB/s until it hangs up with these words, or after
        the given number of bytes. Returns the bytes sent."""
        port = self._listener.getsockname()[1]
        peer = self._shake_hands(b"NULL")
        if not at_the_entrance:
            with peer:
                _say(peer, Ticket(port, "come in"))
                peer = self._shake_hands(b"PLAIN")
            _say(peer, Welcome(10.0, "hostile"))
        with peer:
            if not at_the_entrance:
                agent.expect("joined")
            frame, sent, pause = b"\x03" + frame_bytes.to_bytes(8, "big") + bytes(frame_bytes), 0, threading.Event()
            try:
                while sent < most_bytes and words not in agent.output:
                    peer.sendall(frame)
                    sent += len(frame)
                    pause.wait(frame_bytes / 100e6)
            except OSError:
                pass  # the agent has hung up
        agent.expect(words)
        return sent

    def begin_and_hang_up(self, size: int) -> None:
        """At the entrance: send a part of a message, wait until the agent has looked, and close the connection."""
        with self._shake_hands(b"NULL") as peer:
            peer.sendall((b"\x03" + (1 << 15).to_bytes(8, "big") + bytes(1 << 15)) * (size >> 15))
            threading.Event().wait(10 * LOOK_S)

    def _shake_hands(self, mechanism: bytes) -> socket.socket:
        peer, _ = self._listener.accept()
        peer.settimeout(LIMIT_S)
        peer.sendall(
            b"\xff"
            + bytes(8)
            + b"\x7f\x03\x00"
            + mechanism.ljust(20, b"\0")
            + bytes([mechanism == b"PLAIN"] + [0] * 31)
        )
        read_exactly(peer, 64)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity" + bytes(4)
        if mechanism == b"PLAIN":
            read_exactly(peer, read_exactly(peer, 2)[1])  # HELLO, with the password
            peer.sendall(b"\x04\x08\x07WELCOME")
        else:
            peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        read_exactly(peer, read_exactly(peer, 2)[1])  # INITIATE, or its READY
        if mechanism == b"PLAIN":
            peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        return peer

    def close(self) -> None:
        self._listener.close()


def _say(peer: socket.socket, message: Message) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    for number, frame in enumerate(frames, 1):
        peer.sendall(bytes([number < len(frames), len(frame)]) + frame)


@pytest.fixture
def raw() -> Iterator[RawServer]:
    server = RawServer()
    yield server
    server.close()


@pytest.fixture
def hostile() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CLEAVE_RULES", str(tmp_path / "owner.toml"))
    return tmp_path


class Memory:
    """The most memory that a process has taken beyond its first measurement."""

    def __init__(self, program: Program) -> None:
        self._process = psutil.Process(program.pid)
        self._before = self._process.memory_info().rss

    @property
    def grown_bytes(self) -> int:
        peak = Path(f"/proc/{self._process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        return 1024 * int(peak) - int(self._before)


def lend(start: Start, hostile: HostileServer, *options: str) -> Program:
    agent = start("agent", "--ps", hostile.address, "--memory", f"{LENT} B", *FAST, *options)
    hostile.until(Join)
    agent.expect("joined")
    return agent


def test_blocks_with_small_operands_and_huge_outputs_are_refused_before_memory_is_taken(
    state: Path, start: Start, hostile: HostileServer, record_property: Any
) -> None:
    """12,000 x 12,000 cells of an inner length of one: 96 kB of operands, 576 MB of output."""
    agent = lend(start, hostile)
    memory = Memory(agent)
    hostile.work(12_000, 1, 12_000)
    answers = hostile.until(Result).answers
    record_property("grown_bytes", memory.grown_bytes)
    assert answers["status"].tolist() == [TOO_LARGE]
    assert memory.grown_bytes < LENT * MEMORY_SLACK + SLACK
    assert "16 MB are lent" in agent.expect("refused 1 block(s)")
    hostile.work(8, 4, 8)
    assert hostile.until(Result).answers["status"].tolist() == [DONE], "a block that fits is still computed"


@pytest.mark.slow
def test_outputs_of_many_blocks_wait_for_room_while_answers_are_not_read(
    state: Path, start: Start, hostile: HostileServer, until: Until
) -> None:
    """Sixty blocks of 4 MB each, 240 MB in all; the server reads no answer until all could be finished."""
    agent = lend(start, hostile)
    memory = Memory(agent)
    hostile.work(1000, 1, 1000, count=60)
    process = psutil.Process(agent.pid)
    seen = [0.0]

    def idle() -> bool:
        before, seen[0] = seen[0], process.cpu_times().user
        return seen[0] == before and seen[0] > 0

    until(idle, "it has computed as much as it has room for")
    assert memory.grown_bytes < LENT * MEMORY_SLACK + SLACK
    done = 0
    while done < 60:
        status = hostile.until(Result).answers["status"].tolist()
        assert set(status) == {DONE}
        done += len(status)
    assert memory.grown_bytes < LENT * MEMORY_SLACK + SLACK


def test_an_endless_message_is_cut_off_at_the_lent_memory(
    state: Path, start: Start, raw: RawServer, record_property: Any
) -> None:
    agent = start("agent", "--ps", raw.address, "--memory", f"{LENT} B", *FAST)
    agent.expect("kernel")
    memory = Memory(agent)
    raw.endless_message(agent, "more than this device can hold", MIB // 4, 500 * MB)
    record_property("grown_bytes", memory.grown_bytes)
    assert memory.grown_bytes < LENT * MEMORY_SLACK + SLACK


def test_an_endless_message_is_cut_off_at_the_entrance_too(state: Path, start: Start, raw: RawServer) -> None:
    agent = start("agent", "--ps", raw.address, "--memory", f"{LENT} B", *FAST)
    agent.expect("kernel")
    memory = Memory(agent)
    raw.endless_message(agent, "sends more than an answer", MIB // 16, 500 * MB, at_the_entrance=True)
    assert memory.grown_bytes < SLACK


def test_a_frame_beyond_the_lent_memory_ends_the_connection_before_it_is_read(
    state: Path, start: Start, hostile: HostileServer
) -> None:
    agent = lend(start, hostile)
    memory = Memory(agent)
    hostile.socket.send_multipart([hostile.agent, bytes(400 * MB)])
    assert "a frame above 21 MB ends it" in agent.expect("the connection to")
    assert memory.grown_bytes < SLACK
    hostile.until(Join)  # the agent continues


def test_tables_of_a_million_rows_are_not_unpacked(state: Path, start: Start, hostile: HostileServer) -> None:
    agent = lend(start, hostile)
    memory = Memory(agent)
    hostile.work(1, 1, 1, count=200_000)
    agent.expect("at most 2048 may wait here")
    hostile.until(Join)
    hostile.send(Cancel(np.ones(1_000_000, np.dtype([("device", "<u4"), ("job", "<u8"), ("block", "<u4")]))))
    hostile.work(8, 4, 8)
    assert hostile.until(Result).answers["status"].tolist() == [DONE]
    assert memory.grown_bytes < LENT * MEMORY_SLACK + SLACK


def used_bytes(state: Path) -> int:
    """As the agent records them, every two seconds."""
    path = state / "state" / "traffic.json"
    return int(json.loads(path.read_text())["bytes"]) if path.exists() else 0


@pytest.mark.slow
def test_one_message_cannot_move_more_than_the_rest_of_the_daily_cap(
    state: Path, start: Start, raw: RawServer, until: Until, record_property: Any
) -> None:
    """126 MB in one message under a cap of 1 MB."""
    (state / "owner.toml").write_text('data_cap_a_day = "1 MB"\n')
    agent = start("agent", "--ps", raw.address, "--memory", f"{LENT} B", *FAST)
    sent = raw.endless_message(agent, "more than may be moved today", 32 * 1024, 126 * MB)
    agent.expect("are used for today (data_cap_a_day)")
    until(lambda: used_bytes(state) > 900_000, "the received bytes are counted")
    record_property("used_bytes", used_bytes(state))
    assert sent < MB + SLACK
    assert used_bytes(state) < MB + SLACK, "the cap, plus what arrives between two checks"


def test_unfinished_messages_of_connections_that_the_server_closes_are_counted(
    state: Path, start: Start, raw: RawServer
) -> None:
    """Under a cap of 1 MB: 300 kB of a message, then the connection ends, again and again."""
    (state / "owner.toml").write_text('data_cap_a_day = "1 MB"\n')
    agent = start("agent", "--ps", raw.address, "--memory", f"{LENT} B", *FAST)
    agent.expect("kernel")
    for _ in range(4):
        raw.begin_and_hang_up(300_000)
    agent.expect("are used for today (data_cap_a_day)")


@pytest.mark.slow
def test_an_honest_server_moves_no_more_than_the_cap(
    state: Path, start: Start, hostile: HostileServer, until: Until
) -> None:
    """Like a server that keeps to the offered memory: whenever all is answered, it sends as much again. The agent ends
    below the cap, having used most of it."""
    (state / "owner.toml").write_text('data_cap_a_day = "4 MB"\n')
    agent = lend(start, hostile)
    while not any("are used for today" in leave.reason for leave in hostile.left):
        joins = len(hostile.offered)
        side = int((hostile.offered[-1] / 12) ** 0.5)  # operands and output: three squares of 4 bytes per cell
        hostile.work(side, side, side)
        while not isinstance(message := hostile.receive(), Result | Leave):
            if len(hostile.offered) > joins:
                break
        if isinstance(message, Leave):
            assert "(data_cap_a_day)" in message.reason
            if "are used for today" not in message.reason:
                hostile.until(Join)
    assert "(data_cap_a_day)" in agent.expect("not working")
    assert len(hostile.offered) < 10
    until(lambda: used_bytes(state) > 0.7 * 4 * MB, "the bytes are recorded")
    assert used_bytes(state) <= 4 * MB


def test_a_block_in_chunks_that_exceeds_the_daily_cap_is_not_computed(
    state: Path, start: Start, hostile: HostileServer
) -> None:
    (state / "owner.toml").write_text('data_cap_a_day = "1 MB"\n')
    agent = lend(start, hostile)
    hostile.work(10, 100, 10, chunks=1000)
    assert "the next block moves 8" in hostile.until(Leave).reason
    agent.expect("are used for today")


# ---- the pure parts


@pytest.mark.parametrize(
    ("address", "cable"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.7.0.1:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://127.0.0.1.example.org:5555", False),
        ("tcp://127.example.org:5555", False),
        ("tcp://192.0.2.7:5555", False),
    ],
)
def test_only_a_loopback_address_counts_as_a_cable(address: str, cable: bool) -> None:
    """The rule only_on_wifi does not apply to a cable, and the address comes from the server's owner."""
    assert is_loopback(address) is cable


def row(key: int, rows: int, columns: int, chunk: int = 0, chunks: int = 1) -> Any:
    return (0, 1, key, 0, 1, 0, 0, 0, 0, 1, rows, columns, chunk, chunks, 0)


class Sent:
    done = False


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("offer"), st.integers(1, 20), st.integers(1, 20), st.integers(1, 3)),
            st.tuples(st.just("answer"), st.integers(0, 5), st.booleans(), st.just(0)),
        ),
        max_size=60,
    ),
    st.integers(0, 1500),
)
def test_memory_in_use_never_exceeds_the_lent_memory(story: list[tuple[Any, ...]], operand_bytes: int) -> None:
    """Blocks arrive and are answered, answers leave or stay; at any time outputs and operands fit."""
    room, numbers = MemoryBudget(1000, 64), itertools.count()
    open_: list[Any] = []
    leaving: list[Sent] = []
    for what, one, two, three in story:
        if what == "offer":
            n = next(numbers)
            rows = [row(n, one, two, chunk, three) for chunk in range(three)]
            room.offer(Work(0, np.empty(0, np.uint32), np.empty(0, PIECE), np.array(rows, BLOCK), []), 0)
        elif open_:
            done = open_.pop(one % len(open_))
            leaving.append(Sent())
            room.answered([done[:3]], 4 * done[10] * done[11], leaving[-1])
            leaving[0].done = leaving[0].done or two
            leaving = [sent for sent in leaving if not sent.done]
        taken, refused = room.take(operand_bytes)
        open_ += [r for r in taken if r[12] == 0]
        if taken:
            assert operand_bytes + sum(map(output_bytes, open_)) <= room.most_bytes
            assert operand_bytes + room.output_bytes <= room.most_bytes
        for r in refused:
            assert operand_bytes + output_bytes(r) > room.most_bytes
        if not room.output_bytes:
            assert not room.waiting, "nothing under way can make room: it waits for ever"


@given(st.integers(100, 10**12), st.lists(st.floats(0, 1), max_size=60))
def test_a_device_that_leaves_in_time_keeps_to_its_cap(cap: int, moves: list[float]) -> None:
    """Between two checks of the device a server moves at most what was offered, and as much again before it learns that
    the device has left."""
    used, offered = 0, DataPlan(cap, 0).most_memory_bytes
    for part in moves:
        used += int(part * offered)
        data = DataPlan(cap, used)
        assert used + offered <= cap
        if data.left_bytes <= 0:
            return
        if data.short(offered):
            used += offered
            offered = DataPlan(cap, used).most_memory_bytes


def test_frames_on_the_wire_match_those_of_libzmq() -> None:
    assert [on_wire(size, encrypted=False) for size in (0, 255, 256)] == [2, 257, 265]
    assert [on_wire(size, encrypted=True) for size in (0, 222, 223)] == [35, 257, 265]
