"""Promises of the check's parts: errors beyond rounding are found, right results are never called wrong.

Attacks on the whole check are in test_attack_lies.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.compute.kernels import Kernel, NumpyKernel
from ps.planning.cost import Integers
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.verification.audit import WINDOW, Audits, nearest_zero
from ps.verification.drift import BIAS_LIMIT, ENERGY_LIMIT, Drift
from ps.verification.fuse import LATELY, Fuse, State
from ps.verification.glance import FIRST, ONE_OF, Lot
from ps.verification.own_kernels import in_lanes, own_products
from ps.verification.recompute import (
    SAMPLED_TERMS,
    Evidence,
    Exact,
    Patch,
    examine,
    independent,
    one_after_the_other,
    repeats,
)
from ps.verification.rounding import EPSILON, TINY, Floats, floor, norms, upper
from ps.verification.sketch import PATCH, Energies, Expectation, box_sums, grid_bounds, random_vector, sums_of
from ps.verification.verifier import AGAIN_TERMS, EXAMINED_TERMS, MOST_SUSPECTS, OWN_TERMS, Findings, Verifier
from testbed.bench.here import MOST_BLOCKS, Enough, Training, plainly, random_boxes
from testbed.bench.honest import Honest, all_kernels
from testbed.runs.run import loss_difference

Array = NDArray[np.float32]


def check(left: Array, right: Array, out: Array, boxes: Integers, seed: int = 0) -> Findings:
    """Every box comes from a device of its own."""
    expected, devices = Expectation.of(left, right, boxes, seed), np.arange(len(boxes))
    return Verifier(seed).check(left, right, out, boxes, devices, expected, len(boxes))


def watch(model_name: str, steps: int, look: Callable[[Product], None]) -> None:
    def compute(product: Product) -> None:
        plainly(product)
        look(product)

    Training(model_name).run(compute, steps)


def quarters(product: Product) -> Integers:
    """The output cut in four, by rows and columns."""
    batch, rows, columns = product.out.shape
    r, c = rows // 2, columns // 2
    return np.array([(0, batch, y, h, x, w) for y, h in ((0, r), (r, rows - r)) for x, w in ((0, c), (c, columns - c))])


def factors(seed: int, shape: tuple[int, int, int, int]) -> tuple[Array, Array]:
    batch, rows, inner, columns = shape
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, rows, inner), dtype=np.float32), rng.standard_normal(
        (batch, columns, inner), dtype=np.float32
    )


# ---- real products


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["opt-tiny", "llama-tiny"])
def test_real_activations_and_gradients_stay_well_below_the_suspicion_level(model_name: str) -> None:
    loudest: list[float] = []

    def look(product: Product) -> None:
        left, right, boxes = product.left.array, product.right.array, quarters(product)
        energies = Energies.of(Expectation.of(left, right, boxes, len(loudest)), product.out, boxes)
        loudest.append(float(energies.total.sum() / energies.patches.sum()))
        assert not check(left, right, product.out, boxes, len(loudest)).wrong

    watch(model_name, 2, look)
    assert len(loudest) > 90
    assert np.median(loudest) < 0.5
    assert max(loudest) < 3, f"{max(loudest)}: beyond what chance gives with few patches"


def spoilt(block: Array, how: str) -> Array:
    changed = block.copy()
    match how:
        case "noise":
            changed += np.float32(np.abs(block).mean() + 1e-6)
        case "element":
            changed.flat[0] += np.float32(np.abs(block).max() + 1e-6)
        case "stale":
            changed = np.roll(block, 1, axis=-2) + np.float32(1e-3)
        case "zeros":
            changed[:] = 0
        case _:
            changed.flat[-1] = np.float32(how)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("how", ["noise", "element", "stale", "zeros", "nan", "inf"])
def test_a_wrong_block_of_a_real_product_is_found_and_no_other_is_accused(how: str) -> None:
    seen = 0

    def look(product: Product) -> None:
        nonlocal seen
        left, right, out, boxes = product.left.array, product.right.array, product.out, quarters(product)
        bad = seen % 4
        b, bs, r, rs, c, cs = boxes[bad].tolist()
        good = out[b : b + bs, r : r + rs, c : c + cs].copy()
        if how == "zeros" and not np.abs(good).max() > 1e-6:
            return  # the block is zero
        out[b : b + bs, r : r + rs, c : c + cs] = spoilt(good, how)
        found = check(left, right, out, boxes, seen)
        assert found.wrong == [bad], product.name
        assert list(found.why) == [bad]
        out[b : b + bs, r : r + rs, c : c + cs] = good
        seen += 1

    watch("opt-tiny", 1, look)
    assert seen > 40


# ---- products of any size and scale

sizes = st.integers(1, 12)
scales = st.sampled_from([0.0, 1e-44, 1e-38, 1e-30, 1e-18, 1.0, 1e15, 1e19, 1e30, 1e38])


@pytest.mark.slow
@given(st.integers(1, 3), sizes, st.integers(1, 200), sizes, st.integers(0, 2**32 - 1), scales, scales)
def test_right_products_of_any_size_and_scale_pass(
    b: int, m: int, n: int, q: int, seed: int, one: float, two: float
) -> None:
    left, right = factors(seed, (b, m, n, q))
    with np.errstate(all="ignore"):
        left, right = (left * one).astype(np.float32), (right * two).astype(np.float32)
        out = left @ right.transpose(0, 2, 1)
    boxes = random_boxes(out.shape, np.random.default_rng(seed))
    found = check(left, right, out, boxes, seed)
    assert replace(found, examined=0) == Findings()  # a suspicion may be wrong now and then, an accusation may not


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-12, 1.0, 1e18]), st.sampled_from([1e-3, 1.0, np.nan]))
def test_a_wrong_cell_is_found_whatever_the_scale_of_its_row(seed: int, scale: float, lie: float) -> None:
    left, right = factors(seed, (1, 30, 40, 20))
    left[0, 7] *= np.float32(scale)
    out = left @ right.transpose(0, 2, 1)
    boxes = np.array([(0, 1, r, 15, c, 10) for r in (0, 15) for c in (0, 10)])
    out[0, 7, 13] += np.float32(lie * np.linalg.norm(left[0, 7].astype(np.float64)))
    assert check(left, right, out, boxes, seed).wrong == [1]


def test_a_row_of_zeros_gives_zeros() -> None:
    left, right = factors(0, (1, 30, 40, 20))
    left[0, 7] = 0
    out = left @ right.transpose(0, 2, 1)
    boxes = np.array([(0, 1, 0, 30, 0, 20)])
    assert not check(left, right, out, boxes).wrong
    out[0, 7, 3] = 1e-12
    assert check(left, right, out, boxes).wrong == [0]


def test_an_infinity_of_the_true_product_is_right_and_any_other_is_wrong() -> None:
    left, right = np.ones((1, 4, 8), np.float32), np.ones((1, 4, 8), np.float32)
    left[0, 1, 0] = np.inf
    right[0, 2, 3] = np.nan
    with np.errstate(invalid="ignore"):
        out = left @ right.transpose(0, 2, 1)
    boxes = np.array([(0, 1, i, 2, 0, 4) for i in (0, 2)])
    assert not check(left, right, out, boxes).wrong
    out[0, 3, 0] = np.inf
    assert check(left, right, out, boxes).wrong == [1]
    out[0, 3, 0], out[0, 1, 1] = 8, 8  # finite where the true product is not
    assert check(left, right, out, boxes).wrong == [0]


def test_a_sum_whose_partial_sums_may_overflow_may_be_infinite_but_not_another_number() -> None:
    left, right = np.full((1, 1, 3), 2e19, np.float32), np.array([[[1e19, 1e19, -1e19]]], np.float32)
    boxes = np.array([(0, 1, 0, 1, 0, 1)])
    for cell, is_right in ((2e38, True), (np.inf, True), (np.nan, True), (1e38, False), (-2e38, False)):
        out = np.array([[[cell]]], np.float32)
        assert (check(left, right, out, boxes) == Findings()) is is_right, cell


def test_operands_may_have_either_memory_layout() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((6, 9), dtype=np.float32), rng.standard_normal((9, 5), dtype=np.float32)
    assert not check(a[None], b.T[None], (a @ b)[None], np.array([(0, 1, 0, 6, 0, 5)])).wrong


# ---- the sketch


@given(st.integers(0, 2**32 - 1), st.integers(1, 50))
def test_no_small_random_factor_hides_a_cell(seed: int, count: int) -> None:
    vector = random_vector((count,), np.random.default_rng(seed))
    assert np.abs(vector).min() >= 0.5
    assert np.abs(vector).max() <= 1.5


def test_signs_and_magnitudes_of_the_vector_are_not_always_the_same() -> None:
    vector = random_vector((10_000,), np.random.default_rng(0))
    assert 4_700 < (vector > 0).sum() < 5_300
    assert len(np.unique(np.abs(vector))) > 9_900
    assert abs(float(np.abs(vector).mean()) - 1) < 0.02


@given(st.integers(1, 3), st.integers(1, 700), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_sums_over_intervals_are_those_of_reduceat(batch: int, extent: int, inner: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    array, vector = rng.standard_normal((batch, extent, inner)), rng.standard_normal((batch, extent))
    bounds = grid_bounds(np.sort(rng.integers(extent, size=3)), np.zeros(3, np.int64), extent)
    assert np.diff(bounds).max() <= PATCH
    expected = np.add.reduceat(array * vector[:, :, None], bounds[:-1], axis=1)
    got = sums_of(array.astype(np.float32), vector.astype(np.float32), bounds)
    np.testing.assert_allclose(got, expected, atol=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_box_sums_are_sums_over_boxes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.random((3, 4, 5))
    edges = [np.sort(rng.choice(extent + 1, 2, replace=False)) for extent in values.shape]
    (b0, b1), (r0, r1), (c0, c1) = edges
    (got,) = box_sums(values, np.concatenate(edges)[None])
    assert got == pytest.approx(values[b0:b1, r0:r1, c0:c1].sum())


def test_an_expectation_knows_whether_a_block_was_cut_since() -> None:
    left, right = factors(0, (1, 100, 8, 100))
    expected = Expectation.of(left, right, np.array([(0, 1, 0, 100, 0, 100)]), 0)
    assert expected.fits(np.array([(0, 1, 0, 64, 0, 100), (0, 1, 64, 36, 0, 100)]))
    assert not expected.fits(np.array([(0, 1, 0, 50, 0, 100), (0, 1, 50, 50, 0, 100)]))


# ---- rounding and evidence


def test_norms_neither_vanish_nor_overflow() -> None:
    values = np.array([[[3e-30, 4e-30], [3e30, 4e30], [0, 0], [1e-44, 0], [np.inf, 1]]], np.float32)
    got = norms(values)[0]
    np.testing.assert_allclose(got[:3], [5e-30, 5e30, 0], rtol=1e-6)
    assert got[3] > 0
    assert not np.isfinite(got[4])


def test_the_error_of_flushing_to_zero_is_below_the_floor() -> None:
    rng = np.random.default_rng(0)
    left, right = (
        (rng.standard_normal((8, 50)) * 1e-38).astype(np.float32),
        rng.standard_normal((8, 50)).astype(np.float32),
    )
    lost = np.abs(left.astype(np.float64) @ right.T.astype(np.float64)) * (np.abs(left).max() < 10 * TINY)
    rows, columns = (np.linalg.norm(x.astype(np.float64), axis=1) for x in (left, right))
    flushed = np.where(np.abs(left) < TINY, 0, left).astype(np.float64) @ right.T.astype(np.float64)
    truth = left.astype(np.float64) @ right.T.astype(np.float64)
    assert lost.max() > 0
    assert (np.abs(flushed - truth) <= floor(rows[:, None], columns, 50)).all()


def test_chance_exceeds_the_upper_bound_as_rarely_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 10, 100):
        means = (rng.standard_normal((200_000, count)) ** 2).mean(axis=1)
        share = (means > upper(float(count), 2.326)).mean()  # one in a hundred
        assert 0.007 < share < 0.013


def test_every_own_kernel_is_acquitted_and_each_way_of_being_wrong_is_named() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((64, 200), dtype=np.float32) for _ in range(2))
    for own in own_products(left, right):
        assert not examine(left, right, own, rng).against
    out = left @ right.T
    size = EPSILON * np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=1)
    one = out.copy()
    one[3, 4] += 20 * size[3, 4]
    some = {
        "errors have a sign": out + 0.15 * size,
        "times those of rounding": out + 2 * size * rng.choice([-1, 1], out.shape),
        "a cell is off": one,
        "no float32 kernel": np.where(one == one[5, 5], np.nan, out),
    }
    for reason, cells in some.items():
        assert reason in examine(left, right, cells.astype(np.float32), rng).against


def test_repeated_cells_count_as_one_observation_over_all_patches() -> None:
    some = np.random.default_rng(0).standard_normal(50)
    assert independent(some) == pytest.approx(50)
    assert independent(np.repeat(some, 40)) == pytest.approx(50)
    assert independent(np.concatenate([np.full(1000, 0.3), some])) < 1.2
    patch = Patch(np.full(500, 0.7), 0, 2.0, 0.1, 0.01, 0.1)
    evidence = Evidence.of([patch, patch])
    assert evidence.cells == pytest.approx(1)
    assert evidence.own_square == pytest.approx(0.1)  # the level: a single own error is weak evidence
    assert not evidence.against
    assert not Evidence.of([]).against


def test_repeated_terms_are_counted_and_zeros_are_not() -> None:
    rng = np.random.default_rng(0)
    ones, some = np.ones((2, 5000), np.float32), rng.standard_normal((2, 5000), dtype=np.float32)
    assert repeats(ones, ones, rng) == pytest.approx(5000)
    assert repeats(ones, some, rng) < 1.2
    half = np.where(np.arange(5000) % 2, ones, 0).astype(np.float32)
    assert repeats(half, ones, rng) == pytest.approx(2500, rel=0.1)
    assert repeats(half, some, rng) < 1.2


@pytest.mark.parametrize("inner", [1, 7, 16, 300, 5000])
def test_each_lane_adds_every_nth_term(inner: int) -> None:
    rng = np.random.default_rng(inner)
    left, right = (rng.standard_normal((extent, inner), dtype=np.float32) for extent in (5, 3))
    one, four = in_lanes(left, right, (1, 4))
    np.testing.assert_array_equal(one, one_after_the_other(left[:, None], right[None]))
    sums = np.zeros((4, 5, 3), np.float32)
    for k in range(inner // 4 * 4):
        sums[k % 4] += left[:, k, None] * right[:, k]
    expected = sums[0] + sums[1] + sums[2] + sums[3]
    for k in range(inner // 4 * 4, inner):
        expected += left[:, k, None] * right[:, k]
    np.testing.assert_array_equal(four, expected)


def test_a_bias_that_own_kernels_share_is_no_evidence() -> None:
    alone = Evidence(1000, 1.0, 0.9, 1.0, 0.0, 0.5, 0)
    assert "have a sign" in alone.against
    assert not replace(alone, own_mean=0.9).against


@pytest.mark.parametrize("live", [1, 8, 64])
def test_rows_of_zeros_do_not_dilute_the_evidence(live: int) -> None:
    rng = np.random.default_rng(live)
    left, right = (rng.standard_normal((64, 256), dtype=np.float32) for _ in range(2))
    left[live:] = 0
    honest = left @ right.T
    size = np.sqrt((left * left).sum(1))[:, None] * np.sqrt((right * right).sum(1))
    lie = honest + 8 * np.float32(0.3 * EPSILON) * size * rng.choice([-1, 1], honest.shape).astype(np.float32)
    assert not examine(left, right, honest, rng).against
    assert examine(left, right, lie, rng).against


def test_terms_are_added_one_after_the_other() -> None:
    terms = np.array([[1e8, 1.0, -1e8, 1.0]], np.float32)
    assert one_after_the_other(terms, np.ones_like(terms)).tolist() == [1.0]


# ---- drift


def test_honest_energies_and_errors_never_become_a_suspicion() -> None:
    rng, drift, devices = np.random.default_rng(0), Drift(), np.arange(50)
    for _ in range(2000):
        drift.blocks(devices, 0.5 * rng.chisquare(10, 50), np.full(50, 10.0))
        drift.audited(devices, 0.5 * rng.standard_normal(50))
        assert not len(drift.suspects())


def test_a_steady_lie_becomes_a_suspicion_and_an_acquittal_doubles_the_limit() -> None:
    drift = Drift()

    def products_until(tell: Callable[[], None]) -> int:
        for count in range(1, 1000):
            tell()
            if drift.suspects().tolist() == [2]:
                return count
        raise AssertionError("never suspected")

    def energy() -> None:
        drift.blocks(np.arange(4), np.array([5.0, 5, 20, 5]), np.full(4, 10.0))

    def bias() -> None:
        drift.audited(np.arange(4), np.array([0.1, -0.1, -1.0, 0]))

    assert products_until(energy) == ENERGY_LIMIT / 10 + 1
    drift.acquit(2)
    assert products_until(energy) == 2 * ENERGY_LIMIT / 10 + 1
    drift.acquit(2)
    assert products_until(bias) == 4 * BIAS_LIMIT / 0.75 + 1


def test_errors_that_are_not_finite_are_no_evidence() -> None:
    drift = Drift()
    drift.audited(np.zeros(100, np.int64), np.full(100, np.nan))
    assert not len(drift.suspects())


# ---- the fuse


def test_the_fuse_doubts_accusations_of_several_devices_at_once_or_of_many_recently() -> None:
    fuse = Fuse()
    fuse.next_product()
    assert fuse.accuse([1], 1000) is State.TRUSTING
    assert fuse.accuse([1, 2, 3], 1000) is State.DOUBTING
    small = Fuse()
    assert small.accuse([1], 10) is State.TRUSTING
    small.next_product()
    assert small.accuse([2], 10) is State.DOUBTING
    for _ in range(LATELY):
        small.next_product()
    assert small.accuse([3], 10) is State.TRUSTING


def test_the_fuse_blows_when_the_check_failed_twice_and_recovers() -> None:
    fuse = Fuse()
    for _ in range(2):
        fuse.next_product()
        fuse.at_fault()
        fuse.at_fault()  # the same product
    assert fuse.accuse([1], 1000) is State.BLOWN
    for _ in range(LATELY):
        fuse.next_product()
    assert fuse.accuse([1], 1000) is State.TRUSTING


def test_a_check_that_fails_its_own_kernels_suspends_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices are honest; the server's estimate of rounding is wrong by a factor of a thousand."""
    left, right = factors(0, (1, 64, 100, 64))
    out = left @ right.transpose(0, 2, 1)
    boxes = np.array([(0, 1, r, 16, c, 16) for r in range(0, 64, 16) for c in range(0, 64, 16)])
    monkeypatch.setattr("ps.verification.rounding.PLAIN", 1e-3)
    monkeypatch.setattr("ps.verification.rounding.COHERENT", 0.0)
    monkeypatch.setattr("ps.verification.recompute.TIMES_SQUARED", 1e-6)
    expected, verifier = Expectation.of(left, right, boxes, 0), Verifier(0)
    for product in range(4):
        found = verifier.check(left, right, out, boxes, np.arange(16), expected, 16)
        assert not found.wrong
        assert "fails the check too" in found.doubted, product
    out[0, 5, 5] = np.nan  # a value that no kernel gives is still evidence
    assert verifier.check(left, right, out, boxes, np.arange(16), expected, 16).wrong == []
    monkeypatch.undo()
    assert verifier.check(left, right, out, boxes, np.arange(16), expected, 16).wrong == [0]


