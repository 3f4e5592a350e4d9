"""A real server, real agents and pods as processes, real sockets: whatever happens to a fleet, and whatever an unknown
client sends, no product comes out wrong and the server stays up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import zmq
from places import HELPERS, ROOT
from processes import FAST, LIMIT_S, Multiplication, Stranger, agents, free_port, grid, pod

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import (
    ANSWER,
    DONE,
    FAILED,
    MAGIC,
    VERSION,
    Goodbye,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refused,
    Result,
    Welcome,
    encode,
)
from ps.access.listening import AddressError
from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Serve, Start, Until


@pytest.fixture
def stranger_at(nothing_left_behind: None) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def connect(server: Server) -> Stranger:
            stranger = Stranger(server)
            stack.callback(stranger.close)
            return stranger

        yield connect


# ---- products


@pytest.mark.slow
def test_products_over_two_agents_equal_those_of_numpy(start: Start, serve: Serve) -> None:
    server = serve()
    agents(start, server, 2)
    shapes = [(1, 300, 200, 170), (6, 33, 17, 29), (1, 1, 1, 1), (1, 7, 500, 3), (40, 5, 64, 5)]
    for product in [Multiplication(server, shape, seed=i) for i, shape in enumerate(shapes)]:
        product.check()
    Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1])).check()
    devices = server.records.columns()["device"]
    assert set(devices.tolist()) == {0, 1}
    assert server.totals.lost_devices == 0


@pytest.mark.parametrize("links", ["off", "model"])
def test_products_over_a_pod_equal_those_of_numpy(start: Start, serve: Serve, links: str) -> None:
    server = serve()
    pod(start, server, 30, links)
    for i, shape in enumerate([(1, 120, 90, 110), (8, 20, 30, 40), (3, 1, 5, 1)]):
        Multiplication(server, shape, seed=i).check()
    Multiplication(server, (1, 96, 16, 80), grid(96, 80, 16, list(range(30)))).check()
    columns = server.records.columns()
    assert set(columns["device"].tolist()) == set(range(30))
    if links == "model":  # no answer arrives before it is due, except those that share a message
        assert (columns["received_s"] - columns["due_s"]).min() > -0.001
        assert (columns["due_s"] - columns["sent_s"]).min() >= 0.010  # twice the latency


@pytest.mark.slow
def test_a_real_agent_and_a_pod_share_a_product(start: Start, serve: Serve) -> None:
    server = serve()
    agents(start, server, 1)
    pod(start, server, 3)
    Multiplication(server, (1, 128, 64, 128), grid(128, 128, 16, [0, 1, 2, 3])).check()
    columns = server.records.columns()
    real = np.isnan(columns["due_s"])
    assert set(columns["device"][real].tolist()) == {0}


@pytest.mark.slow
def test_what_a_turn_has_no_time_to_pack_or_read_is_left_to_the_next_turns(
    start: Start, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As little as possible per turn: one message out, one message in."""
    monkeypatch.setattr("ps.transport.server.PACKING_S", 0.0)
    monkeypatch.setattr("ps.transport.receiving.BYTES_PER_TURN", 1)
    monkeypatch.setattr("ps.transport.operands.MESSAGE_BYTES", 1 << 16)
    server = serve()
    agents(start, server, 1)
    pod(start, server, 12)
    products = [Multiplication(server, (1, 200, 300, 400), seed=seed) for seed in range(3)]
    products.append(Multiplication(server, (1, 128, 64, 128), grid(128, 128, 16, list(range(13))), seed=3))
    for product in products:
        product.check()
    assert server.left_behind() == ""


# ---- devices that come and go


@pytest.mark.slow
def test_an_agent_killed_in_the_middle_of_its_work_costs_time_but_no_cell(
    start: Start, serve: Serve, until: Until
) -> None:
    server = serve(heartbeat_s=0.2)
    victim, _ = agents(start, server, 2)
    Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1])).check()
    victim.signal(signal.SIGSTOP)  # so that no part of its half is returned before it dies
    before = server.totals.blocks
    product = Multiplication(server, (1, 128, 300, 128), grid(128, 128, 16, [0, 1]))
    until(lambda: server.totals.blocks == before + 32, "the other agent has returned its half")
    assert not product.done.is_set()
    victim.signal(signal.SIGKILL)
    product.check()
    assert server.totals.lost_devices == 1
    assert server.devices == 1


