"""Promises about lost rectangles in the dispatcher (ps.scheduling.assignments): they overtake waiting blocks, and an
idle device takes blocks that wait for another, if that is sooner."""

from __future__ import annotations

import numpy as np
import pytest

from agent.protocol.profile import Profile, pack_profiles
from ps.planning.cost import alone_s
from ps.planning.planner import Planner
from ps.planning.plans import Plan, Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import BlocksReturned, DevicesJoined, DevicesLeft, JobsSubmitted, SendBlocks, Submission
from testbed.virtual.plan import fleet_profiles
from testbed.virtual.recovery import Product

COMMON = Profile(1e12, 0.0, 1e7, 1e7, 0.0, 1 << 40, 1)


def columns_of(dispatcher: Dispatcher, each: list[int]) -> None:
    """One product, in equal columns of one block: this number for each device."""
    owner = np.repeat(np.arange(len(each)), each)
    boxes = np.array([(0, 1, 0, 50, 50 * i, 50) for i in range(len(owner))])
    shape = Shape(1, 50, 50, 50 * len(owner))
    plan = Plan(boxes, owner, np.ones((len(owner), 2), np.bool_), 1.0)
    dispatcher.handle(JobsSubmitted([Submission(0, Request(shape), True, plan)]))
    dispatcher.check()


def test_lost_blocks_go_out_before_waiting_ones() -> None:
    dispatcher = Dispatcher(Planner())
    dispatcher.handle(DevicesJoined(0, pack_profiles([COMMON] * 2)))
    columns_of(dispatcher, [3, 3])  # one block of each is sent, two wait
    dispatcher.handle(DevicesLeft([1]))
    dispatcher.check()
    pieces = [block for block, loss in enumerate(dispatcher._state.jobs[0].loss) if loss]
    assert pieces
    order, last = [], 0
    while dispatcher._state.jobs:
        out = dispatcher.handle(BlocksReturned([0], [0], [last]), 1.0)
        sent = [instruction for instruction in out if isinstance(instruction, SendBlocks)]
        if sent:
            (last,) = sent[0].blocks
            order.append(last)
    assert order == [*pieces, 1, 2]


def test_an_idle_device_takes_no_block_that_its_owner_returns_sooner() -> None:
    """The owner downloads the last block while it uploads another; one after the other would take longer."""
    slow = Profile(1e12, 0.0, 3.75e6, 3.75e6, 0.0, 1 << 40, 2)
    owner = Profile(1e12, 0.0, 1e7, 1e7, 0.0, 1 << 40, 2)
    dispatcher = Dispatcher(Planner())
    dispatcher.handle(DevicesJoined(0, pack_profiles([owner, slow])))
    columns_of(dispatcher, [3, 1])
    *owners, thiefs = [alone_s(passage) for passage in dispatcher._state.jobs[0].passage]
    assert dispatcher._state.devices[0].busy_with_all_s(0.0)[2] < thiefs < sum(owners)
    dispatcher.handle(BlocksReturned([1], [0], [3]), 1e-6)
    assert dispatcher._state.jobs[0].device == [0, 0, 0, 1]


@pytest.mark.parametrize("shape", [Shape(1, 16384, 2560, 5120), Shape(320, 512, 64, 512)])
def test_holding_blocks_back_costs_nothing(shape: Shape) -> None:
    """Long blocks are sent only when needed, so that lost ones can overtake them; this delays no device."""
    profiles, planner = fleet_profiles("paper", 12, seed=1), Planner()
    product = Product(shape, profiles, planner)
    (plan,) = planner.plan([Request(shape)], profiles, np.arange(len(profiles)))
    assert len(product.cells) < len(plan.boxes), "a block is held back"
    assert product.run() <= 1.001 * plan.makespan_s


def test_an_idle_device_takes_all_blocks_waiting_for_one_that_does_not_answer() -> None:
    dispatcher = Dispatcher(Planner())
    dispatcher.handle(DevicesJoined(0, pack_profiles([COMMON] * 2)))
    columns_of(dispatcher, [4, 1])  # one block of each is sent, three wait for the first device
    now_s, last = 100.0, 4
    for _ in range(3):
        now_s += 0.03
        out = dispatcher.handle(BlocksReturned([1], [0], [last]), now_s)
        (sent,) = [instruction for instruction in out if isinstance(instruction, SendBlocks)]
        assert sent.devices == [1]
        (last,) = sent.blocks
    assert not dispatcher._state.devices[0].critical
