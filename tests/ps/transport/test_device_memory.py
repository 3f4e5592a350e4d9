"""A device's memory: pieces are released as soon as no block needs them, slabs of weights stay as long as keeping them
pays, and a device that lends 64 MB computes blocks of any length within 64 MB.

Real servers and sockets. A test that must see what a device holds plays the device itself, with the agent's own
operands; a test of memory use runs a real process under a limit of the kernel."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq
from processes import line_to

from agent.compute.computer import Computer
from agent.compute.kernels import Array, NumpyKernel
from agent.compute.pieces import BlockRow, Operands, block_rows
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import ANSWER, DONE, FAILED, Heartbeat, Join, Message, Result, Welcome, Work, decode, encode
from ps.planning.cost import block_seconds, chunk_length
from ps.planning.plans import Plan
from ps.transport.jobs import Product
from ps.transport.operands import Operand, streamed
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Serve, Start, Until

LIMIT_S = 60.0
FAST = (
    "--unmeasured",
    "--kernel",
    "numpy",
    "--threads",
    "1",
    "--down",
    "1 Gbit",
    "--up",
    "1 Gbit",
    "--latency",
    "0 ms",
)


class Multiplication:
    """A product that a server computes."""

    def __init__(self, server: Server, left: Operand, right: Operand, plan: Plan | None = None) -> None:
        self._server, self._left, self._right = server, left, right
        self.out: Array = np.full((left.array.shape[0], left.array.shape[1], right.array.shape[1]), np.nan, np.float32)
        self.done = threading.Event()
        server.submit(Product(left, right, self.out, self.done.set, plan=plan))

    def check(self, limit_s: float = LIMIT_S) -> None:
        assert self.done.wait(limit_s), f"not complete after {limit_s} s; {self._server.totals}"
        assert self._server.error is None
        expected = self._left.array @ self._right.array.transpose(0, 2, 1)
        np.testing.assert_allclose(self.out, expected, rtol=1e-3, atol=1e-4 * np.sqrt(self._left.array.shape[2]))


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def plan_of(boxes: Sequence[tuple[int, ...]], devices: list[int], fresh: list[tuple[int, int]] | None = None) -> Plan:
    new = np.ones((len(boxes), 2), bool) if fresh is None else np.array(fresh, bool)
    return Plan(boxes=np.array(boxes), device=np.array(devices), fresh=new, makespan_s=0.0)


class Puppet:
    """A device that does exactly what the test says."""

    def __init__(self, server: Server, credit: int, devices: int = 1, memory_bytes: int = 2**40) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # like an agent: messages that it does not ask for stay in the network
        self._socket = line_to(server, self._context, of_the_run=devices > 1, receive_ahead=1)
        self.operands = Operands()
        profile = Profile(1e12, 0.0, 1e12, 1e12, 0.0, memory_bytes, credit)
        self.send(Join(pack_profiles([profile] * devices), ["puppet"] * devices, {}))
        assert isinstance(self.receive(), Welcome)

    def send(self, message: Message) -> None:
        self._socket.send_multipart([bytes(frame) for frame in encode(message)])

    def receive(self) -> Message:
        assert self._socket.poll(int(1000 * LIMIT_S)), "the server sends nothing"
        return decode(self._socket.recv_multipart())

    def work(self) -> Work:
        """The next message that brings or releases something."""
        while True:
            message = self.receive()
            self.send(Heartbeat())
            if isinstance(message, Work):
                self.operands.accept(message)
                return message

    def answer(self, *rows: Any) -> None:
        products = [self.operands.product(row, NumpyKernel()) for row in rows]
        cells = [product.reshape(-1) for product in products if product is not None]
        answers = [(*row.key, DONE, c.size, 0.0, 0) for row, c in zip(rows, cells, strict=True)]
        self.send(Result(np.array(answers, ANSWER), np.concatenate(cells)))

    def serve(self, product: Multiplication) -> None:
        while not product.done.is_set():
            if len(blocks := self.work().blocks):
                self.answer(*block_rows(blocks))
                product.done.wait(0.2)  # the last answer ends the product; otherwise more work comes

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def puppet_at(nothing_left_behind: None) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def join(server: Server, credit: int = 100, devices: int = 1, memory_bytes: int = 2**40) -> Puppet:
            puppet = Puppet(server, credit, devices, memory_bytes)
            stack.callback(puppet.close)
            return puppet

        yield join


# ---- released pieces

STRIP = [(0, 1, 0, 16, 8 * i, 8) for i in range(4)]  # all rows, eight other columns each
STRIP_FRESH = [(1, 1), (0, 1), (0, 1), (0, 1)]
STRIP_BYTES = 4 * 24 * (16 + 32)  # over an inner length of 24


@pytest.mark.slow
def test_blocks_assigned_together_arrive_in_order_with_one_stamp_in_any_number_of_messages(
    serve: Serve, puppet_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.transport.peers.BUNDLE_S", 0.0)  # one message per block
    server = serve(heartbeat_s=10.0)
    puppet: Puppet = puppet_at(server)
    before_ns = time.monotonic_ns()
    product = Multiplication(
        server, Operand(numbers(1, 16, 24)), Operand(numbers(1, 32, 24)), plan_of(STRIP, [0] * 4, STRIP_FRESH)
    )
    messages = [puppet.work() for _ in STRIP]
    rows = [row for message in messages for row in block_rows(message.blocks)]
    assert [row.block for row in rows] == [0, 1, 2, 3]
    assert len({message.stamp_ns for message in messages}) == 1
    assert before_ns <= messages[0].stamp_ns <= time.monotonic_ns()
    puppet.answer(*rows)
    product.check()
    assert len(set(server.records.columns()["sent_s"].tolist())) == 1


@pytest.mark.parametrize("bundle_s", [0.0, 1.0], ids=["one message per block", "blocks share messages"])
def test_a_piece_is_released_as_soon_as_no_block_needs_it(
    serve: Serve, puppet_at: Any, monkeypatch: pytest.MonkeyPatch, bundle_s: float
) -> None:
    monkeypatch.setattr("ps.transport.peers.BUNDLE_S", bundle_s)
    server = serve(heartbeat_s=0.2)
    puppet: Puppet = puppet_at(server, credit=2)
    product = Multiplication(
        server, Operand(numbers(1, 16, 24)), Operand(numbers(1, 32, 24)), plan_of(STRIP, [0] * 4, STRIP_FRESH)
    )
    messages = [puppet.work()] if bundle_s else [puppet.work(), puppet.work()]
    one, two = (row for message in messages for row in block_rows(message.blocks))
    # the rows once, and the columns of each block; columns that touch are one piece of a message
    assert sum(len(message.pieces) for message in messages) == (2 if bundle_s else 3)
    puppet.answer(one)
    third = puppet.work()
    # its columns, unless the second block has them too; that one still needs the rows
    assert third.released.tolist() == ([] if bundle_s else [one.right])
    puppet.answer(two)
    fourth = puppet.work()
    assert fourth.released.tolist() == [two.right]
    (last,) = block_rows(fourth.blocks)
    assert last[3] == one[3], "the rows are kept"
    (before,) = block_rows(third.blocks)
    puppet.answer(before, last)
    end = puppet.work()
    assert sorted(end.released.tolist()) == sorted([before.right, last.right, one.left])
    assert len(end.blocks) == 0
    assert puppet.operands.bytes == 0
    product.check()
    assert server.totals.sent_bytes == server.totals.operand_bytes == STRIP_BYTES


def test_a_strip_travels_once(serve: Serve, puppet_at: Any) -> None:
    """Bytes that the plan charges once are sent once. The planner makes no more strips than the device has credit."""
    server = serve(heartbeat_s=0.2)
    puppet: Puppet = puppet_at(server, credit=4)
    product = Multiplication(
        server, Operand(numbers(1, 16, 24)), Operand(numbers(1, 32, 24)), plan_of(STRIP, [0] * 4, STRIP_FRESH)
    )
    puppet.serve(product)
    product.check()
    assert server.totals.operand_bytes == STRIP_BYTES
    assert server.totals.sent_bytes == STRIP_BYTES


@pytest.mark.slow
def test_many_products_leave_nothing_on_a_device(serve: Serve, puppet_at: Any, until: Until) -> None:
    server = serve(heartbeat_s=0.1)
    puppet: Puppet = puppet_at(server, credit=3)
    for seed in range(5):
        boxes = [(0, 1, r, 8, c, 8) for r in range(0, 24, 8) for c in range(0, 32, 8)]
        left, right = Operand(numbers(1, 24, 7, seed=seed)), Operand(numbers(1, 32, 7, seed=9 + seed))
        product = Multiplication(server, left, right, plan_of(boxes, [0] * len(boxes)))
        puppet.serve(product)
        product.check()
    while puppet.operands.bytes:
        assert len(puppet.work().released), "a piece stays, and no release comes"


# ---- kept slabs


@pytest.mark.parametrize("devices", [1, 3], ids=["phone", "pod"])
def test_a_kept_slab_travels_once_and_is_dropped_when_it_is_forgotten(
    serve: Serve, puppet_at: Any, devices: int
) -> None:
    server = serve(heartbeat_s=0.1)
    puppet: Puppet = puppet_at(server, devices=devices)
    weight = Operand(numbers(1, 48, 24), uses=2)
    boxes = [(0, 1, 16 * i, 16, 0, 48) for i in range(devices)]
    sent = []
    for seed in range(2):
        before = server.totals.sent_bytes
        left = Operand(numbers(1, 16 * devices, 24, seed=1 + seed))
        product = Multiplication(server, left, weight, plan_of(boxes, list(range(devices))))
        puppet.serve(product)
        product.check()
        sent.append(server.totals.sent_bytes - before)
    left_bytes, weight_bytes = 4 * 24 * 16 * devices, 4 * 24 * 48
    assert sent == [left_bytes + weight_bytes, left_bytes]
    assert server.totals.operand_bytes == 2 * left_bytes + devices * weight_bytes  # every device has its own copy
    while puppet.operands.bytes > weight_bytes:
        assert len(puppet.work().released), "a piece stays, and no release comes"
    assert puppet.operands.bytes == weight_bytes
    server.forget([weight])
    assert len(puppet.work().released) == 1
    assert puppet.operands.bytes == 0


def test_a_real_agent_multiplies_with_the_slab_it_kept(start: Start, serve: Serve) -> None:
    server = serve()
    agents(start, server, 1)
    weight = Operand(numbers(1, 96, 200), uses=2)
    sent = []
    for seed in range(2):
        before = server.totals.sent_bytes
        Multiplication(server, Operand(numbers(1, 64, 200, seed=1 + seed)), weight).check()
        sent.append(server.totals.sent_bytes - before)
    assert sent == [4 * 200 * (64 + 96), 4 * 200 * 64]
    server.forget([weight])
    changed = Operand(numbers(1, 96, 200, seed=77), uses=2)
    before = server.totals.sent_bytes
    Multiplication(server, Operand(numbers(1, 64, 200, seed=1)), changed).check()
    assert server.totals.sent_bytes - before == 4 * 200 * (64 + 96)
    assert server.totals.sent_bytes == server.totals.operand_bytes


# ---- 64 MB

INNER, SIDE = 131_072, 256  # tokens of a batch, and one rectangle of a weight's gradient: 268 MB of operands
LENT = 64_000_000


@cache
def gradient_operands(layout: str) -> tuple[Operand, Operand]:
    """In the layout of a training step, tokens first; or transposed."""
    left, right = numbers(INNER, SIDE, seed=1), numbers(INNER, SIDE, seed=2)
    if layout == "inner major":
        return Operand(left.T[None]), Operand(right.T[None])
    return Operand(np.ascontiguousarray(left.T)[None]), Operand(np.ascontiguousarray(right.T)[None])


def agents(start: Start, server: Server, count: int, *options: str) -> list[Program]:
    """Starts this number of agents and waits until all have joined, in the order of their ids."""
    programs = []
    for _ in range(count):
        there = server.devices
        programs.append(start("agent", "--ps", server.address, *FAST, *options))
        programs[-1].expect("joined")
        assert server.wait_for_devices(there + 1, LIMIT_S)
    return programs


def allow(agent: Program, more_bytes: int) -> None:
    """From now on the kernel grants this process at most this much beyond its idle memory."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines())
    limit = 1024 * int(status["VmData"].split()[0]) + more_bytes
    resource.prlimit(agent.pid, resource.RLIMIT_DATA, (limit, limit))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process that runs")
