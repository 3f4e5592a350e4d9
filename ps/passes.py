"""What nobody waits for, beside what somebody does: who does the weight gradients of a backward pass, and since when.

A pass is a chain of products, each waiting for the one before; beside it products become ready that are only needed at
its end. m products that share the fleet from the beginning to the end of a time are done with fewer downloads than one
after another: a device with twice the time covers up to four times as many cells, its rectangle having less perimeter
for them. So a patient product is begun as soon as it is ready, by just so many devices as end it together with the
pass; the chain goes on with the others. (To first order that always ends sooner than to keep patient products until the
chain is over, and then do all of them with all devices: a device that is taken from the chain for x seconds costs it
less than that.)

Who is taken: those who can do most of the patient product by the end, for what the chain loses without them. Who is
fast downwards and slow upwards is of little use to a large output, and as good as any for a weight gradient.

When the pass ends is found by going through it: each level takes as long as it takes whoever is left then. Its time is
taken from that of all devices by a power of what is missing, which is fitted to each level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.cost import Integers, Numbers
from ps.fluid import PACKING_LOSS, Fluid
from ps.law import least_span
from ps.plans import Level, Request

PRECISION = 0.01  # of the end of a pass
STRETCH = 1.2  # the power is that between a level's time and so many times as much
MOST_TAKEN = 0.5  # of those who are left
AIM = 0.95  # of the time until the end, for what is patient: who is late with it makes all wait, who is early does not

NONE: Integers = np.empty(0, np.int64)
Devices = NDArray[np.bool_]  # of all, which


@dataclass(frozen=True, slots=True)
class Team:
    """Devices that do what is patient, beside the rest, and how long they have for it."""

    devices: Integers
    span_s: float


def teams(levels: Sequence[Level], profiles: NDArray[np.void]) -> list[Team]:
    """Which devices do the patient products of each level but the last, while the others go on with what is urgent.
    Nobody, if that would end no sooner than to do them after the rest: devices are few, or some product can only be
    done by those who would be taken from it."""
    way = _Pass(levels, profiles)
    if way.ends_s(way.held_back_s)[0] > way.held_back_s:
        return [Team(NONE, 0.0)] * (len(levels) - 1)
    end_s = least_span(lambda end_s: way.ends_s(end_s)[0] <= end_s, 0.0, way.held_back_s, PRECISION)
    return way.ends_s(end_s)[1]


class _Pass:
    def __init__(self, levels: Sequence[Level], profiles: NDArray[np.void]) -> None:
        self._levels, self._count = levels, len(profiles)
        urgent = [level.urgent for level in levels if level.urgent]
        patient = tuple(request for level in levels for request in level.patient)
        fluids = {
            r: Fluid.of(r, profiles) for r in dict.fromkeys(r for requests in (*urgent, patient) for r in requests)
        }
        self._spans = {requests: _Span.of(requests, fluids, self._count) for requests in urgent}
        # when it ends if all that is patient is done after the rest
        self.held_back_s = sum(self._spans[requests].whole_s for requests in urgent)
        self.held_back_s += _Span.of(patient, fluids, self._count).whole_s
        self._slow = {r: Fluid.of(r, profiles, until_s=self.held_back_s) for r in dict.fromkeys(patient)}
        last = levels[-1].urgent + levels[-1].patient
        self._last = _Span.of(last, fluids, self._count)
        # what the pass loses without a device, in seconds, to first order
        self._worth = np.full(self._count, 1e-12)
        for requests in urgent:
            self._worth += self._spans[requests].worth

    def ends_s(self, by_s: float) -> tuple[float, list[Team]]:
        """When the last level ends if what is patient takes until `by_s`; and who is taken by each before it. A team
        that ends sooner, being of whole devices, comes back then."""
        left, found, now_s = np.ones(self._count, np.bool_), [], 0.0
        away: list[tuple[float, Integers]] = []  # until when, who
        for level in self._levels[:-1]:
            for until_s, devices in away:
                if until_s <= now_s:
                    left[devices] = True
            away = [one for one in away if one[0] > now_s]
            team, takes_s = Team(NONE, 0.0), 0.0
            if level.patient:
                team, takes_s = self._taken(level.patient, AIM * max(0.0, by_s - now_s), left)
            found.append(team)
            left[team.devices] = False
            away.append((now_s + takes_s, team.devices))
            if level.urgent:
                now_s += self._spans[level.urgent].without_s(left)
        return now_s + self._last.without_s(left), found

    def _taken(self, requests: tuple[Request, ...], span_s: float, left: Devices) -> tuple[Team, float]:
        """Of those who are left, enough to do these products in that time; and about how long that takes them."""
        cells = _cells(requests, self._slow, self._count, span_s)
        offers = (cells / np.array([[request.shape.cells] for request in Counter(requests)])).mean(axis=0)
        order = np.flatnonzero(left & (offers > 0))
        order = order[np.argsort(-offers[order] / self._worth[order], kind="stable")]
        most = int(MOST_TAKEN * np.count_nonzero(left))
        crowding = _crowding(requests, np.cumsum(cells[:, order], axis=1))
        enough = crowding <= 1
        count = min(most, int(np.argmax(enough)) + 1 if enough.any() else len(order))
        needs = float(crowding[count - 1]) if count else 0.0
        # one device does whole products; rectangles have less perimeter, for their cells, the larger they are
        takes_s = span_s * (needs if count == 1 else math.sqrt(needs))
        return Team(np.sort(order[:count]), span_s), takes_s


@dataclass(frozen=True, slots=True)
class _Span:
    """How long products that are done together take, by who takes part."""

    requests: tuple[Request, ...]
    whole_s: float  # all devices
    cells: Numbers  # [distinct products, devices]: what each covers of each in that time
    power: float  # cells grow with time to this power

    @classmethod
    def of(cls, requests: tuple[Request, ...], fluids: Mapping[Request, Fluid], count: int) -> _Span:
        def crowding(span_s: float) -> float:
            return float(_crowding(requests, _cells(requests, fluids, count, span_s).sum(axis=1)))

        longest_s = max(fluids[request].span_s for request in requests)
        whole_s = least_span(lambda span_s: crowding(span_s) <= 1, 0.0, longest_s, PRECISION)
        grown = crowding(whole_s) / max(crowding(STRETCH * whole_s), 1e-300)
        power = max(1.0, math.log(max(grown, 1.0)) / math.log(STRETCH))
        return cls(requests, whole_s, _cells(requests, fluids, count, whole_s), power)

    def without_s(self, left: Devices) -> float:
        crowding = float(_crowding(self.requests, self.cells @ left))
        return self.whole_s * math.pow(crowding, 1 / self.power)

    @property
    def worth(self) -> Numbers:
        """How much longer it takes without a device, of each."""
        lost: Numbers = (_needed(self.requests) / self.cells.sum(axis=1) ** 2) @ self.cells
        return self.whole_s / self.power * lost


def _cells(requests: tuple[Request, ...], fluids: Mapping[Request, Fluid], count: int, span_s: float) -> Numbers:
    """What each device covers of each distinct product in that time, or of several such one after another."""
    table = np.zeros((len(Counter(requests)), count))
    for row, request in zip(table, Counter(requests), strict=True):
        row[fluids[request].index] = fluids[request].areas.within(span_s)
    return table


def _needed(requests: tuple[Request, ...]) -> Numbers:
    """Cells of each distinct product."""
    return np.array([float(many * request.shape.cells) for request, many in Counter(requests).items()])


def _crowding(requests: tuple[Request, ...], covered: Numbers) -> Numbers:
    """The share of the devices that all these products need, if they cover so many cells of each in the time; more than
    1: they do not end in it."""
    share: Numbers = (_needed(requests) * (1 + PACKING_LOSS) / np.maximum(covered.T, 1e-300)).sum(axis=-1)
    return share
