"""The owner's rules: every rule with its reason, hysteresis at the limits, hours of the day, and their file."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.owner import rules_file as rules_command
from agent.owner.data_cap import Meter
from agent.owner.rules import (
    BATTERY_SLACK,
    DAY_MIN,
    TEMPERATURE_SLACK,
    Decision,
    Hours,
    Readings,
    Rules,
    RulesError,
    decide,
    parse_hours,
    parse_rules,
)
from agent.owner.rules_file import read_rules, set_rule

NOON = datetime(2026, 11, 16, 12, 0, 0)


@pytest.mark.parametrize(
    ("table", "readings", "reason", "until_s"),
    [
        ({}, Readings(), None, None),
        ({"only_while_charging": True}, Readings(plugged=True), None, None),
        ({"only_while_charging": True}, Readings(plugged=False), "it is not charging (only_while_charging)", None),
        ({"only_while_charging": False}, Readings(plugged=False), None, None),
        ({"only_on_wifi": True}, Readings(network="wifi"), None, None),
        ({"only_on_wifi": True}, Readings(network="wired"), None, None),
        ({"only_on_wifi": True}, Readings(network="cable"), None, None),
        ({"only_on_wifi": True}, Readings(network="mobile"), "it is on mobile data (only_on_wifi)", None),
        ({"only_on_wifi": True}, Readings(network="none"), "it has no network (only_on_wifi)", None),
        ({"battery_above": 40}, Readings(battery=40), None, None),
        ({"battery_above": "40%"}, Readings(battery=39), "the battery has 39%, not 40% (battery_above)", None),
        ({"temperature_below": 38}, Readings(temperature=37.9), None, None),
        (
            {"temperature_below": 38},
            Readings(temperature=38),
            "it has 38.0 °C, not below 38 °C (temperature_below)",
            None,
        ),
        ({"hours": "22:00-07:00"}, Readings(), "it works at 22:00-07:00 only (hours)", 10 * 3600),
        ({"hours": "11:00-13:00"}, Readings(), None, None),
        ({"hours": "13:00-14:00, 12:30-12:45"}, Readings(), "it works at 13:00-14:00, 12:30-12:45 only (hours)", 1800),
        # the last MiB is for bytes still in flight: the cap itself is never reached
        ({"data_cap_a_day": "1 GB"}, Readings(data_bytes=10**9 - 2**20 - 1), None, None),
        (
            {"data_cap_a_day": "1 GB"},
            Readings(data_bytes=10**9 - 2**20),
            "999 MB of 1 GB are used for today (data_cap_a_day)",
            12 * 3600,
        ),
        (
            {"data_cap_a_day": "1 GB"},
            Readings(data_bytes=10**8, enough_data="the next block moves 2 GB"),
            "100 MB of 1 GB are used for today: the next block moves 2 GB (data_cap_a_day)",
            12 * 3600,
        ),
        (
            {"data_cap_a_day": "1 GB"},
            Readings(data_bytes=10**9),
            "1 GB of 1 GB are used for today (data_cap_a_day)",
            12 * 3600,
        ),
        ({"threads": 2}, Readings(), None, None),
        (  # two known ends: the later one; one unknown end: unknown
            {"hours": "22:00-07:00", "data_cap_a_day": "1 kB"},
            Readings(data_bytes=2000),
            "it works at 22:00-07:00 only (hours); 2 kB of 1 kB are used for today (data_cap_a_day)",
            12 * 3600,
        ),
        (
            {"hours": "22:00-07:00", "only_while_charging": True},
            Readings(plugged=False),
            "it is not charging (only_while_charging); it works at 22:00-07:00 only (hours)",
            None,
        ),
    ],
)
def test_every_rule_and_its_reason(
    table: dict[str, object], readings: Readings, reason: str | None, until_s: float | None
) -> None:
    decision = decide(parse_rules(table), readings, NOON)
    assert decision.may_work == (reason is None)
    assert decision.reason == (reason or "")
    assert decision.until_s == until_s
    assert decision.unknown == ()


@pytest.mark.parametrize(
    ("rule", "value"),
    [("only_while_charging", True), ("only_on_wifi", True), ("battery_above", 40), ("temperature_below", 38)],
)
def test_a_rule_without_its_sensor_says_so_and_follows_the_stated_default(rule: str, value: object) -> None:
    nothing = Readings()
    assert decide(parse_rules({rule: value}), nothing, NOON) == Decision(True, unknown=(rule,))
    waiting = decide(parse_rules({rule: value, "if_unknown": "wait"}), nothing, NOON)
    assert not waiting.may_work
    assert "is missing" in waiting.reason
    assert rule in waiting.reason


@pytest.mark.parametrize("limit", [0, 40, 97, 100])
def test_work_resumes_only_when_the_battery_is_above_the_limit(limit: int) -> None:
    rules, stopped = Rules(battery_above=limit), frozenset({"battery_above"})
    enough = min(100, limit + BATTERY_SLACK)
    assert decide(rules, Readings(battery=enough), NOON, stopped).may_work
    assert not decide(rules, Readings(battery=enough - 1), NOON, stopped).may_work


def flips(rules: Rules, readings: list[Readings]) -> int:
    decision, count = Decision(True), 0
    for reading in readings:
        before, decision = decision, decide(rules, reading, NOON, decision.broken)
        count += before.may_work != decision.may_work
    return count


@given(st.integers(0, 100), st.lists(st.floats(0, 1, exclude_max=True)))
def test_a_battery_that_stays_within_the_slack_changes_the_decision_once_at_most(
    limit: int, within: list[float]
) -> None:
    values = [limit + (share - 1) * BATTERY_SLACK for share in within]  # below the limit
    values += [limit + share * BATTERY_SLACK for share in within]
    top = min(100, limit + BATTERY_SLACK)
    inside = [Readings(battery=value) for value in values if 0 <= value < top]
    assert flips(Rules(battery_above=limit), inside) <= 1


@given(st.floats(10, 100), st.lists(st.floats(0, 1)))
def test_a_temperature_that_stays_within_the_slack_changes_the_decision_once_at_most(
    limit: float, within: list[float]
) -> None:
    inside = [Readings(temperature=limit - TEMPERATURE_SLACK * share) for share in within]
    assert flips(Rules(temperature_below=limit), inside) <= 1


@given(
    st.integers(1, 100),
    st.lists(st.floats(0, 100)),
    st.floats(10, 60),
    st.lists(st.floats(0, 100)),
)
def test_beyond_the_outer_limits_the_past_does_not_matter(
    battery: int, levels: list[float], temperature: float, degrees: list[float]
) -> None:
    rules = Rules(battery_above=battery, temperature_below=temperature)
    decision = Decision(True)
    for level, degree in zip(levels, degrees, strict=False):
        decision = decide(rules, Readings(battery=level, temperature=degree), NOON, decision.broken)
        if level < battery or degree >= temperature:
            assert not decision.may_work
        if level >= min(100, battery + BATTERY_SLACK) and degree < temperature - TEMPERATURE_SLACK:
            assert decision.may_work


minutes = st.integers(0, DAY_MIN - 1)


@given(st.lists(st.tuples(minutes, minutes).filter(lambda p: p[0] != p[1]), min_size=1, max_size=3), minutes)
def test_hours_match_a_check_minute_by_minute(parts: list[tuple[int, int]], now: int) -> None:
    text = ",".join(f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in parts)
    allowed = set()
    for begin, end in parts:
        minute = begin
        while minute != end:
            allowed.add(minute)
            minute = (minute + 1) % DAY_MIN
    hours = parse_hours(text)
    expected = next(wait for wait in range(DAY_MIN) if (now + wait) % DAY_MIN in allowed)
    assert hours.wait_min(now) == expected


@given(st.integers(0, 86_399_999), minutes, minutes)
def test_work_begins_at_the_stated_time_and_not_before(now_ms: int, begin: int, end: int) -> None:
    if begin == end:
        return
    rules = Rules(hours=Hours("", ((begin, end),)))
    now = datetime(2026, 3, 1) + timedelta(milliseconds=now_ms)
    decision = decide(rules, Readings(), now)
    if decision.may_work:
        return
    assert decision.until_s is not None
    then = now + timedelta(seconds=decision.until_s)
    assert decide(rules, Readings(), then).may_work
    assert not decide(rules, Readings(), then - timedelta(milliseconds=1)).may_work


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"battery_abov": 40}, 'unknown rule "battery_abov"'),
        ({"battery_above": 101}, "battery_above is 101; it must be percent"),
        ({"battery_above": True}, "must be percent"),
        ({"only_on_wifi": "yes"}, "true or false"),
        ({"temperature_below": "38"}, "degrees Celsius"),
        ({"temperature_below": float("nan")}, "degrees Celsius"),
        ({"hours": "22-7"}, "22:00-07:00"),
        ({"hours": "25:00-07:00"}, "22:00-07:00"),
        ({"hours": "07:00-07:00"}, "part of a day"),
        ({"hours": "00:00-24:00"}, "part of a day"),
        ({"hours": 7}, "22:00-07:00"),
        ({"data_cap_a_day": 5}, "no unit"),
        ({"threads": 0}, "number of threads"),
        ({"if_unknown": "sleep"}, '"work" or "wait"'),
        ({"updates": "yes"}, '"ask", "auto" or "never"'),
        ({"updates": True}, '"ask", "auto" or "never"'),
    ],
)
def test_a_wrong_rule_is_named_with_a_right_example(table: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace('"', ".")):
        parse_rules(table)


# ---- the file


def test_rules_are_set_one_by_one_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "owner.toml"
    assert read_rules(path) == Rules()
    set_rule(path, "battery_above", "40%")
    set_rule(path, "hours", "22:00-07:00")
    path.write_text("# mine\n" + path.read_text() + "threads = 2\n")
    set_rule(path, "battery_above", "50")
    set_rule(path, "data_cap_a_day", "500 MB")
    set_rule(path, "threads", "off")
    assert read_rules(path) == Rules(
        battery_above=50, hours=parse_hours("22:00-07:00"), data_cap_a_day=500_000_000, threads=None
    )
    assert path.read_text().startswith("# mine\n")


@pytest.mark.parametrize(("key", "value"), [("battery_above", "lots"), ("nonsense", "1"), ("threads", "0")])
def test_an_invalid_rule_is_not_written(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "owner.toml"
    set_rule(path, "battery_above", "40")
    before = path.read_text()
    with pytest.raises(RulesError):
        set_rule(path, key, value)
    assert path.read_text() == before


def test_the_command_shows_the_rules_and_reports_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLEAVE_RULES", str(tmp_path / "owner.toml"))
    assert rules_command.run([]) == 0
    assert "it works whenever it is asked to" in capsys.readouterr().out
    assert rules_command.run(["set", "only_while_charging", "true"]) == 0
    assert "only_while_charging  on" in capsys.readouterr().out
    assert rules_command.run(["set", "only_while_charging", "perhaps"]) == 2
    assert capsys.readouterr().err == "agent: only_while_charging is 'perhaps'; it must be true or false\n"
    (tmp_path / "owner.toml").write_text("hours = \nthreads = 1\n")
    assert rules_command.run(["show"]) == 2
    assert "line 1" in capsys.readouterr().err


# ---- the bytes of today


def test_bytes_add_up_over_agents_and_starts_and_are_reset_every_day(tmp_path: Path) -> None:
    today, tomorrow = NOON.date(), NOON.date() + timedelta(days=1)
    one, two = Meter(tmp_path / "traffic.json"), Meter(tmp_path / "traffic.json")
    one.add(100)
    two.add(20)
    one.keep(today)
    two.keep(today)
    one.add(3)
    assert two.today(today) == 120
    again = Meter(tmp_path / "traffic.json")
    again.keep(today)
    assert again.today(today) == 120
    one.keep(today)
    assert one.today(today) == 123
    assert one.today(tomorrow) == 0
    one.add(7)
    one.keep(tomorrow)
    assert one.today(tomorrow) == 7


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text('{"day": "2026-11-16", "bytes": "man')
    meter = Meter(tmp_path / "traffic.json")
    meter.add(5)
    meter.keep(NOON.date())
    assert meter.today(NOON.date()) == 5
