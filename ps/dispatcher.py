"""Who computes which block, and when: a pure state machine. Events in, instructions out.

No sockets, no threads, no clock, no randomness. The server (ps/server.py) turns messages into events and carries out
the instructions in their order.

Always true, and checked by `check()` after every event in tests:
- the blocks of a job that are not cut up tile its output exactly, so every cell is written exactly once;
- a block waits in one queue, or is in flight on one device, or is done, or was cut up;
- a late or duplicate answer changes nothing;
- no device holds more blocks or bytes than its credit;
- a job ends as long as one able device lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent.profile import PROFILE
from ps.cost import block_bytes, block_seconds
from ps.planner import Integers, Plan, PlanError, Shape

PENDING, IN_FLIGHT, DONE, CUT = range(4)
REFUSALS_ALLOWED = 3  # a device that fails more blocks than this gets no more work
RECUT_OVER = 64  # a lost rectangle is cut over at most so many of the least busy survivors
THEFTS_A_TURN = 32


@dataclass(frozen=True, slots=True)
class DevicesJoined:
    first: int  # ids are first, first + 1, ...; an id is never used twice
    profiles: NDArray[np.void]


@dataclass(frozen=True, slots=True)
class DevicesLeft:
    devices: list[int]


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    job: int
    shape: Shape
    urgent: bool  # somebody waits for it; otherwise it fills idle devices
    plan: Plan | None = None  # given: used as it is, its device indices being ids


@dataclass(frozen=True, slots=True)
class BlocksReturned:
    """Three lists side by side: which device answered which block of which job."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BlocksFailed:
    """The devices could not compute these blocks."""

    devices: list[int]
    jobs: list[int]
    blocks: list[int]


Event = DevicesJoined | DevicesLeft | JobSubmitted | BlocksReturned | BlocksFailed


@dataclass(frozen=True, slots=True)
class SendBlocks:
    devices: list[int]
    jobs: list[int]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    """Positions, in the BlocksReturned event, of the answers that count. Everything else is to be thrown away."""

    positions: list[int]


@dataclass(frozen=True, slots=True)
class JobFinished:
    job: int


@dataclass(frozen=True, slots=True)
class JobWaits:
    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class SuspendDevice:
    device: int
    reason: str


Instruction = SendBlocks | AcceptBlocks | JobFinished | JobWaits | SuspendDevice
Planner = Callable[[Shape, NDArray[np.void], NDArray[np.float64], int | None], Plan]


class InvariantBroken(AssertionError):
    """The dispatcher contradicts itself; the text tells the story."""


@dataclass(slots=True)
class Job:
    shape: Shape
    urgent: bool
    tiles: Integers = field(default_factory=lambda: np.empty((0, 6), np.int64))
    state: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    cost_s: list[float] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    open: int = 0  # blocks neither done nor cut up


@dataclass(slots=True)
class Device:
    credit_blocks: int
    memory_bytes: int
    urgent: deque[tuple[int, int]] = field(default_factory=deque)
    background: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    in_flight_bytes: int = 0
    backlog_s: float = 0.0  # modelled seconds of work given and not yet returned
    refusals: int = 0
    alive: bool = True

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.urgent or self.background)


@dataclass(slots=True)
class Turn:
    """What one event leads to."""

    out: list[Instruction] = field(default_factory=list)
    send: SendBlocks = field(default_factory=lambda: SendBlocks([], [], []))
    freed: dict[int, None] = field(default_factory=dict)  # devices that may take more, in order


