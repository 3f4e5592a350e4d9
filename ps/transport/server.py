"""The parameter server over ZeroMQ: one ROUTER socket, one thread, around the dispatcher. Clients that are not admitted
only reach the entrance, which has a thread of its own (`ps/access/entrance.py`).

Messages become events for the dispatcher, and its instructions become messages. Operands are sent without a copy;
answers are written straight into the product's output. Other threads only submit products and wait for devices.

An operand must not change between `submit` and `done`: messages on their way are views of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.protocol.clock import Clock, WallClock
from agent.protocol.errors import Failure
from agent.protocol.wire import Goodbye, Result, Welcome
from ps.access.access_file import AccessFile
from ps.access.endpoints import Endpoints, open_endpoints
from ps.access.listening import port_of
from ps.access.standings import Standings
from ps.outside import Machine, Outside
from ps.planning.planner import Planner
from ps.planning.plans import Level
from ps.scheduling import settings
from ps.scheduling.deadlines import after_a_turn_s
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksLost,
    BlocksRecovered,
    CancelBlocks,
    CheckJob,
    DevicesJoined,
    Event,
    JobChecked,
    JobFinished,
    JobWaits,
    NameStragglers,
    OperandsForgotten,
    SendBlocks,
    SuspendDevice,
    TimePassed,
    Work,
)
from ps.scheduling.shell import Shell
from ps.transport.attendance import Attendance, stragglers_named
from ps.transport.checking import Checking
from ps.transport.heartbeats import Heartbeats
from ps.transport.intake import Intake, Requests
from ps.transport.jobs import Live, Product, Totals
from ps.transport.membership import Membership, Reports
from ps.transport.operands import Operand
from ps.transport.pace import LONG_S, PACKING_S, UNHEARD_S, UNHEARD_TURNS, WAITED_S, Pace
from ps.transport.peers import Peer, missing_ones
from ps.transport.receiving import Answers, Receiving
from ps.transport.records import Records
from ps.transport.roster import Roster
from ps.transport.shipping import Shipping
from ps.transport.standstill import Standstill

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5


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
        outside: Outside | None = None,
        endpoints: Endpoints | None = None,
    ) -> None:
        """`clock`: the time of blocks and their stamps. Heartbeats always use the host's own clock, however slow the
        emulated devices are made.
        `listen`: encrypted addresses for devices that `access` knows; `unlisted`: the same, but not named in
        invitations. At `host`, an address of this machine, any client may join, and pods of this run use `pod_pass`.
        `remember`: where the standing of devices is kept, if not in `access`.
        `outside`, `endpoints`: simulated ones, for tests that call `turn` instead of `start`."""
        access = access.impatient() if access is not None else None
        self.totals = Totals()
        self.records = Records()
        self.roster = Roster()
        self.labels = self.roster.labels  # one per device, by id
        self.suspended = self.roster.suspended  # device -> why it gets no more work
        self.notice: Callable[[str], None] = log.warning
        self.note: Callable[..., None] = lambda event, **fields: None  # an event of a real device, for the results
        self.attendance = Attendance()
        self.bundle = ("", "")  # where a signed agent of this version is, and its SHA-256; for those that are too old
        self.error: BaseException | None = None
        self._given_up: BaseException | None = None  # raised for threads that wait for products
        self._clock = clock or WallClock()
        self._run, self._heartbeat_s = run, heartbeat_s
        super().__init__(Dispatcher(planner or Planner(), verify))
        self._jobs: dict[int, Live] = {}
        self._peers: dict[bytes, Peer] = {}
        self._outside: Outside = outside or Machine()
        self._requests = Requests(self._outside.bell())
        self._planning = self._outside.background("planning", self._requests.add)
        self._verification = self._outside.background("verification", self._requests.add)
        self._said_waiting = ""
        self._silent = ""  # why no block is expected, until one is accepted
        self._standstill = Standstill()
        self._pace: Pace | None = None
        self._stopping = False
        self._goodbye = ""
        if endpoints is None:
            try:
                endpoints = open_endpoints(
                    host, port, listen, unlisted, access, self._say_soon, lambda: self.bundle, self._outside
                )
            except BaseException:
                self._requests.close()
                raise
        self._endpoints, self._router, self._guard, self._routing_ids = (
            endpoints,
            endpoints.router,
            endpoints.guard,
            endpoints.routing_ids,
        )
        self.address, self.data_address = endpoints.address, endpoints.data_address  # of the entrance; to join
        self.public_addresses = endpoints.public_addresses  # where devices on other machines join
        self.unlisted_addresses = endpoints.unlisted_addresses  # the same, but not named in invitations
        self.enrolment_addresses = endpoints.enrolment_addresses  # where they enrol with an invitation
        self.public_key = endpoints.public_key
        self._assemble(Standings(access or remember, self._say, self._outside.calendar_s), verify)
        self._thread = threading.Thread(target=self.serve, name="server", daemon=True)

    def _assemble(self, standings: Standings, verify: bool) -> None:
        """Create the parts of the server; they share its tables."""
        peers, jobs, totals, outside, endpoints = self._peers, self._jobs, self.totals, self._outside, self._endpoints
        self._checking = Checking(jobs, totals, self._verification, lambda: self.devices, self._say, outside.random)
        self._intake = Intake(
            jobs,
            self._dispatcher,
            self._planning,
            self._checking if verify else None,
            self._handle,
            self._requests.add_first,
            self._now_s,
        )
        self._shipping = Shipping(self._router, peers, self.roster.peer_of, jobs, totals, outside)
        record = lambda event, **fields: self.note(event, **fields)  # noqa: E731
        self._membership = Membership(
            peers,
            self.roster,
            self.attendance,
            endpoints,
            standings,
            self._dispatcher,
            self._shipping,
            totals,
            Reports(self._handle, self._tell_joined, self._now_s, self._say, record),
            Welcome(self._heartbeat_s, self._run),
        )
        self._receiving = Receiving(
            outside,
            endpoints,
            peers,
            self._shipping,
            self._membership,
            totals,
            self._answered,
            lambda: self.bundle,
            self._say,
        )
        self._heartbeats = Heartbeats(
            self._heartbeat_s,
            peers,
            outside,
            endpoints.join_admission,
            standings,
            self._shipping,
            self._membership,
            self._now_ns,
        )

    # ---- for other threads

    @property
    def pod_pass(self) -> dict[str, Any]:
        """What a pod of this run needs to join on this machine; it goes to its standard input and nowhere else."""
        return {"port": port_of(self.data_address), "password": self._endpoints.tickets.of_the_run}

    def _say(self, text: str) -> None:
        self.notice(text)

    def _say_soon(self, text: str) -> None:
        """For the entrance's thread: pass the notice to the server's thread."""
        self._requests.add(lambda: self._say(text))

    def start(self) -> Server:
        # The interpreter lets a busy thread run for 5 ms before another gets its turn; answers must not wait so long.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self._endpoints.entrance.start()
        self._thread.start()
        return self

    def stop(self, reason: str = "the run is over") -> None:
        """Tell the devices that the run is over, and end the thread. Safe to call twice."""
        self._goodbye = reason
        self._stopping = True
        self._requests.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        """Products that are ready at the same moment; they are planned together."""
        self._ask(lambda: self._intake.begin(products, ahead))

    def forget(self, operands: Sequence[Operand]) -> None:
        """Drop kept slabs of these operands, which are about to change."""
        self._ask(lambda: self._forget_operands([operand.id for operand in operands]))

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        """Wait until at least one product has reported to `done`, and return all reports."""
        finished: list[int] = []
        while not finished:
            with contextlib.suppress(Empty):
                finished.append(done.get(timeout=0.5))  # returns now and then, so that Ctrl-C works
                while True:
                    finished.append(done.get_nowait())
            if self.error is not None:
                raise ServerError(f"the server has stopped: {self.error!r}")
            if self._given_up is not None and not finished:
                raise self._given_up
        return finished

    def give_up(self, error: BaseException) -> None:
        """Raise this error for every thread that waits for products, now or later."""
        self._given_up = error

    @property
    def waiting(self) -> str:
        """What jobs are waiting for, in the words of the last notice; empty once a device has joined."""
        return self._said_waiting or self._silent

    def _ask(self, something: Callable[[], None]) -> None:
        if self.error is not None:
            raise ServerError(f"the server has stopped: {self.error}")
        self._requests.add(something)

    @property
    def peers(self) -> Mapping[bytes, Peer]:
        """Connections with devices that have joined, by name. For the server's thread."""
        return self._peers

    def check(self) -> None:
        """Raise InvariantBroken if the dispatcher's state contradicts its promises. For tests."""
        self._dispatcher.check()

    def left_behind(self) -> str:
        """What is still held of jobs and operands; empty once all are over and forgotten. For tests."""
        rest = [self._dispatcher.left_behind()] + [f"jobs {list(self._jobs)}"] * bool(self._jobs)
        rest += [f"pieces of {peer.about}: {peer.lent}" for peer in self._peers.values() if peer.lent]
        return "; ".join(filter(None, rest))

    def trust(self, key: str, name: str, devices: int) -> None:
        """For this run the holder of this key may join without an invitation, with at most `devices` per connection."""
        self._endpoints.admission.trust(key, name, devices)
        self._guard.expected += devices

    @property
    def refused(self) -> int:
        """Refused connections, and refused messages at the entrance."""
        return self._endpoints.refusals.count + self._endpoints.entrance.refused

    @property
    def late_blocks_helped(self) -> int:
        return self._dispatcher.speculative_copies

    @property
    def stood_still_s(self) -> float:
        """How long its thread did not run in all. The dispatcher's time leaves it out: no device is late for it."""
        return self._standstill.total_s

    @property
    def absent(self) -> list[int]:
        """Devices that have left."""
        return self._dispatcher.gone

    @property
    def profiles(self) -> NDArray[np.void]:
        """Profiles of all devices that ever joined, by id."""
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
        """The dispatcher's time: the clock, minus the time in which this thread was stopped."""
        return self._dispatch_s(self._now_ns())

    def _dispatch_s(self, now_ns: int) -> float:
        return now_ns / 1e9 - self._standstill.total_s / self._clock.scale

    def _mind_standstill(self, waited_s: float = 0.0) -> None:
        self._standstill.look(self._outside.now_s(), self._outside.worked_s(), waited_s)

    # ---- the server's thread

    def serve(self) -> None:
        """Run turns until `stop` is called, then tell the devices and close everything. The thread's target."""
        try:
            while not self._stopping:
                self.turn()
            self._say_goodbye()
        except BaseException as error:
            log.exception("the server's thread failed")
            self.error = error
        finally:
            self._close()

    def _close(self) -> None:
        self.attendance.end()
        self._planning.end()
        self._verification.end()
        for live in list(self._jobs.values()):
            live.product.done()  # the waiting thread finds `error` set
        self._endpoints.entrance.stop()
        self._endpoints.join_admission.close()
        self._routing_ids.close()
        self._router.close()
        self._endpoints.context.term()
        self._requests.close()

    def _say_goodbye(self) -> None:
        for peer in list(self._peers.values()):
            self._shipping.send(peer, Goodbye(self._goodbye))
        self._membership.over()

    def turn(self) -> None:
        """Wait until there is something to do, and do a bounded part of it."""
        outside, requests = self._outside, self._requests
        pace = self._pace
        if pace is None:
            now_s, look_s = outside.now_s(), self._now_s()
            pace = self._pace = Pace(beat_s=now_s, look_s=look_s, heard_s=now_s, free_s=look_s, empty_s=look_s)
        stuck = [peer for peer in self._peers.values() if peer.outbox or peer.streams]
        until_look_s = (max(pace.look_s, self._dispatcher.next_look_s) - self._now_s()) * self._clock.scale
        timeout_s = 0.001 if stuck else max(0.001, min(pace.beat_s - outside.now_s(), until_look_s))
        self._mind_standstill()
        asked_s = outside.now_s()
        self._guard.idle = True
        outside.wait(self._router, requests.bell, 0.0 if requests or self._shipping.packs else timeout_s)
        self._guard.idle = False
        self._mind_standstill(timeout_s)
        woke_host_s, woke_s = outside.now_s(), self._now_s()
        if woke_host_s - asked_s > WAITED_S:
            pace.empty_s = woke_s
        self._shipping.until_s = woke_host_s + PACKING_S
        if woke_s >= pace.look_s:
            pace.free_s = woke_s
        if not pace.unheard:
            pace.heard_s = outside.now_s()
        ended = self._membership.ended
        empty = not pace.request_next and self._receiving.read()
        pace.unheard = 0 if empty else pace.unheard + 1
        if not pace.unheard:
            self._guard.all_read_s, pace.empty_s = outside.now_s(), self._now_s()
        long_s = outside.now_s() - pace.heard_s
        heard = not pace.unheard or (long_s >= UNHEARD_S and pace.unheard >= UNHEARD_TURNS)
        if heard:
            self._membership.lose_ended(ended)
        # right after reading: later in the turn, an answer may be waiting in the socket
        if heard and (now_s := self._now_s()) >= max(pace.look_s, self._dispatcher.next_look_s):
            pace.look_s = now_s + settings.NOW.reaction_s
            self._handle(TimePassed())
        if pace.request_next or outside.now_s() - woke_host_s < LONG_S:
            requests.do_one()  # one per turn, so that answers need not wait for all of them
            pace.request_next = False
        else:
            pace.request_next = bool(requests)
        self._membership.unreachable(*self._shipping.pack())
        for peer in stuck:
            if peer.identity in self._peers and not self._shipping.drain(peer):
                self._membership.unreachable(peer)
        if outside.now_s() >= pace.beat_s:
            pace.beat_s = outside.now_s() + self._heartbeat_s
            self._heartbeats.beat(heard)
        pace.look_s = max(pace.look_s, after_a_turn_s(pace.free_s, woke_s, self._now_s()))
        turn_s = outside.now_s() - woke_host_s
        self.totals.busy_s += turn_s
        self.totals.longest_turn_s = max(self.totals.longest_turn_s, turn_s)

    def _forget_operands(self, operands: list[int]) -> None:
        self._handle(OperandsForgotten(operands))
        for peer in self._peers.values():
            for operand in operands:
                peer.forget(operand)

    def _answered(self, batch: list[tuple[Peer, Result]]) -> None:
        """All results of one read, as one event; WireError if one of them makes no sense."""
        unheard_s = self._now_s() - self._pace.empty_s if self._pace is not None else 0.0
        answers = Answers.of(batch, self._jobs, self._now_ns(), unheard_s)
        for peer, job, block in answers.answered:
            peer.answered(job, block)
        if answers.bad.devices:
            self._handle(answers.bad)
        self._handle(answers.good, answers)

    def _tell_joined(self, joined: DevicesJoined, decided: Callable[[], None]) -> None:
        """Tell the dispatcher first, then all listeners (`decided`), then carry out its instructions."""
        at_ns = self._now_ns()
        instructions = self._dispatcher.handle(joined, self._dispatch_s(at_ns))
        decided()
        self._said_waiting = ""
        self._carry_out(instructions, at_ns)

    # ---- instructions

    def _handle(self, event: Event, returned: Answers | None = None) -> None:
        self._mind_standstill()
        super()._handle(event, returned)

    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None:
        self._membership.unreachable(*self._shipping.send_blocks(instruction, at_ns))

    def _cancel_blocks(self, instruction: CancelBlocks) -> None:
        self._membership.unreachable(*self._shipping.cancel(instruction))

    def _accept_blocks(self, returned: Answers, positions: list[int]) -> None:
        self._silent = ""
        returned.accept(positions, self.totals, self.records)

    def _check_job(self, instruction: CheckJob) -> None:
        self._checking.check(
            instruction.job, instruction.work, lambda checked: self._checked(instruction.work, checked)
        )

    def _checked(self, work: Work, checked: JobChecked) -> None:
        liars = np.unique(work.devices[np.isin(work.done, checked.wrong)]).tolist()
        gone = [device for device in liars if not self._dispatcher.is_alive(device)]
        self._handle(checked)
        for device in gone:  # a device that returned wrong results is banned even if it has left
            self._membership.ban(device, "what it returned was wrong", wrong=True)

    def _job_finished(self, instruction: JobFinished) -> None:
        job, work = instruction.job, instruction.work
        live = self._jobs.pop(job)
        for identity in live.holders:
            if (peer := self._peers.get(identity)) is not None:
                peer.finished(job)
        if self.attendance.present:
            self._membership.delivered(np.bincount(work.devices))
        product = live.product
        self.records.finished(job, product.name, product.step, product.shape, work.boxes, live.stamps(len(work.boxes)))
        product.done()

    def _job_waits(self, instruction: JobWaits) -> None:
        self._say_waiting(instruction.reason)

    def _suspend_device(self, instruction: SuspendDevice) -> None:
        self._membership.suspended(instruction.device, instruction.reason, instruction.wrong)

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
        """Say this once per reason, until a device joins."""
        if reason == self._said_waiting:
            return
        self._said_waiting = reason
        missing = "" if self.devices else missing_ones([self.labels[d] for d in self.absent if d not in self.suspended])
        elsewhere = "; from elsewhere with an invitation: cleave invite" if self.public_addresses else ""
        help_ = f"One joins with: python -m agent --ps {self.address}{elsewhere}"
        self.notice(f"waiting for a device that can go on: {reason}{missing}. {help_}")
