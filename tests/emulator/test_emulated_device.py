"""Promises of emulator.model.device and emulator.model.fidelity: modelled time follows the model, and the verdict is
honest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.protocol.profile import Profile, pack_profiles
from emulator.model.device import Devices, waves
from emulator.model.fidelity import DEGRADED, STRETCH_ALLOWED, VALID, judge

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine fails no test

# ---- a second implementation of the model: one block and one device at a time


@dataclass(frozen=True)
class Block:
    device: int
    down_bytes: int
    flops: int  # even: a multiplication and an addition
    up_bytes: int


class Reference:
    """A device as three queues, in the simplest form."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._downlink_free_s = self._processor_free_s = self._uplink_free_s = 0.0

    def serve(self, sent_s: float, block: Block) -> tuple[float, float]:
        """When the answer reaches the server, and the compute time."""
        p = self._profile
        download_begins_s = max(sent_s, self._downlink_free_s)
        self._downlink_free_s = download_begins_s + block.down_bytes * 8 / p.down_bps
        arrived_s = self._downlink_free_s + p.latency_s
        compute_begins_s = max(arrived_s, self._processor_free_s)
        compute_s = p.overhead_s + block.flops / p.flops
        self._processor_free_s = compute_begins_s + compute_s
        upload_begins_s = max(self._processor_free_s, self._uplink_free_s)
        self._uplink_free_s = upload_begins_s + block.up_bytes * 8 / p.up_bps
        return self._uplink_free_s + p.latency_s, compute_s


