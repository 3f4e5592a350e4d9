"""Draws a fleet from shares of device kinds and access networks.

Pure: names, shares and a seed in, profiles out. Three uniform numbers per device choose its kind, its network and the
quality of its household's line. They are drawn device by device, so the first devices of a larger fleet equal a smaller
fleet.

The line of a household, with u its quantile, the same for both directions (a good line is good both ways):

    z        = normal quantile of u, clipped to +-2.33 (the 1st and 99th percentile)
    log rate = log p50 + z/1.2816 (log p90 - log p50)   above the median
    log rate = log p50 + z/1.2816 (log p50 - log p10)   below

so that the 10th, 50th and 90th percentile of the fleet are those of the measured households. Assumes that kind, network
and line quality are independent, and that one-way latency is half a round trip.

A device whose network has a trace reports the trace's mean as its rate, and starts at a random offset in the trace.
With "full" effects a link has its network's jitter and loss, with loss split evenly between the directions; effects
that a profile does not give are absent. A line's buffer fills only if the whole line is lent: a device limited to part
of the line leaves the buffer empty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import MAX_RATE, PROFILE, check_profiles
from emulator.links.rate_trace import LinkTrace
from emulator.model.link import LINK, NO_TRACE, Links, device_keys, uniforms
from emulator.model.performance import Models
from emulator.model.zoo import DeviceKind, Network, RateSpread, load_device, load_network

CREDIT_BLOCKS = 4  # one being downloaded, one computed, one uploaded, one ahead
NO_TRACES: Mapping[str, LinkTrace] = MappingProxyType({})
_OFFSET_DRAW = 2**62  # index in a device's random sequence that no transfer reaches
_Z_LIMIT = 2.33
_Z_P90 = 1.2816


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single truth value
class Fleet:
    profiles: NDArray[np.void]  # dtype PROFILE
    device_names: list[str]  # per device
    network_names: list[str]
    basis: Mapping[str, int]  # devices by basis of their speed: measured, published, estimate
    links: Links | None = None  # effects beyond rate and latency; None: no effects
    models: Models | None = None  # of the measured devices; None: no device was measured

    def __len__(self) -> int:
        return len(self.device_names)

    def take(self, devices: Sequence[int]) -> Fleet:
        """A fleet of these devices, renumbered from 0."""
        chosen = list(devices)
        links = None if self.links is None else self.links.take(chosen)
        models = None if self.models is None else self.models.part(chosen)
        kinds, networks = ([names[one] for one in chosen] for names in (self.device_names, self.network_names))
        return Fleet(self.profiles[chosen], kinds, networks, self.basis, links, models)

    @property
    def labels(self) -> list[str]:
        """The name under which each device joins."""
        names = zip(self.device_names, self.network_names, strict=True)
        return [f"{device}/{network}/{number}" for number, (device, network) in enumerate(names)]


def draw_fleet(
    count: int,
    device_shares: Mapping[str, float],
    network_shares: Mapping[str, float],
    seed: int,
    line_share: float = 1.0,
    effects: Literal["rates", "full"] = "rates",
    traces: Mapping[str, LinkTrace] = NO_TRACES,
) -> Fleet:
    """Draw `count` devices; shares are weights and need not sum to one, and their order does not matter. `line_share`
    is the share of its line's rates that a household lends. `traces` are keyed by network name."""
    if count < 1:
        raise ValueError(f"a fleet needs at least 1 device, not {count}")
    uniform = np.random.Generator(np.random.PCG64(seed)).random((count, 3))
    kind_names, kind_of = _choose(uniform[:, 0], device_shares, "device")
    line_names, line_of = _choose(uniform[:, 1], network_shares, "network")
    kinds = [load_device(name) for name in kind_names]
    lines = [load_network(name) for name in line_names]
    z = _normal_quantile(uniform[:, 2])
    links = _draw_links(lines, line_of, seed, line_share, effects, traces)

    profiles = np.empty(count, dtype=PROFILE)
    profiles["flops"] = np.array([kind.flops for kind in kinds])[kind_of]
    profiles["overhead_s"] = np.array([kind.overhead_s for kind in kinds])[kind_of]
    for way in ("down", "up"):
        rates = _household_rates([getattr(line, way) for line in lines], line_of, z)
        for number, trace in enumerate(links.traces):
            rates[links.table["trace"] == number] = getattr(trace, way).mean_bps
        profiles[f"{way}_bps"] = line_share * rates
    profiles["latency_s"] = np.array([line.rtt_s / 2 for line in lines])[line_of]
    profiles["memory_bytes"] = np.array([kind.budget_bytes for kind in kinds])[kind_of]
    profiles["credit_blocks"] = CREDIT_BLOCKS
    check_profiles(profiles)
    return Fleet(
        profiles=profiles,
        device_names=[kind_names[i] for i in kind_of],
        network_names=[line_names[i] for i in line_of],
        basis=dict(Counter(kinds[i].basis for i in kind_of)),
        links=links,
        models=_models(kinds, kind_of, seed),
    )


