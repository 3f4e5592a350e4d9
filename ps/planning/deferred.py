"""Deferred products beside critical ones: which devices compute the weight gradients of a backward pass, and when.

A pass is a chain of products, each waiting for the one before; beside it, products become ready that are needed only at
its end. m products that share the fleet throughout need fewer downloads than the same products one after
another: a device with twice the time covers up to four times as many cells, because its rectangle has less perimeter
per cell. So a deferred product begins as soon as it is ready, on just as many devices as finish it with the pass;
the chain continues on the others. (To first order that always ends sooner than holding deferred products back until the
chain is over, and then computing them with all devices: a device taken from the chain for x seconds costs it less than
x seconds.)

The planner takes the devices that compute most of the deferred product by the end, per second that the chain loses
without them. A device with a fast downlink and a slow uplink is of little use for a large output, but as good as any
for a weight gradient.

The end of the pass is found by stepping through it: each level takes as long as the devices left at that point need.
That time is the time with all devices, times a power of the lost capacity; the exponent is fitted per level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import least_span
from ps.planning.cost import Integers, Numbers
from ps.planning.plans import Level, Request
from ps.planning.teams import Relaxation

NONE: Integers = np.empty(0, np.int64)
Devices = NDArray[np.bool_]  # mask over all devices


@dataclass(frozen=True, slots=True)
class Team:
    """Devices that compute deferred products beside the critical ones, and how long they have."""

    devices: Integers
    span_s: float


def teams(levels: Sequence[Level], profiles: NDArray[np.void]) -> list[Team]:
    """The devices that compute the deferred products of each level but the last, while the others continue with the
    critical ones. Empty teams if computing the deferred products last ends as soon: there are few devices, or a
    critical product needs the devices that would be taken from it, or the others are too slow."""
    way = _Pass(levels, profiles)
    if way.ends_s(way.held_back_s)[0] > way.held_back_s:
        return [Team(NONE, 0.0)] * (len(levels) - 1)
    end_s = least_span(lambda end_s: way.ends_s(end_s)[0] <= end_s, 0.0, way.held_back_s, settings.NOW.precision)
    return way.ends_s(end_s)[1]


class _Pass:
    def __init__(self, levels: Sequence[Level], profiles: NDArray[np.void]) -> None:
        self._levels, self._count = levels, len(profiles)
        critical = [level.critical for level in levels if level.critical]
        deferred = tuple(request for level in levels for request in level.deferred)
        relaxations = {r: Relaxation.of(r, profiles) for r in dict.fromkeys(chain(*critical, deferred))}
        self._spans = {requests: _Span.of(requests, relaxations, self._count) for requests in critical}
        # when the pass ends if all deferred products are computed last
        self.held_back_s = sum(self._spans[requests].whole_s for requests in critical)
        self.held_back_s += _Span.of(deferred, relaxations, self._count).whole_s
        self._slow = {r: Relaxation.of(r, profiles, until_s=self.held_back_s) for r in dict.fromkeys(deferred)}
        last = levels[-1].critical + levels[-1].deferred
        self._last = _Span.of(last, relaxations, self._count)
        # seconds that the pass loses without a device, to first order
        self._worth = np.full(self._count, 1e-12)
        for requests in critical:
            self._worth += self._spans[requests].worth

    def ends_s(self, by_s: float) -> tuple[float, list[Team]]:
        """When the pass ends if deferred products take until `by_s`, and the team taken by each level but the last. A
        team that ends sooner, because it consists of whole devices, is free again then; one that ends later, because
        there are too few devices, delays the pass."""
        left, found, now_s, last_s = np.ones(self._count, np.bool_), [], 0.0, 0.0
        away: list[tuple[float, Integers]] = []  # (until when, devices)
        for level in self._levels[:-1]:
            for until_s, devices in away:
                if until_s <= now_s:
                    left[devices] = True
            away = [one for one in away if one[0] > now_s]
            team, takes_s = Team(NONE, 0.0), 0.0
            if level.deferred:
                team, takes_s = self._taken(level.deferred, max(0.0, by_s - now_s) / settings.NOW.later, left)
                if not len(team.devices):
                    return math.inf, []
            found.append(team)
            left[team.devices] = False
            last_s = max(last_s, now_s + takes_s)
            away.append((now_s + takes_s, team.devices))
            if level.critical:
                now_s += self._spans[level.critical].without_s(left)
        return max(last_s, now_s + self._last.without_s(left)), found

    def _taken(self, requests: tuple[Request, ...], span_s: float, left: Devices) -> tuple[Team, float]:
        """Enough of the remaining devices to compute these products in that time; and about how long they take."""
        cells = _cells(requests, self._slow, self._count, span_s)
        offers = (cells / np.array([[request.shape.cells] for request in Counter(requests)])).mean(axis=0)
        order = np.flatnonzero(left & (offers > 0))
        order = order[np.argsort(-offers[order] / self._worth[order], kind="stable")]
        most = int(settings.NOW.most_taken * np.count_nonzero(left))
        crowding = _crowding(requests, np.cumsum(cells[:, order], axis=1))
        enough = crowding <= 1
        count = min(most, int(np.argmax(enough)) + 1 if enough.any() else len(order))
        needs = float(crowding[count - 1]) if count else 0.0
        # a single device does whole products; larger rectangles have less perimeter per cell
        takes_s = span_s * (needs if count == 1 else math.sqrt(needs))
        return Team(np.sort(order[:count]), span_s), takes_s


@dataclass(frozen=True, slots=True)
class _Span:
    """How long products that are computed together take, depending on the devices that take part."""

    requests: tuple[Request, ...]
    whole_s: float  # with all devices
    cells: Numbers  # [distinct products, devices]: cells that each device covers in that time
    power: float  # cells grow with time to this power

    @classmethod
    def of(cls, requests: tuple[Request, ...], relaxations: Mapping[Request, Relaxation], count: int) -> _Span:
        def crowding(span_s: float) -> float:
            return float(_crowding(requests, _cells(requests, relaxations, count, span_s).sum(axis=1)))

        longest_s = max(relaxations[request].span_s for request in requests)
        whole_s = least_span(lambda span_s: crowding(span_s) <= 1, 0.0, longest_s, settings.NOW.precision)
        stretch = 1.2  # the exponent is fitted between this time and 1.2 times this time
        grown = crowding(whole_s) / max(crowding(stretch * whole_s), 1e-300)
        power = max(1.0, math.log(max(grown, 1.0)) / math.log(stretch))
        return cls(requests, whole_s, _cells(requests, relaxations, count, whole_s), power)

    def without_s(self, left: Devices) -> float:
        crowding = float(_crowding(self.requests, self.cells @ left))
        return self.whole_s * math.pow(crowding, 1 / self.power)

    @property
    def worth(self) -> Numbers:
        """How much longer the products take without each device."""
        lost: Numbers = (_needed(self.requests) / self.cells.sum(axis=1) ** 2) @ self.cells
        return self.whole_s / self.power * lost


def _cells(
    requests: tuple[Request, ...], relaxations: Mapping[Request, Relaxation], count: int, span_s: float
) -> Numbers:
    """Cells of each distinct product that each device covers in that time, in one or several such products in turn."""
    table = np.zeros((len(Counter(requests)), count))
    for row, request in zip(table, Counter(requests), strict=True):
        row[relaxations[request].index] = relaxations[request].areas.within(span_s)
    return table


def _needed(requests: tuple[Request, ...]) -> Numbers:
    """Cells of each distinct product, over all its requests."""
    return np.array([float(many * request.shape.cells) for request, many in Counter(requests).items()])


def _crowding(requests: tuple[Request, ...], covered: Numbers) -> Numbers:
    """The share of the devices that all these products need, if the devices cover `covered` cells of each in the time;
    more than 1: the time is too short."""
    share: Numbers = (settings.NOW.slack * _needed(requests) / np.maximum(covered.T, 1e-300)).sum(axis=-1)
    return share
