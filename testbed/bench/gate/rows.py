"""What the gate measures: each row is one part of the project next to a yardstick, in turn, in one run.

Smaller than the parts of `make bench`, so that all rows together take about a minute. Where other processes take part,
the best of many short passes of each counts: other programs of the machine only add time. Where one thread does the
work, processor time counts, which they hardly change.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emulator.model.fleet import uniform_fleet
from ps.planning.planner import Planner
from ps.planning.plans import Request, Shape
from testbed.bench import density, ours
from testbed.bench.gate.judge import Measured
from testbed.bench.yardsticks.interpreter import EVENTS, bare_process_bytes, events, processor_s, small_arrays
from testbed.bench.yardsticks.raw import RawWorkers, check
from testbed.bench.yardsticks.work import W1, W2, Matrix, Work, round_of

WORKERS = 2
ROUND_DEVICES = 1_000
PLANNED_DEVICES = 1_024
# OPT-13B, 128 x 1,024 tokens: projections, feed-forward, attention, and three products that are ready together
PLANNED = (
    (Shape(1, 131_072, 5_120, 5_120),),
    (Shape(1, 131_072, 5_120, 20_480),),
    (Shape(1, 131_072, 20_480, 5_120),),
    (Shape(5_120, 1_024, 128, 1_024),),
    (Shape(1, 5_120, 131_072, 20_480),),
    (Shape(1, 131_072, 5_120, 5_120),) * 3,
)
# A step of one layer of OPT-125M with a small vocabulary: like the whole model, bound by bytes as much as by products.
STEP_LAYERS, STEP_VOCABULARY, STEP_BATCH, STEP_SEQUENCE = 1, 1_024, 8, 64


def in_turn(ours_s: Callable[[], float], yardstick_s: Callable[[], float], passes: int) -> Measured:
    """The best pass of each; the first of each warms up and does not count."""
    seconds = [(ours_s(), yardstick_s()) for _ in range(passes + 1)][1:]
    mine, other = zip(*seconds, strict=True)
    return Measured(min(mine), min(other))


def _data_plane(work: Work, passes: int) -> Measured:
    """A product over two local agents, against raw ZeroMQ with two workers."""
    a, b = work.operands()
    with ours.agents(WORKERS) as server, RawWorkers(WORKERS) as workers:
        check(work, ours.multiply(server, work, a, b, ours.plan_over(work, WORKERS))[1], a, b)
        plan = ours.plan_over(work, WORKERS)
        return in_turn(lambda: ours.multiply(server, work, a, b, plan)[0], lambda: _raw_s(workers, work, a, b), passes)


def _raw_s(workers: RawWorkers, work: Work, a: Matrix, b: Matrix) -> float:
    begun = time.perf_counter()
    workers.multiply(work, a, b)
    return time.perf_counter() - begun


def w1() -> Measured:
    return _data_plane(W1, passes=7)


def w2() -> Measured:
    return _data_plane(W2, passes=40)


def w3() -> Measured:
    """A round of small blocks, one per emulated device, against raw ZeroMQ with two workers."""
    work = round_of(ROUND_DEVICES)
    a, b = work.operands()
    plan = ours.plan_over(work, ROUND_DEVICES)
    with (
        ours.emulated(ours.unlimited(ROUND_DEVICES), "off") as (server, _),
        RawWorkers(WORKERS) as workers,
    ):
        check(work, ours.multiply(server, work, a, b, plan)[1], a, b)
        return in_turn(
            lambda: ours.multiply(server, work, a, b, plan)[0], lambda: _raw_s(workers, work, a, b), passes=40
        )


def step() -> Measured:
    """A training step over two local agents, against plain PyTorch."""
    import torch

    from ps.graph.capture import distribute
    from ps.graph.executor import Executor
    from ps.graph.models import build_model, model_config
    from ps.graph.trainer import train

    config = copy.deepcopy(model_config("opt-125m"))
    config.num_hidden_layers, config.vocab_size = STEP_LAYERS, STEP_VOCABULARY
    torch.manual_seed(0)
    plain, distributed = build_model(config), build_model(config)
    distributed.load_state_dict(plain.state_dict())
    data = [torch.randint(STEP_VOCABULARY, (STEP_BATCH, STEP_SEQUENCE))]
    torch.set_num_threads(os.cpu_count() or 1)

    def step_s(model: torch.nn.Module, call: Callable[..., object]) -> float:
        (done,) = train(model, call, data, seed=0, learning_rate=1e-4, weight_decay=0.01)
        return done.seconds

    with ours.agents(WORKERS) as server:
        executor = Executor(server)
        forward = distribute(distributed, executor.run)
        executor.rehearse(lambda: forward(input_ids=data[0], labels=data[0]).loss.backward())
        distributed.zero_grad()
        return in_turn(lambda: step_s(distributed, forward), lambda: step_s(plain, plain), passes=7)


def planning() -> Measured:
    """New plans of the running system, against NumPy on arrays of the fleet's size."""
    profiles, able = uniform_fleet("paper", PLANNED_DEVICES, seed=0), np.arange(PLANNED_DEVICES)

    def plan() -> None:
        for shapes in PLANNED:
            Planner().plan([Request(shape) for shape in shapes], profiles, able)

    return in_turn(lambda: processor_s(plan), lambda: processor_s(small_arrays), passes=7)