class Dispatcher:
    def __init__(self, planner: Planner) -> None:
        self.jobs: dict[int, Job] = {}
        self.devices: list[Device] = []
        self.profiles = np.empty(0, PROFILE)
        self.stale = 0  # answers that changed nothing
        self._planner = planner
        self._waiting = np.empty(0, np.int64)  # length of each device's queues
        self._waiting_total = 0
        self._able = np.empty(0, np.int64)  # ids that take work
        self._counts: dict[Shape, int] = {}  # how many devices a shape wants, while the fleet stays as it is
        self._orphans: list[tuple[int, Integers]] = []  # rectangles that no device could take yet

    def handle(self, event: Event) -> list[Instruction]:
        """The only way in which anything changes."""
        turn = Turn()
        match event:
            case BlocksReturned():
                self._returned(event, turn)
            case JobSubmitted():
                self._submitted(event, turn)
            case DevicesJoined():
                self._joined(event, turn)
            case DevicesLeft(devices=devices):
                self._left([d for d in devices if self.devices[d].alive], turn)
            case BlocksFailed():
                self._failed(event, turn)
        if self._waiting_total:
            self._feed(turn)
        if turn.send.devices:
            turn.out.append(turn.send)
        return turn.out

    # ---- events

    def _submitted(self, event: JobSubmitted, turn: Turn) -> None:
        if event.job in self.jobs:
            raise ValueError(f"job {event.job} was submitted twice")
        self.jobs[event.job] = Job(event.shape, event.urgent)
        if event.plan is not None:
            if not all(self.devices[device].alive for device in event.plan.device.tolist()):
                raise ValueError(f"job {event.job}: the plan names a device that is not there")
            self._add(event.job, event.plan.tiles, event.plan.device, turn)
        else:
            shape = event.shape
            self._place(event.job, np.array([[0, shape.batch, 0, shape.rows, 0, shape.columns]]), turn)

    def _returned(self, event: BlocksReturned, turn: Turn) -> None:
        accepted, finished = [], []
        for position, (device, job_id, block) in enumerate(zip(event.devices, event.jobs, event.blocks, strict=True)):
            job = self._land(device, job_id, block)
            if job is None:
                self.stale += 1
                continue
            job.state[block] = DONE
            job.open -= 1
            accepted.append(position)
            turn.freed[device] = None
            if not job.open and not any(orphan[0] == job_id for orphan in self._orphans):
                finished.append(job_id)
        if accepted:
            turn.out.append(AcceptBlocks(accepted))
        for job_id in finished:
            del self.jobs[job_id]
            turn.out.append(JobFinished(job_id))

    def _failed(self, event: BlocksFailed, turn: Turn) -> None:
        failed: list[tuple[int, int, int]] = []
        for device, job_id, block in zip(event.devices, event.jobs, event.blocks, strict=True):
            if self._land(device, job_id, block) is None:
                self.stale += 1
                continue
            self.devices[device].refusals += 1
            turn.freed[device] = None
            failed.append((device, job_id, block))
        broken = {d: self.devices[d].refusals for d, _, _ in failed if self.devices[d].refusals > REFUSALS_ALLOWED}
        turn.out += [SuspendDevice(device, f"it failed {refusals} blocks") for device, refusals in broken.items()]
        if broken:
            self._left(list(broken), turn)
        for device, job_id, block in sorted(failed, key=lambda lost: not self.jobs[lost[1]].urgent):
            self._cut([(job_id, block)], turn, avoid=device)

    def _joined(self, event: DevicesJoined, turn: Turn) -> None:
        if event.first != len(self.devices):
            raise ValueError(f"device ids must be consecutive: got {event.first}, expected {len(self.devices)}")
        for credit_blocks, memory_bytes in event.profiles[["credit_blocks", "memory_bytes"]].tolist():
            self.devices.append(Device(credit_blocks, memory_bytes))
        new = np.arange(event.first, len(self.devices))
        self.profiles = np.concatenate([self.profiles, event.profiles])
        self._waiting = np.concatenate([self._waiting, np.zeros(len(new), np.int64)])
        self._able = np.concatenate([self._able, new])
        self._counts.clear()
        orphans, self._orphans = self._orphans, []
        for job_id, tile in sorted(orphans, key=lambda orphan: not self.jobs[orphan[0]].urgent):
            self._place(job_id, tile, turn)
        turn.freed.update(dict.fromkeys(new.tolist()))

    def _left(self, devices: list[int], turn: Turn) -> None:
        lost: list[tuple[int, int]] = []
        for device in devices:
            record = self.devices[device]
            lost += [*sorted(record.in_flight), *record.urgent, *record.background]
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
            self.devices[device] = Device(record.credit_blocks, record.memory_bytes, alive=False)
            turn.freed.pop(device, None)
        self._able = self._able[~np.isin(self._able, devices)]
        self._counts.clear()
        self._cut(lost, turn)

    # ---- what they share

    def _land(self, device: int, job_id: int, block: int) -> Job | None:
        """Take a block off its device. None if it was not in flight there: a late, duplicate or invented answer."""
        if not 0 <= device < len(self.devices):
            return None
        record, key = self.devices[device], (job_id, block)
        if key not in record.in_flight:
            return None
        job = self.jobs[job_id]
        record.in_flight.discard(key)
        record.in_flight_bytes -= job.size_bytes[block]
        record.backlog_s = 0.0 if record.idle else record.backlog_s - job.cost_s[block]
        return job

    def _cut(self, lost: list[tuple[int, int]], turn: Turn, avoid: int = -1) -> None:
        """Cut these rectangles again, over devices that live; first those that somebody waits for."""
        for job_id, block in sorted(lost, key=lambda key: not self.jobs[key[0]].urgent):
            job = self.jobs[job_id]
            job.state[block] = CUT
            job.open -= 1
            self._place(job_id, job.tiles[block : block + 1], turn, avoid)

    def _place(self, job_id: int, tile: Integers, turn: Turn, avoid: int = -1) -> None:
        """Plan one rectangle (of the job's output, or all of it) over the fleet."""
        job = self.jobs[job_id]
        batch, batches, row, rows, column, columns = tile[0].tolist()
        shape = Shape(batches, rows, job.shape.inner, columns)
        whole = shape == job.shape
        least_bytes = block_bytes(1, 1, shape.inner, 1)
        candidates = self._able[self.profiles["memory_bytes"][self._able] >= least_bytes]
        if len(candidates) > 1:
            candidates = candidates[candidates != avoid]
        backlog_s = np.array([self.devices[d].backlog_s for d in candidates.tolist()])
        if not whole and len(candidates) > RECUT_OVER:
            least_busy = np.argsort(backlog_s, kind="stable")[:RECUT_OVER]
            candidates, backlog_s = candidates[least_busy], backlog_s[least_busy]
        try:
            if not len(candidates):
                why = (
                    f"none has the {least_bytes} bytes that one cell needs" if len(self._able) else "no device is there"
                )
                raise PlanError(why)
            plan = self._planner(
                shape, self.profiles[candidates], backlog_s, self._counts.get(shape) if whole else None
            )
        except PlanError as error:
            self._orphans.append((job_id, tile))
            turn.out.append(JobWaits(job_id, str(error)))
            return
        if whole:
            self._counts[shape] = plan.count
        self._add(job_id, plan.tiles + np.array([batch, 0, row, 0, column, 0]), candidates[plan.device], turn)

    def _add(self, job_id: int, tiles: Integers, devices: Integers, turn: Turn) -> None:
        """New blocks of a job, each for its device: sent if there is credit, queued if not."""
        job, first = self.jobs[job_id], len(self.jobs[job_id].state)
        job.tiles = np.concatenate([job.tiles, tiles]) if first else tiles
        profiles = self.profiles[devices]
        cost_s = block_seconds(profiles, tiles[:, 1], tiles[:, 3], job.shape.inner, tiles[:, 5])
        cost_s -= 2 * profiles["latency_s"]  # latency delays an answer but keeps nothing busy
        sizes = block_bytes(tiles[:, 1], tiles[:, 3], job.shape.inner, tiles[:, 5])
        if np.any(sizes > profiles["memory_bytes"]):
            raise ValueError(f"job {job_id}: the plan gives a device a block that it cannot hold")
        owners = devices.tolist()
        job.state += [PENDING] * len(tiles)
        job.device += owners
        job.cost_s += cost_s.tolist()
        job.size_bytes += sizes.tolist()
        job.open += len(tiles)
        for block, device in enumerate(owners, first):
            record = self.devices[device]
            record.backlog_s += job.cost_s[block]
            if not (record.urgent or record.background) and self._has_credit(record, job.size_bytes[block]):
                self._launch(device, record, job_id, job, block, turn)
            else:
                (record.urgent if job.urgent else record.background).append((job_id, block))
                self._waiting[device] += 1
                self._waiting_total += 1

    def _has_credit(self, record: Device, size_bytes: int) -> bool:
        return (
            len(record.in_flight) < record.credit_blocks and record.in_flight_bytes + size_bytes <= record.memory_bytes
        )

    def _launch(self, device: int, record: Device, job_id: int, job: Job, block: int, turn: Turn) -> None:
        job.state[block] = IN_FLIGHT
        record.in_flight.add((job_id, block))
        record.in_flight_bytes += job.size_bytes[block]
        turn.send.devices.append(device)
        turn.send.jobs.append(job_id)
        turn.send.blocks.append(block)

    def _feed(self, turn: Turn) -> None:
        """Fill each freed device from its queues; let the idle ones take work from the longest queue."""
        thefts = 0
        for device in turn.freed:
            record = self.devices[device]
            if not (record.urgent or record.background):
                if not self._waiting_total:
                    return
                if record.in_flight or not record.alive or thefts == THEFTS_A_TURN or not self._steal(device):
                    continue
                thefts += 1
            while queue := record.urgent or record.background:
                job_id, block = queue[0]
                job = self.jobs[job_id]
                if not self._has_credit(record, job.size_bytes[block]):
                    break
                queue.popleft()
                self._waiting[device] -= 1
                self._waiting_total -= 1
                self._launch(device, record, job_id, job, block, turn)

    def _steal(self, thief: int) -> bool:
        """Move the last block of the longest queue to an idle device that would return it sooner."""
        victim = int(self._waiting.argmax())
        owner, taker = self.devices[victim], self.devices[thief]
        queue = owner.urgent or owner.background
        job_id, block = queue[-1]
        job = self.jobs[job_id]
        if job.size_bytes[block] > taker.memory_bytes:
            return False
        _, batches, _, rows, _, columns = job.tiles[block].tolist()
        profile = self.profiles[thief : thief + 1]
        alone_s = float(block_seconds(profile, batches, rows, job.shape.inner, columns)[0])
        if alone_s >= owner.backlog_s:
            return False
        queue.pop()
        self._waiting[victim] -= 1
        owner.backlog_s -= job.cost_s[block]
        job.device[block] = thief
        job.cost_s[block] = alone_s - 2 * float(profile["latency_s"][0])
        taker.backlog_s += job.cost_s[block]
        (taker.urgent if job.urgent else taker.background).append((job_id, block))
        self._waiting[thief] += 1
        return True

    # ---- for tests

    def check(self) -> None:
        """Raise InvariantBroken if the state contradicts the promises at the top of this file. Slow: for tests."""
        where: dict[tuple[int, int], list[str]] = {}
        for index, record in enumerate(self.devices):
            for key in record.in_flight:
                where.setdefault(key, []).append(f"in flight on {index}")
            for key in (*record.urgent, *record.background):
                where.setdefault(key, []).append(f"queued at {index}")
            if gone := {job for job, _ in (*record.in_flight, *record.urgent, *record.background)} - set(self.jobs):
                raise InvariantBroken(f"device {index} has blocks of jobs that are over: {sorted(gone)}")
            held = sum(self.jobs[j].size_bytes[b] for j, b in record.in_flight)
            if held != record.in_flight_bytes or len(record.in_flight) > record.credit_blocks:
                raise InvariantBroken(f"device {index} holds {len(record.in_flight)} blocks, {held} bytes: {record}")
            if held > record.memory_bytes:
                raise InvariantBroken(f"device {index} holds {held} bytes, more than its {record.memory_bytes}")
            if len(record.urgent) + len(record.background) != self._waiting[index]:
                raise InvariantBroken(f"device {index}: {self._waiting[index]} waiting counted, {record}")
            if not record.alive and not record.idle:
                raise InvariantBroken(f"device {index} left and still has work: {record}")
        for job_id, job in self.jobs.items():
            cover = np.zeros((job.shape.batch, job.shape.rows, job.shape.columns), np.int8)
            orphans = [tile[0] for owner, tile in self._orphans if owner == job_id]
            live = [job.tiles[b] for b in range(len(job.state)) if job.state[b] != CUT]
            for b, bs, r, rs, c, cs in (*live, *orphans):
                cover[b : b + bs, r : r + rs, c : c + cs] += 1
            if (cover != 1).any():
                raise InvariantBroken(f"job {job_id}: {int((cover != 1).sum())} cells not covered exactly once")
            for block, state in enumerate(job.state):
                places = where.pop((job_id, block), [])
                expected = {PENDING: f"queued at {job.device[block]}", IN_FLIGHT: f"in flight on {job.device[block]}"}
                if places != ([expected[state]] if state in expected else []):
                    raise InvariantBroken(f"job {job_id} block {block} in state {state} is {places}")
        if where:
            raise InvariantBroken(f"blocks of jobs that are over: {where}")
