"""What leaves the server: operands packed for each connection, sent zero-copy, never waiting for a slow reader."""

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
from ps.scheduling.events import CancelBlocks, SendBlocks, Sent, sends
from ps.transport.jobs import Live, Totals
from ps.transport.operands import Parcel, parcels, streamed
from ps.transport.peers import Peer


class Shipping:
    """Works on the server's own tables, in the server's thread."""

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

    def send_blocks(self, instruction: SendBlocks, stamp_ns: int) -> list[Peer]:
        """Group by connection and job, pack, send. Returns peers found to be gone. All blocks carry one stamp, the time
        of the decision, as in virtual time: packing time is not charged to the devices."""
        groups: dict[tuple[bytes, int, int], list[Sent]] = {}
        for sent in sends(instruction):
            live, peer = self._jobs[sent.job], self._peer_of[sent.device]
            live.boxes[sent.block] = sent.box
            if peer.identity not in self._peers:
                continue  # just lost; the dispatcher learns of it next
            live.holders.add(peer.identity)
            self._totals.operand_bytes += sent.down_bytes
            if sent.chunk < sent.inner:
                peer.streams.append(self._stream(peer, live, sent, stamp_ns))
            else:
                groups.setdefault((peer.identity, sent.job, sent.kept), []).append(sent)
        messages_of: dict[bytes, list[Iterator[list[Frame]]]] = {}  # per device job after job, in the order decided
        for (identity, job, kept), group in groups.items():
            messages = self._parcels(self._peers[identity], job, kept, group, stamp_ns)
            messages_of.setdefault(identity, []).append(messages)
        queues = deque((self._peers[identity], chain(*of)) for identity, of in messages_of.items())
        dead: dict[bytes, Peer] = {}
        while queues:  # in turn, so that no connection waits while another one's operands are packed
            peer, messages = queues.popleft()
            frames = next(messages, None)
            if frames is None or peer.identity in dead:
                continue
            queues.append((peer, messages))
            peer.outbox.append(frames)
            if not self.drain(peer):
                dead[peer.identity] = peer
        for peer in {self._peer_of[device].identity: self._peer_of[device] for device in instruction.devices}.values():
            if peer.streams and peer.identity not in dead and not self.drain(peer):
                dead[peer.identity] = peer
        return list(dead.values())

    def cancel(self, instruction: CancelBlocks) -> list[Peer]:
        """Tell devices to stop these blocks. Returns peers found to be gone."""
        told: dict[bytes, list[tuple[int, int, int]]] = {}
        for device, job, block in zip(instruction.devices, instruction.jobs, instruction.blocks, strict=True):
            peer = self._peer_of[device]
            if peer.identity not in self._peers:
                continue  # just lost
            peer.answered(job, block)
            told.setdefault(peer.identity, []).append((peer.index[device], job, block))
        telling = [(self._peers[identity], Cancel(np.array(rows, REFERENCE))) for identity, rows in told.items()]
        return [peer for peer, message in telling if not self.send(peer, message)]

    def _parcels(self, peer: Peer, job: int, kept: int, group: Sequence[Sent], stamp_ns: int) -> Iterator[list[Frame]]:
        """Messages that bring these blocks whole."""
        live = self._jobs[job]
        product, boxes = live.product, np.array([sent.box for sent in group])
        held = peer.held(job, (product.left.id, product.right.id), kept)
        if not peer.of_the_run:
            peer.allowance.asked(len(group), int(boxes[:, 1::2].prod(axis=1).sum()))
        for parcel in parcels(
            job,
            (product.left, product.right),
            boxes,
            np.array([sent.block for sent in group]),
            np.array([peer.index[sent.device] for sent in group]),
            np.array([sent.down_bytes for sent in group]),
            held,
            peer.piece_ids,
            generous=peer.many,
            apart=not peer.many,
        ):
            peer.lend(job, held, kept, parcel)
            yield self._pack(peer, live, parcel, stamp_ns)

    def _stream(self, peer: Peer, live: Live, sent: Sent, stamp_ns: int) -> Iterator[list[Frame]]:
        """Messages that bring one block in chunks to one device of the connection, each packed when its turn comes."""
        _, batches, _, rows, _, columns = sent.box
        peer.allowance.asked(1, batches * rows * columns)
        factors, index = (live.product.left, live.product.right), peer.index[sent.device]
        for parcel in streamed(sent.job, factors, sent.box, sent.block, index, sent.chunk, peer.piece_ids):
            yield self._pack(peer, live, parcel, stamp_ns)

    def _pack(self, peer: Peer, live: Live, parcel: Parcel, stamp_ns: int) -> list[Frame]:
        first = parcel.blocks["chunk"] == 0
        live.sent(parcel.blocks["block"][first], stamp_ns)
        self._totals.sent_bytes += sum(d.nbytes for d in parcel.data)
        return encode(Work(stamp_ns, peer.take_released(), parcel.pieces, parcel.blocks, list(parcel.data)))

    def send(self, peer: Peer, message: Message) -> bool:
        """False if the peer is gone."""
        peer.outbox.append(encode(message))
        return self.drain(peer)

    def stands(self, peer: Peer) -> bool:
        """Has its connection still the other end that has joined? If not, its name may be somebody else's by now."""
        return peer.descriptor == NO_CONNECTION or self._outside.other_end(peer.descriptor) == peer.other_end

    def drain(self, peer: Peer) -> bool:
        """False if the peer is gone. What ZeroMQ does not take now waits in the outbox, and streams wait for the
        outbox. ZeroMQ sends to a name, which another connection may hold by now, so the connection is checked first."""
        if (peer.outbox or peer.streams) and not self.stands(peer):
            return False
        while True:
            while peer.outbox:
                try:
                    send_frames(self._router, [peer.identity, *peer.outbox[0]], zmq.NOBLOCK)
                except zmq.Again:
                    return True
                except zmq.ZMQError as error:
                    if error.errno == zmq.EHOSTUNREACH:
                        return False
                    raise
                peer.outbox.popleft()
            if not peer.streams:
                return True
            frames = next(peer.streams[0], None)
            if frames is None:
                peer.streams.popleft()
            else:
                peer.outbox.append(frames)

    def reply(self, identity: bytes, message: Message) -> None:
        """To a sender that is not a peer: dropped if it cannot be delivered now."""
        with contextlib.suppress(zmq.ZMQError):
            send_frames(self._router, [identity, *encode(message)], zmq.NOBLOCK)