def test_work_waits_for_the_first_agent(start: Start, serve: Serve) -> None:
    server = serve()
    noticed: list[str] = []
    server.notice = noticed.append
    product = Multiplication(server, (2, 50, 60, 70))
    agents(start, server, 1)
    product.check()
    assert any("no device is there" in text for text in noticed)


@pytest.mark.slow
def test_an_agent_that_joins_later_takes_over_waiting_blocks(start: Start, serve: Serve) -> None:
    server = serve(heartbeat_s=5.0)  # no device is lost in this test
    (first,) = agents(start, server, 1, "--credit", "4")
    first.signal(signal.SIGSTOP)
    product = Multiplication(server, (1, 128, 64, 128), grid(128, 128, 16, [0]))
    second = start("agent", "--ps", server.address, "--name", "second", *FAST)
    second.expect("joined")
    product.check()  # what the first agent holds too, since it does not answer
    assert set(server.records.columns()["device"].tolist()) == {1}
    assert server.totals.lost_devices == 0
    first.signal(signal.SIGCONT)


@pytest.mark.slow
def test_an_agent_asked_to_end_leaves_and_its_blocks_are_redone(start: Start, serve: Serve, until: Until) -> None:
    server = serve(heartbeat_s=5.0)
    leaving, _ = agents(start, server, 2)
    leaving.signal(signal.SIGSTOP)
    product = Multiplication(server, (1, 256, 2000, 256), grid(256, 256, 16, [0, 1]))
    until(lambda: server.totals.blocks >= 64, "half of the other agent's blocks are back")
    leaving.signal(signal.SIGTERM)
    leaving.signal(signal.SIGCONT)
    assert leaving.wait() == 0
    product.check()
    leaving.expect("left")
    assert server.totals.lost_devices == 0  # leaving is not being lost
    assert server.devices == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_idle_agent_ends_at_once_when_asked(
    start: Start, serve: Serve, until: Until, number: signal.Signals
) -> None:
    server = serve()
    (agent,) = agents(start, server, 1)
    agent.expect("joined")
    agent.signal(number)
    assert agent.wait(limit_s=5.0) == 0
    until(lambda: server.devices == 0, "the server knows that the agent left")
    assert "Traceback" not in agent.output


