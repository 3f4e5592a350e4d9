"""Who has which block: queues, credit, cutting again. What the dispatcher (ps/dispatcher.py) decides with.

No events and no instructions are known here, only the turn in which something happens. All that is done here keeps the
promises that stand at the top of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent.profile import PROFILE
from ps.cost import BYTES, block_bytes, block_queues, chunk_length, least_bytes, operand_bytes, usable_bytes
from ps.deadlines import Deadlines
from ps.events import JobWaits
from ps.ledger import CUT, IN_FLIGHT, NO_QUEUE, PENDING, REACTION_S, Device, Job, Turn
from ps.pipeline import chunks_of, fresh_slabs, rectangles
from ps.planner import Integers, Level
from ps.recut import recut
from ps.slabs import KeptSlabs
from ps.stages import alone_s

RECUT_OVER = 64  # a lost rectangle is cut over at most so many of those who would end soonest with it
THEFTS_A_TURN = 32
NOBODY = "no device is there"
NONE: Integers = np.empty(0, np.int64)


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
        self._ahead: tuple[Level, ...] = ()  # what will be submitted before the pass ends
        self._apart: dict[int, Integers] = {}  # jobs that nobody waits for before that -> their devices
        self._busy_apart = NONE  # all of these, each once
        self._slabs = KeptSlabs()
        self._losses: dict[int, int] = {}  # loss of devices -> blocks that are still to be done again
        self._orphans: list[tuple[int, Integers, int]] = []  # rectangles that no device could take yet; their loss

    def _trust(self, devices: list[int]) -> None:
        for device in devices:
            del self._suspects[device]
            self._overtaken.discard(device)
        self._able = np.sort(np.concatenate([self._able, np.array(devices, np.int64)]))

    def _set_apart(self, job_id: int, devices: Integers) -> None:
        """These devices do this job, beside all others, until it ends."""
        self._apart[job_id] = devices
        self._busy_apart = np.union1d(self._busy_apart, devices)

    def _end_apart(self, job_id: int) -> None:
        if self._apart.pop(job_id, None) is not None:
            self._count_apart()

    def _gone_apart(self, devices: list[int]) -> None:
        """Somebody else may get their numbers."""
        if np.isin(self._busy_apart, devices).any():
            self._apart = {job: team[~np.isin(team, devices)] for job, team in self._apart.items()}
            self._count_apart()

    def _count_apart(self) -> None:
        self._busy_apart = np.unique(np.concatenate(list(self._apart.values()) or [NONE]))

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
            record.waiting.remove(job.passage[block])
        job.state[block] = CUT

    def _land(self, device: int, job_id: int, block: int, answered: bool = False) -> Job | None:
        """Take a block off its device. None if it was not in flight there: a late, duplicate or invented answer."""
        if not 0 <= device < len(self.devices):
            return None
        record, key = self.devices[device], (job_id, block)
        if key not in record.in_flight:
            return None
        job = self.jobs[job_id]
        record.land(key, job.size_bytes[block], job.passage[block], self._now_s if answered else None)
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
            patience_s = max(alone_s(job.passage[block]) for block in blocks)
            # strips of one device are one rectangle again: larger ones have less perimeter to be downloaded
            lost_tiles = rectangles(job.tiles[blocks], np.array([job.device[block] for block in blocks]))
            self._place(job_id, lost_tiles, turn, avoid, repaired, patience_s)
            for earlier in (job.loss[block] for block in blocks):
                if earlier in self._losses:
                    self._losses[earlier] -= 1

    def _place(
        self,
        job_id: int,
        tiles: list[Integers],
        turn: Turn,
        avoid: int = -1,
        loss: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """Cut rectangles again, over devices that can do them soon."""
        job = self.jobs[job_id]
        made = self._recut(job, tiles, RECUT_OVER, [avoid]) or self._recut(job, tiles, RECUT_OVER, [])
        if made is not None:
            pieces, owners, fresh, _ = made
            self._add(job_id, pieces, owners, fresh, turn, loss, [patience_s] * len(owners), first=True)
            return
        if self._suspects:  # better late than never
            self._trust(list(self._suspects))
            self._place(job_id, tiles, turn, avoid, loss, patience_s)
            return
        self._orphans += [(job_id, tile[None], loss) for tile in tiles]
        if loss:
            self._losses[loss] = self._losses.get(loss, 0) + len(tiles)
        turn.out.append(JobWaits(job_id, "none of the devices has the memory" if len(self._able) else NOBODY))

    def _recut(
        self, job: Job, tiles: list[Integers], most: int, avoid: list[int]
    ) -> tuple[Integers, Integers, NDArray[np.bool_], Integers] | None:
        """Tiles, devices and fresh slabs of these rectangles cut again, and which of them each is from; None if nobody
        has the memory."""
        candidates = self._able[usable_bytes(self.profiles[self._able]) >= least_bytes(job.shape.inner)]
        candidates = candidates[~np.isin(candidates, avoid)]
        if self._ahead and not job.urgent:  # the others have other things to do, soon
            apart = candidates[np.isin(candidates, self._busy_apart)]
            candidates = apart if len(apart) else candidates
        if not len(candidates):
            return None
        records = [self.devices[device] for device in candidates.tolist()]
        sent_s = np.array([record.busy_s(self._now_s) for record in records]).T
        all_s = sent_s.copy()
        for index in np.flatnonzero(self._waiting[candidates]).tolist():
            all_s[:, index] = records[index].busy_with_all_s(self._now_s)
        at_it = {device for device, state in zip(job.device, job.state, strict=True) if state in (PENDING, IN_FLIGHT)}
        ends_s = all_s[2, np.isin(candidates, list(at_it))].max(initial=0.0)
        profiles = self.profiles[candidates]
        made, owner, of = recut(tiles, job.shape.inner, profiles, sent_s, all_s, ends_s, most)
        chunks = chunks_of(made, owner, job.shape, profiles)
        return made, candidates[owner], fresh_slabs(made, owner, chunks), of

    def _add(
        self,
        job_id: int,
        tiles: Integers,
        devices: Integers,
        fresh: NDArray[np.bool_],
        turn: Turn,
        loss: int = 0,
        patience_s: list[float] | None = None,
        first: bool = False,
    ) -> None:
        """New blocks of a job, each for its device: sent if there is credit, queued if not. `patience_s`: they are
        overdue no sooner than if this had been expected of them. Small pieces of what was late would be late again at
        the first hitch, and their pieces again. `first`: they overtake what waits, and is as urgent."""
        job, begin = self.jobs[job_id], len(self.jobs[job_id].state)
        job.tiles = np.concatenate([job.tiles, tiles]) if begin else tiles
        profiles, inner = self.profiles[devices], job.shape.inner
        batches, rows, columns = tiles[:, 1], tiles[:, 3], tiles[:, 5]
        chunk = chunk_length(batches, rows, inner, columns, usable_bytes(profiles))
        if not chunk.all():
            raise ValueError(f"job {job_id}: the plan gives a device a block that it cannot hold")
        new, kept = self._slabs.account(job, tiles, devices, fresh, chunk == inner, self.devices)
        down_bytes = BYTES * inner * batches * (rows * new[:, 0] + columns * new[:, 1])
        chunks = -(-inner // chunk)
        queues_s = block_queues(profiles, batches, rows, inner, columns, down_bytes, chunks)
        owners = devices.tolist()
        job.state += [PENDING] * len(tiles)
        job.device += owners
        down_s, compute_s, up_s = (seconds.tolist() for seconds in queues_s)
        job.passage += zip(down_s, compute_s, up_s, chunks.tolist(), strict=True)
        job.size_bytes += block_bytes(batches, rows, inner, columns, chunk).tolist()
        job.down_bytes += down_bytes.tolist()
        job.chunk += chunk.tolist()
        job.kept += kept.tolist()
        job.loss += [loss] * len(tiles)
        job.first += [first] * len(tiles)
        job.patience_s += patience_s or [0.0] * len(tiles)
        job.sent_s += [0.0] * len(tiles)
        job.expected_s += [0.0] * len(tiles)
        if loss:
            self._losses[loss] = self._losses.get(loss, 0) + len(tiles)
        job.open += len(tiles)
        launched: list[int] = []
        for block, device, passage, size in zip(
            range(begin, len(job.state)), owners, job.passage[begin:], job.size_bytes[begin:], strict=True
        ):
            record = self.devices[device]
            queue, before = record.background, record.urgent  # its own, and that which is served first
            if job.urgent:
                queue, before = record.urgent, NO_QUEUE
            free = not before and (first or not (record.urgent or record.background))
            if free and self._has_credit(record, size) and (job.firm or record.wants(passage, self._now_s)):
                self._take(record, job_id, block)
                launched.append(block)
                continue
            record.waiting.add(passage)
            if first:
                queue.insert(self._repairs(queue), (job_id, block))
            else:
                queue.append((job_id, block))
            self._waiting[device] += 1
            self._waiting_total += 1

        self._launch(job_id, job, launched, turn)

    def _repairs(self, queue: Sequence[tuple[int, int]]) -> int:
        """How many blocks at the head of a device's queue are such that overtake others."""
        for number, (job_id, block) in enumerate(queue):
            if not self.jobs[job_id].first[block]:
                return number
        return len(queue)

    def _take(self, record: Device, job_id: int, block: int) -> None:
        """The device takes this block."""
        job = self.jobs[job_id]
        takes_s = record.take((job_id, block), job.size_bytes[block], job.passage[block], self._now_s)
        job.expected_s[block] = takes_s + record.round_trip_s + REACTION_S

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
        if not job.firm:
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
                if not (job.firm or record.wants(job.passage[block], self._now_s)):
                    break  # it will be sent with the next answer: until then what is lost elsewhere may overtake it
                queue.popleft()
                self._waiting[device] -= 1
                self._waiting_total -= 1
                record.waiting.remove(job.passage[block])
                self._take(record, job_id, block)
                self._launch(job_id, job, [block], turn)

    def _steal(self, thief: int) -> bool:
        """Move the last block of the longest queue to an idle device that would return it sooner."""
        waiting = self._waiting
        if self._ahead and self._apart:  # soon there will be something else for the thief
            waiting = waiting.copy()
            waiting[self._busy_apart] = 0
        victim = int(waiting.argmax())
        if not waiting[victim]:
            return False
        owner, taker = self.devices[victim], self.devices[thief]
        queue = owner.urgent or owner.background
        job_id, block = queue[-1]
        job = self.jobs[job_id]
        if job.kept[block] or job.firm:
            return False  # its owner has, or will have, the slab; or nobody else is to do it
        _, batches, _, rows, _, columns = job.tiles[block].tolist()
        profile, inner = self.profiles[thief : thief + 1], job.shape.inner
        chunk = int(chunk_length(batches, rows, inner, columns, usable_bytes(profile))[0])
        if not chunk:
            return False  # it cannot hold it
        down_bytes, chunks = operand_bytes(batches, rows, inner, columns), -(-inner // chunk)
        queues_s = block_queues(profile, batches, rows, inner, columns, down_bytes, chunks)
        down_s, compute_s, up_s = (float(seconds[0]) for seconds in queues_s)
        passage = (down_s, compute_s, up_s, chunks)
        if alone_s(passage) + taker.round_trip_s >= owner.ends_s(self._now_s):
            return False
        job.chunk[block] = chunk
        job.size_bytes[block] = int(block_bytes(batches, rows, inner, columns, chunk))
        job.down_bytes[block] = down_bytes
        queue.pop()
        self._waiting[victim] -= 1
        owner.waiting.remove(job.passage[block])
        job.device[block], job.passage[block] = thief, passage
        taker.waiting.add(passage)
        (taker.urgent if job.urgent else taker.background).append((job_id, block))
        self._waiting[thief] += 1
        return True
