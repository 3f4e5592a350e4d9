"""Attacks by devices that claim more than they can do: a device gets work by what it delivers, and no claim gets it
more than a stated share of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plan_checks import assert_covers_exactly_once
from processes import FAST, LIMIT_S, Multiplication, pod

from agent.protocol.profile import MAX_RATE, Profile, pack_profiles
from emulator.model.fleet import uniform_fleet
from ps.planning import settings as planning_settings
from ps.planning.planner import Planner
from ps.planning.plans import Plan, Request, Shape
from ps.planning.share_cap import NO_CAP, YIELDING, Cap
from ps.planning.trial_blocks import with_trial_blocks
from ps.scheduling.dispatcher import Dispatcher
from ps.scheduling.events import DevicesJoined, JobsSubmitted, SendBlocks, Submission
from ps.scheduling.newcomers import Newcomers, typical_rates
from ps.scheduling.settings import NOW
from ps.scheduling.slowness import Slowness
from testbed.virtual.world import Key, VirtualFleet, Work

if TYPE_CHECKING:
    from conftest import Serve, Start

HONEST = Profile(5e9, 1e-4, 5e7, 2e7, 0.01, 1 << 34, 16)
BOASTS = replace(HONEST, flops=MAX_RATE, down_bps=MAX_RATE, up_bps=MAX_RATE)
SHAPE = Shape(1, 600, 256, 600)
LIAR = """
import sys, time
import agent.protocol.profile, agent.compute.kernels
honest, product = agent.protocol.profile.Profile, agent.compute.kernels.NumpyKernel.product
agent.protocol.profile.Profile = lambda **claims: honest(**(claims | {"flops": 1e15}))
def slowly(self, left, right):
    time.sleep(left.size * right.shape[-1] * 2 / 5e7)
    return product(self, left, right)
agent.compute.kernels.NumpyKernel.product = slowly
import agent.__main__
sys.exit(agent.__main__.main(sys.argv[1:]))
"""


def slower(profile: Profile, times: float) -> Profile:
    return replace(
        profile,
        flops=profile.flops / times,
        overhead_s=profile.overhead_s * times,
        down_bps=profile.down_bps / times,
        up_bps=profile.up_bps / times,
    )


class Fleet:
    """Known honest devices, and one more that is as fast as they are, whatever it claims. `slow`: the first of the
    honest devices have become slower than they say, by these factors, as hot phones do."""

    def __init__(self, honest: int, newcomers: bool, claim: Profile = BOASTS, slow: Sequence[float] = ()) -> None:
        self.liar = honest
        able = [*(slower(HONEST, times) for times in slow), *[HONEST] * (honest - len(slow) + 1)]
        self._fleet = VirtualFleet(pack_profiles([*[HONEST] * honest, claim]), abilities=pack_profiles(able))
        self._fleet.join(honest)
        self._fleet.join(1, newcomers=newcomers)
        self._job = 0

    def multiply(self) -> tuple[float, float]:
        """The liar's share of the cells that were sent, and the seconds of the product."""
        begun_s, cells = self._fleet.now_s, np.zeros(self.liar + 1)
        due: dict[tuple[int, int, int], float] = {}
        outcome = self._fleet.submit([Work(self._job, SHAPE)])
        self._job += 1
        while True:
            for key in outcome.cancelled:
                due.pop(key, None)
            for sent in outcome.sent:
                due[sent.key] = sent.due_s
                cells[sent.key[0]] += sent.box[1] * sent.box[3] * sent.box[5]
            if outcome.finished:
                return float(cells[self.liar] / cells.sum()), self._fleet.now_s - begun_s
            key = min(due, key=due.__getitem__)
            if due[key] > self._fleet.next_look_s:
                self._fleet.now_s = max(self._fleet.now_s, self._fleet.next_look_s)
                outcome = self._fleet.look()
            else:
                self._fleet.now_s = max(self._fleet.now_s, due.pop(key))
                outcome = self._fleet.answer([key])
            self._fleet.check()


