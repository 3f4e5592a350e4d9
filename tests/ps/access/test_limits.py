"""Limits for clients that are not admitted, and for what a joined device may send: the pure parts."""

from __future__ import annotations

import errno
import socket
from typing import cast

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from ps.access.admission import (
    LOCAL,
    MOST,
    MOST_SHUT_OUT_HERE_S,
    POD,
    TICKET,
    TICKET_S,
    Caller,
    ConnectionAdmission,
    NotNow,
    Refusals,
    Tickets,
)
from ps.access.allowance import SPARE_ANSWERS, SPARE_BYTES, SPARE_JOINS, SPARE_MESSAGES, Allowance
from ps.access.caller_sockets import CallerSockets
from ps.access.pending import Limits, PendingConnections
from ps.access.relay import CallRate, Relay

LIMITS = Limits(most=6, per_address=3, seconds=10.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.sampled_from(["come", "go", "speak"]))))
def test_pending_connections_stay_within_every_limit_and_none_stays_too_long(steps: list[tuple[int, str, str]]) -> None:
    pending, here = PendingConnections(LIMITS), {}
    for now_s, (who, address, what) in enumerate(steps):
        if what == "come":
            here[who] = (address, float(now_s))
            for gone in pending.came(who, address, now_s):
                assert gone != who, "the newest stays"
                del here[gone]
        elif what == "go":
            pending.gone(who)
            here.pop(who, None)
        elif who in here:
            pending.heard(who, now_s)
            here[who] = (here[who][0], float(now_s))
        for gone in pending.overdue(now_s):
            assert here.pop(gone)[1] <= now_s - LIMITS.seconds
        assert set(pending.all) == set(here)
        assert all(since_s > now_s - LIMITS.seconds for _, since_s in here.values())
        assert len(here) <= LIMITS.most
        assert all(sum(a == address for a, _ in here.values()) <= LIMITS.per_address for address in "abc")


def test_silent_connections_keep_no_other_client_out() -> None:
    pending = PendingConnections(LIMITS)
    for who in range(3):
        assert pending.came(who, "crowd", 0.0) == []
    for who in range(3, 6):
        assert pending.came(who, f"single-{who}", 0.0) == []
    assert pending.came(6, "new", 1.0) == [0], "the oldest of the address with the most connections"
    assert pending.came(7, "crowd", 1.0) == [1]
    assert pending.came(8, "new", 1.0, spare=1) == [], "a connection is expected"


def test_a_ticket_is_good_for_one_connection_and_a_short_time() -> None:
    tickets = Tickets()
    first, second = tickets.issue(0.0), tickets.issue(1.0)
    assert tickets.take(first, 2.0) == TICKET
    assert tickets.take(first, 2.0) is None
    assert tickets.take(second, 1.0 + TICKET_S) is None
    assert tickets.take("", 2.0) is None
    assert tickets.take("\ud800", 2.0) is None
    assert [tickets.take(tickets.of_the_run, at_s) for at_s in (0.0, 1e9)] == [POD, POD]
    many = [tickets.issue(3.0) for _ in range(MOST + 1)]
    assert tickets.take(many[0], 3.0) is None
    assert tickets.take(many[-1], 3.0) == TICKET


def test_a_ticket_outlasts_a_shut_out_of_this_machine_and_pods_are_let_in_meanwhile() -> None:
    """An honest agent's ticket was used up by the refusal, so that it could not come back with it."""
    now, tickets = [100.0], Tickets()
    admission = ConnectionAdmission(None, tickets, Refusals(lambda text: None), monotonic_s=lambda: now[0])
    ticket = tickets.issue(now[0])
    lasts_s = admission.charge(Caller("", of_the_run=False), 1000.0)
    assert lasts_s == MOST_SHUT_OUT_HERE_S
    for _ in range(5):  # the flood goes on
        now[0] += 0.9 * lasts_s
        with pytest.raises(NotNow):
            admission.user_id(LOCAL, b"PLAIN", [b"", ticket.encode()])
        admission.charge(Caller("", of_the_run=False), 1000.0)
    assert now[0] > 100.0 + TICKET_S
    assert admission.user_id(LOCAL, b"PLAIN", [b"", tickets.of_the_run.encode()]) is not None
    now[0] += lasts_s
    assert admission.user_id(LOCAL, b"PLAIN", [b"", ticket.encode()]) is not None


@given(st.lists(st.integers(1, 50), max_size=30))
def test_a_device_that_answers_its_blocks_and_sends_heartbeats_stays_within_its_allowance(blocks: list[int]) -> None:
    allowance, sent_bytes = Allowance(), 0
    for count in blocks:
        allowance.asked(count, 1000 * count)
        for _ in range(count):
            assert allowance.answered(1)
            sent_bytes += 4 * 1000 + 100
        allowance.beat()
        assert allowance.spoke()
        assert allowance.spoke()
        assert sent_bytes <= allowance.bytes


def test_a_device_that_sends_more_soon_exceeds_its_allowance() -> None:
    allowance = Allowance()
    assert [allowance.spoke() for _ in range(SPARE_MESSAGES + 1)][-2:] == [True, False]
    allowance = Allowance()
    assert [allowance.answered(1) for _ in range(SPARE_ANSWERS + 1)][-2:] == [True, False]
    assert [allowance.joined_again() for _ in range(SPARE_JOINS + 1)][-2:] == [True, False]
    for _ in range(10_000):
        allowance.beat()
    assert allowance.messages == SPARE_MESSAGES, "an unused allowance does not add up"
    assert Allowance().bytes == SPARE_BYTES


class _Scarce:
    """A listener with one client, and a kernel without a descriptor for a second socket."""

    def __init__(self) -> None:
        self.client, self.accepted = socket.socketpair()
        self.answered = False

    def setblocking(self, flag: bool) -> None:
        pass

    def fileno(self) -> int:
        return 1000

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.answered:
            raise BlockingIOError
        self.answered = True
        return self.accepted, ("127.0.0.1", 1)

    def close(self) -> None:
        self.client.close()


def test_a_gate_without_descriptors_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*kind: int) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    listener, rate = _Scarce(), CallRate((10.0, 10.0), (10.0, 10.0))
    with zmq.Context() as context:
        refusals = Refusals(lambda text: None)
        gate = Relay(cast("socket.socket", listener), CallerSockets(context).open, refusals, LIMITS, rate, 0.0)
        with monkeypatch.context() as patched:
            patched.setattr("ps.access.caller_sockets.socket.socket", none_left)
            assert gate.attend({listener.fileno(): zmq.POLLIN}, 0.0)
            listener.client.send(b"hello")
            assert gate.attend({listener.accepted.fileno(): zmq.POLLIN}, 0.0)
    assert listener.accepted.fileno() == -1, "its client is not left waiting"
    assert listener.client.recv(1) == b""
    gate.close()
