"""Promises of ps.planning.planner: for any products and fleet, every plan covers its output exactly once, no device
gets more than it can hold, the modelled end is that of a device's three queues, and a lost device changes little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_checks import assert_keeps_its_promises, assert_same, block, one_cell_bytes, powers, simulated_s

import ps.planning.settings as planning
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.fleet import uniform_fleet
from ps.planning.cost import Integers
from ps.planning.pipeline import Cuts, cut_boxes, running_cost_models
from ps.planning.planner import NONE_BUSY, Planner, Question, without_the_lost
from ps.planning.plans import Plan, PlanError, Request, Shape
from ps.planning.settings import NOW

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

HUGE = 1 << 40
profiles = st.builds(
    Profile,
    flops=powers(1e6, 1e13),
    overhead_s=st.sampled_from([0.0, 1e-4, 1e-2]),
    down_bps=powers(1e3, 1e11),
    up_bps=powers(1e3, 1e11),
    latency_s=st.sampled_from([0.0, 1e-3, 0.3, 60.0]),
    memory_bytes=st.one_of(st.integers(0, 2000), st.sampled_from([5_000, 20_000, HUGE, HUGE])),
    credit_blocks=st.integers(1, 6),
)
fleets = st.one_of(st.lists(profiles, min_size=1, max_size=6), st.lists(profiles, min_size=7, max_size=60))
sides = st.one_of(st.integers(1, 3), st.integers(1, 24))
inners = st.one_of(st.integers(1, 40), st.integers(90, 300))
shapes = st.builds(Shape, st.sampled_from([1, 1, 2, 5, 9]), sides, inners, sides)
requests = st.builds(Request, shapes, st.integers(1, 4), st.integers(1, 4))

Problem = tuple[list[Request], list[Profile], Integers]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Products that are ready together, and a fleet, parts of it gone, with at least one able device."""
    wanted, fleet = draw(st.lists(requests, min_size=1, max_size=4)), draw(fleets)
    capable = draw(st.integers(0, len(fleet) - 1))
    enough = max(fleet[capable].memory_bytes, *(one_cell_bytes(request.shape) for request in wanted))
    fleet[capable] = replace(fleet[capable], memory_bytes=enough)
    able = [i for i in range(len(fleet)) if i == capable or draw(st.integers(0, 9)) > 0]
    return wanted, fleet, np.array(able)


def solve(shape: Shape, fleet: list[Profile], left_uses: int = 1, right_uses: int = 1) -> Plan:
    request = Request(shape, left_uses, right_uses)
    return Planner().plan([request], pack_profiles(fleet), np.arange(len(fleet)))[0]


common = Profile(1e9, 1e-4, 1e7, 1e7, 0.01, HUGE, 4)

# ---- any products and any fleet


@pytest.mark.slow
@settings(calm, max_examples=150)
@given(problems(), st.sampled_from(["packed", "packed", "packed", "grid"]))
def test_every_plan_keeps_its_promises(problem: Problem, kind: str) -> None:
    wanted, fleet, able = problem
    plans = Planner(kind).plan(wanted, pack_profiles(fleet), able)  # type: ignore[arg-type]
    for request, plan in zip(wanted, plans, strict=True):
        assert_keeps_its_promises(plan, request.shape, fleet, able)


@pytest.mark.slow
@settings(calm, max_examples=100)
@given(problems(), st.integers(0, 99), st.sampled_from(["packed", "packed", "grid"]))
def test_after_the_loss_of_any_device_all_promises_still_hold(problem: Problem, choice: int, kind: str) -> None:
    wanted, fleet, able = problem
    table = pack_profiles(fleet)
    plans = Planner(kind).plan(wanted, table, able)  # type: ignore[arg-type]
    used = np.unique(np.concatenate([plan.device for plan in plans]))
    lost = used[[choice % len(used)]]
    left = able[~np.isin(able, lost)]
    for request, plan in zip(wanted, plans, strict=True):
        before = plan.boxes.tobytes(), plan.device.tobytes(), plan.fresh.tobytes()
        if not any(fleet[i].memory_bytes >= one_cell_bytes(request.shape) for i in left):
            if lost[0] in plan.device:
                with pytest.raises(PlanError, match=r"are gone|none of"):
                    without_the_lost([plan], [request], table, left)
            continue
        (after,) = without_the_lost([plan], [request], table, left)
        assert_keeps_its_promises(after, request.shape, fleet, left)
        assert (plan.boxes.tobytes(), plan.device.tobytes(), plan.fresh.tobytes()) == before