@pytest.mark.slow
def test_a_newcomer_that_claims_everything_gets_next_to_nothing_first_and_a_fair_share_later() -> None:
    fleet, honest = Fleet(8, newcomers=True), Fleet(8, newcomers=True, claim=HONEST)
    parts, seconds = zip(*[fleet.multiply() for _ in range(30)], strict=True)
    _, without_s = zip(*[honest.multiply() for _ in range(30)], strict=True)
    assert max(parts[:2]) <= 0.05
    assert max(parts) <= 0.25, "also while its capacity is being tested"
    assert 0.05 <= np.median(parts[10:]) <= 0.25, "a ninth is fair"
    assert sum(seconds) <= 1.25 * sum(without_s)


def test_a_known_device_that_claims_everything_is_corrected_without_bound() -> None:
    fleet = Fleet(8, newcomers=False)
    parts, seconds = zip(*[fleet.multiply() for _ in range(40)], strict=True)
    assert np.median(parts[-10:]) <= 0.4, "without the correction, all of every product"
    assert np.median(seconds[-10:]) < 0.5 * max(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "slow"), [(2, 1), (3, 1), (6, 2), (13, 4), (30, 10)])
def test_a_third_of_the_fleet_that_became_slower_gets_less_whether_or_not_it_is_overdue(
    devices: int, slow: int
) -> None:
    """Just within four times its time no block is overdue, and too many are late for the others to be normal."""
    fleet = Fleet(devices - 1, newcomers=False, claim=HONEST, slow=[3.9] * slow)
    without = Fleet(devices - slow - 1, newcomers=False, claim=HONEST)
    seconds = [fleet.multiply()[1] for _ in range(120)]
    assert np.median(seconds[-20:]) <= 1.3 * without.multiply()[1], "without the correction, up to 2.8 times"


def test_the_correction_of_a_profile_has_no_bound() -> None:
    slowness = Slowness()
    slowness.overtaken(0, 4.0)

    def corrected(times: int, ratio: float) -> None:
        for _ in range(times):
            slowness.take_changes()
            for _ in range(NOW.answers):
                slowness.answered(0, ratio)

    corrected(10, 100.0)
    assert slowness.factor[0] > 1e9
    corrected(100, 100.0)
    assert slowness.factor[0] == MAX_RATE
    corrected(10, 0.01)
    assert slowness.take_changes() == {0: 1.0}, "the correction is undone"


def test_many_late_blocks_of_one_plan_count_as_one_correction() -> None:
    slowness = Slowness()
    for _ in range(1000):
        slowness.overtaken(0, 5.0)
    assert slowness.factor[0] == 5.0
    for _ in range(1000):
        slowness.answered(0, 3.0)
    assert slowness.take_changes() == {0: 3.0}, "all of them were expected by the same profile"
    for _ in range(1000):
        slowness.answered(0, 2.0)
    assert slowness.factor[0] == 6.0


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.booleans()), max_size=60))
def test_a_newcomer_is_never_credited_with_more_than_it_claims_or_has_shown(
    blocks: list[tuple[float, bool]],
) -> None:
    told, newcomers, reached = pack_profiles([BOASTS]), Newcomers(), (1 / planning_settings.NOW.trials)
    newcomers.begin(0, (1e9, 1e6, 1e6))
    for job, (ratio, in_time) in enumerate(blocks):
        if 0 not in newcomers.beliefs:
            break
        newcomers.answered(0, job, min(ratio, NOW.in_time) if in_time else ratio)
        newcomers.finished(job)
        reached = reached * NOW.growth if in_time or ratio <= NOW.in_time else reached
        assert newcomers.beliefs[0].times <= reached * (1 + 1e-9)
        rates = newcomers.beliefs[0].rates((MAX_RATE, MAX_RATE, 2e6))
        assert all(0 < rate <= claim for rate, claim in zip(rates, (MAX_RATE, MAX_RATE, 2e6), strict=True))
        newcomers.take_changes(told)


def test_unchecked_products_raise_no_credit() -> None:
    newcomers = Newcomers()
    newcomers.begin(0, (1e9, 1e6, 1e6))
    newcomers.answered(0, 7, 0.5)
    assert newcomers.beliefs[0].times == (1 / planning_settings.NOW.trials), "the product is not checked yet"
    newcomers.finished(7)
    assert newcomers.beliefs[0].times == (1 / planning_settings.NOW.trials) * NOW.growth


