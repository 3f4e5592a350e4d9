"""A pod: one process, one socket, thousands of emulated devices.

Real protocol, real operands, real arithmetic, modelled time. Blocks are computed in the order in which their answers
are due, and an answer leaves when it is due, not before. An answer carries the moment it was due, so that the
run's verdict can say so. One thread: between two blocks the loop looks at the clock.

Started by the testbed, which writes the fleet to standard input; it ends with the run, or when the server falls silent.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.connection import Connection
from agent.kernels import Array, NumpyKernel
from agent.operands import BlockRow, Operands
from agent.profile import PROFILE
from agent.wire import ANSWER, DONE, Cancel, Goodbye, Join, Leave, Refused, Result, WireError, Work
from emulator.clock import Clock, WallClock
from emulator.device import Devices

log = logging.getLogger(__name__)

COALESCE_NS = 500_000  # answers due within this time of each other travel together, none earlier than this
ANSWERS_A_MESSAGE = 512
SLICE_NS = 200_000  # computing goes on for about so long before the loop looks at the socket again
SLICE_UNTIMED_NS = 5_000_000  # the same when no time is modelled and nothing can be late
Answer = tuple[int, int, int, int, int, float, int]  # in the order of wire.ANSWER


class Pod:
    def __init__(self, profiles: NDArray[np.void], labels: list[str], modelled: bool, clock: Clock) -> None:
        self._join = Join(profiles, labels, {"kind": "pod", "pid": str(os.getpid())})
        self._devices = Devices(profiles)
        self._modelled = modelled
        self._clock = clock
        self._operands = Operands()
        self._kernel = NumpyKernel()
        self._to_compute: list[tuple[int, int, BlockRow, float]] = []  # heap by due time
        self._to_send: list[tuple[int, int, Answer, Array]] = []  # heap by due time
        self._sent_ns = 0  # when answers left last
        self._sequence = 0  # breaks ties in the heaps, first come first served
        self._cancelled: set[tuple[int, int]] = set()
        self._spent: dict[tuple[int, int], float] = {}  # modelled seconds so far of blocks that come in chunks
        self.stopping = False

    def run(self, endpoint: str) -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        line = Connection(context, endpoint, self._join)
        try:
            while True:
                wait_s = self._patience_s(line)
                if wait_s < 0.001:
                    self._clock.sleep(wait_s)  # a poll counts in milliseconds
                    wait_s = 0.0
                match line.receive(wait_s):
                    case Work() as work:
                        self._take(work)
                    case Cancel(blocks=blocks):
                        self._cancelled.update((job, block) for _, job, block in blocks.tolist())
                    case Goodbye():
                        return 0
                    case Refused(reason=reason):
                        log.error("the server refused this pod: %s", reason)
                        return 1
                self._compute()
                self._send_due(line)
                line.beat()
                if self.stopping:
                    line.send(Leave(np.arange(len(self._join.profiles), dtype="<u4"), "the testbed stopped this pod"))
                    line.close(linger_s=1.0)
                    return 0
                if line.lost:
                    log.error("no word from the server: ending")
                    return 1
        finally:
            context.destroy(linger=500)

    def _patience_s(self, line: Connection) -> float:
        """How long the loop may sleep: not at all while there is something to compute."""
        if self._to_compute:
            return 0.0
        wait_s = line.heartbeat_s / 2
        if self._to_send:
            wait_s = min(wait_s, self._clock.wait_s(max(self._to_send[0][0], self._sent_ns + COALESCE_NS)))
        return wait_s

    def _take(self, work: Work) -> None:
        self._operands.accept(work)
        blocks = work.blocks
        if not len(blocks):
            return
        cells = blocks["batch"].astype(np.int64) * blocks["rows"] * blocks["columns"]
        inner = self._operands.inner(int(blocks["left"][0]))  # a message's blocks belong to one job
        if self._modelled:
            last = blocks["chunk"] + 1 == blocks["chunks"]  # earlier chunks are added up and send nothing back
            due_s, compute_s = self._devices.schedule(
                work.stamp_ns / 1e9,
                blocks["device"].astype(np.int64),
                blocks["down_bytes"].astype(np.int64),
                2.0 * inner * cells,
                4 * cells * last,
            )
            due_ns, computing = (due_s * 1e9).astype(np.int64).tolist(), compute_s.tolist()
        else:
            due_ns, computing = [work.stamp_ns] * len(blocks), [0.0] * len(blocks)
        rows: list[BlockRow] = blocks.tolist()
        entries = zip(due_ns, range(self._sequence, self._sequence + len(rows)), rows, computing, strict=True)
        self._sequence += len(rows)
        if self._to_compute:
            for entry in entries:
                heapq.heappush(self._to_compute, entry)
        else:
            self._to_compute = sorted(entries)  # a sorted list is a heap

    def _compute(self) -> None:
        """For a moment: the blocks whose answers are due first."""
        until_ns = self._clock.now_ns() + (SLICE_NS if self._modelled else SLICE_UNTIMED_NS)
        while self._to_compute and self._clock.now_ns() < until_ns:
            due_ns, sequence, row, compute_s = heapq.heappop(self._to_compute)
            if self._cancelled and (row[1], row[2]) in self._cancelled:
                if row[12] + 1 == row[13]:
                    self._cancelled.discard((row[1], row[2]))
                self._operands.skip(row)
                continue
            try:
                product = self._operands.product(row, self._kernel)
            except KeyError:
                continue  # dropped while it waited: somebody else has answered
            if row[13] > 1:
                compute_s += self._spent.pop(row[1:3], 0.0)
            if product is None:  # more chunks of this block are to come
                self._spent[row[1:3]] = compute_s
                continue
            answer = (row[0], row[1], row[2], DONE, product.size, compute_s, due_ns)
            heapq.heappush(self._to_send, (due_ns, sequence, answer, product))

    def _send_due(self, line: Connection) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._sent_ns + COALESCE_NS:
            return
        while self._to_send and self._to_send[0][0] <= now_ns:
            self._sent_ns = now_ns
            due: list[tuple[int, int, Answer, Array]] = []
            while self._to_send and self._to_send[0][0] <= now_ns + COALESCE_NS and len(due) < ANSWERS_A_MESSAGE:
                due.append(heapq.heappop(self._to_send))
            data = due[0][3].reshape(-1) if len(due) == 1 else np.concatenate([d[3].reshape(-1) for d in due])
            line.send(Result(np.array([d[2] for d in due], dtype=ANSWER), data))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.pod", description=__doc__)
    parser.add_argument("--ps", required=True, help="the server, tcp://HOST:PORT")
    parser.add_argument("--links", choices=("model", "off"), default="model", help="off: no modelled time at all")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="pod: %(message)s", stream=sys.stderr)
    die_with_parent()
    gc.disable()  # the loop makes no cycles, and a collection would make answers late
    fleet: dict[str, Any] = json.load(sys.stdin)
    profiles = np.array([tuple(row) for row in fleet["profiles"]], dtype=PROFILE)
    pod = Pod(profiles, fleet["labels"], options.links == "model", WallClock())

    def stop(number: int, frame: FrameType | None) -> None:
        pod.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the testbed's to handle: it tells us
    try:
        return pod.run(options.ps)
    except WireError as error:
        log.error("the server sent work that does not add up: %s", error)
        return 1


def die_with_parent() -> None:
    """Linux: be killed when the testbed is, even by kill -9. Elsewhere the silent server ends us, a little later."""
    if sys.platform == "linux":
        import ctypes

        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
