"""All devices gone, all devices frozen, the server gone: with real processes, the run goes on with what comes back, and
no cell of a product is lost or counted twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from processes import FAST, LIMIT_S, Multiplication, agents, free_port, grid, pod

from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Serve, Start, Until

SHAPE = (1, 128, 300, 128)
BLOCKS = 64  # 16 rows by 16 columns each
FLOPS = 2 * 128 * 300 * 128


def halves(server: Server, devices: list[int]) -> Multiplication:
    return Multiplication(server, SHAPE, grid(128, 128, 16, devices))


def counted_once(server: Server, products: int) -> None:
    """Whatever arrived, this number of products was accepted, cell by cell."""
    assert server.totals.flops == products * FLOPS
    assert server.totals.blocks == len(server.records.columns()["device"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["agents", "pods"])
def test_with_all_devices_killed_the_server_says_what_it_waits_for_and_continues_with_a_newcomer(
    start: Start, serve: Serve, until: Until, kind: str
) -> None:
    server = serve(heartbeat_s=0.2)
    noticed: list[str] = []
    server.notice = noticed.append
    programs: list[Program]
    programs = agents(start, server, 2) if kind == "agents" else [pod(start, server, 1), pod(start, server, 1)]
    halves(server, [0, 1]).check()
    for program in programs:
        program.signal(signal.SIGSTOP)  # so that no part of the product is returned before they die
    product = halves(server, [0, 1])
    for program in programs:
        program.signal(signal.SIGKILL)
    until(lambda: any("waiting" in text for text in noticed), "the server says that it waits")
    assert server.devices == 0
    assert not product.done.is_set()
    (waiting,) = [text for text in noticed if "waiting" in text]
    assert f"no device is there; gone are {server.labels[0]}" in waiting
    assert server.labels[1] in waiting
    assert waiting.endswith(f"python -m agent --ps {server.address}")
    newcomer = start("agent", "--ps", server.address, "--name", "newcomer", *FAST)
    product.check()
    newcomer.expect("joined")
    counted_once(server, 2)
    until(lambda: server.devices == 1, "the newcomer has joined")


@pytest.mark.slow
def test_a_server_that_loses_all_devices_again_says_so_again(start: Start, serve: Serve, until: Until) -> None:
    server = serve(heartbeat_s=0.2)
    noticed: list[str] = []
    server.notice = noticed.append
    product = Multiplication(server, SHAPE)
    for _ in range(2):
        until(lambda: any("waiting" in text for text in noticed), "the server says that it waits")
        noticed.clear()
        (agent,) = agents(start, server, 1)
        product.check()
        agent.signal(signal.SIGKILL)
        until(lambda: server.devices == 0, "the server notices the killed agent")
        product = Multiplication(server, SHAPE)
    agents(start, server, 1)
    product.check()


@pytest.mark.slow
def test_an_agent_survives_a_crash_of_the_server_and_works_for_the_next_one(
    start: Start, serve: Serve, until: Until
) -> None:
    """In the middle of a product. A pod does not survive it: its key belongs to one run."""
    port = free_port()
    code = (
        "import numpy as np\n"
        "from ps.transport.jobs import Product\n"
        "from ps.transport.operands import Operand\n"
        "from ps.transport.server import Server\n"
        f"server = Server(port={port}, heartbeat_s=1.0).start()\n"
        "server.wait_for_devices(1, 30)\n"
        "a, out = np.ones((1, 128, 300), np.float32), np.empty((1, 128, 128), np.float32)\n"
        "server.submit(Product(Operand(a), Operand(a), out, lambda: None))\n"
        "while not server._jobs: pass\n"
        "print('work is out', flush=True)\n"
        "server._thread.join()\n"
    )
    crashing = start("-c", code)
    address = f"tcp://127.0.0.1:{port}"
    program = start("agent", "--ps", address, *FAST)
    crashing.expect("work is out")
    crashing.signal(signal.SIGKILL)
    crashing.wait()
    server = serve(port=port, heartbeat_s=1.0)
    assert server.wait_for_devices(1, LIMIT_S)
    until(lambda: len(server.labels) == 1, "the agent has joined once")
    halves(server, [0]).check()
    counted_once(server, 1)
    assert program.running


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["agent", "pod"])
def test_a_stopped_process_loses_its_work_and_joins_again_when_it_continues(
    start: Start, serve: Serve, until: Until, kind: str
) -> None:
    server = serve(heartbeat_s=0.2)
    server.notice = lambda text: None
    if kind == "agent":
        stopped, _ = agents(start, server, 2)
    else:
        stopped = pod(start, server, 1)
        pod(start, server, 1)
    halves(server, [0, 1]).check()
    stopped.signal(signal.SIGSTOP)
    product = halves(server, [0, 1])
    product.check()  # the other device computes it all, before the server misses the stopped one
    until(lambda: server.totals.lost_devices == 1, "the server misses the stopped process")
    stopped.signal(signal.SIGCONT)  # it returns its half now, but the server already has it
    until(lambda: server.devices == 2, "the process has joined again")
    assert server.labels[2] == server.labels[0]
    expected = product.left @ product.right
    np.testing.assert_allclose(product.out, expected, rtol=1e-4, atol=1e-3)
    halves(server, [1, 2]).check()
    counted_once(server, 3)
    assert set(server.records.columns()["device"][-BLOCKS:].tolist()) == {1, 2}
