"""Products on a server in virtual time, checked against NumPy."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

import numpy as np

from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.virtual.server import VirtualServer


def multiply(server: VirtualServer, shapes: list[tuple[int, int, int]], seed: int = 0) -> int:
    """Computes the products one after another; returns their FLOPs."""
    rng, flops = np.random.default_rng(seed), 0
    for rows, inner, columns in shapes:
        done: SimpleQueue[int] = SimpleQueue()
        left = rng.standard_normal((1, rows, inner), dtype=np.float32)
        right = rng.standard_normal((1, columns, inner), dtype=np.float32)
        out = np.full((1, rows, columns), np.nan, np.float32)
        server.submit(Product(Operand(left), Operand(right), out, partial(done.put, 1)))
        assert server.collect(done) == [1]
        np.testing.assert_allclose(out, left @ right.transpose(0, 2, 1), rtol=1e-3, atol=1e-3)
        flops += 2 * rows * inner * columns
    return flops