def schedule(devices: Devices, sent_s: float, blocks: list[Block]) -> tuple[list[float], list[float]]:
    due_s, compute_s = devices.schedule(
        sent_s,
        np.array([b.device for b in blocks]),
        np.array([b.down_bytes for b in blocks]),
        np.array([(1, 1, b.flops // 2, 1) for b in blocks], np.int64),
        np.array([b.up_bytes for b in blocks]),
    )
    return due_s.tolist(), compute_s.tolist()


profiles = st.builds(
    Profile,
    flops=st.sampled_from([1e6, 1e9, 1e12]),
    overhead_s=st.sampled_from([0.0, 1e-4, 0.5]),
    down_bps=st.sampled_from([1e3, 1e6, 1e9]),
    up_bps=st.sampled_from([1e3, 1e6, 1e9]),
    latency_s=st.sampled_from([0.0, 0.02, 0.5]),
    memory_bytes=st.just(1 << 30),
    credit_blocks=st.just(2),
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Profile], list[tuple[float, list[Block]]]]:
    """A fleet, and calls with their send times; in a call a device may appear several times, or not at all."""
    fleet = draw(st.lists(profiles, min_size=1, max_size=5))
    block = st.builds(
        Block,
        device=st.integers(0, len(fleet) - 1),
        down_bytes=st.integers(1, 10**6),
        flops=st.integers(1, 10**9).map(lambda half: 2 * half),
        up_bytes=st.integers(1, 10**6),
    )
    pauses = st.sampled_from([0.0, 1e-6, 0.1, 1000.0])
    calls = draw(st.lists(st.tuples(pauses, st.lists(block, min_size=1, max_size=12)), min_size=1, max_size=5))
    sent = np.cumsum([pause for pause, _ in calls]).tolist()
    return fleet, [(at, blocks) for at, (_, blocks) in zip(sent, calls, strict=True)]


@settings(calm, max_examples=80)
@given(streams())
def test_every_answer_is_due_when_the_model_says(stream: tuple[list[Profile], list[tuple[float, list[Block]]]]) -> None:
    fleet, calls = stream
    devices, references = Devices(pack_profiles(fleet)), [Reference(profile) for profile in fleet]
    for sent_s, blocks in calls:
        expected = [references[block.device].serve(sent_s, block) for block in blocks]
        due_s, compute_s = schedule(devices, sent_s, blocks)
        assert due_s == pytest.approx([due for due, _ in expected], rel=1e-12)
        assert compute_s == pytest.approx([seconds for _, seconds in expected], rel=1e-12)


@settings(calm, max_examples=40)
@given(streams())
def test_a_device_answers_in_the_order_of_its_blocks(
    stream: tuple[list[Profile], list[tuple[float, list[Block]]]],
) -> None:
    fleet, calls = stream
    devices = Devices(pack_profiles(fleet))
    last = [0.0] * len(fleet)
    for sent_s, blocks in calls:
        for block, due in zip(blocks, schedule(devices, sent_s, blocks)[0], strict=True):
            assert due > last[block.device]
            last[block.device] = due


@settings(calm, max_examples=40)
@given(streams())
def test_many_blocks_in_one_call_equal_one_block_per_call(
    stream: tuple[list[Profile], list[tuple[float, list[Block]]]],
) -> None:
    fleet, calls = stream
    together, alone = Devices(pack_profiles(fleet)), Devices(pack_profiles(fleet))
    for sent_s, blocks in calls:
        one_by_one = [schedule(alone, sent_s, [block])[0][0] for block in blocks]
        assert schedule(together, sent_s, blocks)[0] == one_by_one


# one second for each stage of this block on this device
DEVICE = Profile(1e9, 0.0, 8e6, 8e6, 0.0, 1 << 30, 2)
BLOCK = Block(device=0, down_bytes=10**6, flops=10**9, up_bytes=10**6)


def test_one_block_takes_the_three_stages_in_turn() -> None:
    assert schedule(Devices(pack_profiles([DEVICE])), 100.0, [BLOCK])[0] == [103.0]


def test_the_three_stages_of_successive_blocks_overlap() -> None:
    assert schedule(Devices(pack_profiles([DEVICE])), 100.0, [BLOCK] * 4)[0] == [103.0, 104.0, 105.0, 106.0]


def test_latency_delays_every_answer_once_each_way_and_occupies_no_queue() -> None:
    far = Profile(1e9, 0.0, 8e6, 8e6, 10.0, 1 << 30, 2)
    assert schedule(Devices(pack_profiles([far])), 100.0, [BLOCK] * 3)[0] == [123.0, 124.0, 125.0]


def test_devices_do_not_wait_for_each_other() -> None:
    devices = Devices(pack_profiles([DEVICE] * 3))
    blocks = [Block(device, 10**6, 10**9, 10**6) for device in (0, 1, 0, 2)]
    assert schedule(devices, 0.0, blocks)[0] == [3.0, 3.0, 4.0, 3.0]


def test_a_device_that_was_idle_starts_at_once() -> None:
    devices = Devices(pack_profiles([DEVICE]))
    assert schedule(devices, 0.0, [BLOCK])[0] == [3.0]
    assert schedule(devices, 50.0, [BLOCK])[0] == [53.0]


@settings(calm, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_waves_take_each_position_once_each_device_at_most_once_per_wave_and_keep_the_order(order: list[int]) -> None:
    device = np.array(order)
    parts = waves(device)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(order)))
    for part in parts:
        assert len(set(device[part].tolist())) == len(part)
    for each in set(order):
        positions = [p for part in parts for p in part.tolist() if order[p] == each]
        assert positions == sorted(positions)
        assert all(each in device[part] for part in parts[: len(positions)])


# ---- requested against achieved


def verdict(sent_s: list[float], due_s: list[float], received_s: list[float]) -> str:
    return judge(np.array(sent_s), np.array(due_s), np.array(received_s)).verdict


def test_a_run_that_kept_up_is_valid() -> None:
    fidelity = judge(np.zeros(4), np.full(4, 1.0), np.full(4, 1.001))
    assert fidelity.verdict == VALID
    assert fidelity.blocks == 4
    assert fidelity.stretch == pytest.approx(1.001)
    assert fidelity.late_p50_s == pytest.approx(0.001)
    assert fidelity.late_p99_s == pytest.approx(0.001)


def test_a_run_that_fell_behind_is_degraded_and_says_by_how_much_with_advice() -> None:
    fidelity = judge(np.zeros(4), np.full(4, 1.0), np.full(4, 1.5))
    assert fidelity.verdict == DEGRADED
    assert "50% longer" in fidelity.reason
    assert "500.0 ms late" in fidelity.reason
    assert "fewer devices" in fidelity.reason


def test_the_verdict_changes_at_the_allowed_stretch() -> None:
    assert verdict([0.0], [1.0], [STRETCH_ALLOWED - 1e-9]) == VALID
    assert verdict([0.0], [1.0], [STRETCH_ALLOWED + 1e-9]) == DEGRADED


def test_long_blocks_weigh_more_than_short_ones() -> None:
    """A millisecond too many on a block of a millisecond is nothing beside a block of a hundred seconds on time."""
    assert verdict([0.0, 0.0], [0.001, 100.0], [0.002, 100.0]) == VALID


def test_answers_of_real_devices_are_not_judged() -> None:
    fidelity = judge(np.zeros(2), np.array([1.0, np.nan]), np.array([1.0, 500.0]))
    assert (fidelity.verdict, fidelity.blocks) == (VALID, 1)


def test_a_run_without_modelled_time_is_valid_and_says_so() -> None:
    for due_s in ([float("nan")] * 2, [0.0, 0.0]):  # real devices; emulated ones whose time is not modelled
        fidelity = judge(np.zeros(2), np.array(due_s), np.full(2, 9.0))
        assert (fidelity.verdict, fidelity.blocks, fidelity.stretch) == (VALID, 0, 1.0)
        assert "no modelled time" in fidelity.reason


def test_a_run_without_any_block_is_valid() -> None:
    assert verdict([], [], []) == VALID
