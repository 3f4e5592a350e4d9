"""Promises of the loop world: the same seed gives the same life, the server survives it, and every kind of fault
happens. That a planted bug of each kind is found: tests/ps/transport/test_loop_bugs.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agent.protocol.wire import Leave, Result, encode
from ps.transport.membership import Membership
from ps.transport.peers import Peer
from ps.transport.receiving import Answers
from testbed.faults.chaos import LOOP, Tally, failure_of, generate_loop, replay_loop
from testbed.faults.chaos_world import COMMON, ChaosError
from testbed.faults.loop_world import FAULTS, SERVER_FAULTS, LoopWorld

pytestmark = pytest.mark.slow


def test_the_same_seed_gives_the_same_life() -> None:
    for seed in range(2):
        assert generate_loop(seed) == generate_loop(seed)
        assert LoopWorld(generate_loop(seed)).live().trace == LoopWorld(generate_loop(seed)).live().trace
    assert LoopWorld(generate_loop(0)).live().trace != LoopWorld(generate_loop(1)).live().trace


def test_the_server_survives_and_every_kind_of_fault_happens() -> None:
    tally = Tally()
    for seed in range(1000, 1060):
        assert failure_of(generate_loop(seed), tally, LOOP) is None, f"seed {seed}"
    assert set(tally.faults) == {*FAULTS, *SERVER_FAULTS}
    assert min(tally.faults.values()) >= 5, tally.faults
    for what in (
        "messages that a full buffer refused",
        "messages that overtook others",
        "messages that arrived in parts",
        "writes to a full disk",
        "locks that another process had",
        "descriptors used again",
        "connections cut by the server",
        "connections lost",
        "heard Cancel",
        "heard Refused",
    ):
        assert tally.seen[what] >= 5, what
    assert tally.seen["products done"] >= 500


def test_the_server_survives_when_products_that_are_ready_together_begin_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps.transport.intake.BLOCKS_PER_TURN", 0)
    tally = Tally()
    for seed in range(2000, 2014):
        assert failure_of(generate_loop(seed), tally, LOOP) is None, f"seed {seed}"
    assert tally.seen["products done"] > 100


def test_the_server_survives_without_any_one_operation() -> None:
    """Otherwise shrinking would find new failures."""
    operations = generate_loop(7)
    for start in range(0, len(operations), 6):
        replay_loop(operations[:start] + operations[start + 6 :])
    replay_loop([])


# ---- worlds that once broke


def test_a_device_that_left_keeps_no_pieces() -> None:
    # ChaosError: all is over, and this is left behind: pieces of {'kind': 'pod'}: 1
    world = replay_loop(
        [
            ("pod", [COMMON]),
            ("enrolled", [COMMON]),
            ("run", 6),
            ("leave", 0, 0),
            ("submit", [(1, 1, 1, 1, True, None)]),
            ("vanish", 0, 0),
        ]
    )
    assert world.faults == Counter({"leave": 1, "vanish": 1})
    assert world.seen["products done"] == 1


def test_one_late_first_answer_does_not_delay_all_other_blocks() -> None:
    # ChaosError: products [1] do not end although an able device is there and answers
    small = (1e9, 1e-3, 1e7, 1e7, 0.002, 5000, 2)
    world = replay_loop(
        [
            ("enrolled", [COMMON]),
            ("local", [small]),
            ("run", 6),
            ("mute", 0, 61035),
            ("submit", [(1, 1, 1, 1, True, None), (1, 1, 1, 1, True, None)]),
            ("freeze", 61, 1500),
        ]
    )
    assert world.faults == Counter({"mute": 1, "freeze": 1})
    assert world.seen["products done"] == 2
    late = [what.partition(" ")[0] for _, what in world.trace if "has not answered a block" in what]
    assert len(late) == len(set(late)) == 2  # the first answer of each of the two was late


def test_devices_that_all_fall_silent_after_they_have_answered_are_reported() -> None:
    # ChaosError: products wait for a device that can go on, and no notice was given
    world = replay_loop(
        [
            ("pod", [COMMON, COMMON]),
            ("run", 3),
            ("submit", [(1, 1, 1, 2, True, None)]),
            ("run", 6),
            ("submit", [(1, 1, 1, 1, True, None)]),
            ("mute", 0, 61035),
        ]
    )
    assert world.faults == Counter({"mute": 1})
    assert world.seen["products done"] == 2
    assert [what for _, what in world.trace if "has not answered a block" in what]


def test_a_server_stopped_while_it_reads_judges_nothing_before_it_has_read_on() -> None:
    # ChaosError: blocks were taken for overdue, and only the server or its clock stood still
    small = (1e9, 1e-3, 1e7, 1e7, 0.002, 2500, 4)
    slow = (1e8, 1e-3, 5e6, 5e6, 0.002, 1 << 40, 4)
    world = replay_loop(
        [
            ("enrolled", [small]),
            ("enrolled", [slow]),
            ("submit", [(1, 11, 78, 11, True, None), (1, 1, 1, 1, True, None)]),
            ("submit", [(1, 1, 1, 1, True, None), (2, 7, 78, 5, True, None), (1, 1, 1, 1, True, None)]),
            ("submit", [(1, 3, 78, 8, True, None), (1, 1, 1, 1, True, None)]),
            ("run", 375),
            ("submit", [(1, 4, 51, 9, True, None), (2, 11, 8, 12, True, None), (1, 1, 1, 2, True, None)]),
            ("run", 20),
            ("pause", 23, 0),
            ("pause", 375, 1),
            ("run", 1),
        ]
    )
    assert world.faults == Counter({"pause": 2})
    assert world.server.late_blocks_helped == 0
    assert world.seen["products done"] == 10


def test_a_device_that_says_leave_has_left_even_if_its_closed_connection_is_noticed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreachable: list[Peer] = []
    honest = Membership.unreachable

    def found(self: Membership, *peers: Peer) -> None:
        unreachable.extend(peers)
        honest(self, *peers)

    monkeypatch.setattr(Membership, "unreachable", found)
    # the server is stopped before it sends; meanwhile the device sends LEAVE and closes its connection
    world = replay_loop(
        [
            ("pod", [COMMON]),
            ("enrolled", [COMMON]),
            ("run", 50),
            ("pause", 1000, 2),
            ("submit", [(1, 12, 100, 12, True, None)]),
            ("leave", 1, 0),
            ("run", 20),
        ]
    )
    assert unreachable
    assert world.server.totals.lost_devices == 0


def test_messages_waiting_for_a_device_that_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # ChaosError: 69 messages wait for process-2
    world = generate_loop(226)
    assert replay_loop(world).seen["connections that did not read"]
    monkeypatch.setattr(Peer, "does_not_read", False)
    with pytest.raises(ChaosError, match="messages wait for process-2"):
        replay_loop(world)


def test_time_is_only_the_worlds_own() -> None:
    """Hours of jumps and pauses take no real time, and a life is counted in turns."""
    world = replay_loop([("pod", [COMMON]), ("run", 50), ("pause", 20_000, 0), ("run", 500), ("jump", 3600_000)])
    assert world.network.now > 20.0
    assert world.faults == Counter({"pause": 1, "jump": 1})
    assert world.events < 1000


def test_a_device_that_leaves_while_answers_are_handled_has_left_and_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message and the end of its connection come after the socket was empty and before the server sends to it."""
    world = LoopWorld([("enrolled", [COMMON]), ("enrolled", [COMMON]), ("run", 50)])
    honest = Answers.of

    def handled(batch: Sequence[tuple[Peer, Result]], *others: Any) -> Answers:
        line = world._processes[0].line
        if line is not None and any(peer.identity == line.connection.name for peer, _ in batch):
            leave = encode(Leave(np.zeros(1, np.uint32), "its owner needs it"))
            line.connection.unread.append([bytes(frame) for frame in leave])
            world.network.router.ready(line.connection)
            line.excused = world._processes[0].left = True
            line.connection.end()
        return honest(batch, *others)

    monkeypatch.setattr(Answers, "of", handled)
    for operation in world._operations:
        world._do(operation)
    world._submit([(1, 40, 16, 40, True, None)] * 8)
    world._run_until_done()
    assert world._processes[0].left
    assert world.server.totals.lost_devices == 0
    assert world.server.devices == 1
