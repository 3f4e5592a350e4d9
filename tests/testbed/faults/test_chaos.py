"""Promises of testbed.faults.chaos: the same seed gives the same world, sound code survives it, and a planted bug is
found, shrunk to a handful of operations, and printed as a test that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ps.scheduling.assignments import Assignments
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import AcceptBlocks, BlocksReturned, CancelBlocks, DevicesLeft, JobChecked
from ps.scheduling.state import CUT, Turn
from testbed.faults import chaos
from testbed.faults.chaos import Failure, Tally, failure_of, generate, live_one, replay, shrink
from testbed.faults.chaos_world import COMMON, FAULTS, HUGE, STRAYS, Operation, World

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_operations_and_the_same_trace() -> None:
    for seed in range(5):
        assert generate(seed) == generate(seed)
        assert World(generate(seed)).live().trace == World(generate(seed)).live().trace
    assert World(generate(0)).live().trace != World(generate(1)).live().trace


@pytest.mark.slow
def test_sound_code_survives_and_every_kind_of_fault_happens() -> None:
    tally = Tally()
    for seed in range(10_000, 10_240):
        assert failure_of(generate(seed, length=40), tally) is None, f"seed {seed}"
    assert tally.worlds == 240
    assert set(tally.faults) == {*FAULTS, *STRAYS}
    assert min(tally.faults.values()) >= 20
    assert sum(tally.faults[kind] for kind in STRAYS) <= 0.2 * tally.faults.total()
    for what in ("overdue blocks sent to others", "blocks cancelled", "wrong blocks found", "devices suspended"):
        assert tally.seen[what] >= 20, what


def test_any_operation_can_be_left_out() -> None:
    """Otherwise shrinking would find failures of its own."""
    operations = generate(7, length=40)
    for start in range(0, len(operations), 3):
        replay(operations[:start] + operations[start + 3 :])
    for kind in {operation[0] for operation in operations}:
        replay([operation for operation in operations if operation[0] != kind])
    replay([])


def forget_a_lost_block(patch: pytest.MonkeyPatch) -> None:
    """One block of those that a device had is not cut again."""
    honest = Assignments.cut

    def cut(self: Assignments, lost: list[tuple[int, int]], turn: Turn, avoid: int = -1, loss: int = 0) -> None:
        for job_id, block in lost[:1] if len(lost) > 1 else []:
            self._state.jobs[job_id].state[block] = CUT
            self._state.jobs[job_id].open -= 1
        honest(self, lost[1:] if len(lost) > 1 else lost, turn, avoid, loss)

    patch.setattr(Assignments, "cut", cut)


def accept_everything_in_a_message(patch: pytest.MonkeyPatch) -> None:
    """An answer that comes once more is accepted once more."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        out = honest(self, event, now_s)
        if isinstance(event, BlocksReturned) and not out and event.jobs[0] in self._state.jobs and event.blocks[0] == 0:
            return [AcceptBlocks([0])]
        return out

    patch.setattr(Dispatcher, "handle", handle)


def keep_the_dead_in_mind(patch: pytest.MonkeyPatch) -> None:
    """A device that has left still counts among the able ones."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        able = self._standing.able
        out = honest(self, event, now_s)
        if isinstance(event, DevicesLeft) and len(able) > 2:
            self._standing.able = able
        return out

    patch.setattr(Dispatcher, "handle", handle)


def count_the_loser_too(patch: pytest.MonkeyPatch) -> None:
    """An overdue block was given to a second device: the slower one's late answer is accepted, too."""
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


def accuse_the_loser(patch: pytest.MonkeyPatch) -> None:
    """Whoever is overtaken is taken for the one who returned the block, and suspended if that was wrong."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        out = honest(self, event, now_s)
        for told in out if isinstance(event, BlocksReturned) else []:
            if isinstance(told, CancelBlocks) and told.jobs[0] == event.jobs[0]:
                self._state.jobs[event.jobs[0]].device[event.blocks[0]] = told.devices[0]
        return out

    patch.setattr(Dispatcher, "handle", handle)


def leave_a_wrong_block(patch: pytest.MonkeyPatch) -> None:
    """Of the blocks that were found wrong one is not done again."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        if isinstance(event, JobChecked) and event.wrong:
            event = JobChecked(event.job, event.wrong[:-1])
        return honest(self, event, now_s)

    patch.setattr(Dispatcher, "handle", handle)


PLANTED = [
    forget_a_lost_block,
    accept_everything_in_a_message,
    keep_the_dead_in_mind,
    count_the_loser_too,
    accuse_the_loser,
    leave_a_wrong_block,
]
ONLY_BY: dict[Plant, set[str]] = {
    count_the_loser_too: {"overdue"},
    accuse_the_loser: {"overdue", "lie"},
    leave_a_wrong_block: {"lie"},
}
FROM: dict[Plant, int] = {accuse_the_loser: 120}  # it takes a lie in an overdue block, which no world before 141 has


