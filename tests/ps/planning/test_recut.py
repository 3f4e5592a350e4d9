"""Promises about devices as three queues (ps.planning.cost), and about cutting lost rectangles again over them
(ps.planning.sharing)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.protocol.profile import Profile, pack_profiles
from ps.planning.cost import Passage, QueueTimes, after, alone_s, queue_seconds
from ps.planning.plans import Shape
from ps.planning.settings import NOW
from ps.planning.sharing import shared
from testbed.virtual.plan import fleet_profiles

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
seconds = st.floats(0.0, 10.0)
passages = st.tuples(seconds, seconds, seconds, st.just(1))


# ---- three queues


@given(st.lists(st.tuples(passages, seconds), max_size=8))
def test_a_block_passes_the_queues_in_order_after_the_blocks_sent_before(sent: list[tuple[Passage, float]]) -> None:
    stages, now_s, ends_s = QueueTimes(), 0.0, [0.0, 0.0, 0.0]
    for block, pause_s in sent:
        now_s += pause_s
        begins_s = now_s
        for queue, takes_s in enumerate(block[:3]):
            ends_s[queue] = max(ends_s[queue], begins_s) + takes_s
            begins_s = ends_s[queue]
        assert stages.send(block, now_s) == pytest.approx(ends_s[2])
        assert stages.left(now_s, np.inf) == pytest.approx([max(0.0, end_s - now_s) for end_s in ends_s])


@given(passages, passages, st.integers(1, 6))
def test_the_time_of_equal_blocks_in_sequence_is_known_before_they_are_sent(
    first: Passage, block: Passage, count: int
) -> None:
    stages, waiting = QueueTimes(), QueueTimes()
    stages.send(first, 0.0)
    for _ in range(count):
        waiting.add(block)
    foretold = after(stages.left(0.0, np.inf), waiting, count)
    for _ in range(count):
        stages.send(block, 0.0)
    assert foretold == pytest.approx((stages.down_s, stages.compute_s, stages.up_s))


def test_a_block_that_comes_in_chunks_is_computed_while_it_comes() -> None:
    assert QueueTimes().send((8.0, 4.0, 1.0, 1), 0.0) == alone_s((8.0, 4.0, 1.0, 1)) == 13.0
    assert QueueTimes().send((8.0, 4.0, 1.0, 4), 0.0) == alone_s((8.0, 4.0, 1.0, 4)) == 10.0
    assert QueueTimes().send((4.0, 8.0, 1.0, 4), 0.0) == alone_s((4.0, 8.0, 1.0, 4)) == 10.0


# ---- cutting again

RECTANGLES = st.lists(st.tuples(*[st.integers(1, 3)] * 1, *[st.integers(1, 60)] * 2), min_size=1, max_size=4)


@calm
@given(RECTANGLES, st.integers(1, 12), st.integers(0, 99), st.integers(1, 5))
def test_lost_rectangles_are_covered_exactly_once(
    sizes: list[tuple[int, int, int]], devices: int, seed: int, most: int
) -> None:
    lost = [np.array([10 * i, b, 7, rows, 100 * i, columns]) for i, (b, rows, columns) in enumerate(sizes)]
    rng = np.random.default_rng(seed)
    sent_s = rng.uniform(0, 5, (3, devices)) * rng.integers(0, 2, devices)
    all_s = sent_s + rng.uniform(0, 5, (3, devices)) * rng.integers(0, 2, devices)
    table = fleet_profiles("extreme", devices, seed)
    boxes, owner, of = shared(lost, 64, table, sent_s, all_s, float(rng.uniform(0, 9)), most)
    assert ((owner >= 0) & (owner < devices)).all()
    cover = np.zeros((50, 70, 400), np.int8)
    for b, bs, r, rs, c, cs in boxes.tolist():
        cover[b : b + bs, r : r + rs, c : c + cs] += 1
    for number, (b, bs, r, rs, c, cs) in enumerate(box.tolist() for box in lost):
        assert (cover[b : b + bs, r : r + rs, c : c + cs] == 1).all()
        assert boxes[of == number][:, [1, 3, 5]].prod(axis=1).sum() == bs * rs * cs
        cover[b : b + bs, r : r + rs, c : c + cs] = 0
    assert not cover.any()


def test_no_device_ends_much_later_than_necessary_and_idle_devices_do_most() -> None:
    """Equal devices, half of them busy for as long as the product takes anyway; the lost part fits into the others."""
    profile, shape = Profile(1e12, 0.0, 1e9, 1e8, 0.0, 1 << 40, 4), Shape(1, 800, 100, 800)
    table, busy_s = pack_profiles([profile] * 20), np.tile(np.repeat([10.0, 0.0], 10), (3, 1))
    lost = [np.array([0, 1, 0, 800, 0, 800])]
    boxes, owner, _ = shared(lost, shape.inner, table, busy_s, busy_s, 10.0, 64)
    sides = boxes[:, 3] + boxes[:, 5]
    down_s, compute_s, up_s = queue_seconds(table, owner, shape.inner, 1, boxes[:, 3], boxes[:, 5], sides)
    ends_s = busy_s[0][owner] + np.bincount(owner, down_s + compute_s + up_s, 20)[owner]
    assert ends_s.max() <= 1.2 * NOW.later * 10.0
    assert set(owner.tolist()) <= set(range(10, 20)), "the busy ones would return it later"
