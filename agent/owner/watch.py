"""Applies the owner's rules while the agent runs: watches sensors, rules file, hours and the day's bytes.

A separate thread decides again whenever a sensor has a new reading, and at least twice per second. The agent's loop
reads the latest decision, is woken when it changes, and never blocks here.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from datetime import date, datetime
from pathlib import Path

from agent.owner.data_cap import Meter
from agent.owner.rules import DataPlan, Decision, Readings, Rules, decide
from agent.owner.rules_file import read_rules
from agent.owner.sensors import COMMAND_S, OFTEN_S, SELDOM_S, BatterySensor, NetworkSensor, SensorReader
from agent.protocol.errors import UserError

log = logging.getLogger(__name__)

LOOK_S = 0.5
SETTLED_S = 0.2  # a file that has just changed may be half written
KEEP_S = 2.0  # between saves of the day's byte count


class Watch:
    def __init__(self, path: Path, rules: Rules, meter: Meter, over_cable: bool) -> None:
        """`path`: the rules file. `over_cable`: the server is reached without a network, for example by adb."""
        self.rules = rules
        self.decision = Decision(True)
        self.readings = Readings()
        self.meter = meter
        self._path, self._over_cable = path, over_cable
        self._stamp = self._seen = _stamp(path)
        self._seen_s = 0.0
        self._threads = rules.threads
        self._news = threading.Event()
        self._ended = False
        self._said: set[str] = set()
        self._said_traffic = False
        self._kept_s = 0.0
        self._enough: tuple[date, str] | None = None  # work stopped for this day although bytes are left
        self._deciding = threading.Lock()
        self._battery_sensor, self._network_sensor = BatterySensor(), NetworkSensor()
        self._battery = SensorReader("battery", self._battery_sensor, self._news.set)
        self._network = SensorReader("network", self._network_sensor, self._news.set)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)

    def __enter__(self) -> Watch:
        """Returns once the sensors that the rules need have been read, or have timed out."""
        self._keep()  # loads the bytes moved today before this start
        self._ask_sensors()
        for sampler in (self._battery, self._network):
            sampler.start()
        deadline = time.monotonic() + COMMAND_S + 1.0
        while self._waiting_for_first() and time.monotonic() < deadline:
            self._news.wait(0.1)
            self._news.clear()
        self._decide()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._news.set()
        for sampler in (self._battery, self._network):
            sampler.end()
        for sensor in (self._battery_sensor, self._network_sensor):
            sensor.command.end()
        for thread in (self._thread, self._battery, self._network):
            if thread.is_alive():
                thread.join(timeout=2.0)
        self._keep()
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        """Becomes readable when the decision changes."""
        return self._read.fileno()

    def count(self, size: int) -> None:
        self.meter.add(size)
        if (data := self.data) is not None and data.left_bytes <= 0 and self.decision.may_work:
            self._decide()  # at once: half a second later usage may be a multiple of the cap

    @property
    def data(self) -> DataPlan | None:
        cap = self.rules.data_cap_a_day
        return None if cap is None else DataPlan(cap, self.meter.today(datetime.now().date()))

    def enough(self, reason: str) -> None:
        self._enough = (datetime.now().date(), reason)
        self._decide()

    @property
    def restart(self) -> str:
        """Libraries take their thread count when they are loaded, so a change needs a restart."""
        return "" if self.rules.threads == self._threads else "its owner has changed the number of threads"

    def heard(self) -> None:
        """Clear the wake-up."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    # ---- the watch thread

    def _run(self) -> None:
        while not self._ended:
            self._news.wait(LOOK_S)
            self._news.clear()
            self._read_rules_again()
            self._ask_sensors()
            if not self._waiting_for_first():
                self._decide()
            if time.monotonic() - self._kept_s >= KEEP_S:
                self._keep()

    def _waiting_for_first(self) -> bool:
        """True if a rule needs a sensor that has not been read yet."""
        rules = self.rules
        return (rules.need_battery and not self._battery.looked) or (self._needs_network and not self._network.looked)

    @property
    def _needs_network(self) -> bool:
        return self.rules.only_on_wifi and not self._over_cable

    def _ask_sensors(self) -> None:
        every_s = OFTEN_S if self.decision.may_work else SELDOM_S
        self._battery.need(every_s if self.rules.need_battery else None)
        self._network.need(every_s if self._needs_network else None)

    def _decide(self) -> None:
        with self._deciding:
            self._decide_alone()

    def _decide_alone(self) -> None:
        now, battery = datetime.now(), self._battery.found
        enough = self._enough[1] if self._enough is not None and self._enough[0] == now.date() else ""
        self.readings = Readings(
            plugged=battery.plugged if battery else None,
            battery=battery.percent if battery else None,
            temperature=battery.temperature if battery else None,
            network="cable" if self._over_cable else self._network.found,
            data_bytes=self.meter.today(now.date()),
            enough_data=enough,
        )
        before, self.decision = self.decision, decide(self.rules, self.readings, now, self.decision.broken)
        for rule in self.decision.unknown:
            if rule not in self._said:
                self._said.add(rule)
                what = "works anyway" if self.rules.if_unknown == "work" else "waits for it"
                log.warning("the rule %s cannot be followed: its sensor is missing; this device %s", rule, what)
        self._said &= set(self.decision.unknown)
        if (before.may_work, before.broken) != (self.decision.may_work, self.decision.broken):
            self._wake()

    def _read_rules_again(self) -> None:
        stamp, now_s = _stamp(self._path), time.monotonic()
        if stamp != self._seen:
            self._seen, self._seen_s = stamp, now_s
        if stamp == self._stamp or now_s - self._seen_s < SETTLED_S:
            return
        self._stamp = stamp
        try:
            self.rules = read_rules(self._path)
        except UserError as error:
            log.warning("%s; the previous rules stay", error)
            return
        log.info("the owner's rules have changed")
        self._wake()

    def _keep(self) -> None:
        self._kept_s = time.monotonic()
        try:
            self.meter.keep(datetime.now().date())
        except UserError as error:
            if not self._said_traffic:
                self._said_traffic = True
                log.warning("today's byte count is not saved: %s", error)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # buffer full: the loop is about to wake anyway
            self._write.send(b"!")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    except OSError:
        return 0, 0, 0
