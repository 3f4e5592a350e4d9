"""The training of a run: plain PyTorch for reference, then the same steps on a fleet; or only the shapes of the steps.

The same seeds, the same batches and the same loop train the model twice. "Shapes only" means the same graph without
values: products go through the same executor to the same fleet, everything else takes no time, and there is no loss.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from emulator.model.fidelity import HostLoad
from ps.graph.capture import distribute
from ps.graph.executor import Executor
from ps.graph.models import build_model
from ps.graph.shapes import step_shapes
from ps.graph.trainer import Step, gradients, train
from ps.planning.planner import Planner
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.faults.inject import Injector
from testbed.launch.processes import links_of, models_of
from testbed.models.comparison import Compared, StepComparison, every
from testbed.results.fleet_at_work import Begun
from testbed.runs import interrupts
from testbed.runs.collecting import collecting_between_steps
from testbed.runs.display import Display
from testbed.runs.hosts import Host, Note
from testbed.runs.load import Look, between, look
from testbed.runs.scenario import Scenario
from testbed.runs.watchdog import WaitedInVain
from testbed.virtual.predict import Prediction, predict_step


@dataclass(frozen=True, slots=True)
class Reference:
    steps: list[Step]
    weights: list[torch.Tensor]
    flops: int


@dataclass(frozen=True, slots=True)
class Trained:
    steps: list[Step]
    weights: list[torch.Tensor]  # without values if there are only shapes
    rows: list[dict[str, Any]]  # of steps.csv
    predicted: Prediction | None
    parameters: int
    products: int  # per step
    flops: int  # of all steps, by the captured graph
    host_s: float  # real seconds of all steps
    load: HostLoad
    begun: Begun  # state of the fleet at the first step
    compared: list[Compared]  # steps that plain PyTorch took from the same weights
    stopped: str = ""  # why there are fewer steps than requested


class NoDevices:
    """The engine of a step that is captured only: its products have nowhere to go."""

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        raise AssertionError("there is no fleet")

    def forget(self, operands: Sequence[Operand]) -> None: ...

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        raise AssertionError("there is no fleet")


@dataclass(frozen=True, slots=True)
class Captured:
    """A model whose step was captured; its products go where its executor's engine is."""

    model: torch.nn.Module
    forward: Callable[..., Any]
    executor: Executor
    step: Callable[[], None]  # forward and backward, without a change of the weights
    flops_per_step: int


@dataclass(slots=True)
class Task:
    """What is trained, and where."""

    scenario: Scenario
    config: Any
    data: list[torch.Tensor]
    host: Host
    planner: Planner
    injector: Injector
    display: Display
    note: Note
    local: float  # device seconds per second of the server's own work; 0: it takes no time
    captured: Captured | None = None  # if that was done before
    predicts: bool = True  # whether steps are compared with the modelled fleet's
    begun: float = 0.0  # real time
    done: list[Step] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)

    def now_s(self) -> float:
        return self.host.clock.now_ns() / 1e9

    def before_step(self, executor: Executor, number: int) -> None:
        interrupts.check()
        gc.collect()  # between steps, see `collecting_between_steps`
        if self.host.watch is not None and self.host.watch.error is not None:
            raise self.host.watch.error
        if self.injector.error is not None:
            raise self.injector.error
        executor.step = number
        executor.weights_changed()

    def after_step(self, step: Step) -> None:
        self.done.append(step)
        server, totals, count = self.host.server, self.host.server.totals, self.scenario.training.steps
        blocks = totals.blocks - sum(row["blocks"] for row in self.rows)
        loss = None if math.isnan(step.loss) else step.loss
        real = len(server.attendance.present)
        row = {
            "step": step.number,
            "loss": loss,
            "seconds": step.seconds,
            "devices": server.devices,
            "real_devices": real,
            "blocks": blocks,
            "bytes_down": totals.operand_bytes - sum(row["bytes_down"] for row in self.rows),
        }
        self.rows.append(row)
        told = f"loss {step.loss:.4f}" if self.scenario.clock.arithmetic else "no loss, shapes only"
        devices = f"{server.devices:,} devices" + (f", {real} of them real" if real else "")
        left_s = (time.monotonic() - self.begun) / step.number * (count - step.number)
        self.display.say(
            f"step {step.number} of {count}: {told}, {step.seconds:.2f} s, "
            f"{blocks:,} blocks, {devices}; {left_s:.0f} s left"
        )
        self.note("step", **row)

    def predicted(self, executor: Executor, step: Callable[[], object], arithmetic: bool) -> Prediction | None:
        """None if nothing is modelled, if it was not asked for, or if the run itself does no more than the prediction:
        an undisturbed run in virtual time."""
        asked = self.scenario
        undisturbed = asked.clock.kind == "virtual" and not (asked.faults or asked.churn)
        if asked.links.kind == "off" or not self.predicts or undisturbed:
            return None
        server = self.host.server
        with self.display.phase("planning the step, on the modelled fleet", lambda: 0.0, lambda: "virtual time"):
            real = server.attendance.real  # not part of the fleet, whatever their labels
            labels = ["" if device in real else label for device, label in enumerate(server.labels)]
            links, models = links_of(self.host.fleet, labels), models_of(self.host.fleet, labels)
            told = predict_step(
                executor,
                step,
                server.profiles,
                self.planner,
                server.absent,
                links,
                models,
                self.local,
                arithmetic,
                self.scenario.training.steps,
            )
        self.display.say(f"a step should take {told.seconds:.2f} s (modelled; {told.steps} predicted)")
        self.note("predicted", step_s=told.seconds)
        return told

    def _look(self) -> Look:
        return look([os.getpid(), *self.host.pods.pids], self.host.server.totals, time.monotonic())

    def carry_out(
        self,
        executor: Executor,
        weights: list[torch.Tensor],
        flops_per_step: int,
        predicted: Prediction | None,
        train: Callable[[], list[Step]],
    ) -> Trained:
        server, count = self.host.server, self.scenario.training.steps
        self.begun = time.monotonic()
        server.attendance.mark()
        if self.host.watch is not None:
            self.host.watch.stood_still_s.clear()  # only the steps count
        begun, stopped = Begun.of(server.attendance, len(server.suspended), len(self.host.pods.deaths)), ""
        with (
            self.display.phase(
                "training",
                lambda: min(1.0, server.totals.flops / (flops_per_step * count)),
                lambda: self._status(),
            ),
            self.host.injecting(self.injector) if self.scenario.faults or self.scenario.churn else nullcontext(),
            collecting_between_steps(),
        ):
            before = self._look()
            try:
                steps = train()
            except WaitedInVain as error:
                steps, stopped = list(self.done), f"stopped after step {len(self.done)} of {count}: {error}"
                self.display.say(stopped)
                self.note("stopped", reason=str(error))
            load = between(before, self._look(), server.totals.longest_turn_s)
        host_s = time.monotonic() - self.begun
        products = executor.spent.products // max(1, len(steps))
        return Trained(
            steps,
            weights,
            self.rows,
            predicted,
            parameters=sum(weight.numel() for weight in weights),
            products=products,
            flops=flops_per_step * count,
            host_s=host_s,
            load=load,
            begun=begun,
            compared=self.compared,
            stopped=stopped,
        )

    def _status(self) -> str:
        server, watch = self.host.server, self.host.watch
        devices = (watch.told if watch is not None else "") or f"{server.devices:,} devices"
        return f"step {len(self.done) + 1}, {server.totals.blocks:,} blocks, {devices}"


