"""Attacks by devices that are alive and do not answer, or answer just late enough: none of them delays a product for
good, or changes what is normal for the others."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import LIMIT_S, Multiplication, Stranger, grid, pod
from small_runs import CLEAVE, RUN_LIMIT_S, SMALL
from virtual_products import multiply

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import Heartbeat
from ps.planning.planner import Planner
from ps.planning.plans import Shape
from ps.scheduling.deadlines import Deadlines
from ps.scheduling.events import NameStragglers
from ps.scheduling.settings import NOW
from testbed.faults.chaos import replay
from testbed.faults.chaos_world import COMMON
from testbed.faults.inject import Injection, Injector
from testbed.runs.fleets import make_fleet
from testbed.runs.scenario import load_scenario
from testbed.virtual.pods import VirtualPods
from testbed.virtual.server import VirtualServer
from testbed.virtual.world import VirtualFleet, Work

if TYPE_CHECKING:
    from conftest import Serve, Start, Until

COUNT = 13
PRODUCTS = [(512, 128, 384), (512, 384, 128), (512, 128, 512), (128, 512, 512)] * 3


# ---- devices that never answer


def seconds(mute: tuple[int, ...] = (), absent: tuple[int, ...] = ()) -> tuple[float, list[str]]:
    """Seconds that 13 devices of the quickstart take, in virtual time, and the notices given meanwhile."""
    scenario = load_scenario("quickstart", {"fleet.devices": str(COUNT)})
    fleet = make_fleet(scenario.fleet, scenario.links, scenario.seed)
    server = VirtualServer(fleet.profiles, fleet.labels, Planner(), absent, links=fleet.links)
    told: list[str] = []
    server.notice = told.append
    with server.injecting(Injector(VirtualPods(server, 2), [Injection(0.0, "mute", mute)] if mute else [])):
        for product in PRODUCTS:  # one after another, as in training
            multiply(server, [product])
    return server.clock.now_s, told


@pytest.mark.slow
@pytest.mark.parametrize("mute", [(5,), (1, 5, 8, 12)])
def test_devices_silent_from_the_first_block_on_cost_less_than_half_the_time_again(mute: tuple[int, ...]) -> None:
    healthy_s, _ = seconds()
    without_s, _ = seconds(absent=mute)
    took_s, told = seconds(mute)
    assert took_s <= 1.5 * min(healthy_s, without_s)
    named = [text for text in told if "not answered a block" in text]
    assert len(named) <= len(mute), "once per device"
    assert all("others compute it too" in text for text in named)
    assert named


@pytest.mark.parametrize("silent", [1, 3])
def test_a_real_connection_that_heartbeats_and_never_answers_does_not_delay_a_product(
    silent: int, start: Start, serve: Serve
) -> None:
    server = serve()
    told: list[str] = []
    server.notice = told.append
    pod(start, server, 9)
    strangers = [Stranger(server) for _ in range(silent)]
    try:
        for stranger in strangers:
            stranger.join()
        devices = list(range(9 + silent))
        product = Multiplication(server, (1, 96, 32, 96), grid(96, 96, 16, devices))  # 36 blocks
        limit_s = time.monotonic() + LIMIT_S
        while not product.done.wait(0.2) and time.monotonic() < limit_s:
            for stranger in strangers:
                stranger.send(Heartbeat())
        product.check(limit_s=0.0)
        assert server.devices == 9 + silent, "they live"
        assert any("stranger" in text and "not answered a block" in text for text in told)
        for seed in range(3):  # it gets no more critical blocks
            Multiplication(server, (1, 96, 32, 96), seed=seed).check(limit_s=5.0)
            for stranger in strangers:
                stranger.send(Heartbeat())
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("latency_s", [0.2, 5.0, 60.0])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_silent_newcomer_that_claims_a_high_latency_delays_nothing(
    latency_s: float, warm: bool, start: Start, serve: Serve
) -> None:
    """A latency is a claim too: with a claim of one hour, one block was out for eight hours."""
    server = serve()
    pod(start, server, 9)
    for seed in range(20 if warm else 0):
        Multiplication(server, (1, 96, 32, 96), seed=seed).check()
    stranger = Stranger(server)
    try:
        stranger.join(latency_s=latency_s)
        for seed in range(3):
            product = Multiplication(server, (1, 96, 32, 96), seed=seed)
            limit_s = time.monotonic() + 5.0
            while not product.done.wait(0.2) and time.monotonic() < limit_s:
                stranger.send(Heartbeat())
            product.check(limit_s=0.0)
        assert server.devices == 10
    finally:
        stranger.close()


def test_an_honest_newcomer_with_a_high_latency_costs_the_others_nothing() -> None:
    near = Profile(5e9, 1e-4, 5e7, 2e7, 0.01, 1 << 34, 16)
    far = replace(near, latency_s=5.0)

    def seconds_of(profiles: list[Profile]) -> float:
        fleet = VirtualFleet(pack_profiles(profiles))
        fleet.join(12)
        if len(profiles) > 12:
            fleet.join(1, newcomers=True)
        for job in range(6):
            finish(fleet, Work(job, Shape(1, 600, 256, 600)))
        return fleet.now_s

    assert seconds_of([*[near] * 12, far]) <= 1.01 * seconds_of([near] * 12)


@pytest.mark.parametrize(("honest", "silent"), [(1, 1), (1, 2), (2, 3), (9, 4)])
@pytest.mark.parametrize(
    "claim", [Profile(1.0, 0.0, 1.0, 1.0, 0.0, 1 << 30, 16), Profile(1e6, 0, 1e5, 1e5, 0, 1 << 30, 16)]
)
def test_silent_newcomers_that_claim_to_be_very_slow_do_not_set_the_pace(
    claim: Profile, honest: int, silent: int
) -> None:
    """A typical device is then as slow as they claim, and their blocks were due after hours."""
    near = Profile(5e9, 1e-4, 5e7, 2e7, 0.01, 1 << 34, 16)
    fleet = VirtualFleet(pack_profiles([*[claim] * silent, *[near] * honest]))
    fleet.join(honest + silent, newcomers=True)
    for job in range(3):
        finish(fleet, Work(job, Shape(1, 512, 128, 384)), silent=range(silent))
    assert fleet.now_s < 30.0


def test_an_honest_slow_newcomer_beside_a_fast_one_is_not_named() -> None:
    slow, fast = Profile(1e9, 1e-4, 2e6, 1e6, 0.01, 1 << 34, 16), Profile(2e11, 1e-4, 1e9, 1e9, 0.01, 1 << 34, 16)
    fleet = VirtualFleet(pack_profiles([slow, fast]))
    fleet.join(2, newcomers=True)
    for job in range(3):
        assert not finish(fleet, Work(job, Shape(1, 1024, 512, 1024)))


def finish(fleet: VirtualFleet, work: Work, silent: Collection[int] = ()) -> list[NameStragglers]:
    """Advance the clock until the product is done. Returns who was said not to answer."""
    outcome, due = fleet.submit([work]), dict[tuple[int, int, int], float]()
    named: list[NameStragglers] = []
    while True:
        named += outcome.named
        due |= {sent.key: sent.due_s if sent.key[0] not in silent else math.inf for sent in outcome.sent}
        for key in outcome.cancelled:
            due.pop(key, None)
        if work.job in outcome.finished:
            return named
        key = min(due, key=due.__getitem__)
        if due[key] > fleet.next_look_s:
            fleet.now_s = max(fleet.now_s, fleet.next_look_s)
            outcome = fleet.look()
        else:
            fleet.now_s = max(fleet.now_s, due.pop(key))
            outcome = fleet.answer([key])
        fleet.check()


@pytest.mark.slow
@pytest.mark.parametrize(("clock", "at"), [("virtual", "0.5 s"), ("wall", "0 s")])
def test_when_no_device_answers_any_more_the_run_ends_and_keeps_its_results(
    clock: str, at: str, start_warm: Start, tmp_path: Path
) -> None:
    """From the first block on, and after some answers: all devices are alive, and all hang."""
    fault = f'[{{at = "{at}", do = "mute", devices = 3}}]'
    patience = ("--set", "training.wait_for_devices=2 s", "--set", f"clock.kind={clock}")
    words = ("run", "quickstart", "--devices", "3", "--steps", "4", *SMALL, *patience, "--set", f"faults={fault}")
    program = start_warm("-c", CLEAVE, *words, "--results", str(tmp_path))
    assert program.wait(RUN_LIMIT_S) == 1, program.output
    assert "Traceback" not in program.output
    assert "stopped after step" in program.output
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"] == "FAILED"
    assert any("no device" in reason for reason in summary["reasons"])


@pytest.mark.slow
def test_one_silent_device_that_stays_does_not_make_the_wait_endless(start: Start, serve: Serve, until: Until) -> None:
    """The devices that have answered are gone; one that never answers is connected."""
    server = serve()
    told: list[str] = []
    server.notice = told.append
    workers = pod(start, server, 3)
    Multiplication(server, (1, 96, 32, 96)).check()
    stranger, waits = Stranger(server), Multiplication(server, (1, 96, 32, 96), grid(96, 96, 48, [0]))
    waits.check()
    try:
        stranger.join()
        workers.end()
        until(lambda: server.devices == 1, "the other devices are gone")
        left = Multiplication(server, (1, 96, 32, 96))

        limit_s = time.monotonic() + LIMIT_S
        while not server.waiting and time.monotonic() < limit_s:
            stranger.send(Heartbeat())
            left.done.wait(0.2)
        assert server.waiting
        assert server.devices == 1, "it lives"
        assert not left.done.is_set()
        assert any("no other device is there" in text for text in told), told
        assert not any("others compute it too" in text for text in told)
    finally:
        stranger.close()


@pytest.mark.slow
def test_a_run_over_sockets_with_a_third_of_the_fleet_silent_ends_with_the_exact_loss(
    start_warm: Start, tmp_path: Path
) -> None:
    faults = '[{at = "0 s", do = "mute", devices = 4}]'
    words = ("run", "quickstart", "--devices", "13", "--steps", "1", *SMALL, "--set", f"faults={faults}")
    program = start_warm("-c", CLEAVE, *words, "--results", str(tmp_path))
    assert program.wait(RUN_LIMIT_S) == 0, program.output
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["loss_max_abs_diff"] <= 1e-4
    assert summary["flops_done"] == summary["flops_reference"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("not answered a block" in event.get("text", "") for event in events)


def test_the_idle_device_takes_over_when_the_only_one_with_work_is_silent() -> None:
    """No device has ever answered, so nothing is known to be normal."""
    fast = (1e12, 0.0, 1e9, 1e9, 0.0, 1 << 40, 4)
    slow = (1e8, 0.0, 1e6, 1e6, 0.0, 1 << 40, 4)
    world = replay([("join", [fast, slow]), ("mute", [0]), ("submit", [(1, 6, 6, 6, True, None)])])
    assert world.seen["overdue blocks sent to others"]


@pytest.mark.parametrize("silent", [1, 3])
def test_chaos_lives_and_never_answers_from_the_first_block_on(silent: int) -> None:
    products = [("submit", [(1, 6, 40, 6, True, None)])] * 6
    operations = [("join", [COMMON] * 9), ("mute", list(range(silent))), *products, ("run", 500), *products]
    assert replay(operations).faults["mute"] == silent


# ---- devices that are always just in time


def judged(late: dict[int, float], devices: int = 50, rounds: int = 60) -> Deadlines:
    """A fleet whose devices answer equally many blocks; those in `late` take longer by that factor."""
    rng = np.random.default_rng(0)
    deadlines = Deadlines()
    for _ in range(rounds):
        ratios = rng.uniform(0.9, 1.1, devices)
        for device, times in late.items():
            ratios[device] = times
        deadlines.returned(ratios.tolist(), list(range(devices)))
    return deadlines


def test_a_device_with_two_percent_of_the_blocks_that_is_always_slightly_late_does_not_raise_the_margin() -> None:
    honest = judged({}).margin
    for times in (1.3, 2.0, 3.0, 3.8, 10.0):
        deadlines = judged({7: times})
        assert deadlines.margin <= NOW.margin * NOW.outlier * 1.1, times
        if times > 1.1 * NOW.outlier:
            assert deadlines.margin == pytest.approx(honest, rel=0.02)
            assert list(deadlines.typical.take_slow()) == [7], "its profile is corrected"


def test_a_device_that_always_answers_just_within_the_margin_raises_it_little() -> None:
    deadlines, rng = Deadlines(), np.random.default_rng(1)
    for _ in range(40 * (4 * NOW.enough) // 50):
        margin = deadlines.margin
        ratios = rng.uniform(0.9, 1.1, 50)
        ratios[0] = 0.99 * margin if math.isfinite(margin) else 3.0
        deadlines.returned(ratios.tolist(), list(range(50)))
    assert deadlines.margin <= NOW.margin * NOW.outlier * 1.1


@given(st.integers(8, 60), st.floats(1.0, 100.0), st.data())
def test_no_coalition_below_a_quarter_of_the_devices_decides_what_is_normal(
    devices: int, times: float, data: st.DataObject
) -> None:
    most = math.ceil(NOW.minority * devices) - 1
    chosen = data.draw(st.sets(st.integers(0, devices - 1), max_size=most))
    deadlines = judged(dict.fromkeys(chosen, times), devices, rounds=3 + 3 * (NOW.enough + (4 * NOW.enough)) // devices)
    assert deadlines.margin <= NOW.margin * NOW.outlier * 1.1 + 1e-9


def test_if_all_devices_are_late_none_counts_as_late() -> None:
    deadlines = judged(dict.fromkeys(range(50), 3.0))
    assert deadlines.margin == pytest.approx(3.0 * NOW.margin)
    assert not deadlines.typical.take_slow()
