"""The fleet that a scenario asks for, and how many pods host it."""

from __future__ import annotations

import os

import numpy as np

from agent.protocol.profile import PROFILE
from emulator.links.rate_trace import read_link_trace
from emulator.model.fleet import Fleet, draw_fleet, uniform_fleet
from testbed.runs.scenario import FleetSection, Launch, LinksSection

CONTAINERS = 256  # devices that get a container each; more share pods


def make_fleet(asked: FleetSection, links: LinksSection, seed: int) -> Fleet:
    if not asked.devices:
        return Fleet(np.empty(0, PROFILE), [], [], {})
    if asked.uniform is None:
        traces = {network: read_link_trace(prefix) for network, prefix in links.traces.items()}
        return draw_fleet(asked.devices, asked.kinds, asked.networks, seed, asked.line_share, links.effects, traces)
    count = asked.devices
    names: list[str] = [asked.uniform] * count
    profiles = uniform_fleet(asked.uniform, count, seed, asked.line_share)
    return Fleet(profiles, names, names, {"published": count})


def pods_for(asked: FleetSection, launch: Launch) -> int:
    cores = os.cpu_count() or 1
    if asked.pods != "auto":
        return min(asked.devices, asked.pods)
    return asked.devices if launch.kind == "docker" and asked.devices <= CONTAINERS else min(asked.devices, cores)
