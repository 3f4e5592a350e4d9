"""The testbed's side of the benchmark: the work through the real server, real agents and real pods.

From the submitted product to the assembled result, over loopback sockets. The work fixes the blocks, so the plan is
given; everything else is as in a training step after the first few products.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE, Profile, pack_profiles
from emulator.model.fleet import Fleet
from ps.planning.pipeline import fresh_slabs
from ps.planning.plans import Plan, Shape
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server
from ps.verification.glance import FIRST
from testbed.bench.yardsticks.work import W2, Matrix, Work
from testbed.launch.processes import Pods

LIMIT_S = 30.0
UNLIMITED = Profile(MAX_RATE, 0.0, MAX_RATE, MAX_RATE, 0.0, 1 << 40, 1 << 16)


@contextmanager
def agents(count: int = 2) -> Iterator[Server]:
    """A server and local agents, one thread each, as fast as this machine allows."""
    server = Server(run="bench").start()
    command = [
        sys.executable,
        "-m",
        "agent",
        "--ps",
        server.address,
        "--once",
        "--memory",
        "4 GB",
        "--credit",
        "4096",
        "--unmeasured",
    ]
    command += ["--down", "20 Gbit", "--up", "20 Gbit", "--latency", "50 us", "--kernel", "numpy"]
    processes = [subprocess.Popen([*command, "--name", f"agent-{i}"], stderr=subprocess.DEVNULL) for i in range(count)]
    try:
        if not server.wait_for_devices(count, LIMIT_S):
            raise RuntimeError(f"only {server.devices} of {count} agents joined")
        settle(server, count)
        yield server
    finally:
        server.stop()
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def emulated(profiles: NDArray[np.void], links: str) -> Iterator[tuple[Server, Pods]]:
    """A server and pods, one per core."""
    count = len(profiles)
    fleet = Fleet(profiles, ["bench"] * count, ["none"] * count, {})
    server = Server(run="bench").start()
    try:
        with Pods(fleet, os.cpu_count() or 1, server.address, links, pod_pass=server.pod_pass) as pods:
            try:
                if not server.wait_for_devices(count, LIMIT_S):
                    raise RuntimeError(f"only {server.devices} of {count} devices joined")
                yield server, pods
            finally:
                server.stop()
    finally:
        server.stop()


def plan_over(work: Work, devices: int) -> Plan:
    """The work's own blocks, dealt out in runs along the longer side of the grid, so that devices share few slabs."""
    rectangles = work.rectangles()
    if work.q // work.block_columns > work.m // work.block_rows:
        rectangles = rectangles[np.lexsort((rectangles[:, 0], rectangles[:, 2]))]
    head = np.broadcast_to([0, 1], (len(rectangles), 2))
    device = np.arange(len(rectangles)) * devices // len(rectangles)
    boxes = np.column_stack([head, rectangles])
    shape = Shape(1, work.m, work.n, work.q)
    return Plan(boxes, device, fresh_slabs(boxes, device, shape, unlimited(devices)), 0.0)


def multiply(server: Server, work: Work, a: Matrix, b: Matrix, plan: Plan) -> tuple[float, Matrix]:
    """Seconds from submitting the product to its assembled result, and the result."""
    out = np.empty((1, work.m, work.q), np.float32)
    done = threading.Event()
    begun = time.perf_counter()
    server.submit(Product(Operand(a[None]), Operand(b.T[None]), out, done.set, work.name, plan=plan))
    if not done.wait(LIMIT_S) or server.error is not None:
        raise RuntimeError(f"{work.name} did not end: {server.error}")
    return time.perf_counter() - begun, out[0]


def settle(server: Server, devices: int) -> None:
    """Run the first products of a run, which are all checked in full; later one of ten is, and that is measured."""
    a, b = W2.operands()
    plan = plan_over(W2, devices)
    for _ in range(FIRST):
        multiply(server, W2, a, b, plan)


def best(server: Server, work: Work, devices: int, repeats: int) -> float:
    """Best of several passes, in seconds; the last result is checked."""
    settle(server, devices)
    a, b = work.operands()
    plan = plan_over(work, devices)
    seconds = []
    for _ in range(repeats):
        took, result = multiply(server, work, a, b, plan)
        seconds.append(took)
    np.testing.assert_allclose(result, a @ b, rtol=1e-3, atol=1e-3)
    return min(seconds)


def unlimited(count: int) -> NDArray[np.void]:
    return pack_profiles([UNLIMITED] * count)