@pytest.mark.parametrize("layout", ["inner major", "outer major"])
def test_an_agent_that_lends_64_mb_computes_a_long_block_within_64_mb(start: Start, serve: Serve, layout: str) -> None:
    server = serve()
    (agent,) = agents(start, server, 1, "--memory", "64 MB")
    allow(agent, LENT)
    for _ in range(2):
        Multiplication(server, *gradient_operands(layout)).check()
    assert server.totals.lost_devices == 0
    assert agent.running
    columns = server.records.columns()
    assert columns["rows"].max() == columns["columns"].max() == SIDE  # the block was not cut: it came in chunks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process that runs")
def test_the_memory_limit_takes_effect_and_another_device_computes_the_block(start: Start, serve: Serve) -> None:
    """The same block under the same limit, on an agent that claims more memory than it has."""
    server = serve()
    noticed: list[str] = []
    server.notice = noticed.append
    (boaster,) = agents(start, server, 1, "--memory", "4 GB")
    allow(boaster, LENT)
    agents(start, server, 1, "--memory", "64 MB")
    whole = plan_of([(0, 1, 0, SIDE, 0, SIDE)], [0])
    Multiplication(server, *gradient_operands("inner major"), whole).check()
    assert server.totals.lost_devices == 1 or "failed" in boaster.output, noticed
    assert set(server.records.columns()["device"].tolist()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["inner major", "outer major"])
