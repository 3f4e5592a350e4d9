"""A connection as the server sees it: what it holds, and what waits to be sent to it."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.protocol.arriving import NO_CONNECTION, Address
from agent.protocol.profile import MAX_RATE
from agent.protocol.wire import Frame
from ps.access.allowance import Allowance
from ps.transport.operands import MESSAGE_BYTES, Held, Parcel

NO_DEVICE = 2**32 - 1  # no device has this number
# Blocks for a single device share a message that takes at most this long on the device's line: the device begins to
# compute at most this much later. A message costs the server and the device about 0.2 ms, whatever is in it.
BUNDLE_S = 0.005
# ... and takes at most this share of the device's memory. Pieces are released whole: a piece is held until the last
# block of its message is answered, longer than the dispatcher counts it. Agents accept a quarter more than they lend.
BUNDLE_SHARE = 1 / 16
MOST_CANCELLED = 32  # blocks per device of a connection that does not read, until it is ended


@dataclass(slots=True)
class Peer:
    """A phone, or a pod with many devices."""

    identity: bytes
    about: dict[str, str]
    key: str = ""  # public key of an encrypted connection; empty: a plain one, from this machine
    of_the_run: bool = False  # a pod started by this run: its stamps count, and it may bring many devices
    down_bps: float = MAX_RATE  # of its line, as its devices claim when they join
    memory_bytes: int = 1 << 62  # of its smallest device, likewise
    line: int = 0  # the number of its connection; a message that came over another one is not its own
    allowance: Allowance = field(default_factory=Allowance)  # what it may send, unless it is of the run
    who: str = ""  # the device identity that its standing belongs to; empty: a pod of the run
    silent_beats: int = 0  # our heartbeats since its last message
    descriptor: int = NO_CONNECTION  # of its connection
    other_end: Address | None = None  # its address there: the descriptor soon belongs to another connection
    ids: list[int] = field(default_factory=list)  # of its devices, by their index in this connection
    index: dict[int, int] = field(default_factory=dict)  # the inverse of ids
    piece_ids: Iterator[int] = field(default_factory=itertools.count)
    outbox: deque[list[Frame]] = field(default_factory=deque)  # what ZeroMQ did not take yet
    cancelled: int = 0  # blocks, since the outbox was last empty
    streams: deque[Iterator[list[Frame]]] = field(default_factory=deque)  # chunks, packed when the outbox is empty
    _of_job: dict[int, tuple[Held, Held]] = field(default_factory=dict)
    _kept: dict[int, Held] = field(default_factory=dict)  # by operand
    _released: list[int] = field(default_factory=list)
    _lent: dict[tuple[int, int], list[tuple[Held, int]]] = field(default_factory=dict)  # (job, block) -> its pieces
    _borrowers: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # piece -> blocks that need it

    def add(self, ids: Sequence[int]) -> None:
        self.index.update(zip(ids, range(len(self.ids), len(self.ids) + len(ids)), strict=True))
        self.ids += ids

    def drop(self, device: int) -> None:
        """Forget a device that has left: its number is given to another device."""
        if (index := self.index.pop(device, None)) is not None:
            self.ids[index] = NO_DEVICE

    @property
    def many(self) -> bool:
        return len(self.ids) > 1

    @property
    def message_bytes(self) -> int:
        """Operands that a message to this connection may have."""
        if self.many:
            return MESSAGE_BYTES
        return int(min(MESSAGE_BYTES, BUNDLE_S * self.down_bps / 8, BUNDLE_SHARE * self.memory_bytes)) + 1

    def held(self, job: int, operands: tuple[int, int], kept: int) -> tuple[Held, Held]:
        """The pieces that this connection holds of a job's left and right operand. `kept`: see Job.kept in
        ps/scheduling/state.py."""
        mine = self._of_job.setdefault(job, (Held(), Held()))
        left, right = (
            self._kept.setdefault(operands[side], Held()) if kept >> side & 1 else mine[side] for side in (0, 1)
        )
        return left, right

    def lend(self, job: int, held: tuple[Held, Held], kept: int, parcel: Parcel) -> None:
        """A phone's memory is limited: a piece is released as soon as no block needs it. In a pod, many devices share
        pieces, which stay until their job ends."""
        if self.many:
            return
        lent, borrowers, blocks = self._lent, self._borrowers, parcel.blocks["block"].tolist()
        sides = [(held[side], name) for side, name in enumerate(("left", "right")) if not kept >> side & 1]
        for block in blocks:
            lent[job, block] = []
        for mine, name in sides:
            for block, piece in zip(blocks, parcel.blocks[name].tolist(), strict=True):
                lent[job, block].append((mine, piece))
                borrowers[piece] += 1

    def answered(self, job: int, block: int) -> None:
        borrowers = self._borrowers
        for held, piece in self._lent.pop((job, block), ()):
            if borrowers[piece] > 1:
                borrowers[piece] -= 1
            else:
                del borrowers[piece]
                held.drop(piece)
                self._released.append(piece)

    def finished(self, job: int) -> None:
        for key in [key for key in self._lent if key[0] == job]:  # of a device that left before it answered
            self.answered(*key)
        for held in self._of_job.pop(job, ()):
            self._released += held.ids

    def forget(self, operand: int) -> None:
        if held := self._kept.pop(operand, None):
            self._released += held.ids

    def close(self) -> None:
        """The connection is gone. Unread messages from it refer to no device."""
        self.outbox, self.streams = _NOTHING_MORE, _NOTHING_MORE
        self.ids, self.index = [NO_DEVICE] * len(self.ids), {}

    @property
    def does_not_read(self) -> bool:
        """Whether too many cancelled blocks wait in the outbox. Credit limits the other blocks there, but cancelling a
        block frees its credit while its messages stay."""
        return self.cancelled > MOST_CANCELLED * len(self.ids)

    @property
    def lent(self) -> int:
        """How many pieces and blocks the device holds, as far as the server knows."""
        held = [piece for pair in self._of_job.values() for side in pair for piece in side.ids]
        return len(held) + len(self._lent) + sum(len(held.ids) for held in self._kept.values())

    @property
    def owes_release(self) -> bool:
        return bool(self._released)

    def take_released(self) -> NDArray[np.uint32]:
        pieces, self._released = np.array(self._released, np.uint32), []
        return pieces


_NOTHING_MORE: deque[Any] = deque(maxlen=0)  # discards what is put there


def missing_ones(labels: list[str]) -> str:
    """Names of devices that have gone, for a notice; some of them if there are many. `labels` may have duplicates: a
    device that came back has a second number."""
    names = list(dict.fromkeys(labels))
    if not names:
        return ""
    others = f" and {len(names) - 3:,} others" if len(names) > 3 else ""
    return f"; gone are {', '.join(names[:3])}{others}"
