"""Devices that hang, come back, leave and join, in fleets so small and short of memory that they block each other: a
product ends as long as one able device lives and answers. The real dispatcher, in virtual time, checked after every
event."""

from __future__ import annotations

import heapq
import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE
from ps.planning.planner import Planner
from ps.planning.plans import Request, Shape
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksReturned,
    DevicesJoined,
    DevicesLeft,
    Event,
    JobFinished,
    JobsSubmitted,
    NameStragglers,
    SendBlocks,
    Submission,
    TimePassed,
)

LIMIT_S = 20_000.0  # of virtual time; reached only when nothing will ever happen


def profiles(count: int, memory_bytes: int = 1 << 30) -> NDArray[np.void]:
    return np.array([(1e9, 1e-3, 1e8, 1e8, 0.005, memory_bytes, 8)] * count, PROFILE)


class Fleet:
    def __init__(self, count: int, memory_bytes: int = 1 << 30, newcomers: bool = False) -> None:
        self.hung: set[int] = set()
        self.named: list[NameStragglers] = []
        self.alive = set(range(count))
        self._dispatcher, self._now_s = Dispatcher(Planner()), 0.0
        self._answers: list[tuple[float, int, int, int]] = []
        self._jobs, self._finished = itertools.count(), set[int]()
        self._total = count
        self._tell(DevicesJoined(0, profiles(count, memory_bytes), (), newcomers))

    def _tell(self, event: Event) -> None:
        for told in self._dispatcher.handle(event, self._now_s):
            match told:
                case SendBlocks(devices=devices, jobs=jobs, blocks=blocks):
                    for device, job, block in zip(devices, jobs, blocks, strict=True):
                        due_s = self._now_s + self._dispatcher._state.jobs[job].expected_s[block]
                        heapq.heappush(self._answers, (due_s, device, job, block))
                case JobFinished(job=job):
                    self._finished.add(job)
                case NameStragglers():
                    self.named.append(told)
        self._dispatcher.check()

    def join(self, memory_bytes: int, newcomer: bool) -> int:
        device = self._total
        self._total += 1
        self.alive.add(device)
        self._tell(DevicesJoined(device, profiles(1, memory_bytes), (), newcomer))
        return device

    def leave(self, device: int) -> None:
        self.alive.discard(device)
        self.hung.discard(device)
        self._tell(DevicesLeft([device]))

    def submit(self, shape: Shape) -> int:
        job = next(self._jobs)
        event = JobsSubmitted([Submission(job, Request(shape), True)])
        self._tell(self._dispatcher.prepare(event, self._now_s))
        return job

    def ends_within_s(self, job: int, limit_s: float = LIMIT_S) -> float | None:
        begun_s = self._now_s
        while job not in self._finished and self._now_s - begun_s < limit_s:
            answer_s = self._answers[0][0] if self._answers else float("inf")
            next_s = min(answer_s, max(self._dispatcher.next_look_s, self._now_s + 0.01))
            if next_s == float("inf"):
                return None  # nothing will ever happen
            self._now_s = max(self._now_s, next_s)
            if answer_s > next_s:
                self._tell(TimePassed())
                continue
            _, device, of, block = heapq.heappop(self._answers)
            if device not in self.hung:
                self._tell(BlocksReturned([device], [of], [block]))
        return self._now_s - begun_s if job in self._finished else None


@pytest.mark.parametrize("seed", range(40))
def test_a_product_ends_as_long_as_one_device_answers(seed: int) -> None:
    chance = random.Random(200_040 + seed)
    fleet = Fleet(chance.randint(1, 6), chance.choice([1 << 30, 1 << 22, 1 << 20]), chance.random() < 0.5)
    for _ in range(chance.randint(3, 25)):
        if chance.random() < 0.4:
            well = chance.choice(sorted(fleet.alive))
            fleet.hung = {d for d in fleet.alive if d != well and chance.random() < chance.choice([0.2, 0.9])}
        if chance.random() < 0.3 and len(fleet.alive) > 1:
            fleet.leave(chance.choice(sorted(fleet.alive)))
            if not fleet.alive - fleet.hung:
                fleet.hung = set()
        sizes = ([1, 3], [1, 64, 300], [8, 512], [1, 64, 300])
        job = fleet.submit(Shape(*(chance.choice(some) for some in sizes)))
        if chance.random() < 0.3:
            fleet.ends_within_s(job, chance.choice([0.05, 1.0, 10.0]))
            joined = fleet.join(chance.choice([1 << 30, 1 << 20]), chance.random() < 0.5)
            if chance.random() < 0.5:
                fleet.hung = fleet.alive - {joined}
        assert fleet.ends_within_s(job) is not None


@pytest.mark.slow
@pytest.mark.parametrize("newcomer", [False, True])
@pytest.mark.parametrize("silent", [1, 2, 13])
def test_a_fleet_that_never_answered_is_named_and_the_next_device_does_its_work(silent: int, newcomer: bool) -> None:
    fleet = Fleet(silent)
    fleet.hung = set(fleet.alive)
    job = fleet.submit(Shape(1, 512, 512, 512))
    assert fleet.ends_within_s(job, 30.0) is None
    assert fleet.named
    assert fleet.named[0].alone
    fleet.join(1 << 30, newcomer)
    took_s = fleet.ends_within_s(job)
    assert took_s is not None
    assert took_s < 60.0


@pytest.mark.slow
def test_a_device_that_was_silent_for_long_is_asked_again_when_the_only_other_one_hangs() -> None:
    fleet, shape = Fleet(2), Shape(1, 512, 512, 512)
    fleet.hung = {1}
    for _ in range(2000):  # long enough for pauses of minutes
        assert fleet.ends_within_s(fleet.submit(shape)) is not None
    fleet.hung = {0}
    took_s = fleet.ends_within_s(fleet.submit(shape))
    assert took_s is not None
    assert took_s < 10.0
