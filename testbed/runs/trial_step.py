"""Tests whether this host keeps up: one step of a scenario in real time, compared with the same step modelled.

The step is captured once. Each trial then starts its own server and pods, runs as much of the step as its time limit
allows, and judges it as a run is judged. Used by `cleave doctor` and `clock.kind = "auto"`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console

from agent.protocol.clock import ScaledClock
from agent.protocol.errors import Failure
from emulator.model import fidelity
from ps.graph.capture import distribute
from ps.graph.executor import Engine, Executor
from ps.graph.models import build_model, model_config
from ps.graph.text import batches, read_text
from ps.graph.trainer import gradients
from ps.planning.planner import Planner
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.launch.processes import links_of, models_of
from testbed.runs.collecting import collecting_between_steps
from testbed.runs.display import Display
from testbed.runs.fleets import make_fleet, pods_for
from testbed.runs.hosts import Place, launcher, on_pods, real_server
from testbed.runs.load import between, look
from testbed.runs.scenario import Scenario
from testbed.runs.training import begins_early
from testbed.virtual.predict import ModelledFleet

LIMIT_S = 15.0  # per trial


class _Over(Failure):
    """The trial has reached its time limit."""


class WatchedEngine:
    """An engine that records when each product was finished, and stops after a time limit."""

    def __init__(self, engine: Engine, now_s: Callable[[], float], limit_s: float = float("inf")) -> None:
        self._engine, self._now_s = engine, now_s
        self._until_s = time.monotonic() + limit_s
        self._begun_s = now_s()
        self.finished_s: list[float] = []  # one per product, since the start

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        self._engine.submit(*products, ahead=ahead)

    def forget(self, operands: Sequence[Operand]) -> None:
        self._engine.forget(operands)

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        finished = self._engine.collect(done)
        self.finished_s += [self._now_s() - self._begun_s] * len(finished)
        if time.monotonic() > self._until_s:
            raise _Over("the trial has seen enough")
        return finished


class TrialStep:
    def __init__(self, scenario: Scenario) -> None:
        """Captures the step, which takes a few seconds."""
        self._scenario = scenario
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // 2))
        config = model_config(scenario.model.name, Path(scenario.model.config) if scenario.model.config else None)
        data, training = scenario.data, scenario.training
        (tokens,) = batches(read_text(data.text), 1, data.batch, data.sequence, scenario.seed)
        torch.manual_seed(scenario.seed)
        model: Any = build_model(config)
        self._executor = Executor(_NoDevices(), early=begins_early(scenario))
        forward = distribute(model, self._executor.run)
        if scenario.planner.keep:
            self._executor.keep(model.parameters(), uses=training.micro_batches)

        def step() -> None:
            gradients(forward, tokens, training.micro_batches)
            model.zero_grad()

        self._step = step
        self._executor.rehearse(step)

    def measure(self, devices: int, scale: float = 1.0, limit_s: float = LIMIT_S) -> fidelity.Fidelity:
        """The scenario's step with this many devices, on a clock of this scale."""
        asked = self._scenario.model_copy(
            update={"fleet": self._scenario.fleet.model_copy(update={"devices": devices}), "faults": [], "churn": None}
        )
        fleet, planner = (
            make_fleet(asked.fleet, asked.links, asked.seed),
            Planner(asked.planner.kind, asked.planner.cap),
        )
        place = Place(asked, fleet, pods_for(asked.fleet, asked.launch), [], planner)
        clock = ScaledClock(scale)
        with ExitStack() as stack:
            launch = stack.enter_context(launcher(asked.launch, place.pod_count))
            server, display = real_server(place, clock, launch), Display(Console(quiet=True))
            host = stack.enter_context(on_pods(place, server, clock, display, lambda event, **fields: None, launch))
            # the server's numbering, not the fleet's: devices joined pod by pod, and plans use the server's numbers
            labels = host.server.labels
            links, models = links_of(fleet, labels), models_of(fleet, labels)
            modelled = ModelledFleet(host.server.profiles, planner, (), links, models, 1.0 / scale)
            first, second = (self._taken(modelled, modelled.seconds) for _ in range(2))  # their random numbers differ
            local_share = modelled.local_s / modelled.seconds()
            pids = [os.getpid(), *host.pods.pids]
            before = look(pids, host.server.totals, time.monotonic())
            with collecting_between_steps():
                expected, achieved = first, self._taken(host.server, lambda: host.clock.now_ns() / 1e9, limit_s)
                if len(achieved) == len(expected):  # a run does not count its first step either
                    expected, achieved = second, self._taken(host.server, lambda: host.clock.now_ns() / 1e9, limit_s)
            after = look(pids, host.server.totals, time.monotonic())
        columns = host.server.records.columns()
        return fidelity.judge(
            columns["sent_s"],
            columns["due_s"],
            columns["received_s"],
            columns["left_s"],
            achieved[-1] / expected[len(achieved) - 1],
            between(before, after, host.server.totals.longest_turn_s),
            local_share,
            kernel_links=asked.links.kind == "kernel",
        )

    def _taken(self, engine: Engine, now_s: Callable[[], float], limit_s: float = float("inf")) -> list[float]:
        """When each product of the step was finished, as far as the step got."""
        watched = WatchedEngine(engine, now_s, limit_s)
        with self._executor.on(watched):
            try:
                self._step()
                self._executor.weights_changed()
            except _Over:
                self._executor.forget_kept()
        return watched.finished_s


class _NoDevices:
    """Between two trials no product may be submitted."""

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        raise AssertionError("there is no fleet")

    def forget(self, operands: Sequence[Operand]) -> None: ...

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        raise AssertionError("there is no fleet")
