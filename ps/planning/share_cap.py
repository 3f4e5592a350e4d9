"""No device gets more than a stated part of a product, where the other devices are able.

A device that computes most of a product sees most of its operands, and delays the product when it fails. Plans are
first made without the cap. If one gives a device more than its part, plans are made again as if that device were
slower, until it gets no more. Whole rows and columns are dealt, so a part may be exceeded by one row or column of the
product.

"Able" is a matter of time. If a scenario states no cap, the default applies to the products that are ready at the same
moment, taken together, and yields where it would make them take more than 5% longer: seven slow phones
beside a fast laptop are not able to do half of its work. A cap that a scenario states applies to each product, and is
strict: it holds at any cost, as long as there are enough devices (at least 1 / cap) with the memory.

Blocks cut again after a loss, speculative copies and work that idle devices take over follow need, not the cap: they
are parts of what other devices had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.cost import Integers, Numbers
from ps.planning.pipeline import ended_plan
from ps.planning.plans import Plan, PlanError, Request


class Solve(Protocol):
    def __call__(self, requests: Sequence[Request], profiles: NDArray[np.void], able: Integers) -> list[Plan]: ...


@dataclass(frozen=True, slots=True)
class Cap:
    share: float
    strict: bool = False

    def excess(self, requests: Sequence[Request], plans: Sequence[Plan], able: int) -> tuple[Integers, Numbers]:
        """Devices whose part of these products together exceeds the cap, and the part of each."""
        share, shapes = max(self.share, 1.0 / able), [request.shape for request in requests]
        cells = [plan.boxes[:, 1] * plan.boxes[:, 3] * plan.boxes[:, 5] for plan in plans]
        work = [shape.inner * of_plan for shape, of_plan in zip(shapes, cells, strict=True)]
        devices, index = np.unique(np.concatenate([plan.device for plan in plans]), return_inverse=True)
        mine, total = np.bincount(index, np.concatenate(work)), sum(shape.inner * shape.cells for shape in shapes)
        over = mine > share * total + sum(shape.inner * max(shape.rows, shape.columns) for shape in shapes)
        return devices[over], mine[over] / total

    def broken(self, requests: Sequence[Request], plans: Sequence[Plan], able: int) -> bool:
        """Whether the cap is exceeded. A strict cap applies to each product, one that yields to products ready
        together."""
        if not self.strict:
            return len(self.excess(requests, plans, able)[0]) > 0
        return any(len(self.excess([request], [plan], able)[0]) for request, plan in zip(requests, plans, strict=True))


NO_CAP = Cap(1.0)
YIELDING = Cap(settings.NOW.most_share)


def capped(
    cap: Cap,
    requests: Sequence[Request],
    plans: list[Plan],
    profiles: NDArray[np.void],
    able: Integers,
    solve: Solve,
    ends_s: Callable[[list[Plan]], float],
    beside: int = 0,
) -> list[Plan]:
    """The plans, or others that keep the cap. `solve` makes plans; `ends_s` gives how long they take. The last `beside`
    products are deferred: teams that were chosen for the whole pass compute them beside the others. Then the plans stay
    unchanged unless the cap is strict; if it is, such a team gets more devices."""
    yields = not cap.strict
    if cap.share >= 1.0 or len(able) < 2 or (yields and beside) or not cap.broken(requests, plans, len(able)):
        return plans
    if yields:
        latest_s = settings.NOW.later * ends_s(plans)

        def too_late(found: list[Plan]) -> bool:
            return ends_s(found) > latest_s

        found = _capped(cap, requests, plans, profiles, len(able), partial(solve, requests, able=able), too_late)
        return plans if too_late(found) else found
    found = []
    for number, (request, plan) in enumerate(zip(requests, plans, strict=True)):
        if plan.waits:
            found.append(plan)
            continue
        devices = able if number < len(requests) - beside else _larger(plan.device, able, profiles, cap)
        found += _capped(cap, [request], [plan], profiles, len(able), partial(solve, [request], able=devices))
    return found


def keeps(cap: Cap, requests: Sequence[Request], plans: list[Plan], able: int) -> bool:
    """Whether repaired plans may stay."""
    return not cap.strict or cap.share >= 1.0 or able < 2 or not cap.broken(requests, plans, able)


def _capped(
    cap: Cap,
    requests: Sequence[Request],
    plans: list[Plan],
    profiles: NDArray[np.void],
    able: int,
    solve: Callable[[NDArray[np.void]], list[Plan]],
    give_up: Callable[[list[Plan]], bool] = lambda _: False,
) -> list[Plan]:
    """Plans within the cap; if there are none, those nearest to it: other devices may not have the memory, or there are
    too few rows. Plans for which `give_up` holds are returned at once: those nearer to the cap end even later."""
    best, best_part = plans, np.inf
    # a claim may be any number: a device counts as at most `able` times as fast as all others together
    slower, most = profiles.copy(), max(cap.share, 1.0 / able)
    for _ in range(12):  # each brings a device's part nearer to the cap
        devices, parts = cap.excess(requests, plans, able)
        largest = float(parts.max(initial=0.0))
        if largest < best_part:
            best, best_part = plans, largest
        if not len(devices):
            break
        # if parts were proportional to rates, a device slowed by this factor would get a little less than its cap:
        # whole rows and columns are dealt
        parts = np.minimum(parts, able / (1 + able))
        factor = most * (1 - parts) / (parts * (1 - most)) / settings.NOW.slack
        for rate in ("flops", "down_bps", "up_bps"):
            others = able * np.delete(profiles[rate], devices).sum()
            slower[rate][devices] = np.maximum(1.0, np.minimum(slower[rate][devices], others) * factor)
        try:
            made = solve(slower)
        except PlanError:
            break
        plans = [_with_times(plan, request, profiles) for request, plan in zip(requests, made, strict=True)]
        if give_up(plans):
            return plans
    return best


def _with_times(plan: Plan, request: Request, profiles: NDArray[np.void]) -> Plan:
    """The same blocks, with end times for the devices as they are."""
    assert plan.chunks is not None, "plans of the planner know their chunks"
    made = ended_plan(plan.boxes, plan.device, plan.fresh, plan.chunks, request.shape, profiles)
    return replace(made, firm=plan.firm)


def _larger(team: Integers, able: Integers, profiles: NDArray[np.void], cap: Cap) -> Integers:
    """A team that is large enough for the cap, filled up with the devices that the critical path misses least: those
    with the slowest lines."""
    team = np.unique(team)
    others = np.setdiff1d(able, team, assume_unique=True)
    others = others[np.argsort(profiles["down_bps"][others], kind="stable")]
    more = max(0, int(np.ceil(settings.NOW.cap_team / cap.share)) - len(team))
    return np.sort(np.concatenate([team, others[:more]]))
