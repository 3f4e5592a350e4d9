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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.cost import Integers, Numbers
from ps.planning.pipeline import made_plan
from ps.planning.plans import Plan, PlanError, Request

Solve = Callable[[Sequence[Request], NDArray[np.void], Integers], list[Plan]]


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
) -> list[Plan]:
    """The plans, or others that keep the cap. `solve` makes plans; `ends_s` gives how long they take."""
    if cap.share >= 1.0 or len(able) < 2:
        return plans
    if not cap.strict:
        latest_s = settings.NOW.later * ends_s(plans)
        found = _capped(cap, requests, plans, profiles, able, solve, lambda made: ends_s(made) > latest_s)
        return plans if ends_s(found) > latest_s else found
    return [
        plan if plan.waits else _capped(cap, [request], [plan], profiles, able, solve)[0]
        for request, plan in zip(requests, plans, strict=True)
    ]


def _capped(
    cap: Cap,
    requests: Sequence[Request],
    plans: list[Plan],
    profiles: NDArray[np.void],
    able: Integers,
    solve: Solve,
    give_up: Callable[[list[Plan]], bool] = lambda _: False,
) -> list[Plan]:
    """Plans within the cap; if there are none, those nearest to it: other devices may not have the memory, or there are
    too few rows. Plans for which `give_up` holds are returned at once: those nearer to the cap end even later."""
    best, best_part, count = plans, np.inf, len(able)
    # a claim may be any number: a device counts as at most `count` times as fast as all others together
    slower, most = profiles.copy(), max(cap.share, 1.0 / count)
    for _ in range(12):  # each brings a device's part nearer to the cap
        devices, parts = cap.excess(requests, plans, count)
        largest = float(parts.max(initial=0.0))
        if largest < best_part:
            best, best_part = plans, largest
        if not len(devices):
            break
        # if parts were proportional to rates, a device slowed by this factor would get a little less than its cap:
        # whole rows and columns are dealt
        parts = np.minimum(parts, count / (1 + count))
        factor = most * (1 - parts) / (parts * (1 - most)) / settings.NOW.slack
        for rate in ("flops", "down_bps", "up_bps"):
            others = count * np.delete(profiles[rate], devices).sum()
            slower[rate][devices] = np.maximum(1.0, np.minimum(slower[rate][devices], others) * factor)
        try:
            made = solve(requests, slower, able)
        except PlanError:
            break
        plans = [made_plan(p.boxes, p.device, r.shape, profiles) for r, p in zip(requests, made, strict=True)]
        if give_up(plans):
            return plans
    return best
