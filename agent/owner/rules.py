"""The owner's rules: may this device work now, and if not, why, and until when? Pure: no sensors, no clock, no files.

An unset rule restricts nothing. A rule whose sensor is missing cannot be applied: by default the device works anyway
and reports the rule (`if_unknown = "work"`); otherwise it waits until there is a reading (`if_unknown = "wait"`).

Battery and temperature have hysteresis, so that a device at the limit does not come and go all the time: work stops at
the limit and resumes when the battery is 5 points above it, or the temperature 3 degrees below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from agent.protocol.errors import UserError
from agent.protocol.units import format_size, parse_size

BATTERY_SLACK = 5  # points
TEMPERATURE_SLACK = 3.0  # degrees Celsius
DAY_MIN = 24 * 60
MOST_SPARE_BYTES = 1 << 20  # limit on the part of a day's cap reserved for messages in flight


class RulesError(UserError):
    """A rule that cannot be parsed; the text shows a correct one."""


@dataclass(frozen=True, slots=True)
class Hours:
    """Intervals of the day in minutes since midnight, end excluded; an interval may cross midnight."""

    text: str
    parts: tuple[tuple[int, int], ...]

    def wait_min(self, minute: int) -> int:
        """Minutes from this minute of the day until the next interval; 0 inside one."""
        return min(
            0 if (minute - begin) % DAY_MIN < (end - begin) % DAY_MIN else (begin - minute) % DAY_MIN
            for begin, end in self.parts
        )


@dataclass(frozen=True, slots=True)
class Rules:
    only_while_charging: bool = False
    only_on_wifi: bool = False
    battery_above: int | None = None  # percent
    temperature_below: float | None = None  # degrees Celsius
    hours: Hours | None = None
    data_cap_a_day: int | None = None  # bytes, both ways
    threads: int | None = None  # limit
    if_unknown: str = "work"  # or "wait"
    updates: str = "ask"  # of the agent; or "auto", "never"

    @property
    def need_battery(self) -> bool:
        return self.only_while_charging or self.battery_above is not None or self.temperature_below is not None


@dataclass(frozen=True, slots=True)
class Readings:
    """Sensor readings. None: there is no such sensor, or it does not answer."""

    plugged: bool | None = None
    battery: float | None = None  # percent
    temperature: float | None = None  # degrees Celsius
    network: str | None = None  # "wifi", "wired", "cable" (to the server's machine), "mobile" or "none"
    data_bytes: int = 0  # since midnight
    enough_data: str = ""  # why work stops for the day although bytes are left; empty: it does not


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The day's data budget. Work stops when only the spare part is left, which covers messages in flight."""

    cap_bytes: int
    used_bytes: int

    @property
    def spare_bytes(self) -> int:
        return min(self.cap_bytes // 20, MOST_SPARE_BYTES)

    @property
    def left_bytes(self) -> int:
        """Bytes left for blocks."""
        return self.cap_bytes - self.spare_bytes - self.used_bytes

    @property
    def most_memory_bytes(self) -> int:
        """The most memory to offer; a server never has more than this in flight to and from the device. `short` keeps
        room for what is in flight when the device checks, and for as much again, which the server may send before it
        learns that the device leaves. A quarter, so that a session uses half of what is left at its start."""
        return max(self.left_bytes, 2 * self.spare_bytes) // 4

    def short(self, offered_bytes: int) -> bool:
        """True if a device that offered this much memory must leave and offer less."""
        return self.left_bytes < 2 * offered_bytes and self.most_memory_bytes < offered_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    may_work: bool
    reason: str = ""  # why not, for people
    until_s: float | None = None  # seconds from now; None: not known
    unknown: tuple[str, ...] = ()  # rules that cannot be applied because their sensor is missing
    broken: frozenset[str] = frozenset()  # rules that forbid work


def decide(rules: Rules, readings: Readings, now: datetime, before: frozenset[str] = frozenset()) -> Decision:
    """`now` is local time. `before`: the rules that forbade work in the last decision, for the hysteresis."""
    said = {
        "only_while_charging": _charging(rules, readings),
        "only_on_wifi": _wifi(rules, readings),
        "battery_above": _battery(rules, readings, "battery_above" in before),
        "temperature_below": _temperature(rules, readings, "temperature_below" in before),
        "hours": _hours(rules, now),
        "data_cap_a_day": _data(rules, readings, now),
    }
    unknown = tuple(rule for rule, no in said.items() if no is _UNKNOWN)
    if rules.if_unknown == "wait":
        said |= {rule: (f"cannot tell: {_SENSOR[rule]} is missing", None) for rule in unknown}
    noes = {rule: no for rule, no in said.items() if no is not None and no is not _UNKNOWN}
    if not noes:
        return Decision(True, unknown=unknown)
    waits = [until_s for _, until_s in noes.values() if until_s is not None]
    until_s = max(waits) if len(waits) == len(noes) else None
    reason = "; ".join(f"{text} ({rule})" for rule, (text, _) in noes.items())
    return Decision(False, reason, until_s, unknown, frozenset(noes))


No = tuple[str, float | None]  # why, and for how many seconds; None: not known
_UNKNOWN: No = ("", None)  # neither yes nor no; compared by identity
_SENSOR = {
    "only_while_charging": "the charger's sensor",
    "only_on_wifi": "the network's state",
    "battery_above": "the battery's sensor",
    "temperature_below": "a temperature sensor",
}


def _charging(rules: Rules, readings: Readings) -> No | None:
    if not rules.only_while_charging or readings.plugged:
        return None
    return _UNKNOWN if readings.plugged is None else ("it is not charging", None)


def _wifi(rules: Rules, readings: Readings) -> No | None:
    if not rules.only_on_wifi or readings.network in ("wifi", "wired", "cable"):
        return None
    if readings.network is None:
        return _UNKNOWN
    return ("it has no network" if readings.network == "none" else "it is on mobile data", None)


def _battery(rules: Rules, readings: Readings, stopped: bool) -> No | None:
    if rules.battery_above is None:
        return None
    if readings.battery is None:
        return _UNKNOWN
    enough = min(100, rules.battery_above + BATTERY_SLACK) if stopped else rules.battery_above
    return None if readings.battery >= enough else (f"the battery has {readings.battery:.0f}%, not {enough}%", None)


def _temperature(rules: Rules, readings: Readings, stopped: bool) -> No | None:
    limit, found = rules.temperature_below, readings.temperature
    if limit is None:
        return None
    if found is None:
        return _UNKNOWN
    if stopped:
        limit -= TEMPERATURE_SLACK
    return None if found < limit else (f"it has {found:.1f} °C, not below {limit:g} °C", None)


def _hours(rules: Rules, now: datetime) -> No | None:
    if rules.hours is None:
        return None
    wait_min = rules.hours.wait_min(60 * now.hour + now.minute)
    if not wait_min:
        return None
    return f"it works at {rules.hours.text} only", 60.0 * wait_min - now.second - now.microsecond / 1e6


def _data(rules: Rules, readings: Readings, now: datetime) -> No | None:
    cap = rules.data_cap_a_day
    if cap is None or (not readings.enough_data and DataPlan(cap, readings.data_bytes).left_bytes > 0):
        return None
    midnight = datetime(now.year, now.month, now.day) + timedelta(days=1)
    used = f"{format_size(readings.data_bytes)} of {format_size(cap)} are used for today"
    if readings.enough_data:
        used += f": {readings.enough_data}"
    return used, (midnight - now).total_seconds()


# ---------------------------------------------------------------------------------------------------- reading rules


def parse_rules(table: Mapping[str, Any]) -> Rules:
    """The rules of an owner.toml table. RulesError names the wrong one and shows a correct one."""
    known = {field.name for field in fields(Rules)}
    for key in table:
        if key not in known:
            raise RulesError(f'unknown rule "{key}"; there are: {", ".join(sorted(known))}')
    return Rules(**{key: parse_rule(key, value) for key, value in table.items()})


def parse_rule(key: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    match key:
        case "only_while_charging" | "only_on_wifi":
            if isinstance(value, bool):
                return value
            raise _wrong(key, value, "true or false")
        case "battery_above":
            percent = re.fullmatch(r"\s*(\d{1,3})\s*%?\s*", value) if isinstance(value, str) else None
            found = int(percent[1]) if percent else value
            if (whole or percent) and 0 <= found <= 100:
                return found
            raise _wrong(key, value, "percent, for example 40")
        case "temperature_below":
            if (whole or isinstance(value, float)) and 0 < value < 200:
                return float(value)
            raise _wrong(key, value, "degrees Celsius, for example 38")
        case "hours":
            return parse_hours(value)
        case "data_cap_a_day":
            return parse_size(value)
        case "threads":
            if whole and 1 <= value <= 1024:
                return value
            raise _wrong(key, value, "a number of threads, for example 2")
        case "if_unknown":
            if value in ("work", "wait"):
                return value
            raise _wrong(key, value, '"work" or "wait"')
        case "updates":
            if value in ("ask", "auto", "never"):
                return value
            raise _wrong(key, value, '"ask", "auto" or "never"')
    raise RulesError(f'unknown rule "{key}"')


def parse_hours(value: Any) -> Hours:
    """Parse "22:00-07:00", or several such intervals separated by commas."""
    parts = []
    for part in value.split(",") if isinstance(value, str) else [""]:
        found = re.fullmatch(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)\s*", part)
        if not found:
            raise _wrong("hours", value, 'times of the day, for example "22:00-07:00"')
        begin, end = (60 * int(found[i]) + int(found[i + 1]) for i in (1, 3))
        if end > DAY_MIN or begin == end or (begin, end) == (0, DAY_MIN):
            raise _wrong("hours", value, 'part of a day, for example "22:00-07:00"; to work at all hours leave it out')
        parts.append((begin, end % DAY_MIN))
    return Hours(", ".join("-".join(side.strip() for side in p.split("-")) for p in value.split(",")), tuple(parts))


def _wrong(key: str, value: Any, right: str) -> RulesError:
    return RulesError(f"{key} is {value!r}; it must be {right}")
