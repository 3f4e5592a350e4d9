"""A pod: one process, one socket, thousands of emulated devices.

Real protocol, real operands, real arithmetic, modelled time. Blocks are computed in the order in which their answers
are due, and an answer leaves when it is due, not before. An answer carries the moment it was due, so that the
run's verdict can say so. One thread: between two blocks the loop looks at the clock.

With kernel links (`--links kernel`) every device has a connection of its own (`emulator.connections`): a block's time
begins when it has arrived, and its answer is due to leave, not to be back at the server.

Started by the testbed, which writes the fleet to standard input, one line, and after it orders to misbehave
(`emulator.faults`); every order carried out is reported as a line on standard output. It ends with the run, or when the
server falls silent.
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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from agent.clock import Clock, ScaledClock
from agent.connection import SILENT_AFTER, Connection
from agent.kernels import Array, Kernel, NumpyKernel
from agent.keys import Curve, Keys
from agent.operands import BlockRow, Operands
from agent.profile import PROFILE
from agent.wire import ANSWER, DONE, Cancel, Goodbye, Join, Leave, Refused, Result, WireError, Work
from emulator.connections import Forgotten, OwnConnections
from emulator.device import Devices
from emulator.faults import NONSENSE, Liar, Order, OrderError, Orders, Roster, exhaust, report
from emulator.link import links_from_json
from emulator.performance import Models
from emulator.throttle import Apart

log = logging.getLogger(__name__)

COALESCE_NS = 500_000  # answers due within this time of each other travel together, none earlier than this
ANSWERS_A_MESSAGE = 512
LOOK_NS = 10_000_000  # a busy pod looks for orders so often
SLICE_NS = 200_000  # computing goes on for about so long before the loop looks at the socket again
SLICE_UNTIMED_NS = 5_000_000  # the same when no time is modelled and nothing can be late
LINKS = ("model", "kernel", "off")
Line = Connection | OwnConnections
Answer = tuple[int, int, int, int, int, float, int]  # in the order of wire.ANSWER


class Pod:
    def __init__(
        self,
        profiles: NDArray[np.void],
        labels: list[str],
        devices: Devices,
        modelled: bool,
        clock: Clock,
        orders: Orders,
        absent: Iterable[int] = (),
        tell: Callable[[str], None] = print,
        addresses: Mapping[str, str] | None = None,
        curve: Curve | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """`devices`: how long they take; not `modelled`: as long as it takes. `absent` devices are not there at first;
        an order may make them join. `addresses`: of devices that have connections of their own, by label. `curve`: keys
        of encrypted connections."""
        self._curve = curve
        self._profiles, self._labels = profiles, labels
        self._devices, self._modelled = devices, modelled
        self._roster = Roster(len(profiles), absent)
        self._addresses = addresses
        self._clock = clock
        self._orders = orders
        self._tell = tell
        self._operands = Operands()
        self._kernel = kernel or NumpyKernel()
        self._to_compute: list[tuple[int, int, BlockRow, float]] = []  # heap by due time
        self._to_send: list[tuple[int, int, Answer, Array]] = []  # heap by due time
        self._held_up: set[int] = set()  # of those, which have waited for downloads, by sequence
        self._sent_ns = 0  # when answers left last
        self._sequence = 0  # breaks ties in the heaps, first come first served
        self._cancelled: set[tuple[int, int, int]] = set()  # device, job, block
        self._spent: dict[tuple[int, int, int], float] = {}  # modelled seconds so far of blocks that come in chunks
        self._frozen_until_ns = np.zeros(len(profiles), np.int64)
        self._liar = Liar()
        self._unnoticed: list[tuple[int, int]] = []  # heap: when the server would miss the silent one, and its index
        self._thawing: dict[int, int] = {}  # devices frozen for so long that they are lost -> when they come back
        self._looked_ns = 0  # for orders, while busy
        self._watched: tuple[Line | None, bool] = (None, False)  # what the poller looks at
        self._poller = zmq.Poller()
        self.injected: Counter[str] = Counter()
        self.stopping = False

    def run(self, endpoint: str) -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            line = self._connect(context, endpoint)
            while True:
                ready = self._wait(line)
                for text in self._orders.take(ready):
                    order = Order.parse(text, len(self._profiles))
                    if line is None and order.do == "return":
                        self._return(order, None)
                        line = self._connect(context, endpoint)
                    else:
                        self._obey(order, line)
                if thawed := self._thawed():
                    line = self._admit(thawed, line) or self._connect(context, endpoint)
                if line is None:  # nobody is there
                    if self.stopping:
                        return 0
                    continue
                match line.receive(0.0):
                    case Work() as work:
                        self._take(work)
                    case Cancel(blocks=blocks):
                        if not (self._to_compute or self._to_send):
                            self._cancelled.clear()  # nothing of what they named is here
                        self._cancelled.update(blocks.tolist())
                    case Forgotten(device=local):
                        device = int(self._roster.device[local])
                        if self._roster.answering[local]:
                            self._roster.dismiss([device])
                            self._admit([device], line)
                    case Goodbye():
                        return 0
                    case Refused(reason=reason, final=final):
                        if final or line.joined is None:
                            log.error("the server refused this pod: %s", reason)
                            return 1
                        log.warning("joining again, the server says: %s", reason)
                        line.close()
                        line = self._connect(context, endpoint)
                        continue
                self._compute()
                self._send_due(line)
                self._report_silent(line)
                line.beat()
                if self.stopping:
                    line.send(
                        Leave(np.flatnonzero(self._roster.answering).astype("<u4"), "the testbed stopped this pod")
                    )
                    line.close(linger_s=1.0)
                    return 0
                if line.lost:
                    log.error("no word from the server: ending")
                    return 1
        finally:
            context.destroy(linger=500)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Line | None:
        """A new connection of all who are there, with nothing left of the one before; None if nobody is."""
        present = self._roster.renumber()
        self._operands = Operands()
        for left_over in (
            self._to_compute,
            self._to_send,
            self._held_up,
            self._unnoticed,
            self._cancelled,
            self._spent,
        ):
            left_over.clear()
        self._devices.forget(list(range(len(self._profiles))))
        if not present:
            return None
        if self._addresses is None:
            return Connection(context, endpoint, self._join(present), curve=self._curve)
        return OwnConnections(context, endpoint, self._join(present), self._addresses, self._clock, curve=self._curve)

    def _join(self, devices: list[int]) -> Join:
        about = {"kind": "pod", "pid": str(os.getpid())}
        return Join(self._profiles[devices], [self._labels[device] for device in devices], about)

    def _wait(self, line: Line | None) -> bool:
        """Until there is something to do; True if orders can be read."""
        wait_s = 0.5 if line is None else self._patience_s(line)
        if wait_s < 0.001:
            time.sleep(wait_s)  # a poll counts in milliseconds
            wait_s = 0.0
            now_ns = self._clock.now_ns()
            if line is not None and now_ns < self._looked_ns + LOOK_NS:
                return False  # busy: whatever the server has sent is taken next, orders can wait a moment
            self._looked_ns = now_ns
        watched = (line, self._orders.open)
        if watched != self._watched:
            self._watched, self._poller = watched, zmq.Poller()
            if self._orders.open:
                self._poller.register(self._orders.descriptor, zmq.POLLIN)
            if line is not None:
                self._poller.register(line.socket, zmq.POLLIN)
        if not any(watched):
            time.sleep(wait_s)
            return False
        return self._orders.descriptor in dict(self._poller.poll(int(wait_s * 1000)))

    # ---- orders

    def _obey(self, order: Order, line: Line | None) -> None:
        """Do it, count it, report it. An order to a device that cannot follow it is not carried out for that one: who
        is away can neither leave nor freeze, who is there cannot return."""
        now_ns = self._clock.now_ns()
        there = [device for device in dict.fromkeys(order.devices) if self._roster.is_present(device)]
        frozen = [device for device in dict.fromkeys(order.devices) if device in self._thawing]
        match order.do:
            case "return":
                self._return(order, line)
                return
            case "leave" if there and line is not None:
                line.send(Leave(self._roster.dismiss(there), "it left (emulated)"))
            case "vanish" if there and line is not None:
                self._vanish(there, now_ns + _patience_ns(line))
            case "freeze" if there and line is not None:
                until_ns = now_ns + int(1e9 * order.seconds)
                if until_ns <= now_ns + _patience_ns(line):
                    self._freeze(there, until_ns)
                else:  # a phone that dozes for so long has lost its connection when it wakes up
                    self._vanish(there, now_ns + _patience_ns(line))
                    self._thawing.update(dict.fromkeys(there, until_ns))
            case "slow":
                there = list(order.devices)  # also when it comes back
                self._devices.slow(there, order.factor)
            case "lie":
                there = list(order.devices)
                for device in there:
                    self._liar.begin(device, order.how)
            case "exhaust":
                exhaust(int(self._profiles["memory_bytes"].sum()) + (1 << 30))  # more than any limit that it may have
            case "corrupt":
                there = self._roster.present
                if line is not None:
                    line.babble(NONSENSE)
        if order.do in ("leave", "vanish"):
            there += frozen  # the server may know them no more; they do not come back when they thaw
            for device in frozen:
                del self._thawing[device]
        self._carried_out(now_ns, order, there)

    def _return(self, order: Order, line: Line | None) -> None:
        away = [device for device in dict.fromkeys(order.devices) if not self._roster.is_present(device)]
        now_ns = self._clock.now_ns()
        if away:
            self._admit(away, line)
        self._carried_out(now_ns, order, away)

    def _admit(self, devices: list[int], line: Line | None) -> Line | None:
        """They are there again, as new devices."""
        self._roster.admit(devices)
        self._devices.forget(devices)
        self._frozen_until_ns[devices] = 0
        for device in devices:
            self._thawing.pop(device, None)
        if line is not None:
            line.send(self._join(devices))
        return line

    def _vanish(self, devices: list[int], noticed_ns: int) -> None:
        for local in self._roster.dismiss(devices).tolist():
            heapq.heappush(self._unnoticed, (noticed_ns, local))

    def _thawed(self) -> list[int]:
        now_ns = self._clock.now_ns() if self._thawing else 0
        return [device for device, until_ns in self._thawing.items() if until_ns <= now_ns]

    def _carried_out(self, now_ns: int, order: Order, devices: list[int]) -> None:
        if devices:
            self.injected[order.do] += 1
        self._tell(report(now_ns, order, devices, self.injected[order.do]))

    def _freeze(self, devices: list[int], until_ns: int) -> None:
        """What they have in hand, too: nothing of it is due before they thaw."""
        self._frozen_until_ns[devices] = until_ns
        frozen = set(devices)
        of: list[int] = self._roster.device.tolist()  # by index in the connection
        self._to_compute = [
            (max(due_ns, until_ns) if of[row[0]] in frozen else due_ns, sequence, row, compute_s)
            for due_ns, sequence, row, compute_s in self._to_compute
        ]
        self._to_send = [
            (late_ns, sequence, (*answer[:6], late_ns), product)
            for due_ns, sequence, answer, product in self._to_send
            for late_ns in [max(due_ns, until_ns) if of[answer[0]] in frozen else due_ns]
        ]
        heapq.heapify(self._to_compute)
        heapq.heapify(self._to_send)

    def _report_silent(self, line: Line) -> None:
        """A server with one connection a device would have missed them by now."""
        missed = []
        while self._unnoticed and self._unnoticed[0][0] <= self._clock.now_ns():
            missed.append(heapq.heappop(self._unnoticed)[1])
        if missed:
            line.send(Leave(np.array(missed, dtype="<u4"), "silent (emulated)"))

    # ---- work

    def _patience_s(self, line: Line) -> float:
        """How long the loop may sleep: not at all while there is something to compute."""
        if self._to_compute:
            return 0.0
        wait_s = line.heartbeat_s / 2
        if self._to_send:
            wait_s = min(wait_s, self._clock.wait_s(max(self._to_send[0][0], self._sent_ns + COALESCE_NS)))
        if self._unnoticed:
            wait_s = min(wait_s, self._clock.wait_s(self._unnoticed[0][0]))
        if self._thawing:
            wait_s = min(wait_s, self._clock.wait_s(min(self._thawing.values())))
        return wait_s

    def _take(self, work: Work) -> None:
        self._operands.accept(work)
        blocks = work.blocks
        if not len(blocks):
            return
        if int(blocks["device"].max()) >= len(self._roster.device):
            raise WireError(f"a block for device {blocks['device'].max()}, there are {len(self._roster.device)}")
        inner = np.full(len(blocks), self._operands.inner(int(blocks["left"][0])))  # its blocks belong to one job
        answering = self._roster.answering[blocks["device"]]
        if not answering.all():
            for row in blocks[~answering].tolist():
                self._operands.skip(row)
            blocks, inner = blocks[answering], inner[answering]
            if not len(blocks):
                return
        device = self._roster.device[blocks["device"]]
        cells = blocks["batch"].astype(np.int64) * blocks["rows"] * blocks["columns"]
        if self._modelled:
            last = blocks["chunk"] + 1 == blocks["chunks"]  # earlier chunks are added up and send nothing back
            due_s, compute_s = self._devices.schedule(
                work.stamp_ns / 1e9,
                device,
                blocks["down_bytes"].astype(np.int64),
                np.stack([blocks["batch"], blocks["rows"], inner, blocks["columns"]], axis=1).astype(np.int64),
                4 * cells * last,
            )
            due, computing = (due_s * 1e9).astype(np.int64), compute_s.tolist()
        else:
            due, computing = np.full(len(blocks), work.stamp_ns, np.int64), [0.0] * len(blocks)
        due_ns: list[int] = np.maximum(due, self._frozen_until_ns[device]).tolist()
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
            if self._cancelled and row[:3] in self._cancelled:
                if row[12] + 1 == row[13]:
                    self._cancelled.discard(row[:3])
                self._operands.skip(row)
                continue
            if not self._roster.answering[row[0]]:
                self._operands.skip(row)
                continue
            begun_ns = self._clock.now_ns()
            try:
                product = self._operands.product(row, self._kernel)
            except KeyError:
                continue  # dropped while it waited: somebody else has answered
            if not self._modelled:
                compute_s = (self._clock.now_ns() - begun_ns) / 1e9
            if row[13] > 1:
                compute_s += self._spent.pop(row[:3], 0.0)
            if product is None:  # more chunks of this block are to come
                self._spent[row[:3]] = compute_s
                continue
            if self._liar:
                product = self._liar.answer(int(self._roster.device[row[0]]), product)
            answer = (row[0], row[1], row[2], DONE, product.size, compute_s, due_ns)
            heapq.heappush(self._to_send, (due_ns, sequence, answer, product))

    def _send_due(self, line: Line) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._sent_ns + COALESCE_NS:
            return
        while self._to_send and self._to_send[0][0] <= now_ns:
            self._sent_ns = now_ns
            due: list[tuple[int, int, Answer, Array]] = []
            while self._to_send and self._to_send[0][0] <= now_ns + COALESCE_NS and len(due) < ANSWERS_A_MESSAGE:
                entry = heapq.heappop(self._to_send)
                if self._cancelled and entry[2][:3] in self._cancelled:
                    self._cancelled.discard(entry[2][:3])
                elif self._roster.answering[entry[2][0]] and not self._holds_up(entry):
                    due.append(entry)
            if not due:
                continue
            data = due[0][3].reshape(-1) if len(due) == 1 else np.concatenate([d[3].reshape(-1) for d in due])
            line.send(Result(np.array([d[2] for d in due], dtype=ANSWER), data, self._clock.now_ns()))

    def _holds_up(self, entry: tuple[int, int, Answer, Array]) -> bool:
        """Its downloads may hold an answer up, which is known only now that it is due: then it comes up again."""
        if not (self._modelled and self._devices.may_hold_up):
            return False
        due_ns, sequence, answer, product = entry
        if sequence in self._held_up:
            self._held_up.discard(sequence)
            return False
        later_ns = int(1e9 * self._devices.held_up(int(self._roster.device[answer[0]]), due_ns / 1e9))
        if later_ns <= due_ns:
            return False
        self._held_up.add(sequence)
        heapq.heappush(self._to_send, (later_ns, sequence, (*answer[:6], later_ns), product))
        return True


def _patience_ns(line: Line) -> int:
    """For so long a server bears the silence of a device that has a connection of its own."""
    return int(1e9 * SILENT_AFTER * line.heartbeat_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.pod", description=__doc__)
    parser.add_argument("--ps", required=True, help="the server, tcp://HOST:PORT")
    parser.add_argument("--links", choices=LINKS, default="model", help="off: no modelled time at all")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="modelled time goes so many times slower than real time"
    )
    parser.add_argument("--clock-offset-ns", type=int, default=0, help="of the server's clock, on another machine")
    parser.add_argument("--bare", action="store_true", help="no answer waits until it is due by the model")
    parser.add_argument("--apart", action="store_true", help="compute in a thread that can be throttled by itself")
    options = parser.parse_args(arguments)
    kernel = Apart(NumpyKernel()) if options.apart else NumpyKernel()  # now: somebody may wait for that thread
    logging.basicConfig(level=logging.INFO, format="pod: %(message)s", stream=sys.stderr)
    die_with_parent()
    gc.disable()  # the loop makes no cycles, and a collection would make answers late
    orders = Orders(sys.stdin.fileno())
    fleet: dict[str, Any] = json.loads(orders.first_line())
    profiles = np.array([tuple(row) for row in fleet["profiles"]], dtype=PROFILE)
    absent = fleet.get("absent", ())
    links = links_from_json(fleet, len(profiles))
    models = Models.from_json(fleet["models"]) if fleet.get("models") else None
    keys = fleet.get("curve")
    curve = Curve(keys["server"], Keys.of(keys["secret"])) if keys else None
    labels, addresses = fleet["labels"], None
    if options.links == "kernel":
        devices = Devices.behind_kernel_links(profiles, links, models, latency=fleet["latency_in_pod"])
        addresses = dict(zip(labels, fleet["addresses"], strict=True))
    else:
        devices = Devices(profiles, links, models)
    clock = ScaledClock(options.scale, options.clock_offset_ns)
    modelled = options.links != "off" and not options.bare
    pod = Pod(profiles, labels, devices, modelled, clock, orders, absent, tell, addresses, curve, kernel)

    def stop(number: int, frame: FrameType | None) -> None:
        pod.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the testbed's to handle: it tells us
    try:
        return pod.run(options.ps)
    except WireError as error:
        log.error("the server sent work that does not add up: %s", error)
        return 1
    except OrderError as error:
        log.error("%s", error)
        return 1


def tell(line: str) -> None:
    print(line, flush=True)


def die_with_parent() -> None:
    """Linux: be killed when the testbed is, even by kill -9. Elsewhere the silent server ends us, a little later; also
    in a container, where we are the first process and our parent is none of ours."""
    if sys.platform == "linux" and os.getppid() != 0:
        import ctypes

        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