@pytest.mark.slow
@settings(calm, max_examples=40)
@given(problems())
def test_the_same_input_gives_the_same_plan(problem: Problem) -> None:
    wanted, fleet, able = problem
    table = pack_profiles(fleet)
    before = table.tobytes(), able.tobytes()
    for one, two in zip(Planner().plan(wanted, table, able), Planner().plan(wanted, table, able), strict=True):
        assert_same(one, two)
    assert (table.tobytes(), able.tobytes()) == before


@pytest.mark.slow
@settings(calm, max_examples=60)
@given(problems())
def test_the_strips_of_a_device_follow_each_other(problem: Problem) -> None:
    wanted, fleet, able = problem
    for plan in Planner().plan(wanted, pack_profiles(fleet), able):
        changes = np.flatnonzero(np.diff(plan.device)) + 1
        assert len(np.unique(plan.device)) == len(changes) + 1


def test_more_devices_than_cells_can_be_planned() -> None:
    shape, fleet = Shape(1, 2, 1000, 2), [common] * 500
    assert_keeps_its_promises(solve(shape, fleet), shape, fleet, np.arange(500))


# ---- the cost model


def cut(strips: int, chunks: int, taper: float = 1.0) -> Cuts:
    return Cuts(np.array([strips]), np.array([chunks]), np.array([False]), np.full((2, 1), taper))


@settings(calm, max_examples=200)
@given(
    p=profiles,
    inner=inners,
    h=st.integers(1, 200),
    w=st.integers(1, 200),
    k=st.integers(1, 4),
    taper=st.just(1.0) | st.floats(0.25, 4.0),
)
def test_the_formula_for_strips_matches_three_queues(
    p: Profile, inner: int, h: int, w: int, k: int, taper: float
) -> None:
    """Exactly, except that each strip's overhead counts in full, even where it is hidden. A device has credit for all
    its strips."""
    p = replace(p, credit_blocks=max(k, p.credit_blocks))
    shape = Shape(1, h, inner, w)
    cost_model = running_cost_models(pack_profiles([p]), Request(shape), cut(k, 1, taper))[0]
    modelled_s = float(cost_model.fixed_s[0] + cost_model.loads(np.array([h]), np.array([w])).max())
    sizes = [taper**i for i in range(k)]
    heights = [h * size / sum(sizes) for size in sizes]
    seconds = simulated_s(p, [block(p, shape, [0, 1, 0, r, 0, w], [True, i == 0], 1) for i, r in enumerate(heights)])
    assert seconds <= modelled_s * (1 + 1e-9)
    assert seconds >= (modelled_s - (k - 1) * p.overhead_s) * (1 - 1e-9)


@settings(calm, max_examples=100)
@given(p=profiles, inner=inners, h=st.integers(4, 400), w=st.integers(1, 200))
def test_strips_that_grow_or_shrink_with_the_slower_queue_end_no_later_than_equal_ones(
    p: Profile, inner: int, h: int, w: int
) -> None:
    shape, roomy = Shape(1, h, inner, w), replace(p, memory_bytes=1 << 50, overhead_s=0.0)
    boxes, _ = cut_boxes(
        np.array([[0, 1, 0, h, 0, w]]), np.array([0]), np.array([4]), False, shape, pack_profiles([roomy])
    )
    assert boxes[0, 2] == 0
    assert (boxes[1:, 2] == boxes[:-1, 2] + boxes[:-1, 3]).all()
    assert boxes[-1, 2] + boxes[-1, 3] == h

    def seconds(rows: list[float]) -> float:
        return simulated_s(
            roomy, [block(roomy, shape, [0, 1, 0, r, 0, w], [True, i == 0], 1) for i, r in enumerate(rows)]
        )

    one_row_s = seconds([1.0])  # whole rows cost at most this
    assert seconds(boxes[:, 3].tolist()) <= seconds([h / 4] * 4) + one_row_s


