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

import torch
from rich.console import Console

from agent.protocol.clock import ScaledClock
from agent.protocol.errors import Failure
from emulator.model import fidelity
from ps.graph.executor import Engine
from ps.graph.models import model_config
from ps.graph.text import batches, read_text
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
from testbed.runs.training import Captured, captured
from testbed.virtual.predict import ModelledFleet

LIMIT_S = 15.0  # per trial, for its steps


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


class SharedPlans:
    """Plans of one fleet, for several servers. Devices get their numbers in the order in which their pods join; plans
    are of use only where the order is the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Planner] = {}

    def bring(self, planner: Planner, labels: Sequence[str]) -> None:
        if (known := self._known.get(tuple(labels))) is not None:
            planner.adopt(known)

    def keep(self, planner: Planner, labels: Sequence[str]) -> None:
        """A copy: in the steps to come the planner learns which devices are late."""
        kept = Planner(planner.kind, planner.cap)
        kept.adopt(planner)
        self._known[tuple(labels)] = kept


class TrialStep:
    def __init__(self, scenario: Scenario, captured: Captured | None = None, plans: SharedPlans | None = None) -> None:
        """Captures the step, which takes a few seconds, unless that was done before. `plans`: of the same fleet."""
        self._scenario, self._plans = scenario, plans or SharedPlans()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
        self._captured = captured or capture(scenario)

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
            modelled = ModelledFleet(host.server.profiles, planner, (), links, models, 1.0 / scale, arithmetic=False)
            self._plans.bring(planner, labels)
            expected = self._taken(modelled, modelled.seconds)  # makes the plans, too
            self._plans.keep(planner, labels)
            pids = [os.getpid(), *host.pods.pids]
            before = look(pids, host.server.totals, time.monotonic())
            with collecting_between_steps():
                begun_s = time.monotonic()
                achieved = self._taken(host.server, lambda: host.clock.now_ns() / 1e9, limit_s)
                left_s = limit_s - (time.monotonic() - begun_s)
                if len(achieved) == len(expected) and left_s > 0:  # a run does not count its first step either
                    expected = self._taken(modelled, modelled.seconds)
                    achieved = self._taken(host.server, lambda: host.clock.now_ns() / 1e9, left_s)
            after = look(pids, host.server.totals, time.monotonic())
        columns = host.server.records.columns()
        return fidelity.judge(
            columns["sent_s"],
            columns["due_s"],
            columns["received_s"],
            columns["left_s"],
            achieved[-1] / expected[len(achieved) - 1] if achieved else None,
            between(before, after, host.server.totals.longest_turn_s),
            kernel_links=asked.links.kind == "kernel",
            scale=scale,
        )

    def _taken(self, engine: Engine, now_s: Callable[[], float], limit_s: float = float("inf")) -> list[float]:
        """When each product of the step was finished, as far as the step got."""
        watched = WatchedEngine(engine, now_s, limit_s)
        executor = self._captured.executor
        with executor.on(watched):
            try:
                self._captured.step()
                executor.weights_changed()
            except _Over:
                executor.forget_kept()
                self._captured.model.zero_grad()
        return watched.finished_s


class Probes:
    """Trial steps of a scenario's own fleet at several scales, for `clock.kind = "auto"`."""

    def __init__(self, scenario: Scenario, display: Display) -> None:
        self._scenario, self._display = scenario, display
        self.captured: Captured | None = None  # for the first probe; the run can use it, and the plans
        self.plans = SharedPlans()

    def __call__(self, scale: float, left_s: float) -> fidelity.Fidelity:
        if self.captured is None:
            self.captured = capture(self._scenario, self._display)
        trial, begun_s = TrialStep(self._scenario, self.captured, self.plans), time.monotonic()
        with self._display.phase(
            f"clock: a step at {scale:g}x, to see whether this host keeps up",
            lambda: min(1.0, (time.monotonic() - begun_s) / (2 * LIMIT_S)),
            lambda: f"at most {left_s:.0f} s for all of them",
        ):
            return trial.measure(self._scenario.fleet.devices, scale, min(LIMIT_S, max(1.0, left_s)))


def capture(scenario: Scenario, display: Display | None = None) -> Captured:
    config = model_config(scenario.model.name, Path(scenario.model.config) if scenario.model.config else None)
    data = scenario.data
    (tokens,) = batches(read_text(data.text), 1, data.batch, data.sequence, scenario.seed)
    return captured(scenario, config, tokens, display or Display(Console(quiet=True)))
