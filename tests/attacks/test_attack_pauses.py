"""A pause is no death: servers and pods that stand still for far longer than the silence limit continue afterwards,
with nothing lost or counted twice; and a wait for devices ends and keeps the results.

Lengths are relative to the heartbeat, which is short here; `python -m testbed.faults.pauses` pauses whole runs, for up
to a minute.
"""

from __future__ import annotations

import csv
import json
import random
import signal
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import psutil
import pytest
import small_runs
from processes import LIMIT_S, Multiplication, grid
from small_runs import CLEAVE, RUN_LIMIT_S

from agent.protocol.wire import JOIN_DEVICES
from emulator.model.fleet import Fleet, uniform_fleet
from ps.scheduling.settings import NOW
from ps.scheduling.slowness import Slowness
from ps.transport.standstill import Standstill
from testbed.launch.processes import Pods
from testbed.runs.watchdog import Patience, WaitedInVain, Watchdog

if TYPE_CHECKING:
    from conftest import Serve, Start, Until

SMALL = ("--devices", "12", *small_runs.SMALL)
HEARTBEAT_S = 0.05  # a pod takes a server for dead after 0.4 s

SERVING = f"""
import sys, threading
import numpy as np
from emulator.model.fleet import Fleet, uniform_fleet
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server
from testbed.launch.processes import Pods

server = Server(heartbeat_s={HEARTBEAT_S}).start()
fleet = Fleet(uniform_fleet("extreme", 6, 0, 1.0), ["phone"] * 6, ["line"] * 6, {{}})
rng = np.random.default_rng(0)
with Pods(fleet, 2, server.address, "model", pod_pass=server.pod_pass) as pods:
    assert server.wait_for_devices(6, 30.0)
    print("pods are", *pods.pids, flush=True)
    for number in range(30):
        left = rng.standard_normal((1, 96, 64), dtype=np.float32)
        right = rng.standard_normal((1, 80, 64), dtype=np.float32)
        out, done = np.full((1, 96, 80), np.nan, np.float32), threading.Event()
        server.submit(Product(Operand(left), Operand(right), out, done.set, name=str(number)))
        assert done.wait(30.0), f"product {{number}} was never complete: {{server.devices}} devices"
        assert np.allclose(out, left @ right.transpose(0, 2, 1), rtol=1e-4, atol=1e-3)
        print("product", number, flush=True)
        threading.Event().wait(0.05)
    print("stood still", server.stood_still_s, flush=True)
    print("lost", server.totals.lost_devices, "alive", pods.codes.count(None), flush=True)
    server.stop()
"""

WAITING = f"""
import json, threading
from ps.transport.server import Server

server = Server(heartbeat_s={HEARTBEAT_S}).start()
print(json.dumps({{"address": server.address, "pass": server.pod_pass}}), flush=True)
assert server.wait_for_devices(1, 30.0)
print("joined", flush=True)
threading.Event().wait()
"""


@pytest.mark.alone
@pytest.mark.parametrize(("beats", "seed"), [(20, 1), (60, 2)])
def test_a_server_that_stood_still_keeps_its_pods_and_loses_nothing(start: Start, beats: int, seed: int) -> None:
    """For 20 and 60 heartbeats; pods end themselves after 8 silent ones."""
    serving, rng, pause = start("-c", SERVING), random.Random(seed), threading.Event()
    serving.expect(f"product {rng.randrange(1, 6)}", RUN_LIMIT_S)
    pause.wait(rng.uniform(0.0, 0.1))
    serving.signal(signal.SIGSTOP)
    pause.wait(beats * HEARTBEAT_S)
    serving.signal(signal.SIGCONT)
    assert serving.wait(RUN_LIMIT_S) == 0, serving.output
    assert serving.said[-1] == "lost 0 alive 2"
    assert (
        float(serving.expect("stood still").split()[-1]) > 0.8 * beats * HEARTBEAT_S - 0.5
    )  # half a second for a poll


