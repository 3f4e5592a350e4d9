"""Promises of the loop's world: the same seed gives the same life, the server survives it, every kind of fault happens,
and a planted bug of each kind is found."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import zmq

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.errors import UserError
from agent.protocol.wire import Heartbeat, Message, Result, WireError, decode, send_frames
from ps.access.joining import JoinAdmission
from ps.access.standings import Standings
from ps.transport.attendance import Attendance
from ps.transport.heartbeats import Heartbeats
from ps.transport.membership import Membership
from ps.transport.peers import Peer
from ps.transport.receiving import Answers, Receiving
from ps.transport.server import Server
from ps.transport.shipping import Shipping
from ps.transport.standstill import Standstill
from testbed.faults import chaos
from testbed.faults.chaos import LOOP, Failure, Tally, failure_of, generate_loop, live_one, replay_loop, shrink
from testbed.faults.chaos_world import COMMON, ChaosError, Operation
from testbed.faults.loop_world import FAULTS, SERVER_FAULTS, LoopWorld

pytestmark = pytest.mark.slow

Plant = Callable[[pytest.MonkeyPatch], None]


def test_the_same_seed_gives_the_same_life() -> None:
    for seed in range(4):
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


def test_any_operation_can_be_left_out() -> None:
    """Otherwise shrinking would find failures of its own."""
    operations = generate_loop(7)
    for start in range(0, len(operations), 6):
        replay_loop(operations[:start] + operations[start + 6 :])
    replay_loop([])


# ---- planted bugs


def drop_what_a_full_buffer_refuses(patch: pytest.MonkeyPatch) -> None:
    """Slow reader: a message that was refused (EAGAIN) is taken for sent."""

    def send(socket: Any, frames: Sequence[Any], flags: int = 0) -> None:
        with contextlib.suppress(zmq.Again):
            send_frames(socket, frames, flags)

    patch.setattr("ps.transport.shipping.send_frames", send)


def lose_the_rest_of_a_stream(patch: pytest.MonkeyPatch) -> None:
    """Partial write: a block in chunks whose reader is slow is not resumed."""
    honest = Shipping.drain

    def drain(self: Shipping, peer: Peer) -> bool:
        stands = honest(self, peer)
        if peer.outbox and peer.streams:
            peer.streams.popleft()
        return stands

    patch.setattr(Shipping, "drain", drain)


def take_one_connection_for_another(patch: pytest.MonkeyPatch) -> None:
    """Reordering: of two results that are read one after the other, the second is taken for the first one's."""
    honest = Receiving._receive

    def receive(self: Receiving, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        before = len(self._results)
        honest(self, identity, frames)
        if 0 < before < len(self._results):
            self._results[-1] = (self._results[-2][0], self._results[-1][1])

    patch.setattr(Receiving, "_receive", receive)


def count_silence_in_seconds(patch: pytest.MonkeyPatch) -> None:
    """Pause: whoever was not heard for some seconds is lost, although the server did not listen."""
    heard_s: dict[tuple[int, bytes], float] = {}
    receive, honest = Receiving._receive, Heartbeats.beat

    def hear(self: Receiving, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        heard_s[id(self._peers), identity] = self._outside.now_s()
        receive(self, identity, frames)

    def beat(self: Heartbeats, heard: bool) -> None:
        honest(self, heard)
        now_s = self._outside.now_s()
        for peer in list(self._peers.values()):
            if now_s - heard_s[id(self._peers), peer.identity] > SILENT_AFTER * self.every_s:
                self._membership.lose(peer, "silent")

    patch.setattr(Receiving, "_receive", hear)
    patch.setattr(Heartbeats, "beat", beat)


def count_all_time(patch: pytest.MonkeyPatch) -> None:
    """Clock jump: the time that nobody had makes everything overdue."""
    patch.setattr(Standstill, "look", lambda self, wall_s, worked_s, waited_s=0.0: 0.0)


def end_when_the_disk_is_full(patch: pytest.MonkeyPatch) -> None:
    def change(self: JoinAdmission, how: Any) -> None:
        assert self._access is not None
        self._access.soon(lambda book: how(book)[0])

    def complain(self: Standings, error: UserError) -> None:
        raise error

    patch.setattr(JoinAdmission, "_change", change)
    patch.setattr(Standings, "_complain", complain)


def read_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ps.transport.receiving.MESSAGES_PER_TURN", 1 << 30)


def say_nothing_to_the_quiet(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat is not sent if there is nothing else to say."""
    honest = Shipping.send

    def send(self: Shipping, peer: Peer, message: Message) -> bool:
        return True if isinstance(message, Heartbeat) else honest(self, peer, message)

    patch.setattr(Shipping, "send", send)


def keep_the_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ps.transport.heartbeats.SILENT_AFTER", 1 << 30)


def keep_the_old_connection(patch: pytest.MonkeyPatch) -> None:
    """Rejoin: a device that comes by another connection is there twice."""
    patch.setattr(Attendance, "moved", lambda self, about, identity: b"")


def count_answers_of_the_old_connection(patch: pytest.MonkeyPatch) -> None:
    """Rejoin: what comes over a connection that was given up is written into the product, whatever the dispatcher
    says."""
    given_up: dict[tuple[int, bytes], tuple[Peer, list[int]]] = {}
    lose, receive, answered = Membership.lose, Receiving._receive, Server._answered

    def remember(self: Membership, peer: Peer, reason: str) -> None:
        given_up[id(self._peers), peer.identity] = peer, list(peer.ids)
        lose(self, peer, reason)

    def hear(self: Receiving, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        if identity not in self._peers and (stale := given_up.get((id(self._peers), identity))) is not None:
            with contextlib.suppress(WireError):
                message = decode(frames[1:])
                if isinstance(message, Result):
                    stale[0].ids = stale[1]
                    self._results.append((stale[0], message))
                    return
        receive(self, identity, frames)

    def accept(self: Server, batch: list[tuple[Peer, Result]]) -> None:
        stale = [(peer, message) for peer, message in batch if peer.identity not in self.peers]
        answered(self, [one for one in batch if one not in stale])
        answers = Answers.of(stale, self._jobs, self._now_ns())
        answers.accept([n for n, place in enumerate(answers.places) if place[0]], self.totals, self.records)

    patch.setattr(Membership, "lose", remember)
    patch.setattr(Receiving, "_receive", hear)
    patch.setattr(Server, "_answered", accept)


def accept_what_comes_twice(patch: pytest.MonkeyPatch) -> None:
    """An answer that comes a second time is written and counted a second time, as long as its product is open."""
    honest = Server._answered

    def answered(self: Server, batch: list[tuple[Peer, Result]]) -> None:
        seen: set[tuple[int, int, int]] = self.__dict__.setdefault("seen", set())
        answers = Answers.of(batch, self._jobs, self._now_ns())
        keys = list(zip(answers.good.devices, answers.good.jobs, answers.good.blocks, strict=True))
        again = [n for n, key in enumerate(keys) if key in seen and answers.places[n][0] is not None]
        seen.update(keys)
        answers.accept(again, self.totals, self.records)
        honest(self, batch)

    patch.setattr(Server, "_answered", answered)


PLANTED: dict[Plant, str] = {
    drop_what_a_full_buffer_refuses: "",
    lose_the_rest_of_a_stream: "",
    take_one_connection_for_another: "",
    count_silence_in_seconds: "lives and was lost",
    count_all_time: "only the server or its clock stood still",
    end_when_the_disk_is_full: "No space left",
    read_without_limit: "more than its budget",
    say_nothing_to_the_quiet: "has not heard from the server",
    keep_the_silent: "is silent, and was not lost",
    keep_the_old_connection: "connections at the same time",
    count_answers_of_the_old_connection: "operations count",
    accept_what_comes_twice: "operations count",
}


def first_failure(most: int = 60) -> tuple[int, list[Operation], Failure]:
    for seed in range(most):
        if broken := live_one(seed, Tally(), LOOP):
            return seed, *broken
    raise AssertionError(f"{most} worlds, and the bug was not found")


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure()
    print(f"seed {seed}: {failure.text}")
    assert PLANTED[plant] in failure.text
    monkeypatch.undo()
    replay_loop(operations)  # it is the planted bug that is found


@pytest.mark.parametrize(
    ("plant", "cause"),
    [(count_silence_in_seconds, {"jump", "pause", "hitch"}), (count_all_time, {"jump", "pause"})],
)
def test_it_is_shrunk_and_its_test_fails_in_the_same_way(
    plant: Plant, cause: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure()
    smallest = shrink(operations, failure, 300, LOOP)
    assert len(smallest) <= 10 < len(operations), smallest
    assert {operation[0] for operation in smallest} & cause, smallest
    shrunk = failure_of(smallest, kind=LOOP)
    assert shrunk is not None
    assert shrunk.kind == failure.kind
    namespace: dict[str, Any] = {}
    exec(chaos.as_test(smallest, shrunk, seed, LOOP), namespace)
    test = namespace[f"test_the_world_of_seed_{seed}"]
    with pytest.raises(Exception) as caught:  # noqa: PT011 what it raises is compared below
        test()
    assert f"{type(caught.value).__name__}: {caught.value}" == shrunk.text
    monkeypatch.undo()
    test()


# ---- worlds that broke once


def test_a_device_that_left_keeps_nothing() -> None:
    # ChaosError: all is over, and this is left behind: pieces of {'kind': 'pod'}: 1
    replay_loop(
        [
            ("pod", [COMMON]),
            ("enrolled", [COMMON]),
            ("run", 6),
            ("leave", 0, 0),
            ("submit", [(1, 1, 1, 1, True, None)]),
            ("vanish", 0, 0),
        ]
    )


def test_one_late_first_answer_does_not_make_all_others_wait() -> None:
    # ChaosError: products [1] do not end although an able device is there and answers
    small = (1e9, 1e-3, 1e7, 1e7, 0.002, 5000, 2)
    replay_loop(
        [
            ("enrolled", [COMMON]),
            ("local", [small]),
            ("run", 6),
            ("mute", 0, 61035),
            ("submit", [(1, 1, 1, 1, True, None), (1, 1, 1, 1, True, None)]),
            ("freeze", 61, 1500),
        ]
    )


def test_who_says_that_it_leaves_has_left_also_if_its_end_is_noticed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreachable: list[Peer] = []
    honest = Membership.unreachable

    def found(self: Membership, *peers: Peer) -> None:
        unreachable.extend(peers)
        honest(self, *peers)

    monkeypatch.setattr(Membership, "unreachable", found)
    # the server is stopped on its way to sending; meanwhile the device says LEAVE and ends its connection
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


def test_what_waits_for_a_device_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # ChaosError: 69 messages wait for process-2
    slow, small = (1e9, 1e-3, 1e7, 1e7, 0.002, 2500, 4), (1e9, 1e-3, 1e7, 1e7, 0.002, 5000, 2)
    world: list[Operation] = [
        ("local", [slow]),
        ("local", [slow]),
        ("local", [small]),
        ("run", 5),
        ("submit", [(1, 3, 78, 3, True, None)]),
        ("late", 0, 1500),
        ("run", 1500),
        ("submit", [(1, 1, 1, 1, True, None), (1, 1, 137, 11, True, None), (1, 8, 149, 10, True, 2)]),
        ("submit", [(1, 11, 124, 9, False, 0), (2, 12, 2, 10, False, None), (1, 8, 4, 5, True, 1)]),
        ("submit", [(1, 1, 95, 3, False, None), (1, 5, 118, 12, True, None), (2, 11, 119, 9, True, None)]),
        ("submit", [(2, 10, 2, 7, True, 2)]),
        ("freeze", 74, 8000),
    ]
    assert replay_loop(world).seen["connections that did not read"] == 1
    monkeypatch.setattr(Peer, "does_not_read", False)
    with pytest.raises(ChaosError, match="messages wait for process-2"):
        replay_loop(world)


def test_time_is_the_worlds_alone() -> None:
    """Hours of jumps and pauses take no real time, and a life is counted in turns."""
    world = replay_loop([("pod", [COMMON]), ("run", 50), ("pause", 20_000, 0), ("run", 500), ("jump", 3600_000)])
    assert world.network.now > 20.0
    assert world.faults == Counter({"pause": 1, "jump": 1})
    assert world.events < 1000
