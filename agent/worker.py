"""The agent's loop: join, receive, compute, return; rejoin when the line breaks; leave when asked to.

Download, compute and upload overlap: ZeroMQ's own thread moves bytes, this module's first thread speaks the protocol,
its second computes. The protocol thread never computes, so heartbeats go on during the longest block. While a chunk of
a streamed block is being computed nothing more is read: one chunk waits in ZeroMQ, one is on its way, and the network
holds the sender back, so memory stays within three chunks.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty
from typing import Protocol

import numpy as np
import zmq

from agent.computer import Computer
from agent.connection import Connection
from agent.kernels import Kernel
from agent.keys import Curve
from agent.operands import Operands
from agent.owner import Decision
from agent.units import format_duration, format_size
from agent.wire import (
    DONE,
    VERSION,
    Cancel,
    Goodbye,
    Join,
    Leave,
    Refused,
    Welcome,
    WireError,
    Work,
)

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 30.0)
PART_S = 0.25  # of computing, about; so long a block goes on after its device has left
MEMORY_SLACK = 1.25  # pieces of blocks that were called off stay until their job ends
EXCUSE_S = 3.0  # so long the server may take to hear why we do not join
OF_THE_NETWORK = frozenset({"only_on_wifi", "data_cap_a_day"})
RESTART, UPDATE = 75, 76  # exit codes for the one who started us: begin again; begin again with the server's version


class Stop(Protocol):
    """Something that can be asked to end the loop, and whose descriptor becomes readable then."""

    requested: bool

    def fileno(self) -> int: ...

    def wait(self, timeout_s: float) -> None: ...


class Owner(Protocol):
    """Whoever decides when this device may work, and whose descriptor becomes readable when that changes."""

    @property
    def decision(self) -> Decision: ...

    @property
    def restart(self) -> str:
        """Why the agent must begin again; empty: it need not."""
        ...

    def fileno(self) -> int: ...

    def heard(self) -> None: ...

    def count(self, size: int) -> None:
        """So many bytes have been moved."""
        ...


@dataclass
class Tally:
    """What this agent has done, for its log and its owner."""

    blocks: int = 0
    failed: int = 0
    compute_s: float = 0.0
    sessions: int = 0


class Worker:
    def __init__(
        self,
        endpoints: Sequence[str],
        join: Join,
        kernel: Kernel,
        stop: Stop,
        owner: Owner,
        *,
        once: bool = False,
        curve: Curve | None = None,
        on_welcome: Callable[[], None] | None = None,
        tell: Callable[[str, str, float | None], None] = lambda state, why, until_s: None,
    ) -> None:
        """`endpoints` of one server are tried in turn. `on_welcome` is called when it has taken us in. `tell`: what the
        agent does, why, and until when, whenever that changes."""
        self._endpoints, self._join, self._stop, self._owner, self._once = endpoints, join, stop, owner, once
        self._endpoint = endpoints[0]
        self._curve, self._on_welcome, self._tell = curve, on_welcome, tell
        self._kernel, self._part_flops = kernel, PART_S * float(join.profiles["flops"][0])
        self._memory_bytes = int(join.profiles["memory_bytes"].sum())
        self._said_why = False  # why we do not work, to the server
        self.outdated: Refused | None = None  # what a server said that speaks a later version of the protocol
        self.tally = Tally()

    def run(self) -> int:
        """Serve until told to stop; the exit code. 2: the server will not have us."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        backoff_s = BACKOFF_S[0]
        turns = itertools.cycle(self._endpoints)
        try:
            while not self._stop.requested:
                if self._owner.restart:
                    return RESTART
                if not self._owner.decision.may_work:
                    self._wait_for_permission(context)
                    backoff_s = BACKOFF_S[0]
                    continue
                served, begun, self._endpoint = self.tally.blocks, time.monotonic(), next(turns)
                self._tell("joining", self._endpoint, None)
                ending = self._session(context)
                if isinstance(ending, Refused) and ending.final:
                    log.error("the server at %s refused this device: %s", self._endpoint, ending.reason)
                    self._tell("refused", ending.reason, None)
                    return UPDATE if self.outdated else 2
                if self._stop.requested or (self._once and isinstance(ending, Goodbye)):
                    break
                if self._must_leave() is not None:
                    continue
                if self.tally.blocks > served or time.monotonic() - begun > BACKOFF_S[1]:
                    backoff_s = BACKOFF_S[0]
                wait_s = backoff_s * random.uniform(0.5, 1.0)
                why = ending.reason if ending is not None else f"no word from {self._endpoint}"
                log.info("joining again in %.1f s", wait_s)
                self._tell("waiting", why, wait_s)
                self._stop.wait(wait_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
            return 0
        finally:
            context.destroy(linger=500)

    def _wait_for_permission(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Until the owner's rules say something else, or the owner ends it. The server is told, unless it has been, or
        the rules are about its network."""
        decision = self._owner.decision
        log.info("not working: %s%s", decision.reason, _until(decision))
        self._tell("suspended", decision.reason, decision.until_s)
        if not self._said_why and not decision.broken & OF_THE_NETWORK:
            nobody = np.empty(0, "<u4")
            excuse = Leave(nobody, decision.reason, decision.until_s, self._join.labels[0])
            Connection(context, self._endpoint, excuse, curve=self._curve, count=self._owner.count).close(EXCUSE_S)
        self._said_why = False
        poller = zmq.Poller()
        for source in (self._stop.fileno(), self._owner.fileno()):
            poller.register(source, zmq.POLLIN)
        while not self._stop.requested and not self._owner.restart and self._owner.decision.broken == decision.broken:
            poller.poll(60_000)
            self._owner.heard()

    def _session(self, context: zmq.Context[zmq.Socket[bytes]]) -> Refused | Goodbye | None:
        """One stay at the server, from joining to its end; what the server said last, None if the line broke."""
        line = Connection(
            context, self._endpoint, self._join, receive_ahead=1, curve=self._curve, count=self._owner.count
        )
        operands = Operands()
        bell, ear = _bell(context)
        computer = Computer(operands, self._kernel, lambda: bell.send(b""), self._part_flops)
        poller = zmq.Poller()
        for source in (line.socket, ear, self._stop.fileno(), self._owner.fileno()):
            poller.register(source, zmq.POLLIN)
        computer.start()
        try:
            while True:
                reading = not computer.streaming
                poller.register(line.socket, zmq.POLLIN if reading else 0)
                if not reading:
                    line.excuse()
                events = dict(poller.poll(int(line.heartbeat_s * 500)))
                if (leave := self._must_leave()) is not None:
                    self._return(line, computer)
                    line.send(leave)
                    self._said_why = line.joined is not None
                    line.close(linger_s=1.0)
                    log.info("left: %s", leave.reason)
                    return None
                if self._owner.fileno() in events:
                    self._owner.heard()
                if ear in events:
                    while ear.poll(0):
                        ear.recv()
                    self._return(line, computer)
                if line.socket in events:
                    match line.receive(0):
                        case Work() as work:
                            try:
                                operands.accept(work)
                                if operands.bytes > MEMORY_SLACK * self._memory_bytes:
                                    lent = format_size(self._memory_bytes)
                                    raise WireError(f"{format_size(operands.bytes)} of operands, {lent} are lent")
                            except WireError as error:
                                log.warning("the server sent work that does not add up (%s): joining again", error)
                                return None
                            if len(work.blocks):
                                computer.give(work.blocks.tolist())
                        case Cancel(blocks=blocks):
                            computer.cancelled.update((job, block) for _, job, block in blocks.tolist())
                        case Welcome(run=run):
                            self.tally.sessions += 1
                            log.info("joined %s, run %s", self._endpoint, run)
                            self._tell("working", run, None)
                            self._join = replace(self._join, token="")  # from now on our key is enough
                            if self._on_welcome is not None:
                                self._on_welcome()
                        case Refused() | Goodbye() as ending:
                            log.info("the server said: %s", ending.reason)
                            if isinstance(ending, Refused) and (line.their_version or 0) > VERSION:
                                self.outdated = ending
                            return ending
                line.beat()
                if line.turned_away:
                    log.warning("%s is not the server of the invitation: it has not its key", self._endpoint)
                    return None
                if line.lost:
                    log.info("no word from %s: is the server running?", self._endpoint)
                    return None
        finally:
            computer.abandoned = True
            computer.inbox.put(None)
            computer.join()
            for socket in (bell, ear):
                socket.close(linger=0)
            if not line.socket.closed:
                line.close()

    def _must_leave(self) -> Leave | None:
        """What to say, if it is time to go. What has not been computed by then is handed back by it."""
        everybody = np.arange(len(self._join.profiles), dtype="<u4")
        if self._stop.requested:
            return Leave(everybody, "the owner stopped the agent")
        if why := self._owner.restart:
            return Leave(everybody, why, 10.0)
        decision = self._owner.decision
        return None if decision.may_work else Leave(everybody, decision.reason, decision.until_s)

    def _return(self, line: Connection, computer: Computer) -> None:
        while True:
            try:
                result = computer.outbox.get_nowait()
            except Empty:
                return
            line.send(result)
            status = result.answers["status"]
            self.tally.blocks += int((status == DONE).sum())
            self.tally.failed += int((status != DONE).sum())
            self.tally.compute_s += float(result.answers["compute_s"].sum())


def _until(decision: Decision) -> str:
    return "" if decision.until_s is None else f"; for another {format_duration(decision.until_s)}"


def _bell(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A pair of sockets with which one thread wakes another."""
    ear, bell = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    name = f"inproc://bell-{id(ear):x}"
    ear.bind(name)
    bell.connect(name)
    return bell, ear
