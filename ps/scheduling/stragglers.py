"""Late, silent and new devices: which get work, how much of it, and which blocks get a speculative copy.

ps/scheduling/deadlines.py says when a block is overdue. Its device becomes a suspect: it gets nothing new, its queued
blocks go to others, and its blocks in flight get speculative copies, in pieces on other devices
(ps/scheduling/speculation.py). The first good answer decides. A suspect that answers is trusted again. One that does
not takes work again after a pause, which doubles each time. If it has never answered, or not since an earlier
suspicion, it gets only one small block (ps/planning/trial_blocks.py) until it does. So a device that lives and never
answers costs a bounded total, whatever share of the fleet does so.

Which devices take work is in ps/scheduling/standing.py, what they are believed to be able to do in
ps/scheduling/beliefs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ps.planning import settings as planning_settings
from ps.planning.planner import Question
from ps.planning.plans import Plan
from ps.planning.trial_blocks import with_trial_blocks
from ps.scheduling import settings
from ps.scheduling.assignments import Assignments
from ps.scheduling.beliefs import Beliefs
from ps.scheduling.deadlines import Deadlines
from ps.scheduling.events import NameStragglers
from ps.scheduling.speculation import SpeculativeCopies
from ps.scheduling.standing import Standing
from ps.scheduling.state import CUT, Key, State, Turn


class Stragglers:
    def __init__(
        self, state: State, standing: Standing, beliefs: Beliefs, deadlines: Deadlines, assignments: Assignments
    ) -> None:
        self.copies = SpeculativeCopies()
        self._state, self._standing, self._beliefs = state, standing, beliefs
        self._deadlines, self._assignments = deadlines, assignments
        self._answered = False  # any block of any device, ever
        self._said_alone = False  # it was reported that no device answers, and none has since
        self._named: set[int] = set()  # devices that were reported as not answering
        self._missed: set[int] = set()  # devices that had an overdue block since any device answered

    def answered(self, device: int, job_id: int, ratio: float, expected_s: float) -> None:
        """A good answer: it certainly took `ratio` times as long as expected."""
        slowness, growing, now = self._beliefs.slowness, self._beliefs.newcomers.beliefs, settings.NOW
        far = ratio > now.far and device not in growing and (ratio - 1.0) * expected_s > now.far_s
        if device in slowness.factor:  # else a busy host would take work from it, and from no other
            slowness.answered(device, ratio / self._deadlines.typical.ratio)
        elif far:
            slowness.answered(device, ratio)
        if growing:
            self._beliefs.newcomers.answered(device, job_id, ratio / self._deadlines.usual)
        self._standing.answered(device)
        self._state.devices[device].worked = self._answered = True
        self._beliefs.new.discard(device)
        self._said_alone = False
        if self._missed:
            self._missed.clear()

    def learn(
        self,
        ratios: Sequence[float],
        certain: Sequence[float],
        lateness_s: Sequence[float],
        devices: Sequence[int],
    ) -> None:
        """All good answers of a turn: what is normal, and which devices are typically late. `ratios`: of the time until
        they were read, to the expected time; `certain`: the part of them that is not the server's own delay;
        `lateness_s`: the time until they were read, beyond the expected time."""
        self._deadlines.returned(ratios, devices, certain, lateness_s)
        for device, typical in self._deadlines.typical.take_slow().items():
            if not self._beliefs.is_growing(device):
                self._beliefs.slowness.typically(device, typical)

    def left(self, devices: list[int]) -> None:
        self._named.difference_update(devices)
        self._missed.difference_update(devices)
        for device in devices:
            self._deadlines.typical.forget(device)

    def is_open(self, device: int, key: Key) -> bool:
        return key in self._state.devices[device].in_flight

    def help_the_late(self, turn: Turn) -> None:
        """Suspect devices with an overdue block: all that they were sent also gets speculative copies, and what still
        waits for them moves to other devices."""
        turn.freed.update(dict.fromkeys(self._standing.end_pauses()))  # a firm plan's blocks may wait for them
        late = self._deadlines.overdue(self._state.now_s, self.is_open, settings.NOW.per_turn)
        for key in late:
            if key in self.copies:  # its copy began long ago; the pieces may wait for room that it takes
                self._pieces_win(*key, turn)
        late = [key for key in late if key not in self.copies and self._state.in_flight(key)]
        late, early = self._cold(late, turn) if self._deadlines.cold else (late, [])
        owners = [self._state.owner(key) for key in late]
        self._missed.update(owners)
        suspects: list[int] = []
        for device in dict.fromkeys(owners):
            known = self._standing.suspects
            if device not in known and self._suspicious(device, len(known) + len(suspects)):
                suspects.append(device)
        others = len(self._standing.able) - int(np.isin(self._standing.able, suspects).sum())
        self._name(late, suspects, turn, alone=not others)
        if suspects:
            self._standing.suspect(suspects)
            self.move_queued(suspects, turn)
        if late and self._standing.all_owe_an_answer(self._missed):
            self._say_alone(late, turn)
        for device in dict.fromkeys(owners):
            if device in self._standing.suspects:
                late += self._state.devices[device].in_flight
        jobs: dict[int, list[int]] = {}
        for job_id, block in sorted(dict.fromkeys(late), key=lambda key: not self._state.jobs[key[0]].critical):
            if (job_id, block) not in self.copies:
                jobs.setdefault(job_id, []).append(block)
        for job_id, blocks in jobs.items():
            self._copy(job_id, blocks, turn)
        for job_id, block in early:
            if (job_id, block) not in self.copies and self._state.in_flight((job_id, block)):
                self._copy(job_id, [block], turn, worked=True)

    def _cold(self, late: list[Key], turn: Turn) -> tuple[list[Key], list[Key]]:
        """`late` without the blocks that may take longer, given what is known now. While no device has ever answered,
        all may be slow: late blocks are then copied only if some device is idle, and otherwise get twice the time.
        Second, those that are in time, but for which a device is idle that has proved to be far faster than believed:
        they are copied, and nobody is suspected."""
        judged, early = [], []
        now_s, records, able = self._state.now_s, self._state.devices, self._standing.able.tolist()
        fast = [device for device in able if records[device].worked and records[device].idle]
        idle = self._answered or any(records[device].idle for device in (*able, *self._standing.unproven))
        if not idle:
            self._name(late, [self._state.owner(key) for key in late], turn, alone=True)
        for job_id, block in late:
            job = self._state.jobs[job_id]
            expected_s = max(job.expected_s[block], job.patience_s[block])
            due_s = job.sent_s[block] + self._deadlines.allowed_s(expected_s)
            proven_s = self._deadlines.proven_s(expected_s)
            if due_s > now_s + settings.NOW.hitch_s and proven_s < float("inf"):
                if now_s >= job.sent_s[block] + proven_s and fast and fast != [job.device[block]]:
                    early.append((job_id, block))
                    continue
                due_s = min(due_s, max(job.sent_s[block] + proven_s, now_s + settings.NOW.hitch_s))
            if not idle:
                due_s = max(due_s, now_s + (now_s - job.sent_s[block]))
            if due_s > now_s:
                self._deadlines.postpone((job_id, block), job.device[block], due_s)
            else:
                judged.append((job_id, block))
        return judged, early

    def _suspicious(self, device: int, suspects: int) -> bool:
        """Whether a late device becomes a suspect, given the number of suspects. If many are late at once, the cause
        may be the host or the network. But a device that has never answered, while others have, is suspected even then:
        at once up to half of the fleet, and always when it happens again."""
        fleet = self._standing.living
        silent = self._answered and not self._state.devices[device].worked
        if device in self._standing.strikes or (silent and suspects < settings.NOW.most_silent * fleet):
            return True
        if silent:
            self._standing.strikes.setdefault(device, 0)
        return suspects < settings.NOW.minority * (fleet - suspects)

    def _name(self, late: list[Key], suspects: list[int], turn: Turn, alone: bool = False) -> None:
        """Report devices that are alive and do not answer. `alone`: no other device can take their blocks."""
        hang = {  # they have never answered, or not since they were suspected
            device
            for device in set(suspects) - self._named
            if not self._state.devices[device].worked or self._standing.strikes.get(device, 0)
        }
        found = [key for key in late if self._state.owner(key) in hang]
        if found:
            self._named |= hang
            self._said_alone |= alone
            self._report(found, turn, alone)

    def _say_alone(self, late: list[Key], turn: Turn) -> None:
        """Report that no device is left that answers: the wait for one is limited. Reported once, and again if one has
        answered since."""
        if not self._said_alone:
            self._said_alone = True
            self._report(late, turn, alone=True)

    def _report(self, late: list[Key], turn: Turn, alone: bool) -> None:
        first = {self._state.owner(key): key for key in reversed(late)}  # of each device
        waited_s = [self._state.now_s - self._state.jobs[job].sent_s[block] for job, block in first.values()]
        expected_s = [self._state.jobs[job].expected_s[block] for job, block in first.values()]
        turn.out.append(NameStragglers(list(first), waited_s, expected_s, alone))

    def move_queued(self, devices: list[int], turn: Turn) -> None:
        """Give the queued blocks of these suspects to others: until their pause ends, a suspect is not fed."""
        waiting: list[Key] = []
        for device in devices:
            record = self._state.devices[device]
            waiting += [*record.critical, *record.deferred]
            record.critical.clear()
            record.deferred.clear()
            record.waiting.clear()
            self._state.waiting[device] = 0
        for job_id, block in waiting:
            self.given_up(job_id, block, turn)
        self._assignments.cut(waiting, turn)

    def _copy(self, job_id: int, late: list[int], turn: Turn, worked: bool = False) -> None:
        """Start speculative copies of overdue blocks, cut over the devices that would finish them soonest. The
        originals go on: the first answer decides. `worked`: only over devices that have answered before."""
        job = self._state.jobs[job_id]
        for block in late:
            if (earlier := self.copies.block_of((job_id, block))) is not None:
                self._pieces_win(job_id, earlier, turn)  # a piece of its copy is overdue as well: drop the original
        devices = [job.device[block] for block in late]
        most = planning_settings.NOW.most_pieces  # copies over more devices cost more work than they save
        owe = self._missed | self._standing.strikes.keys()
        if not set(self._standing.able.tolist()) - owe - set(devices):  # try those whose pause is over as well
            self._standing.trust(list(self._standing.unproven))
        able, records = self._standing.able.tolist(), self._state.devices
        avoid = devices + [d for d in able if not records[d].worked] if worked else devices
        made = self._assignments.recut(job, [job.boxes[block] for block in late], most, avoid=avoid)
        if made is None and worked:  # they are in time: try again later
            again_s = self._state.now_s + settings.NOW.hitch_s
            for block, device in zip(late, devices, strict=True):
                self._deadlines.postpone((job_id, block), device, again_s)
            return
        if made is None and len(set(devices)) > 1:  # all are late: copy to each other
            of_device: dict[int, list[int]] = {}
            for block, device in zip(late, devices, strict=True):
                of_device.setdefault(device, []).append(block)
            for blocks in of_device.values():
                self._copy(job_id, blocks, turn)
            return
        expected_s = [job.expected_s[block] for block in late]
        others = [device for device in (*self._standing.unproven, *self._standing.suspects) if device not in devices]
        if made is None and others:  # try devices that did not answer in time before: perhaps they do now
            self._standing.trust(others)
            self._copy(job_id, late, turn)
            return
        if made is None:  # no other device: wait for another deadline
            self._say_alone([(job_id, block) for block in late], turn)
            self._deadlines.sent([(job_id, block) for block in late], devices, self._state.now_s, expected_s)
            return
        boxes, owners, fresh, of = made
        first = len(job.state)
        patience_s = [expected_s[index] for index in of]
        self._assignments.add(job_id, boxes, owners, fresh, turn, patience_s=patience_s, first=True)
        job.open -= len(of)  # the originals count instead
        begins = first + np.searchsorted(of, np.arange(len(late) + 1))
        for block, begin, end in zip(late, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            self.copies.begin((job_id, block), list(range(begin, end)))
            again_s = self._state.now_s + max(settings.NOW.hitch_s, 2 * (self._state.now_s - job.sent_s[block]))
            self._deadlines.postpone((job_id, block), job.device[block], again_s)

    def decided(self, job_id: int, block: int, turn: Turn) -> None:
        """This block was answered: if it was overdue, its copy ends; if it is a piece of a copy, the original does."""
        if (job_id, block) in self.copies:
            for piece in self.copies.decide((job_id, block)):
                self._assignments.end(job_id, piece, turn)
        elif (late := self.copies.block_of((job_id, block))) is not None:
            job, device = self._state.jobs[job_id], self._state.jobs[job_id].device[late]
            if device in self._standing.suspects and device not in self._standing.overtaken:
                self._standing.overtaken.add(device)  # once for all blocks that it was sent
                if self._standing.strikes.get(device, 0) > 1:  # it did not answer before either: that is not slowness
                    self._pieces_win(job_id, late, turn)
                    return
                self._beliefs.proved_slow(device, (self._state.now_s - job.sent_s[late]) / job.expected_s[late])
            self._pieces_win(job_id, late, turn)

    def given_up(self, job_id: int, block: int, turn: Turn) -> bool:
        """The device that has this block will not answer it. True if a speculative copy is under way."""
        late = self.copies.block_of((job_id, block))
        if late is not None:
            self._pieces_win(job_id, late, turn)  # this piece needs another place
        if (job_id, block) not in self.copies:
            return False
        self._pieces_count(job_id, block)
        self._state.jobs[job_id].state[block] = CUT
        return True

    def _pieces_win(self, job_id: int, late: int, turn: Turn) -> None:
        self._pieces_count(job_id, late)
        self._assignments.end(job_id, late, turn)

    def _pieces_count(self, job_id: int, late: int) -> None:
        """The pieces of the copy take the place of the overdue block."""
        job, pieces = self._state.jobs[job_id], self.copies.decide((job_id, late))
        job.open += len(pieces) - 1
        if (loss := job.loss[late]) in self._state.losses:
            self._state.losses[loss] += len(pieces) - 1
            for piece in pieces:
                job.loss[piece] = loss

    def with_trial_blocks(self, question: Question, plans: list[Plan]) -> list[Plan]:
        """The same plans, with probes: idle devices that have to prove that they answer, or that may grow, get a small
        block of the first product."""
        growing = self._beliefs.newcomers.beliefs
        if not (self._standing.unproven or growing):
            return plans
        records, strikes = self._state.devices, self._standing.strikes
        busy = {device for plan in plans for device in plan.device.tolist()} | self._standing.suspects.keys()
        idle = [d for d in (*self._standing.unproven, *growing) if records[d].idle and d not in busy]
        # while too little is known, a device that did not answer before would delay the product for long
        idle = list(dict.fromkeys(d for d in idle if not (self._deadlines.cold and d in strikes)))
        if not idle or question.critical == 0:
            return plans
        self._beliefs.distrust(idle, self._standing.able, self._state.now_s)
        sized = self._beliefs.sized_for_probes(idle)
        return [with_trial_blocks(plans[0], question.requests[0].shape, sized, idle), *plans[1:]]
