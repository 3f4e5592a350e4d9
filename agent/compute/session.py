"""One session of the agent with a server, from joining to leaving.

The owner's limits hold whatever the server does. Memory is counted before it is allocated
(agent/compute/memory_budget.py). A message that exceeds the memory or the day's remaining bytes ends the connection
while it is still arriving (agent/protocol/incoming.py). A device with a data cap offers at most a quarter of the
remaining bytes as memory. A server never has more than that in flight, so the device can leave before it reaches the
cap; it rejoins with less memory until next to nothing is left.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from queue import Empty
from typing import Protocol

import numpy as np
import zmq

from agent.compute.computer import Computer
from agent.compute.kernels import Kernel
from agent.compute.memory_budget import MemoryBudget, output_bytes
from agent.compute.pieces import BlockRow, Operands
from agent.identity.keys import Credentials, Curve
from agent.owner.rules import DataPlan, Decision
from agent.protocol.connection import Connection
from agent.protocol.incoming import InboundLimit, Unfinished
from agent.protocol.units import format_size
from agent.protocol.wire import (
    ANSWER,
    DONE,
    MAX_FRAME_BYTES,
    TOO_LARGE,
    VERSION,
    Cancel,
    Goodbye,
    Join,
    Leave,
    Message,
    Refused,
    Result,
    Welcome,
    WireError,
    Work,
)

log = logging.getLogger(__name__)

SPARE_BYTES = 1 << 20  # allowance for a message's tables of blocks and pieces, besides its operands
MEMORY_LOOK_S = 0.005  # how often to check whether waiting blocks have memory
SMALLER_S = 1.0  # a device that left with bytes to spare rejoins after this, with less memory


class Stop(Protocol):
    """A request to end the loop; its descriptor becomes readable when `requested` is set."""

    requested: bool

    def fileno(self) -> int: ...

    def wait(self, timeout_s: float) -> None: ...


class Owner(Protocol):
    """Decides when this device may work; its descriptor becomes readable when the decision changes."""

    @property
    def decision(self) -> Decision: ...

    @property
    def restart(self) -> str:
        """Why the agent must restart; empty if it need not."""
        ...

    @property
    def data(self) -> DataPlan | None:
        """The day's data budget; None: no cap."""
        ...

    def fileno(self) -> int: ...

    def heard(self) -> None: ...

    def count(self, size: int) -> None:
        """Add to the bytes moved."""
        ...

    def enough(self, reason: str) -> None:
        """Stop work for the day: the next block would exceed the remaining bytes."""
        ...


@dataclass
class Tally:
    """Totals of this agent, for its log and its owner."""

    blocks: int = 0
    failed: int = 0
    compute_s: float = 0.0
    sessions: int = 0


