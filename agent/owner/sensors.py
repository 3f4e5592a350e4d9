"""Reads charger, battery, temperature and network: from Termux:API if installed, otherwise from /sys and /proc.

A source may be missing, be wrong or hang: on real phones `termux-battery-status` hangs now and then. So each command
has a time limit and is killed together with its children, and each kind of sensor has its own thread. Pure functions
interpret the answers; agent/owner/rules.py decides what follows from them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

COMMAND_S = 4.0  # a command that takes longer has hung
OFTEN_S, SELDOM_S = 0.7, 5.0  # between readings: while the device works, and while it waits
STALE_S = 20.0  # older readings are ignored

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Battery:
    plugged: bool | None = None
    percent: float | None = None
    temperature: float | None = None


# ---------------------------------------------------------------------------------------------------- Termux:API


def termux_battery(answer: Mapping[str, Any]) -> Battery:
    """From `termux-battery-status`. Some versions write the temperature as text; old versions have no "plugged"."""
    plugged, status = answer.get("plugged"), answer.get("status")
    on = None
    if isinstance(plugged, str) and plugged:
        on = plugged != "UNPLUGGED"
    elif status in ("CHARGING", "FULL", "DISCHARGING", "NOT_CHARGING"):
        on = status in ("CHARGING", "FULL")
    return Battery(on, _number(answer.get("percentage"), 0, 100), _number(answer.get("temperature"), -40, 150))


def termux_network(answer: Mapping[str, Any]) -> str | None:
    """From `termux-wifi-connectioninfo`. Without a permission the network's name is hidden, but not its state."""
    state = answer.get("supplicant_state")
    if not isinstance(state, str):
        return None
    return "wifi" if state == "COMPLETED" and answer.get("ip") not in ("0.0.0.0", None) else "mobile"


class Command:
    """A command that prints a JSON object, with a time limit; `end`, from any thread, kills it at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def __call__(self) -> dict[str, Any]:
        """The object; empty if the command is missing, fails, hangs or prints anything else."""
        path = shutil.which(self._name)
        if path is None:
            return {}
        with self._lock:
            if self._ended:
                return {}
            try:  # in its own session, so that its children are killed with it
                self._process = process = subprocess.Popen(
                    [path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                return {}
        try:
            out, _ = process.communicate(timeout=COMMAND_S)
            found = json.loads(out)
        except (subprocess.TimeoutExpired, ValueError):
            return {}
        finally:
            _kill(process)
            with process, self._lock:  # closes the pipe and reaps the process
                self._process = None
        return found if isinstance(found, dict) else {}

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._process is not None:
                _kill(self._process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------- /sys and /proc


def sys_battery(root: Path = Path("/sys/class")) -> Battery:
    """From the kernel's power supplies. Without any, `plugged` is None: it may be a desktop, or hide them."""
    online: list[bool] = []
    plugged: bool | None = None
    percent: float | None = None
    temperature: float | None = None
    for supply in _entries(root / "power_supply"):
        if _word(supply / "scope") == "Device":  # the battery of a mouse
            continue
        if _word(supply / "type") == "Battery":
            status = _word(supply / "status")
            if status in ("Charging", "Full", "Discharging", "Not charging"):
                plugged = status in ("Charging", "Full")
            percent = _number(_word(supply / "capacity"), 0, 100)
            tenths = _number(_word(supply / "temp"), -400, 1500)
            temperature = None if tenths is None else tenths / 10
        elif (state := _word(supply / "online")) in ("0", "1"):
            online.append(state == "1")
    if any(online) or (online and plugged is None):
        plugged = any(online)
    return Battery(plugged, percent, temperature if temperature is not None else sys_temperature(root))


def sys_temperature(root: Path = Path("/sys/class")) -> float | None:
    """The hottest thermal zone; ignores the implausible values of disabled zones."""
    zones = [_number(_word(zone / "temp"), 1_000, 150_000) for zone in _entries(root / "thermal", "thermal_zone")]
    return max((found / 1000 for found in zones if found is not None), default=None)


def route_network(proc: Path = Path("/proc/net"), net: Path = Path("/sys/class/net")) -> str | None:
    """The kind of network, from the interface of the default route. None if not known: Android hides routes."""
    routes = [line.split() for line in _lines(proc / "route")[1:]]
    ways = [(int(row[6]), row[0]) for row in routes if len(row) > 7 and row[1] == row[7] == "0" * 8]
    routes6 = [line.split() for line in _lines(proc / "ipv6_route")]
    ways += [(int(row[5], 16), row[9]) for row in routes6 if len(row) > 9 and row[1] == "00" and row[9] != "lo"]
    if not ways:
        return "none" if routes else None
    return _kind_of(min(ways)[1], net)


def _kind_of(interface: str, net: Path) -> str | None:
    if (net / interface / "wireless").is_dir() or interface.startswith(("wl", "wifi", "ath", "swlan")):
        return "wifi"
    if interface.startswith(("rmnet", "ccmni", "wwan", "ppp", "pdp", "usb", "rndis")):
        return "mobile"
    return "wired" if interface.startswith(("eth", "en", "br", "veth", "bond")) else None


# ---------------------------------------------------------------------------------------------------- both


class BatterySensor:
    def __init__(self) -> None:
        self.command = Command("termux-battery-status")

    def __call__(self) -> Battery | None:
        answer = self.command()
        found = termux_battery(answer) if answer else sys_battery()
        return None if found == Battery() else found


class NetworkSensor:
    def __init__(self) -> None:
        self.command = Command("termux-wifi-connectioninfo")

    def __call__(self) -> str | None:
        answer = self.command()
        return (termux_network(answer) if answer else None) or route_network()


class SensorReader(threading.Thread, Generic[Found]):
    """Reads one sensor periodically while it is needed. A reading stays valid for STALE_S."""

    def __init__(self, name: str, read: Callable[[], Found | None], news: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._read, self._news = read, news
        self._lock = threading.Condition()
        self._every_s: float | None = None
        self._found: Found | None = None
        self._at = -math.inf
        self._looks = 0
        self._ended = False

    def need(self, every_s: float | None) -> None:
        """Set the interval between readings; None: do not read."""
        with self._lock:
            if every_s is None:
                self._found, self._looks = None, 0
            if every_s != self._every_s:
                self._every_s = every_s
                self._lock.notify_all()

    @property
    def looked(self) -> bool:
        """True after the first reading, successful or not."""
        return self._looks > 0

    @property
    def found(self) -> Found | None:
        with self._lock:
            return self._found if time.monotonic() - self._at < STALE_S else None

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify_all()

    def run(self) -> None:
        while True:
            with self._lock:
                while self._every_s is None and not self._ended:
                    self._lock.wait()
                if self._ended:
                    return
            found = self._read()
            with self._lock:
                self._looks += 1
                if found is not None:
                    self._found, self._at = found, time.monotonic()
            self._news()
            with self._lock:
                if not self._ended:
                    self._lock.wait(self._every_s)


def _entries(folder: Path, prefix: str = "") -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.name.startswith(prefix))
    except OSError:
        return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _word(path: Path) -> str:
    return "".join(_lines(path)[:1]).strip()


def _number(value: object, low: float, high: float) -> float | None:
    """A number, or text that holds one, if it is plausible."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if low <= found <= high else None
