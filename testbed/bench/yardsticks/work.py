"""The fixed work of the benchmark: three products, their blocks and their seeded operands.

Everything that is measured (the testbed, raw ZeroMQ, NumPy, Ray, Dask) takes the work from here, so that all multiply
the same numbers in the same rectangles. Pure: NumPy only and no import of the project, because the peers' scripts load
this file by its path in an interpreter that has nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Work:
    """One product C[m x q] = A[m x n] B[n x q], cut into blocks of block_rows x block_columns."""

    name: str
    m: int
    n: int
    q: int
    block_rows: int
    block_columns: int

    def __post_init__(self) -> None:
        sizes = (self.m, self.n, self.q, self.block_rows, self.block_columns)
        if min(sizes) < 1:
            raise ValueError(f"work {self.name!r}: every size must be at least 1, got {sizes}")

    @property
    def blocks(self) -> int:
        return -(-self.m // self.block_rows) * -(-self.q // self.block_columns)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.q

    def operands(self, seed: int = 0) -> tuple[Matrix, Matrix]:
        """A and B, standard normal; the same seed gives the same bits."""
        generator = np.random.default_rng(seed)
        a = generator.standard_normal((self.m, self.n), dtype=np.float32)
        b = generator.standard_normal((self.n, self.q), dtype=np.float32)
        return a, b

    def rectangles(self) -> NDArray[np.int64]:
        """The blocks, row by row of the grid: [blocks, 4] of row, rows, column, columns."""
        row, column = np.meshgrid(
            np.arange(0, self.m, self.block_rows), np.arange(0, self.q, self.block_columns), indexing="ij"
        )
        rows = np.minimum(self.block_rows, self.m - row)
        columns = np.minimum(self.block_columns, self.q - column)
        return np.stack([row, rows, column, columns], axis=-1).reshape(-1, 4).astype(np.int64)


W1 = Work("W1", m=1024, n=4096, q=4096, block_rows=512, block_columns=512)
W2 = Work("W2", m=1024, n=512, q=1024, block_rows=32, block_columns=32)


def round_of(devices: int) -> Work:
    """W3: a round in which each device gets one block of W2's size, on the squarest grid of exactly that many."""
    if devices < 1:
        raise ValueError(f"a round needs at least 1 device, got {devices}")
    down = next(rows for rows in range(isqrt(devices), 0, -1) if devices % rows == 0)
    across = devices // down
    return Work(
        f"W3-{devices}",
        m=down * W2.block_rows,
        n=W2.n,
        q=across * W2.block_columns,
        block_rows=W2.block_rows,
        block_columns=W2.block_columns,
    )
