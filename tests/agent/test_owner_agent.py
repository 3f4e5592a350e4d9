"""A real agent under its owner's rules, with commands that stand in for Termux:API: unplugged in the middle of a block
it leaves, says why, and returns; and whatever its sensors do, it never stays away for ever."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from processes import FAST, LIMIT_S, Multiplication, agents

from ps.access.access_file import AccessFile
from ps.planning.plans import Plan
from ps.transport.server import Server
from testbed.access.inviting import new_invitation

if TYPE_CHECKING:
    from conftest import Program, Serve, Start, Until

ROWS, INNER, COLUMNS = 64, 96, 80
# `python -m agent` as a slow phone: one row of a product of this inner length takes a tenth of a second
SLOW = f"""
import sys, threading
import agent.compute.kernels, agent.compute.worker
agent.compute.worker.PART_S = 1e-12
fast = agent.compute.kernels.NumpyKernel.product
def product(self, left, right):
    if left.shape[-1] == {INNER}:
        print("computing a row", flush=True)
        threading.Event().wait(0.1)
    return fast(self, left, right)
agent.compute.kernels.NumpyKernel.product = product
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Phone:
    """The readings of its Termux:API stand-ins, and its owner's rules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rules_file = folder / "owner.toml"
        (folder / "bin").mkdir()
        self.command("termux-battery-status", f"cat '{folder}/battery.json'")
        self.command("termux-wifi-connectioninfo", f"cat '{folder}/wifi.json'")
        self.battery()
        self.wifi(True)

    def command(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def battery(self, plugged: str = "PLUGGED_AC", percentage: int = 80, temperature: float = 30.1) -> None:
        status = "DISCHARGING" if plugged == "UNPLUGGED" else "CHARGING"
        answer = {"health": "GOOD", "plugged": plugged, "status": status, "percentage": percentage}
        self._write("battery.json", json.dumps(answer | {"temperature": temperature, "current": -820000}))

    def rules(self, text: str) -> None:
        self._write("owner.toml", text)

    def wifi(self, on: bool) -> None:
        ip, state = ("192.168.1.7", "COMPLETED") if on else ("0.0.0.0", "DISCONNECTED")
        self._write("wifi.json", json.dumps({"ip": ip, "supplicant_state": state, "ssid": "<unknown ssid>"}))

    def _write(self, name: str, text: str) -> None:
        unfinished = self.folder / f"{name}.part"
        unfinished.write_text(text)
        unfinished.replace(self.folder / name)


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phone:
    found = Phone(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CLEAVE_AGENT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CLEAVE_RULES", str(found.rules_file))
    return found


def two_boxes(server: Server) -> Multiplication:
    """Half of the product for the first device, half for the second."""
    boxes = np.array([(0, 1, 0, ROWS, 0, COLUMNS // 2), (0, 1, 0, ROWS, COLUMNS // 2, COLUMNS // 2)])
    plan = Plan(boxes=boxes, device=np.array([0, 1]), fresh=np.ones((2, 2), bool), makespan_s=0.0)
    return Multiplication(server, (1, ROWS, INNER, COLUMNS), plan)


def watched(server: Server) -> tuple[list[dict[str, Any]], threading.Event]:
    """The server's events of real devices, and a flag for the first that left."""
    events: list[dict[str, Any]] = []
    left = threading.Event()

    def note(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})
        if event == "left":
            left.set()

    server.note, server.notice = note, lambda text: None
    return events, left


