"""The dispatcher's state: what it knows of jobs, devices and kept slabs. Plain records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ps.planning import settings as planning_settings
from ps.planning.cost import Integers, Passage, QueueTimes, after
from ps.planning.plans import Level, Request, Shape
from ps.scheduling import settings
from ps.scheduling.events import CancelBlocks, Instruction, SendBlocks, Work

IDLE = (0.0, 0.0, 0.0)
PENDING, IN_FLIGHT, DONE, CUT = range(4)
NO_DEVICES: Integers = np.empty(0, np.int64)

Key = tuple[int, int]  # job, block


@dataclass(slots=True)
class Job:
    request: Request
    critical: bool
    operands: tuple[int | None, int | None] = (None, None)  # left and right, where slabs of it may be kept
    boxes: Integers = field(default_factory=lambda: np.empty((0, 6), np.int64))
    state: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    passage: list[Passage] = field(default_factory=list)  # seconds in each queue of its device
    size_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)  # operands that the device does not hold yet
    chunk: list[int] = field(default_factory=list)  # inner values per chunk; all of them: it is sent whole
    kept: list[int] = field(default_factory=list)  # 1: the device keeps its left slab; 2: its right one; 3: both
    loss: list[int] = field(default_factory=list)  # the loss of devices that it repairs; 0: none
    first: list[bool] = field(default_factory=list)  # it jumps the queue
    sent_s: list[float] = field(default_factory=list)
    expected_s: list[float] = field(default_factory=list)  # modelled time from sending to answer
    patience_s: list[float] = field(default_factory=list)  # lower bound on expected_s when its deadline is set
    open: int = 0  # blocks neither done nor cut
    firm: bool = False  # see Plan

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def work(self) -> Work:
        done = np.flatnonzero(np.array(self.state) == DONE)
        return Work(self.boxes, done, np.array(self.device, np.int64)[done])


NO_QUEUE: deque[Key] = deque(maxlen=0)


@dataclass(slots=True)
class Device:
    credit_blocks: int
    memory_bytes: int
    round_trip_s: float
    critical: deque[Key] = field(default_factory=deque)
    deferred: deque[Key] = field(default_factory=deque)
    in_flight: dict[Key, float] = field(default_factory=dict)  # modelled time at which each answer leaves
    in_flight_bytes: int = 0
    kept_bytes: int = 0
    # modelled time at which its queues have finished all that it was sent
    free: QueueTimes = field(default_factory=QueueTimes)
    in_flight_s: float = 0.0  # modelled seconds of its blocks in flight, one after the other
    late_s: float = 0.0  # how late its latest answer was by the model; negative: early
    waiting: QueueTimes = field(default_factory=QueueTimes)  # modelled seconds of the blocks queued for it
    refusals: int = 0
    alive: bool = True
    worked: bool = False  # a block that it returned was accepted

    def gone(self) -> Device:
        """What is kept of a departed device for the results. It holds no blocks and must stay small: many devices may
        come and go."""
        claims = self.credit_blocks, self.memory_bytes, self.round_trip_s
        return Device(*claims, NO_QUEUE, NO_QUEUE, alive=False, worked=self.worked)

    def queue(self, critical: bool) -> deque[Key]:
        return self.critical if critical else self.deferred

    def model_s(self, now_s: float) -> float:
        """Its position in modelled time: as far behind as its latest answer was, but not beyond its next answer."""
        if not self.in_flight:
            return now_s
        return min(now_s - self.late_s, next(iter(self.in_flight.values())) + self.round_trip_s)

    def take(self, key: Key, size_bytes: int, passage: Passage, now_s: float) -> float:
        """Send it this block now. Returns the modelled seconds until its answer leaves."""
        model_s = self.model_s(now_s)
        self.in_flight_bytes += size_bytes
        self.in_flight_s += passage[0] + passage[1] + passage[2]
        self.in_flight[key] = through_s = self.free.send(passage, model_s)
        return through_s - model_s

    def land(self, key: Key, size_bytes: int, passage: Passage, answered_s: float | None) -> None:
        """Take this block off it: answered at `answered_s`, or ended without an answer (None)."""
        self.in_flight_bytes -= size_bytes
        self.in_flight_s -= passage[0] + passage[1] + passage[2]
        through_s = self.in_flight.pop(key)
        if not self.in_flight:
            self.in_flight_s = self.late_s = 0.0
            self.free.clear()
        elif answered_s is not None:
            self.late_s = answered_s - self.round_trip_s - through_s

    def busy_s(self, now_s: float) -> tuple[float, float, float]:
        """Modelled seconds for which its queues are busy with the blocks in flight."""
        return self.free.left(self.model_s(now_s), self.in_flight_s) if self.in_flight else IDLE

    def busy_with_all_s(self, now_s: float) -> tuple[float, float, float]:
        """The same, including the blocks queued for it. Without credit, the first of them leaves when an answer has
        arrived."""
        down_s, compute_s, up_s = self.busy_s(now_s)
        if len(self.in_flight) >= self.credit_blocks:
            down_s = max(down_s, next(iter(self.in_flight.values())) + self.round_trip_s - self.model_s(now_s))
        return after((down_s, compute_s, up_s), self.waiting, len(self.critical) + len(self.deferred))

    def ends_s(self, now_s: float) -> float:
        """Seconds until it returns its last block, if it stays as late as it is."""
        return self.busy_with_all_s(now_s)[2] + self.round_trip_s + now_s - self.late_s - self.model_s(now_s)

    def wants(self, passage: Passage, now_s: float) -> bool:
        """Whether it may run dry before its next answer arrives, which is when this block would be sent otherwise."""
        if not self.in_flight:
            return True
        model_s = self.model_s(now_s)
        now, ahead_s = settings.NOW, planning_settings.NOW.long_s
        if self.free.up_s - model_s < ahead_s:
            return True
        answer_s = next(iter(self.in_flight.values())) - model_s
        wait_s = now.margin * answer_s + self.round_trip_s + now.reaction_s
        return self.free.dry_s(passage) - model_s < max(ahead_s, wait_s)

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.critical or self.deferred)


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class Orphan:
    """A rectangle that no device can take yet."""

    job: int
    box: Integers  # [1, 6]
    loss: int  # the loss of devices that it repairs; 0: none


@dataclass(slots=True)
class State:
    """What the parts of the dispatcher share. Only they change it, and only within `Dispatcher.handle`."""

    now_s: float = 0.0
    jobs: dict[int, Job] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    waiting: Integers = field(default_factory=lambda: np.empty(0, np.int64))  # length of each device's queues
    ahead: tuple[Level, ...] = ()  # levels still to be submitted before the pass ends
    more: bool = False  # of the latest submission
    losses: dict[int, int] = field(default_factory=dict)  # loss of devices -> blocks still to be recomputed
    orphans: list[Orphan] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # deferred jobs without blocks until the last level of the pass

    def owner(self, key: Key) -> int:
        return self.jobs[key[0]].device[key[1]]

    def in_flight(self, key: Key) -> bool:
        return key in self.devices[self.owner(key)].in_flight


@dataclass(slots=True)
class Turn:
    """The outcome of one event."""

    out: list[Instruction] = field(default_factory=list)
    send: SendBlocks = field(default_factory=SendBlocks)
    cancel: CancelBlocks = field(default_factory=CancelBlocks)
    freed: dict[int, None] = field(default_factory=dict)  # devices with room for more, in order

    def launch(self, job_id: int, job: Job, blocks: list[int], devices: list[int]) -> None:
        """Send these blocks, with all that a shell needs for it."""
        send = self.send
        send.devices.extend(devices)
        send.jobs.extend([job_id] * len(blocks))
        send.blocks.extend(blocks)
        send.boxes.extend(job.boxes[blocks].tolist())
        send.inner.extend([job.shape.inner] * len(blocks))
        send.chunk.extend([job.chunk[block] for block in blocks])
        send.down_bytes.extend([job.down_bytes[block] for block in blocks])
        send.kept.extend([job.kept[block] for block in blocks])

    def stop(self, device: int, job: int, block: int) -> None:
        """Cancel this block on the device. If it has not been sent yet, only drop it from this turn's sends."""
        if self.send.drop(device, job, block):
            return
        self.cancel.devices.append(device)
        self.cancel.jobs.append(job)
        self.cancel.blocks.append(block)


class DeferredTeams:
    """Devices that are held for deferred products, so that critical products leave them alone until these end."""

    def __init__(self) -> None:
        self.busy = NO_DEVICES  # all devices that are held, each once
        self._of: dict[int, Integers] = {}  # deferred jobs -> their devices

    def hold(self, job: int, devices: Integers) -> None:
        self._set({**self._of, job: devices})

    def end(self, job: int) -> None:
        if job in self._of:
            self._set({other: team for other, team in self._of.items() if other != job})

    def left(self, devices: list[int]) -> None:
        """Their ids may be reused."""
        self._set({job: team[~np.isin(team, devices)] for job, team in self._of.items()})

    def _set(self, of: dict[int, Integers]) -> None:
        self._of, self.busy = of, np.unique(np.concatenate([NO_DEVICES, *of.values()]))
