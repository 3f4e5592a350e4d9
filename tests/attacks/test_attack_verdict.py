"""A device cannot forge the verdict of a run: only pods that the run has started say when answers were due, when they
left, and what is emulated."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq
from processes import Multiplication, Stranger, grid

from agent.compute.kernels import NumpyKernel
from agent.compute.pieces import Operands, block_rows
from agent.protocol.entrance import enter
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    DONE,
    Heartbeat,
    Join,
    Message,
    Refused,
    Result,
    Welcome,
    Work,
    decode,
    encode,
)
from emulator.model.fidelity import DEGRADED, VALID, judge
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Serve, Until

PROFILE = Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 1000)
SOON_NS, LATE_NS = 1, 10**15


def joined(device: Stranger, name: str, count: int = 1) -> None:
    device.send(Join(pack_profiles([PROFILE] * count), [name] * count, {"kind": "pod", "pid": "1"}))
    assert isinstance(device.receive(), Welcome)


def answer(device: Stranger, blocks: int, due_after_ns: int) -> None:
    """Right products, with any claim about when they were due."""
    operands, given = Operands(), 0
    while given < blocks:
        work = device.receive_work()
        operands.accept(work)
        for row in block_rows(work.blocks):
            product = operands.product(row, NumpyKernel())
            assert product is not None
            due_ns = work.stamp_ns + due_after_ns
            answers = np.array([(*row.key, DONE, product.size, 0.0, due_ns)], ANSWER)
            device.send(Result(answers, product.reshape(-1), work.stamp_ns + due_after_ns))
            given += 1


@pytest.mark.parametrize(
    ("pod_ns", "forged_ns", "verdict"), [(SOON_NS, LATE_NS, DEGRADED), (LATE_NS, SOON_NS, VALID)], ids=["up", "down"]
)
def test_forged_stamps_change_no_verdict(serve: Serve, pod_ns: int, forged_ns: int, verdict: str) -> None:
    server = serve(heartbeat_s=5.0)
    with contextlib.closing(Stranger(server, of_the_run=True)) as pod, contextlib.closing(Stranger(server)) as forger:
        joined(pod, "emulated")
        joined(forger, "forger")
        product = Multiplication(server, (1, 80, 40, 80), grid(80, 80, 40, [0, 1, 1, 1]))
        answer(pod, 1, pod_ns)
        answer(forger, 3, forged_ns)
        product.check()
    columns = server.records.columns()
    mine = columns["device"] == 1
    assert mine.sum() == 3
    assert np.isnan(columns["due_s"][mine]).all()
    assert np.isnan(columns["left_s"][mine]).all()
    assert not np.isnan(columns["due_s"][~mine]).any()
    found = judge(columns["sent_s"], columns["due_s"], columns["received_s"], columns["left_s"])
    assert (found.verdict, found.blocks) == (verdict, 1)
    assert server.attendance.real == {1}, "whatever its name, it is a real device"


def test_a_client_that_calls_itself_a_pod_brings_only_one_device(serve: Serve, until: Until) -> None:
    server = serve()
    with contextlib.closing(Stranger(server)) as device:
        device.send(Join(pack_profiles([PROFILE] * 2), ["a", "b"], {"kind": "pod"}))
        answered = device.receive()
        assert isinstance(answered, Refused)
        assert "one device" in answered.reason
    with contextlib.closing(Stranger(server)) as device:
        joined(device, "a")
        device.send(Join(pack_profiles([PROFILE]), ["b"], {"kind": "pod"}))
        assert isinstance(device.receive(), Refused)
    until(lambda: server.devices == 0, "the device is gone")
    assert server.roster.joined == 1


# ---- names of connections, which ZeroMQ lets a client choose


class Thief:
    """Connects with tickets, again and again, under a pod's name, until that name is free."""

    def __init__(self, server: Server, name: bytes) -> None:
        self.heard: list[Message] = []  # messages meant for the pod
        self._server, self._name, self._over = server, name, threading.Event()
        self._thread = threading.Thread(target=self._steal)
        self._thread.start()

    def _steal(self) -> None:
        with zmq.Context() as context:
            while not self._over.is_set():
                where, credentials = enter(context, self._server.address, "thief")
                with context.socket(zmq.DEALER) as line:
                    line.setsockopt(zmq.LINGER, 0)
                    line.setsockopt(zmq.RECONNECT_IVL, -1)
                    line.setsockopt(zmq.ROUTING_ID, self._name)
                    credentials.apply(line)
                    line.connect(where)
                    self._be_the_pod(line)

    def _be_the_pod(self, line: zmq.Socket[bytes]) -> None:
        """Plays the pod for as long as the server listens."""
        operands = Operands()
        line.send(bytes(encode(Heartbeat())[0]))
        while line.poll(50):
            message = decode(line.recv_multipart())
            self.heard.append(message)
            if isinstance(message, Refused):
                return
            if isinstance(message, Work):
                operands.accept(message)
                for row in block_rows(message.blocks):
                    product = operands.product(row, NumpyKernel())
                    if product is None:
                        continue
                    due_ns = message.stamp_ns + LATE_NS
                    answers = np.array([(*row.key, DONE, product.size, 0.0, due_ns)], ANSWER)
                    result = encode(Result(answers, product.reshape(-1), due_ns))
                    line.send_multipart([bytes(frame) for frame in result])
            line.send(bytes(encode(Heartbeat())[0]))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow
def test_no_client_takes_over_a_pod_whose_connection_ends(serve: Serve, until: Until) -> None:
    """The thief knows the pod's name (the test reads it from the server) and takes it as soon as it is free."""
    server = serve()
    for trial in range(4):
        pod = Stranger(server, of_the_run=True)
        joined(pod, f"emulated-{trial}")
        name = next(identity for identity, peer in server.peers.items() if peer.of_the_run)
        thieves = [Thief(server, name) for _ in range(3)]
        time.sleep(0.3 + 0.11 * trial)
        pod.close()
        begun_s = time.monotonic()
        until(lambda: server.devices == 0, "the pod is lost", limit_s=5.0)
        lost_s = time.monotonic() - begun_s
        time.sleep(0.3)
        for thief in thieves:
            thief.end()
        got = [message for thief in thieves for message in thief.heard if not isinstance(message, Refused)]
        print(f"the pod is lost after {lost_s:.2f} s; the thieves got {got}")
        assert not got, "messages meant for the pod reached a thief"
        assert server.devices == 0
    assert server.error is None


def test_nothing_is_sent_to_a_name_that_another_connection_holds(serve: Serve, until: Until) -> None:
    server = serve(heartbeat_s=5.0)
    with contextlib.closing(Stranger(server, of_the_run=True)) as pod, contextlib.closing(Stranger(server)) as thief:
        joined(pod, "emulated")
        joined(thief, "thief")
        mine, others = (next(p for p in server.peers.values() if p.of_the_run is pods) for pods in (True, False))
        assert mine.line != others.line
        before = Multiplication(server, (1, 80, 40, 80), grid(80, 80, 40, [0, 1, 1, 1]))
        answer(pod, 1, SOON_NS)
        answer(thief, 3, SOON_NS)
        before.check()
        mine.other_end = others.other_end  # as if another connection had its descriptor
        Multiplication(server, (1, 80, 40, 80), grid(80, 80, 40, [0, 1, 1, 1]))
        thief.receive_work()
        until(lambda: list(server.peers.values()) == [others], "the pod is lost")
        assert not pod.socket.poll(200), "the pod was sent something"
