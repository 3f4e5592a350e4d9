"""How long a step should take, said before it is taken: the step on a modelled fleet, in virtual time.

What the server computes itself takes the time it takes here, on a scaled clock so many times less; products take the
time that the model says, and their values are computed at once, off the clock. What is left out is the work of the
host: packing, sockets, pods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from emulator.link import Links
from emulator.performance import Models
from ps.executor import Executor, Spent
from ps.jobs import Product
from ps.operands import Operand
from ps.planner import Planner
from testbed.virtual_server import VirtualServer


@dataclass(frozen=True, slots=True)
class Prediction:
    seconds: float
    local_s: float  # of these, what the server computes itself

    @property
    def local_share(self) -> float:
        return self.local_s / max(self.seconds, 1e-9)


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
) -> Prediction:
    """Modelled seconds of `step`, whose products go through `executor`; without the `absent` ones of the devices.
    `models`: of devices that were measured; `local`: device time that a second of the executor's own work takes."""
    fleet = ModelledFleet(profiles, planner, absent, links, models, local, arithmetic)
    real, executor.engine = executor.engine, fleet
    try:
        step()
        executor.weights_changed()
        return Prediction(fleet.seconds(), fleet.local_s)
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
        self._server = VirtualServer(profiles, labels, planner, absent, arithmetic, links=links, models=models)
        self._local, self.local_s = local, 0.0
        self._left = time.perf_counter()  # when the executor went on with its own work

    def seconds(self) -> float:
        self._enter()
        self._left = time.perf_counter()
        return self._server.clock.now_s

    def submit(self, *products: Product) -> None:
        self._enter()
        self._server.submit(*products)
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
