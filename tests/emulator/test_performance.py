"""Promises of the performance model: positive, monotone, recovered from its own samples, the same for the same seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.measure.shapes import LEAST_FLOPS, shapes
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.calibration import fit, warmth
from emulator.model.device import Devices
from emulator.model.performance import (
    SPREAD_AT,
    Models,
    Performance,
    Processors,
    figures_seconds,
    performance_from,
)

sizes = st.integers(1, 4096)
block = st.tuples(st.integers(1, 64), sizes, sizes, sizes)
figure = st.floats(0.0, 1e-6)
formulas = st.builds(
    Performance,
    overhead_s=figure,
    work_s=st.floats(1e-13, 1e-9),
    matrix_s=figure,
    left_s=figure,
    right_s=figure,
    output_s=figure,
    tile_rows=st.sampled_from([1, 6, 16]),
    tile_columns=st.sampled_from([1, 8, 16]),
)
SPREAD = (0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3, 2.0)
KERNEL = Performance(2e-5, 2e-11, 1e-7, 1e-10, 3e-10, 2e-10, tile_rows=6, tile_columns=16)


def one(*shape: int) -> Any:
    return np.array([shape])


# ---- the typical time


@settings(max_examples=200)
@given(formulas, block, st.integers(0, 3), st.integers(1, 100))
def test_times_are_positive_and_no_larger_product_is_faster(
    model: Performance, shape: tuple[int, int, int, int], grown: int, by: int
) -> None:
    larger = list(shape)
    larger[grown] += by
    before_s, after_s = model.seconds(np.array([shape, larger]))
    assert before_s > 0
    assert after_s >= before_s


@settings(max_examples=100)
@given(st.floats(1e6, 1e13), st.floats(0.0, 1.0), st.lists(block, min_size=1, max_size=9))
def test_a_device_of_two_figures_is_a_special_case_of_the_model(
    flops: float, overhead_s: float, blocks: list[tuple[int, int, int, int]]
) -> None:
    table = np.array(blocks)
    profiles = pack_profiles([Profile(flops, overhead_s, 1e6, 1e6, 0.0, 1, 1)] * len(blocks))
    model = Performance(overhead_s=overhead_s, work_s=2 / flops)
    assert model.seconds(table) == pytest.approx(figures_seconds(profiles, table), rel=1e-9)


def test_a_partial_kernel_tile_costs_as_much_as_a_full_one() -> None:
    model = Performance(0.0, 1e-10, tile_rows=6, tile_columns=16)
    assert model.seconds(one(1, 1, 50, 1)) == model.seconds(one(1, 6, 50, 16))
    assert model.seconds(one(1, 7, 50, 17)) == 4 * model.seconds(one(1, 6, 50, 16))


# ---- fitting


@pytest.mark.slow
def test_a_fit_recovers_the_formula_that_made_the_samples() -> None:
    grid = np.array(shapes(150, 0, 1e10, 1 << 26))
    found = fit(grid, KERNEL.seconds(grid))
    fresh = np.array(shapes(100, 1, 1e10, 1 << 26))
    assert found.seconds(fresh) == pytest.approx(KERNEL.seconds(fresh), rel=0.02)
    assert (found.tile_rows, found.tile_columns) == (6, 16)
    assert found.work_s == pytest.approx(KERNEL.work_s, rel=0.02)


@pytest.mark.slow
def test_an_efficiency_outside_the_formula_is_learnt_from_measured_neighbours() -> None:
    def truth(table: Any) -> Any:
        return KERNEL.seconds(table) * (1 + 0.4 * (np.log2(table[:, 2]) > 9) + 0.1 * np.sin(np.log2(table[:, 1])))

    grid, fresh = np.array(shapes(200, 0, 1e10, 1 << 26)), np.array(shapes(100, 1, 1e10, 1 << 26))
    off = np.abs(fit(grid, truth(grid)).seconds(fresh) / truth(fresh) - 1)
    without = np.abs(replace(fit(grid, truth(grid)), shapes=(), weights=()).seconds(fresh) / truth(fresh) - 1)
    assert np.median(off) < 0.5 * np.median(without)
    assert np.median(off) < 0.03


def test_far_from_every_measured_shape_only_the_formula_counts() -> None:
    grid = np.array(shapes(60, 0, 1e9, 1 << 26))
    noisy = KERNEL.seconds(grid) * np.random.default_rng(0).lognormal(0, 0.2, len(grid))
    found = replace(fit(grid, noisy), lengths=(1.0,) * 7)
    far = one(1, 10**9, 10**9, 10**9)
    assert found.seconds(far) == pytest.approx(replace(found, shapes=(), weights=()).seconds(far))


def test_slowing_down_is_detected_in_a_device_that_does_and_in_no_other() -> None:
    rng = np.random.default_rng(0)
    at_s = np.arange(0, 120, 0.25)
    noise = rng.lognormal(0, 0.01, len(at_s))
    hot = 0.02 * (1 - 0.4 * np.exp(-at_s / 20)) * noise
    rested, warm_up_s = warmth(np.stack([at_s, hot], axis=1))
    assert rested == pytest.approx(0.6, abs=0.03)
    assert warm_up_s == pytest.approx(20, rel=0.15)
    assert warmth(np.stack([at_s, 0.02 * noise], axis=1))[0] == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_grid_has_the_requested_shapes_and_none_too_large(seed: int) -> None:
    grid = shapes(100, seed, 1e8, 1 << 22)
    assert len(set(grid)) == len(grid) == 100
    assert grid == shapes(100, seed, 1e8, 1 << 22)
    for batch, rows, inner, columns in grid:
        assert LEAST_FLOPS <= 2 * batch * rows * inner * columns <= 1e8
        assert 4 * batch * (rows * inner + columns * inner + rows * columns) <= 1 << 22
    assert {batch > 1 for batch, *_ in grid} == {True, False}


# ---- one device after another


def models(model: Performance, count: int, seed: int = 0) -> Models:
    return Models((model,), np.zeros(count, np.int64), tuple((seed, i) for i in range(count)))


def stream(model: Performance, blocks: int, idle_s: float = 0.0, seed: int = 0) -> Any:
    processors = Processors(models(model, 1, seed))
    device = np.zeros(1, np.int64)
    return np.array(
        [
            processors.seconds(device, one(1, 64, 64, 64), one(0, 0), np.full(1, idle_s), np.zeros(1))[0]
            for _ in range(blocks)
        ]
    )


def test_random_factors_depend_on_the_device_seed_and_spread_as_measured() -> None:
    lucky = replace(KERNEL, spread=SPREAD)
    typical_s = KERNEL.seconds(one(1, 64, 64, 64))[0]
    times = stream(lucky, 2000)
    assert times.tolist() == stream(lucky, 2000).tolist()
    assert times.tolist() != stream(lucky, 2000, seed=1).tolist()
    found = np.quantile(times / typical_s, SPREAD_AT[1:-1])
    assert found == pytest.approx(SPREAD[1:-1], abs=0.03)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 3))
def test_a_device_draws_the_same_random_factors_in_any_pod(order: list[int], pods: int) -> None:
    lucky = models(replace(KERNEL, spread=SPREAD, run_s=0.004, pause_s=0.01, rested=0.7), 6)
    profiles = pack_profiles([Profile(1e9, 0.0, 1e9, 1e9, 0.001, 1 << 30, 4)] * 6)
    together = Devices(profiles, models=lucky)
    expected: dict[int, list[float]] = {}
    split = [Devices(profiles[pod::pods], models=lucky.part(range(6)[pod::pods])) for pod in range(pods)]
    found: dict[int, list[float]] = {}
    for at, device in enumerate(order):
        sizes = (np.array([1000]), one(1, 64, 300, 64), np.array([1000]))
        expected.setdefault(device, []).append(together.schedule(at, np.array([device]), *sizes)[0][0])
        due_s, _ = split[device % pods].schedule(at, np.array([device // pods]), *sizes)
        found.setdefault(device, []).append(due_s[0])
    assert found == expected


def test_pauses_come_in_bursts_and_add_up_to_the_mean() -> None:
    typical_s = KERNEL.seconds(one(1, 64, 64, 64))[0]
    paused = replace(KERNEL, run_s=3 * typical_s, pause_s=6 * typical_s)
    times = stream(paused, 900)
    running_s = typical_s / 3
    assert times.mean() == pytest.approx(typical_s, rel=0.01)
    assert set(np.round((times - running_s) / (6 * typical_s), 6).tolist()) == {0.0, 1.0}
    rested = stream(paused, 20, idle_s=100 * typical_s)
    assert rested == pytest.approx(np.full(20, running_s))  # a new budget each time


def test_a_cool_device_is_faster_until_it_is_warm_and_again_after_a_rest() -> None:
    hot = replace(KERNEL, rested=0.5, warm_up_s=100 * KERNEL.seconds(one(1, 64, 64, 64))[0])
    typical_s = KERNEL.seconds(one(1, 64, 64, 64))[0]
    times = stream(hot, 2000)
    assert times[0] == pytest.approx(0.5 * typical_s)
    assert np.all(np.diff(times) >= 0)
    assert times[-1] == pytest.approx(typical_s, rel=1e-3)
    assert stream(hot, 5, idle_s=1e6) == pytest.approx(np.full(5, 0.5 * typical_s))


def test_devices_without_a_model_keep_their_two_figures_beside_modelled_ones() -> None:
    profiles = pack_profiles([Profile(1e9, 0.25, 1e9, 1e9, 0.0, 1 << 30, 4)] * 2)
    mixed = Devices(profiles, models=Models((KERNEL,), np.array([-1, 0]), ((0, 0), (0, 1))))
    tables = np.array([[1, 64, 64, 64]] * 2)
    _, compute_s = mixed.schedule(0.0, np.array([0, 1]), np.array([8, 8]), tables, np.array([8, 8]))
    assert compute_s == pytest.approx([0.25 + 2 * 64**3 / 1e9, KERNEL.seconds(tables[:1])[0]])
    mixed.slow([0, 1], 3.0)
    _, slower_s = mixed.schedule(9.0, np.array([0, 1]), np.array([8, 8]), tables, np.array([8, 8]))
    assert slower_s == pytest.approx(3 * compute_s)


def test_the_link_uses_the_processor_if_nothing_else_does_its_work() -> None:
    profiles = pack_profiles([Profile(1e9, 0.25, 1e9, 1e9, 0.0, 1 << 30, 4)])
    busy = Devices(profiles, models=models(replace(KERNEL, down_s=1e-6, up_s=2e-6), 1))
    table = one(1, 64, 64, 64)
    _, compute_s = busy.schedule(0.0, np.array([0]), np.array([1000]), table, np.array([500]))
    assert compute_s == pytest.approx(KERNEL.seconds(table) + 0.002)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8), st.integers(1, 8), st.booleans())
def test_arrived_messages_are_read_before_products_and_do_not_delay_the_last_answer(
    sizes: list[int], most: int, later: bool
) -> None:
    """Over a link that takes no time; `later`: half of the messages arrive only after all the answers are out."""
    model = replace(KERNEL, overhead_s=0.05, down_s=1e-6)
    profiles = pack_profiles([Profile(1e9, 0.25, 1e12, 1e12, 0.0, 1 << 30, 64)])
    device, product_s = Devices(profiles, models=models(model, 1)), float(model.seconds(one(1, 64, 64, 64))[0])
    due: list[float] = []
    groups = [sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]] if later else [sizes]
    for moment, group in enumerate(groups):
        begun_s, came = 1000.0 * moment, []
        for first in range(0, len(group), most):
            part = np.array(group[first : first + most])
            at = np.zeros(len(part), np.int64)
            found_s, _ = device.schedule(begun_s, at, part, np.repeat(one(1, 64, 64, 64), len(part), 0), at)
            came += found_s.tolist()
        due = [device.held_up(0, moment_s) for moment_s in came]
        expected = begun_s + 1e-6 * sum(group) + product_s * np.arange(1, len(group) + 1)
        assert due == pytest.approx(expected.tolist(), abs=1e-5)


# ---- as text


def test_models_survive_json() -> None:
    grid = np.array(shapes(30, 0, 1e9, 1 << 26))
    given_ = Models((replace(fit(grid, KERNEL.seconds(grid)), spread=SPREAD),), np.array([0, -1]), ((1, 0), (1, 1)))
    import json

    read = Models.from_json(json.loads(json.dumps(given_.as_json())))
    assert read.kinds == given_.kinds
    assert read.of.tolist() == [0, -1]
    assert read.seeds == given_.seeds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"work_s": 0.0}, "work_s"),
        ({"left_s": -1.0}, "left_s"),
        ({"overhead_s": float("nan")}, "finite"),
        ({"tile_rows": 0}, "tiles"),
        ({"spread": [1.0]}, "spread"),
        ({"spread": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]}, "rise"),
        ({"pause_s": 1.0}, "run_s"),
        ({"rested": 1.5}, "rested"),
        ({"shapes": [[1, 1, 1, 1]]}, "weight"),
        ({"shapes": [[1, 0, 1, 1]], "weights": [0.1]}, "at least 1"),
        ({"colour": 1.0}, "colour"),
    ],
)
def test_impossible_figures_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        performance_from({"overhead_s": 1e-5, "work_s": 1e-11, **change})
