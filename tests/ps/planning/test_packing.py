"""Promises of ps.planning.packing: every cell exactly once, no device beyond its memory, never better than the bound,
near it.

Makespans are recomputed here from the boxes alone, not by the packing's own arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE, Profile, pack_profiles
from emulator.model.fleet import uniform_fleet
from ps.planning.capacity import PackingError
from ps.planning.packing import Tiling, packed, streaming_model
from ps.planning.plans import Shape

TOKENS = 128 * 1024
# the distinct products of a training step, batch 128, sequence 1,024, and how often they occur
OPT_13B = {
    Shape(1, TOKENS, 5120, 5120): 320,
    Shape(5120, 1024, 128, 1024): 80,
    Shape(5120, 1024, 1024, 128): 120,
    Shape(1, TOKENS, 5120, 20480): 80,
    Shape(1, TOKENS, 20480, 5120): 80,
    Shape(1, TOKENS, 5120, 50272): 1,
    Shape(1, 50272, TOKENS, 5120): 1,
    Shape(1, TOKENS, 50272, 5120): 1,
    Shape(1, 5120, TOKENS, 20480): 40,
    Shape(1, 20480, TOKENS, 5120): 40,
    Shape(1, 5120, TOKENS, 5120): 160,
    Shape(5120, 128, 1024, 1024): 40,
}
LLAMA2_70B = {
    Shape(1, TOKENS, 8192, 8192): 320,
    Shape(1, TOKENS, 8192, 1024): 160,
    Shape(8192, 1024, 128, 1024): 160,
    Shape(8192, 1024, 1024, 128): 240,
    Shape(1, TOKENS, 8192, 28672): 240,
    Shape(1, TOKENS, 28672, 8192): 240,
    Shape(1, 8192, TOKENS, 28672): 80,
    Shape(1, 28672, TOKENS, 8192): 160,
    Shape(1, 8192, TOKENS, 8192): 160,
    Shape(8192, 128, 1024, 1024): 80,
    Shape(1, 1024, TOKENS, 8192): 160,
    Shape(1, TOKENS, 1024, 8192): 160,
}


def recomputed_s(tiling: Tiling, shape: Shape, profiles: NDArray[np.void], value_bytes: int) -> float:
    """The formula, device by device: latency + max(download, compute, upload)."""
    worst = 0.0
    for device in np.unique(tiling.owner).tolist():
        p = profiles[device]
        mine = tiling.boxes[tiling.owner == device].astype(float)
        sides = (mine[:, 1] * (mine[:, 3] + mine[:, 5])).sum()
        cells = (mine[:, 1] * mine[:, 3] * mine[:, 5]).sum()
        down_s = sides * shape.inner * value_bytes * 8 / p["down_bps"]
        up_s = cells * value_bytes * 8 / p["up_bps"]
        compute_s = 2 * cells * shape.inner / p["flops"]
        worst = max(worst, 2 * p["latency_s"] + p["overhead_s"] + max(down_s, up_s, compute_s))
    return float(worst)


def solved(shape: Shape, profiles: NDArray[np.void], value_bytes: int = 2) -> Tiling:
    model = streaming_model(profiles, shape.inner, value_bytes)
    return packed((model, model), shape.batch, shape.rows, shape.columns)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.log10(low), np.log10(high)).map(lambda exponent: float(10**exponent))


devices = st.builds(
    Profile,
    flops=powers(1e6, 1e13),
    overhead_s=st.sampled_from([0.0, 1e-4]),
    down_bps=powers(1e3, 1e11),
    up_bps=powers(1e3, 1e11),
    latency_s=st.sampled_from([0.0, 0.01, 2.0]),
    memory_bytes=st.sampled_from([0, 3, 64, 1000, 1 << 40]),
    credit_blocks=st.just(4),
)
sides = st.one_of(st.integers(1, 4), st.integers(1, 60))
shapes = st.builds(Shape, st.sampled_from([1, 1, 1, 2, 3, 7, 20]), sides, st.integers(1, 200), sides)
ABLE = Profile(1e9, 0.0, 1e6, 1e6, 0.0, 1 << 40, 4)


@pytest.mark.slow
@settings(max_examples=300)
@given(shape=shapes, fleet=st.lists(devices, max_size=40))
def test_every_cell_is_covered_exactly_once_within_memory_and_not_before_the_bound(
    shape: Shape, fleet: list[Profile]
) -> None:
    profiles = pack_profiles([*fleet, ABLE])
    tiling = solved(shape, profiles, 4)
    cover = np.zeros((shape.batch, shape.rows, shape.columns), np.int16)
    for b, bs, r, rs, c, cs in tiling.boxes.tolist():
        assert min(bs, rs, cs) > 0
        cover[b : b + bs, r : r + rs, c : c + cs] += 1
    assert (cover == 1).all()
    held = tiling.boxes[:, 3] * tiling.boxes[:, 5]  # a batch is computed entry by entry
    assert (4 * held <= profiles["memory_bytes"][tiling.owner]).all()
    makespan_s = recomputed_s(tiling, shape, profiles, 4)
    assert makespan_s == pytest.approx(tiling.makespan_s, rel=1e-9)
    assert makespan_s >= tiling.bound_s * (1 - 1e-4)


def test_more_devices_than_cells_can_be_planned() -> None:
    shape = Shape(1, 3, 5, 4)
    tiling = solved(shape, pack_profiles([ABLE] * 100))
    assert (tiling.boxes[:, 3] * tiling.boxes[:, 5]).sum() == 12


def test_a_fleet_that_can_hold_nothing_is_a_clear_error() -> None:
    profiles = np.zeros(3, PROFILE)
    profiles["flops"], profiles["down_bps"], profiles["up_bps"] = 1e9, 1e6, 1e6
    with pytest.raises(PackingError, match="none of 3 devices can hold"):
        solved(Shape(1, 4, 4, 4), profiles)


@pytest.mark.parametrize("fleet", ["paper", "moderate", "extreme"])
@pytest.mark.parametrize("model", ["opt-13b", "llama2-70b"])
@pytest.mark.parametrize(
    ("count", "whole", "single"), [(16, 1.10, 1.10), (64, 1.03, 1.10), (256, 1.03, 1.10), (1024, 1.03, 1.05)]
)
def test_a_batch_is_planned_near_the_bound(fleet: str, model: str, count: int, whole: float, single: float) -> None:
    profiles = uniform_fleet(fleet, count, seed=0)
    total_s = bound_s = 0.0
    for shape, often in (OPT_13B if model == "opt-13b" else LLAMA2_70B).items():
        tiling = solved(shape, profiles)
        makespan_s = recomputed_s(tiling, shape, profiles, 2)
        assert makespan_s <= single * tiling.bound_s, f"{shape}: {makespan_s / tiling.bound_s:.4f}"
        total_s += often * makespan_s
        bound_s += often * tiling.bound_s
    assert total_s <= whole * bound_s
