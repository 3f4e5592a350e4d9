"""Bugs inside the server's loop that chaos must find, one of each kind: slow readers, partial writes, reordering,
pauses, clock jumps, a full disk, budgets, heartbeats and devices that join again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
from planted_bugs import Plant, first_failure, printed_test_fails_alike

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.wire import Heartbeat, Message, Result, WireError, decode, send_frames
from ps.transport.attendance import Attendance
from ps.transport.heartbeats import Heartbeats
from ps.transport.membership import Membership
from ps.transport.peers import Peer
from ps.transport.receiving import Answers, Receiving
from ps.transport.server import Server
from ps.transport.shipping import Shipping
from ps.transport.standstill import Standstill
from testbed.faults.chaos import LOOP, replay_loop, shrink

pytestmark = pytest.mark.slow


def drop_messages_that_a_full_buffer_refuses(patch: pytest.MonkeyPatch) -> None:
    """Slow reader: a refused message (EAGAIN) is taken for sent."""

    def send(socket: Any, frames: Sequence[Any], flags: int = 0) -> None:
        with contextlib.suppress(zmq.Again):
            send_frames(socket, frames, flags)

    patch.setattr("ps.transport.shipping.send_frames", send)


def lose_the_rest_of_a_stream(patch: pytest.MonkeyPatch) -> None:
    """Partial write: a block in chunks is not resumed after its reader was slow."""
    honest = Shipping.drain

    def drain(self: Shipping, peer: Peer) -> bool:
        stands = honest(self, peer)
        if peer.outbox and peer.streams:
            peer.streams.popleft()
        return stands

    patch.setattr(Shipping, "drain", drain)


def take_one_connection_for_another(patch: pytest.MonkeyPatch) -> None:
    """Reordering: of two results read one after the other, the second is attributed to the first one's connection."""
    honest = Receiving._receive

    def receive(self: Receiving, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        before = len(self._results)
        honest(self, identity, frames)
        if 0 < before < len(self._results):
            self._results[-1] = (self._results[-2][0], self._results[-1][1])

    patch.setattr(Receiving, "_receive", receive)


def count_silence_in_seconds(patch: pytest.MonkeyPatch) -> None:
    """Pause: a peer that was not heard for some seconds is lost, although the server did not listen."""
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
    """Clock jump: time that passed for no device makes everything overdue."""
    patch.setattr(Standstill, "look", lambda self, wall_s, worked_s, waited_s=0.0: 0.0)


def end_when_the_disk_is_full(patch: pytest.MonkeyPatch) -> None:
    class Never(Exception):
        pass

    for module in ("joining", "standings"):  # what they would catch ends the server's thread
        patch.setattr(f"ps.access.{module}.UserError", Never)


def read_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ps.transport.receiving.MESSAGES_PER_TURN", 1 << 30)


def skip_heartbeats_to_idle_devices(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat is not sent if there is nothing else to send."""
    honest = Shipping.send

    def send(self: Shipping, peer: Peer, message: Message) -> bool:
        return True if isinstance(message, Heartbeat) else honest(self, peer, message)

    patch.setattr(Shipping, "send", send)


def keep_silent_devices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ps.transport.heartbeats.SILENT_AFTER", 1 << 30)


def keep_the_old_connection(patch: pytest.MonkeyPatch) -> None:
    """Rejoin: a device that returns on another connection counts twice."""
    patch.setattr(Attendance, "moved", lambda self, about, identity: b"")


def count_answers_of_the_old_connection(patch: pytest.MonkeyPatch) -> None:
    """Rejoin: answers from an abandoned connection are written into the product, whatever the dispatcher decides."""
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


def accept_duplicate_answers(patch: pytest.MonkeyPatch) -> None:
    """A duplicate answer is written and counted again, as long as its product is open."""
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
    drop_messages_that_a_full_buffer_refuses: "",
    lose_the_rest_of_a_stream: "",
    take_one_connection_for_another: "",
    count_silence_in_seconds: "lives and was lost",
    count_all_time: "only the server or its clock stood still",
    end_when_the_disk_is_full: "No space left",
    read_without_limit: "more than its budget",
    skip_heartbeats_to_idle_devices: "has not heard from the server",
    keep_silent_devices: "is silent, and was not lost",
    keep_the_old_connection: "connections at the same time",
    count_answers_of_the_old_connection: "operations count",
    accept_duplicate_answers: "operations count",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure(LOOP, most=60)
    print(f"seed {seed}: {failure.text}")
    assert PLANTED[plant] in failure.text
    monkeypatch.undo()
    replay_loop(operations)  # passes without the planted bug


@pytest.mark.parametrize(
    ("plant", "cause", "begin"),
    [
        (count_silence_in_seconds, {"jump", "pause", "hitch"}, 0),
        (count_all_time, {"jump", "pause"}, 8),  # the first world, 7, takes five times as long to shrink
    ],
)
def test_a_failure_is_shrunk_and_its_test_fails_in_the_same_way(
    plant: Plant, cause: set[str], begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    seed, operations, failure = first_failure(LOOP, most=60, begin=begin)
    smallest = shrink(operations, failure, 300, LOOP)
    assert len(smallest) <= 10 < len(operations), smallest
    assert {operation[0] for operation in smallest} & cause, smallest
    test = printed_test_fails_alike(smallest, failure, seed, LOOP)
    monkeypatch.undo()
    test()
