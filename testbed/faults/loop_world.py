"""Worlds for `testbed.faults.chaos` in which the server's own loop runs, turn by turn, in virtual time.

The real `ps.transport.server.Server` reads, plans, ships, beats, checks and writes on a simulated machine
(testbed/faults/loop_network.py) with simulated pods and agents (testbed/faults/loop_devices.py). A world is a list of
plain operations (testbed/faults/loop_seeds.py makes them); each is valid at any position, so that any can be left out.

    ("dice", seed)                      seed of the network's choices, such as which connection is read first; for the
                                        whole world
    ("pod" | "local" | "enrolled", [profile, ...])   a process joins: a pod of the run with these devices; or an agent,
                                        of this machine or with a key, with the first of these devices
    ("submit", [product, ...])          batch, rows, inner, columns, critical, weight: as in chaos_world.py
    ("forget", [weight, ...])           these weights have changed
    ("run", ms)                         the world goes on for this long
    ("pause", ms, place)                the server's process is stopped: in its wait, before it reads, before it sends
    ("hitch", ms)                       the server's next turn takes this much longer
    ("jump", ms)                        the host's clocks jump ahead; for the devices no time passes
    ("calendar", ms)                    the date is corrected by this much; odd: backwards
    ("full disk" | "busy disk", ms)     the access file cannot be written, or is locked
    (fault, k, ms)                      the k-th process suffers this, see FAULTS

Checked after every turn and at the end: every product ends, with exactly the right values, as long as an able device
is present and answers; a notice says what a product waits for; no answer counts twice; the server drops a silent
connection and keeps a living one; no block is overdue because the server stood still; every connection hears from the
server at least once per heartbeat; a turn reads a bounded number of messages, and no outbox grows without bound; a
device has one connection; a device gets no work that refers to a piece it does not hold, and holds nothing at the end;
the server never raises, and leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from agent.protocol.connection import SILENT_AFTER
from agent.protocol.profile import Profile
from ps.access.access_file import AccessFile
from ps.access.access_list import Enrolled
from ps.access.admission import ConnectionAdmission, Refusals, Tickets
from ps.access.endpoints import Endpoints
from ps.access.guard import Guard
from ps.access.joining import JoinAdmission
from ps.access.routing_ids import RoutingIds
from ps.planning.cost import least_bytes
from ps.planning.planner import Planner
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.peers import MOST_CANCELLED, Peer
from ps.transport.receiving import MESSAGES_PER_TURN
from ps.transport.server import Server
from testbed.faults.chaos_world import COMMON, ChaosError, Operation
from testbed.faults.loop_devices import ENROLLED, LOCAL, POD, Line, Process
from testbed.faults.loop_network import LOCAL_PORT, Clock, MemoryDisk, Network

FAULTS = (
    "slow reader",  # does not read for a while: the server's send buffer for it fills up
    "mute",  # sends heartbeats, but answers only later
    "late",  # its next answer is sent this much later
    "trickle",  # the bytes of its next answer take this long to arrive
    "freeze",  # is stopped for a while
    "vanish",  # falls silent; its connection stays open
    "drop",  # its connection breaks
    "leave",  # leaves politely, and comes back
    "move",  # joins on another connection before the first is missed
    "garbage",  # sends an invalid message
    "flood",  # sends many heartbeats at once, within its limits
    "twice",  # sends its last result again
)
HARMLESS = ("flood", "twice", "leave")  # make no device late
SERVER_FAULTS = ("pause", "hitch", "jump", "calendar", "full disk", "busy disk")
KINDS = {"pod": POD, "local": LOCAL, "enrolled": ENROLLED}
HEARTBEAT_S = 0.5
ENDS_S = 60.0  # by then everything that can end must have ended; the slowest device needs 1 s for a product
BEAT_MARGIN_S = 0.1  # of server time: a heartbeat is sent in the turn after it is due
OTHER_MESSAGES = 2  # may wait in an outbox besides blocks and cancellations: a welcome, a heartbeat
MOST_PROCESSES = 24
MOST_TURNS = 200_000
CHECK_EVERY = 64  # turns; checking the dispatcher's own invariants takes longest


@dataclass(slots=True)
class Open:
    """A product that was submitted."""

    product: Product
    truth: NDArray[np.float32]


class LoopWorld:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        seed = next((operation[1] for operation in operations if operation[0] == "dice"), 0)
        self.network = network = Network(seed)
        self.seen = network.seen
        self.faults: Counter[str] = Counter()
        self.events = 0  # turns of the server's loop
        self.trace: list[tuple[float, str]] = []
        self._disk = MemoryDisk(self.seen)
        self._numbers = np.random.default_rng(seed)
        file = AccessFile(Path("state"), keys=False, disk=self._disk)
        enrolled = tuple(_enrolled(number) for number in range(MOST_PROCESSES + 1))
        file.change(lambda book: (replace(book, enrolled=enrolled), None))
        self._endpoints = self._open_endpoints(file)
        self.server = Server(
            heartbeat_s=HEARTBEAT_S,
            planner=Planner("grid"),
            clock=Clock(network),
            access=file,
            outside=network,
            endpoints=self._endpoints,
        )
        self.server.notice = self._log
        self._processes: list[Process] = []
        self._by_name: dict[bytes, Line] = {}
        self._there: dict[bytes, Peer] = {}
        self._jobs = 0
        self._open: dict[int, Open] = {}
        self._weights: dict[int, Operand] = {}
        self._flops = 0
        self._disturbed = False  # a device may be late
        self._missed_beats = 0  # heartbeats at which silence may not have been counted: the server had not read all
        network.beside = self._attend
        self._attended_s = 0.0

    def _open_endpoints(self, file: AccessFile) -> Endpoints:
        network = self.network
        router, context = cast("zmq.Socket[bytes]", network.router), cast("zmq.Context[Any]", network.context)
        tickets, refusals = Tickets(), Refusals(self._log)
        routing_ids, guard = RoutingIds(context, router), Guard(router, refusals, network)
        guard.local_port = LOCAL_PORT
        admission = ConnectionAdmission(file.impatient(), tickets, refusals, network.calendar_s, network.now_s)
        return Endpoints(
            context=context,
            router=router,
            entrance=_NoEntrance(),
            routing_ids=routing_ids,
            guard=guard,
            admission=admission,
            join_admission=JoinAdmission(file.impatient(), admission, refusals, network.calendar_s),
            tickets=tickets,
            refusals=refusals,
            public_key="",
            address="tcp://simulated:1",
            data_address=f"tcp://simulated:{LOCAL_PORT}",
            public_addresses=[],
            unlisted_addresses=[],
            enrolment_addresses=[],
        )

    def _attend(self) -> None:
        """The entrance's thread looks at connections that have not joined."""
        if self.network.now >= self._attended_s + 0.02:
            self._attended_s = self.network.now
            self._endpoints.guard.attend()

    # ---- a life

    def live(self) -> LoopWorld:
        """Execute all operations, then go on until everything that can end has ended. Raises at the first broken
        promise."""
        for operation in self._operations:
            self._log(f"{operation}")
            self._do(operation)
        self.network.calm()
        self._disk.full = self._disk.busy = False
        self._run_until_done()
        if self._open:
            if self._stuck():
                raise ChaosError(f"products {self._stuck()} do not end although an able device is there and answers")
            if not self.server.waiting:
                raise ChaosError("products wait for a device that can go on, and no notice was given")
            self._come(POD, [Profile(*COMMON)])
            self._run_until_done()
        if self._open:
            raise ChaosError(f"products {list(self._open)} do not end although an able device has joined")
        self._end()
        return self

    def _run_until_done(self) -> None:
        until_s = self.network.now + ENDS_S
        while self._open and self.network.now < until_s:
            self._run(0.25)

    def _end(self) -> None:
        self.server.forget(list(self._weights.values()))
        self._run(4 * HEARTBEAT_S)
        if rest := self.server.left_behind():
            raise ChaosError(f"all is over, and this is left behind: {rest}")
        if self.server.totals.flops != self._flops:
            raise ChaosError(f"answers worth {self.server.totals.flops} operations count, not {self._flops}")
        healthy = [p.line for p in self._processes if p.healthy and p.line is not None]
        settled = [line for line in healthy if line.connection.deaf_until_s < self.network.now - 2 * HEARTBEAT_S]
        for line in settled:
            if line.idle and line.operands.bytes:
                raise ChaosError(f"all is over, and {line.process.name} still holds pieces")
        self.server.stop("the world ends")
        self.server.serve()
        if self.server.error is not None:
            raise self.server.error
        self.network.pass_until(self.network.now + 1.0)
        for line in settled:
            if line.connection.open and not line.goodbye:
                raise ChaosError(f"{line.process.name} was not told that the run is over")

    def _stuck(self) -> list[int]:
        """Products that have not ended although they could."""
        memory = [p.memory_bytes for process in self._processes if process.healthy for p in process.profiles]
        return [n for n, o in self._open.items() if any(m // 2 >= least_bytes(o.product.shape.inner) for m in memory)]

    def _run(self, seconds: float) -> None:
        network = self.network
        network.until_s = network.now + seconds
        while network.now < network.until_s:
            self._turn()

    def _turn(self) -> None:
        before = self.network.router.read
        self.server.turn()
        self.events += 1
        if self.events > MOST_TURNS:
            raise ChaosError("the server turns and turns, and time does not pass")
        if (read := self.network.router.read - before) > MESSAGES_PER_TURN:
            raise ChaosError(f"a turn read {read} messages, more than its budget of {MESSAGES_PER_TURN}")
        if self.server.late_blocks_helped and not self._disturbed:
            raise ChaosError("blocks were taken for overdue, and only the server or its clock stood still")
        self._check_peers()
        if self.events % CHECK_EVERY == 0:
            self.server.check()

    # ---- operations

    def _do(self, operation: Operation) -> None:
        match operation:
            case ("pod" | "local" | "enrolled" as kind, profiles):
                told = [Profile(*profile) for profile in profiles]
                self._come(KINDS[kind], told if kind == "pod" else told[:1])
            case ("dice", _):
                pass
            case ("submit", products):
                self._submit(products)
            case ("forget", weights):
                self._forget(weights)
            case ("run", milliseconds):
                self._run(milliseconds / 1000)
            case ("pause", milliseconds, place):
                self.network.stop_server(place % 3, milliseconds / 1000)
                self._missed_beats += 1
                self._fault("pause")
            case ("hitch", milliseconds):
                self.network.delay_server(milliseconds / 1000)
                self._missed_beats += 1 + int(milliseconds / 1000 / HEARTBEAT_S)
                self._disturbed |= milliseconds >= 1000  # the server's own work counts: waiting blocks are late
                self._fault("hitch")
            case ("jump", milliseconds):
                self.network.jump(milliseconds / 1000)
                self._fault("jump")
            case ("calendar", milliseconds):
                self.network.set_calendar(milliseconds / 1000 * (-1 if milliseconds % 2 else 1))
                self._fault("calendar")
            case ("full disk" | "busy disk" as kind, milliseconds):
                self._disk_fault(kind.split()[0], milliseconds / 1000)
                self._fault(kind)
            case (fault, k, milliseconds) if self._processes:
                process = self._processes[k % len(self._processes)]
                if process.suffer(fault, milliseconds):
                    self._fault(fault)
                    self._disturbed |= fault not in HARMLESS
                self._by_name.update((line.connection.name, line) for line in process.lines[-1:])

    def _come(self, kind: int, profiles: list[Profile]) -> None:
        number = len(self._processes)
        if number >= MOST_PROCESSES and kind != POD:
            return
        password = self._endpoints.tickets.of_the_run
        admission, guard = self._endpoints.admission, self._endpoints.guard
        process = Process(self.network, admission, guard, password, number, kind, profiles, HEARTBEAT_S, self._log)
        self._processes.append(process)
        process.come()

    def _submit(self, products: Sequence[tuple[int, int, int, int, bool, int | None]]) -> None:
        ready = []
        for batch, rows, inner, columns, critical, weight in products:
            side = -1 if weight is None else weight % 2
            kept = self._weight(weight, (rows, columns)[side], inner) if weight is not None else None
            if kept is not None:
                inner = kept.array.shape[2]
            left = kept if side == 0 and kept else Operand(self._integers(batch if side < 0 else 1, rows, inner))
            right = kept if side == 1 and kept else Operand(self._integers(left.array.shape[0], columns, inner))
            truth = left.array @ right.array.transpose(0, 2, 1)
            number, self._jobs = self._jobs, self._jobs + 1
            out = np.full(truth.shape, np.nan, np.float32)
            product = Product(left, right, out, partial(self._done, number), f"p{number}", critical=critical)
            self._open[number] = Open(product, truth)
            self._flops += 2 * truth.size * inner
            ready.append(product)
        self.server.submit(*ready)

    def _weight(self, weight: int, extent: int, inner: int) -> Operand:
        if weight not in self._weights:
            self._weights[weight] = Operand(self._integers(1, extent, inner), uses=4)
        return self._weights[weight]

    def _integers(self, *shape: int) -> NDArray[np.float32]:
        """Small integers: sums of their products are exact in float32, in any order."""
        return self._numbers.integers(-4, 5, shape).astype(np.float32)

    def _forget(self, weights: Sequence[int]) -> None:
        """Forget the weights that no open product uses."""
        used = {operand.id for o in self._open.values() for operand in (o.product.left, o.product.right)}
        changed = [w for w in weights if w in self._weights and self._weights[w].id not in used]
        self.server.forget([self._weights.pop(weight) for weight in dict.fromkeys(changed)])

    def _disk_fault(self, what: str, seconds: float) -> None:
        setattr(self._disk, what, True)
        self.network.at(self.network.now + seconds, lambda: setattr(self._disk, what, False))

    def _done(self, number: int) -> None:
        ended = self._open.pop(number, None)
        if ended is None:
            raise ChaosError(f"product {number} ended a second time")
        if not np.array_equal(ended.product.out, ended.truth):
            raise ChaosError(f"product {number} ended, and its values are wrong")
        self._log(f"product {number} is done")
        self.seen["products done"] += 1

    # ---- promises about connections

    def _check_peers(self) -> None:
        there = dict(self.server.peers)
        if there.keys() != self._there.keys():
            for process in self._processes:
                self._by_name.update((line.connection.name, line) for line in process.lines)
            for name in sorted(self._there.keys() - there.keys()):
                self._check_lost(self._by_name[name], self._there[name])
            owners = Counter(self._by_name[name].process for name in there)
            for process, count in owners.items():
                if count > 1 and process.kind != POD:
                    raise ChaosError(f"{process.name} has {count} connections at the same time")
            self._there = there
        ran_s, quiet_s = self.network.ran_s, (SILENT_AFTER + 3 + self._missed_beats) * HEARTBEAT_S
        for name, peer in self.server.peers.items():
            line = self._by_name[name]
            connection, process = line.connection, line.process
            if ran_s - connection.offered_s > HEARTBEAT_S + BEAT_MARGIN_S and connection.open:
                raise ChaosError(f"{process.name} has not heard from the server for longer than a heartbeat")
            if ran_s - connection.arrived_s > quiet_s and not connection.arriving:
                raise ChaosError(f"{process.name} is silent, and was not lost")
            wanted = sum(profile.credit_blocks for profile in process.profiles)
            if len(peer.outbox) > wanted + 2 * MOST_CANCELLED * len(peer.ids) + OTHER_MESSAGES:
                raise ChaosError(f"{len(peer.outbox)} messages wait for {process.name}")

    def _check_lost(self, line: Line, peer: Peer) -> None:
        self._log(f"{line.process.name} is not there any more")
        self.seen["connections lost"] += 1
        deaf = peer.does_not_read and line.connection.deaf_until_s > self.network.now - HEARTBEAT_S
        self.seen["connections that did not read"] += deaf
        if not line.process.may_be_lost(line) and not deaf:
            raise ChaosError(f"{line.process.name} lives and was lost")

    def _fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def _log(self, text: str) -> None:
        self.trace.append((round(self.network.now, 6), text))


class _NoEntrance:
    """Simulated devices are admitted without an entrance."""

    refused = 0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def _enrolled(number: int) -> Enrolled:
    key = z85.encode(number.to_bytes(4, "big") * 8).decode()
    return Enrolled(key, f"process-{number}", "", 0.0, 0.0)


def replay_loop(operations: Sequence[Operation]) -> LoopWorld:
    """Execute these operations again; raises what they broke."""
    return LoopWorld(operations).live()