def test_a_newcomer_is_not_blamed_where_all_devices_take_longer_than_modelled() -> None:
    newcomers = Newcomers()
    newcomers.begin(0, (1e9, 1e6, 1e6), times=1.0)
    for job in range(10):
        newcomers.answered(1, job, 2.0)
        newcomers.answered(0, job, 2.1)
        newcomers.finished(job)
    assert newcomers.beliefs[0].times > 100
    before = newcomers.beliefs[0].times
    newcomers.answered(1, 10, 2.0)
    newcomers.answered(0, 10, 4.0)
    newcomers.finished(10)
    assert newcomers.beliefs[0].times == before / 2, "it took twice as long as the others"


def test_noise_takes_no_work_away_from_a_newcomer() -> None:
    newcomers = Newcomers()
    newcomers.begin(0, (1e9, 1e6, 1e6), times=1.0)
    for job, ratio in enumerate([1.25, 0.8] * 20):
        newcomers.answered(0, job, ratio)
        newcomers.finished(job)
    assert newcomers.beliefs[0].times >= 1.0


def test_of_two_devices_the_claim_of_one_is_not_typical() -> None:
    assert typical_rates(pack_profiles([BOASTS, HONEST]), [0, 1]) == (HONEST.flops, HONEST.down_bps, HONEST.up_bps)


def test_newcomers_alone_share_by_what_they_claim_and_one_gets_everything() -> None:
    for count in (1, 2, 5):
        dispatcher, planner = Dispatcher(Planner()), Planner()
        profiles = pack_profiles([HONEST] * count)
        dispatcher.handle(DevicesJoined(0, profiles, newcomers=True))
        (sent,) = [
            i
            for i in dispatcher.handle(JobsSubmitted([Submission(0, Request(SHAPE), True)]))
            if isinstance(i, SendBlocks)
        ]
        dispatcher.check()
        (usual,) = planner.plan([Request(SHAPE)], profiles, np.arange(count))
        assert set(sent.devices) == set(usual.device.tolist())


def test_a_silent_newcomer_gets_single_small_blocks_at_growing_intervals() -> None:
    fleet = VirtualFleet(pack_profiles([*[HONEST] * 6, BOASTS]))
    fleet.join(6)
    fleet.join(1, newcomers=True)
    cells, given_at = 0, []
    flying: set[Key] = set()  # blocks on devices that answer
    for job in range(60):
        outcome = fleet.submit([Work(job, SHAPE)])
        while job not in outcome.finished:
            if silent := [sent for sent in outcome.sent if sent.key[0] == 6]:
                given_at.append(fleet.now_s)
                cells += sum(sent.box[1] * sent.box[3] * sent.box[5] for sent in silent)
            flying |= {sent.key for sent in outcome.sent if sent.key[0] != 6}
            flying -= set(outcome.cancelled)
            if flying:
                fleet.now_s += 0.05
                outcome = fleet.answer(sorted(flying))
                flying.clear()
            else:
                fleet.now_s = max(fleet.now_s, fleet.next_look_s)
                outcome = fleet.look()
            fleet.check()
        fleet.now_s += 2.0
    assert cells <= 0.02 * 60 * SHAPE.cells
    pauses = np.diff(given_at)
    assert len(given_at) <= 6, "in two minutes"
    assert (np.diff(pauses) > 0).all()


# ---- trial blocks


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 300), st.integers(1, 64), st.integers(2, 300))
def test_a_plan_with_trial_blocks_covers_every_cell_once_and_none_is_large(
    seed: int, batch: int, rows: int, inner: int, columns: int
) -> None:
    shape = Shape(batch, rows, inner, columns)
    profiles = uniform_fleet("extreme", 12, seed=seed)
    (plan,) = Planner().plan([Request(shape)], profiles, np.arange(9))
    probed = with_trial_blocks(plan, shape, profiles, [9, 10, 11])
    assert_covers_exactly_once(probed, shape)
    for device in (9, 10, 11):
        mine = probed.boxes[probed.device == device]
        assert len(mine) <= 1
        assert mine[:, 1::2].prod(axis=1).sum() <= 0.25 * shape.cells + 1


# ---- a capped share


def parts(plan: Plan, shape: Shape) -> NDArray[np.float64]:
    cells = np.bincount(plan.device, plan.boxes[:, 1::2].prod(axis=1))
    return np.asarray(cells / shape.cells)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.25, 0.5]), st.sampled_from(["packed", "grid"]))
