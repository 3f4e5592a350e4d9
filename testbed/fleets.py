"""The fleet that a scenario asks for, and how many pods host it."""

from __future__ import annotations

import os

import numpy as np

from agent.profile import PROFILE
from emulator.fleet import Fleet, draw_fleet, uniform_fleet
from emulator.link_trace import read_link_trace
from testbed.scenario import FleetSection, Links


def make_fleet(asked: FleetSection, links: Links, seed: int) -> Fleet:
    if not asked.devices:
        return Fleet(np.empty(0, PROFILE), [], [], {})
    if asked.uniform is None:
        traces = {network: read_link_trace(prefix) for network, prefix in links.traces.items()}
        return draw_fleet(asked.devices, asked.kinds, asked.networks, seed, asked.line_share, links.effects, traces)
    count = asked.devices
    names: list[str] = [asked.uniform] * count
    profiles = uniform_fleet(asked.uniform, count, seed, asked.line_share)
    return Fleet(profiles, names, names, {"published": count})


def pods_for(asked: FleetSection) -> int:
    cores = os.cpu_count() or 1
    return min(asked.devices, cores if asked.pods == "auto" else asked.pods)
