"""How much memory an emulated device costs, and how late answers leave at a steady rate."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from agent.profile import Profile, pack_profiles
from ps.operands import Operand
from ps.planner import Plan
from ps.server import Product
from testbed.bench.ours import LIMIT_S, emulated

# 4 KiB down and 4 KiB up a block, as in the project's platform notes
SIDE, INNER, BLOCKS_A_PRODUCT = 32, 16, 10
PHONE = Profile(5e10, 1e-4, 50e6, 10e6, 0.02, 512_000_000, 4)


def measure(devices: int = 4000, blocks_per_s: int = 2000, lasting_s: float = 5.0) -> dict[str, Any]:
    count = int(lasting_s * blocks_per_s / BLOCKS_A_PRODUCT)
    left = np.random.default_rng(0).standard_normal((1, SIDE * BLOCKS_A_PRODUCT, INNER), dtype=np.float32)
    right = np.random.default_rng(1).standard_normal((1, SIDE, INNER), dtype=np.float32)
    row = np.arange(BLOCKS_A_PRODUCT) * SIDE
    tiles = np.column_stack([0 * row, 0 * row + 1, row, 0 * row + SIDE, 0 * row, 0 * row + SIDE])
    finished = threading.Semaphore(0)
    with emulated(pack_profiles([PHONE] * devices), "model") as (server, pods):
        begun = time.perf_counter()
        for i in range(count):
            # an even pace; what the loop oversleeps it makes up for
            time.sleep(max(0.0, begun + i * BLOCKS_A_PRODUCT / blocks_per_s - time.perf_counter()))
            device = (i * BLOCKS_A_PRODUCT + np.arange(BLOCKS_A_PRODUCT)) % devices
            out = np.empty((1, SIDE * BLOCKS_A_PRODUCT, SIDE), np.float32)
            plan = Plan(tiles, device, 0.0, BLOCKS_A_PRODUCT)
            server.submit(Product(Operand(left), Operand(right), out, finished.release, "density", plan=plan))
        for _ in range(count):
            if not finished.acquire(timeout=LIMIT_S):
                raise RuntimeError("the devices did not answer")
        took = time.perf_counter() - begun
        memory_bytes = pods.memory_bytes()
    columns = server.records.columns()
    late_s = columns["received_s"] - columns["due_s"]
    return {
        "devices": devices,
        "blocks": len(late_s),
        "blocks_per_s": len(late_s) / took,
        "pods_memory_bytes": memory_bytes,
        "bytes_a_device": memory_bytes / devices,
        **{f"late_p{p}_s": float(np.percentile(late_s, p)) for p in (50, 99)},
    }