# ---- operands that repeat

ONE, TWO = np.full((1, 40, 300), 0.1, np.float32), np.full((1, 48, 300), 0.3, np.float32)
SOME_ROW = np.random.default_rng(3).standard_normal((1, 1, 300), dtype=np.float32)
REPEATED = {
    "constant": (ONE, TWO),
    "one row": (np.repeat(SOME_ROW, 40, 1), factors(1, (1, 1, 300, 48))[1]),
    "one row and column": (np.repeat(SOME_ROW, 40, 1), np.repeat(SOME_ROW[..., ::-1], 48, 1)),
    "up and down": (np.where(np.arange(300) < 150, ONE, -ONE).astype(np.float32), TWO),
    "rows of constants": (ONE * factors(1, (1, 40, 1, 1))[0], TWO),
}


@pytest.mark.parametrize("operands", REPEATED)
@pytest.mark.parametrize("kernel", all_kernels(), ids=lambda kernel: kernel.name)
def test_repeated_operands_accuse_no_device(operands: str, kernel: Kernel) -> None:
    """All cells share one error, or a few: that is no evidence of a bias, nor of its size."""
    left, right = REPEATED[operands]
    out = kernel.product(left, right.transpose(0, 2, 1))
    boxes = np.array([(0, 1, 0, 40, 0, 48)])
    for seed in range(10):
        assert not check(left, right, out, boxes, seed).why


