"""Promises of ps.planning.deferred: deferred products are computed beside the critical ones, and the pass ends
sooner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_products import multiply

from emulator.model.fleet import uniform_fleet
from ps.graph.executor import Executor
from ps.graph.models import model_config
from ps.graph.shapes import ShapesProgram, step_shapes
from ps.planning.deferred import Team, _Pass, teams
from ps.planning.planner import Planner, Question, _ends_s
from ps.planning.plans import Level, Request, Shape
from ps.planning.settings import NOW
from testbed.virtual.server import VirtualServer

CHAIN = Request(Shape(1, 512, 128, 128))
GRADIENT = Request(Shape(1, 128, 512, 128))
FLEET = uniform_fleet("extreme", 60, seed=1, line_share=0.001)


# ---- which devices are taken

requests = st.builds(
    Request,
    st.builds(Shape, st.integers(1, 3), st.integers(1, 300), st.integers(1, 600), st.integers(1, 300)),
    st.integers(1, 3),
    st.integers(1, 3),
)
levels = st.lists(
    st.builds(
        Level,
        st.lists(requests, min_size=1, max_size=3).map(tuple),
        st.lists(requests, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(levels, st.lists(requests, min_size=1, max_size=2).map(tuple), st.integers(1, 40), st.integers(0, 5))
def test_some_devices_always_stay_for_the_critical_products(
    chain: list[Level], last: tuple[Request, ...], count: int, seed: int
) -> None:
    found = teams([*chain, Level((), last)], uniform_fleet("extreme", count, seed, line_share=0.01))
    assert len(found) == len(chain)
    for level, team in zip(chain, found, strict=True):
        assert len(team.devices) <= NOW.most_taken * count
        assert len(np.unique(team.devices)) == len(team.devices)
        assert all(0 <= device < count for device in team.devices.tolist())
        assert level.deferred or not len(team.devices)


def test_a_device_is_taken_again_only_after_it_has_finished() -> None:
    chain = [Level((CHAIN,), (GRADIENT,))] * 200
    found = teams([*chain, Level((), (GRADIENT,))], FLEET)
    taken = np.concatenate([team.devices for team in found])
    assert len(taken) > len(FLEET), "devices that finish before the pass ends are taken again"
    for before, after in itertools.pairwise(found):
        assert not set(before.devices.tolist()) & set(after.devices.tolist())


def test_with_few_devices_and_many_levels_no_team_ends_later_than_if_its_product_had_waited() -> None:
    fleet = uniform_fleet("extreme", 40, 1, line_share=0.001)
    chain = [Level((CHAIN,), (GRADIENT,) * 4)] * 60
    found = teams([*chain, Level((), (GRADIENT,))], fleet)
    held_back_s = _Pass([*chain, Level((), (GRADIENT,))], fleet).held_back_s
    assert all(team.span_s <= held_back_s for team in found)


def test_the_less_time_is_left_the_larger_a_team_is() -> None:
    long, short = ([Level((CHAIN,), (GRADIENT,)), *[Level((CHAIN,))] * more] for more in (16, 2))
    assert len(teams(long, FLEET)[0].devices) < len(teams(short, FLEET)[0].devices)
    assert teams(long, FLEET)[0].span_s > teams(short, FLEET)[0].span_s


def test_the_devices_that_the_critical_chain_misses_least_are_taken() -> None:
    """Two kinds of devices that differ only in their uplinks: a weight gradient is mostly downloaded."""
    fleet = np.repeat(FLEET[:1], 40)
    fleet["up_bps"][::2] /= 10
    (team,) = teams([Level((CHAIN,) * 3, (GRADIENT,)), Level((CHAIN,))], fleet)
    assert len(team.devices) > 1
    assert not (team.devices % 2).any()


# ---- planning


def question(deferred: int = 1, more: int = 8) -> Question:
    return Question((CHAIN, *[GRADIENT] * deferred), deferred, (Level((CHAIN,)),) * more)


def test_a_deferred_product_is_planned_beside_the_critical_ones_and_ends_later() -> None:
    able = np.arange(len(FLEET))
    critical, deferred = Planner().plan(question(), FLEET, able)
    assert not set(critical.device.tolist()) & set(deferred.device.tolist())
    alone = Planner().plan([CHAIN], FLEET, able)[0]
    together = Planner().plan([CHAIN, GRADIENT], FLEET, able)
    assert alone.makespan_s <= critical.makespan_s < together[0].makespan_s < deferred.makespan_s


def test_busy_devices_are_left_alone_unless_no_other_is_present() -> None:
    able, busy = np.arange(len(FLEET)), np.arange(0, len(FLEET), 2)
    for plan in Planner().plan(question(), FLEET, able, busy=busy):
        assert not set(plan.device.tolist()) & set(busy.tolist())
    (plan,) = Planner().plan([CHAIN], FLEET, able, busy=able)
    assert len(plan.device)


def test_the_teams_of_a_pass_are_chosen_once_and_again_when_they_would_be_late() -> None:
    planner, able = Planner(), np.arange(len(FLEET))
    first = planner.plan(question(more=8), FLEET, able)
    chosen = planner._teams[question(more=8).ahead].devices
    assert set(first[1].device.tolist()) <= set(chosen.tolist())
    later = Question((CHAIN, GRADIENT), 1, question().ahead[1:])
    known = Team(np.setdiff1d(able, chosen)[:30], span_s=100.0)
    planner._teams[later.ahead] = known
    _, deferred = planner.plan(later, FLEET, able, busy=chosen)
    assert set(deferred.device.tolist()) <= set(known.devices.tolist())
    planner._cache.clear()
    planner._teams[later.ahead] = replace(known, span_s=0.01)
    _, deferred = planner.plan(later, FLEET, able, busy=chosen)
    assert not np.array_equal(planner._teams[later.ahead].devices, known.devices), "chosen again"
    assert deferred.makespan_s < 1.2 * planner._teams[later.ahead].span_s


def test_teams_are_chosen_again_when_the_fleet_has_grown() -> None:
    table = uniform_fleet("extreme", 200, seed=1, line_share=0.001)
    planner, every = Planner(), np.arange(200)
    planner.plan(question(), table, np.arange(20))
    grown = planner.plan(question(), table, every)
    fresh = Planner().plan(question(), table, every)
    assert [plan.makespan_s for plan in grown] == [plan.makespan_s for plan in fresh]


def test_plans_that_miss_no_device_stay_even_if_some_devices_are_busy() -> None:
    planner, able = Planner(), np.arange(len(FLEET))
    later = Question((CHAIN,), 0, question().ahead[1:])
    for asked in (question(), later, question()):
        planner.plan(asked, FLEET, able)
    before = planner._cache[later].plans
    busy = before[0].device[:5]
    planner.plan_ahead(FLEET, able, busy=busy)
    assert planner._cache[later].plans is before
    lost = int(before[0].device[0])
    planner.plan_ahead(FLEET, np.delete(able, lost), busy=busy)
    after = planner._cache[later].plans[0]
    assert lost not in after.device
    assert not set(after.device.tolist()) & set(busy.tolist())


def test_the_next_pass_is_planned_for_all_devices_even_if_some_are_busy_now() -> None:
    planner, able = Planner(), np.arange(len(FLEET))
    for asked in (question(), Question((CHAIN,)), question()):
        planner.plan(asked, FLEET, able)
    lost = int(planner._cache[Question((CHAIN,))].plans[0].device[0])
    planner.plan_ahead(FLEET, np.delete(able, lost), busy=np.delete(able, lost)[:30])
    assert len(planner._cache[Question((CHAIN,))].able) == len(FLEET) - 1


@pytest.mark.parametrize("credit", [1, 2, 4])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_products_that_are_ready_together_take_as_long_as_planned(devices: int, credit: int) -> None:
    """In virtual time, with long lines: a device waits for an answer whenever it has all the blocks it may have."""
    fleet = FLEET[:devices].copy()
    fleet["credit_blocks"], fleet["latency_s"] = credit, np.linspace(0.002, 0.08, devices)
    shapes = [(256, 128, 192), (128, 256, 64), (192, 192, 192)]
    requests = [Request(Shape(1, *shape)) for shape in shapes]
    server = VirtualServer(fleet, [str(device) for device in range(devices)], Planner())
    multiply(server, shapes, together=True)
    planned_s = _ends_s(Planner().plan(requests, fleet, np.arange(devices)), requests, fleet)
    assert server.clock.now_s == pytest.approx(planned_s, rel=0.03)


def test_no_device_is_taken_from_a_product_that_only_it_can_compute() -> None:
    fleet = FLEET[:2].copy()
    fleet["memory_bytes"][0] = 200
    large = Request(Shape(1, 1, 54, 5))
    (team,) = teams([Level((large,), (large,)), Level((large,))], fleet)
    assert not len(team.devices)
    critical, deferred = Planner().plan(Question((large, large), 1, (Level((large,)),)), fleet, np.arange(2))
    assert set(critical.device.tolist()) == {1}
    assert deferred.waits


# ---- a whole step


@cache
def step() -> list[ShapesProgram]:
    return step_shapes(model_config("opt-tiny", None), 32, 64)[0]


def seconds(kind: Any, early: bool, devices: int, fleet: str = "extreme") -> float:
    """Seconds of a step of the quickstart's model, in virtual time, without values."""
    server = VirtualServer(
        uniform_fleet(fleet, devices, 1, line_share=0.001), [""] * devices, Planner(kind), arithmetic=False
    )
    executor = Executor(server, early)
    for program in step():
        executor.run_shapes(program)
    return server.clock.now_s


@pytest.mark.slow
@pytest.mark.parametrize(("fleet", "devices"), [("extreme", 40), ("paper", 100)])
def test_a_step_is_shorter_when_weight_gradients_begin_at_once(fleet: str, devices: int) -> None:
    assert seconds("packed", True, devices, fleet) < 0.97 * seconds("packed", False, devices, fleet)


@pytest.mark.slow
def test_the_planner_is_twice_as_fast_as_the_weighted_grid_on_the_extreme_fleet() -> None:
    assert 2 * seconds("packed", True, 1000) <= seconds("grid", False, 1000)


@pytest.mark.slow
def test_a_step_leaves_nothing_behind() -> None:
    server = VirtualServer(FLEET, [""] * len(FLEET), Planner(), arithmetic=False)
    for _ in range(2):
        executor = Executor(server, early=True)
        for program in step():
            executor.run_shapes(program)
        assert server.left_behind() == ""
