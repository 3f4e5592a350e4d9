"""Promises of pods with kernel links: every device has its own connection, from its own address, and the link's time is
real. All of 127.0.0.0/8 belongs to this machine, so no privileges are needed; `test_shaping.py` has links that the
kernel shapes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from places import ROOT
from processes import LIMIT_S, Multiplication, grid

from ps.transport.server import Server

if TYPE_CHECKING:
    from conftest import Program, Serve, Start, Until

PROFILE = [50e9, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]


def fleet(devices: int, latency_in_pod: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "profiles": [PROFILE] * devices,
        "labels": [f"emulated-{i}" for i in range(devices)],
        "addresses": [f"127.77.0.{2 + i}" for i in range(devices)],
        "latency_in_pod": latency_in_pod,
        **more,
    }


def pod(start: Start, server: Server, told: dict[str, Any], *options: str) -> Program:
    program = start(
        "emulator.pods.pod",
        "--ps",
        server.address,
        "--links",
        "kernel",
        *options,
        stdin=json.dumps(told | {"pass": server.pod_pass}),
    )
    assert server.wait_for_devices(len(told["labels"]) - len(told.get("absent", ())), LIMIT_S), program.output
    return program


def sources(program: Program, server: Server) -> set[str]:
    """Source addresses of the pod's connections to the server."""
    port = int(server.data_address.rpartition(":")[2])
    return {c.laddr.ip for c in psutil.Process(program.pid).net_connections("tcp") if c.raddr and c.raddr.port == port}


def test_every_device_computes_over_a_connection_from_its_own_address(start: Start, serve: Serve) -> None:
    server = serve()
    told = fleet(30)
    program = pod(start, server, told)
    assert sources(program, server) == set(told["addresses"])
    for i, shape in enumerate([(1, 120, 90, 110), (8, 20, 30, 40), (3, 1, 5, 1)]):
        Multiplication(server, shape, seed=i).check()
    Multiplication(server, (1, 96, 16, 80), grid(96, 80, 16, list(range(30)))).check()
    columns = server.records.columns()
    assert set(columns["device"].tolist()) == set(range(30))
    assert server.totals.lost_devices == 0


@pytest.mark.parametrize("latency_in_pod", [False, True])
def test_latency_is_held_by_the_pod_only_where_the_kernel_has_none(
    start: Start, serve: Serve, latency_in_pod: bool
) -> None:
    """On a link that takes no time: due after computing, and after twice the latency if the pod holds it."""
    server = serve()
    pod(start, server, fleet(4, latency_in_pod))
    Multiplication(server, (1, 64, 16, 64), grid(64, 64, 16, [0, 1, 2, 3])).check()
    columns = server.records.columns()
    in_hand_s = columns["due_s"] - columns["sent_s"]
    assert (columns["left_s"] - columns["due_s"]).min() > -0.001
    if latency_in_pod:
        assert in_hand_s.min() >= 0.010
    else:
        assert in_hand_s.min() < 0.010  # otherwise it would be waiting


# ---- faults


@contextmanager
def ordered_pod(server: Server, devices: int) -> Iterator[Callable[..., None]]:
    """A pod that takes orders: a call sends one."""
    command = [sys.executable, "-m", "emulator.pods.pod", "--ps", server.address, "--links", "kernel"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1, cwd=ROOT
    )
    assert process.stdin is not None

    def order(do: str, *of: int, **details: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"do": do, "devices": of, **details}) + "\n")

    try:
        process.stdin.write(json.dumps(fleet(devices) | {"pass": server.pod_pass}) + "\n")
        assert server.wait_for_devices(devices, LIMIT_S)
        yield order
    finally:
        process.kill()
        process.stdin.close()
        process.wait()


def test_a_bare_pod_holds_back_no_answer_and_reports_its_compute_time(start: Start, serve: Serve) -> None:
    """For a device so slow that its model would take an hour."""
    server = serve()
    told = fleet(2) | {"profiles": [[1e3, 1e-4, 50e6, 10e6, 0.005, 2**30, 4]] * 2}
    pod(start, server, told, "--bare", "--compute-thread")
    begun_s = time.monotonic()
    Multiplication(server, (1, 128, 128, 128), grid(128, 128, 64, [0, 1])).check()
    took_s = time.monotonic() - begun_s
    columns = server.records.columns()
    assert (columns["compute_s"] > 0).all()
    assert columns["compute_s"].sum() < took_s


@pytest.mark.slow
def test_a_device_that_leaves_or_vanishes_goes_alone_and_may_return(serve: Serve, until: Until) -> None:
    server = serve(heartbeat_s=0.2)
    with ordered_pod(server, 6) as order:
        order("leave", 0, 1)
        until(lambda: server.devices == 4, "two devices have left")
        order("vanish", 2)
        until(lambda: server.devices == 3, "the server misses one device")
        Multiplication(server, (1, 60, 20, 60)).check()
        order("return", 0, 1, 2)
        until(lambda: server.devices == 6, "all devices have returned")
        returned = [6, 7, 8]  # as new devices
        Multiplication(server, (1, 64, 16, 64), grid(64, 64, 16, returned)).check()
        assert set(server.records.columns()["device"].tolist()) >= set(returned)


def test_nonsense_from_one_device_costs_its_own_connection_only(serve: Serve, until: Until) -> None:
    server = serve()
    with ordered_pod(server, 5) as order:
        order("corrupt")
        until(lambda: len(server.labels) == 6, "the device has joined again")
        until(lambda: server.devices == 5, "all devices are present")
        gone = server.labels.index(server.labels[5])  # connections arrive in any order
        there = [device for device in range(6) if device != gone]
        assert len({server.labels[device] for device in there}) == 5
        Multiplication(server, (1, 64, 16, 64), grid(64, 64, 16, there)).check()
