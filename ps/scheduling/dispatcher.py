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

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings as planning_settings
from ps.planning.pipeline import rectangles
from ps.planning.planner import Inquiry, Planner, Question
from ps.planning.plans import Level, Plan, PlanError, whole
from ps.scheduling import settings
from ps.scheduling.assignments import NO_DEVICE, Assignments
from ps.scheduling.beliefs import Beliefs
from ps.scheduling.deadlines import Deadlines
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
from ps.scheduling.invariants import check, left_behind
from ps.scheduling.standing import Standing
from ps.scheduling.state import CUT, DONE, Device, Job, Orphan, State, Turn
from ps.scheduling.stragglers import Stragglers


class Dispatcher:
    def __init__(self, planner: Planner, verify: bool = False, history: Sequence[float] = ()) -> None:
        """`verify`: a job is finished only when its blocks were found right (CheckJob, JobChecked). `history`: times of
        earlier blocks as multiples of the expected time; without it, the cost model alone decides what is overdue until
        enough blocks have returned."""
        self.stale = 0  # answers that changed nothing
        self._planner, self._verify = planner, verify
        self._state, self._beliefs, self._deadlines = State(), Beliefs(), Deadlines()
        self._standing = Standing(self._state, self._beliefs)
        self._assignments = Assignments(self._state, self._standing, self._beliefs, self._deadlines)
        self._stragglers = Stragglers(self._state, self._standing, self._beliefs, self._deadlines, self._assignments)
        self._last_loss = 0
        self._deadlines.returned(history)

    def inquire(self, event: JobsSubmitted, now_s: float) -> Inquiry | None:
        """The question for the planner; None if there is none, or no device to plan for. Planning takes a while: a
        caller with a clock plans first, and tells `handle` when the blocks go out; otherwise all would look late."""
        self._state.now_s = now_s
        open_ = [new for new in _in_order(self._with_held(event)) if new.plan is None]
        return self._inquiry(_question(open_, event.ahead)) if open_ and len(self._standing.able) else None

    def _inquiry(self, question: Question | None) -> Inquiry:
        self._beliefs.correct(self._state.now_s)
        beliefs, busy = self._beliefs, self._assignments.teams.busy
        return Inquiry(self._planner, question, beliefs.profiles, self._standing.able, beliefs.revision, busy)

    def with_plans(self, event: JobsSubmitted, inquiry: Inquiry, plans: list[Plan]) -> JobsSubmitted:
        """The event with the answer to its inquiry. Without it if a device of these plans has left, or its profile was
        revised since (a correction, or another device with the same id)."""
        revised = [d for d, revision in self._beliefs.revised.items() if revision > inquiry.revision]
        valid = np.setdiff1d(self._standing.able, revised)
        if not plans or not all(np.isin(plan.device, valid).all() for plan in plans):
            return event
        assert inquiry.question is not None, "only questions have plans for an answer"
        given = iter(self._stragglers.with_trial_blocks(inquiry.question, plans))
        jobs = [new if new.plan else replace(new, plan=next(given)) for new in _in_order(self._with_held(event))]
        return replace(event, jobs=jobs)

    def inquire_ahead(self, now_s: float) -> Inquiry | None:
        """The question about the products that will probably be submitted next."""
        self._state.now_s = now_s
        return self._inquiry(None) if len(self._standing.able) else None

    def handle(self, event: Event, now_s: float = 0.0) -> list[Instruction]:
        """The only way to change the state."""
        turn = Turn()
        self._state.now_s = now_s
        match event:
            case BlocksReturned():
                self._returned(event, turn)
            case JobsSubmitted():
                self._submitted(event, turn)
            case DevicesJoined():
                self._joined(event, turn)
            case DevicesLeft(devices=devices):
                self._left([d for d in devices if self._state.devices[d].alive], turn)
            case BlocksFailed():
                self._failed(event, turn)
            case OperandsForgotten(operands=operands):
                self._forget(operands)
            case JobChecked():
                self._checked(event, turn)
            case TimePassed():
                self._stragglers.help_the_late(turn)
        if self._state.waiting.any():
            self._assignments.feed(turn)
        if turn.cancel.devices:
            turn.out.append(turn.cancel)
        if turn.send.devices:
            turn.out.append(turn.send)
        return turn.out

    # ---- events

    def _submitted(self, event: JobsSubmitted, turn: Turn) -> None:
        self._state.ahead, self._state.more = event.ahead, event.more
        event, held = self._with_held(event), self._state.held
        if not event.ahead:
            begun = {new.job for new in event.jobs}
            self._state.held = [job for job in held if job not in begun]
        for new in event.jobs:
            if new.job in self._state.jobs and new.job not in held:
                raise ValueError(f"job {new.job} was submitted twice")
            firm = new.plan is not None and new.plan.firm
            self._state.jobs[new.job] = Job(new.request, new.critical, new.kept, firm=firm)
            if new.plan is not None:
                self._begin(new.job, new.plan, turn)
        self._plan_together([new for new in event.jobs if new.plan is None], turn)

    def _with_held(self, event: JobsSubmitted) -> JobsSubmitted:
        """The event, with the deferred products that were held until the last level of the pass if this is the last."""
        known = {new.job for new in event.jobs}
        held = [] if event.ahead or event.more else [job for job in self._state.held if job not in known]
        jobs = self._state.jobs
        again = [Submission(job, jobs[job].request, jobs[job].critical, None, jobs[job].operands) for job in held]
        return replace(event, jobs=[*event.jobs, *again]) if again else event

    def _begin(self, job: int, plan: Plan, turn: Turn) -> None:
        if plan.waits:
            self._state.held.append(job)
            return
        if self._state.ahead and not self._state.jobs[job].critical:
            self._assignments.teams.hold(job, plan.device)
        patient_s = planning_settings.NOW.trial_patience * plan.makespan_s  # by then others have done the rest
        unproven_s = {d: patient_s + self._state.devices[d].round_trip_s for d in self._standing.unproven}
        # a plan that was given may name devices that have left since it was made: others take their blocks
        there = np.array([self._state.devices[device].alive for device in plan.device.tolist()])
        boxes, devices = plan.boxes[there], plan.device[there]
        if len(boxes):
            patience_s = [unproven_s.get(device, 0.0) for device in devices.tolist()]
            self._assignments.add(job, boxes, devices, plan.fresh[there], turn, patience_s=patience_s)
        if len(boxes) < len(plan.boxes):
            self._assignments.place(job, rectangles(plan.boxes[~there], plan.device[~there]), turn)
        if self._standing.suspects and not plan.firm:  # a plan that was given may name them
            named = [device for device in np.unique(plan.device).tolist() if device in self._standing.suspects]
            self._stragglers.move_queued(named, turn)

    def _plan_together(self, submissions: list[Submission], turn: Turn) -> None:
        """Plan whole products over the whole fleet, critical ones first."""
        submissions = sorted(submissions, key=lambda new: not new.critical)
        if not submissions:
            return
        try:
            if not len(self._standing.able):
                raise PlanError(NO_DEVICE)
            question = _question(submissions, self._state.ahead)
            plans = self._stragglers.with_trial_blocks(question, self._inquiry(question).plans())
        except PlanError as error:
            if self._standing.trust_more():
                self._plan_together(submissions, turn)
                return
            if len(submissions) > 1:  # some of them may be possible alone
                for new in submissions:
                    self._plan_together([new], turn)
                return
            job = submissions[0].job
            self._state.orphans.append(Orphan(job, whole(self._state.jobs[job].shape), 0))
            turn.out.append(JobWaits(job, str(error)))
            return
        for new, plan in zip(submissions, plans, strict=True):
            self._begin(new.job, plan, turn)

    def _returned(self, event: BlocksReturned, turn: Turn) -> None:
        accepted, finished, repaired = [], [], []
        answers: list[tuple[float, float, float, int]] = []
        now_s, stragglers, land = self._state.now_s, self._stragglers, self._assignments.land
        unheard_s = min(event.unheard_s, settings.NOW.hitch_s)
        for position, (device, job_id, block) in enumerate(zip(event.devices, event.jobs, event.blocks, strict=True)):
            job = land(device, job_id, block, answered=True)
            if job is None:
                self.stale += 1
                continue
            if stragglers.copies.begun:
                stragglers.decided(job_id, block, turn)
            job.state[block] = DONE
            job.open -= 1
            expects_s, took_s = job.expected_s[block], now_s - job.sent_s[block]
            # of the moments at which it may have arrived, the one that speaks best for the device
            certain = max(min(took_s, expects_s), took_s - unheard_s) / expects_s
            answers.append((took_s / expects_s, certain, took_s - expects_s, device))
            stragglers.answered(device, job_id, certain, expects_s)
            accepted.append(position)
            turn.freed[device] = None
            if job.loss[block]:
                repaired.append(job.loss[block])
            if not job.open and not any(orphan.job == job_id for orphan in self._state.orphans):
                finished.append(job_id)
        if accepted:
            stragglers.learn(*zip(*answers, strict=True))
            turn.out.append(AcceptBlocks(accepted))
        for loss in repaired:
            self._state.losses[loss] -= 1
            self._recovered(loss, turn)
        for job_id in finished:
            if self._verify:
                turn.out.append(CheckJob(job_id, self._state.jobs[job_id].work))
            else:
                self._finish(job_id, turn)

    def _finish(self, job_id: int, turn: Turn) -> None:
        job = self._state.jobs.pop(job_id)
        self._assignments.teams.end(job_id)
        self._beliefs.newcomers.finished(job_id)
        turn.out.append(JobFinished(job_id, job.work))

    def _recovered(self, loss: int, turn: Turn) -> None:
        if not self._state.losses[loss]:
            del self._state.losses[loss]
            turn.out.append(BlocksRecovered(loss))

    def _checked(self, event: JobChecked, turn: Turn) -> None:
        """A device that returned a wrong block gets no more work, and its wrong blocks are computed again."""
        job = self._state.jobs[event.job]
        if not event.wrong:
            self._finish(event.job, turn)
            return
        if any(job.state[block] != DONE for block in event.wrong):
            raise ValueError(f"job {event.job}: a block that was not done cannot be wrong")
        liars = sorted({job.device[block] for block in event.wrong})
        job.open += len(event.wrong)  # they are open again
        for block in event.wrong:
            job.loss[block] = 0  # if it repaired a loss, that was counted when it arrived
        alive = [device for device in liars if self._state.devices[device].alive]
        for device in alive:
            why = event.why.get(device)
            turn.out.append(SuspendDevice(device, f"what it returned was wrong{f': {why}' if why else ''}"))
        self._left(alive, turn)
        self._assignments.cut([(event.job, block) for block in event.wrong], turn)

    def _failed(self, event: BlocksFailed, turn: Turn) -> None:
        failed: list[tuple[int, int, int]] = []
        for device, job_id, block in zip(event.devices, event.jobs, event.blocks, strict=True):
            if self._assignments.land(device, job_id, block) is None:
                self.stale += 1
                continue
            self._state.devices[device].refusals += 1
            turn.freed[device] = None
            if not self._stragglers.given_up(job_id, block, turn):
                failed.append((device, job_id, block))
        refusals = {device: self._state.devices[device].refusals for device, _, _ in failed}
        broken = [device for device, count in refusals.items() if count > settings.NOW.refusals]
        turn.out += [SuspendDevice(device, f"it failed {refusals[device]} blocks", wrong=False) for device in broken]
        self._left(broken, turn)
        for device, job_id, block in sorted(failed, key=lambda lost: not self._state.jobs[lost[1]].critical):
            self._assignments.cut([(job_id, block)], turn, avoid=device)

    def _joined(self, event: DevicesJoined, turn: Turn) -> None:
        if event.first != len(self._state.devices):
            raise ValueError(f"device ids must be consecutive: got {event.first}, expected {len(self._state.devices)}")
        if any(self._state.devices[device].alive or self._state.devices[device].worked for device in event.again):
            raise ValueError(f"device ids {event.again} are not all free: one is there, or has returned a block")
        devices, again = event.devices, list(event.again)
        for device, (credit_blocks, memory_bytes, latency_s) in zip(
            devices, event.profiles[["credit_blocks", "memory_bytes", "latency_s"]].tolist(), strict=True
        ):
            self._state.devices[device : device + 1] = [Device(credit_blocks, memory_bytes, 2 * latency_s)]
        grown = len(devices) - len(again)
        self._beliefs.joined(event.profiles, again)
        self._state.waiting = np.concatenate([self._state.waiting, np.zeros(grown, np.int64)])
        self._standing.joined(devices, event.newcomers)
        if event.newcomers:
            self._beliefs.new.update(devices)
            if len(self._standing.able):
                self._beliefs.distrust(devices, self._standing.able, self._state.now_s)
        self._assignments.slabs.joined(again, grown)
        self._beliefs.revise(event.again)  # plans may know another device by that id
        orphans, self._state.orphans = self._state.orphans, []
        for orphan in sorted(orphans, key=lambda orphan: not self._state.jobs[orphan.job].critical):
            job = self._state.jobs[orphan.job]
            if not orphan.loss and np.array_equal(orphan.box, whole(job.shape)):
                self._plan_together([Submission(orphan.job, job.request, job.critical, None, job.operands)], turn)
            else:
                self._assignments.place(orphan.job, list(orphan.box), turn, loss=orphan.loss)
                if orphan.loss:
                    self._state.losses[orphan.loss] -= 1  # it was also counted as an orphan
        turn.freed.update(dict.fromkeys(devices))

    def _left(self, devices: list[int], turn: Turn) -> None:
        lost: list[tuple[int, int]] = []
        for device in devices:
            record = self._state.devices[device]
            held = [*sorted(record.in_flight), *record.critical, *record.deferred]
            lost += [key for key in held if not self._stragglers.given_up(*key, turn)]
            self._state.waiting[device] = 0
            self._state.devices[device] = record.gone()
            turn.freed.pop(device, None)
        for part in (self._standing, self._assignments.teams, self._stragglers, self._beliefs):
            part.left(devices)
        lost = [key for key in lost if self._state.jobs[key[0]].state[key[1]] != CUT]
        if lost:
            self._last_loss += 1
            self._state.losses[self._last_loss] = 0
            self._assignments.cut(lost, turn, loss=self._last_loss)
            turn.out.append(BlocksLost(self._last_loss, devices, len(lost)))
            self._recovered(self._last_loss, turn)

    def _forget(self, operands: list[int]) -> None:
        for operand in operands:
            for job in self._state.jobs.values():  # slabs that are not sent yet will not be kept
                for side in (0, 1):
                    if job.operands[side] == operand:
                        job.kept = [bits & ~(1 << side) for bits in job.kept]
            self._assignments.slabs.forget(operand, self._state.devices)

    # ---- figures for shells and people; none of them changes the state

    @property
    def next_look_s(self) -> float:
        """When a block is overdue or a suspect's pause ends; infinity if nothing of that kind will happen."""
        self._deadlines.drop_answered(self._stragglers.is_open)
        return min(self._deadlines.next_s, min(self._standing.suspects.values(), default=float("inf")))

    @property
    def speculative_copies(self) -> int:
        """How many were begun."""
        return self._stragglers.copies.begun

    @property
    def profiles(self) -> NDArray[np.void]:
        """Of every device that ever joined, by id, as they are believed."""
        return self._beliefs.profiles

    @property
    def living(self) -> int:
        return self._standing.living

    @property
    def gone(self) -> list[int]:
        return [device for device, record in enumerate(self._state.devices) if not record.alive]

    def is_alive(self, device: int) -> bool:
        return self._state.devices[device].alive

    def has_worked(self, device: int) -> bool:
        """A block that it returned was accepted."""
        return self._state.devices[device].worked

    def blocks_in_flight(self, device: int) -> int:
        return len(self._state.devices[device].in_flight)

    def refusals(self, device: int) -> int:
        """How many blocks it failed."""
        return self._state.devices[device].refusals

    def block_count(self, job: int) -> int:
        """Blocks that an unfinished job has been cut into so far; the next one gets this number."""
        return len(self._state.jobs[job].state)

    def slowness(self, device: int) -> float:
        """How many times slower than its profile a device has proved to be."""
        return self._beliefs.slowness.factor.get(device, 1.0)

    def left_behind(self) -> str:
        """What is still held of jobs and kept slabs; empty once all are over and forgotten. For tests."""
        return left_behind(self)

    def check(self) -> None:
        """Raise InvariantBroken if the state contradicts the promises at the top of this file. Slow: for tests."""
        check(self)


def _in_order(event: JobsSubmitted) -> list[Submission]:
    """In planning order: critical products first."""
    return sorted(event.jobs, key=lambda new: not new.critical)


def _question(submissions: list[Submission], ahead: tuple[Level, ...]) -> Question:
    """Expects submissions in planning order: critical products first."""
    return Question(tuple(new.request for new in submissions), sum(not new.critical for new in submissions), ahead)
