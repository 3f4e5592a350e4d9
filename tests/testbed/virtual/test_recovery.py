"""Promises of `cleave recovery`: lost blocks are computed again, the same seed gives the same figures, the baselines
follow their formulas, and a mistake gets one line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed
from small_runs import RUN_LIMIT_S

from agent.protocol.errors import Failure, UserError
from agent.protocol.profile import Profile, pack_profiles
from ps.planning.planner import Planner
from ps.planning.plans import Shape
from testbed.virtual import recovery
from testbed.virtual.plan import fleet_profiles
from testbed.virtual.recovery import Product, Setting, Trial, parse_failures, percentile, simulate, summarise

if TYPE_CHECKING:
    from conftest import Start

PRODUCTS = {Shape(1, 4096, 512, 2048): 6, Shape(64, 128, 64, 128): 3}
SMALL = Setting(
    parameters=1_000_000,
    layers=4,
    devices=16,
    slowest_down_bps=8e6,
    slowest_up_bps=1e6,
    step_s=120.0,
    products=60,
    longest_s=10.0,
    block_s=1.0,
    checkpoint_steps=2.0,
)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return simulate(PRODUCTS, fleet_profiles("paper", 24, seed=1), [1, 3, 5], trials=8, seed=2)[0]


def cleave(start: Start, *arguments: str) -> CompletedProcess[str]:
    return start("cleave", "recovery", *arguments).completed(RUN_LIMIT_S)


# ---- the simulation


def test_the_last_answer_of_an_undisturbed_product_ends_it() -> None:
    product = Product(Shape(1, 4096, 512, 2048), fleet_profiles("paper", 24, seed=1), Planner())
    ended_s = product.run()
    assert ended_s == max(product.accepted_s.values())
    assert sum(product.cells[block] for block in product.accepted_s) == 4096 * 2048
    assert product.working() == []


def test_two_devices_compute_a_lost_devices_third_in_the_time_of_a_hand_calculation() -> None:
    """Three equal devices; one falls silent with its whole third. The others have finished theirs when the loss is
    noticed, so each does half of that third: download, compute, upload."""
    profile = Profile(1e9, 0.0, 1e9, 1e12, 0.0, 1 << 40, 1)
    shape = Shape(1, 300, 1000, 100)
    product = Product(shape, pack_profiles([profile] * 3), Planner("grid"))
    lost = product.working()[0]
    product.silence([lost])
    done_s = product.run()
    replaced, _ = product.lose([lost], done_s)
    boxes = [product.cells[block] for block in replaced]
    assert sum(boxes) == shape.cells // 3
    assert len(boxes) == 2
    recovered_s = product.run() - done_s
    compute_s = 2 * max(boxes) * 1000 / 1e9
    most_down_s = 32 * 1000 * (100 + 100) / 1e9
    assert compute_s < recovered_s <= compute_s + most_down_s + 1e-3
    assert len(product.accepted_s) == 2 + len(replaced)


def test_the_same_seed_gives_the_same_figures(trials: list[Trial]) -> None:
    again, *_ = simulate(PRODUCTS, fleet_profiles("paper", 24, seed=1), [1, 3, 5], trials=8, seed=2)
    assert [replace(t, host_s=0.0) for t in again] == [replace(t, host_s=0.0) for t in trials]
    other, *_ = simulate(PRODUCTS, fleet_profiles("paper", 24, seed=1), [1, 3, 5], trials=8, seed=3)
    assert [t.recovery_s for t in other] != [t.recovery_s for t in trials]


def test_more_failures_lose_more_and_take_longer(trials: list[Trial]) -> None:
    for one, three, five in zip(trials[::3], trials[1::3], trials[2::3], strict=True):
        assert (one.failures, three.failures, five.failures) == (1, 3, 5)
        assert 0 < one.lost_cells <= three.lost_cells <= five.lost_cells
    rows = summarise(trials, SMALL)
    for fewer, more in pairwise(rows):
        assert 0 < fewer.p50_s < more.p50_s
        assert fewer.p50_s <= fewer.p99_s
        assert all(fewer.baselines[name] <= more.baselines[name] for name in fewer.baselines)


def test_the_weights_are_the_shares_of_the_step() -> None:
    found, step_s, longest_s, block_s = simulate(PRODUCTS, fleet_profiles("paper", 24, seed=1), [2], trials=3, seed=0)
    assert sum(trial.weight for trial in found) == pytest.approx(step_s)
    assert 0 < block_s <= longest_s
    assert longest_s == pytest.approx(max(trial.weight * 3 / PRODUCTS[trial.shape] for trial in found))


def test_survivors_with_too_little_memory_are_a_failure() -> None:
    able = Profile(1e9, 0.0, 1e9, 1e9, 0.0, 1 << 40, 2)
    profiles = pack_profiles([able, replace(able, memory_bytes=8)])
    with pytest.raises(Failure, match="memory"):
        simulate({Shape(1, 30, 10, 10): 1}, profiles, [1], trials=1, seed=0)


def test_a_weighted_percentile_counts_the_weights() -> None:
    assert percentile([3.0, 1.0, 2.0], [1, 1, 1], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], [1, 8, 1], 0.5) == 1.0
    assert percentile([3.0, 1.0, 2.0], [1, 1, 1], 0.99) == 3.0
    values = np.arange(101.0)
    assert percentile(values.tolist(), [1.0] * 101, 0.5) == np.median(values)


# ---- the baselines, recomputed by hand


def test_the_baselines_of_a_small_case_match_a_hand_calculation() -> None:
    # 1e6 parameters, 12 bytes each, 96e6 bit over 15 survivors at 8e6 bit/s: 0.8 s; half of 2 steps of 120 s at 15/16
    assert recovery.checkpoint_restart_s(SMALL, 1) == pytest.approx(0.8 + 128.0)
    # 4 stages of 4 devices, 3 left: a stage is 250,000 parameters, 8e6 bit, a third each at 1e6 bit/s: 2.667 s.
    # 16 micro-batches and 4 stages: 19 slots of 6.316 s; 2.5 forward passes of a third each, on 3 devices instead of 4
    assert recovery.pipeline_replay_s(SMALL, 1) == pytest.approx(8 / 3 + 2.5 * (120 / 19) / 3 * 4 / 3)
    # a layer is 30 s: 10 s forward, 20 s backward; a random moment: 1/3 x 5 s + 2/3 x 10 s are lost, on 15 of 16
    assert recovery.layer_again_s(SMALL, 1) == pytest.approx((5 / 3 + 20 / 3) * 16 / 15)
    # twice the longest product: 20 s, of which half a product, 1 s, was over
    assert recovery.tight_timeout_s(SMALL, 0.25) == pytest.approx(19.25)


def test_the_timeout_is_the_shorter_default_of_torch_distributed() -> None:
    """Compared with the documentation of the installed version."""
    told = " ".join((torch.distributed.init_process_group.__doc__ or "").split())
    assert f"Default value is {recovery.TIMEOUT_S / 60:.0f} minutes for NCCL and 30 minutes for other backends" in told
    assert recovery.timeout_s(0.25) == 600.25


def test_the_ratio_is_the_baseline_over_ours(trials: list[Trial]) -> None:
    for row in summarise(trials, SMALL):
        told = row.as_dict()
        assert set(told["baselines"]) == {"checkpoint restart", "pipeline replay", "timeout"}
        assert set(told["ablations"]) == {"a layer as the unit", "only a tight timeout"}
        for baseline in (*told["baselines"].values(), *told["ablations"].values()):
            assert baseline["ratio_recovery"] == pytest.approx(baseline["cost_s"] / told["recovery_s"]["p50"])
            assert baseline["ratio_lost"] == pytest.approx(baseline["cost_s"] / told["product_delay_s"]["mean"])


# ---- the command

TINY = ["--model", "opt-tiny", "--devices", "12", "--batch", "4", "--seq", "32", "--trials", "2"]


@pytest.mark.slow
def test_the_command_prints_json_with_everything_the_baselines_need(start_warm: Start) -> None:
    done = cleave(start_warm, *TINY, "--failures", "1,3", "--format", "json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert [row["failures"] for row in told["failures"]] == [1, 3]
    lost = told["checkpoint_steps"] * told["step_s"] / 2 * 12 / 11
    reload_s = 8 * 12 * told["parameters"] / 11 / told["slowest_down_bps"]
    cost_s = told["failures"][0]["baselines"]["checkpoint restart"]["cost_s"]
    assert cost_s == pytest.approx(lost + reload_s)


TWO_PRODUCTS = """
import sys
import ps.graph.products
from ps.planning.plans import Shape
ps.graph.products.step_products = lambda *_: {Shape(1, 4096, 512, 2048): 6, Shape(64, 128, 64, 128): 3}
from testbed.commands.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_the_command_prints_a_table_and_its_assumptions(start_warm: Start) -> None:
    """Of two products: the other test of the command captures those of a model."""
    done = start_warm("-c", TWO_PRODUCTS, "recovery", *TINY).completed(RUN_LIMIT_S)
    assert done.returncode == 0, done.stderr
    for word in (
        "pipeline replay",
        "ours without something",
        "torch.distributed",
        "ratio in time lost",
        "Detection",
        "step(s)",
        "trials a row",
    ):
        assert word in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "opt-14b"], "opt-13b"),
        (["--fleet", "papr"], "unknown fleet"),
        (["--failures", "1,x"], "--failures"),
        (["--failures", "0"], "--failures"),
        (["--failures", ""], "--failures"),
        (["--devices", "5", "--failures", "5"], "at most 4"),
        (["--trials", "0"], "--trials"),
        (["--batch", "0"], "--batch"),
        (["--checkpoint-steps", "0"], "--checkpoint-steps"),
        (["--seed", "-1"], "--seed"),
        (["--format", "xml"], "--format"),
    ],
)
def test_bad_input_ends_with_2_and_one_line(start_light: Start, arguments: list[str], told: str) -> None:
    done = cleave(start_light, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_failures_are_sorted_and_listed_once() -> None:
    assert parse_failures("5, 1,3,1", 8) == [1, 3, 5]
    with pytest.raises(UserError, match="at most"):
        parse_failures("9", 8)
