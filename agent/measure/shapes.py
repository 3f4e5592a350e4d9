"""Picks the product shapes to measure: square, flat, tall, with a long inner dimension, batched, and mixed.

Pure. A plan's blocks have arbitrary sizes, so most sizes here are not round; round ones are included because kernels
are faster on them.
"""

from __future__ import annotations

import numpy as np

Shape = tuple[int, int, int, int]  # batch, rows, inner, columns

LEAST_FLOPS = 2e5  # below this a call is mostly overhead


def shapes(count: int, seed: int, most_flops: float, most_bytes: int) -> list[Shape]:
    """Distinct shapes, spread evenly over the families, each within `most_flops` and `most_bytes`."""
    rng = np.random.default_rng(seed)
    found: dict[Shape, None] = {}
    families = ("any", "square", "flat", "tall", "long", "batch", "any", "round")
    tries = 0
    while len(found) < count and tries < 1000 * count:
        shape = _draw(rng, families[tries % len(families)])
        tries += 1
        batch, rows, inner, columns = shape
        flops = 2.0 * batch * rows * inner * columns
        cells = batch * (rows * inner + columns * inner + rows * columns)
        if LEAST_FLOPS <= flops <= most_flops and 4 * cells <= most_bytes:
            found[shape] = None
    return list(found)


def _draw(rng: np.random.Generator, family: str) -> Shape:
    def size(low: float, high: float) -> int:
        return round(float(2 ** rng.uniform(np.log2(low), np.log2(high))))

    match family:
        case "square":
            edge = size(24, 1024)
            return 1, edge, edge, edge
        case "flat":
            return 1, size(8, 48), size(64, 2048), size(128, 1024)
        case "tall":
            return 1, size(128, 1024), size(64, 2048), size(8, 48)
        case "long":
            return 1, size(8, 128), size(1024, 8192), size(8, 128)
        case "batch":
            return size(2, 32), size(8, 256), size(16, 256), size(8, 256)
        case "round":
            return 1, *(2 ** int(rng.integers(4, 11)) for _ in range(3))
        case _:
            return 1, size(8, 1024), size(32, 4096), size(8, 1024)
