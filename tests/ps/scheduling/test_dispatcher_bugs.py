"""Bugs inside the dispatcher that chaos must find: each is planted, found, shrunk to a handful of operations, and
printed as a test that fails in the same way."""

from __future__ import annotations

from typing import Any

import pytest
from planted_bugs import Plant, first_failure, printed_test_fails_alike

from ps.scheduling.assignments import Assignments
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import AcceptBlocks, BlocksReturned, CancelBlocks, DevicesLeft
from ps.scheduling.state import CUT, Turn
from testbed.faults.chaos import shrink

pytestmark = pytest.mark.slow


def forget_a_lost_block(patch: pytest.MonkeyPatch) -> None:
    """One of the blocks that a device had is not cut again."""
    honest = Assignments.cut

    def cut(self: Assignments, lost: list[tuple[int, int]], turn: Turn, avoid: int = -1, loss: int = 0) -> None:
        for job_id, block in lost[:1] if len(lost) > 1 else []:
            self._state.jobs[job_id].state[block] = CUT
            self._state.jobs[job_id].open -= 1
        honest(self, lost[1:] if len(lost) > 1 else lost, turn, avoid, loss)

    patch.setattr(Assignments, "cut", cut)


def accept_duplicate_answers(patch: pytest.MonkeyPatch) -> None:
    """A duplicate answer is accepted a second time."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        out = honest(self, event, now_s)
        if isinstance(event, BlocksReturned) and not out and event.jobs[0] in self._state.jobs and event.blocks[0] == 0:
            return [AcceptBlocks([0])]
        return out

    patch.setattr(Dispatcher, "handle", handle)


def keep_lost_devices_able(patch: pytest.MonkeyPatch) -> None:
    """A device that has left still counts as able."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        able = self._standing.able
        out = honest(self, event, now_s)
        if isinstance(event, DevicesLeft) and len(able) > 2:
            self._standing.able = able
        return out

    patch.setattr(Dispatcher, "handle", handle)


def count_the_overtaken_answer_too(patch: pytest.MonkeyPatch) -> None:
    """An overdue block has a speculative copy: the slower device's late answer is accepted too."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        out = honest(self, event, now_s)
        losers: set[tuple[int, int, int]] = self.__dict__.setdefault("losers", set())
        for told in out:
            if isinstance(told, CancelBlocks):
                losers.update(zip(told.devices, told.jobs, told.blocks, strict=True))
        if isinstance(event, BlocksReturned) and not out:
            late = (event.devices[0], event.jobs[0], event.blocks[0])
            if late in losers and late[1] in self._state.jobs:
                return [AcceptBlocks([0])]
        return out

    patch.setattr(Dispatcher, "handle", handle)


def accuse_the_overtaken_device(patch: pytest.MonkeyPatch) -> None:
    """The overtaken device is recorded as the one that returned the block, and is suspended if the block was wrong."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        out = honest(self, event, now_s)
        for told in out if isinstance(event, BlocksReturned) else []:
            if isinstance(told, CancelBlocks) and told.jobs[0] == event.jobs[0]:
                self._state.jobs[event.jobs[0]].device[event.blocks[0]] = told.devices[0]
        return out

    patch.setattr(Dispatcher, "handle", handle)


PLANTED = [
    forget_a_lost_block,
    accept_duplicate_answers,
    keep_lost_devices_able,
    count_the_overtaken_answer_too,
    accuse_the_overtaken_device,
]
ONLY_BY: dict[Plant, set[str]] = {
    count_the_overtaken_answer_too: {"overdue"},
    accuse_the_overtaken_device: {"overdue", "lie"},
}
FROM: dict[Plant, int] = {
    count_the_overtaken_answer_too: 8,  # the first world, 3, takes three times as long to shrink
    accuse_the_overtaken_device: 120,  # it needs a lie in an overdue block, which no world before 141 has
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found_and_shrunk_and_its_test_fails_in_the_same_way(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure(begin=FROM.get(plant, 0))
    assert failure.kind.startswith(("ChaosError", "InvariantBroken")), "the failure is the planted bug"
    smallest = shrink(operations, failure)
    assert len(smallest) <= 8 < len(operations), smallest
    assert {operation[0] for operation in smallest} >= ONLY_BY.get(plant, set()), smallest
    test = printed_test_fails_alike(smallest, failure, seed)
    monkeypatch.undo()
    test()  # without the bug the test passes