@settings(calm, max_examples=100)
@given(p=profiles, inner=inners, h=st.integers(1, 200), w=st.integers(1, 200), c=st.integers(2, 9))
def test_the_formula_for_chunks_matches_three_queues(p: Profile, inner: int, h: int, w: int, c: int) -> None:
    shape = Shape(1, h, inner, w)
    cost_model = running_cost_models(pack_profiles([p]), Request(shape), cut(1, c))[0]
    modelled_s = float(cost_model.fixed_s[0] + cost_model.loads(np.array([h]), np.array([w])).max())
    seconds = simulated_s(p, [block(p, shape, [0, 1, 0, h, 0, w], [True, True], c)])
    assert seconds <= modelled_s * (1 + 1e-9)
    assert seconds >= (modelled_s - (c - 1) * p.overhead_s) * (1 - 1e-9)


@settings(calm, max_examples=100)
@given(p=profiles, inner=inners, w=st.integers(1, 200), seconds=powers(1e-3, 1e6), k=st.integers(1, 4))
def test_a_strip_of_the_height_for_a_time_takes_that_time(
    p: Profile, inner: int, w: int, seconds: float, k: int
) -> None:
    request = Request(Shape(1, 1, inner, 1), left_uses=3)
    for cost_model in running_cost_models(pack_profiles([replace(p, memory_bytes=1 << 50)]), request, cut(k, 1)):
        height = cost_model.boundless().heights(seconds + cost_model.fixed_s, np.array([w]))
        if height[0] > 0:
            assert cost_model.loads(height, np.array([w])).max() == pytest.approx(seconds, rel=1e-6)


# ---- shares of the devices


def test_products_that_are_ready_together_share_the_fleet() -> None:
    """Download-bound and without latency, three teams are sqrt(3) faster than three products in sequence."""
    fleet = uniform_fleet("extreme", 192, seed=1)
    fleet["flops"], fleet["up_bps"] = 1e15, 1e15
    shape, able = Shape(1, 2048, 512, 2048), np.arange(192)
    together = Planner().plan([Request(shape)] * 3, fleet, able)
    alone_s = Planner().plan([Request(shape)], fleet, able)[0].makespan_s
    assert max(plan.makespan_s for plan in together) <= 3 * alone_s / 1.4
    teams = [set(plan.device.tolist()) for plan in together]
    assert sum(map(len, teams)) == len(set.union(*teams)), "no device works for two products"


def test_products_of_different_size_end_together() -> None:
    fleet, able = uniform_fleet("paper", 256, seed=2), np.arange(256)
    wanted = [Request(Shape(1, 4096, 512, 4096)), Request(Shape(1, 1024, 512, 4096)), Request(Shape(1, 512, 4096, 512))]
    ends_s = [plan.makespan_s for plan in Planner().plan(wanted, fleet, able)]
    assert max(ends_s) <= 1.3 * min(ends_s)


def test_more_products_than_devices_can_be_planned() -> None:
    fleet = [common] * 3
    wanted = [Request(Shape(1, 8, 8, 8 + i)) for i in range(20)]
    for request, plan in zip(wanted, Planner().plan(wanted, pack_profiles(fleet), np.arange(3)), strict=True):
        assert_keeps_its_promises(plan, request.shape, fleet, np.arange(3))


def test_a_small_product_is_left_to_few_devices() -> None:
    made = solve(Shape(1, 64, 64, 64), [replace(common, latency_s=1.0)] * 200)
    assert len(np.unique(made.device)) < 20


def test_a_device_that_would_only_slow_a_product_down_gets_nothing() -> None:
    hopeless = replace(common, down_bps=1e3, up_bps=1e3)
    assert set(solve(Shape(1, 64, 64, 64), [hopeless, common, hopeless]).device.tolist()) == {1}


