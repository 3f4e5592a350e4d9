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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import zmq

from agent.connection import Connection
from agent.kernels import Array, Kernel
from agent.keys import Curve
from agent.operands import BlockRow, Operands
from agent.wire import ANSWER, DONE, FAILED, Cancel, Goodbye, Join, Leave, Refused, Result, Welcome, WireError, Work

log = logging.getLogger(__name__)

FLUSH_BYTES = 1 << 20  # answers travel together until they are this many bytes
FLUSH_S = 0.005  # or this old
BACKOFF_S = (0.5, 30.0)


class Stop(Protocol):
    """Something that can be asked to end the loop, and whose descriptor becomes readable then."""

    requested: bool

    def fileno(self) -> int: ...

    def wait(self, timeout_s: float) -> None: ...


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
        *,
        once: bool = False,
        curve: Curve | None = None,
        on_welcome: Callable[[], None] | None = None,
    ) -> None:
        """`endpoints` of one server are tried in turn. `on_welcome` is called when it has taken us in."""
        self._endpoints, self._join, self._kernel, self._stop, self._once = endpoints, join, kernel, stop, once
        self._endpoint = endpoints[0]
        self._curve, self._on_welcome = curve, on_welcome
        self.tally = Tally()

    def run(self) -> int:
        """Serve until told to stop; the exit code. 2: the server will not have us."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        backoff_s = BACKOFF_S[0]
        turns = itertools.cycle(self._endpoints)
        try:
            while not self._stop.requested:
                served, self._endpoint = self.tally.blocks, next(turns)
                ending = self._session(context)
                if isinstance(ending, Refused) and ending.final:
                    log.error("the server at %s refused this device: %s", self._endpoint, ending.reason)
                    return 2
                if self._stop.requested or (self._once and isinstance(ending, Goodbye)):
                    break
                if self.tally.blocks > served:
                    backoff_s = BACKOFF_S[0]
                wait_s = backoff_s * random.uniform(0.5, 1.0)
                log.info("joining again in %.1f s", wait_s)
                self._stop.wait(wait_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
            return 0
        finally:
            context.destroy(linger=500)

    def _session(self, context: zmq.Context[zmq.Socket[bytes]]) -> Refused | Goodbye | None:
        """One stay at the server, from joining to its end; what the server said last, None if the line broke."""
        line = Connection(context, self._endpoint, self._join, receive_ahead=1, curve=self._curve)
        operands = Operands()
        bell, ear = _bell(context)
        computer = Computer(operands, self._kernel, ring=lambda: bell.send(b""))
        poller = zmq.Poller()
        for source in (line.socket, ear, self._stop.fileno()):
            poller.register(source, zmq.POLLIN)
        computer.start()
        try:
            while True:
                reading = not computer.streaming
                poller.register(line.socket, zmq.POLLIN if reading else 0)
                if not reading:
                    line.excuse()
                events = dict(poller.poll(int(line.heartbeat_s * 500)))
                if self._stop.requested:
                    self._return(line, computer)
                    line.send(Leave(np.arange(len(self._join.profiles), dtype="<u4"), "the owner stopped the agent"))
                    line.close(linger_s=1.0)
                    log.info("left")
                    return None
                if ear in events:
                    while ear.poll(0):
                        ear.recv()
                    self._return(line, computer)
                if line.socket in events:
                    match line.receive(0):
                        case Work() as work:
                            try:
                                operands.accept(work)
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
                            self._join = replace(self._join, token="")  # from now on our key is enough
                            if self._on_welcome is not None:
                                self._on_welcome()
                        case Refused() | Goodbye() as ending:
                            log.info("the server said: %s", ending.reason)
                            return ending
                line.beat()
                if line.turned_away:
                    log.warning("%s is not the server of the invitation: it has not its key", self._endpoint)
                    return None
                if line.lost:
                    log.info("no word from %s: is the server running?", self._endpoint)
                    return None
        finally:
            computer.inbox.put(None)
            computer.join()
            for socket in (bell, ear):
                socket.close(linger=0)
            if not line.socket.closed:
                line.close()

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


class Computer(threading.Thread):
    """Computes blocks in the order they came. Answers of small blocks travel together."""

    def __init__(self, operands: Operands, kernel: Kernel, ring: Callable[[], object]) -> None:
        super().__init__(name="compute", daemon=True)
        self.inbox: SimpleQueue[list[BlockRow] | None] = SimpleQueue()
        self.outbox: SimpleQueue[Result] = SimpleQueue()
        self.cancelled: set[tuple[int, int]] = set()
        self._spent: dict[tuple[int, int], float] = {}  # seconds so far of blocks that come in chunks
        self._operands, self._kernel, self._ring = operands, kernel, ring
        self._chunks_given = self._chunks_done = 0  # each counted by one thread

    def give(self, rows: list[BlockRow]) -> None:
        self._chunks_given += sum(row[13] > 1 for row in rows)
        self.inbox.put(rows)

    @property
    def streaming(self) -> bool:
        """Is a chunk of a streamed block waiting to be computed?"""
        return self._chunks_given > self._chunks_done

    def run(self) -> None:
        while (rows := self.inbox.get()) is not None:
            answers: list[tuple[int, int, int, int, int, float, int]] = []
            cells: list[Array] = []
            size, opened = 0, time.perf_counter()
            for row in rows:
                device, job, block = row[:3]
                begin = time.perf_counter()
                status, product = self._compute(row)
                now = time.perf_counter()
                seconds = self._spent.pop((job, block), 0.0) + now - begin
                if row[13] > 1:
                    self._chunks_done += 1
                    self._ring()
                if product is None:
                    if row[12] + 1 < row[13]:
                        self._spent[job, block] = seconds
                    continue
                answers.append((device, job, block, status, product.size, seconds, 0))
                cells.append(product.reshape(-1))
                size += product.nbytes
                if size >= FLUSH_BYTES or now - opened >= FLUSH_S:
                    self._flush(answers, cells)
                    answers, cells, size, opened = [], [], 0, now
            if answers:
                self._flush(answers, cells)

    def _compute(self, row: BlockRow) -> tuple[int, Array | None]:
        """Status and product; None: there is nothing to answer, or not yet."""
        job, block, last = row[1], row[2], row[12] + 1 == row[13]
        if (job, block) in self.cancelled:
            if last:
                self.cancelled.discard((job, block))
            self._operands.skip(row)
            return DONE, None
        try:
            return DONE, self._operands.product(row, self._kernel)
        except KeyError:
            return DONE, None  # dropped while it waited: somebody else has answered
        except (MemoryError, WireError) as error:
            log.warning("block %d of job %d failed: %s", block, job, error or "not enough memory")
            self._operands.skip(row)
            if not last:
                self.cancelled.add((job, block))  # the rest of it is of no use
            return FAILED, _NOTHING

    def _flush(self, answers: list[tuple[int, int, int, int, int, float, int]], cells: list[Array]) -> None:
        data = cells[0] if len(cells) == 1 else np.concatenate(cells)
        self.outbox.put(Result(np.array(answers, dtype=ANSWER), data))
        self._ring()


_NOTHING: Array = np.empty(0, dtype=np.float32)


def _bell(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A pair of sockets with which one thread wakes another."""
    ear, bell = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    name = f"inproc://bell-{id(ear):x}"
    ear.bind(name)
    bell.connect(name)
    return bell, ear
