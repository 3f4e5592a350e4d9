"""Which devices are there: they join, leave, are lost and are suspended.

Runs in the server's thread and works on the server's tables. Reports every change to the dispatcher (`tell`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agent.protocol.arriving import NO_CONNECTION, Address
from agent.protocol.wire import Join, Leave, Refused, Welcome, WireError, printable
from ps.access.admission import Caller
from ps.access.endpoints import Endpoints
from ps.access.joining import PASSING
from ps.access.reputation import Stay
from ps.access.standings import Standings
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import DevicesJoined, DevicesLeft, Event
from ps.transport.attendance import LEFT, LOST, SUSPENDED, Attendance
from ps.transport.jobs import Totals
from ps.transport.peers import Peer
from ps.transport.roster import Roster
from ps.transport.shipping import Shipping


@dataclass(frozen=True, slots=True)
class Reports:
    """Callbacks into the server."""

    tell: Callable[[Event], None]  # tells the dispatcher and carries out its instructions
    tell_joined: Callable[[DevicesJoined, Callable[[], None]], None]  # the same, with a callback in between
    now_s: Callable[[], float]  # the dispatcher's time
    say: Callable[[str], None]  # a notice for people
    record: Callable[..., None]  # an event of a real device, for the results


class Membership:
    def __init__(
        self,
        peers: dict[bytes, Peer],
        roster: Roster,
        attendance: Attendance,
        endpoints: Endpoints,
        standings: Standings,
        dispatcher: Dispatcher,
        shipping: Shipping,
        totals: Totals,
        reports: Reports,
        welcome: Welcome,
    ) -> None:
        self._peers, self._roster, self._attendance = peers, roster, attendance
        self._join_admission, self._guard, self._standings = endpoints.join_admission, endpoints.guard, standings
        self._dispatcher, self._shipping, self._totals, self._reports = dispatcher, shipping, totals, reports
        self._welcome = welcome
        self._right: Counter[int] = Counter()  # blocks of real devices that were found right
        self._unreachable: dict[bytes, Peer] = {}  # their connection has ended; unread messages may say why
        self._who: dict[int, str] = {}  # real devices -> to whom their standing belongs

    # ---- joining

    def join(
        self,
        identity: bytes,
        caller: Caller,
        message: Join,
        connection: int = NO_CONNECTION,
        end: Address | None = None,
    ) -> None:
        """Devices join by a new connection, whose other end is `end`, or by one that has joined before."""
        who = "" if caller.of_the_run else self._standings.identity(caller.key, message.about, identity)
        if who and (banned := self._standings.may_join(who)) is not None:
            self._shipping.reply(identity, Refused(banned.reason, final=False, until_s=banned.until_s))
            return
        if not self._may_join(identity, caller, message):
            return
        about = message.about
        if not caller.of_the_run:  # a claim; only pods of this run are emulated
            about = {key: text for key, text in about.items() if key != "kind"}
        profiles = self._standings.corrected(who, message.profiles) if who else message.profiles
        fresh = Peer(
            identity,
            about,
            caller.key,
            caller.of_the_run,
            float(profiles["down_bps"].max()),
            int(profiles["memory_bytes"].min()),
            caller.line,
            who=who,
            descriptor=connection,
            other_end=end,
        )
        peer = self._peers.setdefault(identity, fresh)
        if (before := self._peers.get(self._attendance.moved(about, identity))) is not None:
            self.lose(before, "it has joined again from elsewhere")
            if identity not in self._peers:
                return  # its connection broke when it was given blocks of the other one
        labels = [printable(label) for label in message.labels]
        joined = self._roster.enter(peer, labels, profiles)
        new = joined.devices
        for device in joined.again:  # numbers of devices that never worked are given again
            self._who.pop(device, None)
        self._who |= dict.fromkeys(new if who else (), who)
        joined = replace(joined, newcomers=not (peer.of_the_run or (who and self._standings.proven(who))))

        def decided() -> None:
            """Announce the devices; the dispatcher knows them by now."""
            self._attendance.joined(new, labels, about, self._reports.now_s())
            if new[0] in self._attendance.real:
                kernel = printable(about.get("kernel", ""))
                self._reports.record("real", name=labels[0], device=new[0], kernel=kernel)
            self._shipping.send(peer, self._welcome)

        self._reports.tell_joined(joined, decided)
        if not who and (barred := [new[n] for n in self._standings.barred(labels)]):
            why = {device: self._standings.why_barred(self._roster.labels[device]) for device in barred}
            self._roster.suspended.update(why)
            self._forget([device for device in barred if self._dispatcher.is_alive(device)], SUSPENDED)

    def join_again(self, peer: Peer, caller: Caller, message: Join, size: int) -> None:
        """Devices join by a connection over which devices joined before, and may have left."""
        if not peer.of_the_run and not peer.allowance.joined_again():
            raise WireError("a device that leaves and joins again and again")
        if (refusal := self._join_admission.may_read_join(caller, size)) is not None:
            self._shipping.reply(peer.identity, Refused(refusal.reason, final=refusal not in PASSING))
        else:
            self.join(peer.identity, caller, message)

    def _may_join(self, identity: bytes, caller: Caller, message: Join) -> bool:
        there = self._peers[identity].index if identity in self._peers else ()
        present = sum(self._dispatcher.is_alive(device) for device in there)
        refusal = self._join_admission.admit(caller, message, present)
        if refusal is not None:
            self._shipping.reply(identity, Refused(refusal.reason, final=refusal not in PASSING))
            return False
        if caller.key and not caller.of_the_run:  # a new address, the same device
            for old in [p for p in self._peers.values() if p.key == caller.key and p.identity != identity]:
                self.lose(old, "it has joined again from elsewhere")
        return True

    # ---- leaving

    def leave(self, peer: Peer, message: Leave) -> None:
        if np.any(message.devices >= len(peer.ids)):
            raise WireError("a device that does not exist cannot leave")
        leaving = sorted(peer.index.keys() & {peer.ids[index] for index in message.devices.tolist()})
        leaving = [d for d in leaving if self._dispatcher.is_alive(d)]
        self._stayed(peer, leaving)
        reason, until_s = printable(message.reason), message.until_s
        for device in leaving:
            blocks, label = self._dispatcher.blocks_in_flight(device), self._roster.labels[device]
            if text := self._attendance.left(device, label, reason, until_s, blocks, self._reports.now_s()):
                self._reports.say(text)
                self._reports.record("left", name=label, reason=reason, until_s=until_s, blocks=blocks)
        self._forget(leaving, LEFT)

    def stays_away(self, name: str, reason: str, until_s: float | None) -> None:
        if text := self._attendance.stays_away(name, reason, until_s):
            self._reports.say(text)
            self._reports.record("away", name=name, reason=reason, until_s=until_s)

    def lose(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        gone = [d for d in peer.index if self._dispatcher.is_alive(d)]
        self._stayed(peer, gone)
        self._roster.closed(peer)
        self._join_admission.left([peer.key])
        self._guard.left(peer.descriptor, peer.other_end, peer.identity)
        if not gone:
            return  # all had left before
        self._totals.lost_devices += len(gone)
        what = self._roster.labels[gone[0]] if len(gone) == 1 else f"{len(gone)} devices"
        self._reports.say(f"lost {what} ({reason}): their blocks go to the others")
        self._forget(gone)

    def unreachable(self, *peers: Peer) -> None:
        """Sending to these peers failed, or they do not read. If the connection has ended, its unread messages are read
        before it is lost: they may say that its devices leave."""
        for peer in peers:
            if peer.does_not_read:
                self.cut(peer, "it does not read what it is sent")
            else:
                self._unreachable[peer.identity] = peer

    @property
    def ended(self) -> list[Peer]:
        """The peers whose connection has ended and whose messages may be unread. Asked before a read: a connection that
        ends while the read's answers are handled may have a message that came after the socket was empty."""
        return list(self._unreachable.values())

    def lose_ended(self, read: list[Peer]) -> None:
        """Lose these peers: all that they sent has been read."""
        for peer in read:
            if self._unreachable.get(peer.identity) is peer:
                del self._unreachable[peer.identity]
            if self._peers.get(peer.identity) is peer:
                self.lose(peer, "its connection is gone")

    def cut(self, peer: Peer, reason: str) -> None:
        """Lose this peer and close its connection."""
        self.lose(peer, reason)
        self._guard.cut(peer.descriptor, peer.other_end)

    def over(self) -> None:
        """Save the standing of real devices; the run is over."""
        for peer in self._peers.values():
            self._stayed(peer, [d for d in peer.index if self._dispatcher.is_alive(d)])
        self._join_admission.left(peer.key for peer in self._peers.values())
        self._standings.retry()

    def _forget(self, devices: list[int], how: str = LOST) -> None:
        self._gone(devices, how)
        self._reports.tell(DevicesLeft(devices))

    def _gone(self, devices: list[int], how: str) -> None:
        self._attendance.gone(devices, how)
        self._roster.left_idle(device for device in devices if not self._dispatcher.has_worked(device))

    # ---- standing

    def suspended(self, device: int, reason: str, wrong: bool) -> None:
        """The dispatcher has suspended it."""
        self._reports.say(f"suspended {self._roster.labels[device]}: {reason}")
        self._roster.suspended[device] = reason
        self._gone([device], SUSPENDED)
        self.ban(device, reason, wrong)

    def ban(self, device: int, reason: str, wrong: bool) -> None:
        """Ban a device. A real one is told and its connection closed; it may join again when the ban is over."""
        label = self._roster.labels[device]
        if (who := self._who.get(device)) is None:
            self._standings.bar(label, reason)
            return
        told = self._standings.suspended(who, label, reason, wrong)
        for peer in [peer for peer in self._peers.values() if peer.who == who]:
            self._shipping.reply(peer.identity, Refused(told.reason, final=False, until_s=told.until_s))
            self.lose(peer, "it was suspended")

    def delivered(self, blocks: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        """Count correct blocks of a finished product. `blocks`: how many each device computed."""
        present = self._attendance.present
        self._right.update({d: int(blocks[d]) for d in present if d < len(blocks) and blocks[d]})

    def _stayed(self, peer: Peer, devices: Sequence[int]) -> None:
        """Add what these real devices have done to their standing."""
        for device in devices if peer.who else ():
            slowness, refused = self._dispatcher.slowness(device), self._dispatcher.refusals(device)
            stay = Stay(self._right.pop(device, 0), refused, slowness)
            self._standings.left(peer.who, self._roster.labels[device], stay)