def test_a_device_without_memory_gets_nothing() -> None:
    shape = Shape(1, 8, 100, 8)
    small = replace(common, memory_bytes=one_cell_bytes(shape) - 2)
    assert set(solve(shape, [small, common, small]).device.tolist()) == {1}


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(5e8, 2, NOW.most_strips), (1e7, NOW.most_strips + 1, NOW.most_pieces)]
)
def test_long_work_is_cut_into_strips_that_share_their_columns_or_rows(rate: float, least: int, most: int) -> None:
    """Very long work is cut into more strips, so that less is lost with a device."""
    device = replace(common, flops=1e11, down_bps=rate, up_bps=rate, credit_blocks=4)
    made = solve(Shape(1, 4000, 500, 4000), [device] * 4)
    for number in range(4):
        mine = made.fresh[made.device == number]
        assert least <= len(mine) <= most
        assert mine[0].all()
        assert mine[1:].sum() == len(mine) - 1, "the device already has one side of each further strip"


def test_kept_slabs_are_in_few_pieces() -> None:
    slow = replace(common, flops=1e11, down_bps=1e8, up_bps=1e8, credit_blocks=4)
    made = solve(Shape(1, 4000, 500, 4000), [slow] * 4, 1, 16)
    assert np.bincount(made.device).max() <= NOW.most_strips


def test_short_work_and_a_device_with_little_credit_get_no_strips() -> None:
    quick = replace(common, flops=1e13, down_bps=1e11, up_bps=1e11)
    short = solve(Shape(1, 400, 50, 400), [quick] * 4)
    assert short.makespan_s < 2 * NOW.strip_s
    assert len(short.boxes) == len(np.unique(short.device))
    deferred = solve(Shape(1, 4000, 500, 4000), [replace(common, credit_blocks=1)] * 4)
    assert len(deferred.boxes) == len(np.unique(deferred.device))


def test_strips_end_sooner_than_whole_rectangles() -> None:
    shape, balanced = Shape(1, 2000, 500, 2000), replace(common, flops=1e9, up_bps=3e7, down_bps=3e7)
    striped, whole = solve(shape, [balanced] * 9), solve(shape, [replace(balanced, credit_blocks=1)] * 9)
    assert striped.makespan_s < 0.75 * whole.makespan_s


@pytest.mark.parametrize(("left_uses", "right_uses"), [(1, 16), (16, 1)])
def test_a_slab_that_will_be_used_again_may_be_larger(left_uses: int, right_uses: int) -> None:
    shape, fleet = Shape(1, 1024, 256, 1024), [replace(common, credit_blocks=1, up_bps=1e9, flops=1e12)] * 64
    once, often = solve(shape, fleet), solve(shape, fleet, left_uses, right_uses)
    kept = 5 if right_uses > 1 else 3
    assert often.boxes[:, kept].mean() > 2 * once.boxes[:, kept].mean()
    assert often.makespan_s > once.makespan_s, "the first time, everything must be downloaded"


# ---- plans are kept, and repaired


def test_a_plan_is_kept_while_the_fleet_is_the_same() -> None:
    table, planner = pack_profiles([common] * 30), Planner()
    wanted = [Request(Shape(1, 300, 64, 300)), Request(Shape(1, 64, 300, 300))]
    first = planner.plan(wanted, table, np.arange(30))
    assert planner.plan(list(wanted), table, np.arange(30)) is first
    assert planner.plan([replace(wanted[0], right_uses=2), wanted[1]], table, np.arange(30)) is not first


def test_a_plan_does_not_depend_on_earlier_beliefs() -> None:
    """Otherwise plans follow every change of belief: after a pause of all pods, eight times as many blocks and steps
    twice as long, for good."""
    table, planner, able = uniform_fleet("paper", 40, seed=0, line_share=0.05), Planner(), np.arange(40)
    requests = [Request(Shape(1, 300, 64, 300)), Request(Shape(1, 64, 300, 300))]
    for revision in range(1, 30):
        believed = table.copy()
        slow = np.random.default_rng(revision).choice(40, 12, replace=False)
        for rate in ("flops", "down_bps", "up_bps"):
            believed[rate][slow] /= 20
        planner.plan(requests, believed, able, revision)
    again = planner.plan(requests, table, able, revision=30)
    fresh = Planner().plan(requests, table, able)
    assert [plan.boxes.tolist() for plan in again] == [plan.boxes.tolist() for plan in fresh]
    assert [plan.device.tolist() for plan in again] == [plan.device.tolist() for plan in fresh]