def test_an_emulated_device_of_64_mb_computes_the_same_block(start: Start, serve: Serve, layout: str) -> None:
    server = serve()
    profiles = [[50e9, 1e-4, 50e6, 10e6, 0.005, LENT, 4]]
    fleet = {"profiles": profiles, "labels": ["emulated"], "pass": server.pod_pass}
    start("emulator.pods.pod", "--ps", server.address, "--links", "off", stdin=json.dumps(fleet))
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, *gradient_operands(layout)).check()
    columns = server.records.columns()
    assert columns["rows"].max() == columns["columns"].max() == SIDE


# ---- events between two chunks

LONG = (64, 131_072, 64)  # rows, inner, columns: 67 MB, more than the sockets between two processes buffer
LITTLE = 200_000


def long_operands(inner: int = LONG[1]) -> tuple[Operand, Operand]:
    return Operand(numbers(1, LONG[0], inner, seed=3)), Operand(numbers(1, LONG[2], inner, seed=4))


def whole_for(device: int) -> Plan:
    return plan_of([(0, 1, 0, LONG[0], 0, LONG[2])], [device])


def test_a_device_that_gives_up_between_two_chunks_loses_the_block_to_another(
    start: Start, serve: Serve, puppet_at: Any
) -> None:
    server = serve()
    puppet: Puppet = puppet_at(server, memory_bytes=LITTLE)
    agents(start, server, 1, "--memory", "64 MB")
    product = Multiplication(server, *long_operands(20_000), whole_for(0))
    work = puppet.work()
    (row,) = block_rows(work.blocks)
    assert row.chunk == 0
    assert row.chunks > 100
    puppet.send(Result(np.array([(0, row.job, row.block, FAILED, 0, 0.0, 0)], ANSWER), b""))
    while not product.done.wait(0.01):
        puppet.send(Heartbeat())  # alive, but reads no more
    product.check()
    assert set(server.records.columns()["device"].tolist()) == {1}


