"""The fixed set: the runs by which a change of planning or scheduling is judged, in virtual time, shapes only.

Each case gives one figure in seconds per seed. Virtual time depends only on the case and the seed, so figures can be
compared across machines and commits to the last digit.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps.graph.executor import Executor
from ps.graph.models import model_config
from ps.graph.products import step_products
from ps.graph.shapes import ShapesProgram, step_shapes
from ps.planning.planner import Planner
from testbed.faults.inject import Injector, churn_schedule, plan_faults
from testbed.runs.fleets import make_fleet
from testbed.runs.hosts import Place, virtual_server
from testbed.runs.scenario import Fault, Scenario, load_scenario
from testbed.runs.training import begins_early
from testbed.virtual.pods import VirtualPods
from testbed.virtual.recovery import simulate

SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Case:
    """A training run: the median of its steps without the first, or their mean if devices come, go or change."""

    scenario: str
    steps: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[Mapping[str, Any]] = ()

    def seconds(self, seed: int) -> float:
        overrides = {"clock.kind": "virtual", "clock.arithmetic": "false", "seed": str(seed), **self.overrides}
        scenario = load_scenario(self.scenario, overrides | {"training.steps": str(self.steps)})
        scenario = scenario.model_copy(
            update={"faults": [*scenario.faults, *(Fault.model_validate(fault) for fault in self.faults)]}
        )
        seconds = virtual_steps(scenario)
        disturbed = scenario.faults or scenario.churn
        return statistics.fmean(seconds) if disturbed else statistics.median(seconds[1:] or seconds)


@dataclass(frozen=True, slots=True)
class Failures:
    """Devices fail in the middle of a product: seconds until their blocks are back, median over moments, mean over the
    numbers of failures; as in `cleave recovery`."""

    model: str
    fleet: str
    devices: int
    failures: Sequence[int]
    trials: int

    def seconds(self, seed: int) -> float:
        from testbed.virtual.plan import fleet_profiles

        products = step_products(model_config(self.model), 128, 1024)
        profiles = fleet_profiles(self.fleet, self.devices, seed)
        trials = simulate(products, profiles, self.failures, self.trials, seed)[0]
        medians = []
        for failures in self.failures:
            mine = [trial for trial in trials if trial.failures == failures]
            order = np.argsort([trial.recovery_s for trial in mine], kind="stable")
            weight = np.cumsum(np.array([trial.weight for trial in mine])[order])
            medians.append(mine[int(order[np.searchsorted(weight, 0.5 * weight[-1])])].recovery_s)
        return statistics.fmean(medians)


CASES: dict[str, Case | Failures] = {
    "quickstart": Case("quickstart", 2),
    "16 devices": Case("quickstart", 3, {"fleet.devices": "16", "fleet.line_share": "0.25"}),
    "4,000 devices": Case("quickstart", 2, {"fleet.devices": "4000"}),
    "extreme": Case("quickstart", 3, {"fleet.uniform": "extreme", "fleet.devices": "256"}),
    "churn": Case("churn", 4),
    "10% slow": Case("quickstart", 3, faults=[{"at": "0 s", "do": "slow", "share": "10%", "factor": 10.0}]),
    "recovery": Failures("opt-1.3b", "paper", 256, (1, 5), 1),
}


def virtual_steps(scenario: Scenario, planner: Planner | None = None) -> list[float]:
    """Virtual seconds of each step of this scenario."""
    fleet = make_fleet(scenario.fleet, scenario.links, scenario.seed)
    pods = 2  # faults of whole pods aside, their number has no effect
    churn = churn_schedule(scenario.churn, len(fleet), scenario.seed) if scenario.churn else None
    absent: list[int] = [] if churn is None else np.flatnonzero(~churn.present).tolist()
    planner = planner or Planner(scenario.planner.kind, scenario.planner.cap)
    server = virtual_server(Place(scenario, fleet, pods, absent, planner))
    faults = plan_faults(scenario.faults, fleet.network_names, pods, scenario.seed)
    how = scenario.churn.how if scenario.churn else ""
    injector = Injector(VirtualPods(server, pods), faults, churn, how, lambda *_, **__: None)
    programs = recorded(scenario.model.name or "", scenario.data.batch, scenario.data.sequence)
    executor = Executor(server, early=begins_early(scenario))
    seconds = []
    with server.injecting(injector):
        for number in range(1, scenario.training.steps + 1):
            executor.step, begun_s = number, server.clock.now_s
            for program in programs:
                executor.run_shapes(program)
            seconds.append(server.clock.now_s - begun_s)
    return seconds


@functools.cache
def recorded(model: str, batch: int, sequence: int) -> list[ShapesProgram]:
    return step_shapes(model_config(model), batch, sequence)[0]


def run_set(names: Sequence[str], seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds of each case, one per seed."""
    told: dict[str, list[float]] = {}
    for name in names:
        told[name] = [CASES[name].seconds(seed) for seed in seeds]
        say(f"{name}: {' '.join(f'{seconds:.4f}' for seconds in told[name])}")
    return told