def test_a_cached_plan_does_not_change_with_the_callers_array() -> None:
    table, planner, able = pack_profiles([common] * 30), Planner(), np.arange(20)
    planner.plan([Request(Shape(1, 300, 64, 300))], table, able)
    able += 10
    made = planner.plan([Request(Shape(1, 300, 64, 300))], table, able)[0]
    assert made.device.min() >= 10


def test_the_blocks_of_a_lost_device_go_to_others_and_all_other_blocks_stay() -> None:
    fleet = [common] * 100
    shape, table, planner = Shape(1, 1000, 64, 1000), pack_profiles(fleet), Planner()
    (before,) = planner.plan([Request(shape)], table, np.arange(100))
    lost = before.device[40]
    able = np.delete(np.arange(100), lost)
    (after,) = planner.plan([Request(shape)], table, able)
    assert_keeps_its_promises(after, shape, fleet, able)
    kept = before.device != lost
    assert after.boxes[: kept.sum()].tolist() == before.boxes[kept].tolist()
    assert after.device[: kept.sum()].tolist() == before.device[kept].tolist()
    assert planner.plan([Request(shape)], table, able.copy())[0] is after


def test_a_lost_device_alone_in_its_column_is_replaced_by_others() -> None:
    fleet = [replace(common, flops=1e13, up_bps=1e10, down_bps=1e10), *[common] * 50]
    shape, table = Shape(1, 40, 64, 40), pack_profiles(fleet)
    (before,) = Planner().plan([Request(shape)], table, np.arange(51))
    assert set(before.device.tolist()) == {0}
    (after,) = without_the_lost([before], [Request(shape)], table, np.arange(1, 51))
    assert_keeps_its_promises(after, shape, fleet, np.arange(1, 51))


def test_the_next_products_are_planned_ahead_without_counting_as_used() -> None:
    table, able, fewer = uniform_fleet("paper", 100, seed=0, line_share=0.05), np.arange(100), np.arange(99)
    one, two = ([Request(Shape(1, size, 64, 1000))] for size in (900, 1000))
    planner = Planner()
    planner.plan_ahead(table, able)  # nothing is known yet: no effect
    for wanted in (one, two, one):
        planner.plan(wanted, table, able)
    before = planner._cache[Question(tuple(two))].plans
    planner.plan_ahead(table, fewer)
    ready = planner._cache[Question(tuple(two))]
    assert 99 in before[0].device
    assert 99 not in ready.plans[0].device
    assert ready.wasted_s == 0.0
    assert planner.plan(two, table, fewer) is ready.plans


def test_a_plan_whose_repairs_cost_as_much_as_a_new_one_is_replaced() -> None:
    table, planner = uniform_fleet("paper", 100, seed=0, line_share=0.05), Planner()
    wanted = [Request(Shape(1, 1000, 64, 1000))]
    solved_s = planner.plan(wanted, table, np.arange(100))[0].makespan_s
    wasted_s, left = 0.0, 99
    while True:
        fresh = Planner().plan(wanted, table, np.arange(left))[0]
        plan = planner.plan(wanted, table, np.arange(left))[0]
        assert set(plan.device.tolist()) <= set(range(left))
        if np.array_equal(plan.boxes, fresh.boxes):
            break
        wasted_s += max(0.0, plan.makespan_s - solved_s)
        assert wasted_s <= NOW.solving_s
        left -= 1
    assert left < 98, "the first losses are cheap"


