"""Promises of ps.transport.roster: a number means one device for as long as it may be referred to, and few numbers are
in use."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import Multiplication, Stranger, agents

from agent.protocol.profile import Profile, pack_profiles
from agent.protocol.wire import ANSWER, DONE, Leave, Probe, Refused, Result
from ps.transport.peers import NO_DEVICE, Peer
from ps.transport.roster import Roster

if TYPE_CHECKING:
    from conftest import Serve, Start, Until

PROFILE = Profile(1e9, 0.0, 1e8, 1e8, 0.01, 1 << 28, 4)

# a connection joins with a number of devices, one device leaves (having worked or not), or a connection is lost
comings_and_goings = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 100), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 100), st.sets(st.integers(0, 3))),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.slow
@given(comings_and_goings, st.integers(0, 2))
def test_a_number_means_one_device_and_the_roster_grows_only_with_devices_that_worked(
    events: list[tuple[Any, ...]], most_idle: int
) -> None:
    roster, joined, most_there = Roster(most_idle), 0, 0
    there: dict[int, tuple[Peer, int, str]] = {}  # number -> connection, index on that connection, name
    worked: dict[int, str] = {}
    for kind, which, *more in events:
        match kind:
            case "join":
                peer = Peer(b"%d" % joined, {})
                labels = [f"device {joined + i}" for i in range(which)]
                numbers = roster.enter(peer, labels, pack_profiles([PROFILE] * which)).devices
                assert not set(numbers) & (set(there) | set(worked)), "the number belongs to another device"
                there |= {n: (peer, index, label) for index, (n, label) in enumerate(zip(numbers, labels, strict=True))}
                joined += which
            case "leave" if there:
                number = sorted(there)[which % len(there)]
                _, _, label = there.pop(number)
                if more[0]:
                    worked[number] = label
                else:
                    roster.left_idle([number])
            case "lose" if there:
                peer = there[sorted(there)[which % len(there)]][0]
                mine = {number: one for number, one in there.items() if one[0] is peer}
                worked |= {number: one[2] for number, one in mine.items() if one[1] in more[0]}
                roster.closed(peer)
                roster.left_idle(number for number in mine if number not in worked)
                there = {number: one for number, one in there.items() if number not in mine}
                assert set(peer.ids) == {NO_DEVICE}
        most_there = max(most_there, len(there))
        for number, (peer, index, label) in there.items():
            assert (roster.labels[number], roster.peer_of[number], peer.ids[index]) == (label, peer, number)
        assert all(roster.labels[number] == label for number, label in worked.items())
        claimed = [number for peer in {id(p): p for p, _, _ in there.values()}.values() for number in peer.index]
        assert len(claimed) == len(set(claimed)), "two connections answer for one device"
        assert len(roster.labels) == len(roster.peer_of) <= len(worked) + most_there + most_idle + 4
        assert roster.joined == joined == roster.forgotten + len(roster.labels)


# ---- at a real server


@pytest.mark.slow
def test_however_often_devices_come_and_go_the_server_keeps_only_the_latest_and_those_that_worked(
    start: Start, serve: Serve, until: Until
) -> None:
    server = serve()
    server.notice = lambda text: None
    server.roster.most_idle = 20
    agents(start, server, 1)
    Multiplication(server, (1, 60, 70, 80)).check()
    worker = server.labels[0]
    with closing(Stranger(server, of_the_run=True)) as leaver:
        for stay in range(100):
            leaver.join()
            leaver.send(Leave(np.array([stay], "<u4"), "bye"))
    for _ in range(100):
        with closing(Stranger(server)) as babbler:
            babbler.join()
            babbler.socket.send_multipart([b"nonsense"])
            while not isinstance(babbler.receive(), Refused):
                pass
    until(lambda: server.devices == 1, "the server knows that all have left")
    assert server.roster.joined == 201
    assert len(server.labels) == len(server.profiles) <= 1 + 20 + 1
    assert len(server.attendance.real) == len(server.labels)
    assert server.attendance.forgotten == server.roster.forgotten == 201 - len(server.labels)
    assert server.labels[0] == worker
    Multiplication(server, (1, 60, 70, 80)).check()


def test_a_device_that_left_cannot_answer_for_the_one_that_now_has_its_number(start: Start, serve: Serve) -> None:
    server = serve()
    server.notice = lambda text: None
    server.roster.most_idle = 0
    with ExitStack() as stack:
        before, now = (stack.enter_context(closing(Stranger(server))) for _ in range(2))
        before.join()
        before.send(Leave(np.array([0], "<u4"), "bye"))
        before.send(Probe(1, 0, b""))
        while not isinstance(before.receive(), Probe):
            pass
        now.join()
        assert len(server.labels) == 1
        product = Multiplication(server, (1, 4, 4, 4))
        (block,) = now.receive_work().blocks
        cells = int(block["batch"]) * int(block["rows"]) * int(block["columns"])
        answer = np.array([(0, block["job"], block["block"], DONE, cells, 0.0, 0)], ANSWER)
        before.send(Result(answer, np.full(cells, 666.0, np.float32)))
        before.send(Probe(2, 0, b""))
        while not isinstance(before.receive(), Probe):
            pass
        assert server.totals.blocks == 0
        assert not server.suspended
        now.send(Leave(np.array([0], "<u4"), "bye"))
    agents(start, server, 1)
    product.check()
