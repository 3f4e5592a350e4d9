"""Promises of ps.planning.cost: the memory of a block on its device, its chunks if it does not fit, its time.

Everything is recomputed here in the simplest way, one block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agent.protocol.profile import Profile, pack_profiles
from emulator.model.device import Devices
from ps.planning.cost import block_bytes, block_seconds, chunk_length, least_bytes, usable_bytes

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test
SHORTEST = 32  # inner length; a chunk is never shorter


@dataclass(frozen=True)
class Block:
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def output(self) -> int:
        return 4 * self.batch * self.rows * self.columns

    def slabs(self, inner: int) -> int:
        """Bytes of both operands over this inner length."""
        return 4 * self.batch * (self.rows + self.columns) * inner

    def memory(self, chunk: int) -> int:
        if chunk == self.inner:
            return self.output + self.slabs(self.inner)
        return 2 * self.output + 3 * self.slabs(chunk)  # sum and summand; chunks in use, waiting, arriving

    def lengths(self) -> list[int]:
        """All possible lengths of a chunk, the whole last."""
        return [*range(SHORTEST, self.inner), self.inner]


blocks = st.builds(Block, st.integers(1, 3), st.integers(1, 40), st.integers(1, 400), st.integers(1, 40))
budgets = st.integers(0, 60_000)


def length_for(block: Block, budget_bytes: int) -> int:
    return int(chunk_length(block.batch, block.rows, block.inner, block.columns, budget_bytes))


# ---- memory


@settings(calm, max_examples=300)
@given(blocks, budgets)
def test_a_block_comes_whole_if_it_fits_else_in_the_longest_chunks_that_fit_else_not_at_all(
    block: Block, budget_bytes: int
) -> None:
    fitting = [length for length in block.lengths() if block.memory(length) <= budget_bytes]
    assert length_for(block, budget_bytes) == max(fitting, default=0)


@settings(calm, max_examples=300)
@given(blocks, budgets)
def test_a_block_on_a_device_fits_its_budget(block: Block, budget_bytes: int) -> None:
    chunk = length_for(block, budget_bytes)
    weight = int(block_bytes(block.batch, block.rows, block.inner, block.columns, chunk or block.inner))
    assert weight == block.memory(chunk or block.inner)
    assert (weight <= budget_bytes) == (chunk > 0)


@settings(calm, max_examples=100)
@given(blocks)
def test_a_block_comes_whole_from_a_budget_of_its_own_size_on(block: Block) -> None:
    weight = block.memory(block.inner)
    assert length_for(block, weight) == block.inner
    assert length_for(block, weight - 1) < block.inner


@settings(calm, max_examples=100)
@given(blocks, budgets, st.integers(1, 1000))
def test_more_memory_never_makes_chunks_shorter(block: Block, budget_bytes: int, more: int) -> None:
    assert length_for(block, budget_bytes) <= length_for(block, budget_bytes + more)


@settings(calm, max_examples=150)
@given(st.integers(1, 100_000))
@example(96)
@example(97)
def test_one_cell_fits_exactly_from_the_least_memory_on(inner: int) -> None:
    cell = Block(1, 1, inner, 1)
    assert length_for(cell, least_bytes(inner)) > 0
    assert length_for(cell, least_bytes(inner) - 1) == 0


def test_a_device_of_64_mb_takes_a_weight_gradient_of_any_length() -> None:
    usable = int(usable_bytes(pack_profiles([Profile(1e9, 0.0, 1e6, 1e6, 0.0, 64_000_000, 2)]))[0])
    for inner in (131_072, 10_000_000):
        block = Block(1, 256, inner, 256)
        assert block.memory(inner) > 64_000_000
        chunk = length_for(block, usable)
        assert chunk >= 1000
        assert block.memory(chunk) <= usable == 32_000_000


@pytest.mark.slow
@settings(calm, max_examples=80)
@given(st.lists(st.tuples(blocks, budgets), min_size=1, max_size=6))
def test_many_blocks_at_once_give_the_same_as_one_by_one(pairs: list[tuple[Block, int]]) -> None:
    inner = pairs[0][0].inner
    alone = [Block(b.batch, b.rows, inner, b.columns) for b, _ in pairs]
    batch, rows, columns = (np.array([getattr(b, name) for b in alone]) for name in ("batch", "rows", "columns"))
    chunk = chunk_length(batch, rows, inner, columns, np.array([budget for _, budget in pairs]))
    assert chunk.tolist() == [length_for(b, budget) for b, (_, budget) in zip(alone, pairs, strict=True)]
    weight = block_bytes(batch, rows, inner, columns, np.full(len(pairs), inner))
    assert weight.tolist() == [b.memory(inner) for b in alone]


# ---- time

devices = st.builds(
    Profile,
    flops=st.sampled_from([1e6, 1e9, 1e12]),
    overhead_s=st.sampled_from([0.0, 1e-4, 0.05]),
    down_bps=st.sampled_from([1e4, 1e6, 1e9]),
    up_bps=st.sampled_from([1e4, 1e6, 1e9]),
    latency_s=st.sampled_from([0.0, 0.02]),
    memory_bytes=st.just(1 << 30),
    credit_blocks=st.just(2),
)


def simulated_s(device: Profile, block: Block, down_bytes: float, chunks: int) -> float:
    """Chunk after chunk over the link, each computed as soon as it has arrived and the processor is free."""
    arrived_s = ready_s = 0.0
    flops = 2.0 * block.batch * block.rows * block.columns * block.inner
    for _ in range(chunks):
        arrived_s += 8 * down_bytes / chunks / device.down_bps
        ready_s = max(ready_s, arrived_s) + device.overhead_s + flops / chunks / device.flops
    return device.latency_s + ready_s + 8 * block.output / device.up_bps + device.latency_s


@settings(calm, max_examples=300)
@given(devices, blocks, st.integers(1, 50))
def test_a_block_takes_as_long_as_its_chunks_in_sequence(device: Profile, block: Block, chunks: int) -> None:
    profile = pack_profiles([device])
    shape = block.batch, block.rows, block.inner, block.columns
    (seconds,) = block_seconds(profile, *shape, None, chunks).tolist()
    assert seconds == pytest.approx(simulated_s(device, block, block.slabs(block.inner), chunks), rel=1e-9)


@settings(calm, max_examples=100)
@given(devices, blocks, st.integers(0, 10**4))
def test_only_slabs_that_the_device_does_not_hold_are_downloaded(device: Profile, block: Block, lines: int) -> None:
    profile = pack_profiles([device])
    shape = block.batch, block.rows, block.inner, block.columns
    (seconds,) = block_seconds(profile, *shape, lines).tolist()
    assert seconds == pytest.approx(simulated_s(device, block, 4 * block.inner * lines, 1), rel=1e-9)


@settings(calm, max_examples=100)
@given(devices, blocks, st.integers(1, 9))
def test_the_emulated_device_takes_as_long_as_the_cost_model_says(device: Profile, block: Block, chunks: int) -> None:
    """The planner's cost model and the emulation must agree on the device."""
    profile, inner = pack_profiles([device]), block.inner * chunks  # equal chunks
    shape = block.batch, block.rows, inner, block.columns
    (expected,) = block_seconds(profile, *shape, None, chunks).tolist()
    chunk = np.tile([block.batch, block.rows, block.inner, block.columns], (chunks, 1))
    up_bytes = np.array([0] * (chunks - 1) + [block.output])
    due_s, _ = Devices(profile).schedule(
        100.0, np.zeros(chunks, np.int64), np.full(chunks, block.slabs(block.inner)), chunk, up_bytes
    )
    assert due_s[-1] - 100.0 == pytest.approx(expected, rel=1e-6, abs=1e-9)