class Session:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        credentials: Credentials,
        join: Join,
        kernel: Kernel,
        part_flops: float,
        stop: Stop,
        owner: Owner,
        tally: Tally,
        on_welcome: Callable[[str], None],
    ) -> None:
        """`on_welcome` is called with the name of the run once the server admits this device."""
        self.broke = f"no word from {endpoint}"  # why the session ended, if the server did not say
        self.said_why = False  # the server was told why we left
        self.turned_away = ""  # why the handshake failed
        self.outdated: Refused | None = None  # the refusal of a server with a newer protocol version
        self._endpoint, self._stop, self._owner, self._tally = endpoint, stop, owner, tally
        self._on_welcome = on_welcome
        self._losses = 0  # connections lost before we were admitted
        self._all_devices = np.arange(len(join.profiles), dtype="<u4")
        join = _offer(join, owner.data)
        lent_bytes = int(join.profiles["memory_bytes"].sum())
        self._operands, self._memory = Operands(), MemoryBudget(lent_bytes, int(join.profiles["credit_blocks"].sum()))
        self._waker, self._woken = _wake_pair(context)
        self._inbound_waker, self._inbound_woken = _wake_pair(
            context
        )  # ZeroMQ sockets must not be shared between threads
        self._inbound = InboundLimit(
            endpoint, isinstance(credentials, Curve), self._judge, lambda: self._inbound_waker.send(b""), owner.count
        )
        self._computer = Computer(self._operands, kernel, lambda: self._waker.send(b""), part_flops)
        self._line = Connection(
            context,
            endpoint,
            join,
            receive_ahead=1,
            credentials=credentials,
            count=owner.count,
            heard=self._inbound.heard,
            most_frame_bytes=self._most_frame_bytes(),
        )

    def run(self) -> Refused | Goodbye | None:
        """The server's last message; None if the connection broke or we left."""
        line, computer, memory = self._line, self._computer, self._memory
        poller = zmq.Poller()
        for source in (line.socket, self._woken, self._inbound_woken, self._stop.fileno(), self._owner.fileno()):
            poller.register(source, zmq.POLLIN)
        computer.start()
        self._inbound.start()
        try:
            while True:
                if self._leaves():  # before the server can respond to the results just returned
                    return None
                reading = not (computer.streaming or memory.waiting)
                poller.register(line.socket, zmq.POLLIN if reading else 0)
                if not reading:
                    line.excuse()
                wait_s = MEMORY_LOOK_S if memory.waiting else line.heartbeat_s / 2
                events = dict(poller.poll(int(1000 * wait_s)))
                if self._leaves():
                    return None
                if self._owner.fileno() in events:
                    self._owner.heard()
                self._clear_wake_ups(events)
                self._return()
                try:
                    if line.socket in events and (ending := self._take(line.receive(0))) is not None:
                        return ending
                    if memory.waiting:
                        self._give()
                    why = ""
                except WireError as error:
                    why = f"the server sent work that does not add up ({error})"
                line.beat()
                if line.turned_away:
                    self.turned_away = line.turned_away
                    return None
                if why := why or self._broken():
                    log.warning("%s: joining again", why)
                    self.broke = why
                    return None
        finally:
            computer.abandoned = True
            computer.inbox.put(None)
            computer.join()
            self._inbound.end()
            for socket in (self._waker, self._woken, self._inbound_waker, self._inbound_woken):
                socket.close(linger=0)
            if not line.socket.closed:
                line.close()

    def _clear_wake_ups(self, events: Container[object]) -> None:
        for woken in (self._woken, self._inbound_woken):
            while woken in events and woken.poll(0):
                woken.recv()

    def _broken(self) -> str:
        """Why the connection cannot be used further; empty if it can."""
        if self._inbound.cut:
            return self._inbound.cut
        gone = self._line.joined and self._inbound.losses > self._losses
        if gone and not self._line.socket.poll(0):  # what has arrived counts: it may be the server's goodbye
            most = format_size(self._most_frame_bytes())
            return f"the connection to {self._endpoint} broke (a frame above {most} ends it, too)"
        return f"no word from {self._endpoint}: is the server running?" if self._line.lost else ""

    def _leaves(self) -> bool:
        """Leave if it is time, and return True. Leaving hands uncomputed blocks back to the server."""
        if self._inbound.cut or (leave := self._must_leave()) is None:
            return False  # a connection that was cut takes no farewell; `_broken` says why
        self._return()
        self._line.send(leave)
        self.said_why = self._line.joined is not None
        self._line.close(linger_s=1.0)
        log.info("left: %s", leave.reason)
        self.broke = leave.reason
        return True

    def _must_leave(self) -> Leave | None:
        if (leave := why_leave(self._stop, self._owner, self._all_devices)) is not None:
            return leave
        data = self._owner.data
        if data is not None and data.short(self._memory.lent_bytes):
            left, cap = format_size(max(0, data.left_bytes)), format_size(data.cap_bytes)
            reason = f"{left} of {cap} are left for today: joining again with less memory (data_cap_a_day)"
            if data.left_bytes <= 0:  # the rule is about to report the same
                reason = f"{cap} of {cap} are used for today (data_cap_a_day)"
            return Leave(self._all_devices, reason, SMALLER_S)
        return None

    # ---- messages

    def _take(self, message: Message | None) -> Refused | Goodbye | None:
        """Handle one message; return it if it ends the session."""
        match message:
            case Work():
                self._memory.offer(message, self._computer.queued_rows)
                self._operands.accept(message)
                if self._operands.bytes > self._memory.most_bytes:
                    lent = format_size(self._memory.lent_bytes)
                    raise WireError(f"{format_size(self._operands.bytes)} of operands, {lent} are lent")
                self._give()
            case Cancel(blocks=blocks):
                for device, job, block in blocks.tolist() if len(blocks) <= self._memory.most_rows else ():
                    if (key := (device, job, block)) in self._memory:
                        self._computer.cancelled.add((job, block))
                        if all(key != row.key for row in self._computer.current):
                            self._memory.forgo(key)
            case Welcome(run=run):
                self._tally.sessions += 1
                self._losses = self._inbound.losses
                self._on_welcome(run)
            case Refused() | Goodbye():
                log.info("the server said: %s", message.reason)
                if isinstance(message, Refused) and (self._line.their_version or 0) > VERSION:
                    self.outdated = message
                return message
        return None

    def _give(self) -> None:
        """Pass blocks that fit to the compute thread; refuse those that cannot fit."""
        with contextlib.suppress(Empty):
            while True:
                self._memory.end(self._computer.ended.get_nowait())
        rows, refused = self._memory.take(self._operands.bytes)
        if rows and self._exceeds_today(rows):
            return
        if rows:
            self._computer.give(rows)
        if refused:
            sizes = format_size(max(map(output_bytes, refused)))
            lent = format_size(self._memory.lent_bytes)
            log.warning("refused %d block(s), with outputs of up to %s: %s are lent", len(refused), sizes, lent)
            for row in refused:
                self._operands.skip(row)
            answers = np.array([(*row.key, TOO_LARGE, 0, 0.0, 0) for row in refused], ANSWER)
            self._tally.failed += len(refused)
            self._line.send(Result(answers, b""))

    def _exceeds_today(self, rows: list[BlockRow]) -> bool:
        """True if a block in chunks, which may move more bytes than memory holds, exceeds the day's data budget. Work
        then ends for the day."""
        data = self._owner.data
        if data is None:
            return False
        begun = [row for row in rows if row.chunks > 1 and row.chunk == 0]
        need = max((row.down_bytes + output_bytes(row) // 2 for row in begun), default=0)
        if need <= data.left_bytes + data.spare_bytes:
            return False
        self._owner.enough(f"the next block moves {format_size(need)}, {format_size(data.left_bytes)} are left")
        return True

    def _return(self) -> None:
        """Send computed results."""
        while True:
            try:
                result = self._computer.outbox.get_nowait()
            except Empty:
                return
            size = memoryview(result.data).nbytes
            tracker = self._line.send(result, track=True)
            keys = [(answer[0], answer[1], answer[2]) for answer in result.answers.tolist()]
            self._memory.answered(keys, size, tracker)
            status = result.answers["status"]
            for (_, job, block), done in zip(keys, (status == DONE).tolist(), strict=True):
                if done:  # cancelled too late; a failed block may have more chunks coming
                    self._computer.cancelled.discard((job, block))
            self._tally.blocks += int((status == DONE).sum())
            self._tally.failed += int((status != DONE).sum())
            self._tally.compute_s += float(result.answers["compute_s"].sum())

    # ---- limits

    def _most_frame_bytes(self) -> int:
        data = self._owner.data
        most = self._memory.most_bytes + SPARE_BYTES
        return min(MAX_FRAME_BYTES, most if data is None else min(most, data.left_bytes + data.spare_bytes + 1))

    def _judge(self, unfinished: Unfinished) -> str:
        """Why the connection must end; empty if it need not. Called by the thread of InboundLimit."""
        data = self._owner.data
        if data is not None and unfinished.arrived_bytes > data.left_bytes + data.spare_bytes:
            arrived, left = format_size(unfinished.arrived_bytes), format_size(max(0, data.left_bytes))
            return f"the server sends more than may be moved today: {arrived} so far, {left} were left"
        held = unfinished.held_bytes + self._operands.bytes + self._memory.output_bytes
        if held > self._memory.most_bytes + SPARE_BYTES:
            lent = format_size(self._memory.lent_bytes)
            return f"the server sends more than this device can hold: {format_size(held)}, {lent} are lent"
        return ""


def why_leave(stop: Stop, owner: Owner, devices: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Leave | None:
    if stop.requested:
        return Leave(devices, "the owner stopped the agent")
    if why := owner.restart:
        return Leave(devices, why, 10.0)
    decision = owner.decision
    return None if decision.may_work else Leave(devices, decision.reason, decision.until_s)


def _offer(join: Join, data: DataPlan | None) -> Join:
    """The join message, with memory limited to what the day's data budget allows."""
    if data is None:
        return join
    profiles = join.profiles.copy()
    profiles["memory_bytes"] = np.minimum(profiles["memory_bytes"], data.most_memory_bytes // len(profiles))
    return replace(join, profiles=profiles)


def _wake_pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A socket pair for one thread to wake another."""
    woken, waker = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    name = f"inproc://waker-{id(woken):x}"
    woken.bind(name)
    waker.connect(name)
    return waker, woken
