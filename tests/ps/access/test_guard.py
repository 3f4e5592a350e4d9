"""Promises of ps.access.guard: an order about a connection reaches that connection and no other; connections that are
expected are not cut in favour of others."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import zmq

from agent.protocol.arriving import NO_CONNECTION, other_end
from ps.access.admission import Refusals
from ps.access.guard import UNJOINED, Guard

if TYPE_CHECKING:
    from conftest import Until


@contextlib.contextmanager
def guarding() -> Iterator[tuple[Guard, tuple[str, int]]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        guard = Guard(router, Refusals(lambda text: None))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        try:
            yield guard, ("127.0.0.1", port)
        finally:
            guard.close()


def number_of(line: socket.socket, until: Until) -> int:
    """The descriptor of the same connection at the server, which is this process too. Looks without opening a
    descriptor, which would take the number meant for the next connection."""

    def found() -> list[int]:
        return [number for number in range(3, 4096) if other_end(number) == line.getsockname()]

    until(lambda: bool(found()), "the connection is accepted")
    return found()[0]


def closed(number: int) -> bool:
    """Whether the server closed the descriptor; an open one whose connection was reset has no other end either."""
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def reused(number: int, old: socket.socket, new: socket.socket, where: tuple[str, int], until: Until) -> None:
    """Close one connection and open another, which gets its descriptor at the server."""
    old.close()
    until(lambda: closed(number), "the number is free")
    with contextlib.ExitStack() as taken:
        while (lower := os.open(os.devnull, os.O_RDONLY)) < number:  # or the next connection could get one of these
            taken.callback(os.close, lower)
        os.close(lower)
        new.connect(where)
        assert number_of(new, until) == number, "the kernel reuses the number"


@pytest.mark.parametrize("heard", [True, False], ids=["the guard knows", "the guard does not know yet"])
def test_an_order_about_a_connection_does_not_reach_the_next_one_with_its_number(
    nothing_left_behind: None, until: Until, heard: bool
) -> None:
    with guarding() as (guard, where):
        old = socket.create_connection(where)
        number = number_of(old, until)
        old_end = guard.joined(number, b"old")
        assert old_end == old.getsockname()
        guard.attend()
        with socket.socket() as new:
            reused(number, old, new, where, until)
            if heard:
                until(lambda: guard.attend() or number in guard._unjoined, "the guard knows the new connection")
            assert guard.joined(number, b"new") == new.getsockname()
            guard.left(number, old_end, b"old")
            guard.cut(number, old_end)
            guard.left(NO_CONNECTION, None, b"never")
            until(lambda: guard.attend() or guard._peer.get(number) == new.getsockname(), "the guard is up to date")
            assert not guard.busy, "the new connection is joined, and none is to be cut"
            guard.left(number, new.getsockname(), b"new")
            assert guard.busy


def test_a_message_of_a_closed_connection_ends_no_other_one(nothing_left_behind: None, until: Until) -> None:
    """It is read after its descriptor went to an honest client, which was then cut; at the entrance that client waited
    in vain for its ticket."""
    with guarding() as (guard, where), socket.create_server(("127.0.0.1", 0)) as entrance:
        old, nearly = socket.create_connection(where), socket.socket()
        number = number_of(old, until)
        guard.hear()
        guard.let_in(time.monotonic(), line=1)
        assert guard.other_end(number, line=1) == old.getsockname()
        with nearly:
            reused(number, old, nearly, where, until)
            assert guard.other_end(number, line=1) is None, "the guard has not heard of the new connection yet"
            guard.hear()
            assert guard.other_end(number, line=1) is None, "the new connection was let in later"
            guard.let_in(time.monotonic(), line=2)
            assert guard.other_end(number, line=2) == nearly.getsockname()
            with socket.socket() as caller:
                nearly.close()
                until(lambda: closed(number), "the number is free")
                caller.connect(entrance.getsockname())
                accepted = entrance.accept()[0]
                if accepted.fileno() != number:  # as if the kernel had chosen this number, which it may have
                    os.dup2(accepted.fileno(), number)
                    accepted.close()
                    accepted = socket.socket(fileno=number)
                guard.send_away(number, line=2)
                assert not guard.look(time.monotonic() + 1.0), "a client at the entrance stays"
                accepted.close()


def test_an_enrolled_fleet_may_connect_all_at_once(nothing_left_behind: None, until: Until) -> None:
    """Its devices identify themselves after they have connected; none is cut in favour of another."""
    count = UNJOINED.most + 50
    with guarding() as (guard, where), contextlib.ExitStack() as fleet:
        guard.enrolled = count
        for _ in range(count):
            fleet.enter_context(socket.create_connection(where))
        until(lambda: guard.attend() or len(guard._peer) == count, "all connections are accepted")
        assert len(guard._unjoined) == count
        guard.enrolled = 0
        fleet.enter_context(socket.create_connection(where))
        until(guard.attend, "the guard knows one more, and expects none of them")
        assert len(guard._unjoined) <= count


def test_a_connection_is_not_cut_before_the_server_has_read_what_it_sent(
    nothing_left_behind: None, until: Until
) -> None:
    with guarding() as (guard, where), socket.create_connection(where):
        until(lambda: guard.attend() or guard.busy, "the connection is accepted")
        now_s = time.monotonic() + UNJOINED.seconds + 1
        assert not guard.look(now_s), "its JOIN may be unread"
        guard.all_read_s = now_s
        assert guard.look(now_s)
