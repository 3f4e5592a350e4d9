"""Programs and products that several tests with real processes share."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.identity.keys import Credentials, Password
from agent.protocol.entrance import enter
from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import Heartbeat, Join, Message, Welcome, Work, decode, encode
from ps.planning.plans import Plan
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Start

Array = NDArray[np.float32]
LIMIT_S = 30.0
FAST = ("--unmeasured", "--kernel", "numpy", "--down", "1 Gbit", "--up", "1 Gbit", "--latency", "0 ms")


class Multiplication:
    """A product that a server computes."""

    def __init__(
        self, server: Server, shape: tuple[int, int, int, int], plan: Plan | None = None, seed: int = 0
    ) -> None:
        batch, rows, inner, columns = shape
        rng = np.random.default_rng(seed)
        self.left: Array = rng.standard_normal((batch, rows, inner), dtype=np.float32)
        self.right: Array = rng.standard_normal((batch, inner, columns), dtype=np.float32)
        self.out: Array = np.full((batch, rows, columns), np.nan, np.float32)
        self.done = threading.Event()
        self._server = server
        server.submit(
            Product(
                left=Operand(self.left),
                right=Operand(self.right.transpose(0, 2, 1)),
                out=self.out,
                done=self.done.set,
                name=f"test {shape}",
                plan=plan,
            )
        )

    def check(self, limit_s: float = LIMIT_S) -> None:
        """The product is complete in time and equals NumPy's."""
        assert self.done.wait(limit_s), f"not complete after {limit_s} s; {self._server.totals}"
        assert self._server.error is None
        np.testing.assert_allclose(self.out, self.left @ self.right, rtol=1e-4, atol=1e-3)


def grid(rows: int, columns: int, side: int, devices: list[int]) -> Plan:
    """Square blocks, dealt to the devices in turn."""
    boxes = np.array([(0, 1, r, side, c, side) for r in range(0, rows, side) for c in range(0, columns, side)])
    device = np.resize(np.array(devices), len(boxes))
    return Plan(boxes=boxes, device=device, fresh=np.ones((len(boxes), 2), bool), makespan_s=0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agents(start: Start, server: Server, count: int, *options: str) -> list[Program]:
    """Starts this number of agents and waits until all have joined, in the order of their ids."""
    programs = []
    for index in range(count):
        programs.append(start("agent", "--ps", server.address, "--name", f"agent-{index}", *FAST, *options))
        programs[-1].expect("kernel")
        assert server.wait_for_devices(index + 1, LIMIT_S)
    return programs


def pod(start: Start, server: Server, devices: int, links: str = "off") -> Program:
    there, profile = server.devices, [50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]
    labels = [f"emulated-{i}" for i in range(devices)]
    fleet = {"profiles": [profile] * devices, "labels": labels, "pass": server.pod_pass}
    program = start("emulator.pods.pod", "--ps", server.address, "--links", links, stdin=json.dumps(fleet))
    assert server.wait_for_devices(there + devices, LIMIT_S)
    return program


def line_to(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], of_the_run: bool = False, receive_ahead: int = 0
) -> zmq.Socket[bytes]:
    """A bare socket of an admitted device on this machine, or of a pod of the run."""
    credentials: Credentials
    if of_the_run:
        where, credentials = server.data_address, Password(server.pod_pass["password"])
    else:
        where, credentials = enter(context, server.address, "test")
    line = context.socket(zmq.DEALER)
    credentials.apply(line)
    line.setsockopt(zmq.RCVHWM, receive_ahead)
    line.connect(where)
    return line


class Stranger:
    """An admitted device that can send what no agent would."""

    def __init__(self, server: Server, of_the_run: bool = False) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = line_to(server, self._context, of_the_run)

    def send(self, message: Message) -> None:
        self.socket.send_multipart([bytes(frame) for frame in encode(message)])

    def join(self, credit: int = 1000, latency_s: float = 0.0) -> None:
        """Join as one fast device."""
        profile = Profile(1e12, 0.0, 1e12, 1e12, latency_s, 2**40, credit)
        self.send(Join(pack_profiles([profile]), ["stranger"], {}))
        assert isinstance(self.receive(), Welcome)

    def receive(self, limit_s: float = LIMIT_S) -> Message:
        """The next message that is not a heartbeat; heartbeats may come at any time."""
        while True:
            assert self.socket.poll(int(1000 * limit_s)), "the server does not answer"
            if not isinstance(message := decode(self.socket.recv_multipart()), Heartbeat):
                return message

    def receive_work(self) -> Work:
        while True:
            message = self.receive()
            if isinstance(message, Work) and len(message.blocks):
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)
