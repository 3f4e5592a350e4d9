"""Promises of testbed.virtual.predict: a step on the modelled fleet computes the real step, and takes as long as the
model says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch.fx.experimental.proxy_tensor import make_fx

from agent.protocol.errors import Failure
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.fleet import uniform_fleet
from emulator.model.link import MOST_REPETITIONS, Links, device_keys, plain_links
from ps.graph.capture import distribute, prepare
from ps.graph.executor import Executor, Spent
from ps.graph.models import build_model
from ps.graph.trainer import gradients
from ps.planning.cost import block_seconds, chunk_length, usable_bytes
from ps.planning.planner import Planner
from ps.planning.plans import Plan, Request, Shape
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.launch.processes import links_of
from testbed.runs.fleets import make_fleet
from testbed.runs.scenario import load_scenario
from testbed.virtual.predict import FORESEEN, ModelledFleet, PredictionPlanner, predict_step
from testbed.virtual.server import VirtualServer

TOKENS = torch.randint(0, 29, (8, 7), generator=torch.Generator().manual_seed(0))
SLOW_LINES = 1e-3  # share of the uniform fleets' lines: modelled seconds that dwarf this host's work


class Unused:
    """The real engine, which must not be used."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise AssertionError("a prediction uses no real device")

    submit = forget = collect = _refuse


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only get slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


class Model:
    """A tiny model, plain and distributed; captured once."""

    def __init__(self) -> None:
        config = transformers.LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            vocab_size=29,
            use_cache=False,
        )
        torch.manual_seed(0)
        self.module: Any = build_model(config)
        self.executor = Executor(Unused())
        self.forward = distribute(self.module, lambda program, inputs: self.executor.run(program, inputs))

    def step(self, micro_batches: int = 1) -> None:
        self.module.zero_grad()
        gradients(self.forward, TOKENS, micro_batches)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.module.parameters()]

    def predict(self, profiles: NDArray[np.void], micro_batches: int = 1, *, keep: bool = False) -> float:
        self.executor = Executor(Unused())
        if keep:
            self.executor.keep(self.module.parameters(), uses=micro_batches)
        return predict_step(self.executor, lambda: self.step(micro_batches), profiles, Planner()).seconds


@pytest.fixture(scope="module")
def model() -> Model:
    """After the captures, which would count as the host's work in the first prediction."""
    made = Model()
    for micro_batches in (1, 4):
        made.predict(uniform_fleet("paper", 20, seed=1), micro_batches)
    return made


def slower(profiles: NDArray[np.void], factor: float) -> NDArray[np.void]:
    changed = profiles.copy()
    changed["down_bps"] /= factor
    changed["up_bps"] /= factor
    return changed