def virtual() -> Measured:
    """A block of the quickstart in virtual time, shapes only, its plans known, against plain Python."""
    from ps.graph.executor import Executor
    from ps.graph.models import model_config
    from ps.graph.shapes import step_shapes
    from testbed.runs.fleets import make_fleet
    from testbed.runs.scenario import load_scenario
    from testbed.virtual.server import VirtualServer

    scenario = load_scenario("quickstart")
    fleet = make_fleet(scenario.fleet, scenario.links, scenario.seed)
    programs, _ = step_shapes(model_config(scenario.model.name), scenario.data.batch, scenario.data.sequence)
    planner = Planner()
    blocks = 0

    def a_step() -> None:
        nonlocal blocks
        server = VirtualServer(
            fleet.profiles, fleet.labels, planner, arithmetic=False, links=fleet.links, models=fleet.models
        )
        executor = Executor(server, early=True)
        for program in programs:
            executor.run_shapes(program)
        blocks = server.totals.blocks

    found = in_turn(lambda: processor_s(a_step), lambda: processor_s(events), passes=4)
    per_event_s = found.yardstick / EVENTS
    return Measured(1e6 * found.ours / blocks, 1e6 * per_event_s, "us", f"{blocks / found.ours:,.0f} blocks/s")


def pods(devices: int = 4_000) -> dict[str, Measured]:
    """Pods of 4,000 devices at 2,000 blocks per second: processor time per block against plain Python, and memory
    against processes that have imported NumPy and pyzmq and do nothing."""
    yardstick_s = min(processor_s(events) for _ in range(3))
    found = density.measure(devices, passes=2)
    yardstick_s = min(yardstick_s, *(processor_s(events) for _ in range(3)))
    bare_bytes = (os.cpu_count() or 1) * bare_process_bytes()
    return {
        "pod time": Measured(1e6 * found["pods_cpu_s_per_block"], 1e6 * yardstick_s / EVENTS, "us", "per block"),
        "pod memory": Measured(found["pods_memory_bytes"] / 2**20, bare_bytes / 2**20, "MiB", f"{devices:,} devices"),
    }


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are measured together."""

    rows: tuple[str, ...]
    yardstick: str
    takes_s: int  # about, on two cores, for the time left
    measure: Callable[[], dict[str, Measured]]


def _one(row: str, yardstick: str, takes_s: int, measure: Callable[[], Measured]) -> Part:
    return Part((row,), yardstick, takes_s, lambda: {row: measure()})


PARTS = (
    _one("W1", "raw ZeroMQ", 8, w1),
    _one("W2", "raw ZeroMQ", 6, w2),
    _one("W3", "raw ZeroMQ", 8, w3),
    _one("planning", "NumPy on small arrays", 5, planning),
    Part(("pod time", "pod memory"), "plain Python, a bare process", 10, pods),
    _one("step", "plain PyTorch", 25, step),
    _one("virtual", "plain Python", 15, virtual),
)
