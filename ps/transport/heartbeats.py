"""Heartbeats to every connection, and the checks that come with them: silence, revocation, too many bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.wire import BLOCK, PIECE, Heartbeat, Message, Refused, Work
from ps.access.access_list import REVOKED
from ps.access.joining import JoinAdmission
from ps.access.standings import Standings
from ps.outside import Outside
from ps.transport.membership import Membership
from ps.transport.peers import Peer
from ps.transport.shipping import Shipping


class Heartbeats:
    def __init__(
        self,
        every_s: float,
        peers: Mapping[bytes, Peer],
        outside: Outside,
        join_admission: JoinAdmission,
        standings: Standings,
        shipping: Shipping,
        membership: Membership,
        now_ns: Callable[[], int],
    ) -> None:
        """`now_ns`: the time for stamps, by the clock of blocks."""
        self.every_s = every_s
        self._peers, self._outside, self._join_admission, self._standings = peers, outside, join_admission, standings
        self._shipping, self._membership, self._now_ns = shipping, membership, now_ns

    def beat(self, heard: bool) -> None:
        """Send a heartbeat to every peer, and lose those that are gone or silent. `heard`: everything that has arrived
        was read; otherwise no peer counts as silent. Silence is counted in heartbeats, not in seconds: after this
        process was stopped or the machine slept, messages may still be on their way. A peer is not silent while bytes
        of a long message arrive."""
        self._standings.retry()
        self._join_admission.write()
        patience_s = SILENT_AFTER * self.every_s
        revoked = self._join_admission.revoked(peer.key for peer in self._peers.values())
        for peer in list(self._peers.values()):
            if peer.key in revoked:
                self._shipping.reply(peer.identity, Refused(REVOKED.reason, final=True))
                self._membership.cut(peer, "it was revoked")
                continue
            if not peer.of_the_run:
                peer.allowance.beat()
                too_much = self._outside.bytes_received(peer.descriptor) > peer.allowance.bytes
                if too_much and self._outside.other_end(peer.descriptor) == peer.other_end:
                    self._membership.cut(peer, "it sends more than it was asked for")
                    continue
            peer.silent_beats += heard
            if peer.silent_beats > SILENT_AFTER and not self._outside.arrived_within(peer.descriptor, patience_s):
                self._membership.lose(peer, "silent")
                continue
            if peer.outbox:
                continue  # other messages wait for it already
            message: Message = Heartbeat()
            if peer.owes_release:
                message = Work(self._now_ns(), peer.take_released(), np.empty(0, PIECE), np.empty(0, BLOCK), [])
            if not self._shipping.send(peer, message):
                self._membership.unreachable(peer)
