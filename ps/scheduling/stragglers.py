"""Late, silent and new devices: which get work, how much of it, and which blocks get a speculative copy.

ps/scheduling/deadlines.py says when a block is overdue. Its device becomes a suspect: it gets nothing new, its queued
blocks go to others, and its blocks in flight get speculative copies, in pieces on other devices
(ps/scheduling/speculation.py). The first good answer decides. A suspect that answers is trusted again. One that does
not takes work again after a pause, which doubles each time. If it has never answered, or not since an earlier
suspicion, it gets only one small block (ps/planning/trial_blocks.py) until it does. So a device that lives and never
answers costs a bounded total, whatever share of the fleet does so.

`profiles` says what devices are believed to be able to do: what they claim, or what they have shown if they are new
(ps/scheduling/newcomers.py), divided by how much slower they have proved to be (ps/scheduling/slowness.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE
from ps.planning.planner import Plan, Question
from ps.planning.trial_blocks import with_trial_blocks
from ps.scheduling.assignments import Assignments
from ps.scheduling.events import NameStragglers
from ps.scheduling.newcomers import RATES, Newcomers, rates_of, typical_rates
from ps.scheduling.slowness import Slowness
from ps.scheduling.speculation import Rescues
from ps.scheduling.state import CUT, Job, Turn

LATE_A_TURN = 32  # overdue blocks that get a speculative copy, per turn
FEW = 4  # devices: if more are late at once, the cause may lie between them and the server, and they get GRACE_S
GRACE_S = 0.05  # about as long as a busy host's hitches; chosen by trial, as FEW was
GRACE_AGAIN_S = 1.0  # shortest interval between grace periods
RESCUED_OVER = 16  # devices, at most, that an overdue block is cut over
RESCUED_FOR_S = 1.0  # at least; after this, or twice the time since it was sent, a late block makes room for its copy
SUSPECTED_S = 5.0  # an overdue device gets nothing new for this long; if it is dead, its connection tells within that
LONGEST_PAUSE_S = 3600.0  # the pause doubles each time the device is overdue again without an answer in between
MOST_SUSPECTS = 0.25  # of the fleet: above this share, suspect the server or the network, not the devices
MOST_SILENT = 0.5  # of the fleet: above this share, devices that have never answered are suspected only the second time
CORRECTED_EVERY_S = 1.0  # shortest interval between corrections of profiles, which change plans


class Stragglers(Assignments):
    def __init__(self) -> None:
        super().__init__()
        self.rescues = Rescues()
        self._slowness, self._newcomers = Slowness(), Newcomers()
        self._told: NDArray[np.void] = np.empty(0, PROFILE)  # what devices claimed when they joined
        self._new: set[int] = set()  # devices that joined as newcomers
        self._answered = False  # any block of any device, ever
        self._said_alone = False  # it was reported that no device answers, and none has since
        self._named: set[int] = set()  # devices that were reported as not answering
        self._graced_s = -float("inf")  # start of the latest grace period
        self._corrected_s = 0.0
        self._revised: dict[int, int] = {}  # devices whose profile was corrected -> revision
        self._revision = 0

    def _help_the_late(self, turn: Turn) -> None:
        """Suspect devices with an overdue block: all that they were sent also gets speculative copies, and what still
        waits for them moves to other devices."""
        self._end_pauses()
        late = self.deadlines.overdue(
            self._now_s, lambda device, key: key in self.devices[device].in_flight, LATE_A_TURN
        )
        for key in late:
            if key in self.rescues:  # its copy began long ago; the pieces may wait for room that it takes
                self._pieces_win(*key, turn)
        late = [key for key in late if key not in self.rescues and self._in_flight(key)]
        late = self._graced(self._cold(late, turn) if self.deadlines.cold else late)
        owners = [self.jobs[job_id].device[block] for job_id, block in late]
        suspects: list[int] = []
        for device in dict.fromkeys(owners):
            if device not in self._suspects and self._suspicious(device, len(self._suspects) + len(suspects)):
                suspects.append(device)
        others = len(self._able) - int(np.isin(self._able, suspects).sum())
        self._name(late, suspects, turn, alone=not others)
        if suspects:
            self._suspect(suspects, turn)
        for device in dict.fromkeys(owners):
            if device in self._suspects:
                late += self.devices[device].in_flight
        jobs: dict[int, list[int]] = {}
        for job_id, block in sorted(dict.fromkeys(late), key=lambda key: not self.jobs[key[0]].critical):
            if (job_id, block) not in self.rescues:
                jobs.setdefault(job_id, []).append(block)
        for job_id, blocks in jobs.items():
            self._rescue(job_id, blocks, turn)

    def _in_flight(self, key: tuple[int, int]) -> bool:
        return key in self.devices[self.jobs[key[0]].device[key[1]]].in_flight

    def _end_pauses(self) -> None:
        """Let suspects take work again after their pause. Those that have never answered, or not since an earlier
        suspicion, first have to prove that they do, with a small block."""
        for device in [device for device, until_s in self._suspects.items() if until_s <= self._now_s]:
            if self.devices[device].worked and self._strikes.get(device, 0) < 2:
                self._trust([device])
            else:
                del self._suspects[device]
                self._overtaken.discard(device)
                self._unproven[device] = None

    def _cold(self, late: list[tuple[int, int]], turn: Turn) -> list[tuple[int, int]]:
        """`late` without the blocks that may take longer, given what is known now. While no device has ever answered,
        all may be slow: late blocks are then copied only if some device is idle, and otherwise get twice the time."""
        judged = []
        idle = self._answered or any(self.devices[device].idle for device in (*self._able.tolist(), *self._unproven))
        if not idle:
            self._name(late, [self.jobs[job_id].device[block] for job_id, block in late], turn, alone=True)
        for job_id, block in late:
            job = self.jobs[job_id]
            due_s = job.sent_s[block] + self.deadlines.allowed_s(max(job.expected_s[block], job.patience_s[block]))
            if not idle:
                due_s = max(due_s, self._now_s + (self._now_s - job.sent_s[block]))
            if due_s > self._now_s:
                self.deadlines.postpone([(job_id, block)], [job.device[block]], due_s)
            else:
                judged.append((job_id, block))
        return judged

    def _graced(self, late: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """`late` without the blocks that get a grace period. Devices that have never answered, or not since they were
        last suspected, get none and do not start one."""
        owners = [self.jobs[job_id].device[block] for job_id, block in late]
        sound = [self.devices[device].worked and device not in self._strikes for device in owners]
        if not late:
            return []
        if len({d for d, heard in zip(owners, sound, strict=True) if heard}) > FEW and (
            self._now_s > self._graced_s + GRACE_AGAIN_S
        ):
            self._graced_s = self._now_s
        if self._now_s >= self._graced_s + GRACE_S:
            return late
        waits = [key for key, heard in zip(late, sound, strict=True) if heard]
        of = [device for device, heard in zip(owners, sound, strict=True) if heard]
        self.deadlines.postpone(waits, of, self._graced_s + GRACE_S)
        return [key for key, heard in zip(late, sound, strict=True) if not heard]

    def _suspicious(self, device: int, suspects: int) -> bool:
        """Whether a late device becomes a suspect, given the number of suspects. If many are late at once, the cause
        may be the host or the network. But a device that has never answered, while others have, is suspected even then:
        at once up to MOST_SILENT of the fleet, and always when it happens again."""
        fleet = len(self._able) + len(self._suspects) + len(self._unproven)
        silent = self._answered and not self.devices[device].worked
        if device in self._strikes or (silent and suspects < MOST_SILENT * fleet):
            return True
        if silent:
            self._strikes.setdefault(device, 0)
        return suspects < MOST_SUSPECTS * (fleet - suspects)

    def _name(self, late: list[tuple[int, int]], suspects: list[int], turn: Turn, alone: bool = False) -> None:
        """Report devices that are alive and do not answer. `alone`: no other device can take their blocks."""
        found: dict[int, tuple[float, float]] = {}
        for job_id, block in late:
            job = self.jobs[job_id]
            device = job.device[block]
            hangs = not self.devices[device].worked or self._strikes.get(device, 0)  # silent, or silent since suspected
            if device in suspects and hangs and device not in self._named:
                found.setdefault(device, (self._now_s - job.sent_s[block], job.expected_s[block]))
        if found:
            self._named.update(found)
            self._said_alone |= alone
            waited_s, expected_s = zip(*found.values(), strict=True)
            turn.out.append(NameStragglers(list(found), list(waited_s), list(expected_s), alone))

    def _say_alone(self, job: Job, late: list[int], turn: Turn) -> None:
        """Report that no device is left that answers: the wait for one is limited. Reported once, and again if one has
        answered since."""
        if not self._said_alone:
            self._said_alone = True
            first = {job.device[block]: block for block in reversed(late)}
            waited_s = [self._now_s - job.sent_s[block] for block in first.values()]
            expected_s = [job.expected_s[block] for block in first.values()]
            turn.out.append(NameStragglers(list(first), waited_s, expected_s, alone=True))

    def _suspect(self, devices: list[int], turn: Turn) -> None:
        """Give these devices nothing new for a while, and their queued blocks to others."""
        for device in devices:
            strikes = self._strikes[device] = self._strikes.get(device, 0) + 1
            pause_s = min(LONGEST_PAUSE_S, SUSPECTED_S * 2.0 ** min(strikes - 1, 60))
            self._suspects[device] = self._now_s + pause_s
            self._unproven.pop(device, None)
        self._able = self._able[~np.isin(self._able, devices)]
        waiting: list[tuple[int, int]] = []
        for device in devices:
            record = self.devices[device]
            waiting += [*record.critical, *record.background]
            record.critical.clear()
            record.background.clear()
            record.waiting.clear()
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
        for job_id, block in waiting:
            self._given_up(job_id, block, turn)
        self._cut(waiting, turn)

    def _rescue(self, job_id: int, late: list[int], turn: Turn) -> None:
        """Start speculative copies of overdue blocks, cut over the devices that would finish them soonest. The
        originals go on: the first answer decides."""
        job = self.jobs[job_id]
        for block in late:
            if (earlier := self.rescues.block_of((job_id, block))) is not None:
                self._pieces_win(job_id, earlier, turn)  # a piece of its copy is overdue as well: drop the original
        devices = [job.device[block] for block in late]
        made = self._recut(job, [job.tiles[block] for block in late], RESCUED_OVER, avoid=devices)
        if made is None and len(set(devices)) > 1:  # all are late: copy to each other
            for block in late:
                self._rescue(job_id, [block], turn)
            return
        expected_s = [job.expected_s[block] for block in late]
        others = [device for device in (*self._unproven, *self._suspects) if device not in devices]
        if made is None and others:  # try devices that did not answer in time before: perhaps they do now
            self._trust(others)
            self._rescue(job_id, late, turn)
            return
        if made is None:  # no other device: wait for another deadline
            self._say_alone(job, late, turn)
            self.deadlines.sent([(job_id, block) for block in late], devices, self._now_s, expected_s)
            return
        tiles, owners, fresh, of = made
        first = len(job.state)
        patience_s = [expected_s[index] for index in of]
        self._add(job_id, tiles, owners, fresh, turn, patience_s=patience_s, first=True)
        job.open -= len(of)  # the originals count instead
        begins = first + np.searchsorted(of, np.arange(len(late) + 1))
        for block, begin, end in zip(late, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            self.rescues.begin((job_id, block), list(range(begin, end)))
            again_s = self._now_s + max(RESCUED_FOR_S, 2 * (self._now_s - job.sent_s[block]))
            self.deadlines.postpone([(job_id, block)], [job.device[block]], again_s)

    def _decided(self, job_id: int, block: int, turn: Turn) -> None:
        """This block was answered: if it was overdue, its copy ends; if it is a piece of a copy, the original does."""
        if (job_id, block) in self.rescues:
            for piece in self.rescues.decide((job_id, block)):
                self._end(job_id, piece, turn)
        elif (late := self.rescues.block_of((job_id, block))) is not None:
            job, device = self.jobs[job_id], self.jobs[job_id].device[late]
            if device in self._suspects and device not in self._overtaken:
                self._overtaken.add(device)  # once for all blocks that it was sent
                if self._strikes.get(device, 0) > 1:  # it did not answer before either: that is not slowness
                    self._pieces_win(job_id, late, turn)
                    return
                opinion = self._newcomers.failed if device in self._newcomers.beliefs else self._slowness.overtaken
                opinion(device, (self._now_s - job.sent_s[late]) / job.expected_s[late])
            self._pieces_win(job_id, late, turn)

    def _given_up(self, job_id: int, block: int, turn: Turn) -> bool:
        """The device that has this block will not answer it. True if a speculative copy is under way."""
        late = self.rescues.block_of((job_id, block))
        if late is not None:
            self._pieces_win(job_id, late, turn)  # this piece needs another place
        if (job_id, block) not in self.rescues:
            return False
        self._pieces_count(job_id, block)
        self.jobs[job_id].state[block] = CUT
        return True

    def _pieces_win(self, job_id: int, late: int, turn: Turn) -> None:
        self._pieces_count(job_id, late)
        self._end(job_id, late, turn)

    def _pieces_count(self, job_id: int, late: int) -> None:
        """The pieces of the copy take the place of the overdue block."""
        job, pieces = self.jobs[job_id], self.rescues.decide((job_id, late))
        job.open += len(pieces) - 1
        if (loss := job.loss[late]) in self._losses:
            self._losses[loss] += len(pieces) - 1
            for piece in pieces:
                job.loss[piece] = loss

    # ---- what devices are believed to be able to do

    def _probing(self, question: Question, plans: list[Plan]) -> list[Plan]:
        """The same plans, with probes: idle devices that have to prove that they answer, or that may grow, get a small
        block of the first product."""
        busy = {device for plan in plans for device in plan.device.tolist()} | self._suspects.keys()
        idle = [d for d in (*self._unproven, *self._newcomers.beliefs) if self.devices[d].idle and d not in busy]
        cold = self.deadlines.cold  # then a device that did not answer before would delay the product for long
        idle = list(dict.fromkeys(d for d in idle if not (cold and d in self._strikes)))
        if not idle or question.critical == 0:
            return plans
        self._distrust(idle)
        sized = self.profiles.copy()  # probes are sized for a typical device, or for one that keeps its claim
        for device in idle:
            claim, belief = rates_of(self._told, device), self._newcomers.beliefs.get(device)
            rates = claim if belief is None else replace(belief, times=max(1.0, belief.times)).rates(claim)
            for rate, value in zip(RATES, rates, strict=True):
                sized[rate][device] = value
        return [with_trial_blocks(plans[0], question.requests[0].shape, sized, idle), *plans[1:]]

    def _distrust(self, devices: list[int]) -> None:
        """New devices among these begin small, whatever they claim. How slow the others are is known."""
        known = [device for device in self._able.tolist() if device not in self._newcomers.beliefs]
        typical = typical_rates(self.profiles, known) if known else None
        for device in devices:
            if device in self._new and device not in self._newcomers.beliefs and not self.devices[device].worked:
                self._newcomers.begin(device, typical or typical_rates(self._told, devices))
        self._correct_profiles()

    def _trust_more(self) -> bool:
        """There is no device to compare new ones with: believe each of them as much as a typical one of them claims."""
        new = [d for d in self._unproven if d in self._new and d not in self._newcomers.beliefs]
        if new:
            typical = typical_rates(self._told, new)
            for device in new:
                self._newcomers.begin(device, typical, times=1.0)
        return super()._trust_more()

    def _correct_profiles(self) -> None:
        changes = set(self._newcomers.take_changes(self._told))
        if self._now_s >= self._corrected_s + CORRECTED_EVERY_S:
            self._slowness.forgive(self._now_s)
            if slower := self._slowness.take_changes():
                changes.update(slower)
                self._corrected_s = self._now_s
        if not changes:
            return
        self.profiles = self.profiles.copy()
        for device in sorted(changes):
            claim, factor = rates_of(self._told, device), self._slowness.factor.get(device, 1.0)
            belief = self._newcomers.beliefs.get(device)
            for rate, value in zip(RATES, belief.rates(claim) if belief else claim, strict=True):
                self.profiles[rate][device] = max(1.0, value / factor)
        self._revise(sorted(changes))

    def _revise(self, devices: Iterable[int]) -> None:
        """Plans made before now are based on other profiles of these devices."""
        self._revision += 1
        self._revised |= dict.fromkeys(devices, self._revision)