@pytest.mark.parametrize("operands", REPEATED)
def test_repeated_operands_hide_no_lie_of_a_thousandth(operands: str) -> None:
    left, right = REPEATED[operands]
    out = left @ right.transpose(0, 2, 1)
    size = norms(left)[:, :, None] * norms(right)[:, None, :]
    out[:, :, 30:] += np.float32(1e-3) * size[:, :, 30:].astype(np.float32)
    boxes = np.array([(0, 1, 0, 40, 0, 24), (0, 1, 0, 40, 24, 24)])
    assert check(left, right, out, boxes).wrong == [1]


@pytest.mark.parametrize("inner", [512, 8192])
def test_an_own_kernel_that_is_exact_by_luck_in_many_cells_is_no_evidence(inner: int) -> None:
    """Each row repeats one number, times half ones and half minus ones. Most kernels add up and down the same way and
    are exact in all cells; a kernel that adds in lanes, or in chunks of another size, is not."""
    rng = np.random.default_rng(0)
    left = np.repeat(rng.standard_normal((1, 256, 1), dtype=np.float32), inner, 2)
    right = np.where(np.arange(inner) < inner // 2, 0.3, -0.3).astype(np.float32) * np.ones((1, 6, 1), np.float32)
    boxes = np.array([(0, 1, 0, 256, 0, 6)])
    for chunk in (inner, inner * 3 // 5, inner // 3, inner // 4 + 1):
        out = np.zeros((1, 256, 6), np.float32)
        for start in range(0, inner, chunk):
            one, two = left[0, :, start : start + chunk], right[0, :, start : start + chunk]
            out[0] += in_lanes(one, two, (1,))[0]
        for seed in range(4):
            assert not check(left, right, out, boxes, seed).why, chunk


# ---- many liars, and their cost


@pytest.mark.slow
@pytest.mark.parametrize("inner", [256, 11_008, 131_072])
def test_the_work_of_one_check_is_bounded_for_any_number_of_liars(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound, 25 liars at an inner length of 131,072 kept the server busy for minutes."""
    blocks = 25 if inner < 20_000 else 9
    side = 64 * int(np.sqrt(blocks))
    left, right = factors(0, (1, side, inner, side))
    size = norms(left)[:, :, None] * norms(right)[:, None, :]
    signs = np.random.default_rng(1).choice([-1, 1], size.shape)
    out = (left @ right.transpose(0, 2, 1) + 40 * EPSILON * signs * size).astype(np.float32)
    boxes = np.array([(0, 1, r, 64, c, 64) for r in range(0, side, 64) for c in range(0, side, 64)])
    exact, own = [], []
    begin, products = Exact.__init__, own_products

    def counted(self: Exact, one: Array, two: Array, *norms: Floats) -> None:
        exact.append(one.size * len(two))
        begin(self, one, two, *norms)

    def asked(one: Array, two: Array) -> tuple[Array, ...]:
        own.append(one.size * len(two))
        return products(one, two)

    monkeypatch.setattr(Exact, "__init__", counted)
    monkeypatch.setattr("ps.verification.recompute.own_products", asked)
    found = check(left, right, out, boxes)
    assert len(found.wrong) >= 0.8 * blocks
    assert sum(exact) <= 1.2 * (EXAMINED_TERMS + AGAIN_TERMS)
    assert sum(own) <= OWN_TERMS + 5 * max(SAMPLED_TERMS, inner)


def test_more_suspects_than_one_check_examines_are_found_one_after_the_other() -> None:
    left, right = factors(0, (1, 96, 50, 96))
    boxes = np.array([(0, 1, r, 8, c, 8) for r in range(0, 96, 8) for c in range(0, 96, 8)])
    truth = left @ right.transpose(0, 2, 1)
    out, devices, verifier = truth * np.float32(1.01), np.arange(len(boxes)), Verifier(0)
    expected, found = Expectation.of(left, right, boxes, 0), set()
    for turn in range(5):
        wrong = verifier.check(left, right, out, boxes, devices, expected, 1000, again=turn > 0).wrong
        assert len(wrong) <= MOST_SUSPECTS
        found |= set(wrong)
        for index in wrong:  # computed again
            _, _, r, rs, c, cs = boxes[index]
            out[:, r : r + rs, c : c + cs] = truth[:, r : r + rs, c : c + cs]
    assert len(found) == len(boxes)


# ---- cells that are not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e30])
def test_a_cell_that_is_not_finite_makes_no_other_device_a_suspect(value: float) -> None:
    left, right = factors(0, (1, 256, 128, 256))
    out = left @ right.transpose(0, 2, 1)
    out[0, 100, 100] = value
    boxes = np.array([(0, 1, r, 8, c, 8) for r in range(0, 256, 8) for c in range(0, 256, 8)])
    found = check(left, right, out, boxes)
    assert found.wrong == [100 // 8 * 32 + 100 // 8]
    assert found.examined <= 2  # a suspicion may be wrong now and then


def test_an_acquittal_changes_only_the_sums_of_the_device_suspected_for_them() -> None:
    drift, devices = Drift(), np.arange(3)
    drift.blocks(devices, np.array([30.0, 30, 0]), np.ones(3))
    drift.blocks(devices, np.array([30.0, 1, 0]), np.ones(3))
    assert drift.suspects().tolist() == [0]
    drift.explained(0)  # its block alone was loud, and right
    assert not len(drift.suspects())
    drift.blocks(devices, np.array([15.0, 15, 0]), np.ones(3))
    assert drift.suspects().tolist() == [0, 1]  # as without that product, with the same limits


# ---- audits


@pytest.mark.parametrize(("inner", "levels"), [(64, 20), (64, 45), (2048, 45)])
def test_an_audit_that_hits_a_lie_is_evidence_wherever_the_lie_is(
    inner: int, levels: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = factors(0, (1, 512, inner, 512))
    out = left @ right.transpose(0, 2, 1)
    cell = 0, 400, 401
    out[cell] += np.float32(levels * 0.3 * EPSILON * norms(left)[0, 400] * norms(right)[0, 401])
    boxes, draw = np.array([(0, 1, 0, 512, 0, 512)]), Audits.of

    def hit(*arguments: Any) -> Audits:
        one = draw(*arguments)
        wrong, cells = one.wrong.copy(), one.cells.copy()
        wrong[3], cells[3] = True, cell
        return replace(one, wrong=wrong, cells=cells)

    monkeypatch.setattr(Audits, "of", hit)
    for terms in (EXAMINED_TERMS, 16 * inner):  # also when little more than that cell is examined
        monkeypatch.setattr("ps.verification.verifier.EXAMINED_TERMS", terms)
        monkeypatch.setattr("ps.verification.verifier.AGAIN_TERMS", 0)
        assert check(left, right, out, boxes).wrong == [0]


@given(st.integers(0, 2**32 - 1), st.sampled_from([(40, 30), (200, 10), (1, 300)]))
def test_some_audits_look_at_the_cell_nearest_zero(seed: int, shape: tuple[int, int]) -> None:
    left, right = factors(seed, (2, shape[0], 20, shape[1]))
    out = left @ right.transpose(0, 2, 1)
    boxes = random_boxes(out.shape, np.random.default_rng(seed))
    b, bs, r, rs, c, cs = boxes.T
    size = norms(left), norms(right)
    batch, row, column = b + bs - 1, r + rs - 1, c + cs // 2
    i, j = nearest_zero(out, size, boxes, batch, row, column)
    assert ((r <= i) & (i < r + rs) & (c <= j) & (j < c + cs)).all()
    near = np.abs(out) / (size[0][:, :, None] * size[1][:, None, :])
    for k in np.flatnonzero((rs <= WINDOW) & (cs <= WINDOW))[:20]:
        cells = near[batch[k], r[k] : r[k] + rs[k], c[k] : c[k] + cs[k]]
        assert near[batch[k], i[k], j[k]] == cells.min()


def test_cells_far_off_in_several_patches_are_wrong_even_if_each_patch_is_within_its_limit() -> None:
    """Within one product or a few."""

    def product(seed: int, patches: int) -> tuple[Array, Array, Array]:
        left, right = factors(seed, (1, 64, 200, 64))
        out = left @ right.transpose(0, 2, 1)
        size = norms(left)[:, :, None] * norms(right)[:, None, :]
        for k in range(patches):
            cell = 0, 16 * k + 3, 5
            out[cell] += np.float32(9 * 0.3 * EPSILON) * np.float32(size[cell])
        return left, right, out

    boxes, devices = np.array([(0, 1, r, 16, 0, 64) for r in range(0, 64, 16)]), np.zeros(4, np.int64)

    def why(verifier: Verifier, left: Array, right: Array, out: Array) -> str:
        for _ in range(3):
            verifier.drift.audited(devices, np.full(4, 12.0))  # makes it a suspect
        return verifier.check(left, right, out, boxes, devices, Expectation.of(left, right, boxes, 0), 9).why.get(0, "")

    assert "cells of 4 patches" in why(Verifier(0), *product(0, 4))
    verifier = Verifier(0)
    assert [bool(why(verifier, *product(seed, 1))) for seed in range(3)] == [False, False, True]


def test_the_first_products_are_sketched_and_then_one_of_every_ten() -> None:
    rng = np.random.default_rng(0)
    lot = Lot(lambda below: int(rng.integers(below)))
    drawn = np.array([lot.draw() for _ in range(FIRST + 1000)])
    assert drawn[:FIRST].all()
    places = drawn[FIRST:].reshape(100, ONE_OF)
    assert (places.sum(axis=1) == 1).all()
    assert (places.sum(axis=0) > 0).all()


# ---- the benchmark


@given(st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 70)), st.integers(0, 2**32 - 1))
def test_random_blocks_cover_the_output_exactly(shape: tuple[int, int, int], seed: int) -> None:
    times = np.zeros(shape, np.int8)
    boxes = random_boxes(shape, np.random.default_rng(seed))
    for b, bs, r, rs, c, cs in boxes.tolist():
        times[b : b + bs, r : r + rs, c : c + cs] += 1
    assert (times == 1).all()
    assert len(boxes) <= MOST_BLOCKS


def some_product(seed: int) -> Product:
    left, right = factors(seed, (2, 30, 40, 20))
    return Product(Operand(left), Operand(right), np.full((2, 30, 20), np.nan, np.float32), lambda: None)


def test_the_benchmark_counts_honest_blocks_and_would_count_wrong_ones() -> None:
    class Wrong(NumpyKernel):
        def product(self, left: Array, right: Array) -> Array:
            with np.errstate(all="ignore"):
                return super().product(left, right) * np.float32(1.01)

    for kernel, accused in ((NumpyKernel(), False), (Wrong(), True)):
        honest = Honest([kernel], 2000, np.random.default_rng(0))
        with contextlib.suppress(Enough):
            for seed in range(1000):
                honest.compute(some_product(seed))
        assert 2000 <= honest.blocks < 2000 + 2 * MOST_BLOCKS
        assert (honest.accused > 0.3 * honest.blocks) if accused else (honest.accused == 0)


# ---- losses


@pytest.mark.parametrize(
    ("losses", "reference", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, np.nan], [1.5, np.nan], 0.5),
        ([np.inf, np.nan], [np.inf, np.nan], 0.0),
        ([1.0, np.nan], [1.0, 2.0], np.nan),
        ([np.inf], [-np.inf], np.inf),
    ],
)
def test_a_loss_that_is_not_finite_equals_only_the_same_value(
    losses: list[float], reference: list[float], difference: float
) -> None:
    np.testing.assert_equal(loss_difference(losses, reference), difference)
