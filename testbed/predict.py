"""How long a step should take, said before it is taken: the first steps on a modelled fleet, in virtual time.

What the server computes itself takes the time it takes here, on a scaled clock so many times less; products take the
time that the model says, and their values are computed at once, off the clock. What is left out is the work of the
host: packing, sockets, pods.

Lines have chance, seeded: step by step a modelled device has the luck that its emulated twin will have. Steps differ by
that, so a run is compared with several, of which, as of its own, the first counts only where there is no other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from emulator.link import Links
from emulator.performance import Models
from ps.executor import Executor, Spent
from ps.jobs import Product
from ps.operands import Operand
from ps.planner import NONE_BUSY, NONE_REVISED, Integers, Level, Plan, Planner, Question, Request, without
from testbed.virtual_server import VirtualServer

FORESEEN = 5  # steps of a run, at most
ALIKE = 0.01  # steps that differ by less from the one before need no more of them


@dataclass(frozen=True, slots=True)
class Prediction:
    seconds: float  # of a step
    local_s: float  # of these, what the server computes itself

    @property
    def local_share(self) -> float:
        return self.local_s / max(self.seconds, 1e-9)


def settled(seconds: Sequence[float]) -> float:
    """What a step takes, of these: the median without the first, if there are others."""
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
) -> Prediction:
    """Modelled seconds of `step`, whose products go through `executor`, in a run of so many; without the `absent` ones
    of the devices. `models`: of devices that were measured; `local`: device time that a second of the executor's own
    work takes. The planner keeps the plans that it can use again."""
    fleet = ModelledFleet(profiles, planner, absent, links, models, local, arithmetic)
    real, executor.engine = executor.engine, fleet
    took: list[Prediction] = []
    try:
        while len(took) < min(steps, FORESEEN):
            begun_s, local_s = fleet.seconds(), fleet.local_s
            step()
            executor.weights_changed()
            took.append(Prediction(fleet.seconds() - begun_s, fleet.local_s - local_s))
            if len(took) > 1 and abs(took[-1].seconds / took[-2].seconds - 1) < ALIKE:
                break
        return Prediction(settled([one.seconds for one in took]), settled([one.local_s for one in took]))
    finally:
        executor.engine, executor.spent = real, Spent()


class ModelledFleet:
    """An executor's engine in virtual time, beside which the executor's own work takes time."""

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
        planning = Apart(planner, len(present), shared=bool((present == np.arange(len(present))).all()))
        self._server = VirtualServer(profiles, labels, planning, absent, arithmetic, links=links, models=models)
        self._local, self.local_s = local, 0.0
        self._left = time.perf_counter()  # when the executor went on with its own work

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


class Apart(Planner):
    """Plans for the fleet as it is come from the run's planner, which will use them again. What becomes of them when
    modelled devices are late stays here: the run begins as the prediction did, knowing nothing of it. `shared`: devices
    have the same numbers here as in the run, since nobody before them is absent."""

    def __init__(self, planner: Planner, devices: int, shared: bool = True) -> None:
        super().__init__(planner.kind)
        self._run, self._devices, self._shared = planner, devices, shared

    def plan(
        self,
        requests: Sequence[Request] | Question,
        profiles: NDArray[np.void],
        able: Integers,
        revised: Mapping[int, int] = NONE_REVISED,
        busy: Integers = NONE_BUSY,
    ) -> list[Plan]:
        question = Question.of(requests)
        if self._shared and len(able) == self._devices and not revised and not self.knows(question):
            plans = self._run.plan(question, profiles, able, busy=busy)
            self.remember(question, without(able, busy), plans)
        return super().plan(question, profiles, able, revised, busy)
