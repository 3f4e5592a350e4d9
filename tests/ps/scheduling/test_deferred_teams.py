"""Promises about devices held for deferred products (ps.scheduling.state): they get nothing else until it is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.model.fleet import uniform_fleet
from ps.planning.planner import Planner, Question
from ps.planning.plans import WAITS, Level, Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksReturned,
    DevicesJoined,
    DevicesLeft,
    JobsSubmitted,
    SendBlocks,
    Submission,
)

CHAIN = Request(Shape(1, 512, 128, 128))
GRADIENT = Request(Shape(1, 128, 512, 128))
FLEET = uniform_fleet("extreme", 60, seed=1, line_share=0.001)


def question(deferred: int = 1, more: int = 8) -> Question:
    return Question((CHAIN, *[GRADIENT] * deferred), deferred, (Level((CHAIN,)),) * more)


class World:
    """A dispatcher, a fleet, and which block was sent to which device."""

    def __init__(self, fleet: NDArray[np.void] = FLEET) -> None:
        self.dispatcher = Dispatcher(Planner())
        self.sent: dict[tuple[int, int], int] = {}  # job, block -> device
        self.now_s = 0.0
        self.handle(DevicesJoined(0, fleet))

    def handle(self, event: Any) -> None:
        for instruction in self.dispatcher.handle(event, self.now_s):
            if isinstance(instruction, SendBlocks):
                keys = zip(instruction.jobs, instruction.blocks, strict=True)
                self.sent |= dict(zip(keys, instruction.devices, strict=True))
        self.dispatcher.check()

    def submit(self, first: int, asked: Question) -> None:
        new = [
            Submission(first + at, request, critical=at < asked.critical) for at, request in enumerate(asked.requests)
        ]
        self.handle(JobsSubmitted(new, asked.ahead))

    def devices(self, job: int) -> set[int]:
        """Devices that have or had blocks of this job."""
        return set(self.dispatcher._state.jobs[job].device)

    def answer_all(self, job: int) -> None:
        while job in self.dispatcher._state.jobs:
            keys = [key for key in self.sent if key[0] == job]
            self.now_s += 0.001
            jobs, blocks = (list(column) for column in zip(*keys, strict=True))
            self.handle(BlocksReturned([self.sent.pop(key) for key in keys], jobs, blocks))


def test_a_device_with_deferred_work_gets_nothing_else_until_it_is_done() -> None:
    world = World()
    world.submit(0, question())
    busy = world.devices(1)
    world.answer_all(0)
    world.submit(2, Question((CHAIN,), 0, question().ahead[1:]))
    assert not world.devices(2) & busy
    world.answer_all(2)
    world.answer_all(1)
    world.submit(3, Question((CHAIN,)))
    assert world.devices(3) & busy


def test_no_device_takes_deferred_work_from_others_while_more_levels_follow() -> None:
    for ahead, stays in ((question().ahead, True), ((), False)):
        world = World()
        world.submit(0, question())
        before = world.devices(1)
        world.handle(JobsSubmitted([], ahead))
        world.answer_all(0)  # many devices are idle
        assert (world.devices(1) == before) == stays


def test_lost_deferred_blocks_stay_with_devices_held_for_deferred_products() -> None:
    world = World()
    world.submit(0, question(deferred=3))
    team = world.devices(1) | world.devices(2) | world.devices(3)
    lost = min(world.devices(1))
    world.handle(DevicesLeft([lost]))
    assert world.devices(1) - {lost} <= team


def test_lost_deferred_blocks_overtake_waiting_ones() -> None:
    world = World()
    world.submit(0, question(deferred=3))
    waiting = [record for record in world.dispatcher._state.devices if record.deferred]
    assert waiting, "there is something to overtake"
    world.handle(DevicesLeft([min(world.devices(1))]))
    overtaken = 0
    for record in world.dispatcher._state.devices:
        repairs = [world.dispatcher._state.jobs[job].first[block] for job, block in record.deferred]
        assert repairs == sorted(repairs, reverse=True)
        overtaken += len(set(repairs)) > 1
    sent = [key for key in world.sent if world.dispatcher._state.jobs[key[0]].first[key[1]]]
    assert overtaken or sent


def test_a_newcomer_with_the_number_of_a_device_that_left_is_not_busy() -> None:
    world = World()
    world.submit(0, question())
    gone = min(world.devices(1))
    world.handle(DevicesLeft([gone]))
    assert gone not in world.dispatcher._assignments.teams.busy
    assert len(world.dispatcher._assignments.teams.busy)


def test_deferred_products_that_wait_begin_with_the_last_level_of_the_pass() -> None:
    """One device cannot compute them beside the critical path without delaying it."""
    world = World(FLEET[:1])
    world.submit(0, question())
    assert not world.devices(1)
    world.answer_all(0)
    world.submit(2, Question((CHAIN,), 0, question().ahead[1:]))
    world.answer_all(2)
    assert not world.devices(1), "there is more to come"
    world.submit(3, Question((CHAIN,)))
    assert world.devices(1) == {0}
    world.answer_all(3)
    world.answer_all(1)
    assert not world.dispatcher.left_behind()


def test_deferred_products_that_wait_begin_when_nothing_more_comes() -> None:
    world = World(FLEET[:1])
    world.submit(0, question())
    world.answer_all(0)
    world.handle(JobsSubmitted([]))
    world.answer_all(1)
    assert not world.dispatcher.left_behind()


def test_products_that_begin_in_parts_begin_once_and_what_was_held_with_them() -> None:
    """The last level of a pass, with the products that were held until then, told in as many events as products."""
    world = World()
    held = Submission(0, GRADIENT, critical=False, plan=WAITS)
    world.handle(JobsSubmitted([held], question().ahead))
    asked = JobsSubmitted([Submission(1, CHAIN, critical=True), Submission(2, CHAIN, critical=True)])
    inquiry = world.dispatcher.inquire(asked, world.now_s)
    assert inquiry is not None
    planned = world.dispatcher.with_plans(asked, inquiry, inquiry.answer())
    assert sorted(new.job for new in planned.jobs) == [0, 1, 2]
    for new in planned.jobs:
        world.handle(replace(planned, jobs=[new], more=new is not planned.jobs[-1]))
    assert all(world.devices(job) for job in (0, 1, 2))
    for new in planned.jobs:
        assert new.plan is not None
        assert len(world.dispatcher._state.jobs[new.job].boxes) == len(new.plan.boxes)
    assert not world.dispatcher._state.held
