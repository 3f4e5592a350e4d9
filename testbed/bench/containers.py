"""Do containers of one device keep their model's time? `python -m testbed.bench.containers`, beside a Docker engine.

A device of so many GFLOP/s gets the share of a core that this is. Twice: with nothing modelled, so that a block takes
what the arithmetic takes under the quota (real throttling); and with the pod that waits until the model says so, and a
quota that leaves room for its own work. Blocks are large: what is small is all overhead, which is a model's to say.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from queue import SimpleQueue

import numpy as np

from agent.keys import Curve, Keys
from agent.profile import MAX_RATE, Profile, pack_profiles
from emulator.fleet import Fleet
from ps.access_file import AccessFile, server_folder
from ps.jobs import Product
from ps.operands import Operand
from ps.planner import Plan
from ps.server import Server
from testbed.container_pods import ContainerPods
from testbed.ground import Ground
from testbed.scenario import Launch

GFLOPS = (5.0, 10.0, 20.0, 40.0)
BLOCKS, BLOCK_S = 12, 0.25
INNER, COLUMNS = 1536, 1536  # few bytes for the arithmetic


def fleet(gflops: float) -> Fleet:
    profile = Profile(gflops * 1e9, 1e-4, MAX_RATE, MAX_RATE, 0.0, 1 << 30, 2)
    return Fleet(pack_profiles([profile]), ["bench"], ["none"], {"estimate": 1})


def block_times(gflops: float, links: str) -> dict[str, float]:
    """Seconds from sending a block to its answer, one at a time, over what the model says."""
    devices = fleet(gflops)
    rows = round(BLOCK_S * gflops * 1e9 / (2 * INNER * COLUMNS))
    asked_s = 1e-4 + 2.0 * rows * INNER * COLUMNS / (gflops * 1e9)
    rng = np.random.default_rng(0)
    left = rng.standard_normal((1, rows, INNER), dtype=np.float32)
    right = rng.standard_normal((1, COLUMNS, INNER), dtype=np.float32)
    plan = Plan(np.array([[0, 1, 0, rows, 0, COLUMNS]]), np.array([0]), np.ones((1, 2), bool), 0.0)
    with Ground(Launch(kind="docker"), 1) as ground:
        keys, pods_at = Keys.new(), f"tcp://{ground.server_host()}:0"
        server = Server(unlisted=[pods_at], access=AccessFile(server_folder())).start()
        server.trust(keys.public, "bench", 2)
        address, curve = ground.server_at(server.unlisted_addresses[0]), Curve(server.public_key, keys)
        try:
            with ContainerPods(ground, devices, 1, address, links, (), 1.0, curve) as pods:
                pods.start()
                server.wait_for_devices(1, 60.0)
                for _ in range(BLOCKS + 2):
                    done = SimpleQueue[int]()
                    out = np.empty((1, rows, COLUMNS), np.float32)
                    server.submit(Product(Operand(left), Operand(right), out, partial(done.put, 0), "bench", plan=plan))
                    while not server.collect(done):
                        pass
                assert pods.allotments is not None
                share = pods.allotments[0].share
                server.stop()
        finally:
            server.stop()
    columns = server.records.columns()
    took = ((columns["received_s"] - columns["sent_s"]) / asked_s)[2:]
    p10, p50, p90 = np.percentile(took, [10, 50, 90])
    return {"share": share, "asked_s": asked_s, "p10": float(p10), "p50": float(p50), "p90": float(p90)}


def main() -> int:
    print(f"{'GFLOP/s':>8} {'':>10} {'quota':>6} {'asked':>8} {'p10':>6} {'p50':>6} {'p90':>6}  of the model's time")
    for gflops in GFLOPS:
        for links, what in (("off", "throttled"), ("model", "modelled")):
            row = block_times(gflops, links)
            print(
                f"{gflops:8.0f} {what:>10} {row['share']:6.3f} {1e3 * row['asked_s']:6.0f}ms "
                f"{row['p10']:6.3f} {row['p50']:6.3f} {row['p90']:6.3f}",
                flush=True,
            )
            print(json.dumps({"gflops": gflops, "what": what} | row), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
