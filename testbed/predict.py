"""How long a step should take, said before it is taken: the step on a modelled fleet.

The real executor, dispatcher and planner, the emulated devices' own model, virtual time: no sockets, no waiting.
What the server computes itself takes the time it takes here; products take the time that the model says, and their
values are computed at once, off the clock. What is left out is the work of the host: packing, sockets, pods.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from agent.errors import Failure
from emulator.device import Devices
from emulator.link import Links
from emulator.performance import Models
from ps.dispatcher import Dispatcher
from ps.events import (
    BlocksReturned,
    DevicesJoined,
    DevicesLeft,
    Event,
    JobFinished,
    JobsSubmitted,
    JobWaits,
    OperandsForgotten,
    SendBlocks,
    Submission,
)
from ps.executor import Executor, Spent
from ps.jobs import Product
from ps.operands import Operand
from ps.planner import Planner
from testbed.virtual import block_parts

TOGETHER_S = 0.0005  # answers this near to each other are one event, as they are in a pod


def predict_step(
    executor: Executor,
    step: Callable[[], object],
    profiles: NDArray[np.void],
    planner: Planner,
    absent: Sequence[int] = (),
    links: Links | None = None,
    models: Models | None = None,
) -> float:
    """Modelled seconds of `step`, whose products go through `executor`; without the `absent` ones of the devices.
    `models`: of devices that were measured."""
    fleet = ModelledFleet(profiles, planner, absent, links, models)
    real, executor.engine = executor.engine, fleet
    try:
        step()
        executor.weights_changed()
        return fleet.seconds()
    finally:
        executor.engine, executor.spent = real, Spent()


class ModelledFleet:
    """An executor's engine in virtual time."""

    def __init__(
        self,
        profiles: NDArray[np.void],
        planner: Planner,
        absent: Sequence[int] = (),
        links: Links | None = None,
        models: Models | None = None,
    ) -> None:
        self._dispatcher = Dispatcher(planner)
        self._dispatcher.handle(DevicesJoined(0, profiles))
        self._dispatcher.handle(DevicesLeft(list(absent)))
        self._devices = Devices(profiles, links, models)
        self._products: dict[int, Product] = {}
        self._answers: list[tuple[float, int, int, int, int]] = []  # heap: due, sequence, device, job, block
        self._ids, self._sequence = itertools.count(), itertools.count()
        self._now_s = 0.0
        self._left = time.perf_counter()  # when the executor went on with its own work, which takes real time

    def seconds(self) -> float:
        self._enter()
        self._left = time.perf_counter()
        return self._now_s

    def submit(self, *products: Product) -> None:
        self._enter()
        numbered = {next(self._ids): product for product in products}
        self._products |= numbered
        self._handle(
            JobsSubmitted([Submission(job, p.request, p.urgent, p.plan, p.kept) for job, p in numbered.items()])
        )
        for product in products:
            np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)
        self._left = time.perf_counter()

    def forget(self, operands: Sequence[Operand]) -> None:
        self._enter()
        self._handle(OperandsForgotten([operand.id for operand in operands]))
        self._left = time.perf_counter()

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        self._enter()
        while done.empty():
            if not self._answers:
                raise Failure("the modelled fleet has nothing to do, and products are not finished")
            until_s = self._answers[0][0] + TOGETHER_S
            batch = []
            while self._answers and self._answers[0][0] <= until_s:
                batch.append(heapq.heappop(self._answers))
            self._now_s = max(self._now_s, batch[-1][0])
            _, _, devices, jobs, blocks = zip(*batch, strict=True)
            self._handle(BlocksReturned(list(devices), list(jobs), list(blocks)))
        finished = []
        while not done.empty():
            finished.append(done.get())
        self._left = time.perf_counter()
        return finished

    def _enter(self) -> None:
        self._now_s += time.perf_counter() - self._left

    def _handle(self, event: Event) -> None:
        for instruction in self._dispatcher.handle(event, self._now_s):
            match instruction:
                case SendBlocks():
                    self._send(instruction)
                case JobFinished(job=job):
                    self._products.pop(job).done()
                case JobWaits(reason=reason):
                    raise Failure(f"the fleet cannot do this step: {reason}")

    def _send(self, blocks: SendBlocks) -> None:
        jobs = [self._dispatcher.jobs[job] for job in blocks.jobs]
        parts = [part for job, block in zip(jobs, blocks.blocks, strict=True) for part in block_parts(job, block)]
        table = np.array(parts, np.int64).reshape(-1, 7)
        down_bytes, up_bytes, count = table[:, :3].T
        device = np.repeat(np.array(blocks.devices), count[count > 0])
        due_s, _ = self._devices.schedule(self._now_s, device, down_bytes, table[:, 3:], up_bytes)
        last_s = due_s[up_bytes > 0].tolist()
        for due, key in zip(last_s, zip(blocks.devices, blocks.jobs, blocks.blocks, strict=True), strict=True):
            heapq.heappush(self._answers, (due, next(self._sequence), *key))