def _draw_links(
    lines: Sequence[Network],
    line_of: NDArray[np.intp],
    seed: int,
    line_share: float,
    effects: Literal["rates", "full"],
    traces: Mapping[str, LinkTrace],
) -> Links:
    used = [line.name for line in lines if line.name in traces]
    rows = np.zeros(len(lines), dtype=LINK)
    rows["trace"] = [used.index(line.name) if line.name in traces else NO_TRACE for line in lines]
    rows["offset_s"] = [traces[line.name].down.length_s if line.name in traces else 0.0 for line in lines]
    if effects == "full":
        rows["jitter_down_s"] = [line.jitter_s or 0.0 for line in lines]
        rows["jitter_up_s"] = [line.jitter_up_s or 0.0 for line in lines]
        rows["loss_down"] = rows["loss_up"] = [1 - math.sqrt(1 - (line.loss or 0.0)) for line in lines]
        if line_share == 1.0:
            rows["queue_down_s"] = [max(0.0, (line.rtt_loaded_down_s or 0.0) - line.rtt_s) for line in lines]
            rows["queue_up_s"] = [max(0.0, (line.rtt_loaded_up_s or 0.0) - line.rtt_s) for line in lines]
    table = rows[line_of]
    devices = np.arange(len(line_of))
    table["key"] = device_keys(seed, devices)
    table["offset_s"] *= uniforms(table["key"], np.full(len(devices), _OFFSET_DRAW))
    return Links(table, tuple(traces[name] for name in used))


def _models(kinds: Sequence[DeviceKind], kind_of: NDArray[np.intp], seed: int) -> Models | None:
    fitted = [i for i, kind in enumerate(kinds) if kind.performance is not None]
    if not fitted:
        return None
    place = np.full(len(kinds), -1, np.int64)
    place[fitted] = np.arange(len(fitted))
    models = tuple(kind.performance for kind in kinds if kind.performance is not None)
    return Models(models, place[kind_of], tuple((seed, device) for device in range(len(kind_of))))


# The fleets of the Cleave authors' evaluation (their public code, netsys-edinburgh/wasp): uniform in these ranges,
# TFLOP/s and MB/s, no latency, 512 MB per device.
UNIFORM = {
    "paper": {"flops": (5, 7), "down": (10, 100), "up": (5, 10)},
    "moderate": {"flops": (2, 10), "down": (5, 200), "up": (2, 20)},
    "extreme": {"flops": (1, 20), "down": (1, 500), "up": (1, 50)},
}


def uniform_fleet(name: str, count: int, seed: int, line_share: float = 1.0) -> NDArray[np.void]:
    """Profiles of one of the UNIFORM fleets."""
    if count < 1:
        raise ValueError(f"a fleet needs at least 1 device, not {count}")
    ranges, rng = UNIFORM[name], np.random.default_rng(seed)
    profiles = np.zeros(count, dtype=PROFILE)
    profiles["flops"] = rng.uniform(*ranges["flops"], count) * 1e12
    profiles["down_bps"] = line_share * rng.uniform(*ranges["down"], count) * 8e6
    profiles["up_bps"] = line_share * rng.uniform(*ranges["up"], count) * 8e6
    profiles["memory_bytes"], profiles["credit_blocks"] = 512_000_000, CREDIT_BLOCKS
    return profiles


def _choose(uniform: NDArray[np.float64], shares: Mapping[str, float], what: str) -> tuple[list[str], NDArray[np.intp]]:
    if not shares:
        raise ValueError(f"no {what} to draw from: give at least one name with a share")
    for name, share in shares.items():
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(f'the share of {what} "{name}" is {share!r}; it must be more than zero')
    names = sorted(shares)
    bounds = np.cumsum([shares[name] for name in names], dtype=np.float64)
    chosen = np.searchsorted(bounds[:-1] / bounds[-1], uniform, side="right")
    return names, chosen


def _normal_quantile(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    normal = NormalDist()
    inside = np.clip(uniform, normal.cdf(-_Z_LIMIT), normal.cdf(_Z_LIMIT))
    return np.array([normal.inv_cdf(u) for u in inside.tolist()])


def _household_rates(
    spreads: Sequence[RateSpread], line_of: NDArray[np.intp], z: NDArray[np.float64]
) -> NDArray[np.float64]:
    log_p10, log_p50, log_p90 = np.log([[s.p10, s.p50, s.p90] for s in spreads])[line_of].T
    slope = np.where(z > 0, log_p90 - log_p50, log_p50 - log_p10)
    rates: NDArray[np.float64] = np.exp(log_p50 + z / _Z_P90 * slope)
    return np.minimum(rates, MAX_RATE)
