"""Promises of testbed.faults.chaos: the same seed gives the same world, sound code survives it, and a planted bug is
found, shrunk to a handful of operations, and printed as a test that fails in the same way."""

from __future__ import annotations

from typing import Any

import pytest
from planted_bugs import first_failure, printed_test_fails_alike

from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import DevicesLeft, JobChecked
from testbed.faults import chaos
from testbed.faults.chaos import Failure, Tally, failure_of, generate, replay, shrink
from testbed.faults.chaos_world import COMMON, FAULTS, HUGE, STRAYS, World


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


def test_a_world_survives_without_any_one_operation() -> None:
    """Otherwise shrinking would find new failures."""
    operations = generate(7, length=40)
    for start in range(0, len(operations), 3):
        replay(operations[:start] + operations[start + 3 :])
    for kind in {operation[0] for operation in operations}:
        replay([operation for operation in operations if operation[0] != kind])
    replay([])


def leave_a_wrong_block(patch: pytest.MonkeyPatch) -> None:
    """One of the blocks that were found wrong is not computed again."""
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        if isinstance(event, JobChecked) and event.wrong:
            event = JobChecked(event.job, event.wrong[:-1])
        return honest(self, event, now_s)

    patch.setattr(Dispatcher, "handle", handle)


@pytest.mark.slow
def test_a_planted_bug_is_found_and_shrunk_and_its_test_fails_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs inside the dispatcher: tests/ps/scheduling/test_dispatcher_bugs.py."""
    leave_a_wrong_block(monkeypatch)
    seed, operations, failure = first_failure()
    smallest = shrink(operations, failure)
    assert len(smallest) <= 8 < len(operations), smallest
    assert "lie" in {operation[0] for operation in smallest}, smallest
    test = printed_test_fails_alike(smallest, failure, seed)
    monkeypatch.undo()
    test()


def test_a_shrunk_world_needs_each_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_a_wrong_block(monkeypatch)
    _, operations, failure = first_failure()
    smallest = shrink(operations, failure)
    for position in range(len(smallest)):
        found = failure_of(smallest[:position] + smallest[position + 1 :])
        assert found is None or found.kind != failure.kind


def test_a_crash_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Dispatcher.handle

    def handle(self: Dispatcher, event: Any, now_s: float) -> list[Any]:
        if isinstance(event, DevicesLeft):
            raise KeyError(17)
        return honest(self, event, now_s)

    monkeypatch.setattr(Dispatcher, "handle", handle)
    assert failure_of([("join", [COMMON]), ("leave", [0])]) == Failure("KeyError: #", "KeyError: 17")


def test_the_command_reports_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
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


# ---- worlds that once broke


def test_a_suspect_computes_what_no_other_device_can() -> None:
    # ChaosError: jobs [1] do not end although an able device lives
    weak = (1e9, 0.0, 1e7, 1e7, 0.0, 8, 4)
    world = replay(
        [
            ("history", 2.0),
            ("join", [weak, (8e10, 0.0, 3e7, 3e8, 0.0, 200, 4), weak, COMMON, weak]),
            ("submit", [(1, 1, 1, 1, True, None)]),
            ("overdue", 0, 1.0),
            ("leave", [828]),
            ("submit", [(1, 1, 1, 1, True, None)]),
        ]
    )
    outcomes = [outcome for _, _, outcome in world.trace]
    suspects = {device for outcome in outcomes for named in outcome.named for device in named.devices}
    assert suspects
    assert {sent.key[0] for outcome in outcomes for sent in outcome.sent if sent.key[1] == 1} == suspects


def test_no_block_is_cancelled_before_it_is_sent() -> None:
    # ChaosError: block 4 of job 3 was cancelled and is not under way on device 10 (pieces of overdue blocks)
    world = replay(
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
    assert world.seen["overdue blocks sent to others"]
    assert world.seen["blocks cancelled"]


def test_deferred_products_that_no_present_device_can_do_are_done_by_the_next_one() -> None:
    # ChaosError: jobs [1] do not end although an able device lives
    weak = (993646734680.0, 0.0, 107617628.0, 23870.0, 0.05, 8, 2)
    world = replay(
        [
            ("join", [weak]),
            ("begin", [(1, 1, 1, 1, False, None), (1, 1, 1, 1, False, None)]),
            ("join", [COMMON]),
        ]
    )
    outcomes = [outcome for _, _, outcome in world.trace]
    assert [outcome.waiting for outcome in outcomes if outcome.waiting] == [[0, 1]]
    assert {sent.key[0] for outcome in outcomes for sent in outcome.sent} == {1}
    assert sorted(job for outcome in outcomes for job in outcome.finished) == [0, 1]


def test_a_block_that_others_can_do_does_not_wait_behind_one_that_only_silent_devices_can_do() -> None:
    # ChaosError: jobs [3, 7, 9] do not end however often the server looks at the clock
    world = replay(
        [
            ("planner", "packed"),
            ("history", 1.0),
            (
                "join",
                [
                    (219152767.0, 0.001, 556774585.0, 99761.0, 0.0, 8, 2),
                    (83068373934.0, 0.0, 1611201.0, 62072230.0, 0.05, 200, 2),
                    (818179681467.0, 0.0, 3918988.0, 21925.0, 0.05, 1600, 1),
                    (1000000000.0, 0.0001, 10000000.0, 10000000.0, 0.01, 1099511627776, 2),
                    (1000000000.0, 0.0001, 10000000.0, 10000000.0, 0.01, 1099511627776, 2),
                    (1000000000.0, 0.0001, 10000000.0, 10000000.0, 0.01, 1099511627776, 2),
                ],
            ),
            ("join", [(1476377.0, 0.0, 26179.0, 42346819.0, 0.05, 2500, 1)]),
            ("join", [(1000000000.0, 0.0001, 10000000.0, 10000000.0, 0.01, 1099511627776, 2)]),
            ("leave", [532]),
            ("leave", [421]),
            (
                "newcomers",
                [
                    (22532346.0, 0.0, 111794983.0, 59478161.0, 0.05, 1600, 1),
                    (33381873.0, 0.0, 167941974.0, 4652077.0, 0.05, 200, 2),
                ],
            ),
            ("submit", [(1, 1, 1, 1, True, None)]),
            (
                "join",
                [
                    (205299138.0, 0.0, 34734.0, 118941.0, 0.05, 200, 1),
                    (89519031.0, 0.001, 214937386.0, 76513.0, 0.0, 2500, 1),
                    (1000000000.0, 0.0001, 10000000.0, 10000000.0, 0.01, 1099511627776, 2),
                ],
            ),
            ("lie", 0),
            ("run", 3),
            ("begin", [(1, 1, 1, 1, False, None), (1, 1, 1, 1, False, None)]),
            ("leave", [423, 64]),
            ("submit", [(1, 3, 67, 1, False, None), (1, 1, 5, 4, True, None)]),
            ("lost", 931),
            ("overdue", 254, 6.0),
            ("newcomers", [(6519247.0, 0.0, 441627920.0, 6860352.0, 0.0, 8, 1)]),
            ("mute", [249, 538]),
            ("submit", [(1, 3, 2, 4, False, None), (1, 1, 2, 4, False, None)]),
            ("run", 2),
            ("refuse", 489),
            ("overdue", 0, 6.0),
            ("submit", [(1, 3, 78, 1, False, None), (1, 1, 1, 2, True, None)]),
            ("overdue", 0, 6.0),
            ("lie", 3),
            ("submit", [(1, 1, 5, 5, False, None)]),
        ]
    )
    assert world.faults["mute"] == 2
    assert {job for _, _, outcome in world.trace for job in outcome.finished} == set(range(10))
