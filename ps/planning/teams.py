"""Products on groups of devices, before they are cut: how much each device can do in a given time.

The running system's cost model (ps/planning/pipeline.py) says how many cells a device covers in a time, in rectangles
of its ideal shape. From that follow when a product could end, which devices are worth using, and how devices are dealt
to several products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.capacity import Areas, CostModel, least_span
from ps.planning.cost import Integers, Numbers
from ps.planning.packing import packed
from ps.planning.pipeline import Cuts, cut_boxes, cuts_within, made_plan, running_cost_models
from ps.planning.plans import Plan, Request
from ps.planning.sharing import able_devices, dealt


@dataclass(frozen=True, slots=True)
class Relaxation:
    request: Request
    index: Integers  # devices with enough memory
    cuts: Cuts
    cost_models: tuple[CostModel, CostModel]
    areas: Areas
    span_s: float  # when the product could end: an estimate, by the upright model and with every overhead, not a bound

    @classmethod
    def of(
        cls, request: Request, profiles: NDArray[np.void], names: Integers | None = None, until_s: float = 0.0
    ) -> Relaxation:
        """`names`: ids of the devices, instead of 0, 1, ...; `until_s`: the product need not end before."""
        shape = request.shape
        index = able_devices(shape, profiles)
        profiles = profiles[index]
        cuts = Cuts.none(len(index))
        cost_models = running_cost_models(profiles, request, cuts)
        areas = Areas(cost_models[0], shape.rows, shape.columns)
        span_s = areas.span_s(float(shape.cells))
        # now the size of the rectangles is known
        wanted = cuts_within(profiles, request, areas, max(settings.NOW.slack * span_s, until_s))
        if max(wanted.strips.max(), wanted.chunks.max()) > 1:
            cuts = wanted
            cost_models = running_cost_models(profiles, request, cuts)
            areas = Areas(cost_models[0], shape.rows, shape.columns)
            span_s = areas.span_s(float(shape.cells))
        return cls(request, index if names is None else names[index], cuts, cost_models, areas, span_s)

    def within(self, span_s: float) -> Numbers:
        return np.minimum(self.areas.within(span_s), float(self.request.shape.cells))

    def plan(self, profiles: NDArray[np.void], able: Integers, few: bool) -> Plan:
        """`few`: use as few devices as end within the slack of the best."""
        shape, chosen = self.request.shape, np.arange(len(self.index))
        if few:
            cells = self.areas.within(settings.NOW.slack * self.span_s)  # one device alone may do more than all
            ranking = np.argsort(-cells, kind="stable")
            enough = int(np.searchsorted(np.cumsum(cells[ranking]), shape.cells * settings.NOW.slack)) + 1
            chosen = np.sort(ranking[:enough])
        cost_models = [model.take(chosen) for model in self.cost_models]
        tiling = packed(cost_models, shape.batch, shape.rows, shape.columns)
        strips = self.cuts.strips[chosen[tiling.owner]]
        device = able[self.index[chosen[tiling.owner]]]
        return made_plan(*cut_boxes(tiling.boxes, device, strips, tiling.turned, shape, profiles), shape, profiles)


def deal(relaxations: list[Relaxation], harder: Numbers, count: int) -> list[Integers]:
    """Deal the devices, largest first, always to the product with the largest share missing, until all would end
    together within the slack of the best. Returns no teams if one product after another ends sooner."""
    needed = harder * [float(relaxation.request.shape.cells) for relaxation in relaxations]

    def cells(span_s: float) -> Numbers:
        table = np.zeros((len(relaxations), count))
        for row, relaxation in zip(table, relaxations, strict=True):
            row[relaxation.index] = relaxation.within(span_s)
        return table

    def enough(span_s: float) -> bool:
        total = cells(span_s).sum(axis=1)
        return bool((total > 0).all()) and float((needed / np.maximum(total, 1e-300)).sum()) <= 1

    if not enough(sum(relaxation.span_s for relaxation in relaxations)):
        return []
    span_s = least_span(enough, 0.0, max(relaxation.span_s for relaxation in relaxations), settings.NOW.precision)
    shares = cells(settings.NOW.slack * span_s) / (needed * settings.NOW.slack)[:, None]
    order = np.argsort(-shares.max(axis=0), kind="stable")
    return [np.sort(order[team]) for team in dealt(np.ones(len(relaxations)), shares[:, order])]
