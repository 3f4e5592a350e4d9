"""More devices never hurt: in virtual time, on a few small fleets. `python -m testbed.bench monotone` tries many."""

from __future__ import annotations

import numpy as np
import pytest

from agent.protocol.profile import Profile, pack_profiles
from testbed.bench.heuristics.monotone import LONGER, SHORTER, random_profiles, step_s, try_fleet

FAST = Profile(8e10, 5e-5, 2e10, 2e10, 1e-4, 4 << 30, 4)


@pytest.mark.slow
def test_slow_devices_beside_a_fast_one_do_not_make_a_step_longer() -> None:
    """With eight slow devices and more, weight gradients went to them, and a step took 780 times as long."""
    alone_s = step_s(pack_profiles([FAST]), "opt-tiny")
    slow = random_profiles(np.random.default_rng(1), 16)
    for rate in ("flops", "down_bps", "up_bps"):
        slow[rate] = np.minimum(slow[rate], 1e6)
    for count in (1, 7, 8, 16):
        fleet = np.concatenate([pack_profiles([FAST]), slow[:count]])
        assert step_s(fleet, "opt-tiny") <= (1 + LONGER) * alone_s, count


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_device_more_does_not_make_a_step_longer_and_a_slower_one_not_shorter(number: int) -> None:
    tried = try_fleet(number, seed=0, most_devices=12)
    assert tried.longer <= LONGER, tried
    assert tried.shorter <= SHORTER, tried
