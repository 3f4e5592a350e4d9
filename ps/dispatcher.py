"""Who computes which block, and when: a pure state machine. Events in, instructions out.

No sockets, no threads, no clock, no randomness. The server (ps/server.py) turns messages into events and carries out
the instructions in their order.

Always true, and checked by `check()` after every event in tests:
- the blocks of a job that are not cut up tile its output exactly, so every cell is written exactly once;
- a block waits in one queue, or is in flight on one device, or is done, or was cut up;
- a late or duplicate answer changes nothing;
- no device holds more blocks or bytes than its credit: blocks in flight and kept slabs fit its memory together;
- a job ends as long as one able device lives.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from agent.profile import PROFILE
from ps.cost import BYTES, block_bytes, block_seconds, chunk_length, least_bytes, operand_bytes, usable_bytes
from ps.events import (
    AcceptBlocks,
    BlocksFailed,
    BlocksLost,
    BlocksRecovered,
    BlocksReturned,
    CheckJob,
    DevicesJoined,
    DevicesLeft,
    Event,
    Instruction,
    JobChecked,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    OperandsForgotten,
    Submission,
    SuspendDevice,
)
from ps.grid import grid_plan
from ps.ledger import CUT, DONE, IN_FLIGHT, PENDING, Device, Job, Slabs, Turn, whole
from ps.planner import Integers, PlanError, Planner, Shape

REFUSALS_ALLOWED = 3  # a device that fails more blocks than this gets no more work
RECUT_OVER = 64  # a lost rectangle is cut over at most so many of the least busy survivors
THEFTS_A_TURN = 32
NOBODY = "no device is there"


class InvariantBroken(AssertionError):
    """The dispatcher contradicts itself; the text tells the story."""


class Dispatcher:
    def __init__(self, planner: Planner, verify: bool = False) -> None:
        """`verify`: a job is finished when somebody has said that its blocks are right (CheckJob, JobChecked)."""
        self.jobs: dict[int, Job] = {}
        self.devices: list[Device] = []
        self.profiles = np.empty(0, PROFILE)
        self.stale = 0  # answers that changed nothing
        self._planner, self._verify = planner, verify
        self._losses: dict[int, int] = {}  # loss of devices -> blocks that are still to be done again
        self._last_loss = 0
        self._waiting = np.empty(0, np.int64)  # length of each device's queues
        self._waiting_total = 0
        self._able = np.empty(0, np.int64)  # ids that take work; a new array whenever they change
        self._slabs: dict[int, Slabs] = {}  # by operand
        self._orphans: list[tuple[int, Integers, int]] = []  # rectangles that no device could take yet; their loss

    def handle(self, event: Event) -> list[Instruction]:
        """The only way in which anything changes."""
        turn = Turn()
        match event:
            case BlocksReturned():
                self._returned(event, turn)
            case JobsSubmitted(jobs=jobs):
                self._submitted(jobs, turn)
            case DevicesJoined():
                self._joined(event, turn)
            case DevicesLeft(devices=devices):
                self._left([d for d in devices if self.devices[d].alive], turn)
            case BlocksFailed():
                self._failed(event, turn)
            case OperandsForgotten(operands=operands):
                self._forget(operands)
            case JobChecked():
                self._checked(event, turn)
        if self._waiting_total:
            self._feed(turn)
        if turn.send.devices:
            turn.out.append(turn.send)
        return turn.out

    # ---- events

    def _submitted(self, submissions: list[Submission], turn: Turn) -> None:
        for new in submissions:
            if new.job in self.jobs:
                raise ValueError(f"job {new.job} was submitted twice")
            self.jobs[new.job] = Job(new.request, new.urgent, new.kept)
            if new.plan is not None:
                if not all(self.devices[device].alive for device in new.plan.device.tolist()):
                    raise ValueError(f"job {new.job}: the plan names a device that is not there")
                self._add(new.job, new.plan.tiles, new.plan.device, new.plan.fresh, turn)
        self._plan_together([new.job for new in submissions if new.plan is None], turn)

    def _plan_together(self, jobs: list[int], turn: Turn) -> None:
        """Whole products over the whole fleet, those first that somebody waits for."""
        jobs.sort(key=lambda job: not self.jobs[job].urgent)
        if not jobs:
            return
        try:
            if not len(self._able):
                raise PlanError(NOBODY)
            plans = self._planner.plan([self.jobs[job].request for job in jobs], self.profiles, self._able)
        except PlanError as error:
            if len(jobs) > 1:  # some of them may be possible
                for job in jobs:
                    self._plan_together([job], turn)
                return
            self._orphans.append((jobs[0], whole(self.jobs[jobs[0]].shape), 0))
            turn.out.append(JobWaits(jobs[0], str(error)))
            return
        for job, plan in zip(jobs, plans, strict=True):
            self._add(job, plan.tiles, plan.device, plan.fresh, turn)

    def _returned(self, event: BlocksReturned, turn: Turn) -> None:
        accepted, finished, repaired = [], [], []
        for position, (device, job_id, block) in enumerate(zip(event.devices, event.jobs, event.blocks, strict=True)):
            job = self._land(device, job_id, block)
            if job is None:
                self.stale += 1
                continue
            job.state[block] = DONE
            job.open -= 1
            accepted.append(position)
            turn.freed[device] = None
            if job.loss[block]:
                repaired.append(job.loss[block])
            if not job.open and not any(orphan[0] == job_id for orphan in self._orphans):
                finished.append(job_id)
        if accepted:
            turn.out.append(AcceptBlocks(accepted))
        for loss in repaired:
            self._losses[loss] -= 1
            self._recovered(loss, turn)
        for job_id in finished:
            if self._verify:
                turn.out.append(CheckJob(job_id))
            else:
                self._finish(job_id, turn)

    def _finish(self, job_id: int, turn: Turn) -> None:
        del self.jobs[job_id]
        turn.out.append(JobFinished(job_id))

    def _recovered(self, loss: int, turn: Turn) -> None:
        if not self._losses[loss]:
            del self._losses[loss]
            turn.out.append(BlocksRecovered(loss))

    def _checked(self, event: JobChecked, turn: Turn) -> None:
        """Whoever returned a wrong block gets no more work, and what it returned is done again."""
        job = self.jobs[event.job]
        if not event.wrong:
            self._finish(event.job, turn)
            return
        if any(job.state[block] != DONE for block in event.wrong):
            raise ValueError(f"job {event.job}: a block that was not done cannot be wrong")
        liars = sorted({job.device[block] for block in event.wrong})
        job.open += len(event.wrong)  # they are open again
        for block in event.wrong:
            job.loss[block] = 0  # if it repaired a loss, it was counted when it came
        alive = [device for device in liars if self.devices[device].alive]
        turn.out += [SuspendDevice(device, "what it returned was wrong") for device in alive]
        self._left(alive, turn)
        self._cut([(event.job, block) for block in event.wrong], turn)

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
        for slabs in self._slabs.values():
            nothing = np.zeros(len(new), np.int64)
            slabs.low, slabs.high = np.concatenate([slabs.low, nothing]), np.concatenate([slabs.high, nothing])
        orphans, self._orphans = self._orphans, []
        for job_id, tile, loss in sorted(orphans, key=lambda orphan: not self.jobs[orphan[0]].urgent):
            if not loss and np.array_equal(tile, whole(self.jobs[job_id].shape)):
                self._plan_together([job_id], turn)
            else:
                self._place(job_id, tile, turn, loss=loss)
                if loss:
                    self._losses[loss] -= 1  # as an orphan it was counted too
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
        if lost:
            self._last_loss += 1
            self._losses[self._last_loss] = 0
            self._cut(lost, turn, loss=self._last_loss)
            turn.out.append(BlocksLost(self._last_loss, devices, len(lost)))
            self._recovered(self._last_loss, turn)

    def _forget(self, operands: list[int]) -> None:
        for operand in operands:
            slabs = self._slabs.pop(operand, None)
            if slabs is None:
                continue
            for job in self.jobs.values():  # what has not been sent yet will not be kept
                for side in (0, 1):
                    if job.operands[side] == operand:
                        job.kept = [bits & ~(1 << side) for bits in job.kept]
            held = np.flatnonzero(slabs.high)
            freed = slabs.row_bytes * (slabs.high[held] - slabs.low[held])
            for device, size in zip(held.tolist(), freed.tolist(), strict=True):
                if self.devices[device].alive:
                    self.devices[device].kept_bytes -= size

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

    def _cut(self, lost: list[tuple[int, int]], turn: Turn, avoid: int = -1, loss: int = 0) -> None:
        """Cut these rectangles again, over devices that live; first those that somebody waits for. `loss`: why, if
        devices were lost; a block that already repairs an earlier loss goes on repairing that one."""
        for job_id, block in sorted(lost, key=lambda key: not self.jobs[key[0]].urgent):
            job = self.jobs[job_id]
            job.state[block] = CUT
            job.open -= 1
            earlier = job.loss[block]
            self._place(job_id, job.tiles[block : block + 1], turn, avoid, earlier or loss)
            if earlier in self._losses:
                self._losses[earlier] -= 1

    def _place(self, job_id: int, tile: Integers, turn: Turn, avoid: int = -1, loss: int = 0) -> None:
        """Cut one rectangle again, over some of the least busy devices."""
        job = self.jobs[job_id]
        batch, batches, row, rows, column, columns = tile[0].tolist()
        shape = Shape(batches, rows, job.shape.inner, columns)
        candidates = self._able[usable_bytes(self.profiles[self._able]) >= least_bytes(shape.inner)]
        if len(candidates) > 1:
            candidates = candidates[candidates != avoid]
        backlog_s = np.array([self.devices[d].backlog_s for d in candidates.tolist()])
        if len(candidates) > RECUT_OVER:
            least_busy = np.argsort(backlog_s, kind="stable")[:RECUT_OVER]
            candidates, backlog_s = candidates[least_busy], backlog_s[least_busy]
        if not len(candidates):
            self._orphans.append((job_id, tile, loss))
            if loss:
                self._losses[loss] = self._losses.get(loss, 0) + 1
            turn.out.append(JobWaits(job_id, "none of the devices has the memory" if len(self._able) else NOBODY))
            return
        plan = grid_plan(shape, self.profiles[candidates], backlog_s)
        tiles = plan.tiles + np.array([batch, 0, row, 0, column, 0])
        self._add(job_id, tiles, candidates[plan.device], plan.fresh, turn, loss)

    def _add(
        self, job_id: int, tiles: Integers, devices: Integers, fresh: NDArray[np.bool_], turn: Turn, loss: int = 0
    ) -> None:
        """New blocks of a job, each for its device: sent if there is credit, queued if not."""
        job, first = self.jobs[job_id], len(self.jobs[job_id].state)
        job.tiles = np.concatenate([job.tiles, tiles]) if first else tiles
        profiles, inner = self.profiles[devices], job.shape.inner
        batches, rows, columns = tiles[:, 1], tiles[:, 3], tiles[:, 5]
        chunk = chunk_length(batches, rows, inner, columns, usable_bytes(profiles))
        if not chunk.all():
            raise ValueError(f"job {job_id}: the plan gives a device a block that it cannot hold")
        new, kept = self._account(job, tiles, devices, fresh, chunk == inner)
        down_bytes = BYTES * inner * batches * (rows * new[:, 0] + columns * new[:, 1])
        cost_s = block_seconds(profiles, batches, rows, inner, columns, down_bytes, -(-inner // chunk))
        cost_s -= 2 * profiles["latency_s"]  # latency delays an answer but keeps nothing busy
        owners = devices.tolist()
        job.state += [PENDING] * len(tiles)
        job.device += owners
        job.cost_s += cost_s.tolist()
        job.size_bytes += block_bytes(batches, rows, inner, columns, chunk).tolist()
        job.down_bytes += down_bytes.tolist()
        job.chunk += chunk.tolist()
        job.kept += kept.tolist()
        job.loss += [loss] * len(tiles)
        if loss:
            self._losses[loss] = self._losses.get(loss, 0) + len(tiles)
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

    def _account(
        self, job: Job, tiles: Integers, devices: Integers, fresh: NDArray[np.bool_], whole: NDArray[np.bool_]
    ) -> tuple[NDArray[np.bool_], Integers]:
        """Which slabs each block still has to bring, and which are among those that the device keeps (see Job.kept).
        A device keeps the first slab of an operand that it gets, if half its memory has room for it."""
        new = fresh | ~whole[:, None]  # a streamed block brings both, chunk by chunk, and leaves nothing
        kept = np.zeros(len(tiles), np.int64)
        for side, operand in enumerate(job.operands):
            if operand is None or job.shape.batch > 1:
                continue
            slabs = self._slabs.get(operand)
            if slabs is None:
                nothing = np.zeros(len(self.devices), np.int64)
                slabs = self._slabs[operand] = Slabs(nothing, nothing.copy(), BYTES * job.shape.inner)
            low = tiles[:, 2 + 2 * side]
            high = low + tiles[:, 3 + 2 * side]
            held = slabs.hold(devices, low, high)
            candidates = np.flatnonzero(whole & fresh[:, side] & (slabs.high[devices] == 0))
            owners, first = np.unique(devices[candidates], return_index=True)
            budget = usable_bytes(self.profiles[owners]).tolist()
            for device, block, room in zip(owners.tolist(), candidates[first].tolist(), budget, strict=True):
                size, record = slabs.row_bytes * int(high[block] - low[block]), self.devices[device]
                with_it = record.kept_bytes + size
                if with_it <= room and with_it + record.in_flight_bytes <= record.memory_bytes:
                    record.kept_bytes = with_it
                    slabs.low[device], slabs.high[device] = low[block], high[block]
            new[:, side] &= ~held | ~whole
            kept += (slabs.hold(devices, low, high) & whole) << side
        return new, kept

    def _has_credit(self, record: Device, size_bytes: int) -> bool:
        return (
            len(record.in_flight) < record.credit_blocks
            and record.in_flight_bytes + record.kept_bytes + size_bytes <= record.memory_bytes
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
        if job.kept[block]:
            return False  # its owner has, or will have, the slab
        _, batches, _, rows, _, columns = job.tiles[block].tolist()
        profile, inner = self.profiles[thief : thief + 1], job.shape.inner
        chunk = int(chunk_length(batches, rows, inner, columns, usable_bytes(profile))[0])
        if not chunk:
            return False  # it cannot hold it
        alone_s = float(block_seconds(profile, batches, rows, inner, columns, None, -(-inner // chunk))[0])
        if alone_s >= owner.backlog_s:
            return False
        job.chunk[block] = chunk
        job.size_bytes[block] = int(block_bytes(batches, rows, inner, columns, chunk))
        job.down_bytes[block] = operand_bytes(batches, rows, inner, columns)
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
            if held + record.kept_bytes > record.memory_bytes:
                raise InvariantBroken(f"device {index} holds more than its {record.memory_bytes} bytes: {record}")
            kept = (
                [s.row_bytes * int(s.high[index] - s.low[index]) for s in self._slabs.values()] if record.alive else []
            )
            if sum(kept) != record.kept_bytes:
                raise InvariantBroken(f"device {index} keeps {sum(kept)} bytes of slabs: {record}")
            if len(record.urgent) + len(record.background) != self._waiting[index]:
                raise InvariantBroken(f"device {index}: {self._waiting[index]} waiting counted, {record}")
            if not record.alive and not record.idle:
                raise InvariantBroken(f"device {index} left and still has work: {record}")
        for job_id, job in self.jobs.items():
            cover = np.zeros((job.shape.batch, job.shape.rows, job.shape.columns), np.int8)
            orphans = [tile[0] for owner, tile, _ in self._orphans if owner == job_id]
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
        repairs = Counter(loss for _, _, loss in self._orphans if loss)
        for job in self.jobs.values():
            repairs.update(
                x for x, state in zip(job.loss, job.state, strict=True) if x and state in (PENDING, IN_FLIGHT)
            )
        if repairs != self._losses:
            raise InvariantBroken(f"losses that are being repaired: counted {self._losses}, found {dict(repairs)}")
