"""Devices that hang, return, leave and join, in fleets so small and so short of memory that they block each other: a
product ends as long as one able device lives and answers. The real dispatcher, in virtual time, checked after every
event."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE
from ps.planning.plans import Shape
from ps.scheduling.events import NameStragglers
from testbed.virtual.world import Key, Outcome, VirtualFleet, Work

LIMIT_S = 20_000.0  # of virtual time; reached only in a deadlock


def profiles(count: int, memory_bytes: int = 1 << 30) -> NDArray[np.void]:
    return np.array([(1e9, 1e-3, 1e8, 1e8, 0.005, memory_bytes, 8)] * count, PROFILE)


class Fleet:
    """Devices that hang and return. `later`: memory of the devices that may still join, in this order."""

    def __init__(
        self, count: int, memory_bytes: int = 1 << 30, newcomers: bool = False, later: Sequence[int] = ()
    ) -> None:
        self.hung: set[int] = set()
        self.named: list[NameStragglers] = []
        self.alive = set(range(count))
        table = profiles(count + len(later), memory_bytes)
        table["memory_bytes"][count:] = later
        self._fleet = VirtualFleet(table)
        self._answers: list[tuple[float, Key]] = []
        self._jobs, self._finished = itertools.count(), set[int]()
        self._note(self._fleet.join(count, newcomers))

    def _note(self, outcome: Outcome) -> None:
        for sent in outcome.sent:
            heapq.heappush(self._answers, (sent.due_s, sent.key))
        self._finished.update(outcome.finished)
        self.named += outcome.named
        self._fleet.check()

    def join(self, newcomer: bool) -> int:
        device = self._fleet.joined
        self.alive.add(device)
        self._note(self._fleet.join(1, newcomer))
        return device

    def leave(self, device: int) -> None:
        self.alive.discard(device)
        self.hung.discard(device)
        self._note(self._fleet.leave([device]))

    def submit(self, shape: Shape) -> int:
        job = next(self._jobs)
        self._note(self._fleet.submit([Work(job, shape)]))
        return job

    def ends_within_s(self, job: int, limit_s: float = LIMIT_S) -> float | None:
        fleet = self._fleet
        begun_s = fleet.now_s
        while job not in self._finished and fleet.now_s - begun_s < limit_s:
            answer_s = self._answers[0][0] if self._answers else float("inf")
            next_s = min(answer_s, max(fleet.next_look_s, fleet.now_s + 0.01))
            if next_s == float("inf"):
                return None  # a deadlock
            fleet.now_s = max(fleet.now_s, next_s)
            if answer_s > next_s:
                self._note(fleet.look())
                continue
            _, key = heapq.heappop(self._answers)
            if key[0] not in self.hung:
                self._note(fleet.answer([key]))
        return fleet.now_s - begun_s if job in self._finished else None


@pytest.mark.parametrize("seed", range(20))
def test_a_product_ends_as_long_as_one_device_answers(seed: int) -> None:
    chance = random.Random(200_040 + seed)
    later = [chance.choice([1 << 30, 1 << 20]) for _ in range(25)]
    fleet = Fleet(chance.randint(1, 6), chance.choice([1 << 30, 1 << 22, 1 << 20]), chance.random() < 0.5, later)
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
            joined = fleet.join(chance.random() < 0.5)
            if chance.random() < 0.5:
                fleet.hung = fleet.alive - {joined}
        assert fleet.ends_within_s(job) is not None


@pytest.mark.slow
@pytest.mark.parametrize("newcomer", [False, True])
@pytest.mark.parametrize("silent", [1, 2, 13])
def test_a_fleet_that_never_answered_is_named_and_the_next_device_takes_over_its_work(
    silent: int, newcomer: bool
) -> None:
    fleet = Fleet(silent, later=[1 << 30])
    fleet.hung = set(fleet.alive)
    job = fleet.submit(Shape(1, 512, 512, 512))
    assert fleet.ends_within_s(job, 30.0) is None
    assert fleet.named
    assert fleet.named[0].alone
    fleet.join(newcomer)
    took_s = fleet.ends_within_s(job)
    assert took_s is not None
    assert took_s < 60.0


@pytest.mark.slow
def test_a_device_silent_for_long_is_tried_again_when_the_only_other_one_hangs() -> None:
    fleet, shape = Fleet(2), Shape(1, 512, 512, 512)
    fleet.hung = {1}
    for _ in range(2000):  # long enough for pauses of minutes
        assert fleet.ends_within_s(fleet.submit(shape)) is not None
    fleet.hung = {0}
    took_s = fleet.ends_within_s(fleet.submit(shape))
    assert took_s is not None
    assert took_s < 10.0