def test_a_device_slower_than_it_claimed_is_taken_out_of_plans_and_may_help_elsewhere() -> None:
    table, planner, able = uniform_fleet("paper", 100, seed=0), Planner(), np.arange(100)
    wanted = [Request(Shape(1, 1000, 64, 1000))]
    before = planner.plan(wanted, table, able)[0]
    slow = int(before.device[0])
    assert planner.plan(wanted, table, able, revision=0)[0] is before
    corrected = table.copy()
    for rate in ("flops", "down_bps", "up_bps"):
        corrected[rate][slow] /= 20
    after = planner.plan(wanted, corrected, able, revision=1)[0]
    assert_keeps_its_promises(after, wanted[0].shape, [Profile(*row) for row in corrected.tolist()], able)
    mine = [int((plan.boxes[:, 3] * plan.boxes[:, 5])[plan.device == slow].sum()) for plan in (before, after)]
    assert mine[1] < mine[0] / 5
    assert planner.plan(wanted, corrected, able, revision=1)[0] is after, "the plan is cached"


def test_a_device_that_joins_is_in_the_plan_once_leaving_it_out_has_cost_as_much_as_a_new_plan() -> None:
    table, planner = uniform_fleet("paper", 101, seed=0, line_share=0.05), Planner()
    wanted = [Request(Shape(1, 1000, 64, 1000))]
    before = planner.plan(wanted, table, np.arange(100))[0]
    uses = int(NOW.solving_s / (before.makespan_s / 101))
    for number in range(uses):
        assert planner.plan(wanted, table, np.arange(101))[0] is before
        kept = planner.has_ready(Question.of(wanted), np.arange(101), revision=0, busy=NONE_BUSY)
        assert kept == (number < uses - 1), "a new plan is made in the background"
    assert_same(planner.plan(wanted, table, np.arange(101))[0], Planner().plan(wanted, table, np.arange(101))[0])


def test_when_many_devices_have_joined_a_new_plan_is_made() -> None:
    table, planner = uniform_fleet("paper", 120, seed=0, line_share=0.005), Planner()
    wanted = [Request(Shape(1, 1000, 64, 1000))]
    planner.plan(wanted, table, np.arange(100))
    fresh = Planner().plan(wanted, table, np.arange(120))[0]
    assert_same(planner.plan(wanted, table, np.arange(120))[0], fresh)


def test_the_number_of_kept_plans_is_bounded() -> None:
    table, planner, able = pack_profiles([common]), Planner(), np.arange(1)
    wanted = [[Request(Shape(1, 4, 4, 4 + i))] for i in range(4)]
    with planning.using(planning, {"most_cached": 3}):
        first = [planner.plan(one, table, able) for one in wanted[:3]]
        assert planner.plan(wanted[0], table, able) is first[0]  # used again, so the second is the oldest
        planner.plan(wanted[3], table, able)
        assert planner.plan(wanted[0], table, able) is first[0]
        assert planner.plan(wanted[1], table, able) is not first[1]


# ---- errors


@pytest.mark.parametrize("kind", ["packed", "grid"])
def test_no_able_device_is_a_clear_error(kind: str) -> None:
    shape = Shape(1, 8, 1000, 8)
    table = pack_profiles([replace(common, memory_bytes=one_cell_bytes(shape) - 2)] * 3)
    with pytest.raises(PlanError, match=rf"none of 3 devices has the {one_cell_bytes(shape)} bytes .* one cell"):
        Planner(kind).plan([Request(shape)], table, np.arange(3))  # type: ignore[arg-type]


def test_no_device_at_all_is_a_clear_error() -> None:
    with pytest.raises(PlanError, match="none of 0 devices"):
        Planner().plan([Request(Shape(1, 8, 8, 8))], pack_profiles([common]), np.arange(0))


@pytest.mark.parametrize("figure", ["batch", "rows", "inner", "columns"])
def test_a_product_of_size_zero_is_a_clear_error(figure: str) -> None:
    with pytest.raises(PlanError, match=f"size zero cannot be planned.*{figure}=0"):
        solve(replace(Shape(2, 8, 8, 8), **{figure: 0}), [common])


def test_an_unknown_kind_of_planner_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"'best'.*packed.*grid"):
        Planner("best")  # type: ignore[arg-type]