def test_an_agent_whose_server_never_answers_still_ends_when_asked(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(LIMIT_S)
        agent = start("agent", "--ps", f"tcp://127.0.0.1:{mute.getsockname()[1]}", *FAST)
        line, _ = mute.accept()
        with line:
            agent.signal(signal.SIGTERM)
            assert agent.wait(limit_s=5.0) == 0


def test_an_agent_started_before_the_server_joins_when_it_comes_up(start: Start, serve: Serve) -> None:
    port = free_port()
    agent = start("agent", "--ps", f"tcp://127.0.0.1:{port}", *FAST)
    agent.expect("kernel")
    server = serve(port=port)
    assert server.wait_for_devices(1, LIMIT_S)
    Multiplication(server, (1, 30, 40, 50)).check()


def test_after_an_orderly_restart_of_the_server_the_agent_rejoins(start: Start, serve: Serve) -> None:
    first = serve()
    (agent,) = agents(start, first, 1)
    first.stop("maintenance")
    agent.expect("the server said: maintenance")
    second = serve(port=int(first.address.rpartition(":")[2]))
    assert second.wait_for_devices(1, LIMIT_S)
    Multiplication(second, (1, 30, 40, 50)).check()
    assert agent.running


def test_with_once_an_agent_ends_with_the_run(start: Start, serve: Serve) -> None:
    server = serve()
    (agent,) = agents(start, server, 1, "--once")
    server.stop("the run is over")
    assert agent.wait() == 0


def test_a_pod_ends_with_the_run_and_on_sigterm(start: Start, serve: Serve, until: Until) -> None:
    server = serve()
    asked = pod(start, server, 5)
    asked.signal(signal.SIGTERM)
    assert asked.wait() == 0
    until(lambda: server.devices == 0, "the server knows that the devices left")
    ending = pod(start, server, 5)
    server.stop()
    assert ending.wait() == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pod ends when the server falls silent")
def test_a_pod_ends_with_its_parent_even_if_the_parent_is_killed(start: Start, serve: Serve) -> None:
    server = serve(heartbeat_s=30.0)  # too long for the server's silence to end the pod
    profiles = [[50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]] * 3
    fleet = json.dumps({"profiles": profiles, "labels": ["a", "b", "c"], "pass": server.pod_pass})
    code = (
        "import subprocess, sys\n"
        f"pod = subprocess.Popen([sys.executable, '-m', 'emulator.pods.pod', '--ps', {server.address!r}], "
        "stdin=subprocess.PIPE)\n"
        f"pod.stdin.write({fleet!r}.encode()); pod.stdin.close()\n"
        "print('pod is', pod.pid, flush=True); pod.wait()"
    )
    parent = start("-c", code)
    child = psutil.Process(int(parent.expect("pod is").split()[-1]))
    assert server.wait_for_devices(3, LIMIT_S)
    parent.signal(signal.SIGKILL)
    child.wait(timeout=10)
    assert not child.is_running()


# ---- unknown clients


def test_noise_on_the_port_does_not_disturb_the_server(start: Start, serve: Serve) -> None:
    server = serve()
    agents(start, server, 1)
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    rng = random.Random(7)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    noise = [b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(5000), greeting[:11], greeting, b"\x01\x00" * 400]
    noise += [greeting + rng.randbytes(100), greeting + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff"]
    with contextlib.ExitStack() as stack:
        for part in noise:
            line = stack.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            with contextlib.suppress(ConnectionError):  # the server may have hung up already
                line.sendall(part)
        Multiplication(server, (1, 60, 70, 80)).check()
    Multiplication(server, (1, 60, 70, 80)).check()
    assert server.totals.lost_devices == 0


@pytest.mark.slow
def test_invalid_frames_are_counted_and_answered(start: Start, serve: Serve, stranger_at: Any, until: Any) -> None:
    server = serve()
    server.notice = lambda text: None
    agents(start, server, 1)
    rng = random.Random(8)
    profile = pack_profiles([Profile(1e9, 0.0, 1e6, 1e6, 0.0, 2**30, 4)])
    originals: list[Message] = [
        Heartbeat(),
        Join(profile, ["x"], {}),
        Leave(np.array([0], "<u4"), "bye"),
        Result(np.zeros(1, ANSWER), b""),
        Goodbye("no"),
        Welcome(1.0, "run"),
        Refused("no", True),
    ]
    for number in range(300):
        stranger: Stranger = stranger_at(server)  # an invalid message ends its connection
        frames = [bytes(frame) for frame in encode(originals[number % len(originals)])]
        position = rng.randrange(len(frames))
        spoilt = bytearray(frames[position] or b"?")
        match number % 4:
            case 0:
                spoilt = spoilt[:-1]
            case 1:
                spoilt += rng.randbytes(rng.randrange(1, 40))
            case 2:
                spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
            case 3:
                frames += [rng.randbytes(rng.randrange(100))] * rng.randrange(1, 300)
        frames[position] = bytes(spoilt)
        stranger.socket.send_multipart(frames)
    until(lambda: server.totals.dropped_messages > 100, "the server has read them")
    last: Stranger = stranger_at(server)
    last.socket.send_multipart([b"WORD"])
    assert isinstance(last.receive(), Refused)
    Multiplication(server, (1, 60, 70, 80), grid(60, 80, 20, [0])).check()


def test_a_device_with_another_protocol_version_is_told_so(serve: Serve, stranger_at: Any) -> None:
    server = serve()
    noticed: list[str] = []
    server.notice = noticed.append
    stranger: Stranger = stranger_at(server)
    stranger.socket.send_multipart([MAGIC + bytes([VERSION + 6]) + b"whatever comes in a later version", b"more"])
    answer = stranger.receive()
    assert answer == Refused(
        f"the other side speaks protocol version {VERSION + 6}, this side version {VERSION}; update the agent", True
    )
    assert any("protocol version" in text for text in noticed)
    assert server.devices == 0


def test_an_agent_ends_with_a_clear_message_when_the_server_speaks_another_version(start: Start) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        agent = start("agent", "--ps", f"tcp://127.0.0.1:{port}", *FAST)
        assert router.poll(int(1000 * LIMIT_S))
        identity = router.recv_multipart()[0]
        router.send_multipart([identity, MAGIC + bytes([VERSION + 1]) + b"a header of the future"])
        assert agent.wait() == 2
    assert f"speaks protocol version {VERSION + 1}, this side version {VERSION}" in agent.output
    assert "install the same release on both sides" in agent.output
    assert "Traceback" not in agent.output


def test_a_client_that_has_not_joined_is_asked_to(serve: Serve, stranger_at: Any) -> None:
    stranger: Stranger = stranger_at(serve())
    stranger.send(Heartbeat())
    answer = stranger.receive()
    assert isinstance(answer, Refused)
    assert not answer.final
    assert "join first" in answer.reason


def test_answers_to_blocks_that_were_not_given_out_change_nothing(start: Start, serve: Serve, stranger_at: Any) -> None:
    server = serve()
    server.notice = lambda text: None
    agents(start, server, 1)
    stranger: Stranger = stranger_at(server)
    stranger.join()
    product = Multiplication(server, (1, 256, 3000, 256), grid(256, 256, 16, [0]))
    wrong = np.full(256, 666.0, np.float32)
    for job in (0, 1, 2**63, 12345):
        for block in (0, 255, 256, 2**32 - 1):
            for device in (0, 1, 2**32 - 1):
                answer = np.array([(device, job, block, DONE, 256, 0.0, 0)], ANSWER)
                stranger.send(Result(answer, wrong))
    stranger.send(Result(np.array([(0, 0, 3, FAILED, 0, 0.0, 0)], ANSWER), b""))
    product.check()


@pytest.mark.parametrize("cells", [0, 1, 255, 257])
def test_an_answer_of_the_wrong_size_is_refused_and_the_block_redone(
    start: Start, serve: Serve, stranger_at: Any, cells: int
) -> None:
    server = serve(heartbeat_s=0.2)
    server.notice = lambda text: None
    agents(start, server, 1)
    stranger: Stranger = stranger_at(server)
    stranger.join()
    product = Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1]))
    work = stranger.receive_work()
    row = work.blocks[0]
    answer = np.array([(0, row["job"], row["block"], DONE, cells, 0.0, 0)], ANSWER)
    stranger.send(Result(answer, np.full(cells, 666.0, np.float32)))
    while not isinstance(refused := stranger.receive(), Refused):
        pass
    assert "size" in refused.reason
    _stay_alive_until_done(stranger, product)
    product.check(limit_s=0)