def test_a_strict_cap_holds_for_any_claims(seed: int, share: float, kind: str) -> None:
    shape = Shape(1, 400, 64, 500)
    profiles = uniform_fleet("extreme", 30, seed=seed)
    profiles["flops"][3] = profiles["down_bps"][3] = profiles["up_bps"][3] = MAX_RATE
    planner = Planner(kind, Cap(share, strict=True))  # type: ignore[arg-type]
    (plan,) = planner.plan([Request(shape)], profiles, np.arange(30))
    assert_covers_exactly_once(plan, shape)
    assert parts(plan, shape).max() <= share + 500 / shape.cells


def test_a_cap_that_binds_no_device_changes_nothing() -> None:
    profiles, able = uniform_fleet("paper", 60, seed=1), np.arange(60)
    requests = [Request(Shape(1, 256, 64, 256)), Request(Shape(1, 128, 512, 256))]
    for asked in (requests[:1], requests):
        usual, same = (Planner("packed", cap).plan(asked, profiles, able) for cap in (NO_CAP, Cap(0.9, strict=True)))
        for one, other in zip(usual, same, strict=True):
            assert one.boxes.tobytes() == other.boxes.tobytes()
            assert one.device.tobytes() == other.device.tobytes()
            assert one.makespan_s == other.makespan_s


def test_the_default_cap_yields_where_the_others_are_too_slow() -> None:
    """A fast laptop and seven slow phones: leaving half of it to the phones would take several times as long."""
    laptop = replace(HONEST, flops=5e11, down_bps=1e9, up_bps=1e9, latency_s=0.001)
    profiles, able, request = pack_profiles([laptop, *[HONEST] * 7]), np.arange(8), Request(SHAPE)
    (usual,) = Planner().plan([request], profiles, able)
    (same,) = Planner("packed", YIELDING).plan([request], profiles, able)
    (strict,) = Planner("packed", Cap(0.5, strict=True)).plan([request], profiles, able)
    assert parts(usual, SHAPE)[0] > 0.8
    assert same.makespan_s == usual.makespan_s
    assert parts(strict, SHAPE)[0] <= 0.5 + 600 / SHAPE.cells
    assert strict.makespan_s > 1.5 * usual.makespan_s


def test_the_default_cap_holds_where_the_others_are_fast_enough() -> None:
    rich = replace(HONEST, flops=6.4 * HONEST.flops, down_bps=6.4 * HONEST.down_bps, up_bps=6.4 * HONEST.up_bps)
    profiles, able, request = pack_profiles([rich, *[HONEST] * 6]), np.arange(7), Request(Shape(1, 2000, 64, 2000))
    (usual,) = Planner().plan([request], profiles, able)
    (bound,) = Planner("packed", YIELDING).plan([request], profiles, able)
    assert parts(usual, request.shape)[0] > 0.5
    assert parts(bound, request.shape)[0] <= 0.5 + 2000 / request.shape.cells
    assert bound.makespan_s <= 1.05 * usual.makespan_s


# ---- a real agent


@pytest.mark.slow
def test_a_real_agent_that_claims_everything_gets_little_first_and_does_not_delay_the_others(
    start: Start, serve: Serve
) -> None:
    """It computes 50 MFLOP/s and claims 1e15 FLOP/s."""
    server = serve()
    pod(start, server, 8, "model")
    liar = start("-c", LIAR, "--ps", server.address, "--name", "boaster", *FAST)
    liar.expect("kernel")
    assert server.wait_for_devices(9, LIMIT_S)
    shares, counted = [], 0
    for seed in range(12):
        Multiplication(server, (1, 256, 128, 256), seed=seed).check()
        columns = server.records.columns()
        cells = (columns["batches"] * columns["rows"] * columns["columns"])[counted:]
        device = columns["device"][counted:]
        counted += len(cells)
        shares.append(float(cells[device == 8].sum() / cells.sum()))
    assert max(shares[:2]) <= 0.05
    most = NOW.growth / (8 + NOW.growth)  # one step of growth beyond a typical device's fair share
    assert max(shares) <= most, "without the limit, all of every product"
    assert float(server.profiles["flops"][8]) < MAX_RATE
