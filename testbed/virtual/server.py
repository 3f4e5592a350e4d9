"""A run in virtual time: stands in for `ps.transport.server` and the pods, without sockets, processes or waiting.

The real dispatcher and planner decide; the model of the emulated devices says when answers arrive; the clock jumps from
event to event. Every block goes through the dispatcher and is recorded as on the other clocks.

The server's own work takes no time here (packing, sockets, planning, PyTorch's computations between products), so that
a run depends only on its scenario. A product's value is computed at once when it is submitted, or not at all
(`arithmetic`). Verification finds every answer of a device that was told to lie.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agent.protocol.clock import VirtualClock
from agent.protocol.connection import SILENT_AFTER
from agent.protocol.errors import Failure
from agent.protocol.units import format_duration
from agent.protocol.wire import ANSWER, DONE
from emulator.model.device import Devices
from emulator.model.link import Links
from emulator.model.performance import Models
from ps.planning.planner import Planner
from ps.planning.plans import Level
from ps.scheduling import settings
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import (
    BlocksLost,
    BlocksRecovered,
    BlocksReturned,
    CancelBlocks,
    CheckJob,
    DevicesJoined,
    DevicesLeft,
    JobChecked,
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
from ps.transport.attendance import LEFT, LOST, SUSPENDED, Attendance, stragglers_named
from ps.transport.jobs import Live, Product, Totals
from ps.transport.operands import Operand
from ps.transport.records import Records
from ps.transport.server import HEARTBEAT_S
from testbed.runs.watchdog import WaitedInVain
from testbed.virtual.modelled import schedule

if TYPE_CHECKING:
    from testbed.faults.inject import Injector

TOGETHER_S = 0.0005  # answers this close together are one event, as in a pod
# An answer may wait for others for this share of its block's time, so that a block costs the host a fraction of an
# event, and for less if its device has nothing else in flight and may wait for its next block. The last answer of a
# product never waits. The forward pass of two layers of OPT-13B on 256 devices of the quickstart took 0.07% longer than
# with every answer alone, in an eighth of the events.
GATHERED = 0.05
GATHERED_IDLE = 0.01
NOTICED_AFTER_S = SILENT_AFTER * HEARTBEAT_S  # silence after which a device is declared dead
FOREVER = float("inf")

# due, sequence, device, job, block, cells, computing seconds, sent
Answer = tuple[float, int, int, int, int, int, float, float]


class VirtualServer(Shell[Sequence[Answer]]):
    def __init__(
        self,
        profiles: NDArray[np.void],
        labels: Sequence[str],
        planner: Planner,
        absent: Iterable[int] = (),
        arithmetic: bool = True,
        clock: VirtualClock | None = None,
        links: Links | None = None,
        models: Models | None = None,
        wait_s: float = FOREVER,
    ) -> None:
        """`absent` devices of the fleet are away at first. `links`, `models`: see emulator.model.device.Devices."""
        super().__init__(Dispatcher(planner, verify=True))
        self.clock = clock or VirtualClock()
        self.totals, self.records = Totals(), Records()
        self.labels: list[str] = []  # per device, by id; a returning device gets a new id
        self.suspended: dict[int, str] = {}
        self._barred: set[str] = set()  # names of suspended devices
        self.attendance = Attendance()  # no device here is real
        self.notice: Callable[[str], None] = lambda text: None
        self._profiles, self._names = profiles, list(labels)
        self._devices = Devices(profiles, links, models)
        self._arithmetic = arithmetic
        self._fleet_of = np.empty(0, np.int64)  # by id: device of the fleet
        self._id_of: dict[int, int] = {}  # device of the fleet -> id, for present devices
        self._answering: list[bool] = []  # by id
        self._jobs: dict[int, Live] = {}
        self._ids, self._sequence = itertools.count(), itertools.count()
        self._answers: list[Answer] = []  # heap
        self._under_way: Counter[int] = Counter()  # by id: answers in the heap
        self._under_way_of: Counter[int] = Counter()  # by job
        self._held_up: set[int] = set()  # sequence numbers of answers already delayed by downloads
        self._silent: list[tuple[float, int]] = []  # heap: when the silence is noticed, id
        self._thawing: list[tuple[float, int]] = []  # heap: end of the freeze, device of the fleet
        self._frozen_until_s = np.zeros(len(profiles))
        self._liars: set[int] = set()  # devices of the fleet
        self._mute: set[int] = set()  # devices of the fleet that never answer
        self._lies: dict[int, set[int]] = {}  # job -> blocks returned by a lying device
        self._looked_s = -FOREVER
        self._injector: Injector | None = None
        self._begun_s = 0.0
        self._waits = ""  # why a job cannot go on
        self._wait_s = wait_s
        self._silent_since_s = FOREVER  # since when no device answers
        away = set(absent)
        self.join([device for device in range(len(profiles)) if device not in away])

    # ---- the fleet

    @property
    def devices(self) -> int:
        """Number of devices that are present and take work."""
        return self._dispatcher.living

    @property
    def present(self) -> list[int]:
        return sorted(self._id_of)

    @property
    def profiles(self) -> NDArray[np.void]:
        """Profiles of every device that ever joined, by id."""
        return self._dispatcher.profiles

    @property
    def absent(self) -> list[int]:
        """Ids of devices that are gone."""
        return self._dispatcher.gone

    @property
    def late_blocks_helped(self) -> int:
        return self._dispatcher.speculative_copies

    def left_behind(self) -> str:
        """Jobs and kept slabs that the dispatcher still holds; empty once all have ended and are forgotten."""
        return self._dispatcher.left_behind()

    def is_present(self, device: int) -> bool:
        return device in self._id_of

    def join(self, devices: Sequence[int]) -> None:
        """These devices of the fleet join; none of them may be present. Suspended devices may not return."""
        devices = [device for device in devices if self._names[device] not in self._barred]
        if not devices:
            return
        first = len(self._fleet_of)
        self._devices.forget(list(devices))
        self._frozen_until_s[list(devices)] = 0.0
        self._fleet_of = np.concatenate([self._fleet_of, np.array(devices, np.int64)])
        self._id_of |= dict(zip(devices, itertools.count(first), strict=False))
        self._answering += [True] * len(devices)
        self.labels += [self._names[device] for device in devices]
        self._waits = ""
        self._handle(DevicesJoined(first, self._profiles[list(devices)]))

    def leave(self, devices: Sequence[int]) -> None:
        self._handle(DevicesLeft(self._dismissed(devices)))

    def vanish(self, devices: Sequence[int]) -> None:
        """The devices fall silent; noticed when a server with one connection per device would notice."""
        for number in self._dismissed(devices):
            heapq.heappush(self._silent, (self.clock.now_s + NOTICED_AFTER_S, number))

    def _dismissed(self, devices: Sequence[int]) -> list[int]:
        gone = [self._id_of.pop(device) for device in devices]
        for number in gone:
            self._answering[number] = False
        self.attendance.departed[LEFT] += len(gone)
        return gone

    def lose(self, devices: Sequence[int], reason: str) -> None:
        """The devices' connection is gone."""
        self.totals.lost_devices += len(devices)
        self.notice(f"lost {len(devices)} devices ({reason}): their blocks go to the others")
        self.leave(devices)
        self.attendance.departed[LEFT] -= len(devices)
        self.attendance.departed[LOST] += len(devices)

    def freeze(self, devices: Sequence[int], seconds: float) -> None:
        """Freeze the devices and their work in hand: no answer is due before the freeze ends. In a long freeze the
        devices lose their connection, and then join as new devices."""
        until_s = self.clock.now_s + seconds
        if seconds > NOTICED_AFTER_S:
            self.vanish(devices)
            for device in devices:
                heapq.heappush(self._thawing, (until_s, device))
            return
        self._frozen_until_s[list(devices)] = until_s
        frozen = {self._id_of[device] for device in devices}
        self._answers = [
            (max(answer[0], until_s), *answer[1:]) if answer[2] in frozen else answer for answer in self._answers
        ]
        heapq.heapify(self._answers)

    def slow(self, devices: Sequence[int], factor: float) -> None:
        self._devices.slow(list(devices), factor)

    def mute(self, devices: Sequence[int]) -> None:
        """The devices stay connected but no longer answer, not even their work in hand."""
        self._mute.update(devices)

    def lie(self, devices: Sequence[int]) -> None:
        self._liars.update(devices)

    # ---- for the executor

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        numbered = {next(self._ids): product for product in products}
        if self._arithmetic:
            for product in products:
                np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)
        new = [Submission(job, p.request, p.critical, p.plan, p.kept) for job, p in numbered.items()]
        self._jobs.update((job, Live(product)) for job, product in numbered.items())
        self._handle(JobsSubmitted(new, ahead))

    def forget(self, operands: Sequence[Operand]) -> None:
        self._handle(OperandsForgotten([operand.id for operand in operands]))

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        """Let time pass until products have finished."""
        while done.empty():
            self._next_event()
        return [done.get() for _ in range(done.qsize())]

    # ---- time

    @contextmanager
    def injecting(self, injector: Injector) -> Iterator[None]:
        """Faults and churn happen at their virtual times, counted from now."""
        self._begun_s = self.clock.now_s
        injector.begin(self.clock.now_ns())
        self._injector = injector
        try:
            yield
        finally:
            injector.tick(self.clock.now_s - self._begun_s)
            self._injector = None

    def _next_event(self) -> None:
        """Process the earliest event."""
        answer_s = self._answers[0][0] if self._answers else FOREVER
        silent_s = self._silent[0][0] if self._silent else FOREVER
        thaw_s = self._thawing[0][0] if self._thawing else FOREVER
        inject_s = FOREVER if self._injector is None else self._begun_s + self._injector.next_s
        look_s = max(self._looked_s + settings.NOW.reaction_s, self._dispatcher.next_look_s)
        now_s = min(answer_s, silent_s, thaw_s, inject_s, look_s)
        if now_s > self._silent_since_s + self._wait_s:
            raise WaitedInVain(
                f"no device has answered for {format_duration(self._wait_s)}; to wait longer: "
                "--set training.wait_for_devices='1 h'"
            )
        if now_s == FOREVER:
            raise Failure(f"the fleet cannot do this step: {self._waits or 'nothing more will happen'}")
        self.clock.jump(now_s)
        if inject_s <= now_s:
            assert self._injector is not None
            self._injector.tick(self._injector.next_s)
        elif silent_s <= now_s:
            self._handle(DevicesLeft([heapq.heappop(self._silent)[1]]))
        elif thaw_s <= now_s:
            device = heapq.heappop(self._thawing)[1]
            if not self.is_present(device):
                self.join([device])
        elif answer_s <= now_s:
            self._take_answers(min(silent_s, thaw_s, inject_s, look_s))
        else:
            self._looked_s = self.clock.now_s
            self._handle(TimePassed())

    def _take_answers(self, next_s: float) -> None:
        """Take answers that arrive together, or can wait for each other, as one event, at the time of the last.
        `next_s`: when something else happens."""
        answers, until_s, wait_s = self._answers, self._answers[0][0] + TOGETHER_S, next_s
        batch = []
        while answers and (answers[0][0] <= until_s or answers[0][0] < wait_s):
            answer = heapq.heappop(answers)
            due_s, _, device, job, _, _, _, sent_s = answer
            self._under_way[device] -= 1
            self._under_way_of[job] -= 1
            if self._mute and int(self._fleet_of[device]) in self._mute:
                continue
            if self._answering[device] and not self._holds_up(answer):
                batch.append(answer)
                share = GATHERED if self._under_way[device] else GATHERED_IDLE
                wait_s = min(wait_s, due_s + share * (due_s - sent_s)) if self._under_way_of[job] else -FOREVER
        if not batch:
            return
        self.clock.jump(batch[-1][0])
        _, _, devices, jobs, blocks, _, _, _ = zip(*batch, strict=True)
        self._handle(BlocksReturned(list(devices), list(jobs), list(blocks)), batch)

    def _holds_up(self, answer: Answer) -> bool:
        """Downloads may delay an answer, which is known only once the answer is due: then queue it again."""
        if not self._devices.may_hold_up:
            return False
        due_s, sequence, device = answer[:3]
        if sequence in self._held_up:
            self._held_up.discard(sequence)
            return False
        later_s = self._devices.held_up(int(self._fleet_of[device]), due_s)
        if later_s <= due_s:
            return False
        self._held_up.add(sequence)
        self._wait_for((later_s, *answer[1:]))
        return True

    def _wait_for(self, answer: Answer) -> None:
        heapq.heappush(self._answers, answer)
        self._under_way[answer[2]] += 1
        self._under_way_of[answer[3]] += 1

    # ---- instructions

    def _now_ns(self) -> int:
        return self.clock.now_ns()

    def _dispatch_s(self, at_ns: int) -> float:
        return self.clock.now_s  # exact, where nanoseconds are rounded

    def _send_blocks(self, instruction: SendBlocks, at_ns: int) -> None:
        rows = self._fleet_of[instruction.devices]
        made = schedule(self._devices, rows, instruction, self.clock.now_s)
        due_s = np.maximum(made.due_s, self._frozen_until_s[rows]).tolist()
        self.totals.operand_bytes += int(made.down_bytes.sum())
        of_job, block = np.array(instruction.jobs), np.array(instruction.blocks, np.uint32)
        for job in dict.fromkeys(instruction.jobs):
            self._jobs[job].sent(block[of_job == job], at_ns)
        for answer in zip(
            due_s,
            self._sequence,
            instruction.devices,
            instruction.jobs,
            instruction.blocks,
            made.cells.tolist(),
            made.compute_s.tolist(),
            itertools.repeat(self.clock.now_s),
            strict=False,  # the sequence is endless
        ):
            self._wait_for(answer)

    def _cancel_blocks(self, instruction: CancelBlocks) -> None:
        """The model cannot stop a block: its answer arrives and changes nothing."""

    def _accept_blocks(self, returned: Sequence[Answer], positions: list[int]) -> None:
        rows = []
        for due_s, _, device, job, block, cells, compute_s, _ in (returned[position] for position in positions):
            self.totals.flops += 2 * cells * self._jobs[job].product.shape.inner
            self.totals.result_bytes += 4 * cells
            rows.append((device, job, block, DONE, cells, compute_s, round(due_s * 1e9)))
            if self._liars and int(self._fleet_of[device]) in self._liars:
                self._lies.setdefault(job, set()).add(block)
        self._silent_since_s = FOREVER
        self.totals.blocks += len(rows)
        answers = np.array(rows, ANSWER)
        due_ns = answers["due_ns"].astype(np.uint64)  # it arrives then, however long it waits for others here
        self.records.counted(answers, due_ns, due_ns)

    def _check_job(self, instruction: CheckJob) -> None:
        job, work = instruction.job, instruction.work
        wrong = sorted(self._lies.pop(job, set()) & set(work.done.tolist()))
        self.totals.checked_blocks += len(work.done)
        if wrong:  # wrong blocks do not count
            cells = int(np.prod(work.boxes[wrong][:, 1::2], axis=1).sum())
            self.totals.wrong_blocks += len(wrong)
            self.totals.blocks -= len(wrong)
            self.totals.flops -= 2 * cells * self._jobs[job].product.shape.inner
        self._handle(JobChecked(job, wrong))

    def _job_finished(self, instruction: JobFinished) -> None:
        job, boxes = instruction.job, instruction.work.boxes
        live = self._jobs.pop(job)
        if not self._under_way_of[job]:
            del self._under_way_of[job]
        product = live.product
        self.records.finished(job, product.name, product.step, product.shape, boxes, live.stamps(len(boxes)))
        product.done()

    def _job_waits(self, instruction: JobWaits) -> None:
        if not self._waits:
            self.notice(f"waiting for a device that can go on: {instruction.reason}")
        self._waits = instruction.reason

    def _suspend_device(self, instruction: SuspendDevice) -> None:
        label = self.labels[instruction.device]
        self.notice(f"suspended {label}: {instruction.reason}")
        self.suspended[instruction.device] = instruction.reason
        self.attendance.departed[SUSPENDED] += 1
        self._barred.add(label)

    def _name_stragglers(self, instruction: NameStragglers) -> None:
        if instruction.alone:
            self._silent_since_s = min(self._silent_since_s, self.clock.now_s)
        self.notice(stragglers_named(instruction, self.labels))

    def _blocks_lost(self, instruction: BlocksLost, at_ns: int, planned_ns: int) -> None:
        self.records.lost(instruction.loss, instruction.devices, instruction.blocks, at_ns, planned_ns)

    def _blocks_recovered(self, instruction: BlocksRecovered) -> None:
        self.records.recovered(instruction.loss, self._now_ns())

    def _carried_out(self) -> None:
        self.records.sent_again(self._now_ns())