def first_failure(most: int = 200, begin: int = 0) -> tuple[int, list[Operation], Failure]:
    for seed in range(begin, begin + most):
        if broken := live_one(seed, Tally()):
            return seed, *broken
    raise AssertionError(f"{most} worlds, and the bug was not found")


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found_and_shrunk_and_its_test_fails_in_the_same_way(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure(begin=FROM.get(plant, 0))
    assert failure.kind.startswith(("ChaosError", "InvariantBroken")), "it is the planted bug that is found"
    smallest = shrink(operations, failure)
    assert len(smallest) <= 8 < len(operations), smallest
    assert {operation[0] for operation in smallest} >= ONLY_BY.get(plant, set()), smallest
    shrunk = failure_of(smallest)
    assert shrunk is not None
    assert shrunk.kind == failure.kind

    namespace: dict[str, Any] = {}
    exec(chaos.as_test(smallest, shrunk, seed), namespace)
    test = namespace[f"test_the_world_of_seed_{seed}"]
    with pytest.raises(Exception) as caught:  # noqa: PT011 what it raises is compared below
        test()
    assert f"{type(caught.value).__name__}: {caught.value}" == shrunk.text
    monkeypatch.undo()
    test()  # the bug is gone, and the test passes


def test_nothing_can_be_left_out_of_what_was_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_a_wrong_block(monkeypatch)
    _, operations, failure = first_failure()
    smallest = shrink(operations, failure)
    for position in range(len(smallest)):
        found = failure_of(smallest[:position] + smallest[position + 1 :])
        assert found is None or found.kind != failure.kind


def test_a_crash_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Dispatcher, *_: Any) -> None:
        raise KeyError(17)

    monkeypatch.setattr(Dispatcher, "_left", crash)
    assert failure_of([("join", [COMMON]), ("leave", [0])]) == Failure("KeyError: #", "KeyError: 17")


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--seconds", "0.01", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "nothing broke: 2 worlds" in said
    assert "dispatcher: 1 worlds" in said
    assert "loop: 1 worlds" in said


def test_the_command_prints_a_test_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_a_wrong_block(monkeypatch)
    seed, _, _ = first_failure()
    assert chaos.main(["--seconds", "0.01", "--seed", str(seed)]) == 1
    out, err = capsys.readouterr()
    compile(out, "test", "exec")
    assert f"--seed {seed}" in err


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--seconds", "nan"], ["--seed", "-1"], ["--seed", "x"]])
def test_a_wrong_option_ends_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(wrong)
    assert ended.value.code == 2


# ---- worlds that broke once


def test_a_suspect_does_what_nobody_else_can() -> None:
    # ChaosError: jobs [1] do not end although an able device lives
    weak = (1e9, 0.0, 1e7, 1e7, 0.0, 8, 4)
    replay(
        [
            ("history", 2.0),
            ("join", [weak, (8e10, 0.0, 3e7, 3e8, 0.0, 200, 4), weak, COMMON, weak]),
            ("submit", [(1, 1, 1, 1, True, None)]),
            ("overdue", 0, 1.0),
            ("leave", [828]),
            ("submit", [(1, 1, 1, 1, True, None)]),
        ]
    )


def test_nothing_is_cancelled_before_it_is_sent() -> None:
    # ChaosError: block 4 of job 3 was cancelled and is not under way on device 10 (pieces of overdue blocks)
    replay(
        [
            ("planner", "packed"),
            ("history", 2.0),
            ("join", [(3688182251.0, 0.0, 9511324.0, 253426803.0, 0.0, HUGE, 4), COMMON]),
            ("submit", [(1, 1, 78, 3, True, 3)]),
            ("run", 1),
            ("join", [COMMON, COMMON, COMMON]),
            ("join", [COMMON, COMMON, (10345414079.0, 0.0, 153769139.0, 7887854.0, 0.0, 2500, 1)]),
            ("submit", [(1, 2, 1, 1, True, 3)]),
            ("join", [COMMON, COMMON, (743158768274.0, 0.0, 87219736.0, 74216407.0, 0.0, HUGE, 2)]),
            ("submit", [(1, 1, 1, 1, True, None), (3, 3, 1, 1, True, None)]),
            ("overdue", 123, 0.1),
        ]
    )


def test_what_nobody_waits_for_is_done_by_whoever_can_when_others_are_busy_beside_the_pass() -> None:
    # ChaosError: jobs [1] do not end although an able device lives
    weak = (993646734680.0, 0.0, 107617628.0, 23870.0, 0.05, 8, 2)
    replay(
        [
            ("join", [weak]),
            ("begin", [(1, 1, 1, 1, False, None), (1, 1, 1, 1, False, None)]),
            ("join", [COMMON]),
        ]
    )
