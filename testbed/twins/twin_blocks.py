"""The blocks of a twin check: products with fixed plans, so that every device gets the same blocks on both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from emulator.model.calibration import Calibration
from emulator.model.samples import Samples
from ps.planning.plans import Plan
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server

Integers = NDArray[np.int64]
BLOCKS = 6  # per device and product


@dataclass(frozen=True, slots=True, eq=False)
class TwinDevice:
    samples: Samples
    calibration: Calibration


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One product of a step: its boxes and their devices."""

    rows: int
    inner: int
    columns: int
    boxes: Integers
    device: Integers


def stream(devices: Sequence[TwinDevice], steps: int, seconds: float, seed: int) -> list[list[Part]]:
    """`steps` steps of one product each, which take every device about `seconds` by its model. Blocks are full-width
    row ranges of random height; columns and inner length are random too, the same for both sides. Blocks are large,
    like those of a large model."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        inner, columns = int(rng.integers(512, 2049)), int(rng.integers(384, 1025))
        boxes, owners, at = [], [], 0
        for number, device in enumerate(devices):
            one_s = device.calibration.model.seconds(np.array([[1, 128, inner, columns]]))[0] / 128
            shares = rng.uniform(0.5, 1.5, BLOCKS)
            for height in np.maximum(1, seconds / one_s * shares / shares.sum()).astype(int).tolist():
                boxes.append([0, 1, at, height, 0, columns])
                owners.append(number)
                at += height
        found.append([Part(at, inner, columns, np.array(boxes), np.array(owners))])
    return found


def run_step(server: Server, parts: Sequence[Part], ids: Integers, rng: np.random.Generator, number: int) -> float:
    """Seconds until all products are done."""
    products, done = [], SimpleQueue[int]()
    for part in parts:
        left = rng.standard_normal((1, part.rows, part.inner), dtype=np.float32)
        right = rng.standard_normal((1, part.columns, part.inner), dtype=np.float32)
        fresh = np.ones((len(part.boxes), 2), bool)
        fresh[1:, 1] = part.device[1:] != part.device[:-1]  # one slab of columns per device
        plan = Plan(part.boxes, ids[part.device], fresh, 0.0, firm=True)
        out = np.empty((1, part.rows, part.columns), np.float32)
        products.append(
            Product(Operand(left), Operand(right), out, partial(done.put, 0), f"step {number}", number, plan=plan)
        )
    begun = time.perf_counter()
    server.submit(*products)
    finished = 0
    while finished < len(products):
        finished += len(server.collect(done))
    return time.perf_counter() - begun
