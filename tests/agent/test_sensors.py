"""Sensors: what Termux:API and the kernel report, and commands that fail, lie or never end."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.owner import sensors
from agent.owner.sensors import (
    Battery,
    BatterySensor,
    Command,
    NetworkSensor,
    SensorReader,
    route_network,
    sys_battery,
    termux_battery,
    termux_network,
)

if TYPE_CHECKING:
    from conftest import Until

# as Termux:API writes it, on Android 9 to 15
CHARGING = {
    "present": True,
    "technology": "Li-ion",
    "health": "GOOD",
    "plugged": "PLUGGED_AC",
    "status": "CHARGING",
    "temperature": 31.700000762939453,
    "voltage": 4228,
    "current": 1000,
    "current_average": None,
    "percentage": 75,
    "level": 75,
    "scale": 100,
    "charge_counter": 3194654,
    "energy": None,
}
WIFI = {
    "bssid": "02:00:00:00:00:00",
    "frequency_mhz": 5180,
    "ip": "192.168.1.224",
    "link_speed_mbps": 433,
    "mac_address": "02:00:00:00:00:00",
    "network_id": -1,
    "rssi": -42,
    "ssid": "<unknown ssid>",
    "ssid_hidden": True,
    "supplicant_state": "COMPLETED",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Battery(True, 75, 31.700000762939453)),
        ({"plugged": "PLUGGED_USB", "status": "NOT_CHARGING"}, Battery(True, 75, 31.700000762939453)),
        ({"plugged": "PLUGGED_WIRELESS", "status": "FULL"}, Battery(True, 75, 31.700000762939453)),
        ({"plugged": "UNPLUGGED", "status": "DISCHARGING"}, Battery(False, 75, 31.700000762939453)),
        ({"temperature": "22.3"}, Battery(True, 75, 22.3)),
        ({"temperature": "NaN", "percentage": -1}, Battery(True, None, None)),
        ({"plugged": None}, Battery(True, 75, 31.700000762939453)),
        ({"plugged": None, "status": "DISCHARGING"}, Battery(False, 75, 31.700000762939453)),
        ({"plugged": None, "status": "UNKNOWN"}, Battery(None, 75, 31.700000762939453)),
    ],
)
def test_termux_battery_reports_are_read(change: dict[str, object], expected: Battery) -> None:
    assert termux_battery({**CHARGING, **change}) == expected
    assert termux_battery({}) == Battery()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "wifi"),
        ({"ip": "0.0.0.0", "supplicant_state": "DISCONNECTED"}, "mobile"),
        ({"supplicant_state": "SCANNING"}, "mobile"),
        ({"supplicant_state": "UNINITIALIZED", "ip": "0.0.0.0"}, "mobile"),
        ({"supplicant_state": None}, None),
    ],
)
def test_termux_network_reports_are_read(change: dict[str, object], expected: str | None) -> None:
    assert termux_network({**WIFI, **change}) == expected


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


LAPTOP = {
    "power_supply/AC/type": "Mains",
    "power_supply/AC/online": "0",
    "power_supply/BAT0/type": "Battery",
    "power_supply/BAT0/status": "Discharging",
    "power_supply/BAT0/capacity": "63",
    "power_supply/mouse/type": "Battery",
    "power_supply/mouse/scope": "Device",
    "power_supply/mouse/status": "Charging",
    "power_supply/mouse/capacity": "5",
    "thermal/thermal_zone0/temp": "48000",
    "thermal/thermal_zone1/temp": "-274000",
    "thermal/cooling_device0/temp": "99000",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Battery()),
        (LAPTOP, Battery(False, 63, 48.0)),
        (LAPTOP | {"power_supply/AC/online": "1", "power_supply/BAT0/status": "Not charging"}, Battery(True, 63, 48.0)),
        (LAPTOP | {"power_supply/BAT0/status": "Full"}, Battery(True, 63, 48.0)),
        (
            {
                "power_supply/battery/type": "Battery",
                "power_supply/battery/status": "Charging",
                "power_supply/battery/capacity": "101",
                "power_supply/battery/temp": "315",
            },
            Battery(True, None, 31.5),
        ),
        ({"power_supply/AC/type": "Mains", "power_supply/AC/online": "1"}, Battery(True)),
    ],
)
def test_kernel_battery_files_are_read(tmp_path: Path, files: dict[str, str], expected: Battery) -> None:
    assert sys_battery(write(tmp_path, files)) == expected


HEAD = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"


def route(interface: str, metric: int = 100, destination: str = "00000000", mask: str = "00000000") -> str:
    return f"{interface} {destination} 0101A8C0 0003 0 0 {metric} {mask} 0 0 0"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        ([HEAD, route("wlan0")], "wifi"),
        ([HEAD, route("rmnet_data0", 50), route("wlan0", 600)], "mobile"),
        ([HEAD, route("eth0"), route("eth0", 0, "0001A8C0", "00FFFFFF")], "wired"),
        ([HEAD, route("eth0", 0, "0001A8C0", "00FFFFFF")], "none"),
        ([HEAD, route("mystery0")], None),
    ],
)
def test_the_network_is_read_from_the_routes(tmp_path: Path, lines: list[str], expected: str | None) -> None:
    folder = write(tmp_path, {"route": "\n".join(lines)}) if lines else tmp_path
    assert route_network(folder, tmp_path / "net") == expected


def test_an_ipv6_route_counts_too(tmp_path: Path) -> None:
    zeros = "0" * 32
    line = f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 wlan0"
    write(tmp_path, {"ipv6_route": line, "route": HEAD})
    assert route_network(tmp_path, tmp_path / "net") == "wifi"


# ---- commands


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands that stand in for those of Termux:API."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", ["exit 1", "echo", "echo '[1]'", "echo '{\"plugged\":'", "echo Termux:API missing"])
def test_a_command_without_a_useful_answer_counts_as_unknown(stand_in: Path, script: str) -> None:
    command(stand_in / "termux-battery-status", script)
    assert Command("termux-battery-status")() == {}
    assert Command("termux-no-such-command")() == {}


def test_the_sensors_ask_termux_first(stand_in: Path) -> None:
    command(stand_in / "termux-battery-status", f"echo '{json.dumps(CHARGING)}'")
    command(stand_in / "termux-wifi-connectioninfo", f"echo '{json.dumps(WIFI)}'")
    assert BatterySensor()() == termux_battery(CHARGING)
    assert NetworkSensor()() == "wifi"


def test_a_command_that_hangs_is_ended_with_its_children(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(sensors, "COMMAND_S", 0.5)
    command(stand_in / "termux-battery-status", f"sleep 1000 & echo $! > {stand_in}/child; cat > /dev/null < /dev/zero")
    assert Command("termux-battery-status")() == {}
    child = int((stand_in / "child").read_text())
    until(lambda: _ended(child), "the command's child has ended")


def _ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_answer_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    news, answers = threading.Event(), [7, None, None]
    sampler: SensorReader[int] = SensorReader("test", lambda: answers.pop(0) if answers else None, news.set)
    sampler.need(0.001)
    sampler.start()
    assert news.wait(10)
    found: list[int | None] = []
    for stale_s in (1e9, 0.0):
        monkeypatch.setattr(sensors, "STALE_S", stale_s)
        found.append(sampler.found)
    assert found == [7, None]
    sampler.end()
    sampler.join(10)
    assert not sampler.is_alive()
