"""Decides which device computes which block, and when: a pure state machine. Events in, instructions out.

No sockets, no threads, no clock, no randomness. The server (ps/transport/server.py) turns messages into events and
carries out the instructions in order. Queues, credit and cutting are in ps/scheduling/assignments.py, late and new
devices in ps/scheduling/stragglers.py; this file handles the events.

Always true, and checked by `check()` after every event in tests:
- the blocks of a job that are not cut tile its output exactly, so every cell is written exactly once;
- a block waits in one queue, is in flight on one device, is done, or was cut; an overdue block may also have a
  speculative copy, in pieces on other devices, until the first good answer decides which of the two counts;
- a late or duplicate answer changes nothing;
- no device holds more blocks or bytes than its credit: blocks in flight and kept slabs fit its memory together;
- a device takes work, or is a suspect, or has yet to prove that it answers: exactly one of the three;
- a job ends as long as one able device lives and answers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ps.planning.background import Inquiry, ask
from ps.planning.planner import Level, Plan, PlanError, Planner, Question
from ps.planning.trial_blocks import PATIENCE
from ps.scheduling.assignments import NOBODY
from ps.scheduling.events import (
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
from ps.scheduling.invariants import check
from ps.scheduling.slowness import FAR, FAR_S
from ps.scheduling.state import CUT, DONE, Device, Job, Turn, whole
from ps.scheduling.stragglers import Stragglers

REFUSALS_ALLOWED = 3  # a device that fails more blocks than this gets no more work


class Dispatcher(Stragglers):
    def __init__(self, planner: Planner, verify: bool = False) -> None:
        """`verify`: a job is finished only when its blocks were found right (CheckJob, JobChecked)."""
        super().__init__()
        self.stale = 0  # answers that changed nothing
        self._planner, self._verify = planner, verify
        self._last_loss = 0

    def prepare(self, event: JobsSubmitted, now_s: float = 0.0) -> JobsSubmitted:
        """The event with its plans made, where that is possible. Planning takes a while. A caller with a clock plans
        first and then tells `handle` when the blocks go out; otherwise all of them would look late."""
        inquiry = self.inquire(event, now_s)
        return event if inquiry is None else self.with_plans(event, inquiry, inquiry.answer())

    def inquire(self, event: JobsSubmitted, now_s: float) -> Inquiry | None:
        """The question for the planner; None if there is none, or no device to plan for."""
        self._now_s = now_s
        open_ = [new for new in _in_order(event) if new.plan is None]
        if not open_ or not len(self._able):
            return None
        self._correct_profiles()
        question = _question(open_, event.ahead)
        return Inquiry(self._planner, question, self.profiles, self._able, dict(self._revised), self._busy_apart)

    def with_plans(self, event: JobsSubmitted, inquiry: Inquiry, plans: list[Plan]) -> JobsSubmitted:
        """The event with the answer to its inquiry. Without it if a device of these plans has left, or its profile was
        revised since (a correction, or another device with the same id)."""
        asked = max(inquiry.revised.values(), default=0)
        since = [device for device, revision in self._revised.items() if revision > asked]
        if not plans or not all(
            np.isin(plan.device, self._able).all() and not np.isin(plan.device, since).any() for plan in plans
        ):
            return event
        jobs = _in_order(event)
        given = iter(self._with_probes(_question([new for new in jobs if new.plan is None], event.ahead), plans))
        return replace(event, jobs=[new if new.plan is not None else replace(new, plan=next(given)) for new in jobs])

    def inquire_ahead(self, now_s: float) -> Inquiry | None:
        """The question about the products that will probably be submitted next."""
        self._now_s = now_s
        if not len(self._able):
            return None
        self._correct_profiles()
        return Inquiry(self._planner, None, self.profiles, self._able, dict(self._revised), self._busy_apart)

    def plan_ahead(self, now_s: float) -> None:
        """Have plans ready for what will probably be submitted next. A caller with a clock does this while blocks are
        out."""
        if (inquiry := self.inquire_ahead(now_s)) is not None:
            inquiry.answer()

    def handle(self, event: Event, now_s: float = 0.0) -> list[Instruction]:
        """The only way to change the state."""
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
            self.jobs[new.job] = Job(new.request, new.critical, new.kept, firm=firm)
            if new.plan is not None:
                if not all(self.devices[device].alive for device in new.plan.device.tolist()):
                    raise ValueError(f"job {new.job}: the plan names a device that is not there")
                self._begin(new.job, new.plan, turn)
        self._plan_together([new for new in event.jobs if new.plan is None], turn)

    def _begin(self, job: int, plan: Plan, turn: Turn) -> None:
        if self._ahead and not self.jobs[job].critical:
            self._set_apart(job, plan.device)
        patience_s = None
        if self._unproven:  # by then other devices have done the rest of the product
            patient_s = {d: PATIENCE * plan.makespan_s + self.devices[d].round_trip_s for d in self._unproven}
            patience_s = [patient_s.get(device, 0.0) for device in plan.device.tolist()]
        self._add(job, plan.tiles, plan.device, plan.fresh, turn, patience_s=patience_s)

    def _plan_together(self, submissions: list[Submission], turn: Turn) -> None:
        """Plan whole products over the whole fleet, critical ones first."""
        submissions = sorted(submissions, key=lambda new: not new.critical)
        if not submissions:
            return
        try:
            if not len(self._able):
                raise PlanError(NOBODY)
            self._correct_profiles()
            question = _question(submissions, self._ahead)
            plans = self._plans(question)
        except PlanError as error:
            if self._trust_more():
                self._plan_together(submissions, turn)
                return
            if len(submissions) > 1:  # some of them may be possible alone
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
        plans = ask(self._planner, question, self.profiles, self._able, self._revised, self._busy_apart)
        return self._with_probes(question, plans)

    def _with_probes(self, question: Question, plans: list[Plan]) -> list[Plan]:
        return self._probing(question, plans) if self._unproven or self._newcomers.beliefs else plans

    def _returned(self, event: BlocksReturned, turn: Turn) -> None:
        accepted, finished, repaired, ratios, expected_s = [], [], [], [], []
        owners: list[int] = []
        beliefs = self._newcomers.beliefs
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
            owners.append(device)
            if device in self._slowness.factor:
                self._slowness.answered(device, ratios[-1])
            elif ratios[-1] > FAR and device not in beliefs and (ratios[-1] - 1.0) * expected_s[-1] > FAR_S:
                self._slowness.far_behind(device, ratios[-1])
            if beliefs and device in beliefs:
                self._newcomers.answered(device, job_id, ratios[-1] / self.deadlines.usual(expected_s[-1]))
            if device in self._suspects or device in self._unproven:
                self._trust([device])  # it answers
            if self._strikes:
                self._strikes.pop(device, None)
            self.devices[device].worked = self._answered = True
            self._said_alone = False
            accepted.append(position)
            turn.freed[device] = None
            if job.loss[block]:
                repaired.append(job.loss[block])
            if not job.open and not any(orphan[0] == job_id for orphan in self._orphans):
                finished.append(job_id)
        self.deadlines.returned(ratios, expected_s, owners)
        for device, typical in self.deadlines.typical.take_found().items():
            if device not in beliefs:
                self._slowness.typically(device, typical)
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
        self._newcomers.finished(job_id)
        turn.out.append(JobFinished(job_id))

    def _recovered(self, loss: int, turn: Turn) -> None:
        if not self._losses[loss]:
            del self._losses[loss]
            turn.out.append(BlocksRecovered(loss))

    def _checked(self, event: JobChecked, turn: Turn) -> None:
        """A device that returned a wrong block gets no more work, and its wrong blocks are computed again."""
        job = self.jobs[event.job]
        if not event.wrong:
            self._finish(event.job, turn)
            return
        if any(job.state[block] != DONE for block in event.wrong):
            raise ValueError(f"job {event.job}: a block that was not done cannot be wrong")
        liars = sorted({job.device[block] for block in event.wrong})
        job.open += len(event.wrong)  # they are open again
        for block in event.wrong:
            job.loss[block] = 0  # if it repaired a loss, that was counted when it arrived
        alive = [device for device in liars if self.devices[device].alive]
        for device in alive:
            why = event.why.get(device)
            turn.out.append(SuspendDevice(device, f"what it returned was wrong{f': {why}' if why else ''}"))
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
        turn.out += [
            SuspendDevice(device, f"it failed {refusals} blocks", wrong=False) for device, refusals in broken.items()
        ]
        if broken:
            self._left(list(broken), turn)
        for device, job_id, block in sorted(failed, key=lambda lost: not self.jobs[lost[1]].critical):
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
        if event.newcomers:
            self._unproven |= dict.fromkeys(devices)
            self._new.update(devices)
            if len(self._able):
                self._distrust(devices)
        else:
            self._able = np.sort(np.concatenate([self._able, np.array(devices, np.int64)]))
        self._slabs.joined(again, grown)
        self._revise(event.again)  # plans may know another device by that id
        orphans, self._orphans = self._orphans, []
        for job_id, tile, loss in sorted(orphans, key=lambda orphan: not self.jobs[orphan[0]].critical):
            if not loss and np.array_equal(tile, whole(self.jobs[job_id].shape)):
                job = self.jobs[job_id]
                self._plan_together([Submission(job_id, job.request, job.critical, None, job.operands)], turn)
            else:
                self._place(job_id, list(tile), turn, loss=loss)
                if loss:
                    self._losses[loss] -= 1  # it was also counted as an orphan
        turn.freed.update(dict.fromkeys(devices))

    def _left(self, devices: list[int], turn: Turn) -> None:
        lost: list[tuple[int, int]] = []
        for device in devices:
            record = self.devices[device]
            held = [*sorted(record.in_flight), *record.critical, *record.background]
            lost += [key for key in held if not self._given_up(*key, turn)]
            self._waiting_total -= int(self._waiting[device])
            self._waiting[device] = 0
            self.devices[device] = record.gone()
            turn.freed.pop(device, None)
        self._able = self._able[~np.isin(self._able, devices)]
        self._gone_apart(devices)
        for device in devices:
            for table in (self._suspects, self._unproven, self._strikes, self._revised):
                table.pop(device, None)
            for known in (self._overtaken, self._named, self._new):
                known.discard(device)
            for opinion in (self._slowness, self._newcomers, self.deadlines.typical):
                opinion.forget(device)
        lost = [key for key in lost if self.jobs[key[0]].state[key[1]] != CUT]
        if lost:
            self._last_loss += 1
            self._losses[self._last_loss] = 0
            self._cut(lost, turn, loss=self._last_loss)
            turn.out.append(BlocksLost(self._last_loss, devices, len(lost)))
            self._recovered(self._last_loss, turn)

    def _forget(self, operands: list[int]) -> None:
        for operand in operands:
            for job in self.jobs.values():  # slabs that are not sent yet will not be kept
                for side in (0, 1):
                    if job.operands[side] == operand:
                        job.kept = [bits & ~(1 << side) for bits in job.kept]
            self._slabs.forget(operand, self.devices)

    def slowness(self, device: int) -> float:
        """How many times slower than its profile a device has proved to be."""
        return self._slowness.factor.get(device, 1.0)

    def check(self) -> None:
        """Raise InvariantBroken if the state contradicts the promises at the top of this file. Slow: for tests."""
        check(self)


def _in_order(event: JobsSubmitted) -> list[Submission]:
    """In planning order: critical products first."""
    return sorted(event.jobs, key=lambda new: not new.critical)


def _question(submissions: list[Submission], ahead: tuple[Level, ...]) -> Question:
    """Expects submissions in planning order: critical products first."""
    return Question(tuple(new.request for new in submissions), sum(not new.critical for new in submissions), ahead)