def test_a_device_that_fails_every_block_is_suspended(start: Start, serve: Serve, stranger_at: Any) -> None:
    server = serve()
    noticed: list[str] = []
    server.notice = noticed.append
    agents(start, server, 1)
    stranger: Stranger = stranger_at(server)
    stranger.join()
    product = Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1]))
    failed = 0
    while failed < 4:  # one more than allowed
        rows = stranger.receive_work().blocks
        failed += len(rows)
        answers = [(0, row["job"], row["block"], FAILED, 0, 0.0, 0) for row in rows]
        stranger.send(Result(np.array(answers, ANSWER), b""))
    _stay_alive_until_done(stranger, product)
    product.check(limit_s=0)
    assert any("suspended stranger" in text for text in noticed)
    assert server.devices == 1


def _stay_alive_until_done(stranger: Stranger, product: Multiplication) -> None:
    """Sends heartbeats, so that the stranger is not lost for its silence."""
    deadline = time.monotonic() + 8
    while not product.done.wait(0.05):
        assert time.monotonic() < deadline, "its blocks were never given to another device"
        stranger.send(Heartbeat())


def test_a_device_that_leaves_several_times_is_counted_once(start: Start, serve: Serve, stranger_at: Any) -> None:
    server = serve()
    server.notice = lambda text: None
    agents(start, server, 1)
    stranger: Stranger = stranger_at(server)
    stranger.join()
    assert server.wait_for_devices(2, LIMIT_S)
    for devices in ([0, 0, 0], [0], [7]):
        stranger.send(Leave(np.array(devices, "<u4"), "bye"))
    stranger.socket.send_multipart([b"LASTWORD"])
    while not isinstance(message := stranger.receive(), Refused) or "LASTWORD" not in message.reason:
        pass
    assert server.devices == 1
    Multiplication(server, (1, 60, 70, 80)).check()


# ---- addresses


def test_a_port_in_use_is_reported_with_advice(serve: Serve) -> None:
    port = int(serve().address.rpartition(":")[2])
    with pytest.raises(AddressError) as raised:
        Server(port=port)
    assert str(raised.value) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use. "
        "Another server may be using it: stop that one, or take port 0 to get any free port"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ps", "127.0.0.1:5555"], "give an address such as tcp://"),
        (["--ps", "tcp://nowhere"], "give an address such as tcp://"),
        (["--ps", "tcp://127.0.0.1:99999"], "99999"),
        (["--ps", "tcp://127.0.0.1:five"], "five"),
        (["--ps", "tcp://127.0.0.1:5555", "--down", "fast"], "fast"),
        (["--ps", "tcp://127.0.0.1:5555", "--memory", "-1 MB"], "-1 MB"),
        (["--ps", "tcp://127.0.0.1:5555", "--threads", "0"], "0 is not a positive number"),
        ([], "--ps"),
    ],
)
def test_an_agent_with_a_wrong_option_says_which_and_ends(start: Start, arguments: list[str], told: str) -> None:
    agent = start("agent", "--kernel", "numpy", *arguments)
    assert agent.wait(limit_s=10.0) == 2
    assert told in agent.output
    assert "Traceback" not in agent.output


