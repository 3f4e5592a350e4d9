"""The ZeroMQ shell around the dispatcher: one ROUTER, one thread. Who is not admitted meets another
(`ps/access/entrance.py`).

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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.protocol.arriving import NO_CONNECTION, Address, arrived_within, bytes_received, descriptor, other_end
from agent.protocol.clock import Clock, WallClock
from agent.protocol.connection import SILENT_AFTER
from agent.protocol.errors import Failure
from agent.protocol.wire import (
    BLOCK,
    MAX_PROBE_BYTES,
    PIECE,
    Goodbye,
    Heartbeat,
    Join,
    Kind,
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
    printable,
)
from ps.access.access_file import AccessFile
from ps.access.access_list import REVOKED, Refusal
from ps.access.admission import Caller
from ps.access.endpoints import open_endpoints
from ps.access.joining import PASSING
from ps.access.listening import port_of
from ps.access.reputation import Stay
from ps.access.routing_ids import HeldMessage
from ps.access.standings import Standings
from ps.planning.background import PlanningThread
from ps.planning.planner import Level, Planner
from ps.scheduling.deadlines import after_a_turn_s
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksLost,
    BlocksRecovered,
    CancelBlocks,
    CheckJob,
    DevicesLeft,
    Event,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    NameStragglers,
    OperandsForgotten,
    SendBlocks,
    Submission,
    SuspendDevice,
    TimePassed,
)
from ps.scheduling.shell import Shell
from ps.scheduling.state import REACTION_S
from ps.transport.answers import Answers
from ps.transport.attendance import LEFT, LOST, SUSPENDED, Attendance
from ps.transport.checking import Checking
from ps.transport.jobs import Live, Product, Totals
from ps.transport.notices import stragglers_named
from ps.transport.operands import Operand
from ps.transport.peers import Peer, missing_ones
from ps.transport.records import Records
from ps.transport.requests import Requests
from ps.transport.roster import Roster
from ps.transport.shipping import Shipping
from ps.transport.standstill import Standstill

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
MESSAGES_A_TURN = 256  # answers taken before the rest of the loop gets its turn
# Lateness and silence are judged when all that has come is heard, but no later than this after they could have been:
# time passes however busy the socket is. Reading the answers of a thousand devices after a hitch takes less.
UNHEARD_S = 0.2
SENT_AWAY = 1024  # connections; each is cut within a second, and no more than a few hundred are open at a time
COMPLAINTS = 1000  # connections whose nonsense is mentioned, once each
NOTHING = memoryview(bytes(MAX_PROBE_BYTES))  # what probes are answered with; the same for all


class ServerError(Failure):
    """The server has stopped; the text says why."""


class Server(Shell[Answers]):
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
        remember: AccessFile | None = None,
    ) -> None:
        """`clock`: of blocks and their stamps. Heartbeats and silence are on the host's own clock whatever it is: a
        connection lives or dies in the host's time, however slow the devices behind it are made. `listen`: where
        devices that `access` knows may join, encrypted; `unlisted`: likewise, but invitations do not name it; at
        `host`, which is this machine itself, everybody may, and pods of this run with `pod_pass`. `remember`: where the
        standing of devices is kept, if not in `access`."""
        access = access.impatient() if access is not None else None
        self.totals = Totals()
        self.records = Records()
        self.roster = Roster()
        self.labels = self.roster.labels  # one a device, by id
        self.suspended = self.roster.suspended  # device -> why it gets no more work
        self.notice: Callable[[str], None] = log.warning
        self.note: Callable[..., None] = lambda event, **fields: None  # an event of a real device, for the results
        self.attendance = Attendance()
        self.bundle = ("", "")  # where a signed agent of this version is, and its SHA-256; for those that are too old
        self.error: BaseException | None = None
        self._given_up: BaseException | None = None  # what whoever waits for products is told
        self._clock = clock or WallClock()
        self._run, self._heartbeat_s = run, heartbeat_s
        super().__init__(Dispatcher(planner or Planner(), verify))
        self._verify = verify
        self._jobs: dict[int, Live] = {}
        self._peers: dict[bytes, Peer] = {}
        self._requests = Requests()
        self._planning = PlanningThread(self._requests.add)
        self._submitted: deque[tuple[Sequence[Product], tuple[Level, ...]]] = deque()  # while plans were being made
        self._answered: list[tuple[Peer, Result]] = []  # this turn's answers
        self._next_job = 0
        self._checking = Checking(self._jobs, self.totals, lambda: self.devices, lambda text: self.notice(text))
        self._complained: set[bytes] = set()
        self._sent_away: OrderedDict[bytes, None] = OrderedDict()
        self._said_waiting = ""
        self._silent = ""  # why no block can be hoped for, until one is accepted
        self._standstill = Standstill()
        self._stopping = False
        self._goodbye = ""
        try:
            endpoints = open_endpoints(host, port, listen, unlisted, access, self._say_soon, lambda: self.bundle)
        except BaseException:
            self._requests.close()
            raise
        self._endpoints, self._context, self._router, self._guard = (
            endpoints,
            endpoints.context,
            endpoints.router,
            endpoints.guard,
        )
        self._join_admission, self._admission, self._routing_ids = (
            endpoints.join_admission,
            endpoints.admission,
            endpoints.routing_ids,
        )
        self.address, self.data_address = (
            endpoints.address,
            endpoints.data_address,
        )  # where one knocks, and where one joins
        self.public_addresses = endpoints.public_addresses  # where devices elsewhere may join
        self.unlisted_addresses = endpoints.unlisted_addresses  # and where they are not told to
        self.enrolment_addresses = endpoints.enrolment_addresses  # where they bring invitations
        self.public_key = endpoints.public_key
        self._standings = Standings(access or remember, lambda text: self.notice(text))
        self._right: Counter[int] = Counter()  # blocks of real devices that were found right
        self._who: dict[int, str] = {}  # real devices -> to whom their standing belongs
        self._shipping = Shipping(self._router, self._peers, self.roster.peer_of, self._jobs, self.totals)
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    # ---- for other threads

    @property
    def pod_pass(self) -> dict[str, Any]:
        """What a pod of this run needs to join on this machine; it goes to its standard input and nowhere else."""
        return {"port": port_of(self.data_address), "password": self._endpoints.tickets.of_the_run}

    def _say_soon(self, text: str) -> None:
        """From the entrance's thread: people hear it from the server's."""
        self._requests.add(lambda: self.notice(text))

    def start(self) -> Server:
        # The interpreter lets a busy thread run for 5 ms before another gets its turn; answers must not wait so long.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self._endpoints.entrance.start()
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
            if self._given_up is not None and not finished:
                raise self._given_up
        return finished

    def give_up(self, error: BaseException) -> None:
        """Whoever waits for products, now or later, gets this instead."""
        self._given_up = error

    @property
    def waiting(self) -> str:
        """For what a job waits, as it was said last; empty once a device has joined."""
        return self._said_waiting or self._silent

    def _ask(self, something: Callable[[], None]) -> None:
        if self.error is not None:
            raise ServerError(f"the server has stopped: {self.error}")
        self._requests.add(something)

    def trust(self, key: str, name: str, devices: int) -> None:
        """For this run the holder of this key may join without an invitation, with so many devices a connection."""
        self._admission.trust(key, name, devices)
        self._guard.expected += devices

    @property
    def refused(self) -> int:
        """Connections, and messages at the entrance."""
        return self._endpoints.refusals.count + self._endpoints.entrance.refused

    @property
    def late_blocks_helped(self) -> int:
        return self._dispatcher.speculative_copies

    @property
    def absent(self) -> list[int]:
        """Devices that have left again."""
        return self._dispatcher.gone

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

    def _now_ns(self) -> int:
        return self._clock.now_ns()

    def _now_s(self) -> float:
        """The dispatcher's time, which leaves out what this thread has stood still."""
        return self._dispatch_s(self._now_ns())

    def _dispatch_s(self, now_ns: int) -> float:
        return now_ns / 1e9 - self._standstill.total_s / self._clock.scale

    def _mind_standstill(self, waited_s: float = 0.0) -> None:
        self._standstill.look(time.monotonic(), time.thread_time(), waited_s)

    # ---- the server's thread

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("the server's thread failed")
            self.error = error
        finally:
            self.attendance.end()
            self._planning.end()
            for live in list(self._jobs.values()):
                live.product.done()  # whoever waits finds `error` set
            self._endpoints.entrance.stop()
            self._join_admission.close()
            self._routing_ids.close()
            self._router.close()
            self._context.term()
            self._requests.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._requests.fileno(), zmq.POLLIN)
        next_beat, next_look = time.monotonic(), self._now_s()
        heard_s = time.monotonic()  # when all that had come was heard, or the wait for that began
        unheard = False
        free_s = next_look  # when lateness could be judged last
        while not self._stopping:
            stuck = [peer for peer in self._peers.values() if peer.outbox or peer.streams]
            look_s = max(next_look, self._dispatcher.next_look_s)
            until_look_s = (look_s - self._now_s()) * self._clock.scale
            timeout_s = 0.001 if stuck else max(0.001, min(next_beat - time.monotonic(), until_look_s))
            self._mind_standstill()
            ready = dict(poller.poll(0 if self._requests else int(timeout_s * 1000)))
            self._mind_standstill(timeout_s)
            woke, woke_s = time.perf_counter(), self._now_s()
            if woke_s >= next_look:
                free_s = woke_s
            if self._requests.fileno() in ready:
                self._requests.heard()
            if not unheard:
                heard_s = time.monotonic()
            unheard = not self._read()
            if not unheard:
                self._guard.all_read_s = time.monotonic()
            heard = not unheard or time.monotonic() >= heard_s + UNHEARD_S
            # nobody is late whose answer may have come meanwhile: so this is before anything that takes its time
            if heard and (now_s := self._now_s()) >= max(next_look, self._dispatcher.next_look_s):
                next_look = now_s + REACTION_S
                self._handle(TimePassed())
            self._requests.do_one()  # one a turn: answers do not wait for all of them
            for peer in stuck:
                if peer.identity in self._peers and not self._shipping.drain(peer):
                    self._lose(peer, "its connection is gone")
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_s
                self._beat(heard)
            next_look = max(next_look, after_a_turn_s(free_s, woke_s, self._now_s()))
            turn_s = time.perf_counter() - woke
            self.totals.busy_s += turn_s
            self.totals.longest_turn_s = max(self.totals.longest_turn_s, turn_s)
        for peer in list(self._peers.values()):
            self._shipping.send(peer, Goodbye(self._goodbye))
            self._stayed(peer, [d for d in peer.index if self._dispatcher.is_alive(d)])
        self._join_admission.left(peer.key for peer in self._peers.values())
        self._standings.retry()

    def _read(self) -> bool:
        """Take what has arrived; True if nothing is left."""
        try:
            for _ in range(MESSAGES_A_TURN):
                try:
                    frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return True
                self._receive(frames[0].bytes, frames)
            return False
        finally:
            self._take_answers()

    def _beat(self, heard: bool) -> None:
        """A word to everybody. A dead connection shows itself when it is spoken to, a frozen one by its silence, which
        counts only if what did arrive has been heard, and in beats, not in seconds: after a long turn (this
        process was stopped, or the machine slept) their words may still be on their way to us. Nor is anybody silent
        while bytes of a long message come."""
        self._standings.retry()
        self._join_admission.write()
        patience_s = SILENT_AFTER * self._heartbeat_s
        revoked = self._join_admission.revoked(peer.key for peer in self._peers.values())
        for peer in list(self._peers.values()):
            if peer.key in revoked:
                self._shipping.reply(peer.identity, Refused(REVOKED.reason, final=True))
                self._cut(peer, "it was revoked")
                continue
            if not peer.of_the_run:
                peer.allowance.beat()
                too_much = bytes_received(peer.descriptor) > peer.allowance.bytes
                if too_much and other_end(peer.descriptor) == peer.other_end:
                    self._cut(peer, "it sends more than it was asked for")
                    continue
            peer.silent_beats += heard
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

    def _receive(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        peer = self._peers.get(identity)
        if peer is None:
            self._receive_first(identity, frames)
            return
        caller = self._admission.caller(frames[0])
        if caller is None or caller.line != peer.line:  # somebody has taken its name
            self._take_answers()
            self._lose(peer, "its connection is gone")
            self._send_away(identity, descriptor(frames[0]))
            return
        try:
            message = decode(frames[1:])
            peer.silent_beats = 0
            if isinstance(message, Result):
                if not peer.of_the_run and not peer.allowance.answered(len(message.answers)):
                    raise WireError("more answers than it was given blocks")
                self._answered.append((peer, message))
                return
            if not peer.of_the_run and not peer.allowance.spoke():
                raise WireError("more messages than a device has to say")
            match message:
                case Heartbeat():
                    pass
                case Join():
                    self._join_again(peer, caller, message, len(frames[3]))
                case Probe():
                    if (refusal := self._join_admission.may_read_probe(caller, len(message.data))) is not None:
                        self._shipping.reply(identity, Refused(refusal.reason, final=False))
                    else:
                        self._probe(identity, caller, message)
                case Leave():
                    self._take_answers()  # what it returned before it left counts
                    self._leave(peer, message)
                case _:
                    raise WireError(f"a device may not send {type(message).__name__} here")
        except WireError as error:
            self._complain(identity, frames, error)

    def _receive_first(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """From a connection that was let in and has not joined. ZeroMQ lets a client choose its connection's name: one
        that another had a moment ago, or will have, must not stand for that one, so names that were chosen are not
        heard."""
        if identity in self._sent_away:
            return
        caller, connection = self._admission.caller(frames[0]), descriptor(frames[0])
        if caller is None and (judged := self._routing_ids.hear(identity, frames)) is not None:
            self._names_are_known(*judged)
            return
        given = self._routing_ids.is_given(identity)
        if caller is not None and given is None and self._routing_ids.hold(identity, frames):
            return
        if caller is None or not given:
            self._send_away(identity, connection)
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
            self._send_away(identity, connection)

    def _may_read(self, caller: Caller, frames: Sequence[zmq.Frame]) -> Refusal | None:
        """Before a word of one that has not joined is parsed, which costs more than all before."""
        kind = bytes(frames[1].buffer[5:6]) if len(frames) > 1 else b""
        if kind == bytes([Kind.JOIN]) and len(frames) == 4:
            return self._join_admission.may_read_join(caller, len(frames[3]))
        if kind == bytes([Kind.PROBE]):
            return self._join_admission.may_read_probe(caller, sum(map(len, frames)))
        return None

    def _names_are_known(self, given: Sequence[HeldMessage], chosen: Sequence[HeldMessage]) -> None:
        for held in chosen:
            self._send_away(held.identity, descriptor(held.frames[0]))
        for held in given:
            self._receive(held.identity, held.frames)

    def _heard_first(self, identity: bytes, caller: Caller, connection: int, message: Message) -> bool:
        """False: it has nothing more to say before it comes again."""
        match message:
            case Join():
                end = other_end(connection)
                if connection != NO_CONNECTION and end is None:
                    return False  # it is gone again
                self._join(identity, caller, message, connection, end)
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
                    self._stays_away(printable(name), printable(message.reason), message.until_s)
            case _:
                self._shipping.reply(identity, Refused("this server does not know you: join first", final=False))
        return False

    def _send_away(self, identity: bytes, connection: int) -> None:
        """It has not joined, and is not heard any more."""
        self._sent_away[identity] = None
        if len(self._sent_away) > SENT_AWAY:
            self._sent_away.popitem(last=False)
        self._guard.send_away(connection)

    def _probe(self, identity: bytes, caller: Caller, probe: Probe) -> bool:
        """Was it allowed?"""
        if not caller.of_the_run and (refusal := self._join_admission.may_probe(caller, probe.wanted_bytes)):
            self._shipping.reply(identity, Refused(refusal.reason, final=False))
            return False
        self._shipping.reply(identity, Probe(probe.token, 0, NOTHING[: probe.wanted_bytes]))
        return True

    def _complain(self, identity: bytes, frames: Sequence[zmq.Frame], error: WireError) -> None:
        """Its connection is over: it may come again, by the entrance, and its blocks do not wait for it."""
        self.totals.dropped_messages += 1
        if identity not in self._complained and len(self._complained) < COMPLAINTS:
            self._complained.add(identity)
            self.notice(f"dropped a message that makes no sense: {error}")
        final = isinstance(error, VersionMismatch)
        text = f"{error}" + ("; update the agent" if final else "")
        self._shipping.reply(identity, Refused(text, final, *(self.bundle if final else ("", ""))))
        if (peer := self._peers.get(identity)) is not None:
            self._cut(peer, "it sent what makes no sense")
        elif frames:
            self._send_away(identity, descriptor(frames[0]))

    def _cut(self, peer: Peer, reason: str) -> None:
        """Lost, and its connection ended."""
        self._lose(peer, reason)
        self._guard.cut(peer.descriptor, peer.other_end)

    def _join(
        self,
        identity: bytes,
        caller: Caller,
        message: Join,
        connection: int = NO_CONNECTION,
        end: Address | None = None,
    ) -> None:
        """A connection with that other end, or more devices of one that is there: they get the next indices."""
        who = "" if caller.of_the_run else self._standings.identity(caller.key, message.about, identity)
        if who and (banned := self._standings.may_join(who)) is not None:
            self._shipping.reply(identity, Refused(banned.reason, final=False, until_s=banned.until_s))
            return
        if not self._may_join(identity, caller, message):
            return
        about = message.about
        if not caller.of_the_run:  # whoever says so: only pods of this run are emulated
            about = {key: text for key, text in about.items() if key != "kind"}
        profiles = self._standings.corrected(who, message.profiles) if who else message.profiles
        fresh = Peer(
            identity, about, caller.key, caller.of_the_run, caller.line, who=who, descriptor=connection, other_end=end
        )
        peer = self._peers.setdefault(identity, fresh)
        if (before := self._peers.get(self.attendance.moved(about, identity))) is not None:
            self._lose(before, "it has joined again from elsewhere")
            if identity not in self._peers:
                return  # its connection broke when it was given blocks of the other one
        labels = [printable(label) for label in message.labels]
        joined = self.roster.enter(peer, labels, profiles)
        new, begun_ns = joined.devices, self._now_ns()
        for device in joined.again:  # numbers of devices that never worked are given again
            self._who.pop(device, None)
        self._who |= dict.fromkeys(new if who else (), who)
        joined = replace(joined, newcomers=not (peer.of_the_run or (who and self._standings.proven(who))))
        # before anybody hears that they are there
        instructions = self._dispatcher.handle(joined, self._dispatch_s(begun_ns))
        self.attendance.joined(new, labels, about, self._now_s())
        if new[0] in self.attendance.real:
            self.note("real", name=labels[0], device=new[0], kernel=printable(about.get("kernel", "")))
        self._shipping.send(peer, Welcome(self._heartbeat_s, self._run))
        self._said_waiting = ""
        self._carry_out(instructions, begun_ns)
        if not who and (barred := [new[n] for n in self._standings.barred(labels)]):
            self.suspended.update((device, self._standings.why_barred(self.labels[device])) for device in barred)
            self._forget([device for device in barred if self._dispatcher.is_alive(device)], SUSPENDED)

    def _join_again(self, peer: Peer, caller: Caller, message: Join, size: int) -> None:
        """Over a connection where devices have joined before, and may have left."""
        if not peer.of_the_run and not peer.allowance.joined_again():
            raise WireError("a device that leaves and joins again and again")
        if (refusal := self._join_admission.may_read_join(caller, size)) is not None:
            self._shipping.reply(peer.identity, Refused(refusal.reason, final=refusal not in PASSING))
        else:
            self._join(peer.identity, caller, message)

    def _suspend(self, device: int, reason: str, wrong: bool) -> None:
        """A real device is told, and its connection ends; it may be back when its ban is over."""
        if (who := self._who.get(device)) is None:
            self._standings.bar(self.labels[device], reason)
            return
        told = self._standings.suspended(who, self.labels[device], reason, wrong)
        for peer in [peer for peer in self._peers.values() if peer.who == who]:
            self._shipping.reply(peer.identity, Refused(told.reason, final=False, until_s=told.until_s))
            self._lose(peer, "it was suspended")

    def _stayed(self, peer: Peer, devices: Sequence[int]) -> None:
        """What real devices have done so far belongs to their standing."""
        for device in devices if peer.who else ():
            slowness, refused = self._dispatcher.slowness(device), self._dispatcher.refusals(device)
            self._standings.left(peer.who, self.labels[device], Stay(self._right.pop(device, 0), refused, slowness))

    def _may_join(self, identity: bytes, caller: Caller, message: Join) -> bool:
        there = self._peers[identity].index if identity in self._peers else ()
        present = sum(self._dispatcher.is_alive(device) for device in there)
        refusal = self._join_admission.admit(caller, message, present)
        if refusal is not None:
            self._shipping.reply(identity, Refused(refusal.reason, final=refusal not in PASSING))
            return False
        if caller.key and not caller.of_the_run:  # a new address, the same device
            for old in [p for p in self._peers.values() if p.key == caller.key and p.identity != identity]:
                self._lose(old, "it has joined again from elsewhere")
        return True

    def _leave(self, peer: Peer, message: Leave) -> None:
        if np.any(message.devices >= len(peer.ids)):
            raise WireError("a device that does not exist cannot leave")
        leaving = sorted(peer.index.keys() & {peer.ids[index] for index in message.devices.tolist()})
        leaving = [d for d in leaving if self._dispatcher.is_alive(d)]
        self._stayed(peer, leaving)
        reason, until_s = printable(message.reason), message.until_s
        for device in leaving:
            blocks = self._dispatcher.blocks_in_flight(device)
            text = self.attendance.left(device, self.labels[device], reason, until_s, blocks, self._now_s())
            if text:
                self.notice(text)
                self.note("left", name=self.labels[device], reason=reason, until_s=until_s, blocks=blocks)
        self._forget(leaving, LEFT)

    def _stays_away(self, name: str, reason: str, until_s: float | None) -> None:
        if text := self.attendance.stays_away(name, reason, until_s):
            self.notice(text)
            self.note("away", name=name, reason=reason, until_s=until_s)

    def _lose(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        gone = [d for d in peer.index if self._dispatcher.is_alive(d)]
        self._stayed(peer, gone)
        self.roster.closed(peer)
        self._join_admission.left([peer.key])
        self._guard.left(peer.descriptor, peer.other_end, peer.identity)
        if not gone:
            return  # all had left before
        self.totals.lost_devices += len(gone)
        what = self.labels[gone[0]] if len(gone) == 1 else f"{len(gone)} devices"
        self.notice(f"lost {what} ({reason}): their blocks go to the others")
        self._forget(gone)

    def _forget(self, devices: list[int], how: str = LOST) -> None:
        self._gone(devices, how)
        self._handle(DevicesLeft(devices))

    def _gone(self, devices: list[int], how: str) -> None:
        self.attendance.gone(devices, how)
        self.roster.left_idle(device for device in devices if not self._dispatcher.has_worked(device))

    def _begin(self, products: Sequence[Product], ahead: tuple[Level, ...]) -> None:
        """Plan them and go. Long planning has a thread of its own; what is submitted meanwhile waits."""
        if self._planning.busy:
            self._submitted.append((products, ahead))
            return
        numbered = dict(enumerate(products, self._next_job))
        self._next_job += len(products)
        submitted = JobsSubmitted(
            [Submission(job, p.request, p.critical, p.plan, p.kept) for job, p in numbered.items()], ahead
        )
        inquiry = self._dispatcher.inquire(submitted, self._now_s())
        if inquiry is not None and inquiry.takes_long:
            asked = inquiry
            self._planning.ask(
                asked, lambda plans: self._go(numbered, self._dispatcher.with_plans(submitted, asked, plans))
            )
        elif inquiry is not None:
            self._go(numbered, self._dispatcher.with_plans(submitted, inquiry, inquiry.answer()))
        else:
            self._go(numbered, submitted)

    def _go(self, numbered: dict[int, Product], planned: JobsSubmitted) -> None:
        self._jobs.update((job, Live(product)) for job, product in numbered.items())
        self._handle(planned)
        if self._verify:
            self._checking.prepare((new.job, new.plan.tiles) for new in planned.jobs if new.plan is not None)
        ahead = self._dispatcher.inquire_ahead(self._now_s())
        if ahead is not None and ahead.takes_long:
            self._planning.ask(ahead, lambda _: self._begin_waiting())
            return
        if ahead is not None:
            ahead.answer()
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """What was submitted while plans were made."""
        while self._submitted and not self._planning.busy:
            self._begin(*self._submitted.popleft())

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
                    self._complain(peer.identity, (), error)

    def _answers(self, batch: list[tuple[Peer, Result]]) -> None:
        answers = Answers.of(batch, self._jobs, self._now_ns())
        for peer, job, block in answers.answered:
            peer.answered(job, block)
        if answers.bad.devices:
            self._handle(answers.bad)
        self._handle(answers.good, answers)

    # ---- instructions

    def _handle(self, event: Event, returned: Answers | None = None) -> None:
        self._mind_standstill()
        super()._handle(event, returned)

    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None:
        for peer in self._shipping.send_blocks(instruction, at_ns):
            self._lose(peer, "its connection is gone")

    def _cancel_blocks(self, instruction: CancelBlocks) -> None:
        for peer in self._shipping.cancel(instruction):
            self._lose(peer, "its connection is gone")

    def _accept_blocks(self, returned: Answers, positions: list[int]) -> None:
        self._silent = ""
        returned.accept(positions, self.totals, self.records)

    def _check_job(self, instruction: CheckJob) -> None:
        work, checked = instruction.work, self._checking.check(instruction.job, instruction.work)
        liars = np.unique(work.devices[np.isin(work.done, checked.wrong)]).tolist()
        gone = [device for device in liars if not self._dispatcher.is_alive(device)]
        self._handle(checked)
        for device in gone:  # leaving in time does not help a liar
            self._suspend(device, "what it returned was wrong", wrong=True)

    def _job_finished(self, instruction: JobFinished) -> None:
        job, work = instruction.job, instruction.work
        live = self._jobs.pop(job)
        for identity in live.holders:
            if (peer := self._peers.get(identity)) is not None:
                peer.finished(job)
        if self.attendance.present:
            blocks = np.bincount(work.devices)
            self._right.update({d: int(blocks[d]) for d in self.attendance.present if d < len(blocks) and blocks[d]})
        product = live.product
        self.records.finished(job, product.name, product.step, product.shape, work.boxes, live.stamps(len(work.boxes)))
        product.done()

    def _job_waits(self, instruction: JobWaits) -> None:
        self._say_waiting(instruction.reason)

    def _suspend_device(self, instruction: SuspendDevice) -> None:
        device, reason = instruction.device, instruction.reason
        self.notice(f"suspended {self.labels[device]}: {reason}")
        self.suspended[device] = reason
        self._gone([device], SUSPENDED)
        self._suspend(device, reason, instruction.wrong)

    def _name_stragglers(self, instruction: NameStragglers) -> None:
        if instruction.alone:
            self._silent = "no device answers"
        self.notice(stragglers_named(instruction, self.labels))

    def _blocks_lost(self, instruction: BlocksLost, at_ns: int, planned_ns: int) -> None:
        self.records.lost(instruction.loss, instruction.devices, instruction.blocks, at_ns, planned_ns)

    def _blocks_recovered(self, instruction: BlocksRecovered) -> None:
        self.records.recovered(instruction.loss, self._now_ns())

    def _carried_out(self) -> None:
        self.records.sent_again(self._now_ns())

    def _say_waiting(self, reason: str) -> None:
        """Once for each reason, until somebody joins."""
        if reason == self._said_waiting:
            return
        self._said_waiting = reason
        missing = "" if self.devices else missing_ones([self.labels[d] for d in self.absent if d not in self.suspended])
        elsewhere = "; from elsewhere with an invitation: cleave invite" if self.public_addresses else ""
        help_ = f"One joins with: python -m agent --ps {self.address}{elsewhere}"
        self.notice(f"waiting for a device that can go on: {reason}{missing}. {help_}")
