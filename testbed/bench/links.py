"""Time to set up a fleet's kernel links, and the accuracy of their rates. Needs root."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from agent.protocol.profile import Profile, pack_profiles
from emulator.links.lab import PREFIX, link_lab
from emulator.links.shaping import apply, clear
from emulator.links.shaping_plan import PodLinks, addresses
from emulator.model.fleet import Fleet
from testbed.inspect import link_check

DEVICES, SAMPLE, PASSES = 2000, 50, 3
UPS_BPS, RATIOS = (0.5e6, 1e6, 2e6), (2, 5, 10, 20)


def fleet(devices: int, seed: int = 0) -> Fleet:
    """Lines with a ratio down to up of 2:1 to 20:1, slow enough that fifty at a time do not overload a small host."""
    rng = np.random.default_rng(seed)
    lines = zip(rng.choice(UPS_BPS, devices).tolist(), rng.choice(RATIOS, devices).tolist(), strict=True)
    profiles = [Profile(50e9, 1e-4, up * ratio, up, 0.02, 2**30, 4) for up, ratio in lines]
    return Fleet(pack_profiles(profiles), ["bench"] * devices, ["line"] * devices, {})


def measure() -> dict[str, Any]:
    """Best of a few set-ups, each read back; then the rates of a sample, up and down at once."""
    lines = fleet(DEVICES)
    set_up_s, cleared_s = [], []
    for _ in range(PASSES):
        with link_lab() as lab:
            devices = tuple(zip(addresses(PREFIX, DEVICES), link_check.specs_of(lines), strict=True))
            pod = PodLinks(lab.pod_interface, devices, lab.pod, PREFIX, lab.server)
            set_up_s.append(apply([pod]).seconds)
            begun = time.monotonic()
            clear([pod])
            cleared_s.append(time.monotonic() - begun)
    applied, rows = link_check.check_here(lines, link_check.choose(DEVICES, SAMPLE, 0))
    told = link_check.as_json(applied, rows)
    shares = {name: told[name] for name in ("down_share", "up_share", "verdict")}
    return {"devices": DEVICES, "set_up_s": min(set_up_s), "cleared_s": min(cleared_s), "sample": SAMPLE, **shares}
