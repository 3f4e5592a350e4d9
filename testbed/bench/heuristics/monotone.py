"""`python -m testbed.bench monotone`: more devices never hurt, and slower ones never help, over seeded random fleets.

Each fleet takes one step in virtual time, shapes only: as it is, with one device more, and with one of its devices
slowed down. A device more may make the step at most LONGER longer. A slower device may make it at most SHORTER
shorter: plans are not optimal, so that a slower fleet may by chance get a better one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.protocol.profile import PROFILE
from ps.graph.executor import Executor
from ps.graph.models import model_config
from ps.graph.shapes import ShapesProgram, step_shapes
from ps.planning.planner import Planner
from ps.planning.share_cap import YIELDING
from testbed.runs.display import Display
from testbed.virtual.server import VirtualServer

LONGER = 0.03
SHORTER = 0.1
MOST_DEVICES = 200
MODELS = {"opt-tiny": (8, 64, 2), "llama-tiny": (8, 64, 2), "opt-125m": (1, 128, 1)}  # batch, sequence, layers


@dataclass(frozen=True, slots=True)
class Tried:
    fleet: int
    model: str
    devices: int
    step_s: float
    with_one_more_s: float
    with_one_slower_s: float

    @property
    def longer(self) -> float:
        return self.with_one_more_s / self.step_s - 1

    @property
    def shorter(self) -> float:
        return 1 - self.with_one_slower_s / self.step_s

    @property
    def kept(self) -> bool:
        return self.longer <= LONGER and self.shorter <= SHORTER


def random_profiles(rng: np.random.Generator, count: int) -> NDArray[np.void]:
    """Phones to workstations, on lines from 1 Mbit/s to 1 Gbit/s."""
    profiles = np.zeros(count, PROFILE)
    profiles["flops"] = 10 ** rng.uniform(9, 12.5, count)
    profiles["overhead_s"] = 10 ** rng.uniform(-5, -3, count)
    profiles["down_bps"] = 10 ** rng.uniform(6, 9, count)
    profiles["up_bps"] = profiles["down_bps"] / rng.uniform(1, 10, count)
    profiles["latency_s"] = 10 ** rng.uniform(-3, -1, count)
    profiles["memory_bytes"] = (2 ** rng.uniform(28, 33, count)).astype(np.int64)
    profiles["credit_blocks"] = 4
    return profiles


def step_s(profiles: NDArray[np.void], model: str, planner: Planner | None = None) -> float:
    """Virtual seconds of one step."""
    planner = planner or Planner(cap=YIELDING)
    server = VirtualServer(profiles, [str(device) for device in range(len(profiles))], planner, arithmetic=False)
    executor = Executor(server, early=True)
    for program in _programs(model):
        executor.run_shapes(program)
    return server.clock.now_s


@functools.cache
def _programs(model: str) -> list[ShapesProgram]:
    batch, sequence, layers = MODELS[model]
    config = copy.deepcopy(model_config(model))
    config.num_hidden_layers = layers
    return step_shapes(config, batch, sequence)[0]


def try_fleet(number: int, seed: int, most_devices: int = MOST_DEVICES) -> Tried:
    rng = np.random.default_rng([seed, number])
    model = list(MODELS)[number % len(MODELS)]
    count = round(np.exp(rng.uniform(0.0, np.log(most_devices))))
    profiles = random_profiles(rng, count + 1)
    slower = profiles[:count].copy()
    device, factor = rng.integers(count), rng.uniform(2, 10)
    for rate in ("flops", "down_bps", "up_bps"):
        slower[rate][device] /= factor
    figures = (step_s(fleet, model) for fleet in (profiles[:count], profiles, slower))
    return Tried(number, model, count, *figures)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench monotone", description=__doc__)
    parser.add_argument("--fleets", type=int, default=500, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--devices", type=int, default=MOST_DEVICES, help="per fleet, at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the fleets (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    return run(range(options.first, options.first + options.fleets), options.devices, options.seed, options.json)


def run(fleets: range, devices: int, seed: int, out: Path | None, say: Callable[[str], None] | None = None) -> int:
    say = say or Display().say
    found: list[Tried] = []
    for number in fleets:
        found.append(tried := try_fleet(number, seed, devices))
        told = f"{tried.step_s:.3f} s; one more {100 * tried.longer:+.1f}%, one slower {-100 * tried.shorter:+.1f}%"
        mark = "" if tried.kept else "  <- not monotone"
        say(f"{len(found)} of {len(fleets)}: {tried.model}, {tried.devices} devices: {told}{mark}")
        if out:
            out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    broken = [tried for tried in found if not tried.kept]
    say(
        f"{len(broken)} of {len(found)} fleets are not monotone; worst: one more "
        f"{100 * max(one.longer for one in found):+.1f}%, one slower {-100 * max(one.shorter for one in found):+.1f}%"
    )
    return 1 if broken else 0
