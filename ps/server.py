"""The ZeroMQ shell around the dispatcher: one ROUTER, one thread.

Messages become events, instructions become messages. Operands leave zero-copy from where they lie; answers are written
straight into the product's output. Other threads only submit products and wait for devices.

Assumes that an operand is not changed between `submit` and `done`: what is on its way is a view of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.arriving import arrived_within, descriptor
from agent.clock import Clock, WallClock
from agent.connection import SILENT_AFTER
from agent.errors import Failure
from agent.wire import (
    BLOCK,
    MAX_PROBE_BYTES,
    PIECE,
    Goodbye,
    Heartbeat,
    Join,
    Leave,
    Message,
    Probe,
    Refused,
    Result,
    VersionMismatch,
    Welcome,
    WireError,
    Work,
    decode,
)
from ps.access import REVOKED, Refusal
from ps.access_file import AccessFile
from ps.answers import Answers
from ps.attendance import Attendance
from ps.checking import Checking
from ps.deadlines import after_a_turn_s
from ps.dispatcher import Dispatcher
from ps.door import PASSING, open_router
from ps.events import (
    AcceptBlocks,
    BlocksLost,
    BlocksRecovered,
    CancelBlocks,
    CheckJob,
    DevicesLeft,
    Event,
    Instruction,
    JobChecked,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    OperandsForgotten,
    SendBlocks,
    Submission,
    SuspendDevice,
    TimePassed,
)
from ps.jobs import Live, Product, Totals
from ps.ledger import REACTION_S
from ps.operands import Operand
from ps.peers import Peer, missing_ones, printable
from ps.planner import Level, Planner
from ps.records import Records
from ps.requests import Requests
from ps.roster import Roster
from ps.shipping import Shipping

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
MESSAGES_A_TURN = 256  # answers taken before the rest of the loop gets its turn
COMPLAINTS = 1000  # connections whose nonsense is mentioned, once each
NOTHING = memoryview(bytes(MAX_PROBE_BYTES))  # what probes are answered with; the same for all


class ServerError(Failure):
    """The server has stopped; the text says why."""


class Server:
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        run: str = "run",
        heartbeat_s: float = HEARTBEAT_S,
        planner: Planner | None = None,
        verify: bool = True,
        clock: Clock | None = None,
        listen: Sequence[str] = (),
        unlisted: Sequence[str] = (),
        access: AccessFile | None = None,
    ) -> None:
        """`clock`: of blocks and their stamps. Heartbeats and silence are on the host's own clock whatever it is: a
        connection lives or dies in the host's time, however slow the devices behind it are made. `listen`: where
        devices that `access` knows may join, encrypted; `unlisted`: likewise, but invitations do not name it; at
        `host`, which is this machine itself, everybody may."""
        self.totals = Totals()
        self.records = Records()
        self.roster = Roster()
        self.labels = self.roster.labels  # one a device, by id
        self.suspended = self.roster.suspended  # device -> why it gets no more work
        self.notice: Callable[[str], None] = log.warning
        self.note: Callable[..., None] = lambda event, **fields: None  # an event of a real device, for the results
        self.attendance = Attendance()
        self.bundle = ("", "")  # where an agent of this version is, and its SHA-256; for agents that are too old
        self.error: BaseException | None = None
        self._clock = clock or WallClock()
        self._run, self._heartbeat_s = run, heartbeat_s
        self._dispatcher, self._verify = Dispatcher(planner or Planner(), verify), verify
        self._jobs: dict[int, Live] = {}
        self._peers: dict[bytes, Peer] = {}
        self._requests = Requests()
        self._answered: list[tuple[Peer, Result]] = []  # this turn's answers
        self._next_job = 0
        self._checking = Checking(self._jobs, self.totals)
        self._complained: set[bytes] = set()
        self._said_waiting = ""
        self._stopping = False
        self._goodbye = ""
        opened = open_router(host, port, listen, unlisted, access, lambda text: self.notice(text))
        self._context, self._router, self.address, self._door = opened
        self.public_addresses = self._door.addresses if self._door else []  # where devices elsewhere may join
        self.unlisted_addresses = self._door.unlisted_addresses if self._door else []  # and where they are not told to
        self.public_key = self._door.public_key if self._door else ""
        self._shipping = Shipping(self._router, self._peers, self.roster.peer_of, self._jobs, self.totals)
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    # ---- for other threads

    def start(self) -> Server:
        # The interpreter lets a busy thread run for 5 ms before another gets its turn; answers must not wait so long.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self._thread.start()
        return self

    def stop(self, reason: str = "the run is over") -> None:
        """Tell the devices, and end. Safe to call twice."""
        self._goodbye = reason
        self._stopping = True
        self._requests.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        """Products that are ready at the same moment; they are planned together."""
        self._ask(lambda: self._begin(products, ahead))

    def forget(self, operands: Sequence[Operand]) -> None:
        """They are about to change: no slab of them is kept any longer."""
        self._ask(lambda: self._forget_operands([operand.id for operand in operands]))

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        """Wait until products have reported to `done`: what they reported."""
        finished: list[int] = []
        while not finished:
            with contextlib.suppress(Empty):
                finished.append(done.get(timeout=0.5))  # comes up now and then, so that Ctrl-C is heard
                while True:
                    finished.append(done.get_nowait())
            if self.error is not None:
                raise ServerError(f"the server has stopped: {self.error!r}")
        return finished

    def _ask(self, something: Callable[[], None]) -> None:
        if self.error is not None:
            raise ServerError(f"the server has stopped: {self.error}")
        self._requests.add(something)

    def trust(self, key: str, name: str, devices: int) -> None:
        """For this run the holder of this key may join without an invitation, with so many devices a connection."""
        if self._door is not None:
            self._door.trust(key, name, devices)

    @property
    def late_blocks_helped(self) -> int:
        return self._dispatcher.rescues.begun

    @property
    def absent(self) -> list[int]:
        """Devices that have left again."""
        return [device for device, record in enumerate(self._dispatcher.devices) if not record.alive]

    @property
    def profiles(self) -> NDArray[np.void]:
        """Of every device that ever joined, by id."""
        return self._dispatcher.profiles

    @property
    def devices(self) -> int:
        """How many devices are there now."""
        return self.attendance.count

    def wait_for_devices(self, count: int, timeout_s: float) -> bool:
        return self.attendance.wait_for(count, timeout_s)

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9

    # ---- the server's thread

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("the server's thread failed")
            self.error = error
        finally:
            self.attendance.end()
            for live in list(self._jobs.values()):
                live.product.done()  # whoever waits finds `error` set
            if self._door is not None:
                self._door.close()
            self._router.close()
            self._context.term()
            self._requests.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        for source in (self._requests.fileno(), *(self._door.sockets if self._door else ())):
            poller.register(source, zmq.POLLIN)
        next_beat, next_look = time.monotonic(), self._now_s()
        free_s = next_look  # when lateness could be judged last
        while not self._stopping:
            stuck = [peer for peer in self._peers.values() if peer.outbox or peer.streams]
            look_s = max(next_look, self._dispatcher.deadlines.next_s)
            until_look_s = self._clock.wait_s(int(1e9 * look_s)) if look_s < float("inf") else look_s
            timeout_s = 0.001 if stuck else max(0.001, min(next_beat - time.monotonic(), until_look_s))
            ready = dict(poller.poll(0 if self._requests else int(timeout_s * 1000)))
            woke, woke_s = time.perf_counter(), self._now_s()
            if woke_s >= next_look:
                free_s = woke_s
            if self._requests.fileno() in ready:
                self._requests.heard()
            if self._door is not None:
                self._door.attend()
            heard_all = self._read()
            # nobody is late whose answer may have come meanwhile: so this is before anything that takes its time
            if heard_all and (now_s := self._now_s()) >= max(next_look, self._dispatcher.deadlines.next_s):
                next_look = now_s + REACTION_S
                self._handle(TimePassed())
            self._requests.do_one()  # one a turn: answers do not wait for all of them
            for peer in stuck:
                if peer.identity in self._peers and not self._shipping.drain(peer):
                    self._lose(peer, "its connection is gone")
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_s
                self._beat(heard_all)
            next_look = max(next_look, after_a_turn_s(free_s, woke_s, self._now_s()))
            turn_s = time.perf_counter() - woke
            self.totals.busy_s += turn_s
            self.totals.longest_turn_s = max(self.totals.longest_turn_s, turn_s)
        for peer in list(self._peers.values()):
            self._shipping.send(peer, Goodbye(self._goodbye))
        if self._door is not None:
            self._door.left(peer.key for peer in self._peers.values())

    def _read(self) -> bool:
        """Take what has arrived; True if nothing is left."""
        try:
            for _ in range(MESSAGES_A_TURN):
                try:
                    frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return True
                key = self._door.key_of(frames[0]) if self._door else ""
                if key is not None:
                    self._receive(bytes(frames[0].buffer), key, frames[1:])
            return False
        finally:
            self._take_answers()

    def _beat(self, heard_all: bool) -> None:
        """A word to everybody. A dead connection shows itself when it is spoken to, a frozen one by its silence, which
        counts only if everything that did arrive has been heard, and in beats, not in seconds: after a long turn (this
        process was stopped, or the machine slept) their words may still be on their way to us. Nor is anybody silent
        while bytes of a long message come."""
        patience_s = SILENT_AFTER * self._heartbeat_s
        revoked = self._door.revoked(peer.key for peer in self._peers.values()) if self._door else set()
        for peer in list(self._peers.values()):
            if peer.key in revoked:
                self._shipping.reply(peer.identity, Refused(REVOKED.reason, final=True))
                self._lose(peer, "it was revoked")
                continue
            peer.silent_beats += heard_all
            if peer.silent_beats > SILENT_AFTER and not arrived_within(peer.descriptor, patience_s):
                self._lose(peer, "silent")
                continue
            if peer.outbox:
                continue  # it will hear from us as soon as it reads
            message: Message = Heartbeat()
            if peer.owes_release:
                message = Work(self._clock.now_ns(), peer.take_released(), np.empty(0, PIECE), np.empty(0, BLOCK), [])
            if not self._shipping.send(peer, message):
                self._lose(peer, "its connection is gone")

    def _receive(self, identity: bytes, key: str, frames: Sequence[zmq.Frame]) -> None:
        """`key`: whose connection it came over; empty if that is a plain one, from this machine."""
        peer = self._peers.get(identity)
        if peer is not None and peer.key != key:  # a name that somebody else had before; ZeroMQ lets anyone choose one
            self._lose(peer, "its connection is gone")
            peer = None
        try:
            message = decode(frames)
            if peer is not None:
                peer.silent_beats, peer.descriptor = 0, descriptor(frames[0])
            match message:
                case Result() if peer is not None:
                    self._answered.append((peer, message))
                case Heartbeat() if peer is not None:
                    pass
                case Join():
                    self._join(identity, key, message)
                case Probe(token=token, wanted_bytes=wanted):
                    if key and self._door and (refusal := self._door.may_probe(key, wanted)):
                        self._shipping.reply(identity, Refused(refusal.reason, final=False))
                    else:
                        self._shipping.reply(identity, Probe(token, 0, NOTHING[:wanted]))
                case Leave() if peer is not None:
                    self._take_answers()  # what it returned before it left counts
                    self._leave(peer, message)
                case Leave(name=name) if peer is None and name:
                    if not key or (self._door and self._door.may_probe(key, 0) is None):
                        self._stays_away(printable(name), printable(message.reason), message.until_s)
                case _ if peer is None:
                    self._shipping.reply(identity, Refused("this server does not know you: join first", final=False))
                case _:
                    raise WireError(f"a device may not send {type(message).__name__} here")
        except WireError as error:
            self._complain(identity, error)

    def _complain(self, identity: bytes, error: WireError) -> None:
        self.totals.dropped_messages += 1
        if identity not in self._complained and len(self._complained) < COMPLAINTS:
            self._complained.add(identity)
            self.notice(f"dropped a message that makes no sense: {error}")
        final = isinstance(error, VersionMismatch)
        text = f"{error}" + ("; update the agent" if final else "")
        self._shipping.reply(identity, Refused(text, final, *(self.bundle if final else ("", ""))))
        if (peer := self._peers.get(identity)) is not None:
            self._lose(peer, "it sent what makes no sense")  # it may join again, its blocks do not wait for it

    def _join(self, identity: bytes, key: str, message: Join) -> None:
        """A connection, or more devices of one that is there: they get the next indices."""
        if key and not self._may_join(identity, key, message):
            return
        peer = self._peers.setdefault(identity, Peer(identity, message.about, key))
        if (before := self._peers.get(self.attendance.moved(message.about, identity))) is not None:
            self._lose(before, "it has joined again from elsewhere")
            if identity not in self._peers:
                return  # its connection broke when it was given blocks of the other one
        labels = [printable(label) for label in message.labels]
        joined = self.roster.enter(peer, labels, message.profiles)
        new, begun_ns = joined.devices, self._clock.now_ns()
        instructions = self._dispatcher.handle(joined, begun_ns / 1e9)  # before anybody hears that they are there
        self.attendance.joined(new, labels, message.about, self._now_s())
        if new[0] in self.attendance.real:
            self.note("real", name=labels[0], device=new[0], kernel=printable(message.about.get("kernel", "")))
        self._shipping.send(peer, Welcome(self._heartbeat_s, self._run))
        self._said_waiting = ""
        self._carry_out(instructions, begun_ns)

    def _may_join(self, identity: bytes, key: str, message: Join) -> bool:
        assert self._door is not None, "only a door has keys"
        there = self._peers[identity].index if identity in self._peers else ()
        guest = self._door.admit(key, message, sum(self._dispatcher.devices[device].alive for device in there))
        if isinstance(guest, Refusal):
            self._shipping.reply(identity, Refused(guest.reason, final=guest not in PASSING))
            return False
        if guest.devices == 1:  # a new address, the same device
            for old in [p for p in self._peers.values() if p.key == key and p.identity != identity]:
                self._lose(old, "it has joined again from elsewhere")
        return True

    def _leave(self, peer: Peer, message: Leave) -> None:
        if np.any(message.devices >= len(peer.ids)):
            raise WireError("a device that does not exist cannot leave")
        leaving = sorted(peer.index.keys() & {peer.ids[index] for index in message.devices.tolist()})
        leaving = [d for d in leaving if self._dispatcher.devices[d].alive]
        reason, until_s = printable(message.reason), message.until_s
        for device in leaving:
            blocks = len(self._dispatcher.devices[device].in_flight)
            text = self.attendance.left(device, self.labels[device], reason, until_s, blocks, self._now_s())
            if text:
                self.notice(text)
                self.note("left", name=self.labels[device], reason=reason, until_s=until_s, blocks=blocks)
        self._forget(leaving)

    def _stays_away(self, name: str, reason: str, until_s: float | None) -> None:
        if text := self.attendance.stays_away(name, reason, until_s):
            self.notice(text)
            self.note("away", name=name, reason=reason, until_s=until_s)

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        gone = [d for d in peer.index if self._dispatcher.devices[d].alive]
        self.roster.closed(peer)
        if self._door is not None:
            self._door.left([peer.key])
        if not gone:
            return  # all had left before
        self.totals.lost_devices += len(gone)
        what = self.labels[gone[0]] if len(gone) == 1 else f"{len(gone)} devices"
        self.notice(f"lost {what} ({reason}): their blocks go to the others")
        self._forget(gone)

    def _forget(self, devices: list[int]) -> None:
        self._gone(devices)
        self._handle(DevicesLeft(devices))

    def _gone(self, devices: list[int]) -> None:
        self.attendance.gone(devices)
        self.roster.left_idle(device for device in devices if not self._dispatcher.devices[device].worked)

    def _begin(self, products: Sequence[Product], ahead: tuple[Level, ...]) -> None:
        numbered = dict(enumerate(products, self._next_job))
        self._next_job += len(products)
        new = [Submission(job, p.request, p.urgent, p.plan, p.kept) for job, p in numbered.items()]
        submitted = JobsSubmitted(new, ahead)
        planned = self._dispatcher.prepare(submitted, self._now_s())
        begun_ns = self._clock.now_ns()
        instructions = self._dispatcher.handle(planned, begun_ns / 1e9)
        for job, product in numbered.items():
            self._jobs[job] = Live(product, self._dispatcher.jobs[job], np.zeros(0, np.uint64))
        self._carry_out(instructions, begun_ns)
        if self._verify:
            self._checking.prepare(numbered)
        self._dispatcher.plan_ahead(self._now_s())

    def _forget_operands(self, operands: list[int]) -> None:
        self._handle(OperandsForgotten(operands))
        for peer in self._peers.values():
            for operand in operands:
                peer.forget(operand)

    def _take_answers(self) -> None:
        """Deal with all answers that this turn has brought, as one event."""
        batch, self._answered = self._answered, []
        if not batch:
            return
        try:
            self._answers(batch)
        except WireError:  # one of them makes no sense: find out which
            for peer, message in batch:
                try:
                    self._answers([(peer, message)])
                except WireError as error:
                    self._complain(peer.identity, error)

    def _answers(self, batch: list[tuple[Peer, Result]]) -> None:
        received_ns, answers = self._clock.now_ns(), Answers.of(batch, self._jobs)
        for peer, job, block in answers.answered:
            peer.answered(job, block)
        if answers.bad.devices:
            self._handle(answers.bad)
        self._handle(answers.good, lambda places: answers.accept(places, self.totals, self.records, received_ns))

    # ---- instructions

    def _handle(self, event: Event, accept: Callable[[list[int]], None] | None = None) -> None:
        begun_ns = self._clock.now_ns()
        self._carry_out(self._dispatcher.handle(event, begun_ns / 1e9), begun_ns, accept)

    def _carry_out(
        self,
        instructions: list[Instruction],
        begun_ns: int,
        accept: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Do as the dispatcher says, in its order, and check what is to be checked when the devices have their work:
        a check may suspend some of them. `begun_ns`: when the dispatcher was told what has happened, which is when its
        blocks go out by the model."""
        planned_ns = self._clock.now_ns()
        complete: list[int] = []
        for instruction in instructions:
            match instruction:
                case AcceptBlocks(positions=positions):
                    assert accept is not None, "only answers can be accepted"
                    accept(positions)
                case CancelBlocks():
                    for peer in self._shipping.cancel(instruction):
                        self._lose(peer, "its connection is gone")
                case SendBlocks():
                    for peer in self._shipping.send_blocks(instruction, begun_ns):
                        self._lose(peer, "its connection is gone")
                case JobFinished(job=job):
                    self._finish(job)
                case JobWaits(reason=reason):
                    self._say_waiting(reason)
                case SuspendDevice(device=device, reason=reason):
                    self.notice(f"suspended {self.labels[device]}: {reason}")
                    self.suspended[device] = reason
                    self._gone([device])
                case CheckJob(job=job):
                    complete.append(job)
                case BlocksLost(loss=loss, devices=devices, blocks=blocks):
                    self.records.lost(loss, devices, blocks, begun_ns, planned_ns)
                case BlocksRecovered(loss=loss):
                    self.records.recovered(loss, self._clock.now_ns())
        self.records.sent_again(self._clock.now_ns())
        for job in complete:
            self._handle(JobChecked(job, self._checking.wrong(job)))

    def _say_waiting(self, reason: str) -> None:
        """Once for each reason, until somebody joins."""
        if reason == self._said_waiting:
            return
        self._said_waiting = reason
        missing = "" if self.devices else missing_ones([self.labels[d] for d in self.absent if d not in self.suspended])
        elsewhere = "; from elsewhere with an invitation: cleave invite" if self._door else ""
        help_ = f"One joins with: python -m agent --ps {self.address}{elsewhere}"
        self.notice(f"waiting for a device that can go on: {reason}{missing}. {help_}")

    def _finish(self, job: int) -> None:
        live = self._jobs.pop(job)
        for identity in live.holders:
            if (peer := self._peers.get(identity)) is not None:
                peer.finished(job)
        product = live.product
        self.records.finished(job, product.name, product.step, product.shape, live.job.tiles, live.stamps())
        product.done()
