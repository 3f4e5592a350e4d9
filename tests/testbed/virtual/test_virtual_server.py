"""Promises of testbed.virtual.server: whatever happens to the fleet, every product ends, and every cell counts once."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_products import multiply

from agent.protocol.errors import Failure
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.fleet import uniform_fleet
from emulator.model.link import plain_links
from ps.planning.planner import Planner
from ps.planning.plans import Plan
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.faults.inject import Injection, Injector
from testbed.virtual.pods import VirtualPods
from testbed.virtual.server import NOTICED_AFTER_S, VirtualServer

COUNT = 12


def make(seed: int = 0, absent: tuple[int, ...] = ()) -> VirtualServer:
    profiles = uniform_fleet("moderate", COUNT, seed, 1e-3)
    return VirtualServer(profiles, [f"device {i}" for i in range(COUNT)], Planner(), absent)


def test_answers_are_delayed_behind_downloads_as_in_a_pod() -> None:
    """Three blocks arrive one after the other, in 125 ms each: all answers but the last meet a full buffer."""
    profile, links = Profile(1e12, 0.0, 8e6, 1e9, 0.005, 1 << 30, 4), plain_links(1)
    links.table["queue_down_s"] = 0.05
    server = VirtualServer(pack_profiles([profile]), ["phone"], Planner(), links=links)
    inner, done = 125_000 // 8, SimpleQueue[int]()
    left, right = (Operand(np.ones((1, count, inner), np.float32)) for count in (3, 1))
    boxes = np.array([[0, 1, row, 1, 0, 1] for row in range(3)])
    plan = Plan(boxes, device=np.zeros(3, np.int64), fresh=np.ones((3, 2), bool), makespan_s=0.0)
    server.submit(Product(left, right, np.empty((1, 3, 1), np.float32), partial(done.put, 1), plan=plan))
    server.collect(done)
    columns = server.records.columns()
    due_s = np.sort(columns["due_s"]) - columns["sent_s"][0]
    assert due_s == pytest.approx([0.135 + 0.05, 0.26 + 0.05, 0.385], abs=0.001)


KINDS = ("leave", "vanish", "return", "freeze", "slow", "lie", "corrupt", "kill")


@st.composite
def faults(draw: st.DrawFn) -> list[Injection]:
    """Any number of faults on any devices, except that the last device of pod 0 stays honest and present."""
    listed = []
    for at_s in sorted(draw(st.lists(st.floats(0, 30), max_size=8))):
        do = draw(st.sampled_from(KINDS))
        who = tuple(draw(st.lists(st.integers(0, COUNT - 2), min_size=1, max_size=6, unique=True)))
        details: dict[str, Any] = {"freeze": {"seconds": 3.0}, "slow": {"factor": 5.0}}.get(do, {})
        pods = (0,) if do in ("corrupt", "kill") else ()
        listed.append(Injection(at_s, do, () if pods else who, pods, details))
        if do == "kill":
            break
    return listed


@pytest.mark.slow
@settings(max_examples=25)
@given(faults(), st.integers(0, 3))
def test_whatever_happens_every_product_ends_and_counts_once(plan: list[Injection], seed: int) -> None:
    server = make(seed)
    injector = Injector(VirtualPods(server, 2), plan, note=lambda event, **fields: None)
    with server.injecting(injector):
        flops = multiply(server, [(60, 50, 70), (33, 100, 20), (80, 20, 90)], seed)
    assert server.totals.flops == flops
    assert server.totals.result_bytes >= 4 * (60 * 70 + 33 * 20 + 80 * 90)
    columns = server.records.columns()
    assert (columns["received_s"] >= columns["due_s"] - 1e-9).all()
    assert injector.audit().get("faults", {}).get("worst_delay_s", 0.0) == pytest.approx(0.0, abs=1e-6)


def test_a_vanished_device_is_missed_after_its_silence() -> None:
    server = make()
    server.slow(list(range(COUNT)), 1000.0)  # no answer comes before that
    with server.injecting(Injector(VirtualPods(server, 2), [Injection(1.0, "vanish", (3,))])):
        multiply(server, [(60, 50, 70)])
    (loss,) = server.records.losses.values()
    assert loss.devices == [3]
    assert loss.detected_ns == pytest.approx(1e9 * (1.0 + NOTICED_AFTER_S))


def test_a_frozen_device_answers_when_it_thaws() -> None:
    server = make()
    server.freeze(list(range(COUNT)), 3.0)
    multiply(server, [(60, 50, 70)])
    assert (server.records.columns()["received_s"] >= 3.0).all()


def test_a_device_frozen_for_long_is_lost_and_joins_again_when_it_thaws() -> None:
    server = make()
    server.freeze(list(range(COUNT)), 500.0)
    assert not server.present
    multiply(server, [(60, 50, 70)])
    assert server.clock.now_s > 500.0
    assert len(server.present) == COUNT
    assert len(server.absent) == COUNT, "under their old numbers"


def test_a_liar_is_found_and_suspended() -> None:
    server = make()
    server.lie([2])
    multiply(server, [(60, 50, 70)])
    assert [server.labels[device] for device in server.suspended] == ["device 2"]
    assert server.totals.wrong_blocks > 0


def test_an_absent_device_gets_no_work_until_it_returns() -> None:
    server = make(absent=(0, 1))
    assert server.devices == COUNT - 2
    multiply(server, [(60, 50, 70)])
    before = {server.labels[device] for device in server.records.columns()["device"].tolist()}
    assert not before & {"device 0", "device 1"}
    server.join([0, 1])
    assert server.devices == COUNT


def test_a_fleet_that_is_gone_is_reported() -> None:
    server = make()
    with (
        pytest.raises(Failure, match="no device is there"),
        server.injecting(Injector(VirtualPods(server, 1), [Injection(0.01, "leave", tuple(range(COUNT)))])),
    ):
        multiply(server, [(600, 500, 700)])
