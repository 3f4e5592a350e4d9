"""Reads messages, with a budget per turn, and passes each on to the part of the server that handles it.

The first message of a connection that has not joined is read only if its name was given by the ROUTER and its size is
within what its caller may send. The results of one read are passed on as one batch. `Answers` checks the whole batch
before anything changes, then writes the answers that count into their products.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.protocol.arriving import NO_CONNECTION, descriptor
from agent.protocol.wire import (
    DONE,
    MAX_PARTS,
    MAX_PROBE_BYTES,
    PART_BYTES,
    Heartbeat,
    Join,
    Kind,
    Leave,
    Message,
    Probe,
    Refused,
    Result,
    VersionMismatch,
    WireError,
    decode,
    printable,
)
from ps.access.access_list import Refusal
from ps.access.admission import Caller
from ps.access.endpoints import Endpoints
from ps.access.joining import PASSING
from ps.access.routing_ids import HeldMessage
from ps.outside import Outside
from ps.planning.cost import BYTES
from ps.scheduling.events import BlocksFailed, BlocksReturned, Box
from ps.transport.jobs import Live, Totals
from ps.transport.membership import Membership
from ps.transport.peers import Peer
from ps.transport.records import Records
from ps.transport.shipping import Shipping

MESSAGES_PER_TURN = 256  # then the rest of the loop gets its turn
ANSWERS_PER_TURN = 1024  # blocks, roughly; one message of a pod may have the answers of many devices
READING_S = 0.03  # likewise: while another thread computes, each message may cost a switch of threads
BYTES_PER_TURN = 8 << 20  # likewise: they are copied into their products, in about 5 ms
SENT_AWAY = 1024  # connections; each is cut within a second, and no more than a few hundred are open at a time
COMPLAINTS = 1000  # connections whose invalid messages are reported, once each
# Frames of one message, with the routing id of its sender. A frame takes 2 bytes or more on the line, and costs some
# 2 us and 600 bytes here: 500 KB of them took 4 s and 170 MiB.
MOST_FRAMES, UNJOINED_FRAMES = MAX_PARTS + 3, MAX_PROBE_BYTES // PART_BYTES + 3
FRAMES_AT_ONCE = 256  # discarded between two looks at the clock
NOTHING = memoryview(bytes(MAX_PROBE_BYTES))  # what probes are answered with; the same for all

Cells = NDArray[np.float32]
# Job (None: it is finished), cells of the message (in parts only if they are one block's), this block's first cell, box
Place = tuple[Live | None, Sequence[Cells], int, Box]


class Receiving:
    def __init__(
        self,
        outside: Outside,
        endpoints: Endpoints,
        peers: dict[bytes, Peer],
        shipping: Shipping,
        membership: Membership,
        totals: Totals,
        answered: Callable[[list[tuple[Peer, Result]]], None],
        bundle: Callable[[], tuple[str, str]],
        say: Callable[[str], None],
    ) -> None:
        """`answered`: takes a batch of results; WireError if one of them makes no sense. `bundle`: where a signed agent
        of this version is, and its SHA-256, for those that are too old."""
        self._outside, self._router, self._guard = outside, endpoints.router, endpoints.guard
        self._join_admission, self._admission, self._names = (
            endpoints.join_admission,
            endpoints.admission,
            endpoints.routing_ids,
        )
        self._peers, self._shipping, self._membership, self._totals = peers, shipping, membership, totals
        self._answered, self._bundle, self._say = answered, bundle, say
        self._results: list[tuple[Peer, Result]] = []  # of this read
        self._read_answers = self._read_bytes = 0  # blocks in them, and bytes of their cells
        self._complained: set[bytes] = set()
        self._discarding: tuple[zmq.Frame, float] | None = None  # first frame of the message, seconds spent so far
        self._sent_away: OrderedDict[bytes, None] = OrderedDict()

    def read(self) -> bool:
        """Read what has arrived, up to the budget. True if nothing is left."""
        self._read_answers = self._read_bytes = 0
        until_s = self._outside.now_s() + READING_S
        try:
            for _ in range(MESSAGES_PER_TURN):
                try:
                    frames = self._next(until_s)
                except zmq.Again:
                    return True
                if frames:
                    self._receive(frames[0].bytes, frames)
                if self._read_answers >= ANSWERS_PER_TURN or self._read_bytes >= BYTES_PER_TURN:
                    break
                if self._outside.now_s() >= until_s:
                    break
            return False
        finally:
            self._take_answers()

    def _next(self, until_s: float) -> list[zmq.Frame]:
        """The frames of the next message; none if there are too many, or all still have to be discarded. zmq.Again: no
        message has arrived."""
        if self._discarding is not None:
            self._discard(*self._discarding, until_s)
            return []
        receive = self._router.recv
        frames = [receive(zmq.NOBLOCK, copy=False)]
        most = MOST_FRAMES if frames[0].bytes in self._peers else UNJOINED_FRAMES
        while frames[-1].more:
            frames.append(receive(zmq.NOBLOCK, copy=False))
            if len(frames) > most:
                self._refuse_frames(frames, most)
                if frames[-1].more:
                    self._discard(frames[0], 0.0, until_s)
                return []
        return frames

    def _refuse_frames(self, frames: Sequence[zmq.Frame], most: int) -> None:
        """Close the connection of a message with too many frames, at once: each further one costs time."""
        identity, connection = frames[0].bytes, descriptor(frames[0])
        self._take_answers()
        caller, peer = self._admission.caller(frames[0]), self._peers.get(identity)
        if peer is not None and (caller is None or caller.line != peer.line):
            self._membership.lose(peer, "its connection is gone")  # another connection has taken its name
        end = self._guard.other_end(connection, caller.line if caller is not None else None)
        self._complain(identity, frames, WireError(f"a message of more than {most - 1} frames"))
        self._guard.cut(connection, end, at_once=True)

    def _discard(self, first: zmq.Frame, spent_s: float, until_s: float) -> None:
        """Read the rest of this message, or a part of it if it takes longer. Its sender pays for the time."""
        begun_s, receive, more = self._outside.now_s(), self._router.recv, True
        while more and self._outside.now_s() < until_s:
            for _ in range(FRAMES_AT_ONCE):
                if not (more := receive(zmq.NOBLOCK, copy=False).more):
                    break
        spent_s += self._outside.now_s() - begun_s
        self._discarding = (first, spent_s) if more else None
        if not more and (caller := self._admission.caller(first)) is not None:
            self._guard.be_wary(self._admission.charge(caller, spent_s))

    def _take_answers(self) -> None:
        """Pass on the results that were read so far, as one batch."""
        batch, self._results = self._results, []
        if not batch:
            return
        try:
            self._answered(batch)
        except WireError:  # one of them makes no sense: find out which
            for peer, message in batch:
                try:
                    self._answered([(peer, message)])
                except WireError as error:
                    self._complain(peer.identity, (), error)

    # ---- from connections that have joined

    def _receive(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._receive_first(identity, frames)
            return
        caller = self._admission.caller(frames[0])
        if caller is None or caller.line != peer.line:  # another connection has taken its name
            self._take_answers()
            self._membership.lose(peer, "its connection is gone")
            self._send_away(identity, frames[0])
            return
        try:
            message = decode(frames[1:])
            peer.silent_beats = 0
            if isinstance(message, Result):
                if not peer.of_the_run and not peer.allowance.answered(len(message.answers)):
                    raise WireError("more answers than it was given blocks")
                self._results.append((peer, message))
                self._read_answers += len(message.answers)
                self._read_bytes += BYTES * int(message.answers["cells"].sum())
                return
            if not peer.of_the_run and not peer.allowance.spoke():
                raise WireError("more messages than a device has to say")
            match message:
                case Heartbeat():
                    pass
                case Join():
                    self._membership.join_again(peer, caller, message, len(frames[3]))
                case Probe():
                    if (refusal := self._join_admission.may_read_probe(caller, len(message.data))) is not None:
                        self._shipping.reply(identity, Refused(refusal.reason, final=False))
                    else:
                        self._probe(identity, caller, message)
                case Leave():
                    self._take_answers()  # what it returned before it left counts
                    self._membership.leave(peer, message)
                case _:
                    raise WireError(f"a device may not send {type(message).__name__} here")
        except WireError as error:
            self._complain(identity, frames, error)

    def _probe(self, identity: bytes, caller: Caller, probe: Probe) -> bool:
        """Answer a probe, if its sender may still send one. Returns whether it may."""
        if not caller.of_the_run and (refusal := self._join_admission.may_probe(caller, probe.wanted_bytes)):
            self._shipping.reply(identity, Refused(refusal.reason, final=False))
            return False
        self._shipping.reply(identity, Probe(probe.token, 0, NOTHING[: probe.wanted_bytes]))
        return True

    # ---- from connections that have not joined

    def _receive_first(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """A message of a connection that was admitted and has not joined. ZeroMQ lets clients choose the name of their
        connection. A client could choose a name that another one had, or will get, so only names given by the ROUTER
        are accepted."""
        if identity in self._sent_away:
            return
        caller, connection = self._admission.caller(frames[0]), descriptor(frames[0])
        if caller is None and (judged := self._names.hear(identity, frames)) is not None:
            self._names_are_known(*judged)
            return
        given = self._names.is_given(identity)
        if caller is not None and given is None and self._names.hold(identity, frames):
            return
        if caller is None or not given:
            self._send_away(identity, frames[0])
            return
        stays = caller.of_the_run
        try:
            if (refusal := self._may_read(caller, frames)) is not None:
                self._shipping.reply(identity, Refused(refusal.reason, final=refusal not in PASSING))
            else:
                stays |= self._heard_first(identity, caller, connection, decode(frames[1:]))
        except WireError as error:
            self._complain(identity, frames, error)
            return
        if not stays:
            self._send_away(identity, frames[0])

    def _may_read(self, caller: Caller, frames: Sequence[zmq.Frame]) -> Refusal | None:
        """Why a message must not be parsed, judged by its kind and size: parsing is the expensive part."""
        kind = bytes(frames[1].buffer[5:6]) if len(frames) > 1 else b""
        if kind == bytes([Kind.JOIN]) and len(frames) == 4:
            return self._join_admission.may_read_join(caller, len(frames[3]))
        if kind == bytes([Kind.PROBE]):
            return self._join_admission.may_read_probe(caller, sum(map(len, frames)))
        return None

    def _names_are_known(self, given: Sequence[HeldMessage], chosen: Sequence[HeldMessage]) -> None:
        for held in chosen:
            self._send_away(held.identity, held.frames[0])
        for held in given:
            self._receive(held.identity, held.frames)

    def _heard_first(self, identity: bytes, caller: Caller, connection: int, message: Message) -> bool:
        """Handle the first message. False if the connection may be closed."""
        match message:
            case Join():
                end = self._guard.other_end(connection, caller.line)
                if connection != NO_CONNECTION and end is None:
                    return False  # it is gone again
                self._membership.join(identity, caller, message, connection, end)
                if identity not in self._peers:
                    return False
                self._guard.joined(connection, identity)
                return True
            case Probe():
                return self._guard.probed(connection, caller.key) and self._probe(identity, caller, message)
            case Leave(name=name) if name:
                if (
                    self._join_admission.may_read_probe(caller, len(name)) is None
                    and self._join_admission.may_probe(caller, 0) is None
                ):
                    self._membership.stays_away(printable(name), printable(message.reason), message.until_s)
            case _:
                self._shipping.reply(identity, Refused("this server does not know you: join first", final=False))
        return False

    def _send_away(self, identity: bytes, first: zmq.Frame) -> None:
        """Ignore this connection, which has not joined, from now on, and close it."""
        self._sent_away[identity] = None
        if len(self._sent_away) > SENT_AWAY:
            self._sent_away.popitem(last=False)
        caller = self._admission.caller(first)
        self._guard.send_away(descriptor(first), caller.line if caller is not None else None)

    def _complain(self, identity: bytes, frames: Sequence[zmq.Frame], error: WireError) -> None:
        """Report an invalid message and close its connection. The device may join again through the entrance; its
        blocks go to others."""
        self._totals.dropped_messages += 1
        if identity not in self._complained and len(self._complained) < COMPLAINTS:
            self._complained.add(identity)
            self._say(f"dropped a message that makes no sense: {error}")
        final = isinstance(error, VersionMismatch)
        text = f"{error}" + ("; update the agent" if final else "")
        self._shipping.reply(identity, Refused(text, final, *(self._bundle() if final else ("", ""))))
        if (peer := self._peers.get(identity)) is not None:
            self._membership.cut(peer, "it sent what makes no sense")
        elif frames:
            self._send_away(identity, frames[0])


@dataclass(slots=True)
class Answers:
    """The answers of one read: one event for completed blocks, one for failed ones."""

    batch: Sequence[tuple[Peer, Result]]
    received_ns: int
    good: BlocksReturned = field(default_factory=lambda: BlocksReturned([], [], []))
    bad: BlocksFailed = field(default_factory=lambda: BlocksFailed([], [], []))
    answered: list[tuple[Peer, int, int]] = field(default_factory=list)  # of connections with one device
    places: list[Place] = field(default_factory=list)  # of the good ones

    @classmethod
    def of(
        cls, batch: Sequence[tuple[Peer, Result]], jobs: Mapping[int, Live], received_ns: int, unheard_s: float = 0.0
    ) -> Answers:
        """Check a batch of results, which lay unread for at most `unheard_s`. WireError if one of them is invalid;
        nothing has changed then."""
        self = cls(batch, received_ns, BlocksReturned([], [], [], unheard_s))
        good, bad, answered, places = self.good, self.bad, self.answered, self.places
        for peer, message in batch:
            cells, start, table, ids = _cells(message), 0, message.answers, peer.ids
            alone = not peer.many
            columns = (table[name].tolist() for name in ("device", "job", "block", "status", "cells"))
            for index, job, block, status, size in zip(*columns, strict=True):
                if index >= len(ids):
                    raise WireError(f"an answer names device {index}, the sender has {len(ids)}")
                live = jobs.get(job)  # None: its job is finished, so the dispatcher will not count it
                box = live.box(block) if live is not None else ()
                if alone:
                    answered.append((peer, job, block))
                event: BlocksReturned | BlocksFailed = good
                if status == DONE:
                    if live is not None and size != box[1] * box[3] * box[5]:
                        raise WireError(
                            f"an answer to block {block} of job {job} has {size} cells, which is not its size"
                        )
                    places.append((live, cells, start, box))
                else:
                    event = bad
                event.devices.append(ids[index])
                event.jobs.append(job)
                event.blocks.append(block)
                start += size
        return self

    def accept(self, positions: list[int], totals: Totals, records: Records) -> None:
        """Write those of the good answers that count into their products and into the records."""
        for place, blocks, below in _runs(self.places, positions):
            live, _, _, (_, batches, _, rows, _, columns) = place
            assert live is not None
            _write(live.product.out, place, blocks, below)
            cells = blocks * batches * rows * columns
            totals.flops += 2 * cells * live.product.shape.inner
            totals.result_bytes += BYTES * cells
        totals.blocks += len(positions)
        whole = len(positions) == sum(len(message.answers) for _, message in self.batch)
        good = self.good
        counted = None if whole else {(good.devices[p], good.jobs[p], good.blocks[p]) for p in positions}
        for peer, message in self.batch:
            if peer.of_the_run:
                records.answered(message.answers, peer.ids, self.received_ns, counted, message.stamp_ns)
            else:  # its times are claims, and the verdict is not built on claims
                records.answered(message.answers, peer.ids, self.received_ns, counted, due_counts=False)


def _runs(places: Sequence[Place], positions: Sequence[int]) -> Iterator[tuple[Place, int, bool]]:
    """Answers in order, in runs that one write puts into the output: the place of the first, how many blocks, and
    whether these lie below each other or beside each other. Answers of a message are often such neighbours."""
    at = 0
    while at < len(positions):
        first = live, cells, start, (b, bs, r, rs, c, cs) = places[positions[at]]
        count, size, below = 1, bs * rs * cs, True
        most = len(positions) - at if bs == 1 and len(cells) == 1 else 1

        def continues(box: Box) -> bool:
            other, message, begin, found = places[positions[at + count]]  # noqa: B023
            return other is live and message is cells and begin == start + count * size and found == box  # noqa: B023

        while count < most and continues([b, 1, r + count * rs, rs, c, cs]):
            count += 1
        if count == 1:
            while count < most and continues([b, 1, r, rs, c + count * cs, cs]):
                count, below = count + 1, False
        yield first, count, below
        at += count


def _write(out: Cells, place: Place, blocks: int, below: bool) -> None:
    """Write a run of blocks of one size."""
    _, cells, start, (b, bs, r, rs, c, cs) = place
    if len(cells) > 1:
        fill(out[b : b + bs, r : r + rs, c : c + cs], cells)
        return
    values = cells[0][start : start + blocks * bs * rs * cs]
    if below:
        out[b : b + bs, r : r + blocks * rs, c : c + cs] = values.reshape(bs, blocks * rs, cs)
    else:
        target = out[b, r : r + rs, c : c + blocks * cs].reshape(rs, blocks, cs, copy=False)
        target[...] = values.reshape(blocks, rs, cs).transpose(1, 0, 2)


def _cells(message: Result) -> list[Cells]:
    """As they came: in parts if they belong to one block, joined if several blocks share them."""
    if not isinstance(message.data, tuple):
        return [np.frombuffer(message.data, np.float32)]
    parts = [np.frombuffer(part, np.float32) for part in message.data]
    return parts if len(message.answers) == 1 else [np.concatenate(parts)]


def fill(target: Cells, parts: Sequence[Cells]) -> None:
    """Write a block [batch, rows, columns] from its cells in order, wherever they are cut. Joining them first would
    copy all of them."""
    _, rows, columns = target.shape
    at = 0
    for part in parts:
        done = 0
        while done < part.size:
            (batch, row), column = divmod(at // columns, rows), at % columns
            left = part.size - done
            if column or left < columns:  # part of a row
                count = min(columns - column, left)
                target[batch, row, column : column + count] = part[done : done + count]
            else:
                whole = min(left // columns, rows - row)
                count = whole * columns
                target[batch, row : row + whole] = part[done : done + count].reshape(whole, columns)
            done += count
            at += count
