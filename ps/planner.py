"""Products + fleet -> plans: rectangles that tile each output exactly, each with its device.

Products that are ready at the same moment share the fleet: each gets a team, and all end together, which is better than
one after another, because a larger rectangle has more cells for what must be downloaded. Each team packs its product
(ps/packing.py) under the law of the running system (ps/pipeline.py).

A plan is kept while the fleet stays the same and adapted (ps/adapt.py) when devices are lost, join or turn out to be
slower, until what that has cost, by the model, is as much as making a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ps.adapt import adapted, welcomed
from ps.cost import Integers, Numbers
from ps.grid import able_devices, grid_plan
from ps.law import Areas, Law, least_span
from ps.packing import packed
from ps.pipeline import Cuts, cut_tiles, cuts_within, made_plan, running_laws
from ps.plans import Plan, PlanError, Request, Shape

__all__ = ["Integers", "Plan", "PlanError", "Planner", "Request", "Shape", "adapted"]

# Using every device for a product costs bytes and messages and saves little: among teams that are modelled to end
# within this factor of the best, the smallest is taken.
SLACK = 1.02
DEALS = 2  # ways of dealing the fleet to several products; the second one knows how the first one ended
PACKING_LOSS = 0.02  # of the cells: what the fluid bound promises and rectangles do not keep
GROWN = 1.05  # a fleet that has grown by more deserves new plans
# A product, about what a new plan costs the server: 465 devices took 17 ms for one, 49 for three together, 380 for 16.
# Adapted plans may waste as much in all.
SOLVING_S = 0.025
MOST_AHEAD_S = 0.1  # what takes longer is not planned ahead: answers would wait for it
MOST_LOST = 256  # tiles of one plan: to find a new place for more of them takes longer than a new plan
MOST_CACHED = 512
SETTLED = 32  # uses of plans with newcomers in makeshift places, before they are made anew
NONE_REVISED: Mapping[int, int] = MappingProxyType({})
TEAM_PRECISION = 1e-3  # of T; whole devices are dealt, which is coarser


@dataclass(slots=True)
class _Cached:
    solved_for: Integers  # able devices
    able: Integers  # those that the plans, adapted since, are valid for
    plans: list[Plan]
    ends_s: float  # by the model, when they were made
    revision: int  # of the profiles
    wasted_s: float = 0.0  # by ending later than that, in all uses
    uses: int = 0  # since somebody who has joined got a makeshift place in them
    followed_by: tuple[Request, ...] = ()  # what was asked next, the last time


class Planner:
    """Remembers its plans; what it answers depends only on its questions."""

    def __init__(self, kind: Literal["packed", "grid"] = "packed") -> None:
        if kind not in ("packed", "grid"):
            raise ValueError(f'the kind of planner is {kind!r}; it must be "packed" or "grid"')
        self.kind = kind
        self._cache: OrderedDict[tuple[Request, ...], _Cached] = OrderedDict()
        self._latest: tuple[Request, ...] = ()

    def __repr__(self) -> str:
        return f"Planner({self.kind!r}, {len(self._cache)} plans kept)"

    def plan(
        self,
        requests: Sequence[Request],
        profiles: NDArray[np.void],
        able: Integers,
        revised: Mapping[int, int] = NONE_REVISED,
    ) -> list[Plan]:
        """`profiles`: every device ever, by id; `able`: ids that may get work, sorted; `revised`: devices whose profile
        has changed, each with the number of its latest change, a later one greater. The requests are ready at the same
        moment and are planned together."""
        key = tuple(requests)
        if (before := self._cache.get(self._latest)) is not None:
            before.followed_by = key
        self._latest = key
        return self._current(key, profiles, able, revised, used=True)

    def plan_ahead(self, profiles: NDArray[np.void], able: Integers, revised: Mapping[int, int] = NONE_REVISED) -> None:
        """Have ready what will be asked next, if it is what was asked next the last time: while the devices are at
        work, planning costs nothing."""
        latest = self._cache.get(self._latest)
        if latest is None or latest.followed_by not in self._cache:
            return
        if SOLVING_S * len(latest.followed_by) <= MOST_AHEAD_S:
            with suppress(PlanError):  # who asks will hear of it
                self._current(latest.followed_by, profiles, able, revised, used=False)

    def _current(
        self,
        key: tuple[Request, ...],
        profiles: NDArray[np.void],
        able: Integers,
        revised: Mapping[int, int],
        used: bool,
    ) -> list[Plan]:
        revision = max(revised.values(), default=0)
        kept = self._cache.get(key)
        if kept is not None:
            self._cache.move_to_end(key)
            same = kept.revision == revision and self._still_valid(kept, able, used)
            if same and self._worth_keeping(kept, kept.plans, used):
                return kept.plans
            changed = [device for device, number in revised.items() if number > kept.revision]
            if self._adapt(kept, key, profiles, able, np.array(changed, np.int64), used):
                kept.revision = revision
                return kept.plans
        plans = solved(key, profiles, able) if self.kind == "packed" else gridded(key, profiles, able)
        self.remember(key, able, plans, revision)
        return plans

    def knows(self, requests: Sequence[Request]) -> bool:
        return tuple(requests) in self._cache

    def remember(self, requests: Sequence[Request], able: Integers, plans: list[Plan], revision: int = 0) -> None:
        """These plans are new; devices with corrections up to that number are as they were when they were made."""
        key, own = tuple(requests), _unchanging(able)
        followed_by = self._cache[key].followed_by if key in self._cache else ()
        self._cache[key] = _Cached(own, own, plans, _ends_s(plans), revision, followed_by=followed_by)
        self._cache.move_to_end(key)
        if len(self._cache) > MOST_CACHED:
            self._cache.popitem(last=False)

    def _adapt(
        self,
        kept: _Cached,
        requests: tuple[Request, ...],
        profiles: NDArray[np.void],
        able: Integers,
        changed: Integers,
        used: bool,
    ) -> bool:
        """Make do with the plans there are, while that is cheap. Devices of which something else is
        known now are taken out of them, and may help wherever somebody is missing."""
        if kept.uses > SETTLED or not len(able) or len(able) > max(1.0, GROWN * len(kept.solved_for)):
            return False
        lost = np.union1d(np.setdiff1d(kept.able, able, assume_unique=True), changed)
        if any(np.count_nonzero(np.isin(plan.device, lost)) > MOST_LOST for plan in kept.plans):
            return False
        joined = np.setdiff1d(able, np.setdiff1d(kept.able, changed, assume_unique=True), assume_unique=True)
        try:
            plans = _adapted_together(kept.plans, requests, lost, profiles, able)
        except PlanError:  # nobody who is left has the memory for some rectangle
            return False
        if self.kind == "packed" and len(joined):
            later = int(np.argmax([plan.makespan_s for plan in plans]))  # those that end last need help most
            plans[later] = welcomed(plans[later], requests[later].shape, joined, profiles)
            kept.uses += 1
        if not self._worth_keeping(kept, plans, used):
            return False
        kept.plans = plans
        kept.able = _unchanging(able)
        return True

    def _worth_keeping(self, kept: _Cached, plans: list[Plan], used: bool) -> bool:
        """Has it cost less, with this use, than making a new one would?"""
        wasted_s = kept.wasted_s + max(0.0, _ends_s(plans) - kept.ends_s)
        if used:
            kept.wasted_s = wasted_s
        return wasted_s <= SOLVING_S * len(plans)

    def _still_valid(self, kept: _Cached, able: Integers, used: bool) -> bool:
        if kept.able is not able and not np.array_equal(kept.able, able):
            return False
        kept.uses += used and kept.uses > 0
        return kept.uses <= SETTLED


def _adapted_together(
    plans: list[Plan], requests: Sequence[Request], lost: Integers, profiles: NDArray[np.void], able: Integers
) -> list[Plan]:
    """Each product is helped by its own team and by whoever has nothing to do; nobody helps two of them."""
    if len(plans) == 1:
        return [adapted(plans[0], requests[0], lost, profiles, able)]
    free = np.setdiff1d(able, np.concatenate([plan.device for plan in plans]))
    found = []
    for plan, request in zip(plans, requests, strict=True):
        helpers = np.union1d(np.intersect1d(plan.device, able), free)
        found.append(adapted(plan, request, lost, profiles, helpers))
        free = np.setdiff1d(free, found[-1].device, assume_unique=True)
    return found


def _ends_s(plans: list[Plan]) -> float:
    return max(plan.makespan_s for plan in plans)


def _unchanging(able: Integers) -> Integers:
    """The caller may change its array later; what was planned for may not change with it."""
    return able.copy() if able.flags.writeable else able


def gridded(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]:
    """Each product on its own, over all devices."""
    idle = np.zeros(len(able))
    plans = [grid_plan(request.shape, profiles[able], idle) for request in requests]
    return [replace(plan, device=able[plan.device]) for plan in plans]


def solved(requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]:
    """Plans of products that are ready at the same moment: by teams, or in turn if that is modelled to end sooner."""
    mine = profiles[able]
    over_all = {request: _Fluid.of(request, mine) for request in dict.fromkeys(requests)}  # many are alike
    fluids = [over_all[request] for request in requests]
    best: list[Plan] = []
    harder = np.ones(len(requests))  # than the fluid says: whole numbers cost each product something else
    for _ in range(DEALS if 1 < len(requests) <= len(able) else 0):
        teams = _teams(fluids, harder, len(able))
        if not teams or not all(len(team) for team in teams):
            break
        alone = [_Fluid.of(request, mine[team], team) for request, team in zip(requests, teams, strict=True)]
        if max(fluid.span_s for fluid in alone) > SLACK * sum(fluid.span_s for fluid in fluids):
            break
        plans = [fluid.plan(profiles, able, few=False) for fluid in alone]
        if best and _ends_s(plans) >= _ends_s(best):
            break
        best = plans
        ends_s = np.array([plan.makespan_s for plan in plans])
        if ends_s.max() <= SLACK * ends_s.mean():
            break  # together enough
        harder = harder * ends_s / ends_s.mean()
    return best or [fluid.plan(profiles, able, few=True) for fluid in fluids]


@dataclass(frozen=True, slots=True)
class _Fluid:
    """A product on a group of devices, before it is cut: who can do how much of it in which time."""

    request: Request
    index: Integers  # of the devices with enough memory
    cuts: Cuts
    laws: tuple[Law, Law]
    areas: Areas
    span_s: float  # about when it could end: an estimate, by the upright law and with every overhead, not a bound

    @classmethod
    def of(cls, request: Request, profiles: NDArray[np.void], names: Integers | None = None) -> _Fluid:
        """`names`: what to call the devices, instead of 0, 1, ..."""
        shape = request.shape
        index = able_devices(shape, profiles)
        profiles = profiles[index]
        cuts = Cuts.none(len(index))
        laws = running_laws(profiles, request, cuts)
        areas = Areas(laws[0], shape.rows, shape.columns)
        span_s = areas.span_s(float(shape.cells))
        wanted = cuts_within(profiles, request, areas, SLACK * span_s)  # now it is known how large the rectangles are
        if max(wanted.strips.max(), wanted.chunks.max()) > 1:
            cuts = wanted
            laws = running_laws(profiles, request, cuts)
            areas = Areas(laws[0], shape.rows, shape.columns)
            span_s = areas.span_s(float(shape.cells))
        return cls(request, index if names is None else names[index], cuts, laws, areas, span_s)

    def within(self, span_s: float) -> Numbers:
        return np.minimum(self.areas.within(span_s), float(self.request.shape.cells))

    def plan(self, profiles: NDArray[np.void], able: Integers, few: bool) -> Plan:
        """`few`: as few devices as end within SLACK of the best."""
        shape, chosen = self.request.shape, np.arange(len(self.index))
        if few:
            cells = self.within(SLACK * self.span_s)
            ranking = np.argsort(-cells, kind="stable")
            enough = int(np.searchsorted(np.cumsum(cells[ranking]), shape.cells * (1 + PACKING_LOSS))) + 1
            chosen = np.sort(ranking[:enough])
        laws = self.laws[0].take(chosen), self.laws[1].take(chosen)
        tiling = packed(laws, shape.batch, shape.rows, shape.columns)
        strips = self.cuts.strips[chosen[tiling.owner]]
        device = able[self.index[chosen[tiling.owner]]]
        return made_plan(*cut_tiles(tiling.tiles, device, strips, tiling.turned, shape, profiles), shape, profiles)


def _teams(fluids: list[_Fluid], harder: Numbers, count: int) -> list[Integers]:
    """Deal the devices, largest first, always to the product of which the largest share is missing, until all would
    end together within SLACK of the best. No teams, if one product after another ends sooner."""
    needed = harder * [float(fluid.request.shape.cells) for fluid in fluids]

    def cells(span_s: float) -> Numbers:
        table = np.zeros((len(fluids), count))
        for row, fluid in zip(table, fluids, strict=True):
            row[fluid.index] = fluid.within(span_s)
        return table

    def enough(span_s: float) -> bool:
        total = cells(span_s).sum(axis=1)
        return bool((total > 0).all()) and float((needed / np.maximum(total, 1e-300)).sum()) <= 1

    if not enough(sum(fluid.span_s for fluid in fluids)):
        return []
    span_s = least_span(enough, 0.0, max(fluid.span_s for fluid in fluids), TEAM_PRECISION)
    shares = cells(SLACK * span_s) / (needed * (1 + PACKING_LOSS))[:, None]
    order = np.argsort(-shares.max(axis=0), kind="stable")
    missing = [1.0] * len(fluids)
    teams: list[list[int]] = [[] for _ in fluids]
    for device, offers in zip(order.tolist(), shares.T[order].tolist(), strict=True):
        open_ = [j for j, offer in enumerate(offers) if offer > 0 and missing[j] > 0]
        if open_:
            product = max(open_, key=missing.__getitem__)
            teams[product].append(device)
            missing[product] -= offers[product]
        elif max(missing) <= 0:
            break
    return [np.sort(np.array(team, np.int64)) for team in teams]
