"""Products on a server in virtual time, checked against NumPy."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

import numpy as np

from ps.transport.jobs import Product
from ps.transport.operands import Operand
from testbed.virtual.server import VirtualServer


def multiply(server: VirtualServer, shapes: list[tuple[int, int, int]], seed: int = 0, together: bool = False) -> int:
    """Computes the products one after another, or all submitted at once; returns their FLOPs."""
    rng, flops = np.random.default_rng(seed), 0
    for group in [shapes] if together else [[shape] for shape in shapes]:
        done: SimpleQueue[int] = SimpleQueue()
        products = []
        for rows, inner, columns in group:
            left, right = (Operand(rng.standard_normal((1, n, inner), dtype=np.float32)) for n in (rows, columns))
            out = np.full((1, rows, columns), np.nan, np.float32)
            products.append(Product(left, right, out, partial(done.put, 1)))
            flops += 2 * rows * inner * columns
        server.submit(*products)
        ended = 0
        while ended < len(products):
            ended += len(server.collect(done))
        for product in products:
            expected = product.left.array @ product.right.array.transpose(0, 2, 1)
            np.testing.assert_allclose(product.out, expected, rtol=1e-3, atol=1e-3)
    return flops
