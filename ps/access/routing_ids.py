"""Which names of connections the ROUTER has given out itself. Nobody else is heard.

ZeroMQ lets a client choose the name of its connection, also one that the ROUTER is about to give to the next one:
libzmq 4.3 then ends the process (`Assertion failed: ok`). Its own names are a number that begins anywhere and rises.
libzmq takes the beginning from C's rand(), which nobody seeds: it was the same in every process. So it is seeded here,
and the number that it has reached is looked up, by a connection of our own that is given the next one: a name beyond it
was chosen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

MOST_HELD = 8192  # messages; all new connections may speak at once, and each waits for a turn of the loop or two
FIRST_S = 5.0  # for the first look, when nobody else is connected
Frames = Sequence[zmq.Frame]


def unpredictable() -> None:
    """Seed what libzmq takes its first name from. Where there is no libc to be asked, nothing happens."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


@dataclass(frozen=True, slots=True)
class Held:
    """A message whose sender's name is beyond all that are known to have been given."""

    identity: bytes
    frames: Frames


class RoutingIds:
    """In the server's thread, but for the beginning."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        """`router`: not bound yet."""
        self._context, self._where = context, f"inproc://names-{secrets.token_hex(8)}"
        self._held: list[Held] = []
        self._question: zmq.Socket[bytes] | None = None
        self._challenge = b""
        self._asked_for = 0  # how many of those that are held came before the question
        router.bind(self._where)
        self._ask()
        if not router.poll(int(1000 * FIRST_S)):
            raise RuntimeError("ZeroMQ does not deliver within this process")
        self._first, self._given = _number(router.recv_multipart()[0]), 1
        self._end_question()

    def is_given(self, identity: bytes) -> bool | None:
        """None: it is not known yet."""
        if len(identity) != 5 or identity[0]:
            return False
        return True if self._offset(identity) < self._given else None

    def hold(self, identity: bytes, frames: Frames) -> bool:
        """Until it is known. False: too many are held."""
        if len(self._held) >= MOST_HELD:
            return False
        self._held.append(Held(identity, frames))
        if self._question is None:
            self._ask()
        return True

    def hear(self, identity: bytes, frames: Frames) -> tuple[list[Held], list[Held]] | None:
        """If this is the answer to our own question: messages that may be heard now, and those whose names were
        chosen. None: it is somebody else's."""
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
        """Whatever has a name by now has a smaller number than the connection that is made here."""
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