@pytest.mark.slow
def test_a_connection_that_breaks_between_two_chunks_is_noticed_at_the_next_send(
    start: Start, serve: Serve, puppet_at: Any
) -> None:
    """Not through its silence, which would take minutes here."""
    server = serve(heartbeat_s=30.0)
    noticed: list[str] = []
    server.notice = noticed.append
    puppet: Puppet = puppet_at(server, memory_bytes=LITTLE)
    agents(start, server, 1, "--memory", "64 MB")
    product = Multiplication(server, *long_operands(), whole_for(0))
    puppet.work()
    meanwhile = Operand(numbers(1, 8, 8)), Operand(numbers(1, 8, 8))
    Multiplication(server, *meanwhile, plan_of([(0, 1, 0, 8, 0, 8)], [1])).check()  # the others continue
    puppet.close()
    product.check(limit_s=20.0)
    assert noticed == ["lost puppet (its connection is gone): their blocks go to the others"]


class Failing:
    """A kernel that runs out of memory once."""

    name = "failing"

    def __init__(self, at: int) -> None:
        self._at, self.calls = at, 0

    def product(self, left: Array, right: Array) -> Array:
        self.calls += 1
        if self.calls == self._at:
            raise MemoryError
        return NumpyKernel().product(left, right)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_block_whose_chunk_fails_is_answered_once_and_leaves_nothing_behind(at: int) -> None:
    """Block 0 comes in four chunks, one of which fails; block 1, which comes after it, is not affected."""
    ids, operands = iter(range(100)), Operands()
    factors = Operand(numbers(1, 6, 40)), Operand(numbers(1, 5, 40))
    rows: list[BlockRow] = []
    for block in (0, 1):
        for parcel in streamed(9, factors, [0, 1, 0, 6, 0, 5], block, 0, 10, ids):
            work = Work(0, np.empty(0, "<u4"), parcel.pieces, parcel.blocks, list(parcel.data))
            operands.accept(work)
            rows += block_rows(parcel.blocks)
    kernel = Failing(at)
    computer = Computer(operands, kernel, ring=lambda: None)
    computer.start()
    for row in rows:
        computer.give([row])
    computer.inbox.put(None)
    computer.join(LIMIT_S)
    answers: list[tuple[int, int]] = []
    while not computer.outbox.empty():
        result = computer.outbox.get()
        answers += [(answer[2], answer[3]) for answer in result.answers.tolist()]
        if result.answers["status"][0] == DONE:
            expected = factors[0].array[0] @ factors[1].array[0].T
            np.testing.assert_allclose(result.data.reshape(6, 5), expected, rtol=1e-4, atol=1e-5)
    assert answers == [(0, FAILED), (1, DONE)]
    assert kernel.calls == at + 4, "the rest of a failed block is not computed"
    assert not computer.streaming
    assert (operands.bytes, operands.unfinished) == (0, set())
    assert computer.cancelled == computer.unfinished == set()