def test_the_servers_own_standstill_does_not_make_its_devices_late() -> None:
    """Host time, processor time, intended waits: the rest is a standstill, if it is long enough."""
    still = Standstill()
    still.look(100.0, 5.0)
    assert still.look(100.5, 5.0, waited_s=0.5) == 0.0  # it waited
    assert still.look(101.5, 6.0) == 0.0  # it worked
    assert still.look(101.6, 6.0) == 0.0  # a hitch
    assert still.look(103.1, 6.5) == pytest.approx(1.0)
    assert still.look(103.2, 6.6) == 0.0
    assert still.total_s == pytest.approx(1.0)


def test_a_device_taken_for_slow_gets_another_chance_and_a_truly_slow_one_does_not_use_it() -> None:
    """Without it, a hitch of the host excluded devices for good: a device without work cannot show its speed."""
    slowness = Slowness()
    slowness.overtaken(1, 80.0)
    slowness.overtaken(2, 4.0)
    for now_s in range(120):
        slowness.forgive(float(now_s))
        for _ in range(NOW.answers):
            slowness.answered(2, 1.0)  # as slow as assumed
    assert slowness.factor == {1: 1.0, 2: 4.0}
    assert slowness.take_changes() == {1: 1.0, 2: 4.0}
    assert slowness.factor == {2: 4.0}
    slowness.overtaken(1, 1.0)  # slow after all
    assert slowness.factor[1] == NOW.far


@pytest.mark.alone
def test_pods_that_stood_still_join_again_and_the_products_are_right(start: Start, until: Until) -> None:
    serving, rng, pause = start("-c", SERVING), random.Random(1), threading.Event()
    pods = [psutil.Process(int(pid)) for pid in serving.expect("pods are", RUN_LIMIT_S).split()[2:]]
    serving.expect(f"product {rng.randrange(1, 6)}")
    for process in pods:
        process.suspend()
    pause.wait(30 * HEARTBEAT_S)  # the server misses them after 8 heartbeats
    for process in pods:
        process.resume()
    assert serving.wait(RUN_LIMIT_S) == 0, serving.output
    assert serving.said[-1] == "lost 6 alive 2"


def test_a_pod_whose_run_was_killed_ends(start: Start, until: Until) -> None:
    serving = start("-c", SERVING)
    pods = [psutil.Process(int(pid)) for pid in serving.expect("pods are", RUN_LIMIT_S).split()[2:]]
    serving.signal(signal.SIGKILL)
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in pods), "the pods have ended")


def test_a_pod_without_a_parent_ends_with_a_silent_server(start: Start) -> None:
    """For platforms where no signal announces the parent's death. `start` closes its standard input."""
    server = start("-c", WAITING)
    where = json.loads(server.expect("address"))
    fleet = {"profiles": [[50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]], "labels": ["emulated"], "pass": where["pass"]}
    program = start("emulator.pods.pod", "--ps", where["address"], stdin=json.dumps(fleet))
    server.expect("joined")
    process = psutil.Process(program.pid)
    server.signal(signal.SIGKILL)  # it ends without a message
    assert program.wait() == 1
    assert "our standard input is closed" in program.output
    assert not process.is_running()


# ---- joining


def reported(pods: Pods, until: Until) -> list[int]:
    """The devices of the next report."""
    reports: list[list[int]] = []

    def heard() -> bool:
        reports.extend(report["devices"] for _, report in pods.exchange(0.1))
        return bool(reports)

    until(heard, "the pod reports")
    return reports[0]


