"""Sends messages: packs operands for each connection, sends them without a copy, and never waits for a slow reader.

Packing the blocks of a large product takes longer than answers may wait. What the time of a turn does not suffice for
is packed in the next turns, unless its job ends before.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import zmq

from agent.protocol.arriving import NO_CONNECTION
from agent.protocol.wire import REFERENCE, Cancel, Frame, Message, Work, encode, send_frames
from ps.outside import Outside
from ps.planning.cost import Integers
from ps.scheduling.events import CancelBlocks, SendBlocks
from ps.transport.jobs import Live, Totals
from ps.transport.operands import Parcel, parcels, streamed
from ps.transport.peers import Peer


class Shipping:
    """Runs in the server's thread and works on the server's tables."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        peers: Mapping[bytes, Peer],
        peer_of: Sequence[Peer],
        jobs: Mapping[int, Live],
        totals: Totals,
        outside: Outside,
    ) -> None:
        self._outside = outside
        self._router, self._peers, self._peer_of, self._jobs, self._totals = router, peers, peer_of, jobs, totals
        self.until_s = 0.0  # packing goes on in the next turn then; in the host's time
        self._to_pack: deque[tuple[Peer, Iterator[list[Frame]]]] = deque()

    @property
    def packs(self) -> bool:
        """Whether blocks wait to be packed."""
        return bool(self._to_pack)

    def send_blocks(self, instruction: SendBlocks, stamp_ns: int) -> list[Peer]:
        """Group blocks by connection and job, pack and send them while there is time. Returns peers that are gone or do
        not read. All blocks have the time of the decision as their stamp, as in virtual time: packing is not charged to
        devices."""
        groups: dict[tuple[bytes, int, int], list[int]] = {}  # positions in the instruction
        jobs, peers, peer_of, operand_bytes = self._jobs, self._peers, self._peer_of, 0
        for at, (device, job, block, box, inner, chunk, down_bytes, kept) in enumerate(
            zip(*instruction.columns, strict=True)
        ):
            live, peer = jobs[job], peer_of[device]
            live.boxes[block] = box
            identity = peer.identity
            if identity not in peers:
                continue  # lost a moment ago; the dispatcher is told next
            live.holders.add(identity)
            operand_bytes += down_bytes
            if chunk < inner:
                peer.streams.append(self._stream(peer, live, instruction, at, stamp_ns))
            elif (group := groups.get((identity, job, kept))) is not None:
                group.append(at)
            else:
                groups[identity, job, kept] = [at]
        self._totals.operand_bytes += operand_bytes
        messages_of: dict[bytes, list[Iterator[list[Frame]]]] = {}  # in the order of the instruction
        for (identity, job, kept), group in groups.items():
            messages = self._parcels(peers[identity], job, kept, instruction, group, stamp_ns)
            messages_of.setdefault(identity, []).append(messages)
        self._to_pack += ((peers[identity], chain(*of)) for identity, of in messages_of.items())
        dead = {peer.identity: peer for peer in self.pack()}
        for peer in {self._peer_of[device].identity: self._peer_of[device] for device in instruction.devices}.values():
            if peer.streams and peer.identity not in dead and not self.drain(peer):
                dead[peer.identity] = peer
        return list(dead.values())

    def pack(self) -> list[Peer]:
        """Pack and send at least one waiting message, and more until `until_s`. Returns peers that are gone or do not
        read."""
        waiting, dead = self._to_pack, dict[bytes, Peer]()
        while waiting:  # round robin, so that no connection waits while much is packed for another one
            peer, messages = waiting.popleft()
            if self._peers.get(peer.identity) is not peer or peer.identity in dead:
                continue
            frames = next(messages, None)
            if frames is None:
                continue
            waiting.append((peer, messages))
            peer.outbox.append(frames)
            if not self.drain(peer):
                dead[peer.identity] = peer
            if self._outside.now_s() >= self.until_s:
                break
        return list(dead.values())

    def cancel(self, instruction: CancelBlocks) -> list[Peer]:
        """Tell devices to stop these blocks. Returns peers that are gone or do not read."""
        told: dict[bytes, list[tuple[int, int, int]]] = {}
        for device, job, block in zip(instruction.devices, instruction.jobs, instruction.blocks, strict=True):
            peer = self._peer_of[device]
            if peer.identity not in self._peers:
                continue  # lost a moment ago
            peer.answered(job, block)
            told.setdefault(peer.identity, []).append((peer.index[device], job, block))
        lost = []
        for identity, rows in told.items():
            peer = self._peers[identity]
            peer.cancelled += len(rows)
            if not self.send(peer, Cancel(np.array(rows, REFERENCE))):
                lost.append(peer)
        return lost

    def _parcels(
        self, peer: Peer, job: int, kept: int, instruction: SendBlocks, group: Sequence[int], stamp_ns: int
    ) -> Iterator[list[Frame]]:
        """Messages with these blocks, none of which is sent in chunks. `group`: their positions in the instruction."""
        index = np.array([peer.index[instruction.devices[at]] for at in group])  # now: a device may leave meanwhile
        return self._packed(peer, job, kept, instruction, group, index, stamp_ns)

    def _packed(
        self,
        peer: Peer,
        job: int,
        kept: int,
        instruction: SendBlocks,
        group: Sequence[int],
        index: Integers,
        stamp_ns: int,
    ) -> Iterator[list[Frame]]:
        if (live := self._jobs.get(job)) is None:
            return  # it ended before its turn came
        product = live.product
        boxes = np.array([instruction.boxes[at] for at in group])
        held = peer.held(job, (product.left.id, product.right.id), kept)
        if not peer.of_the_run:
            peer.allowance.asked(len(group), int(boxes[:, 1::2].prod(axis=1).sum()))
        for parcel in parcels(
            job,
            (product.left, product.right),
            boxes,
            np.array([instruction.blocks[at] for at in group]),
            index,
            np.array([instruction.down_bytes[at] for at in group]),
            held,
            peer.piece_ids,
            shared=peer.many,
            generous=peer.many,
            message_bytes=peer.message_bytes,
        ):
            peer.lend(job, held, kept, parcel)
            yield self._pack(peer, live, parcel, stamp_ns)
            if job not in self._jobs:
                return

    def _stream(self, peer: Peer, live: Live, instruction: SendBlocks, at: int, stamp_ns: int) -> Iterator[list[Frame]]:
        """Messages with one block in chunks, each packed when it is about to be sent."""
        box, block, device = instruction.boxes[at], instruction.blocks[at], instruction.devices[at]
        _, batches, _, rows, _, columns = box
        peer.allowance.asked(1, batches * rows * columns)
        factors, index, chunk = (live.product.left, live.product.right), peer.index[device], instruction.chunk[at]
        for parcel in streamed(instruction.jobs[at], factors, box, block, index, chunk, peer.piece_ids):
            yield self._pack(peer, live, parcel, stamp_ns)

    def _pack(self, peer: Peer, live: Live, parcel: Parcel, stamp_ns: int) -> list[Frame]:
        first = parcel.blocks["chunk"] == 0
        live.sent(parcel.blocks["block"][first], stamp_ns)
        self._totals.sent_bytes += sum(d.nbytes for d in parcel.data)
        return encode(Work(stamp_ns, peer.take_released(), parcel.pieces, parcel.blocks, list(parcel.data)))

    def send(self, peer: Peer, message: Message) -> bool:
        """False if the peer is gone, or does not read."""
        peer.outbox.append(encode(message))
        return self.drain(peer)

    def stands(self, peer: Peer) -> bool:
        """Whether the peer's connection is still the one that joined; else its name may belong to another by now."""
        return peer.descriptor == NO_CONNECTION or self._outside.other_end(peer.descriptor) == peer.other_end

    def drain(self, peer: Peer) -> bool:
        """Send what waits for this peer. False if it is gone or does not read. What ZeroMQ does not accept stays in the
        outbox; streams wait until the outbox is empty. ZeroMQ sends to names, and another connection may have got this
        peer's, so the connection is checked first."""
        if (peer.outbox or peer.streams) and not self.stands(peer):
            return False
        while True:
            while peer.outbox:
                try:
                    send_frames(self._router, [peer.identity, *peer.outbox[0]], zmq.NOBLOCK)
                except zmq.Again:
                    return not peer.does_not_read
                except zmq.ZMQError as error:
                    if error.errno == zmq.EHOSTUNREACH:
                        return False
                    raise
                peer.outbox.popleft()
            peer.cancelled = 0
            if not peer.streams:
                return True
            frames = next(peer.streams[0], None)
            if frames is None:
                peer.streams.popleft()
            else:
                peer.outbox.append(frames)

    def reply(self, identity: bytes, message: Message) -> None:
        """Answer a sender that is not a peer. The message is dropped if ZeroMQ does not accept it now."""
        with contextlib.suppress(zmq.ZMQError):
            send_frames(self._router, [identity, *encode(message)], zmq.NOBLOCK)