@pytest.mark.parametrize("name", ["\x1b[2J clears the screen", "half a pair \ud800", "two\nlines"])
def test_a_name_that_cannot_be_printed_never_reaches_a_table(serve: Serve, stranger_at: Any, name: str) -> None:
    server = serve()
    server.notice = lambda text: None
    stranger: Stranger = stranger_at(server)
    profile = Profile(1e12, 0.0, 1e12, 1e12, 0.0, 2**40, 4)
    stranger.send(Join(pack_profiles([profile]), [name], {}))
    answer = stranger.receive()
    assert isinstance(answer, Welcome | Refused)  # cleaned or refused, either is fine
    assert all(label.isprintable() for label in server.labels)


# ---- the check for leftovers

LEAKING = """
import os, subprocess, threading, zmq
kept = []

def test_a_thread(nothing_left_behind):
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_a_context(nothing_left_behind):
    kept.append(zmq.Context())
    kept.append(kept[-1].socket(zmq.DEALER))

def test_a_descriptor(nothing_left_behind):
    kept.append(open(os.devnull))

def test_a_child(nothing_left_behind):
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_an_orphan(start):
    start("-c", "import subprocess; subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)").wait()  # -3: nowhere

def test_nothing(start, serve):
    serve()
    start("-c", "print('hello')").expect("hello")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ZeroMQ's threads can be seen on Linux only")
def test_leftovers_of_a_test_are_found(start: Start, tmp_path: Path) -> None:
    fixtures = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    critical_plans = fixtures.replace("SETTLE_S = 5.0", "SETTLE_S = 0.3")
    assert critical_plans != fixtures
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(critical_plans, encoding="utf-8")
    (tmp_path / "tests" / "test_leaking.py").write_text(LEAKING, encoding="utf-8")
    options = ("-p", "no:cacheprovider", "-c", os.devnull, "-o", f"pythonpath={HELPERS}")
    inner = start("pytest", "-q", *options, str(tmp_path), cwd=tmp_path)
    assert inner.wait() == 1
    assert "6 passed, 5 errors" in inner.output, inner.output
    found = {line.split("::")[1].split()[0] for line in inner.said if line.startswith("ERROR ")}
    assert found == {"test_a_thread", "test_a_context", "test_a_descriptor", "test_a_child", "test_an_orphan"}


# ---- commands that are forked from a process with PyTorch

TELLS = """
import json, os, signal, sys
print(json.dumps([os.getpid(), os.getcwd(), os.environ["TELLS"], sys.argv[1:], "torch" in sys.modules]), flush=True)
print("and this", file=sys.stderr)
signal.pause() if sys.argv[1] == "wait" else sys.exit(3)
"""


@pytest.mark.slow
def test_a_forked_command_is_a_process_of_its_own(
    start_warm: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELLS", "here")
    ends, waits, interrupted = (start_warm("-c", TELLS, word, "x", cwd=tmp_path) for word in ("end", "wait", "wait"))
    for program, word in ((ends, "end"), (waits, "wait"), (interrupted, "wait")):
        pid, *told = json.loads(program.expect("["))
        assert pid == program.pid != os.getpid()
        assert told == [str(tmp_path), "here", [word, "x"], sys.platform == "linux"]
        program.expect("and this")
    assert (ends.wait(), ends.errors, len(ends.printed)) == (3, ["and this"], 1)
    assert waits.running
    waits.signal(signal.SIGKILL)
    assert waits.wait() == -signal.SIGKILL
    interrupted.signal(signal.SIGINT)
    interrupted.wait()
    assert interrupted.errors[-1] == "KeyboardInterrupt"


@pytest.mark.slow
def test_leftovers_of_a_forked_command_carry_its_mark(start_warm: Start) -> None:
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    program = start_warm("-c", leaves)
    assert program.wait() == 0
    orphan = psutil.Process(int(program.said[0]))
    try:
        assert orphan.environ()["CLEAVE_TEST_MARK"]
    finally:
        orphan.kill()
