"""Promises of `cleave doctor`: what is missing is named with its substitute, and the number of devices that it calls
honest was found so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from emulator.model.fidelity import DEGRADED, STRETCH_ENOUGH, VALID, Fidelity
from testbed.runs.doctor import (
    MOST_DEVICES,
    Fact,
    HonestFleet,
    advice,
    as_json,
    facts,
    largest_honest,
    print_doctor,
    try_command,
)

if TYPE_CHECKING:
    from conftest import Start


class FakeHost:
    """Has some kernel features and programs; every probe takes one second."""

    def __init__(self, kernel: Sequence[str] = (), programs: Sequence[str] = ("unshare", "tc", "ip")) -> None:
        self._kernel, self._programs = kernel, programs
        self.now_s = 0.0
        self.measured: list[int] = []

    def attempt(self, command: Sequence[str]) -> bool:
        text = " ".join(command)
        return any(feature in text for feature in self._kernel)

    def has(self, program: str) -> str | None:
        return f"/bin/{program}" if program in self._programs else None

    def clock(self) -> float:
        return self.now_s


def by_name(found: Sequence[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in found}


# ---- facts


def test_a_missing_netem_is_named_with_its_substitute() -> None:
    host = FakeHost(kernel=("htb", "ifb", "veth", "true"))
    found = by_name(facts(host.attempt, host.has))
    assert (found["netem"].value, found["netem"].fine) == ("not in this kernel", False)
    assert found["netem"].instead == 'latency is held in user space: modelled links (links.kind = "model")'
    assert all(found[name].fine and not found[name].instead for name in ("htb", "ifb", "veth", "user namespaces"))


def test_a_feature_that_cannot_be_probed_is_unknown_not_missing() -> None:
    host = FakeHost(kernel=("netem",), programs=())
    found = by_name(facts(host.attempt, host.has))
    assert found["netem"].value.startswith("unknown: tc or unshare is not installed")
    assert found["Docker engine"].value == "not installed"
    assert found["Docker engine"].instead == "pods are processes of this machine"


def test_an_installed_engine_that_does_not_run_is_reported_as_such() -> None:
    for kernel, value in (((), "not running"), (("docker",), "running")):
        host = FakeHost(kernel, programs=("docker",))
        assert by_name(facts(host.attempt, host.has))["Docker engine"].value == value


def test_every_missing_feature_has_a_substitute() -> None:
    for host in (FakeHost(), FakeHost(programs=())):
        assert all(fact.fine or fact.instead for fact in facts(host.attempt, host.has))


def test_a_command_that_does_not_exist_counts_as_failed() -> None:
    assert not try_command(["no-such-program-anywhere"])
    assert not try_command(["false"])
    assert try_command(["true"])


# ---- the largest honest number


def search(limit: float, asked: int, growth: float = 1.0, limit_s: float = 1e9) -> tuple[HonestFleet, list[int]]:
    host = FakeHost()

    def measure(devices: int) -> Fidelity:
        host.now_s += 1.0
        host.measured.append(devices)
        stretch = 1 + (STRETCH_ENOUGH - 1) * (devices / limit) ** growth
        verdict = VALID if stretch <= STRETCH_ENOUGH else DEGRADED
        return Fidelity(verdict, "", 100, 1.0, 0.0, 0.0, step_stretch=stretch, causes=["pods late"])

    return largest_honest(asked, measure, limit_s, clock=host.clock), host.measured


@given(st.integers(1, MOST_DEVICES // 2), st.integers(1, MOST_DEVICES), st.floats(0.5, 3))
def test_the_number_found_is_honest_and_twice_as_many_are_too_many(limit: int, asked: int, growth: float) -> None:
    found, measured = search(limit, asked, growth)
    assert found.devices <= limit < (found.too_many or 0)
    assert found.devices in measured
    assert 2 * found.devices > limit
    assert len(measured) <= 60


def test_a_host_too_slow_for_one_device_reports_none() -> None:
    found, _ = search(0.5, 100)
    assert (found.devices, found.too_many) == (0, 1)


def test_a_host_that_keeps_up_with_all_devices_reports_so() -> None:
    found, _ = search(1e9, 100)
    assert (found.devices, found.too_many) == (MOST_DEVICES, None)
    assert "no limit was found" in advice(found)[0]


def test_the_search_stops_at_its_time_limit_with_the_result_so_far() -> None:
    found, measured = search(10, 40_000, limit_s=5.0)
    assert len(measured) == 6  # a number that fails is measured twice
    assert (found.devices, found.too_many) == (0, 10_000)


def test_the_advice_says_what_to_change_for_more_devices() -> None:
    found, _ = search(250, 1000)
    told = "\n".join(advice(found))
    assert "1,000 devices are too many for real time on this host: pods late" in told
    assert f"slow the clock down to about {found.scale:g}x (now 1x)" in told
    assert found.scale > 1
    assert "clock.kind=virtual" in told
    assert advice(search(1000, 1000)[0]) == []


# ---- output


def test_table_and_json_agree() -> None:
    host = FakeHost(kernel=("htb",))
    found, (honest, _) = facts(host.attempt, host.has), search(250, 1000)
    told = json.loads(json.dumps(as_json(found, honest, "quickstart")))
    assert told["honest"]["devices"] == honest.devices
    assert {fact["name"] for fact in told["host"]} >= {"cores", "memory", "netem", "Docker engine", "onnxruntime"}
    console = Console(width=130)
    with console.capture() as captured:
        print_doctor(console, found, honest, "quickstart")
    assert f"largest honest number of devices: {honest.devices:,}" in captured.get()
    assert "not in this kernel" in captured.get()
    assert "honest" not in as_json(found, None, None)


def test_the_command_reports_what_this_host_can_do(start_light: Start) -> None:
    program = start_light("cleave", "doctor", "--format", "json")
    assert program.wait() == 0, program.output
    names = [fact["name"] for fact in json.loads(program.said[-1])["host"]]
    assert names[:3] == ["Python", "cores", "memory"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--format", "xml"), "--format is xml; it must be table or json"),
        (("--seconds", "0"), "--seconds is 0; it must be more than 0"),
        (("quikstart",), 'unknown scenario "quikstart"; did you mean quickstart'),
        (("quickstart", "--set", "links.kind=off"), "links.kind is off"),
    ],
)
def test_a_mistake_gets_one_line(start_light: Start, arguments: tuple[str, ...], told: str) -> None:
    program = start_light("cleave", "doctor", *arguments)
    assert program.wait() == 2
    (line,) = program.errors
    assert told in line
