"""Products + fleet -> plans: rectangles that tile each output exactly, each with its device.

Products that are ready at the same moment share the fleet. Each gets a team, and all end together. That is better than
one after another, because a larger rectangle has more cells per downloaded value. Deferred products get a team that
finishes them by the end of the pass (ps/planning/deferred.py). Each team packs its product (ps/planning/packing.py)
under the cost model of the running system (ps/planning/pipeline.py).

A plan is kept while the fleet stays the same. When devices are lost, their blocks are shared over the others
(ps/planning/sharing.py); devices that join get nothing yet. Once the uses of such a plan have lost as much, by the
model, as making a new plan costs, a new one is made. When devices prove slower or faster than believed, it is made anew
at once: a plan repaired after every change of belief would break into ever smaller blocks, and a plan made when all
devices seemed slow would never look worth replacing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.cost import Integers, Numbers
from ps.planning.deferred import Team, teams
from ps.planning.pipeline import made_plan, rectangles, together_ends_s
from ps.planning.plans import WAITS, Level, Plan, PlanError, Request
from ps.planning.share_cap import NO_CAP, Cap, capped
from ps.planning.sharing import able_devices, grid_plan, shared
from ps.planning.teams import Relaxation, deal

NONE_BUSY: Integers = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Question:
    """Products that are ready at the same moment, critical ones first. The last `deferred` of them are deferred: not
    needed before the pass ends. `ahead`: the levels left until then."""

    requests: tuple[Request, ...]
    deferred: int = 0
    ahead: tuple[Level, ...] = ()

    @classmethod
    def of(cls, asked: Sequence[Request] | Question) -> Question:
        return asked if isinstance(asked, Question) else cls(tuple(asked))

    @property
    def critical(self) -> int:
        return len(self.requests) - self.deferred

    @property
    def level(self) -> Level:
        return Level(self.requests[: self.critical], self.requests[self.critical :])

    @property
    def defers(self) -> bool:
        """Whether the deferred products are computed beside the critical ones."""
        return bool(self.deferred and self.critical and self.ahead)

    def ends_s(self, plans: list[Plan], profiles: NDArray[np.void]) -> float:
        """When the plans end. With deferred products beside critical ones, the sum of both ends: a second of either
        costs the same."""
        parts = [slice(self.critical), slice(self.critical, None)] if self.defers else [slice(None)]
        return sum(_ends_s(plans[part], self.requests[part], profiles) for part in parts)


@dataclass(slots=True)
class _Cached:
    solved_for: Integers  # able devices when they were made
    able: Integers  # able devices for which the plans, repaired since, are valid
    plans: list[Plan]
    ends_s: float  # by the model, when they were made; see Question.ends_s
    revision: int  # of the profiles
    wastes_s: float = 0.0  # per use, by ending later than new plans would
    wasted_s: float = 0.0  # over all uses
    followed_by: Question | None = None  # the question that came next, the last time

    def worn_out(self, wastes_s: float) -> bool:
        """Whether all uses, with one more, lose as much time as new plans cost."""
        return self.wasted_s + wastes_s > settings.NOW.solving_s * len(self.plans)


class Planner:
    """Remembers its plans; its answers depend only on its questions."""

    def __init__(self, kind: Literal["packed", "grid"] = "packed", cap: Cap = NO_CAP) -> None:
        """`cap`: the largest part of a product that a device gets, see ps/planning/share_cap.py."""
        if kind not in ("packed", "grid"):
            raise ValueError(f'the kind of planner is {kind!r}; it must be "packed" or "grid"')
        self.kind, self.cap = kind, cap
        self._cache: OrderedDict[Question, _Cached] = OrderedDict()
        self._latest: Question | None = None
        self._lock = threading.RLock()  # plans are made in a thread of their own (ps/transport/intake.py)
        self._teams: dict[tuple[Level, ...], Team] = {}  # by levels ahead: the team for the deferred products
        self._teams_of = 0  # number of devices when these were chosen

    def __repr__(self) -> str:
        return f"Planner({self.kind!r}, {len(self._cache)} plans kept)"

    def plan(
        self,
        requests: Sequence[Request] | Question,
        profiles: NDArray[np.void],
        able: Integers,
        revision: int = 0,
        busy: Integers = NONE_BUSY,
    ) -> list[Plan]:
        """`profiles`: every device ever, by id; `able`: ids that may get work, sorted; `revision`: number of the latest
        change of a profile; `busy`: ids at work on deferred products, to be left alone. The requests are ready at the
        same moment and are planned together."""
        question = Question.of(requests)
        with self._lock:
            if self._latest is not None and (before := self._cache.get(self._latest)) is not None:
                before.followed_by = question
            self._latest = question
            return self._current(question, profiles, able, revision, busy, used=True)

    def plan_ahead(
        self, profiles: NDArray[np.void], able: Integers, revision: int = 0, busy: Integers = NONE_BUSY
    ) -> None:
        """Make the plans for the question that followed the latest one last time: while the devices work, planning
        costs nothing."""
        with self._lock:
            question = self.upcoming
            if question is None or question not in self._cache:
                return
            kept = self._cache[question]
            if kept.revision == revision and np.isin(kept.able, able).all():
                return  # no device is missing; which are busy by then is not known yet
            if not (question.deferred or question.ahead):  # another pass: by then no device is busy
                busy = NONE_BUSY
            with suppress(PlanError):  # the error is raised again when the question is asked
                self._current(question, profiles, able, revision, busy, used=False)

    @property
    def upcoming(self) -> Question | None:
        """The question that followed the latest one last time."""
        latest = None if self._latest is None else self._cache.get(self._latest)
        return None if latest is None else latest.followed_by

    def _current(
        self, question: Question, profiles: NDArray[np.void], able: Integers, revision: int, busy: Integers, used: bool
    ) -> list[Plan]:
        able = without(able, busy)
        kept = self._cache.get(question)
        if kept is not None:
            self._cache.move_to_end(question)
            if kept.revision == revision and self._repaired(kept, question, profiles, able, used):
                return kept.plans
        solve = gridded if self.kind == "grid" else solved
        if self.kind == "grid" or not question.defers:
            plans = solve(question.requests, profiles, able)
        elif self.cap.strict:  # a team may be too small for the cap
            plans = solve(question.level.critical, profiles, able) + [WAITS] * question.deferred
        else:
            plans = self._solved_beside(question, profiles, able)
        if self.cap.strict or not question.defers:
            ends_s = partial(question.ends_s, profiles=profiles)
            plans = capped(self.cap, question.requests, plans, profiles, able, solve, ends_s)
        self.remember(question, able, plans, profiles, revision)
        return plans

    def _solved_beside(
        self, question: Question, profiles: NDArray[np.void], able: Integers, anew: bool = False
    ) -> list[Plan]:
        """Plan the deferred products on a team that finishes them with the pass, the rest on the other devices; without
        such a team, the deferred products wait. Teams are found for a whole pass at once, and again (`anew`) when the
        remaining devices of one would be late, or the fleet has grown."""
        level, later = question.level, settings.NOW.later
        known = not anew and question.ahead in self._teams and len(able) <= later * self._teams_of
        if not known:
            levels = [level, *question.ahead]
            self._teams_of = len(able)
            self._teams = {
                tuple(levels[number + 1 :]): replace(team, devices=able[team.devices])
                for number, team in enumerate(teams(levels, profiles[able]))
            }
        team = self._teams[question.ahead]
        there = team.devices[np.isin(team.devices, able)]
        deferred = solved(level.deferred, profiles, there) if len(there) else [WAITS] * question.deferred
        gone = len(team.devices) and not len(there)
        if known and (gone or _ends_s(deferred, level.deferred, profiles) > later * team.span_s):
            return self._solved_beside(question, profiles, able, anew=True)
        return solved(level.critical, profiles, np.setdiff1d(able, there, assume_unique=True)) + deferred

    def has_ready(self, question: Question, able: Integers, revision: int, busy: Integers) -> bool:
        """Whether the kept plans are valid unchanged."""
        kept = self._cache.get(question)
        if kept is None or kept.revision != revision or kept.worn_out(kept.wastes_s):
            return False
        return np.array_equal(kept.able, without(able, busy))

    def adopt(self, other: Planner) -> None:
        """Know what another planner knows: its plans are for the same devices, with the same numbers."""
        self.__dict__.update(deepcopy({name: value for name, value in vars(other).items() if name != "_lock"}))

    def knows(self, requests: Sequence[Request] | Question) -> bool:
        return Question.of(requests) in self._cache

    def remember(
        self, question: Question, able: Integers, plans: list[Plan], profiles: NDArray[np.void], revision: int = 0
    ) -> None:
        """Keep these new plans. Corrections of profiles up to `revision` were known when they were made."""
        own = able.copy()  # the caller may change its array later
        followed_by = self._cache[question].followed_by if question in self._cache else None
        ends_s = question.ends_s(plans, profiles)
        self._cache[question] = _Cached(own, own, plans, ends_s, revision, followed_by=followed_by)
        self._cache.move_to_end(question)
        if len(self._cache) > settings.NOW.most_cached:
            self._cache.popitem(last=False)

    def _repaired(
        self, kept: _Cached, question: Question, profiles: NDArray[np.void], able: Integers, used: bool
    ) -> bool:
        """Whether the kept plans can be used once more, without the devices that are gone. Devices that have joined get
        nothing yet. Both make the plans end later than new ones would; once their uses have lost as much time as new
        plans cost, they are made anew."""
        plans, wastes_s = kept.plans, kept.wastes_s
        if not np.array_equal(kept.able, able):
            if self.cap.strict:
                return False  # others might get more than their share
            try:
                plans = without_the_lost(kept.plans, question.requests, profiles, able)
            except PlanError:
                return False
            ends_s = question.ends_s(plans, profiles)
            wastes_s = max(0.0, ends_s - kept.ends_s) + (1 - np.isin(able, kept.solved_for).mean()) * ends_s
        if kept.worn_out(wastes_s):
            return False
        kept.plans, kept.able, kept.wastes_s = plans, able.copy(), wastes_s
        if used:
            kept.wasted_s += wastes_s
        return True


def without_the_lost(
    plans: list[Plan], requests: Sequence[Request], profiles: NDArray[np.void], able: Integers
) -> list[Plan]:
    """The same plans; the blocks of devices that are gone are shared over those that would finish them soonest."""
    gone = [~np.isin(plan.device, able) for plan in plans]
    if not any(lost.any() for lost in gone):
        return plans
    if not len(able):
        raise PlanError("all devices of the plan are gone")
    busy_s = np.zeros(len(profiles))  # until when each device is busy with its own blocks
    for plan in plans:
        used, first = np.unique(plan.device, return_index=True)
        busy_s[used] += plan.ends_s[first]
    busy_s = np.maximum(busy_s - 2 * profiles["latency_s"], 0.0)
    found = []
    for plan, request, lost in zip(plans, requests, gone, strict=True):
        if lost.any():
            shape = request.shape
            mine = able[able_devices(shape, profiles[able])]
            queues_s = np.tile(busy_s[mine], (3, 1))
            whole, most = rectangles(plan.boxes[lost], plan.device[lost]), settings.NOW.shared_over
            boxes, owner, _ = shared(whole, shape.inner, profiles[mine], queues_s, queues_s, plan.makespan_s, most)
            boxes = np.concatenate([plan.boxes[~lost], boxes])
            plan = made_plan(boxes, np.concatenate([plan.device[~lost], mine[owner]]), shape, profiles)
            np.maximum.at(busy_s, plan.device, plan.ends_s)  # no device helps two products beyond its time
        found.append(plan)
    return found


def _ends_s(plans: Sequence[Plan], requests: Sequence[Request], profiles: NDArray[np.void]) -> float:
    """When the last device ends. A device in several plans does their blocks one after another."""
    if len(plans) == 1:
        return plans[0].makespan_s
    return float(together_ends_s(plans, [request.shape for request in requests], profiles).max(initial=0.0))


def without(able: Integers, busy: Integers) -> Integers:
    """The able devices that are not busy; all of them if none would be left."""
    if not len(busy):
        return able
    free: Integers = able[~np.isin(able, busy)]
    return free if len(free) else able


def gridded(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]:
    """Plan each product on its own, over all devices."""
    plans = [grid_plan(request.shape, profiles[able]) for request in requests]
    return [replace(plan, device=able[plan.device]) for plan in plans]


def solved(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]:
    """Plans of products that are ready at the same moment: by teams, or in turn if that is modelled to end sooner."""
    mine = profiles[able]
    over_all = {request: Relaxation.of(request, mine) for request in dict.fromkeys(requests)}  # many are equal
    relaxations = [over_all[request] for request in requests]
    best: list[Plan] = []
    best_s = np.inf
    waits_s = 2 * mine["latency_s"].min()  # in turn, the devices wait for their lines once
    in_turn_s = waits_s + sum(relaxation.span_s - waits_s for relaxation in relaxations)
    harder = np.ones(len(requests))  # than the relaxed bound: rounding to whole numbers costs each product differently
    for _ in range(2 if 1 < len(requests) <= len(able) else 0):
        teams = deal(relaxations, harder, len(able))
        if not teams or not all(len(team) for team in teams):
            break
        alone = [Relaxation.of(request, mine[team], team) for request, team in zip(requests, teams, strict=True)]
        plans = [relaxation.plan(profiles, able, few=False) for relaxation in alone]
        ends_s = np.array([plan.makespan_s for plan in plans])
        if ends_s.max() >= best_s:
            break
        best, best_s = plans, ends_s.max()
        if best_s <= settings.NOW.slack * ends_s.mean() and best_s <= in_turn_s:
            return best  # the plans end close enough together
        harder = harder * ends_s / ends_s.mean()
    if len(requests) == 1:
        return [relaxations[0].plan(profiles, able, few=True)]
    in_turn = _in_turn(requests, profiles, able)
    return best if best_s <= _ends_s(in_turn, requests, profiles) else in_turn


def _in_turn(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]:
    """Plans over all devices, one product after another. A device waits for its line once for all of them, so each
    product has its part of that one wait, as far as the device's credit goes. A device whose blocks turn out to be more
    than that waits again and again, and gets less, or nothing."""
    line_s, at_once = 2 * profiles["latency_s"], np.minimum(len(requests), profiles["credit_blocks"])
    choices = [_each(requests, profiles, able, line_s / at_once)]
    devices = np.concatenate([plan.device for plan in choices[0]])
    rounds = -(-np.bincount(devices, minlength=len(profiles)) // profiles["credit_blocks"])
    if rounds.max() > 1:
        choices.append(_each(requests, profiles, able, line_s * np.maximum(1 / at_once, rounds / len(requests))))
        cells = np.concatenate([plan.boxes[:, 1::2].prod(axis=1) for plan in choices[0]])
        alone = np.array([np.bincount(devices, cells).argmax()])  # whole products are fewer blocks
        with suppress(PlanError):  # it may not have the memory
            choices.append(_each(requests, profiles, alone, line_s / at_once))
    return min(choices, key=lambda plans: _ends_s(plans, requests, profiles))


def _each(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers, waits_s: Numbers) -> list[Plan]:
    """A plan over all devices for each product, if it costs a device `waits_s` to take part."""
    hurried = profiles[able]
    hurried["latency_s"] = waits_s[able] / 2
    plans = {r: Relaxation.of(r, hurried).plan(profiles, able, few=True) for r in dict.fromkeys(requests)}
    return [plans[request] for request in requests]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question with all that its answer depends on, so that another thread can work on it. The dispatcher's state
    changes meanwhile, and the dispatcher checks the answer against its state at that time."""

    planner: Planner
    question: Question | None  # None: plan ahead
    profiles: NDArray[np.void]
    able: Integers
    revision: int
    busy: Integers

    @property
    def takes_long(self) -> bool:
        """Whether the answer needs other plans than those that are kept."""
        question = self.question or self.planner.upcoming
        return question is not None and not self.planner.has_ready(question, self.able, self.revision, self.busy)

    def answer(self) -> list[Plan]:
        """Plans; an empty list if there are none, or if the inquiry only plans ahead."""
        if self.question is None:
            self.planner.plan_ahead(self.profiles, self.able, self.revision, self.busy)
            return []
        with suppress(PlanError):  # the dispatcher finds out when the jobs begin, and says why
            return self.plans()
        return []

    def plans(self) -> list[Plan]:
        """Plans without the devices that work on deferred products; with them, if the others do not suffice."""
        assert self.question is not None
        try:
            return self.planner.plan(self.question, self.profiles, self.able, self.revision, self.busy)
        except PlanError:
            if not len(self.busy):
                raise
            return self.planner.plan(self.question, self.profiles, self.able, self.revision)
