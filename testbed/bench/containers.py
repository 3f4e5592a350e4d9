"""Whether one-device containers keep their model's time. `python -m testbed.bench.containers`, next to a Docker engine.

A device of a given GFLOP/s behind a line that the kernel shapes computes one block after the other, in two ways. Under
its quota alone, nothing is modelled: a block takes the time of its bytes on the line and of its arithmetic under the
quota (real throttling). As in a run, the pod also holds an answer until it is due by the model. The quota is the same.
Blocks are large: a small block ends before a quota, which is counted in periods of 10 to 20 ms, takes effect.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from agent.identity.keys import Curve, Keys
from agent.protocol.errors import Failure, UserError
from agent.protocol.profile import Profile, pack_profiles
from emulator.model.fleet import Fleet
from ps.access.access_file import AccessFile, server_folder
from ps.planning.plans import Plan
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server
from testbed.launch.container_host import ContainerHost
from testbed.launch.container_pods import ContainerPods
from testbed.runs.scenario import Launch

GFLOPS = (5.0, 10.0, 20.0, 40.0)
DOWN_BPS, UP_BPS = 400e6, 200e6
OVERHEAD_S = 1e-4
BLOCKS, UNCOUNTED, BLOCK_S = 8, 1, 0.5  # the first block allocates pages that later blocks reuse
GOAL = 0.1  # deviation from the model's time, either way
WAYS = {"quota alone": True, "and waiting": False}


@dataclass(frozen=True, slots=True)
class Times:
    """Times of blocks, one at a time, relative to the model."""

    share: float
    block_s: float  # by the model
    computing_s: float
    blocks: NDArray[np.float64]  # from sending a block to its answer
    computing: NDArray[np.float64]  # as reported by the pod


def measure(container_host: ContainerHost, gflops: float, bare: bool) -> Times:
    profile = Profile(gflops * 1e9, OVERHEAD_S, DOWN_BPS, UP_BPS, 0.0, 1 << 30, 2)
    devices = Fleet(pack_profiles([profile]), ["bench"], ["none"], {"estimate": 1})
    side = round((BLOCK_S * gflops * 1e9 / 2) ** (1 / 3))
    computing_s = OVERHEAD_S + 2.0 * side**3 / (gflops * 1e9)
    block_s = 8 * 2 * 4 * side**2 / DOWN_BPS + computing_s + 8 * 4 * side**2 / UP_BPS
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((1, side, side), dtype=np.float32) for _ in range(2))
    plan = Plan(np.array([[0, 1, 0, side, 0, side]]), np.array([0]), np.ones((1, 2), bool), 0.0)
    keys, pods_at = Keys.new(), f"tcp://{container_host.server_host()}:0"
    server = Server(unlisted=[pods_at], access=AccessFile(server_folder())).start()
    server.trust(keys.public, "bench", 2)
    address, curve = container_host.server_at(server.unlisted_addresses[0]), Curve(server.public_key, keys)
    try:
        with ContainerPods(container_host, devices, 1, address, "kernel", (), 1.0, curve, bare=bare) as pods:
            pods.start()
            server.wait_for_devices(1, 60.0)
            for _ in range(BLOCKS + UNCOUNTED):
                done = SimpleQueue[int]()
                out = np.empty((1, side, side), np.float32)
                server.submit(Product(Operand(left), Operand(right), out, partial(done.put, 0), "bench", plan=plan))
                while not server.collect(done):
                    pass
            assert pods.allotments is not None
            share = pods.allotments[0].arithmetic.share
            server.stop()
    finally:
        server.stop()
    columns = {name: column[UNCOUNTED:] for name, column in server.records.columns().items()}
    took = (columns["received_s"] - columns["sent_s"]) / block_s
    return Times(share, block_s, computing_s, took, columns["compute_s"] / computing_s)


def main() -> int:
    print(f"lines of {DOWN_BPS / 1e6:.0f} Mbit/s down, {UP_BPS / 1e6:.0f} up; times over the model's: p10 p50 p90")
    print(f"{'GFLOP/s':>7} {'':11} {'quota':>5} {'block':>6} {'':18}  {'computing':>9}")
    kept = True
    with ContainerHost(Launch(kind="docker"), 1) as container_host:
        for gflops in GFLOPS:
            for what, bare in WAYS.items():
                times = measure(container_host, gflops, bare)
                blocks, computing = (np.percentile(of, [10, 50, 90]).tolist() for of in (times.blocks, times.computing))
                good = all(abs(p50 - 1) <= GOAL for p50 in (blocks[1], computing[1]))
                kept &= good
                print(
                    f"{gflops:7.0f} {what:11} {times.share:5.3f} {times.block_s:5.2f}s {_three(blocks)}  "
                    f"{times.computing_s:5.2f}s {_three(computing) if bare else 'as modelled':18}  "
                    f"{'kept' if good else 'NOT KEPT'}",
                    flush=True,
                )
                told = {"gflops": gflops, "what": what, "share": times.share, "blocks": blocks, "computing": computing}
                print(json.dumps(told), file=sys.stderr)
    goal = f"medians within {100 * GOAL:.0f}% of the model's, under the quota alone as well"
    print(f"goal: {goal}: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


def _three(figures: list[float]) -> str:
    return " ".join(f"{figure:5.3f}" for figure in figures)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, Failure) as error:
        sys.exit(f"{error}")