def _model(scenario: Scenario, config: Any) -> torch.nn.Module:
    torch.manual_seed(scenario.seed)
    model: torch.nn.Module = build_model(config)
    return model


def _settings(scenario: Scenario) -> dict[str, Any]:
    training = scenario.training
    return {
        "seed": scenario.seed,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "micro_batches": training.micro_batches,
    }


def reference(scenario: Scenario, config: Any, data: list[torch.Tensor], display: Display) -> Reference:
    """Plain PyTorch, its FLOPs counted by PyTorch's own counter."""
    model = _model(scenario, config)
    done: list[Step] = []
    counter = FlopCounterMode(display=False)
    with (
        display.phase("plain PyTorch, for reference", lambda: len(done) / len(data), lambda: f"step {len(done)}"),
        counter,
    ):
        steps = train(
            model,
            model,
            data,
            before_step=lambda number: interrupts.check(),
            after_step=done.append,
            **_settings(scenario),
        )
    display.say(f"plain PyTorch: loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f}, {len(steps)} steps")
    return Reference(steps, [p.detach() for p in model.parameters()], counter.get_total_flops())


def begins_early(scenario: Scenario) -> bool:
    """Whether weight gradients start early, beside the critical products."""
    return scenario.planner.kind == "packed"


def captured(scenario: Scenario, config: Any, tokens: torch.Tensor, display: Display) -> Captured:
    """The model of this scenario with its step captured."""
    model = _model(scenario, config)
    executor = Executor(NoDevices(), early=begins_early(scenario))
    forward = distribute(model, executor.run)
    micro_batches = scenario.training.micro_batches
    if scenario.planner.keep:
        executor.keep(model.parameters(), uses=micro_batches)

    def step() -> None:
        gradients(forward, tokens, micro_batches)
        model.zero_grad()

    with display.phase("capturing the step", lambda: 0.0, lambda: "torch.compile"):
        return Captured(model, forward, executor, step, executor.rehearse(step))


def distributed(task: Task) -> Trained:
    scenario, data = task.scenario, task.data
    made = task.captured or captured(scenario, task.config, data[0], task.display)
    model, executor = made.model, made.executor
    executor.engine = task.host.server
    predicted = task.predicted(executor, made.step, arithmetic=True)
    comparison = StepComparison(
        _model(scenario, task.config), model, every(scenario.training.steps), scenario.training.micro_batches
    )
    task.compared = comparison.compared

    def before_step(number: int) -> None:
        task.before_step(executor, number)
        comparison.before(number)

    return task.carry_out(
        executor,
        [p.detach() for p in model.parameters()],
        made.flops_per_step,
        predicted,
        lambda: train(
            model,
            made.forward,
            data,
            now_s=task.now_s,
            before_step=before_step,
            after_gradients=comparison.after_gradients,
            after_step=task.after_step,
            **_settings(scenario),
        ),
    )


def shapes_only(task: Task) -> Trained:
    scenario = task.scenario
    micro_batches = scenario.training.micro_batches
    with task.display.phase("capturing the step", lambda: 0.0, lambda: "shapes only"):
        programs, parameters = step_shapes(task.config, scenario.data.batch // micro_batches, scenario.data.sequence)
    executor = Executor(task.host.server, early=begins_early(scenario))
    if scenario.planner.keep:
        executor.keep(parameters, uses=micro_batches)

    def step() -> None:
        for _ in range(micro_batches):
            for program in programs:
                executor.run_shapes(program)

    def steps() -> list[Step]:
        for number in range(1, scenario.training.steps + 1):
            task.before_step(executor, number)
            begun_s = task.now_s()
            step()
            task.after_step(Step(number, math.nan, task.now_s() - begun_s))
        return task.done

    flops_per_step = micro_batches * sum(program.flops for program in programs)
    predicted = task.predicted(executor, step, arithmetic=False)
    return task.carry_out(executor, parameters, flops_per_step, predicted, steps)
