"""Predicts the time of a step before the run: the first steps on a modelled fleet, in virtual time.

The server's own computation takes its real time here, divided by the scale on a scaled clock. Products take their
modelled time; their values are computed at once, off the clock. The host's work is left out: packing, sockets, pods.

Links are random but seeded: in each step a modelled device draws the same numbers as its emulated twin will. Steps
still differ from each other, so a run is compared with several predicted steps; as in the run itself, the first step
counts only if it is the only one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from emulator.model.link import Links
from emulator.model.performance import Models
from ps.graph.executor import Executor
from ps.planning.cost import Integers
from ps.planning.planner import NONE_BUSY, Planner, Question, without
from ps.planning.plans import Level, Plan, Request
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.virtual.server import VirtualServer

FORESEEN = 5  # steps predicted per run, at most
ALIKE = 0.01  # stop once a step's time differs by less than this share from the previous one

SHARE = 0.2  # of the run's time that its prediction may take, ...
LEAST_S = 10.0  # ... or this long


@dataclass(frozen=True, slots=True)
class Prediction:
    seconds: float  # per step
    steps: int  # that were predicted


def settled(seconds: Sequence[float]) -> float:
    """Typical step time: the median without the first step, if there are others."""
    return statistics.median(seconds[1:] or seconds)


def predict_step(
    executor: Executor,
    step: Callable[[], object],
    profiles: NDArray[np.void],
    planner: Planner,
    absent: Sequence[int] = (),
    links: Links | None = None,
    models: Models | None = None,
    local: float = 1.0,
    arithmetic: bool = True,
    steps: int = 1,
    now_s: Callable[[], float] = time.monotonic,
) -> Prediction:
    """Modelled seconds of `step`, whose products go through `executor`, in a run of `steps` steps, without the `absent`
    devices. `models`: models of the measured devices; `local`: device time per second of the executor's own work. The
    planner keeps the plans that it can reuse: the first predicted step makes those of the run. Others are predicted
    only while the whole takes at most SHARE of the run's time, or LEAST_S. In a virtual run (`local` is 0) there is no
    such limit: what it predicts may not depend on the host's speed."""
    fleet = ModelledFleet(profiles, planner, absent, links, models, local, arithmetic)
    took: list[float] = []
    began_s = now_s()
    with executor.on(fleet):
        while len(took) < min(steps, FORESEEN):
            begun_s, host_s = fleet.seconds(), now_s()
            step()
            executor.weights_changed()
            took.append(fleet.seconds() - begun_s)
            if len(took) > 1 and abs(took[-1] / took[-2] - 1) < ALIKE:
                break
            run_s = steps * took[-1] / local if local else math.inf  # in the host's time
            if now_s() - began_s + now_s() - host_s > max(LEAST_S, SHARE * run_s):
                break
    return Prediction(settled(took), len(took))


class ModelledFleet:
    """An executor's engine in virtual time in which the executor's own work also takes time."""

    def __init__(
        self,
        profiles: NDArray[np.void],
        planner: Planner,
        absent: Sequence[int] = (),
        links: Links | None = None,
        models: Models | None = None,
        local: float = 1.0,
        arithmetic: bool = True,
    ) -> None:
        labels = [""] * len(profiles)
        present = np.setdiff1d(np.arange(len(profiles)), np.asarray(absent, np.int64))
        planning = PredictionPlanner(planner, len(present), shared=bool((present == np.arange(len(present))).all()))
        self._server = VirtualServer(profiles, labels, planning, absent, arithmetic, links=links, models=models)
        self._local, self.local_s = local, 0.0
        self._left = time.perf_counter()  # when the executor resumed its own work

    def seconds(self) -> float:
        self._enter()
        self._left = time.perf_counter()
        return self._server.clock.now_s

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        self._enter()
        self._server.submit(*products, ahead=ahead)
        self._left = time.perf_counter()

    def forget(self, operands: Sequence[Operand]) -> None:
        self._enter()
        self._server.forget(operands)
        self._left = time.perf_counter()

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        self._enter()
        finished = self._server.collect(done)
        self._left = time.perf_counter()
        return finished

    def _enter(self) -> None:
        spent_s = self._local * (time.perf_counter() - self._left)
        self.local_s += spent_s
        self._server.clock.jump(self._server.clock.now_s + spent_s)


class PredictionPlanner(Planner):
    """Takes plans for the current fleet from the run's planner, which will reuse them. Revisions for late modelled
    devices stay here, so that the run starts without them, as the prediction did. `shared`: devices have the same
    numbers here as in the run, because no device is absent before them."""

    def __init__(self, planner: Planner, devices: int, shared: bool = True) -> None:
        super().__init__(planner.kind, planner.cap)
        self._run, self._devices, self._shared = planner, devices, shared

    def plan(
        self,
        requests: Sequence[Request] | Question,
        profiles: NDArray[np.void],
        able: Integers,
        revision: int = 0,
        busy: Integers = NONE_BUSY,
    ) -> list[Plan]:
        question = Question.of(requests)
        if self._shared and len(able) == self._devices and not revision and not self.knows(question):
            plans = self._run.plan(question, profiles, able, busy=busy)
            self.remember(question, without(able, busy), plans, profiles)
        return super().plan(question, profiles, able, revision, busy)
