"""The processor cost per message byte of an agent, measured on the agent itself.

This cost exceeds the cost in a link probe because of the agent's other threads and its memory use; under a CPU quota
that time is lost for products. So before the compared blocks, real agents get blocks that are nearly all bytes: the
processor time used, less the model's time for the products, is the cost of the messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emulator.model.calibration import stretched
from ps.transport.server import Server
from testbed.twins.twin_blocks import BLOCKS, Part, TwinDevice, run_step

Floats = NDArray[np.float64]
ROWS = 800  # per block, on average
KINDS = ((1600, 16), (16, 1600))  # inner length and columns: 5 MB down per block, and 5 MB up
TRIES, PAIRS = 2, 9


def message_costs(
    server: Server, devices: Sequence[TwinDevice], processes: Sequence[int], seed: int
) -> list[tuple[float, float] | None]:
    """Seconds per byte, down and up, per agent; None if no CPU quota makes the cost matter."""
    if all(device.samples.quota is None for device in devices):
        return [None] * len(devices)
    rng, ids = np.random.default_rng(seed), np.arange(len(devices))
    pairs, counts = TRIES + PAIRS, slice(TRIES, None)
    used_s = np.empty((pairs, 2, len(devices)))
    heights = rng.integers(ROWS // 2, 3 * ROWS // 2, (pairs, 2, len(devices), BLOCKS))
    for pair in range(pairs):
        for kind, (inner, columns) in enumerate(KINDS):
            height = heights[pair, kind].reshape(-1)
            begins = np.cumsum(height) - height
            boxes = np.array([[0, 1, at, h, 0, columns] for at, h in zip(begins, height, strict=True)])
            part = Part(int(height.sum()), inner, columns, boxes, np.repeat(ids, BLOCKS))
            before_s = np.array([processor_seconds(process) for process in processes])
            run_step(server, [part], ids, rng, 0)
            used_s[pair, kind] = np.array([processor_seconds(process) for process in processes]) - before_s
    found: list[tuple[float, float] | None] = []
    for number, device in enumerate(devices):
        stretch, mine = stretched(device.samples), heights[:, :, number]
        if stretch is None:
            found.append(None)
            continue
        products_s, moved = np.empty((pairs, 2)), np.empty((pairs, 2, 2))
        for kind, (inner, columns) in enumerate(KINDS):
            shapes = np.array([[1, height, inner, columns] for height in mine[:, kind].reshape(-1)])
            products_s[:, kind] = device.calibration.model.seconds(shapes).reshape(pairs, BLOCKS).sum(axis=1) / stretch
            rows = mine[:, kind].sum(axis=1)
            moved[:, kind] = 4 * np.stack([rows * inner + inner * columns, rows * columns], axis=1)
        found.append(message_seconds_now(used_s[counts, :, number], products_s[counts], moved[counts]))
    return found


def message_seconds_now(used_s: Floats, products_s: Floats, moved_bytes: Floats) -> tuple[float, float]:
    """Median over pairs of steps, one nearly all bytes down and one nearly all bytes up: [k, 2] processor seconds,
    [k, 2] the products' part of them, and [k, 2, 2] bytes down and up of each step."""
    each_s = np.linalg.solve(moved_bytes, (used_s - products_s)[:, :, None])[:, :, 0]
    down_s, up_s = np.maximum(np.median(each_s, axis=0), 0.0).tolist()
    return down_s, up_s


def processor_seconds(process: int) -> float:
    """Processor time of another process, all threads (Linux's clock id for it)."""
    return time.clock_gettime(~process << 3 | 2)
