"""Who computes which block, and when: a pure state machine. Events in, instructions out.

No sockets, no threads, no clock, no randomness. The server (ps/server.py) turns messages into events and carries out
the instructions in their order. Queues, credit and cutting are in ps/assignments.py; here is what is done when.

Always true, and checked by `check()` after every event in tests:
- the blocks of a job that are not cut up tile its output exactly, so every cell is written exactly once;
- a block waits in one queue, or is in flight on one device, or is done, or was cut up; an overdue one may also be
  under way elsewhere, in pieces, until the first good answer decides which of the two counts;
- a late or duplicate answer changes nothing;
- no device holds more blocks or bytes than its credit: blocks in flight and kept slabs fit its memory together;
- a job ends as long as one able device lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from agent.profile import PROFILE
from ps.assignments import NOBODY, Assignments
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
from ps.invariants import check
from ps.ledger import CUT, DONE, Device, Job, Turn, whole
from ps.planner import Level, Plan, PlanError, Planner, Question
from ps.rescues import Rescues
from ps.slowness import Slowness

REFUSALS_ALLOWED = 3  # a device that fails more blocks than this gets no more work
LATE_A_TURN = 32  # overdue blocks that are given to others too
FEW = 4  # devices: if more are late at once, perhaps something between them and us is, and they get a moment more
GRACE_S = 0.05  # about as long as a busy host's hitches; chosen by trial, as FEW was
GRACE_AGAIN_S = 1.0  # but not all the time
RESCUED_OVER = 16  # devices, at most, that an overdue block is cut over
SUSPECTED_S = 5.0  # whoever is overdue gets nothing new for so long; if it is dead, its connection tells within that
MOST_SUSPECTS = 0.25  # of the fleet: if more are late, it is not them
CORRECTED_EVERY_S = 1.0  # what was learnt about devices changes plans at most so often


class Dispatcher(Assignments):
    def __init__(self, planner: Planner, verify: bool = False) -> None:
        """`verify`: a job is finished when somebody has said that its blocks are right (CheckJob, JobChecked)."""
        super().__init__()
        self.stale = 0  # answers that changed nothing
        self.rescues = Rescues()
        self._planner, self._verify = planner, verify
        self._last_loss = 0
        self._slowness = Slowness()
        self._told = np.empty(0, PROFILE)  # what devices said of themselves when they joined
        self._corrected_s = 0.0
        self._graced_s = -float("inf")  # when so many were late at once that they got a moment more
        self._revised: dict[int, int] = {}  # devices whose profile was corrected -> when, counted
        self._revision = 0

    def prepare(self, event: JobsSubmitted, now_s: float = 0.0) -> JobsSubmitted:
        """The same with its plans made, where there can be any. That takes a while; whoever has a clock does it first,
        and then tells `handle` at what time the blocks go out, or they would all look late."""
        self._now_s = now_s
        jobs = sorted(event.jobs, key=lambda new: not new.urgent)
        open_ = [new for new in jobs if new.plan is None]
        if not open_ or not len(self._able):
            return event
        self._correct_profiles()
        question = _question(open_, event.ahead)
        try:
            plans = iter(self._plans(question))
        except PlanError:
            return event
        planned = [new if new.plan is not None else replace(new, plan=next(plans)) for new in jobs]
        return replace(event, jobs=planned)

    def plan_ahead(self, now_s: float) -> None:
        """Have plans ready for what will probably be submitted next. Whoever has a clock asks when blocks are out."""
        self._now_s = now_s
        if len(self._able):
            self._correct_profiles()
            self._planner.plan_ahead(self.profiles, self._able, self._revised, self._busy_apart)

    def handle(self, event: Event, now_s: float = 0.0) -> list[Instruction]:
        """The only way in which anything changes."""
        turn = Turn()
        self._now_s = now_s
        match event:
            case BlocksReturned():
                self._returned(event, turn)
            case JobsSubmitted():
                self._submitted(event, turn)
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

    def _submitted(self, event: JobsSubmitted, turn: Turn) -> None:
        self._ahead = event.ahead
        for new in event.jobs:
            if new.job in self.jobs:
                raise ValueError(f"job {new.job} was submitted twice")
            firm = new.plan is not None and new.plan.firm
            self.jobs[new.job] = Job(new.request, new.urgent, new.kept, firm=firm)
            if new.plan is not None:
                if not all(self.devices[device].alive for device in new.plan.device.tolist()):
                    raise ValueError(f"job {new.job}: the plan names a device that is not there")
                self._begin(new.job, new.plan, turn)
        self._plan_together([new for new in event.jobs if new.plan is None], turn)

    def _begin(self, job: int, plan: Plan, turn: Turn) -> None:
        if self._ahead and not self.jobs[job].urgent:
            self._set_apart(job, plan.device)
        self._add(job, plan.tiles, plan.device, plan.fresh, turn)

    def _plan_together(self, submissions: list[Submission], turn: Turn) -> None:
        """Whole products over the whole fleet, those first that somebody waits for."""
        submissions = sorted(submissions, key=lambda new: not new.urgent)
        if not submissions:
            return
        try:
            if not len(self._able):
                raise PlanError(NOBODY)
            self._correct_profiles()
            question = _question(submissions, self._ahead)
            plans = self._plans(question)
        except PlanError as error:
            if self._suspects:  # better late than never
                self._trust(list(self._suspects))
                self._plan_together(submissions, turn)
                return
            if len(submissions) > 1:  # some of them may be possible
                for new in submissions:
                    self._plan_together([new], turn)
                return
            job = submissions[0].job
            self._orphans.append((job, whole(self.jobs[job].shape), 0))
            turn.out.append(JobWaits(job, str(error)))
            return
        for new, plan in zip(submissions, plans, strict=True):
            self._begin(new.job, plan, turn)

    def _plans(self, question: Question) -> list[Plan]:
        """By those who have nothing to do beside the pass; by all, if the others cannot."""
        try:
            return self._planner.plan(question, self.profiles, self._able, self._revised, self._busy_apart)
        except PlanError:
            if not len(self._busy_apart):
                raise
            return self._planner.plan(question, self.profiles, self._able, self._revised)

    def _returned(self, event: BlocksReturned, turn: Turn) -> None:
        accepted, finished, repaired, ratios, expected_s = [], [], [], [], []
        for position, (device, job_id, block) in enumerate(zip(event.devices, event.jobs, event.blocks, strict=True)):
            job = self._land(device, job_id, block, answered=True)
            if job is None:
                self.stale += 1
                continue
            if self.rescues.begun:
                self._decided(job_id, block, turn)
            job.state[block] = DONE
            job.open -= 1
            ratios.append((self._now_s - job.sent_s[block]) / job.expected_s[block])
            expected_s.append(job.expected_s[block])
            if device in self._slowness.factor:
                self._slowness.answered(device, ratios[-1])
            if device in self._suspects:
                self._trust([device])  # it lives
            self.devices[device].worked = True
            accepted.append(position)
            turn.freed[device] = None
            if job.loss[block]:
                repaired.append(job.loss[block])
            if not job.open and not any(orphan[0] == job_id for orphan in self._orphans):
                finished.append(job_id)
        self.deadlines.returned(ratios, expected_s)
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
        self._end_apart(job_id)
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
            if not self._given_up(job_id, block, turn):
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
        if any(self.devices[device].alive or self.devices[device].worked for device in event.again):
            raise ValueError(f"device ids {event.again} are not all free: one is there, or has returned a block")
        devices, again = event.devices, list(event.again)
        for device, (credit_blocks, memory_bytes, latency_s) in zip(
            devices, event.profiles[["credit_blocks", "memory_bytes", "latency_s"]].tolist(), strict=True
        ):
            self.devices[device : device + 1] = [Device(credit_blocks, memory_bytes, 2 * latency_s)]
        new, grown = event.profiles[len(again) :], len(devices) - len(again)
        self.profiles, self._told = np.concatenate([self.profiles, new]), np.concatenate([self._told, new])
        self.profiles[again] = self._told[again] = event.profiles[: len(again)]
        self._waiting = np.concatenate([self._waiting, np.zeros(grown, np.int64)])
        self._able = np.sort(np.concatenate([self._able, np.array(devices, np.int64)]))
        self._slabs.joined(again, grown)
        self._revise(event.again)  # plans may know somebody else by that number
        orphans, self._orphans = self._orphans, []
        for job_id, tile, loss in sorted(orphans, key=lambda orphan: not self.jobs[orphan[0]].urgent):
            if not loss and np.array_equal(tile, whole(self.jobs[job_id].shape)):
                job = self.jobs[job_id]
                self._plan_together([Submission(job_id, job.request, job.urgent, None, job.operands)], turn)
            else:
                self._place(job_id, list(tile), turn, loss=loss)
                if loss:
                    self._losses[loss] -= 1  # as an orphan it was counted too
        turn.freed.update(dict.fromkeys(devices))

    def _left(self, devices: list[int], turn: Turn) -> None:
        lost: list[tuple[int, int]] = []
        for device in devices:
            record = self.devices[device]
            held = [*sorted(record.in_flight), *record.urgent, *record.background]
            lost += [key for key in held if not self._given_up(*key, turn)]
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
            self.devices[device] = record.gone()
            turn.freed.pop(device, None)
        self._able = self._able[~np.isin(self._able, devices)]
        self._gone_apart(devices)
        for device in devices:
            self._suspects.pop(device, None)
            self._overtaken.discard(device)
            self._slowness.forget(device)
            self._revised.pop(device, None)
        lost = [key for key in lost if self.jobs[key[0]].state[key[1]] != CUT]
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

    def _help_the_late(self, turn: Turn) -> None:
        """Whoever is overdue with a block is suspected: all that it was sent is also given to others, in pieces, and
        what still waits for it goes to them altogether."""
        over = [device for device, until_s in self._suspects.items() if until_s <= self._now_s]
        if over:
            self._trust(over)
        late = self.deadlines.overdue(
            self._now_s, lambda device, key: key in self.devices[device].in_flight, LATE_A_TURN
        )
        late = [key for key in late if key not in self.rescues]
        owners = [self.jobs[job_id].device[block] for job_id, block in late]
        if len(set(owners)) > FEW and self._now_s > self._graced_s + GRACE_AGAIN_S:
            self._graced_s = self._now_s
        if self._now_s < self._graced_s + GRACE_S:
            self.deadlines.postpone(late, owners, self._graced_s + GRACE_S)
            return
        suspects: list[int] = []
        for device in dict.fromkeys(owners):
            few = len(self._suspects) + len(suspects) < MOST_SUSPECTS * (len(self._able) - len(suspects))
            if few and device not in self._suspects:
                suspects.append(device)
        if suspects:
            self._suspect(suspects, turn)
        for device in dict.fromkeys(owners):
            if device in self._suspects:
                late += self.devices[device].in_flight
        jobs: dict[int, list[int]] = {}
        for job_id, block in sorted(dict.fromkeys(late), key=lambda key: not self.jobs[key[0]].urgent):
            if (job_id, block) not in self.rescues:
                jobs.setdefault(job_id, []).append(block)
        for job_id, blocks in jobs.items():
            self._rescue(job_id, blocks, turn)

    def _suspect(self, devices: list[int], turn: Turn) -> None:
        """They get nothing new for a while, and what still waits for them goes to others."""
        self._suspects |= dict.fromkeys(devices, self._now_s + SUSPECTED_S)
        self._able = self._able[~np.isin(self._able, devices)]
        waiting: list[tuple[int, int]] = []
        for device in devices:
            record = self.devices[device]
            waiting += [*record.urgent, *record.background]
            record.urgent.clear()
            record.background.clear()
            record.waiting.clear()
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
        for job_id, block in waiting:
            self._given_up(job_id, block, turn)
        self._cut(waiting, turn)

    def _rescue(self, job_id: int, late: list[int], turn: Turn) -> None:
        """Cut overdue blocks over those who would end soonest with them. They go on, too: the first answer decides."""
        job = self.jobs[job_id]
        for block in late:
            if (earlier := self.rescues.block_of((job_id, block))) is not None:
                self._pieces_win(job_id, earlier, turn)  # the piece is overdue as well: enough of that one
        devices = [job.device[block] for block in late]
        made = self._recut(job, [job.tiles[block] for block in late], RESCUED_OVER, avoid=devices)
        if made is None and len(set(devices)) > 1:  # all are late: then by each other
            for block in late:
                self._rescue(job_id, [block], turn)
            return
        expected_s = [job.expected_s[block] for block in late]
        if made is None:  # nobody else: ask again
            self.deadlines.sent([(job_id, block) for block in late], devices, self._now_s, expected_s)
            return
        tiles, owners, fresh, of = made
        first = len(job.state)
        patience_s = [expected_s[index] for index in of]
        self._add(job_id, tiles, owners, fresh, turn, patience_s=patience_s, first=True)
        job.open -= len(of)  # the late ones still count
        begins = first + np.searchsorted(of, np.arange(len(late) + 1))
        for block, begin, end in zip(late, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            self.rescues.begin((job_id, block), list(range(begin, end)))

    def _decided(self, job_id: int, block: int, turn: Turn) -> None:
        """This block was answered: if it was overdue, its pieces end; if it is a piece, the overdue one does."""
        if (job_id, block) in self.rescues:
            for piece in self.rescues.decide((job_id, block)):
                self._end(job_id, piece, turn)
        elif (late := self.rescues.block_of((job_id, block))) is not None:
            job, device = self.jobs[job_id], self.jobs[job_id].device[late]
            if device in self._suspects and device not in self._overtaken:
                self._overtaken.add(device)  # once for all that it was sent
                self._slowness.overtaken(device, (self._now_s - job.sent_s[late]) / job.expected_s[late])
            self._pieces_win(job_id, late, turn)

    def _given_up(self, job_id: int, block: int, turn: Turn) -> bool:
        """Whoever has this block will not answer it. True if others are at it already, in pieces."""
        late = self.rescues.block_of((job_id, block))
        if late is not None:
            self._pieces_win(job_id, late, turn)  # this piece is to be found another place
        if (job_id, block) not in self.rescues:
            return False
        self._pieces_count(job_id, block)
        self.jobs[job_id].state[block] = CUT
        return True

    def _pieces_win(self, job_id: int, late: int, turn: Turn) -> None:
        self._pieces_count(job_id, late)
        self._end(job_id, late, turn)

    def _pieces_count(self, job_id: int, late: int) -> None:
        """They take the place of the overdue block."""
        job, pieces = self.jobs[job_id], self.rescues.decide((job_id, late))
        job.open += len(pieces) - 1
        if (loss := job.loss[late]) in self._losses:
            self._losses[loss] += len(pieces) - 1
            for piece in pieces:
                job.loss[piece] = loss

    def _correct_profiles(self) -> None:
        if self._now_s < self._corrected_s + CORRECTED_EVERY_S or not (changes := self._slowness.take_changes()):
            return
        self.profiles = self.profiles.copy()
        for device, factor in changes.items():
            for rate in ("flops", "down_bps", "up_bps"):
                self.profiles[rate][device] = max(1.0, self._told[rate][device] / factor)
        self._revise(changes)
        self._corrected_s = self._now_s

    def _revise(self, devices: Iterable[int]) -> None:
        """Something else is known of them now than when plans were made."""
        self._revision += 1
        self._revised |= dict.fromkeys(devices, self._revision)

    def check(self) -> None:
        """Raise InvariantBroken if the state contradicts the promises at the top of this file. Slow: for tests."""
        check(self)


def _question(submissions: list[Submission], ahead: tuple[Level, ...]) -> Question:
    """Of submissions in the order in which they are planned: first those that are urgent."""
    return Question(tuple(new.request for new in submissions), sum(not new.urgent for new in submissions), ahead)