@pytest.mark.alone
def test_many_devices_join_in_batches_and_no_turn_of_the_server_is_long(serve: Serve) -> None:
    count = 10_000
    server = serve()
    fleet = Fleet(uniform_fleet("extreme", count, 0, 1.0), ["phone"] * count, ["line"] * count, {})
    most: list[int] = []
    enter = server.roster.enter

    def entered(peer, labels, profiles):  # type: ignore[no-untyped-def]
        most.append(len(labels))
        return enter(peer, labels, profiles)

    server.roster.enter = entered  # type: ignore[method-assign]
    with Pods(fleet, 2, server.address, "off", pod_pass=server.pod_pass) as pods:
        assert server.wait_for_devices(count, LIMIT_S)
        assert max(most) <= JOIN_DEVICES
        assert server.totals.longest_turn_s < 0.2
        assert sorted(server.labels) == sorted(fleet.labels)
        product = Multiplication(server, (1, 64, 32, 64), grid(64, 64, 16, [0, 1, count // 2, count - 1]))
        product.check()
        pods.order(0, {"do": "leave", "devices": [0, 4_999]})
        pods.exchange(5.0)
        assert pods.look_after() == []
        server.stop()


def test_a_device_that_leaves_before_its_turn_to_join_never_joins(serve: Serve, until: Until) -> None:
    count = 3 * JOIN_DEVICES
    server = serve()
    fleet = Fleet(uniform_fleet("extreme", count, 0, 1.0), ["phone"] * count, ["line"] * count, {})
    with Pods(fleet, 1, server.address, "off", pod_pass=server.pod_pass) as pods:
        pods.order(0, {"do": "leave", "devices": [0, count - 1]})
        assert reported(pods, until) == [0, count - 1]
        until(lambda: server.devices == count - 2, "all others have joined")
        pods.order(0, {"do": "return", "devices": [0, count - 1]})
        assert reported(pods, until) == [0, count - 1]
        until(lambda: server.devices == count, "both have returned")
        assert server.error is None
        server.stop()


# ---- a wait that ends


def test_patience_ends_only_when_no_device_can_do_the_work() -> None:
    patience = Patience(10.0)
    for now_s, blocks, waiting in ((0, 5, False), (5, 5, True), (14, 5, True)):
        patience.look(now_s, blocks, waiting)
    assert patience.waited_s(14) == 9
    assert not patience.over(14)
    assert patience.over(15.5)
    patience.look(15.5, 6, True)  # a block came in time
    assert patience.waited_s(15.5) == 0
    patience.look(30, 6, False)
    assert not patience.over(99)


def test_a_caller_that_waits_for_a_product_is_told_when_patience_ends(serve: Serve) -> None:
    server = serve()
    server.notice = lambda text: None
    Multiplication(server, (1, 8, 8, 8))
    with Watchdog(server, 0.3, lambda text: None) as watch:
        watch.begin(list)
        with pytest.raises(WaitedInVain) as told:
            server.collect(SimpleQueue())
    assert "no device is there" in str(told.value)
    assert "training.wait_for_devices" in str(told.value)


@pytest.mark.slow
def test_a_run_without_devices_ends_and_keeps_its_results(start_warm: Start, tmp_path: Path) -> None:
    options = ("--set", "launch.restarts=0", "--set", "training.wait_for_devices=2 s")
    run = start_warm("-c", CLEAVE, "run", "quickstart", *SMALL, *options, "--steps", "50", "--results", str(tmp_path))
    run.expect("step 2 of 50", RUN_LIMIT_S)
    for process in psutil.Process(run.pid).children():
        process.kill()
    assert run.wait(RUN_LIMIT_S) == 1, run.output
    assert "Traceback" not in run.output
    assert "no device that could go on came within 2 s" in run.output
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"] == "FAILED"
    (stopped,) = summary["incomplete"]
    assert stopped == summary["reasons"][0]
    assert stopped.startswith(f"stopped after step {summary['steps']} of 50: ")
    assert len(summary["losses"]) == summary["steps"] >= 2
    assert summary["loss_max_abs_diff"] <= 1e-4
    with (folder / "steps.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == summary["steps"]
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events.count("step") == summary["steps"]
    assert "stopped" in events
    for name in ("blocks.parquet", "report.html", "trace.json"):
        assert (folder / name).exists()
