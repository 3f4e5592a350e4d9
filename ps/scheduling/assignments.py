"""Which device has which block: queues, credit and cutting again, for the dispatcher (ps/scheduling/dispatcher.py).

Handles no events: every method works within the current turn and keeps the promises at the top of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings as planning_settings
from ps.planning.cost import (
    BYTES,
    Integers,
    Passage,
    alone_s,
    block_bytes,
    chunk_of,
    least_bytes,
    queue_seconds,
    usable_bytes,
)
from ps.planning.pipeline import fresh_slabs, rectangles
from ps.planning.sharing import shared
from ps.scheduling import settings
from ps.scheduling.beliefs import Beliefs
from ps.scheduling.deadlines import Deadlines
from ps.scheduling.events import JobWaits
from ps.scheduling.slabs import KeptSlabs
from ps.scheduling.standing import Standing
from ps.scheduling.state import CUT, IN_FLIGHT, NO_QUEUE, PENDING, DeferredTeams, Device, Job, Orphan, State, Turn

NO_DEVICE = "no device is there"


class Assignments:
    def __init__(self, state: State, standing: Standing, beliefs: Beliefs, deadlines: Deadlines) -> None:
        self.slabs, self.teams = KeptSlabs(), DeferredTeams()
        self._state, self._standing, self._beliefs, self._deadlines = state, standing, beliefs, deadlines

    def end(self, job_id: int, block: int, turn: Turn) -> None:
        """End this block, wherever it is: its result is not needed."""
        job = self._state.jobs[job_id]
        device = job.device[block]
        if self.land(device, job_id, block) is not None:
            turn.stop(device, job_id, block)
            turn.freed[device] = None
        elif job.state[block] == PENDING:
            self._unqueue(job_id, block)
        job.state[block] = CUT

    def land(self, device: int, job_id: int, block: int, answered: bool = False) -> Job | None:
        """Take a block off its device. None if it was not in flight there: a late, duplicate or invented answer."""
        if not 0 <= device < len(self._state.devices):
            return None
        record, key = self._state.devices[device], (job_id, block)
        if key not in record.in_flight:
            return None
        job = self._state.jobs[job_id]
        record.land(key, job.size_bytes[block], job.passage[block], self._state.now_s if answered else None)
        return job

    def cut(self, lost: list[tuple[int, int]], turn: Turn, avoid: int = -1, loss: int = 0) -> None:
        """Cut these blocks again, over living devices: first those that able devices have the memory for, since others
        make suspects able again, which may be faster and never answer; of these, critical jobs first. `loss`: the loss
        of devices that is the reason, if any; a block that already repairs an earlier loss goes on repairing that
        one."""
        jobs, most = self._state.jobs, usable_bytes(self._beliefs.profiles[self._standing.able]).max(initial=0)
        groups: dict[tuple[int, int], list[int]] = {}  # by job and by the loss that is repaired
        for job_id, block in sorted(
            lost, key=lambda key: (least_bytes(jobs[key[0]].shape.inner) > most, not jobs[key[0]].critical)
        ):
            groups.setdefault((job_id, self._state.jobs[job_id].loss[block] or loss), []).append(block)
        for (job_id, repaired), blocks in groups.items():
            job = self._state.jobs[job_id]
            for block in blocks:
                job.state[block] = CUT
            job.open -= len(blocks)
            patience_s = max(alone_s(job.passage[block]) for block in blocks)
            # blocks of one device become one rectangle again: a larger one has less perimeter to download
            lost_boxes = rectangles(job.boxes[blocks], np.array([job.device[block] for block in blocks]))
            self.place(job_id, lost_boxes, turn, avoid, repaired, patience_s)
            for earlier in (job.loss[block] for block in blocks):
                if earlier in self._state.losses:
                    self._state.losses[earlier] -= 1

    def place(
        self,
        job_id: int,
        boxes: list[Integers],
        turn: Turn,
        avoid: int = -1,
        loss: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """Cut rectangles again, over devices that can do them soon."""
        job = self._state.jobs[job_id]
        most = planning_settings.NOW.shared_over
        made = self.recut(job, boxes, most, [avoid]) or self.recut(job, boxes, most, [])
        if made is not None:
            pieces, owners, fresh, _ = made
            self.add(job_id, pieces, owners, fresh, turn, loss, [patience_s] * len(owners), first=True)
            return
        if self._standing.trust_more():
            self.place(job_id, boxes, turn, avoid, loss, patience_s)
            return
        self._state.orphans += [Orphan(job_id, box[None], loss) for box in boxes]
        if loss:
            self._state.losses[loss] = self._state.losses.get(loss, 0) + len(boxes)
        turn.out.append(
            JobWaits(job_id, "none of the devices has the memory" if len(self._standing.able) else NO_DEVICE)
        )

    def recut(
        self, job: Job, boxes: list[Integers], most: int, avoid: list[int]
    ) -> tuple[Integers, Integers, NDArray[np.bool_], Integers] | None:
        """Blocks, devices and fresh slabs of these rectangles cut again, and which rectangle each block is from; None
        if no device has the memory. `most`: devices per rectangle."""
        able = self._standing.able
        candidates = able[usable_bytes(self._beliefs.profiles[able]) >= least_bytes(job.shape.inner)]
        candidates = candidates[~np.isin(candidates, avoid)]
        if self._state.ahead and not job.critical:  # the others soon have critical products to do
            held = candidates[np.isin(candidates, self.teams.busy)]
            candidates = held if len(held) else candidates
        if not len(candidates):
            return None
        records = [self._state.devices[device] for device in candidates.tolist()]
        sent_s = np.array([record.busy_s(self._state.now_s) for record in records]).T
        all_s = sent_s.copy()
        for index in np.flatnonzero(self._state.waiting[candidates]).tolist():
            all_s[:, index] = records[index].busy_with_all_s(self._state.now_s)
        at_it = {device for device, state in zip(job.device, job.state, strict=True) if state in (PENDING, IN_FLIGHT)}
        ends_s = all_s[2, np.isin(candidates, list(at_it))].max(initial=0.0)
        profiles = self._beliefs.profiles[candidates]
        made, owner, of = shared(boxes, job.shape.inner, profiles, sent_s, all_s, ends_s, most)
        return made, candidates[owner], fresh_slabs(made, owner, job.shape, profiles), of

    def add(
        self,
        job_id: int,
        boxes: Integers,
        devices: Integers,
        fresh: NDArray[np.bool_],
        turn: Turn,
        loss: int = 0,
        patience_s: list[float] | None = None,
        first: bool = False,
    ) -> None:
        """Add blocks to a job, each for its device: sent if there is credit, queued if not. `patience_s`: lower bound
        on the expected time when deadlines are set. Without it, small pieces of a late block would be overdue at the
        first hitch, and so would their own pieces. `first`: they go ahead of queued blocks that are as critical."""
        job, begin = self._state.jobs[job_id], len(self._state.jobs[job_id].state)
        job.boxes = np.concatenate([job.boxes, boxes]) if begin else boxes
        inner, batches, rows, columns = job.shape.inner, boxes[:, 1], boxes[:, 3], boxes[:, 5]
        chunk = chunk_of(boxes, devices, inner, self._beliefs.profiles)
        if not chunk.all():
            raise ValueError(f"job {job_id}: the plan gives a device a block that it cannot hold")
        new, kept = self.slabs.account(job, boxes, devices, fresh, chunk == inner, self._state.devices)
        lines = batches * (rows * new[:, 0] + columns * new[:, 1])
        job.state += [PENDING] * len(boxes)
        job.device += devices.tolist()
        job.passage += self._passages(inner, boxes, devices, lines, chunk)
        job.size_bytes += block_bytes(batches, rows, inner, columns, chunk).tolist()
        job.down_bytes += (BYTES * inner * lines).tolist()
        job.chunk += chunk.tolist()
        job.kept += kept.tolist()
        job.loss += [loss] * len(boxes)
        job.first += [first] * len(boxes)
        job.patience_s += patience_s or [0.0] * len(boxes)
        job.sent_s += [0.0] * len(boxes)
        job.expected_s += [0.0] * len(boxes)
        if loss:
            self._state.losses[loss] = self._state.losses.get(loss, 0) + len(boxes)
        job.open += len(boxes)
        self._send_or_queue(job_id, range(begin, len(job.state)), first, turn)

    def _passages(
        self, inner: int, boxes: Integers, devices: Integers, lines: Integers, chunk: Integers
    ) -> Iterator[Passage]:
        chunks = -(-inner // chunk)
        sides = boxes[:, 1], boxes[:, 3], boxes[:, 5]
        queues_s = queue_seconds(self._beliefs.profiles, devices, inner, *sides, lines, chunks)
        return zip(*(seconds.tolist() for seconds in (*queues_s, chunks)), strict=True)

    def _send_or_queue(self, job_id: int, blocks: range, first: bool, turn: Turn) -> None:
        job, records, now_s = self._state.jobs[job_id], self._state.devices, self._state.now_s
        launched: list[int] = []
        for block in blocks:
            device, passage, size = job.device[block], job.passage[block], job.size_bytes[block]
            record = records[device]
            before = NO_QUEUE if job.critical else record.critical  # the queue that is served before its own
            free = not before and (first or not (record.critical or record.deferred))
            # a device with nothing in flight wants whatever it has credit for; most have one block at a time
            wants = not record.in_flight or job.firm or (free and record.wants(passage, now_s))
            if free and wants and self._has_credit(record, size):
                self._take(record, job_id, block)
                launched.append(block)
                continue
            queue = record.queue(job.critical)
            self._queue(job_id, block, self._repairs(queue) if first else len(queue))
        self._launch(job_id, job, launched, turn)

    def _queue(self, job_id: int, block: int, place: int) -> None:
        job = self._state.jobs[job_id]
        device, record = job.device[block], self._state.devices[job.device[block]]
        record.queue(job.critical).insert(place, (job_id, block))
        record.waiting.add(job.passage[block])
        self._state.waiting[device] += 1

    def _unqueue(self, job_id: int, block: int) -> None:
        job = self._state.jobs[job_id]
        device, record = job.device[block], self._state.devices[job.device[block]]
        record.queue(job.critical).remove((job_id, block))
        record.waiting.remove(job.passage[block])
        self._state.waiting[device] -= 1

    def _repairs(self, queue: Sequence[tuple[int, int]]) -> int:
        """How many blocks at the head of a device's queue jumped it."""
        for number, (job_id, block) in enumerate(queue):
            if not self._state.jobs[job_id].first[block]:
                return number
        return len(queue)

    def _take(self, record: Device, job_id: int, block: int) -> None:
        job = self._state.jobs[job_id]
        takes_s = record.take((job_id, block), job.size_bytes[block], job.passage[block], self._state.now_s)
        job.expected_s[block] = takes_s + record.round_trip_s + settings.NOW.reaction_s

    def _has_credit(self, record: Device, size_bytes: int) -> bool:
        return (
            len(record.in_flight) < record.credit_blocks
            and record.in_flight_bytes + record.kept_bytes + size_bytes <= record.memory_bytes
        )

    def _launch(self, job_id: int, job: Job, blocks: list[int], turn: Turn) -> None:
        """Send these blocks; their devices have taken them already."""
        devices = [job.device[block] for block in blocks]
        for block in blocks:
            job.state[block] = IN_FLIGHT
            job.sent_s[block] = self._state.now_s
        if not job.firm:
            patience_s = [max(job.expected_s[block], job.patience_s[block]) for block in blocks]
            if self._standing.strikes:
                patience_s = [
                    job.patience_s[block] if self._standing.owes_an_answer(device) else seconds
                    for block, device, seconds in zip(blocks, devices, patience_s, strict=True)
                ]
            self._deadlines.sent([(job_id, block) for block in blocks], devices, self._state.now_s, patience_s)
        turn.launch(job_id, job, blocks, devices)

    def feed(self, turn: Turn) -> None:
        """Fill each freed device from its queues; idle devices take work from the longest queue."""
        thefts = failures = 0
        taken: list[tuple[int, int]] = []
        for device in turn.freed:
            if device in self._standing.suspects:
                continue
            record = self._state.devices[device]
            if not (record.critical or record.deferred):
                if record.in_flight or not record.alive or self._standing.owes_an_answer(device):
                    continue
                if settings.NOW.per_turn in (thefts, failures):
                    continue
                if not self._steal(device):
                    failures += 1
                    continue
                thefts += 1
            while queue := record.critical or record.deferred:
                job_id, block = queue[0]
                job = self._state.jobs[job_id]
                if not self._has_credit(record, job.size_bytes[block]):
                    break
                if not (job.firm or record.wants(job.passage[block], self._state.now_s)):
                    break  # it goes out with the next answer; until then lost blocks may overtake it
                self._unqueue(job_id, block)
                self._take(record, job_id, block)
                taken.append((job_id, block))
        for job_id, run in groupby(taken, key=lambda key: key[0]):  # in order: a device gets its blocks in that order
            self._launch(job_id, self._state.jobs[job_id], [block for _, block in run], turn)

    def _steal(self, thief: int) -> bool:
        """Move the last block of the longest queue to an idle device that would return it sooner."""
        waiting = self._state.waiting
        if self._state.ahead:  # the thief soon has something else to do
            waiting = waiting.copy()
            waiting[self.teams.busy] = 0
        victim = int(waiting.argmax())
        if not waiting[victim]:
            return False
        owner, taker = self._state.devices[victim], self._state.devices[thief]
        queue = owner.critical or owner.deferred
        job_id, block = queue[-1]
        job = self._state.jobs[job_id]
        if job.kept[block] or job.firm:
            return False  # its owner has, or will have, the slab; or no other device may do it
        box, thieves, inner = job.boxes[[block]], np.array([thief]), job.shape.inner
        batches, rows, columns = box[:, 1], box[:, 3], box[:, 5]
        chunk = chunk_of(box, thieves, inner, self._beliefs.profiles)
        if not chunk.all():
            return False  # the thief cannot hold it
        lines = batches * (rows + columns)
        (passage,) = self._passages(inner, box, thieves, lines, chunk)
        if alone_s(passage) + taker.round_trip_s >= owner.ends_s(self._state.now_s):
            return False
        self._unqueue(job_id, block)
        job.device[block], job.passage[block], job.chunk[block] = thief, passage, int(chunk[0])
        job.size_bytes[block] = int(block_bytes(batches, rows, inner, columns, chunk)[0])
        job.down_bytes[block] = BYTES * inner * int(lines[0])
        self._queue(job_id, block, len(taker.queue(job.critical)))
        return True
