"""Planning time: tilings of `cleave plan`, plans of the running system, and a plan after the loss of a device.

Figures are medians: a busy moment of the machine affects some of the passes, not most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.model.fleet import uniform_fleet
from ps.graph.models import model_config
from ps.graph.products import step_products
from ps.planning.packing import packed, streaming_model
from ps.planning.planner import Planner, without_the_lost
from ps.planning.plans import Request, Shape

MODEL, BATCH, SEQUENCE = "opt-13b", 128, 1024
FLEETS = ("paper", "extreme")
SIZES = (1024, 8192)
BYTES_PER_VALUE = 2  # as the authors count


def measure(passes: int = 5) -> dict[str, Any]:
    """Seconds, for the worst product of each kind; with the figures of all products."""
    shapes = list(step_products(model_config(MODEL), BATCH, SEQUENCE))
    result: dict[str, Any] = {"model": MODEL, "products": len(shapes), "passes": passes}
    for count in SIZES:
        all_s = {
            f"{fleet}: {_name(shape)}": _tile_s(fleet, count, shape, passes) for fleet in FLEETS for shape in shapes
        }
        result[f"box_{count}_s"], result[f"box_{count}_all_s"] = max(all_s.values()), all_s
    cold, lost = {}, {}
    for fleet in FLEETS:
        for shape in shapes:
            name = f"{fleet}: {_name(shape)}"
            cold[name], lost[name] = _plan_s(fleet, SIZES[0], shape, passes)
    planner, profiles, able = Planner(), uniform_fleet("paper", SIZES[0], seed=0), np.arange(SIZES[0])
    again = _median_s(lambda: planner.plan([Request(shapes[0])], profiles, able), passes + 1)
    return result | {
        "plan_s": max(cold.values()),
        "plan_all_s": cold,
        "adapt_s": max(lost.values()),
        "adapt_all_s": lost,
        "kept_s": again,
    }


def _name(shape: Shape) -> str:
    return f"{shape.batch} of {shape.rows}x{shape.inner}x{shape.columns}"


def _tile_s(fleet: str, count: int, shape: Shape, passes: int) -> float:
    model = streaming_model(uniform_fleet(fleet, count, seed=0), shape.inner, BYTES_PER_VALUE)
    return _median_s(lambda: packed((model, model), shape.batch, shape.rows, shape.columns), passes)


def _plan_s(fleet: str, count: int, shape: Shape, passes: int) -> tuple[float, float]:
    """Seconds to make a new plan as the running system does, and to repair it after the loss of one device."""
    profiles, able, request = uniform_fleet(fleet, count, seed=0), np.arange(count), Request(shape)
    (plan,) = Planner().plan([request], profiles, able)
    lost = plan.device[[len(plan.device) // 2]]
    left = np.delete(able, lost)
    return (
        _median_s(lambda: Planner().plan([request], profiles, able), passes),
        _median_s(lambda: without_the_lost([plan], [request], profiles, left), 5 * passes),  # takes only milliseconds
    )


def _median_s(call: Callable[[], object], passes: int) -> float:
    seconds = []
    for _ in range(passes):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