# ---- the same step


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["paper", "moderate", "extreme"])
def test_the_gradients_of_a_predicted_step_equal_those_of_plain_pytorch(model: Model, fleet: str) -> None:
    model.module.zero_grad()
    gradients(model.module, TOKENS, 1)
    expected = model.gradients()
    seconds = model.predict(uniform_fleet(fleet, 20, seed=1))
    assert seconds > 0
    for one, two in zip(model.gradients(), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_prediction_leaves_the_executor_unchanged(model: Model) -> None:
    model.predict(uniform_fleet("paper", 20, seed=1), micro_batches=4, keep=True)
    executor = model.executor
    assert isinstance(executor.engine, Unused)
    assert executor.spent == Spent()
    assert executor.step == 0
    executor.weights_changed()  # the real fleet is not told to forget what the modelled one kept


def test_a_failed_prediction_leaves_the_executor_unchanged(model: Model) -> None:
    executor = Executor(Unused())
    engine = executor.engine

    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        predict_step(executor, step, uniform_fleet("paper", 3, seed=1), Planner())
    assert executor.engine is engine


def test_a_fleet_that_cannot_compute_the_step_is_refused_with_a_reason(model: Model) -> None:
    profiles = uniform_fleet("paper", 5, seed=1)
    profiles["memory_bytes"] = 16
    with pytest.raises(Failure, match=r"the fleet cannot do this step: .*bytes"):
        model.predict(profiles)


# ---- its duration


@pytest.mark.alone
def test_slower_lines_make_the_step_longer_in_proportion(model: Model) -> None:
    profiles = uniform_fleet("paper", 20, seed=1, line_share=SLOW_LINES)
    profiles["flops"] = 1e15  # only lines matter
    seconds = model.predict(profiles)
    assert seconds > 1.0  # dwarfs the host's work
    assert model.predict(slower(profiles, 10)) == pytest.approx(10 * seconds, rel=0.2)


@pytest.mark.alone
def test_a_step_whose_devices_keep_the_weights_is_shorter(model: Model) -> None:
    profiles = uniform_fleet("paper", 20, seed=1, line_share=SLOW_LINES)
    assert model.predict(profiles, micro_batches=4, keep=True) < model.predict(profiles, micro_batches=4)


CHAIN = (8, 30, 20, 40, 16)  # widths: products that wait for each other


def chain(executor: Executor) -> Callable[[], object]:
    weights = [torch.ones(a, b) for a, b in pairwise(CHAIN)]
    x = torch.ones(64, CHAIN[0])

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x @ weight
        return x

    program = prepare("forward", make_fx(function)(x, *weights))
    return lambda: executor.run(program, [x, *weights])


def chain_seconds(profiles: NDArray[np.void]) -> float:
    executor = Executor(Unused())
    return predict_step(executor, chain(executor), profiles, Planner()).seconds


@pytest.mark.parametrize("count", [1, 7, 40])
def test_dependent_products_take_at_least_the_whole_fleets_time_for_each(count: int) -> None:
    """However good the plan, all cells share the uplinks of all devices, and every answer travels both ways."""
    profiles = uniform_fleet("extreme", count, seed=2, line_share=SLOW_LINES)
    profiles["latency_s"] = 0.3
    least = 0.0
    for inner, columns in pairwise(CHAIN):
        cells = 64 * columns
        up_s = 8 * 4 * cells / profiles["up_bps"].sum()
        down_s = 8 * 4 * inner * (64 + columns) / profiles["down_bps"].sum()  # every operand's value at least once
        compute_s = 2 * cells * inner / profiles["flops"].sum()
        least += 2 * 0.3 + max(up_s, down_s, compute_s)
    assert chain_seconds(profiles) >= least


@pytest.mark.alone
def test_on_one_device_the_step_takes_no_longer_than_whole_blocks_one_after_the_other() -> None:
    profiles = uniform_fleet("paper", 1, seed=1, line_share=SLOW_LINES)
    alone = [float(block_seconds(profiles, 1, 64, inner, columns)[0]) for inner, columns in pairwise(CHAIN)]
    assert max(alone) < chain_seconds(profiles) <= 1.1 * sum(alone)


# ---- several steps


@pytest.mark.alone
def test_predicted_steps_draw_the_same_random_numbers_as_those_of_the_run() -> None:
    profiles, links = uniform_fleet("extreme", 20, seed=2, line_share=SLOW_LINES), plain_links(20)
    links.table["key"] = device_keys(1, np.arange(20))
    links.table["jitter_down_s"] = links.table["jitter_up_s"] = 0.5
    server = VirtualServer(profiles, [""] * 20, Planner(), links=links)
    run = Executor(server)
    step, ends_s = chain(run), [0.0]
    for _ in range(FORESEEN):
        step()
        ends_s.append(server.clock.now_s)
    seconds = np.diff(ends_s).tolist()
    assert (np.abs(np.diff(seconds)) / seconds[:-1]).min() > 0.01  # no two successive steps are alike

    def predicted(steps: int) -> float:
        executor = Executor(Unused())
        told = predict_step(executor, chain(executor), profiles, Planner(), links=links, local=0.0, steps=steps)
        return told.seconds

    assert predicted(1) == pytest.approx(seconds[0])
    assert predicted(3) == pytest.approx(np.median(seconds[1:3]))
    assert predicted(1000) == pytest.approx(np.median(seconds[1:]))


def test_revised_plans_of_a_prediction_stay_in_it() -> None:
    profiles, requests, run = uniform_fleet("paper", 30, seed=1), [Request(Shape(1, 64, 32, 48))], Planner()
    predicting, all_devices = PredictionPlanner(run, 30), np.arange(30)
    plans = predicting.plan(requests, profiles, all_devices)
    assert run.plan(requests, profiles, all_devices) is plans  # made once
    lost = int(plans[0].device[0])
    (without,) = predicting.plan(requests, profiles, np.delete(all_devices, lost), revision=1)
    assert lost not in without.device.tolist()
    assert predicting.plan(requests, profiles, all_devices, revision=1) is not plans
    assert run.plan(requests, profiles, all_devices) is plans


@pytest.mark.parametrize(("absent", "shared"), [([], True), ([29], True), ([0], False), ([3, 29], False)])
def test_plans_pass_to_the_run_only_if_devices_have_the_same_numbers_there(absent: list[int], shared: bool) -> None:
    run, shape = Planner(), Shape(1, 64, 32, 48)
    fleet = ModelledFleet(uniform_fleet("paper", 30, seed=1), run, absent, arithmetic=False)
    done: SimpleQueue[int] = SimpleQueue()
    left, right = np.zeros((1, 64, 32), np.float32), np.zeros((1, 48, 32), np.float32)
    fleet.submit(Product(Operand(left), Operand(right), np.zeros((1, 64, 48), np.float32), lambda: done.put(1)))
    assert fleet.collect(done) == [1]
    assert run.knows([Request(shape)]) == shared


# ---- one product on one device: exactly the cost model


def one_block_seconds(profile: Profile, rows: int, inner: int, columns: int, links: Links | None = None) -> float:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((1, rows, inner), dtype=np.float32)
    right = rng.standard_normal((1, columns, inner), dtype=np.float32)
    out = np.full((1, rows, columns), np.nan, np.float32)
    done: SimpleQueue[int] = SimpleQueue()
    fleet = ModelledFleet(pack_profiles([profile]), Planner(), links=links)
    box = np.array([[0, 1, 0, rows, 0, columns]])
    plan = Plan(boxes=box, device=np.array([0]), fresh=np.ones((1, 2), bool), makespan_s=0.0)
    fleet.submit(Product(Operand(left), Operand(right), out, lambda: done.put(7), plan=plan))
    assert fleet.collect(done) == [7]
    np.testing.assert_allclose(out, left @ right.transpose(0, 2, 1), rtol=1e-4, atol=1e-4)
    return fleet.seconds()


DEVICE = Profile(1e6, 0.5, 1e5, 1e4, 2.0, 1 << 30, 2)


@pytest.mark.parametrize(
    ("device", "streamed"),
    [(DEVICE, False), (Profile(1e6, 0.5, 1e5, 1e4, 2.0, 40_000, 2), True)],
    ids=["whole", "in chunks"],
)
def test_a_block_takes_the_time_of_the_cost_model(device: Profile, streamed: bool) -> None:
    profiles, shape = pack_profiles([device]), (16, 3000, 24)
    chunk = int(chunk_length(1, *shape, usable_bytes(profiles))[0])
    assert (0 < chunk < 3000) == streamed
    expected = float(block_seconds(profiles, 1, *shape, None, -(-3000 // chunk))[0])
    assert expected > 40  # seconds of virtual time, in a few milliseconds of real time
    assert one_block_seconds(device, *shape) == pytest.approx(expected, rel=0.02)


def test_a_block_over_a_lossy_line_includes_the_repetitions() -> None:
    links = plain_links(1)
    links.table["loss_up"] = 1 - 1e-9
    plain_s, lossy_s = (one_block_seconds(DEVICE, 16, 3000, 24, each) for each in (None, links))
    round_trip_s = 2 * DEVICE.latency_s
    assert lossy_s - plain_s == pytest.approx(MOST_REPETITIONS * round_trip_s, rel=0.02)


def test_a_prediction_knows_each_devices_link_in_any_order_of_joining(tmp_path: Path) -> None:
    for way in ("down", "up"):
        (tmp_path / f"drive.{way}").write_text("10\n", encoding="utf-8")
    scenario = load_scenario("quickstart", {"fleet.devices": "40", "links.traces.uk-ftth": str(tmp_path / "drive")})
    fleet = make_fleet(scenario.fleet, scenario.links, scenario.seed)
    assert fleet.links is not None
    order = [31, 7, 20]
    joined = links_of(fleet, [*(fleet.labels[device] for device in order), "an unknown phone"])
    assert joined is not None
    assert joined.table[:3].tolist() == fleet.links.table[order].tolist()
    assert joined.table[3].tolist() == plain_links(1).table[0].tolist()
    assert joined.traces[0].down.at_ms.tolist() == [10]
    traced = [name == "uk-ftth" for name in fleet.network_names]
    assert (fleet.links.table["trace"] == 0).tolist() == traced
    assert fleet.profiles["up_bps"][traced] == pytest.approx(scenario.fleet.line_share * 1.2e6)
    assert fleet.links.table["jitter_up_s"].any()


@pytest.mark.slow
def test_a_prediction_ends_with_the_step_in_which_its_time_is_over(model: Model) -> None:
    """Each step takes the host 6 s; a run of steps as short as these may be predicted for 10 s."""
    clock = itertools.count(0.0, 6.0)
    profiles = uniform_fleet("paper", 20, seed=1)
    model.executor = Executor(Unused())
    hurried = predict_step(model.executor, model.step, profiles, Planner(), steps=5, now_s=lambda: next(clock))
    model.executor = Executor(Unused())
    patient = predict_step(model.executor, model.step, profiles, Planner(), steps=5, now_s=lambda: 0.0)
    assert hurried.steps == 1
    assert patient.steps > 1


def test_what_the_server_computes_itself_counts_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 100))  # every look at the clock is 100 s later
    monkeypatch.setattr("testbed.virtual.predict.time.perf_counter", lambda: float(next(clock)))
    fleet = ModelledFleet(pack_profiles([DEVICE]), Planner())
    assert fleet.seconds() == 100.0
    assert fleet.seconds() == 200.0


@pytest.mark.slow
def test_a_planner_that_adopts_the_plans_of_another_makes_none_anew(model: Model) -> None:
    profiles, first, second = uniform_fleet("paper", 20, seed=1), Planner(), Planner()
    for planner in (first, second):
        model.executor = Executor(Unused())
        predict_step(model.executor, model.step, profiles, planner)
        second.adopt(first)
        assert repr(second) == repr(first)
    assert "0 plans" not in repr(first)
