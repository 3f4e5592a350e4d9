"""Properties of every plan, recomputed here from the boxes alone, not by the planner's own arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.protocol.profile import Profile
from ps.planning.plans import Plan, Shape

LEAST = 32  # inner length of a chunk, of which three are held


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Figures of every order of magnitude."""
    return st.floats(np.log10(low), np.log10(high)).map(lambda exponent: float(10**exponent))


def block_budget(p: Profile) -> int:
    return p.memory_bytes // 2


def one_cell_bytes(shape: Shape) -> int:
    """Memory without which a device gets no block: half of it is for the block."""
    return 2 * 4 * min(1 + 2 * shape.inner, 2 + 2 * 3 * LEAST)


def chunks_needed(shape: Shape, box: list[int], p: Profile) -> int:
    """1: the operands fit whole. Otherwise the fewest chunks. 0: the block does not fit at all."""
    _, bs, _, rs, _, cs = box
    output, a_value = 4 * bs * rs * cs, 4 * bs * (rs + cs)
    if output + a_value * shape.inner <= block_budget(p):
        return 1
    length = (block_budget(p) - 2 * output) // (3 * a_value)
    if length < LEAST or shape.inner == 1:
        return 0
    return -(-shape.inner // min(length, shape.inner - 1))


def assert_covers_exactly_once(plan: Plan, shape: Shape) -> None:
    cover = np.zeros((shape.batch, shape.rows, shape.columns), int)
    for b, bs, r, rs, c, cs in plan.boxes.tolist():
        assert min(bs, rs, cs) > 0
        assert min(b, r, c) >= 0
        assert b + bs <= shape.batch
        assert r + rs <= shape.rows
        assert c + cs <= shape.columns
        cover[b : b + bs, r : r + rs, c : c + cs] += 1
    assert (cover == 1).all()
    assert len(plan.boxes) == len(plan.device) == len(plan.fresh)


def assert_fits_into_memory(plan: Plan, shape: Shape, fleet: list[Profile]) -> None:
    for device, box in zip(plan.device.tolist(), plan.boxes.tolist(), strict=True):
        assert chunks_needed(shape, box, fleet[device]) > 0


def assert_brings_what_is_not_there(plan: Plan, shape: Shape, fleet: list[Profile]) -> None:
    there: set[tuple[str | int, ...]] = set()
    for device, box, fresh in zip(plan.device.tolist(), plan.boxes.tolist(), plan.fresh.tolist(), strict=True):
        b, bs, r, rs, c, cs = box
        slabs = (device, "left", b, bs, r, rs), (device, "right", b, bs, c, cs)
        if chunks_needed(shape, box, fleet[device]) > 1:  # streamed: brings everything, keeps nothing
            assert fresh == [True, True]
        else:
            assert fresh == [slab not in there for slab in slabs]
            there |= set(slabs)


Block = tuple[float, float, float, int]  # seconds of download, compute with overhead, upload; chunks


def simulated_s(p: Profile, blocks: list[Block]) -> float:
    """One device, chunk by chunk: each part waits for its download and for the previous part, and a block for an answer
    if the device has all that its credit allows."""
    downloaded = computed = uploaded = 0.0
    answered: list[float] = []
    for number, (down_s, compute_s, up_s, chunks) in enumerate(blocks):
        if number >= p.credit_blocks:
            downloaded = max(downloaded, answered[number - p.credit_blocks])
        for _ in range(chunks):
            downloaded += down_s / chunks
            computed = max(computed, downloaded) + compute_s / chunks
        uploaded = max(uploaded, computed) + up_s
        answered.append(uploaded + 2 * p.latency_s)
    return 2 * p.latency_s + uploaded


def block(p: Profile, shape: Shape, box: Sequence[float], fresh: list[bool], chunks: int) -> Block:
    _, bs, _, rs, _, cs = box
    down_s = 32.0 * shape.inner * bs * (rs * fresh[0] + cs * fresh[1]) / p.down_bps
    compute_s = chunks * p.overhead_s + 2.0 * shape.inner * bs * rs * cs / p.flops
    return down_s, compute_s, 32.0 * bs * rs * cs / p.up_bps, chunks


def recomputed_ends_s(plan: Plan, shape: Shape, fleet: list[Profile]) -> dict[int, float]:
    blocks: defaultdict[int, list[Block]] = defaultdict(list)
    for device, box, fresh in zip(plan.device.tolist(), plan.boxes.tolist(), plan.fresh.tolist(), strict=True):
        p = fleet[device]
        blocks[device].append(block(p, shape, box, fresh, chunks_needed(shape, box, p)))
    return {device: simulated_s(fleet[device], mine) for device, mine in blocks.items()}


def assert_ends_when_it_says(plan: Plan, shape: Shape, fleet: list[Profile]) -> None:
    ends_s = recomputed_ends_s(plan, shape, fleet)
    assert plan.makespan_s == pytest.approx(max(ends_s.values()), rel=1e-9)


def assert_keeps_its_promises(plan: Plan, shape: Shape, fleet: list[Profile], able: NDArray[np.int64]) -> None:
    assert set(plan.device.tolist()) <= set(able.tolist())
    assert_covers_exactly_once(plan, shape)
    assert_fits_into_memory(plan, shape, fleet)
    assert_brings_what_is_not_there(plan, shape, fleet)
    assert_ends_when_it_says(plan, shape, fleet)


def assert_same(one: Plan, two: Plan) -> None:
    assert np.array_equal(one.boxes, two.boxes)
    assert np.array_equal(one.device, two.device)
    assert np.array_equal(one.fresh, two.fresh)
    assert one.makespan_s == two.makespan_s
