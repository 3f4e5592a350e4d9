"""Which routing ids the ROUTER has generated itself. Connections with other ids are ignored.

ZeroMQ lets a client choose the routing id of its connection, even one that the ROUTER is about to generate: libzmq 4.3
then aborts the process (`Assertion failed: ok`). Generated ids are numbers that start anywhere and increase. libzmq
takes the start from C's rand(), which it does not seed, so the start would be the same in every process;
`unpredictable` seeds it. To find the number reached so far, the server opens a connection of its own, which gets the
next one: an id beyond it was chosen by the client.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

MOST_HELD = 8192  # messages; all new connections may send at once, and each waits for one or two turns of the loop
FIRST_S = 5.0  # for the first check, when there are no other connections
Frames = Sequence[zmq.Frame]


def unpredictable() -> None:
    """Seed the generator from which libzmq takes its first id. Does nothing where there is no libc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message from a routing id beyond all that are known to have been generated."""

    identity: bytes
    frames: Frames


class RoutingIds:
    """Used in the server's thread, except for the constructor."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        """`router`: not bound yet."""
        self._context, self._where = context, f"inproc://names-{secrets.token_hex(8)}"
        self._held: list[HeldMessage] = []
        self._question: zmq.Socket[bytes] | None = None
        self._challenge = b""
        self._asked_for = 0  # number of held messages that arrived before the latest question
        router.bind(self._where)
        self._ask()
        if not router.poll(int(1000 * FIRST_S)):
            raise RuntimeError("ZeroMQ does not deliver within this process")
        self._first, self._given = _number(router.recv_multipart()[0]), 1
        self._end_question()

    def is_given(self, identity: bytes) -> bool | None:
        """Whether the ROUTER generated this id; None if not known yet."""
        if len(identity) != 5 or identity[0]:
            return False
        return True if self._offset(identity) < self._given else None

    def hold(self, identity: bytes, frames: Frames) -> bool:
        """Keep a message until it is known who chose its id. False if too many are held."""
        if len(self._held) >= MOST_HELD:
            return False
        self._held.append(HeldMessage(identity, frames))
        if self._question is None:
            self._ask()
        return True

    def hear(self, identity: bytes, frames: Frames) -> tuple[list[HeldMessage], list[HeldMessage]] | None:
        """If this is the answer to our own question: messages to process now, and those with chosen ids. None if it is
        another connection's message."""
        if self._question is None or len(frames) != 2 or frames[1].bytes != self._challenge:
            return None
        self._given = self._offset(identity) + 1
        self._end_question()
        good = [held for held in self._held if self.is_given(held.identity)]
        bad = [held for held in self._held[: self._asked_for] if not self.is_given(held.identity)]
        self._held = [held for held in self._held[self._asked_for :] if not self.is_given(held.identity)]
        if self._held:
            self._ask()
        return good, bad

    def close(self) -> None:
        self._end_question()

    def _offset(self, identity: bytes) -> int:
        return (_number(identity) - self._first) % (1 << 32)

    def _ask(self) -> None:
        """Open a connection of our own: every id generated so far comes before its id."""
        self._challenge, self._asked_for = secrets.token_bytes(16), len(self._held)
        self._question = self._context.socket(zmq.DEALER)
        self._question.connect(self._where)
        self._question.send(self._challenge)

    def _end_question(self) -> None:
        if self._question is not None:
            self._question.close(linger=0)
            self._question = None


def _number(identity: bytes) -> int:
    return int.from_bytes(identity[1:], "big")
