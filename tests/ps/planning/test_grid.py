"""Promises of the grid (ps.planning.sharing): for any product and fleet, it covers the output exactly once, no device
gets more than it can hold, and the modelled end is honest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_checks import (
    assert_brings_what_is_not_there,
    assert_covers_exactly_once,
    assert_fits_into_memory,
    assert_same,
    one_cell_bytes,
    powers,
    recomputed_ends_s,
)

from agent.protocol.profile import Profile, pack_profiles
from ps.planning.plans import Plan, PlanError, Shape
from ps.planning.sharing import grid_plan

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

HUGE = 1 << 40
profiles = st.builds(
    Profile,
    flops=powers(1e6, 1e13),
    overhead_s=st.sampled_from([0.0, 1e-4, 1e-2]),
    down_bps=powers(1e3, 1e11),
    up_bps=powers(1e3, 1e11),
    latency_s=st.sampled_from([0.0, 1e-3, 0.3]),
    memory_bytes=st.one_of(st.integers(0, 2000), st.just(HUGE)),
    credit_blocks=st.just(2),
)
fleets = st.one_of(st.lists(profiles, min_size=1, max_size=6), st.lists(profiles, min_size=7, max_size=60))
sides = st.one_of(st.integers(1, 3), st.integers(1, 24))
shapes = st.builds(Shape, st.sampled_from([1, 1, 2, 5, 9]), sides, st.integers(1, 40), sides)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, list[Profile]]:
    """A product, a fleet with at least one able device, and the work that each device already has."""
    shape, fleet = draw(shapes), draw(fleets)
    capable = draw(st.integers(0, len(fleet) - 1))
    enough = max(fleet[capable].memory_bytes, one_cell_bytes(shape))
    fleet[capable] = replace(fleet[capable], memory_bytes=enough)
    return shape, fleet


def solve(shape: Shape, fleet: list[Profile]) -> Plan:
    return grid_plan(shape, pack_profiles(fleet))


def cells_of(shape: Shape, fleet: list[Profile]) -> list[int]:
    """Cells that each device gets."""
    made = solve(shape, fleet)
    cells = Counter[int]()
    for device, box in zip(made.device.tolist(), made.boxes.tolist(), strict=True):
        cells[device] += box[1] * box[3] * box[5]
    return [cells[device] for device in range(len(fleet))]


# ---- any product and any fleet


@settings(calm, max_examples=80)
@given(problems())
def test_the_blocks_cover_every_cell_exactly_once(problem: tuple[Shape, list[Profile]]) -> None:
    shape, fleet = problem
    made = solve(shape, fleet)
    assert_covers_exactly_once(made, shape)
    assert_brings_what_is_not_there(made, shape, fleet)


@pytest.mark.slow
@settings(calm, max_examples=80)
@given(problems())
def test_no_block_exceeds_the_memory_of_its_device(problem: tuple[Shape, list[Profile]]) -> None:
    shape, fleet = problem
    made = solve(shape, fleet)
    assert_fits_into_memory(made, shape, fleet)


@settings(calm, max_examples=40)
@given(problems())
def test_the_same_input_gives_the_same_plan(problem: tuple[Shape, list[Profile]]) -> None:
    shape, fleet = problem
    table = pack_profiles(fleet)
    before = table.tobytes()
    first, second = grid_plan(shape, table), grid_plan(shape, table)
    assert table.tobytes() == before
    assert_same(first, second)


# ---- the modelled end


def fixed_s(p: Profile) -> float:
    return 2 * p.latency_s + p.overhead_s


@settings(calm, max_examples=50)
@given(problems())
def test_the_makespan_is_when_the_last_device_ends(
    problem: tuple[Shape, list[Profile]],
) -> None:
    shape, fleet = problem
    made = solve(shape, fleet)
    ends_s = recomputed_ends_s(made, shape, fleet)
    assert made.makespan_s == pytest.approx(max(ends_s.values()), rel=1e-9)


def most_cells(p: Profile, inner: int, seconds: float, one_block: bool) -> float:
    """No way of cutting gives this device more cells within that time. Whatever its blocks, their r distinct rows and c
    distinct columns must arrive, and r c is at least the number of cells, so r + c is at least that of the square.
    Download, compute and upload overlap fully at best, and not at all for one block that comes whole."""
    spare_s = seconds - fixed_s(p)
    if spare_s <= 0:
        return 0.0
    area_s, side_s = 2 * inner / p.flops + 32 / p.up_bps, 64 * inner / p.down_bps
    if one_block:
        return (2 * spare_s / (side_s + math.sqrt(side_s**2 + 4 * area_s * spare_s))) ** 2
    return min((spare_s / side_s) ** 2, spare_s / max(2 * inner / p.flops, 32 / p.up_bps))


def bound_s(shape: Shape, fleet: list[Profile], one_block: bool = False) -> float:
    """Before this moment even devices that all end together, with square blocks of any size, are not done."""
    able = [i for i, p in enumerate(fleet) if p.memory_bytes >= one_cell_bytes(shape)]

    def enough(t: float) -> bool:
        return sum(most_cells(fleet[i], shape.inner, t, one_block) for i in able) >= shape.cells

    low, high = 0.0, 1e-6
    while not enough(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


@settings(calm, max_examples=50)
@given(problems())
def test_no_plan_claims_to_end_before_the_bound(
    problem: tuple[Shape, list[Profile]],
) -> None:
    shape, fleet = problem
    assert solve(shape, fleet).makespan_s >= bound_s(shape, fleet) * (1 - 1e-6)


def test_for_equal_devices_and_a_square_product_the_makespan_is_near_the_bound() -> None:
    shape, fleet = Shape(1, 512, 64, 512), [Profile(1e9, 1e-4, 1e7, 1e7, 0.01, HUGE, 2)] * 16
    made = solve(shape, fleet)
    assert len(set(made.device.tolist())) == 16
    assert made.makespan_s <= 1.1 * bound_s(shape, fleet, one_block=True)


# ---- shares of the devices

common = Profile(1e9, 1e-4, 1e7, 1e7, 0.01, HUGE, 2)


@settings(calm, max_examples=60)
@given(
    figure=st.sampled_from(["flops", "down_bps", "up_bps"]),
    factors=st.lists(st.floats(1, 20), min_size=2, max_size=12),
    rows=st.integers(30, 300),
    columns=st.integers(30, 300),
)
def test_a_faster_device_does_not_get_less_than_a_slower_one(
    figure: str, factors: list[float], rows: int, columns: int
) -> None:
    """All else equal, and up to rounding: a cut is within half a cell of its ideal place, so a rectangle is at most one
    row and one column off."""
    slowest = replace(common, flops=1e8, down_bps=1e7, up_bps=1e6)
    fleet = [replace(slowest, **{figure: getattr(slowest, figure) * factor}) for factor in factors]
    made = solve(Shape(1, rows, 256, columns), fleet)
    ideal_low, ideal_high = {}, {}
    for device, (_, _, _, height, _, width) in zip(made.device.tolist(), made.boxes.tolist(), strict=True):
        assert device not in ideal_low, "one rectangle each"
        ideal_low[device], ideal_high[device] = (height - 1) * (width - 1), (height + 1) * (width + 1)
    assume(len(ideal_low) > 1)
    took_part = sorted(ideal_low, key=lambda device: factors[device])
    for slower, faster in pairwise(took_part):
        assert ideal_high[faster] >= ideal_low[slower]
    for left_out in set(range(len(fleet))) - set(took_part):
        assert all(factors[left_out] <= factors[device] for device in took_part)


@pytest.mark.parametrize("figure", ["flops", "down_bps", "up_bps"])
def test_a_device_ten_times_faster_gets_clearly_more(figure: str) -> None:
    slow = replace(common, flops=5e7, down_bps=1e7, up_bps=3e6)  # the three stages take about equally long
    fast = replace(slow, **{figure: 10 * getattr(slow, figure)})
    slow_cells, fast_cells = cells_of(Shape(1, 400, 256, 400), [slow, fast])
    assert fast_cells > 1.2 * slow_cells > 0


@pytest.mark.parametrize("batch", [1, 8])
def test_equal_devices_get_equal_shares(batch: int) -> None:
    assert cells_of(Shape(batch, 128, 256, 128), [common] * 4) == [batch * 128 * 32] * 4


def test_a_device_that_would_only_slow_the_product_down_gets_nothing() -> None:
    hopeless = replace(common, down_bps=1e3, up_bps=1e3)
    assert cells_of(Shape(1, 64, 64, 64), [hopeless, common]) == [0, 64 * 64]


def test_a_device_without_memory_gets_nothing() -> None:
    shape = Shape(1, 8, 100, 8)
    small = replace(common, memory_bytes=one_cell_bytes(shape) - 1)
    assert cells_of(shape, [small, common, small]) == [0, 64, 0]


def test_a_device_that_holds_just_one_cell_does_the_product_cell_by_cell() -> None:
    shape = Shape(2, 5, 100, 3)
    made = solve(shape, [replace(common, memory_bytes=one_cell_bytes(shape))])
    assert (made.boxes[:, 1::2] == 1).all()
    assert len(made.boxes) == shape.cells


def test_more_devices_than_cells_can_be_planned() -> None:
    shape = Shape(1, 2, 1000, 2)
    cells = cells_of(shape, [common] * 500)
    assert sum(cells) == shape.cells
    assert max(cells) <= shape.cells


# ---- errors


def test_no_able_device_is_a_clear_error() -> None:
    shape = Shape(1, 8, 1000, 8)
    with pytest.raises(PlanError, match=rf"none of 3 devices has the {one_cell_bytes(shape)} bytes .* one cell"):
        solve(shape, [replace(common, memory_bytes=one_cell_bytes(shape) - 1)] * 3)


def test_no_device_at_all_is_a_clear_error() -> None:
    with pytest.raises(PlanError, match="none of 0 devices"):
        solve(Shape(1, 8, 8, 8), [])


@pytest.mark.parametrize("figure", ["batch", "rows", "inner", "columns"])
def test_a_product_of_size_zero_is_a_clear_error(figure: str) -> None:
    with pytest.raises(PlanError, match=f"size zero cannot be planned.*{figure}=0"):
        solve(replace(Shape(2, 8, 8, 8), **{figure: 0}), [common])
