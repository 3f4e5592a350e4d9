"""A pod: one process, one socket, thousands of emulated devices.

Real protocol, real operands, real arithmetic, modelled time. Blocks are computed in the order in which their answers
are due, and no answer leaves before it is due. Each answer carries its due time for the fidelity verdict of the run.
One thread: between two blocks the loop checks the clock.

With kernel links (`--links kernel`) every device has its own connection (`emulator.pods.connections`): a block's time
starts when it has arrived, and its answer is due to leave the pod, not to be back at the server.

The testbed starts the pod and writes the fleet to its standard input, one line, followed by orders to misbehave
(`emulator.pods.faults`). The pod reports every order it has carried out as a line on standard output.

It lives as long as its run: until the server says goodbye or the process that started it is gone, which it learns from
the end of its standard input (and on Linux from a signal). A silent server may only be busy or stopped, so the pod
stays, and joins again over a new connection if the old one is broken or forgotten.
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

from agent.compute.kernels import Array, Kernel, NumpyKernel
from agent.compute.pieces import BlockRow, Operands, block_rows
from agent.identity.keys import Credentials, Curve, Keys, Password
from agent.protocol.clock import Clock, ScaledClock
from agent.protocol.connection import SILENT_AFTER, Connection
from agent.protocol.entrance import with_port
from agent.protocol.profile import PROFILE
from agent.protocol.wire import (
    ANSWER,
    DONE,
    JOIN_DEVICES,
    Cancel,
    Goodbye,
    Join,
    Leave,
    Refused,
    Result,
    Welcome,
    WireError,
    Work,
)
from emulator.containers.throttle import ComputeThread
from emulator.model.device import Devices
from emulator.model.link import links_from_json
from emulator.model.performance import Models
from emulator.pods.connections import Forgotten, OwnConnections
from emulator.pods.faults import NONSENSE, DeviceNumbers, Liar, Order, OrderError, Orders, exhaust, report

log = logging.getLogger(__name__)

# answers due within this time of each other share a message; no answer leaves more than this before it is due
COALESCE_NS = 500_000
ANSWERS_PER_MESSAGE = 512
BYTES_PER_MESSAGE = 4 << 20  # likewise: the server takes a message as a whole, and others wait meanwhile
LOOK_NS = 10_000_000  # how often a busy pod checks for orders
SLICE_NS = 200_000  # compute for about this long before checking the socket again
SLICE_UNTIMED_NS = 5_000_000  # the same when no time is modelled and nothing can be late
BLOCKS_UNTIMED = 64  # blocks among which neighbours are looked for, likewise; more are hardly faster
RUN_BYTES, RUN_FLOPS = 1 << 20, 1e9  # of one product for several blocks: small ones gain, and a slice stays short
LINKS = ("model", "kernel", "off")
Line = Connection | OwnConnections
Answer = tuple[int, int, int, int, int, float, int]  # fields in the order of wire.ANSWER


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
        credentials: Credentials | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """`devices`: how long blocks take; without `modelled`, blocks take their real time. `absent` devices are away
        at first; an order may make them join. `addresses`: per label, for devices with their own connections.
        `credentials`: identify the pods of this run to the server."""
        self._credentials = credentials
        self._profiles, self._labels = profiles, labels
        self._devices, self._modelled = devices, modelled
        self._numbers = DeviceNumbers(len(profiles), absent)
        self._joining: list[int] = []  # devices waiting to join after earlier ones
        self._welcomes = 0  # welcomes still expected from the server
        self._addresses = addresses
        self._clock = clock
        self._orders = orders
        self._tell = tell
        self._operands = Operands()
        self._kernel = kernel or NumpyKernel()
        self._to_compute: list[tuple[int, int, BlockRow, float]] = []  # heap by due time
        self._to_send: list[tuple[int, int, Answer, Array]] = []  # heap by due time
        self._held_up: set[int] = set()  # sequence numbers of answers already delayed by downloads
        self._sent_ns = 0  # when answers last left
        self._sequence = 0  # breaks ties in the heaps: first come, first served
        self._cancelled: set[tuple[int, int, int]] = set()  # device, job, block
        self._spent: dict[tuple[int, int, int], float] = {}  # modelled seconds so far of blocks that arrive in chunks
        self._frozen_until_ns = np.zeros(len(profiles), np.int64)
        self._liar = Liar()
        self._mute = np.zeros(len(profiles), np.bool_)  # devices that never answer
        # heap: (when the server would notice the silence, index in the connection)
        self._unnoticed: list[tuple[int, int]] = []
        self._thawing: dict[int, int] = {}  # devices frozen long enough to be lost -> when they come back
        self._looked_ns = 0  # last check for orders while busy
        self._watched: tuple[Line | None, bool] = (None, False)  # what the poller watches
        self._poller = zmq.Poller()
        self.injected: Counter[str] = Counter()
        self.stopping = False

    def run(self, endpoint: str) -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            line = self._connect(context, endpoint)
            while True:
                ready = self._wait(line)
                line = self._obey_all(self._orders.take(ready), line, lambda: self._connect(context, endpoint))
                if line is None:  # no device is present
                    if self.stopping:
                        return 0
                    continue
                match line.receive(0.0):
                    case Work() as work:
                        self._take(work)
                    case Cancel(blocks=blocks):
                        self._cancel(blocks.tolist())
                    case Forgotten(device=local):
                        self._forgotten(local, line)
                    case Welcome():
                        self._welcomes = max(0, self._welcomes - 1)
                        self._join_more(line)
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
                        Leave(np.flatnonzero(self._numbers.answering).astype("<u4"), "the testbed stopped this pod")
                    )
                    line.close(linger_s=1.0)
                    return 0
                if line.lost:
                    if not self._orders.open:
                        log.error("no word from the server, and our standard input is closed: ending")
                        return 1
                    if not line.stands:
                        log.warning("no word from the server, and the connection is broken: joining again")
                        line.close()
                        line = self._connect(context, endpoint)
        finally:
            context.destroy(linger=500)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Line | None:
        """A new connection for all present devices, with no state left from the previous one; None if no device is
        present."""
        present = sorted({*self._numbers.present, *self._joining})
        self._joining = [] if self._addresses is not None else present[JOIN_DEVICES:]
        present = present[: len(present) - len(self._joining)]
        self._numbers.renumber(present)
        self._welcomes = 1
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
            return Connection(context, endpoint, self._join(present), credentials=self._credentials)
        return OwnConnections(
            context, endpoint, self._join(present), self._addresses, self._clock, credentials=self._credentials
        )

    def _join(self, devices: list[int]) -> Join:
        about = {"kind": "pod", "pid": str(os.getpid())}
        return Join(self._profiles[devices], [self._labels[device] for device in devices], about)

    def _join_more(self, line: Line) -> None:
        """Join the next batch of waiting devices once the server has admitted the previous one, so that no turn of the
        server's loop is long."""
        if self._joining and not self._welcomes:
            devices, self._joining = self._joining[:JOIN_DEVICES], self._joining[JOIN_DEVICES:]
            self._numbers.admit(devices)
            self._welcomes += 1
            line.send(self._join(devices))

    def _wait(self, line: Line | None) -> bool:
        """Wait until there is something to do; True if orders can be read."""
        wait_s = 0.5 if line is None else self._patience_s(line)
        if wait_s < 0.001:
            time.sleep(wait_s)  # a poll counts in milliseconds
            wait_s = 0.0
            now_ns = self._clock.now_ns()
            if line is not None and now_ns < self._looked_ns + LOOK_NS:
                return False  # busy: take messages from the server first, orders can wait a moment
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

    def _obey_all(self, texts: Iterable[str], line: Line | None, connect: Callable[[], Line | None]) -> Line | None:
        """Carry out these orders and readmit devices that have thawed. Returns the connection, new or unchanged."""
        for text in texts:
            order = Order.parse(text, len(self._profiles))
            if line is None and order.do == "return":
                self._return(order, None)
                line = connect()
            else:
                self._obey(order, line)
        if thawed := self._thawed():
            line = self._admit(thawed, line) or connect()
        return line

    def _obey(self, order: Order, line: Line | None) -> None:
        """Carry out the order, count it and report it. Devices that cannot follow it are skipped: an absent device can
        neither leave nor freeze, a present one cannot return."""
        now_ns = self._clock.now_ns()
        there = [device for device in dict.fromkeys(order.devices) if self._numbers.is_present(device)]
        frozen = [device for device in dict.fromkeys(order.devices) if device in self._thawing]
        coming = set(self._joining).intersection(order.devices) if self._joining else set[int]()
        match order.do:
            case "return":
                self._return(order, line)
                return
            case "leave" if there and line is not None:
                line.send(Leave(self._numbers.dismiss(there), "it left (emulated)"))
            case "vanish" if there and line is not None:
                self._vanish(there, now_ns + _patience_ns(line))
            case "freeze" if there and line is not None:
                until_ns = now_ns + int(1e9 * order.seconds)
                if until_ns <= now_ns + _patience_ns(line):
                    self._freeze(there, until_ns)
                else:  # a phone that dozes this long has lost its connection when it wakes up
                    self._vanish(there, now_ns + _patience_ns(line))
                    self._thawing.update(dict.fromkeys(there, until_ns))
            case "slow":
                there = list(order.devices)  # also applies to absent devices when they return
                self._devices.slow(there, order.factor)
            case "lie":
                there = list(order.devices)
                for device in there:
                    self._liar.begin(device, order.how)
            case "mute":
                there = list(order.devices)
                self._mute[there] = True
            case "exhaust":
                exhaust(int(self._profiles["memory_bytes"].sum()) + (1 << 30))  # more than any limit of the container
            case "corrupt":
                there = self._numbers.present
                if line is not None:
                    line.babble(NONSENSE)
        if order.do in ("leave", "vanish"):
            self._joining = [device for device in self._joining if device not in coming]
            there += sorted(coming)
            there += frozen  # the server may have dropped them; they do not come back when they thaw
            for device in frozen:
                del self._thawing[device]
        self._carried_out(now_ns, order, there)

    def _return(self, order: Order, line: Line | None) -> None:
        here = {*self._numbers.present, *self._joining}
        away = [device for device in dict.fromkeys(order.devices) if device not in here]
        now_ns = self._clock.now_ns()
        if away:
            self._admit(away, line)
        self._carried_out(now_ns, order, away)

    def _admit(self, devices: list[int], line: Line | None) -> Line | None:
        """Make these devices present again, as new devices."""
        self._devices.forget(devices)
        self._frozen_until_ns[devices] = 0
        for device in devices:
            self._thawing.pop(device, None)
        few = not self._joining and len(devices) <= JOIN_DEVICES
        if line is not None and (few or self._addresses is not None):
            self._numbers.admit(devices)
            self._welcomes += 1
            line.send(self._join(devices))
        else:
            self._joining += devices
            if line is not None:
                self._join_more(line)
        return line

    def _vanish(self, devices: list[int], noticed_ns: int) -> None:
        for local in self._numbers.dismiss(devices).tolist():
            heapq.heappush(self._unnoticed, (noticed_ns, local))

    def _thawed(self) -> list[int]:
        now_ns = self._clock.now_ns() if self._thawing else 0
        return [device for device, until_ns in self._thawing.items() if until_ns <= now_ns]

    def _carried_out(self, now_ns: int, order: Order, devices: list[int]) -> None:
        if devices:
            self.injected[order.do] += 1
        self._tell(report(now_ns, order, devices, self.injected[order.do]))

    def _freeze(self, devices: list[int], until_ns: int) -> None:
        """Freeze these devices and their work in hand: no answer is due before they thaw."""
        self._frozen_until_ns[devices] = until_ns
        frozen = set(devices)
        of: list[int] = self._numbers.device.tolist()  # by index in the connection
        self._to_compute = [
            (max(due_ns, until_ns) if of[row.device] in frozen else due_ns, sequence, row, compute_s)
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
        """Report devices that a server with one connection per device would have missed by now."""
        missed = []
        while self._unnoticed and self._unnoticed[0][0] <= self._clock.now_ns():
            missed.append(heapq.heappop(self._unnoticed)[1])
        if missed:
            line.send(Leave(np.array(missed, dtype="<u4"), "silent (emulated)"))

    def _cancel(self, blocks: list[tuple[int, int, int]]) -> None:
        if not (self._to_compute or self._to_send):
            self._cancelled.clear()  # none of the cancelled blocks are here
        self._cancelled.update(blocks)

    def _forgotten(self, local: int, line: Line) -> None:
        """The server has dropped the connection of this device, which joins again if it is still present."""
        device = int(self._numbers.device[local])
        if self._numbers.answering[local]:
            self._numbers.dismiss([device])
            self._admit([device], line)

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
        if int(blocks["device"].max()) >= len(self._numbers.device):
            raise WireError(f"a block for device {blocks['device'].max()}, there are {len(self._numbers.device)}")
        # all blocks of a message belong to one job
        inner = np.full(len(blocks), self._operands.inner(int(blocks["left"][0])))
        answering = self._answering(blocks["device"])
        if not answering.all():
            for row in block_rows(blocks[~answering]):
                self._operands.skip(row)
            blocks, inner = blocks[answering], inner[answering]
            if not len(blocks):
                return
        device = self._numbers.device[blocks["device"]]
        cells = blocks["batch"].astype(np.int64) * blocks["rows"] * blocks["columns"]
        if self._modelled:
            last = blocks["chunk"] + 1 == blocks["chunks"]  # earlier chunks are accumulated and send nothing back
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
        rows = block_rows(blocks)
        entries = zip(due_ns, range(self._sequence, self._sequence + len(rows)), rows, computing, strict=True)
        self._sequence += len(rows)
        if self._to_compute and self._modelled:
            for entry in entries:
                heapq.heappush(self._to_compute, entry)
        else:
            self._to_compute = sorted([*self._to_compute, *entries])  # a sorted list is a heap

    def _answering(self, local: Any) -> Any:
        """Whether the device answers, for one index in the connection or for many."""
        return self._numbers.answering[local] & ~self._mute[self._numbers.device[local]]

    def _compute(self) -> None:
        """Compute for one time slice, the blocks whose answers are due first."""
        until_ns = self._clock.now_ns() + (SLICE_NS if self._modelled else SLICE_UNTIMED_NS)
        while self._to_compute and self._clock.now_ns() < until_ns:
            entries = self._next_blocks()
            rows, at = [row for _, _, row, _ in entries], 0
            while at < len(rows):
                try:
                    count = self._operands.run_length(rows, at, RUN_BYTES, RUN_FLOPS)
                    self._compute_run(entries[at : at + count])
                except KeyError:  # operands were dropped while it waited: another device has answered
                    count = 1
                at += count

    def _next_blocks(self) -> list[tuple[int, int, BlockRow, float]]:
        """The blocks that are computed next: one if their time is modelled, since the next one to arrive may be due
        sooner than the second; several, for neighbours to be computed together, if no answer can be late."""
        if self._modelled:
            taken = [heapq.heappop(self._to_compute)]
        else:  # sorted, see `_take`
            taken, self._to_compute = self._to_compute[:BLOCKS_UNTIMED], self._to_compute[BLOCKS_UNTIMED:]
        entries = []
        for entry in taken:
            row = entry[2]
            if self._cancelled and row.key in self._cancelled:
                if row.is_last:
                    self._cancelled.discard(row.key)
                self._operands.skip(row)
            elif self._answering(row.device):
                entries.append(entry)
            else:
                self._operands.skip(row)
        return entries

    def _compute_run(self, run: list[tuple[int, int, BlockRow, float]]) -> None:
        """Compute these blocks by one product (see Operands.run_length)."""
        begun_ns, row = self._clock.now_ns(), run[0][2]
        products: Iterable[Array | None]
        if len(run) > 1:
            products = self._operands.products([row for _, _, row, _ in run], self._kernel)
        else:
            products = [self._operands.product(row, self._kernel)]
        took_s = (self._clock.now_ns() - begun_ns) / 1e9 / len(run)
        for (due_ns, sequence, row, modelled_s), product in zip(run, products, strict=True):
            compute_s = modelled_s if self._modelled else took_s
            if row.chunks > 1:
                compute_s += self._spent.pop(row.key, 0.0)
            if product is None:  # more chunks of this block are to come
                self._spent[row.key] = compute_s
                continue
            if self._liar:
                product = self._liar.answer(int(self._numbers.device[row.device]), product)
            answer = (*row.key, DONE, product.size, compute_s, due_ns)
            heapq.heappush(self._to_send, (due_ns, sequence, answer, product))

    def _send_due(self, line: Line) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._sent_ns + COALESCE_NS:
            return
        while self._to_send and self._to_send[0][0] <= now_ns:
            self._sent_ns = now_ns
            due: list[tuple[int, int, Answer, Array]] = []
            size = 0
            while (
                self._to_send
                and self._to_send[0][0] <= now_ns + COALESCE_NS
                and len(due) < ANSWERS_PER_MESSAGE
                and size < BYTES_PER_MESSAGE
            ):
                entry = heapq.heappop(self._to_send)
                if self._cancelled and entry[2][:3] in self._cancelled:
                    self._cancelled.discard(entry[2][:3])
                elif self._answering(entry[2][0]) and not self._holds_up(entry):
                    due.append(entry)
                    size += entry[3].nbytes
            if not due:
                continue
            data = due[0][3].reshape(-1) if len(due) == 1 else np.concatenate([d[3].reshape(-1) for d in due])
            line.send(Result(np.array([d[2] for d in due], dtype=ANSWER), data, self._clock.now_ns()))

    def _holds_up(self, entry: tuple[int, int, Answer, Array]) -> bool:
        """Whether downloads delay this answer, which is known only once it is due; a delayed answer is queued again."""
        if not (self._modelled and self._devices.may_hold_up):
            return False
        due_ns, sequence, answer, product = entry
        if sequence in self._held_up:
            self._held_up.discard(sequence)
            return False
        later_ns = int(1e9 * self._devices.held_up(int(self._numbers.device[answer[0]]), due_ns / 1e9))
        if later_ns <= due_ns:
            return False
        self._held_up.add(sequence)
        heapq.heappush(self._to_send, (later_ns, sequence, (*answer[:6], later_ns), product))
        return True


def _patience_ns(line: Line) -> int:
    """How long a server tolerates silence from a device with its own connection."""
    return int(1e9 * SILENT_AFTER * line.heartbeat_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emulator.pods.pod", description=__doc__)
    parser.add_argument("--ps", required=True, help="the server, tcp://HOST:PORT")
    parser.add_argument("--links", choices=LINKS, default="model", help="off: no modelled time at all")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor by which modelled time is slower than real time"
    )
    parser.add_argument("--clock-offset-ns", type=int, default=0, help="of the server's clock, on another machine")
    parser.add_argument("--bare", action="store_true", help="no answer waits until it is due by the model")
    parser.add_argument(
        "--compute-thread", action="store_true", help="compute in a thread that can be throttled by itself"
    )
    options = parser.parse_args(arguments)
    # first: the testbed may be waiting for that thread
    kernel = ComputeThread(NumpyKernel()) if options.compute_thread else NumpyKernel()
    logging.basicConfig(level=logging.INFO, format="pod: %(message)s", stream=sys.stderr)
    die_with_parent()
    gc.disable()  # the loop makes no cycles, and a collection would delay answers
    orders = Orders(sys.stdin.fileno())
    fleet: dict[str, Any] = json.loads(orders.first_line())
    profiles = np.array([tuple(row) for row in fleet["profiles"]], dtype=PROFILE)
    absent = fleet.get("absent", ())
    links = links_from_json(fleet, len(profiles))
    models = Models.from_json(fleet["models"]) if fleet.get("models") else None
    endpoint, credentials = _entered(options.ps, fleet)
    labels, addresses = fleet["labels"], None
    if options.links == "kernel":
        devices = Devices.behind_kernel_links(profiles, links, models, latency=fleet["latency_in_pod"])
        addresses = dict(zip(labels, fleet["addresses"], strict=True))
    else:
        devices = Devices(profiles, links, models)
    clock = ScaledClock(options.scale, options.clock_offset_ns)
    modelled = options.links != "off" and not options.bare
    pod = Pod(profiles, labels, devices, modelled, clock, orders, absent, tell, addresses, credentials, kernel)

    def stop(number: int, frame: FrameType | None) -> None:
        pod.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the testbed handles Ctrl-C and stops the pod
    try:
        return pod.run(endpoint)
    except WireError as error:
        log.error("the server sent work that does not add up: %s", error)
        return 1
    except OrderError as error:
        log.error("%s", error)
        return 1


def _entered(endpoint: str, fleet: Mapping[str, Any]) -> tuple[str, Credentials | None]:
    """Where to join, and what identifies the pod to the server: a key, or the pass of this machine."""
    if keys := fleet.get("curve"):
        return endpoint, Curve(keys["server"], Keys.of(keys["secret"]))
    if given := fleet.get("pass"):
        return with_port(endpoint, int(given["port"])), Password(str(given["password"]))
    return endpoint, None


def tell(line: str) -> None:
    print(line, flush=True)


def die_with_parent() -> None:
    """Linux: die with the testbed, even when it is killed by kill -9. Elsewhere, and in a container, where the pod is
    the first process and has no parent, the end of standard input and the silent server end the pod a little later."""
    if sys.platform == "linux" and os.getppid() != 0:
        import ctypes

        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
