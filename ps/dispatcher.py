"""Who computes which block, and when: a pure state machine. Events in, instructions out.

No sockets, no threads, no clock, no randomness. The server (ps/server.py) turns messages into events and carries out
the instructions in their order.

Always true, and checked by `check()` after every event in tests:
- the blocks of a job that are not cut up tile its output exactly, so every cell is written exactly once;
- a block waits in one queue, or is in flight on one device (on two, if it is overdue), or is done, or was cut up;
- a late or duplicate answer changes nothing;
- no device holds more blocks or bytes than its credit: blocks in flight and kept slabs fit its memory together;
- a job ends as long as one able device lives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent.profile import PROFILE
from ps.cost import BYTES, block_bytes, block_seconds, chunk_length, least_bytes, operand_bytes, usable_bytes
from ps.deadlines import Deadlines
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
    TimePassed,
)
from ps.grid import grid_plan
from ps.invariants import check
from ps.ledger import CUT, DONE, IN_FLIGHT, PENDING, Device, Job, Turn, whole
from ps.planner import Integers, PlanError, Planner, Shape
from ps.slabs import KeptSlabs

REFUSALS_ALLOWED = 3  # a device that fails more blocks than this gets no more work
RECUT_OVER = 64  # a lost rectangle is cut over at most so many of the least busy survivors
THEFTS_A_TURN = 32
COPIES_A_TURN = 32  # overdue blocks that are given to somebody else too
SUSPECTED_S = (
    5.0  # whoever is overdue gets nothing new for so long; if it is dead, its connection tells within that time
)
MOST_SUSPECTS = 0.25  # of the fleet: if more are late, it is not them
CORRECTED_EVERY_S = 2.0  # what was learnt about devices changes plans at most so often
OVERTAKEN_IN_A_ROW = 3  # times, and a device is taken for slower than it said; less may be an accident
MOST_SLOWER = 1000.0
NOBODY = "no device is there"


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
        self.deadlines = Deadlines()
        self.copies = 0  # overdue blocks that were given to somebody else too
        self._copies: dict[tuple[int, int], int] = {}  # block -> the second device that has it
        self._suspects: dict[int, float] = {}  # overdue devices -> until when they get nothing new
        self._now_s = 0.0
        self._slower: dict[int, float] = {}  # learnt, and not in the profiles yet
        self._corrected_s = 0.0
        self._revision = 0  # of the profiles
        self._waiting = np.empty(0, np.int64)  # length of each device's queues
        self._waiting_total = 0
        self._able = np.empty(0, np.int64)  # ids that take work; a new array whenever they change
        self._slabs = KeptSlabs()
        self._orphans: list[tuple[int, Integers, int]] = []  # rectangles that no device could take yet; their loss

    def handle(self, event: Event, now_s: float = 0.0) -> list[Instruction]:
        """The only way in which anything changes."""
        turn = Turn()
        self._now_s = now_s
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
            case TimePassed():
                self._help_the_late(turn)
        if self._waiting_total:
            self._feed(turn)
        if turn.cancel.devices:
            turn.out.append(turn.cancel)
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
            self._correct_profiles()
            requests = [self.jobs[job].request for job in jobs]
            plans = self._planner.plan(requests, self.profiles, self._able, self._revision)
        except PlanError as error:
            if self._suspects:  # better late than never
                self._trust(list(self._suspects))
                self._plan_together(jobs, turn)
                return
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
        accepted, finished, repaired, ratios = [], [], [], []
        for position, (device, job_id, block) in enumerate(zip(event.devices, event.jobs, event.blocks, strict=True)):
            job = self._land(device, job_id, block)
            if job is None:
                self.stale += 1
                continue
            job.state[block] = DONE
            job.open -= 1
            if (job_id, block) in self._copies:
                self._overtaken(device, job, job_id, block, turn)
            else:
                ratios.append((self._now_s - job.sent_s[block]) / job.expected_s[block])
                if self.devices[device].overtaken:
                    self.devices[device].overtaken.clear()
            if device in self._suspects:
                self._trust([device])  # it lives
            accepted.append(position)
            turn.freed[device] = None
            if job.loss[block]:
                repaired.append(job.loss[block])
            if not job.open and not any(orphan[0] == job_id for orphan in self._orphans):
                finished.append(job_id)
        self.deadlines.returned(ratios)
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
            if self._other_holder(device, job_id, block) is None:
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
        for credit_blocks, memory_bytes, latency_s in event.profiles[
            ["credit_blocks", "memory_bytes", "latency_s"]
        ].tolist():
            self.devices.append(Device(credit_blocks, memory_bytes, 2 * latency_s))
        new = np.arange(event.first, len(self.devices))
        self.profiles = np.concatenate([self.profiles, event.profiles])
        self._waiting = np.concatenate([self._waiting, np.zeros(len(new), np.int64)])
        self._able = np.concatenate([self._able, new])
        self._slabs.grow(len(new))
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
            lost += [key for key in sorted(record.in_flight) if self._other_holder(device, *key) is None]
            lost += [*record.urgent, *record.background]
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
            self.devices[device] = Device(record.credit_blocks, record.memory_bytes, record.round_trip_s, alive=False)
            turn.freed.pop(device, None)
        self._able = self._able[~np.isin(self._able, devices)]
        for device in devices:
            self._suspects.pop(device, None)
        if lost:
            self._last_loss += 1
            self._losses[self._last_loss] = 0
            self._cut(lost, turn, loss=self._last_loss)
            turn.out.append(BlocksLost(self._last_loss, devices, len(lost)))
            self._recovered(self._last_loss, turn)

    def _forget(self, operands: list[int]) -> None:
        for operand in operands:
            for job in self.jobs.values():  # what has not been sent yet will not be kept
                for side in (0, 1):
                    if job.operands[side] == operand:
                        job.kept = [bits & ~(1 << side) for bits in job.kept]
            self._slabs.forget(operand, self.devices)

    # ---- stragglers

    def _trust(self, devices: list[int]) -> None:
        for device in devices:
            del self._suspects[device]
        self._able = np.sort(np.concatenate([self._able, np.array(devices, np.int64)]))

    def _help_the_late(self, turn: Turn) -> None:
        """What is overdue is also given to an idle device; the first good answer counts."""
        over = [device for device, until_s in self._suspects.items() if until_s <= self._now_s]
        if over:
            self._trust(over)
        late = self.deadlines.overdue(
            self._now_s,
            lambda device, key: key in self.devices[device].in_flight and key not in self._copies,
            COPIES_A_TURN,
        )
        if not late:
            return
        idle = np.array([d for d in self._able.tolist() if self.devices[d].idle], np.int64)
        for job_id, block in late:
            job = self.jobs[job_id]
            _, batches, _, rows, _, columns = job.tiles[block].tolist()
            inner, profiles = job.shape.inner, self.profiles[idle]
            room = chunk_length(batches, rows, inner, columns, usable_bytes(profiles)) >= job.chunk[block]
            fits = np.array([self._has_credit(self.devices[d], job.size_bytes[block]) for d in idle.tolist()], bool)
            able = np.flatnonzero(room & fits)
            if not len(able):
                continue
            chunks = -(-inner // job.chunk[block])
            seconds = block_seconds(profiles[able], batches, rows, inner, columns, None, chunks)
            best = int(able[np.argmin(seconds)])
            device = int(idle[best])
            idle = np.delete(idle, best)
            self._copies[job_id, block] = device
            self.copies += 1
            late_one = job.device[block]
            if late_one not in self._suspects and len(self._suspects) < MOST_SUSPECTS * len(self._able):
                self._suspects[late_one] = self._now_s + SUSPECTED_S
                self._able = self._able[self._able != late_one]
            job.down_bytes[block] = operand_bytes(batches, rows, inner, columns)
            job.kept[block] = 0
            sent_s, expected_s, owner = job.sent_s[block], job.expected_s[block], job.device[block]
            self.devices[device].backlog_s += job.cost_s[block]
            self._launch(device, self.devices[device], job_id, job, block, turn)
            job.sent_s[block], job.expected_s[block], job.device[block] = sent_s, expected_s, owner

    def _other_holder(self, device: int, job_id: int, block: int) -> int | None:
        """Who else computes this block, now that this device will not; it is the only one from now on."""
        copy = self._copies.pop((job_id, block), None)
        if copy is None:
            return None
        job = self.jobs[job_id]
        other = copy if device == job.device[block] else job.device[block]
        job.device[block] = other
        return other

    def _overtaken(self, device: int, job: Job, job_id: int, block: int, turn: Turn) -> None:
        """One of two who had this block has answered: the other one may stop, and we learn something about it."""
        ratio = (self._now_s - job.sent_s[block]) / job.expected_s[block]
        copy = self._copies[job_id, block]
        loser = self._other_holder(device, job_id, block)
        assert loser is not None
        job.device[block] = device
        self._land(loser, job_id, block)
        turn.freed[loser] = None
        turn.cancel.devices.append(loser)
        turn.cancel.jobs.append(job_id)
        turn.cancel.blocks.append(block)
        if loser == copy:
            self.deadlines.returned([ratio])
            self.devices[device].overtaken.clear()
            return
        record = self.devices[loser]
        record.overtaken.append(ratio)  # at least so much longer than its profile says
        if len(record.overtaken) == OVERTAKEN_IN_A_ROW:
            self._slower[loser] = min(record.overtaken)
            record.overtaken.clear()

    def _correct_profiles(self) -> None:
        if not self._slower or self._now_s < self._corrected_s + CORRECTED_EVERY_S:
            return
        self.profiles = self.profiles.copy()
        for device, factor in self._slower.items():
            record = self.devices[device]
            factor = min(factor, MOST_SLOWER / record.slower)
            record.slower *= factor
            for rate in ("flops", "down_bps", "up_bps"):
                self.profiles[rate][device] = max(1.0, self.profiles[rate][device] / factor)
        self._slower.clear()
        self._corrected_s = self._now_s
        self._revision += 1

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
        if not len(candidates) and self._suspects:  # better late than never
            self._trust(list(self._suspects))
            self._place(job_id, tile, turn, avoid, loss)
            return
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
        new, kept = self._slabs.account(job, tiles, devices, fresh, chunk == inner, self.devices)
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
        job.sent_s += [0.0] * len(tiles)
        job.expected_s += [0.0] * len(tiles)
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

    def _has_credit(self, record: Device, size_bytes: int) -> bool:
        return (
            len(record.in_flight) < record.credit_blocks
            and record.in_flight_bytes + record.kept_bytes + size_bytes <= record.memory_bytes
        )

    def _launch(self, device: int, record: Device, job_id: int, job: Job, block: int, turn: Turn) -> None:
        job.state[block] = IN_FLIGHT
        record.in_flight.add((job_id, block))
        record.in_flight_bytes += job.size_bytes[block]
        record.free_s = max(record.free_s, self._now_s) + job.cost_s[block]
        job.sent_s[block] = self._now_s
        job.expected_s[block] = record.free_s - self._now_s + record.round_trip_s + 1e-9  # never nothing
        self.deadlines.sent((job_id, block), device, self._now_s, job.expected_s[block])
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

    def check(self) -> None:
        """Raise InvariantBroken if the state contradicts the promises at the top of this file. Slow: for tests."""
        check(self)