def test_a_streamed_block_of_an_emulated_device_is_due_no_sooner_than_the_cost_model_says(
    start: Start, serve: Serve
) -> None:
    server = serve()
    profile = Profile(2e9, 0.001, 80e6, 10e6, 0.005, LITTLE, 4)
    packed = list(pack_profiles([profile])[0].tolist())
    fleet = {"profiles": [packed], "labels": ["emulated"], "pass": server.pod_pass}
    start("emulator.pods.pod", "--ps", server.address, "--links", "model", stdin=json.dumps(fleet))
    assert server.wait_for_devices(1, LIMIT_S)
    inner = 4000
    Multiplication(server, *long_operands(inner), whole_for(0)).check()
    chunks = -(-inner // int(chunk_length(1, LONG[0], inner, LONG[2], LITTLE // 2)))
    assert chunks > 10
    (expected_s,) = block_seconds(pack_profiles([profile]), 1, LONG[0], inner, LONG[2], None, chunks).tolist()
    columns = server.records.columns()
    assert len(columns["block"]) == 1  # one answer for any number of chunks
    assert columns["due_s"][0] - columns["sent_s"][0] >= expected_s - 0.002  # the last chunk is a little shorter
    flops = 2.0 * LONG[0] * inner * LONG[2]
    assert columns["compute_s"][0] == pytest.approx(chunks * 0.001 + flops / 2e9, rel=1e-4)