@pytest.mark.slow
def test_an_agent_unplugged_in_the_middle_of_a_block_hands_it_back_and_returns_when_it_charges(
    phone: Phone,
    start: Start,
    serve: Serve,
    until: Until,
    record_property: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    events, left = watched(server)
    phone.rules("only_while_charging = true\n")
    slow = start("-c", SLOW, "--ps", server.address, "--name", "phone", *FAST)
    assert server.wait_for_devices(1, LIMIT_S)
    monkeypatch.setenv("CLEAVE_RULES", os.devnull)
    start("agent", "--ps", server.address, "--name", "other", *FAST)
    assert server.wait_for_devices(2, LIMIT_S)
    product = two_boxes(server)
    slow.expect("computing a row")
    unplugged = time.monotonic()
    phone.battery("UNPLUGGED")
    assert left.wait(LIMIT_S)
    handed_back_s = time.monotonic() - unplugged
    record_property("handed_back_s", handed_back_s)
    print(f"handed back {handed_back_s:.2f} s after it was unplugged")
    product.check()  # the other device has computed it all
    (departure,) = server.attendance.departures
    assert (departure.name, departure.until_s) == ("phone", None)
    assert departure.reason == "it is not charging (only_while_charging)"
    assert departure.blocks == 1  # it was computing it
    assert server.totals.lost_devices == 0  # it left with a message
    assert set(server.records.columns()["device"].tolist()) == {1}
    slow.expect("not working: it is not charging")
    assert sum("computing a row" in line for line in slow.said) < ROWS  # it has stopped computing
    phone.battery("PLUGGED_USB")
    until(lambda: departure.back_s is not None, "the agent has returned")
    assert server.labels == ["phone", "other", "phone"]  # the same name, a new number
    assert [event["event"] for event in events] == ["real", "real", "left", "real"]


@pytest.mark.slow
def test_reasons_for_not_working_are_kept_for_the_owner(phone: Phone, start: Start, serve: Serve, until: Until) -> None:
    server = serve()
    events, _ = watched(server)
    phone.rules("battery_above = 40\ntemperature_below = 38\nonly_on_wifi = true\n")
    phone.battery(percentage=30, temperature=41.0)
    agent = start("agent", "--ps", server.address, "--name", "phone", *FAST)
    agent.expect("not working: the battery has 30%, not 40% (battery_above); it has 41.0 °C")
    told = start("agent", "status")
    assert told.wait() == 0
    assert told.said[0].endswith("(battery_above); it has 41.0 °C, not below 38 °C (temperature_below)")
    assert "suspended" in told.said[0]
    assert told.said[1].startswith("the owner's rules do not allow it to work now: the battery has 30%")
    until(lambda: "phone" in server.attendance.away, "the server knows why the agent does not join")
    assert server.attendance.away["phone"].startswith("the battery has 30%, not 40% (battery_above); it has 41.0 °C")
    assert [event["event"] for event in events] == ["away"]
    assert server.devices == len(server.labels) == 0
    phone.battery(percentage=80)
    assert server.wait_for_devices(1, LIMIT_S)
    assert not server.attendance.away
    told = start("agent", "status", "--json")
    assert told.wait() == 0
    status = json.loads(told.output)
    assert (status["running"], status["may_work"], status["agent"]["state"]) == (True, True, "working")
    assert status["network"] == "wifi"


@pytest.mark.slow
def test_a_device_that_leaves_for_the_night_says_until_when(phone: Phone, start: Start, serve: Serve) -> None:
    server = serve()
    _, left = watched(server)
    agents(start, server, 1)
    hour = (time.localtime().tm_hour + 2) % 24  # never the present hour
    phone.rules(f'hours = "{hour:02}:00-{hour:02}:01"\n')
    assert left.wait(LIMIT_S)
    (departure,) = server.attendance.departures
    assert departure.reason == f"it works at {hour:02}:00-{hour:02}:01 only (hours)"
    assert departure.until_s is not None
    assert 0 < departure.until_s <= 2 * 3600


@pytest.mark.slow
def test_the_bytes_of_a_day_are_counted_over_starts_and_end_the_work(phone: Phone, start: Start, serve: Serve) -> None:
    server = serve()
    _, left = watched(server)
    (agent,) = agents(start, server, 1)
    Multiplication(server, (1, 200, 300, 200)).check()
    moved = 4 * (200 * 300 + 300 * 200 + 200 * 200)
    phone.rules(f'data_cap_a_day = "{moved} B"\n')
    assert left.wait(LIMIT_S)
    assert "are used for today (data_cap_a_day)" in server.attendance.departures[0].reason
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
    again = start("agent", "--ps", server.address, *FAST)
    again.expect("are used for today (data_cap_a_day)")
    kept = json.loads((phone.folder / "state" / "traffic.json").read_text())
    assert moved <= kept["bytes"] < moved + 20_000


@pytest.mark.slow
def test_a_rule_for_fewer_threads_restarts_the_agent_with_fewer(
    phone: Phone, start: Start, serve: Serve, until: Until
) -> None:
    server = serve()
    watched(server)
    agent = start("agent", "--ps", server.address, "--name", "phone", *FAST, "--threads", "2")
    agent.expect("with 2 thread(s)")
    assert server.wait_for_devices(1, LIMIT_S)
    phone.rules("threads = 1\n")
    agent.expect("with 1 thread(s)")
    until(lambda: len(server.labels) == 2 and server.devices == 1, "the agent has joined again")
    Multiplication(server, (1, 60, 70, 80)).check()


@pytest.mark.slow
def test_hanging_sensors_keep_no_device_away_for_ever(phone: Phone, start: Start, serve: Serve) -> None:
    server = serve()
    phone.command("termux-battery-status", "sleep 1000 & wait")
    phone.rules("only_while_charging = true\n")
    agent = start("agent", "--ps", server.address, "--name", "phone", *FAST)
    agent.expect("the rule only_while_charging cannot be followed: its sensor is missing; this device works anyway")
    Multiplication(server, (1, 60, 70, 80)).check()


@pytest.mark.slow
def test_unreadable_rules_are_reported_and_the_previous_ones_stay(
    phone: Phone, start: Start, serve: Serve, until: Until
) -> None:
    server = serve()
    watched(server)
    phone.rules("battery_above = 4000\n")
    broken = start("agent", "--ps", server.address, *FAST)
    assert broken.wait() == 2
    assert re.fullmatch(r"agent: .*owner.toml: battery_above is 4000; it must be percent, .*", broken.output)
    phone.rules("battery_above = 40\n")
    (agent,) = agents(start, server, 1)
    phone.rules("battery_above = \n")
    agent.expect("the previous rules stay")
    phone.battery(percentage=39)
    until(lambda: server.devices == 0, "the agent has left by the previous rule")


def test_a_phone_with_a_new_address_is_the_same_device_at_once(
    phone: Phone, start: Start, serve: Serve, until: Until
) -> None:
    """Its old connection hangs, as after a loss of the network; the server does not wait until it misses it."""
    server = serve(heartbeat_s=30.0)  # silence alone would take minutes
    noticed: list[str] = []
    server.notice = noticed.append
    (first,) = agents(start, server, 1)
    first.signal(signal.SIGSTOP)  # it keeps its connection open
    (phone.folder / "state" / "name-agent-0.lock").unlink()  # as after a restart of the phone
    product = Multiplication(server, (1, 64, 64, 64))
    second: Program = start("agent", "--ps", server.address, "--name", "agent-0", *FAST)
    product.check()
    assert server.devices == 1
    assert any("lost agent-0 (it has joined again from elsewhere)" in text for text in noticed)
    assert second.running


class Relay:
    """A network between agent and server that can be cut silently, as when a phone leaves the house."""

    def __init__(self, address: str) -> None:
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._dead: list[socket.socket] = []
        self._up, self._ended = True, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """Open connections stay open and carry nothing; new ones are refused."""
        self._up = False

    def mend(self) -> None:
        """New connections work, the old ones never will."""
        self._dead += list(self._pairs)
        self._pairs = {}
        self._up = True

    def _run(self) -> None:
        while not self._ended:
            sources = [*self._pairs, self._listener] if self._up else []
            for source in select.select(sources, [], [], 0.01)[0]:
                if source is self._listener:
                    one, two = self._listener.accept()[0], socket.create_connection(self._to)
                    self._pairs |= {one: two, two: one}
                elif source in self._pairs:
                    data = source.recv(1 << 16)
                    if data:
                        self._pairs[source].sendall(data)
                    else:
                        other = self._pairs.pop(source)
                        del self._pairs[other]
                        source.close()
                        other.close()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for connection in (self._listener, *self._pairs, *self._dead):
            connection.close()


@pytest.mark.slow
def test_a_phone_that_changes_its_network_continues_as_the_same_device(
    start: Start, until: Until, tmp_path: Path
) -> None:
    access = AccessFile(tmp_path / "server")
    server = Server(heartbeat_s=0.2, listen=["tcp://127.0.0.1:0"], access=access).start()
    server.notice = lambda text: None
    relay = Relay(server.public_addresses[0])
    link = new_invitation(access, 1, 600.0, [relay.address]).link
    try:
        agent = start("agent", "--state", str(tmp_path / "a"), "--invitation", link, "--name", "phone", *FAST)
        assert server.wait_for_devices(1, LIMIT_S)
        Multiplication(server, (1, 60, 70, 80)).check()
        for stay in (2, 3):
            relay.cut()
            until(lambda: server.devices == 0, "the server misses the phone")
            product = Multiplication(server, (1, 60, 70, 80), seed=stay)
            relay.mend()
            product.check()  # by the same agent, on a new connection
            assert server.labels == ["phone"] * stay
        assert agent.running
        until(lambda: sum("joined" in line for line in agent.said) == 3, "the agent has said so")
    finally:
        server.stop()
        relay.close()
    assert server.error is None
