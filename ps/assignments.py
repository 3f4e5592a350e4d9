"""Who has which block: queues, credit, cutting again. What the dispatcher (ps/dispatcher.py) decides with.

No events and no instructions are known here, only the turn in which something happens. All that is done here keeps the
promises that stand at the top of the dispatcher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent.profile import PROFILE
from ps.cost import BYTES, block_bytes, block_seconds, chunk_length, least_bytes, operand_bytes, usable_bytes
from ps.deadlines import Deadlines
from ps.events import JobWaits
from ps.grid import grid_plan
from ps.ledger import CUT, IN_FLIGHT, PENDING, Device, Job, Turn
from ps.pipeline import rectangles
from ps.planner import Integers, Shape
from ps.slabs import KeptSlabs

REACTION_S = 0.01  # the server looks at the clock so often, and answers wait so long for each other
RECUT_OVER = 64  # a lost rectangle is cut over at most so many of those who would end soonest with it
THEFTS_A_TURN = 32
NOBODY = "no device is there"


class Assignments:
    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.devices: list[Device] = []
        self.profiles = np.empty(0, PROFILE)  # as they have turned out to be
        self.deadlines = Deadlines()
        self._now_s = 0.0
        self._able = np.empty(0, np.int64)  # ids that take work; a new array whenever they change
        self._suspects: dict[int, float] = {}  # overdue devices -> until when they get nothing new
        self._overtaken: set[int] = set()  # suspects to whom others were faster
        self._waiting = np.empty(0, np.int64)  # length of each device's queues
        self._waiting_total = 0
        self._slabs = KeptSlabs()
        self._losses: dict[int, int] = {}  # loss of devices -> blocks that are still to be done again
        self._orphans: list[tuple[int, Integers, int]] = []  # rectangles that no device could take yet; their loss

    def _trust(self, devices: list[int]) -> None:
        for device in devices:
            del self._suspects[device]
            self._overtaken.discard(device)
        self._able = np.sort(np.concatenate([self._able, np.array(devices, np.int64)]))

    def _end(self, job_id: int, block: int, turn: Turn) -> None:
        """Nobody needs this block any more, wherever it is."""
        job = self.jobs[job_id]
        device, key = job.device[block], (job_id, block)
        record = self.devices[device]
        if self._land(device, job_id, block) is not None:
            turn.stop(device, job_id, block)
            turn.freed[device] = None
        elif job.state[block] == PENDING:
            (record.urgent if job.urgent else record.background).remove(key)
            self._waiting[device] -= 1
            self._waiting_total -= 1
            record.backlog_s -= job.cost_s[block]
        job.state[block] = CUT

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
        groups: dict[tuple[int, int], list[int]] = {}  # job, and loss that is repaired
        for job_id, block in sorted(lost, key=lambda key: not self.jobs[key[0]].urgent):
            groups.setdefault((job_id, self.jobs[job_id].loss[block] or loss), []).append(block)
        for (job_id, repaired), blocks in groups.items():
            job = self.jobs[job_id]
            for block in blocks:
                job.state[block] = CUT
            job.open -= len(blocks)
            patience_s = max(job.cost_s[block] for block in blocks)
            # strips of one device are one rectangle again: larger ones have less perimeter to be downloaded
            for tile in rectangles(job.tiles[blocks], np.array([job.device[block] for block in blocks])):
                self._place(job_id, tile[None], turn, avoid, repaired, patience_s)
            for earlier in (job.loss[block] for block in blocks):
                if earlier in self._losses:
                    self._losses[earlier] -= 1

    def _place(
        self, job_id: int, tile: Integers, turn: Turn, avoid: int = -1, loss: int = 0, patience_s: float = 0.0
    ) -> None:
        """Cut one rectangle again, over some of the least busy devices."""
        job = self.jobs[job_id]
        made = self._recut(job, tile, RECUT_OVER, avoid)
        if made is not None:
            self._add(job_id, *made, turn, loss, patience_s)
            return
        if self._suspects:  # better late than never
            self._trust(list(self._suspects))
            self._place(job_id, tile, turn, avoid, loss, patience_s)
            return
        self._orphans.append((job_id, tile, loss))
        if loss:
            self._losses[loss] = self._losses.get(loss, 0) + 1
        turn.out.append(JobWaits(job_id, "none of the devices has the memory" if len(self._able) else NOBODY))

    def _recut(
        self, job: Job, tile: Integers, most: int, avoid: int
    ) -> tuple[Integers, Integers, NDArray[np.bool_]] | None:
        """Tiles, devices and fresh slabs of a rectangle over the least busy devices; None if nobody has the memory."""
        batch, batches, row, rows, column, columns = tile[0].tolist()
        shape = Shape(batches, rows, job.shape.inner, columns)
        candidates = self._able[usable_bytes(self.profiles[self._able]) >= least_bytes(shape.inner)]
        if len(candidates) > 1:
            candidates = candidates[candidates != avoid]
        if not len(candidates):
            return None
        backlog_s = np.array([self._busy_s(self.devices[d]) for d in candidates.tolist()])
        if len(candidates) > most:
            mine = self.profiles[candidates]
            parts = max(1, shape.cells // most)
            side = max(1, round(parts**0.5))
            ends_s = backlog_s + block_seconds(mine, 1, min(side, rows), shape.inner, min(side, columns))
            soonest = np.sort(np.argsort(ends_s, kind="stable")[:most])
            candidates, backlog_s = candidates[soonest], backlog_s[soonest]
        plan = grid_plan(shape, self.profiles[candidates], backlog_s)
        return plan.tiles + np.array([batch, 0, row, 0, column, 0]), candidates[plan.device], plan.fresh

    def _busy_s(self, record: Device) -> float:
        """For how long, by the model, it still has work: what it was sent may be nearly done."""
        if record.urgent or record.background:
            return record.backlog_s
        return min(record.backlog_s, max(0.0, record.free_s - self._now_s))

    def _add(
        self,
        job_id: int,
        tiles: Integers,
        devices: Integers,
        fresh: NDArray[np.bool_],
        turn: Turn,
        loss: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """New blocks of a job, each for its device: sent if there is credit, queued if not. `patience_s`: they are
        overdue no sooner than if this had been expected of them. Small pieces of what was late would be late again at
        the first hitch, and their pieces again."""
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
        job.patience_s += [patience_s] * len(tiles)
        job.sent_s += [0.0] * len(tiles)
        job.expected_s += [0.0] * len(tiles)
        if loss:
            self._losses[loss] = self._losses.get(loss, 0) + len(tiles)
        job.open += len(tiles)
        launched = []
        for block, device, seconds, size in zip(
            range(first, len(job.state)), owners, job.cost_s[first:], job.size_bytes[first:], strict=True
        ):
            record = self.devices[device]
            record.backlog_s += seconds
            if not (record.urgent or record.background) and self._has_credit(record, size):
                record.take((job_id, block), size, seconds, self._now_s)
                job.expected_s[block] = record.free_s - self._now_s + record.round_trip_s + REACTION_S
                launched.append(block)
            else:
                (record.urgent if job.urgent else record.background).append((job_id, block))
                self._waiting[device] += 1
                self._waiting_total += 1

        self._launch(job_id, job, launched, turn)

    def _has_credit(self, record: Device, size_bytes: int) -> bool:
        return (
            len(record.in_flight) < record.credit_blocks
            and record.in_flight_bytes + record.kept_bytes + size_bytes <= record.memory_bytes
        )

    def _launch(self, job_id: int, job: Job, blocks: list[int], turn: Turn) -> None:
        """These blocks go out; their devices have taken them."""
        devices = [job.device[block] for block in blocks]
        for block in blocks:
            job.state[block] = IN_FLIGHT
            job.sent_s[block] = self._now_s
        patience_s = [max(job.expected_s[block], job.patience_s[block]) for block in blocks]
        self.deadlines.sent([(job_id, block) for block in blocks], devices, self._now_s, patience_s)
        turn.send.devices.extend(devices)
        turn.send.jobs.extend([job_id] * len(blocks))
        turn.send.blocks.extend(blocks)

    def _feed(self, turn: Turn) -> None:
        """Fill each freed device from its queues; let the idle ones take work from the longest queue."""
        thefts = 0
        for device in turn.freed:
            if device in self._suspects:
                continue
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
                record.take((job_id, block), job.size_bytes[block], job.cost_s[block], self._now_s)
                job.expected_s[block] = record.free_s - self._now_s + record.round_trip_s + REACTION_S
                self._launch(job_id, job, [block], turn)

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
