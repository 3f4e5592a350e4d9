"""The cost model, written as the formula.

One block of `batch` x `rows` x `columns` cells over the inner length n, 4 bytes a value, on a device:

    down    = (new_rows + new_columns) batch n 32 bit / down_rate       only what the device does not hold already
    compute = chunks x overhead + 2 batch rows columns n / flops
    up      = batch rows columns 32 bit / up_rate
    time    = latency + max(down + compute / chunks, down / chunks + compute) + up + latency

A block's operands arrive in `chunks` equal parts along the inner dimension and are added up on the device as they
arrive; in one part, that is whole, if they fit into its memory. Across the blocks of a device the three overlap.

Memory: the output and the operands, if they are whole; else the output twice (the sum so far and what is added to it)
and three chunks (one computed, one waiting, one arriving).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]

BYTES = 4  # float32 on the wire
CHUNKS_HELD = 3
LEAST_CHUNK = 32  # inner values; shorter ones would cost more in calls than they save


def operand_bytes(batch: Any, rows: Any, inner: int, columns: Any) -> Any:
    """What both operands of a block weigh."""
    return BYTES * inner * batch * (rows + columns)


def chunk_length(batch: Any, rows: Any, inner: int, columns: Any, budget_bytes: Any) -> Integers:
    """Inner values a chunk, so that the block fits the budget: all of them if possible, 0 if nothing helps."""
    output = BYTES * batch * rows * columns
    a_value = operand_bytes(batch, rows, 1, columns)
    longest = (budget_bytes - 2 * output) // (CHUNKS_HELD * a_value)
    streamed = np.where(longest >= LEAST_CHUNK, np.minimum(longest, inner - 1), 0)
    length: Integers = np.where(budget_bytes >= output + a_value * inner, inner, streamed)
    return length


def block_bytes(batch: Any, rows: Any, inner: int, columns: Any, chunk: Any) -> Any:
    """Memory of one block on its device."""
    streamed = chunk < inner
    outputs, held = np.where(streamed, 2, 1), np.where(streamed, CHUNKS_HELD * chunk, inner)
    return BYTES * batch * (outputs * rows * columns + (rows + columns) * held)


def least_bytes(inner: int) -> int:
    """Memory that a device needs to compute one cell."""
    return BYTES * min(1 + 2 * inner, 2 + 2 * CHUNKS_HELD * LEAST_CHUNK)


def block_queues(
    profiles: NDArray[np.void], batch: Any, rows: Any, inner: int, columns: Any, down_bytes: Any, chunks: Any = 1
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds of download, compute and upload of one block on each device of `profiles`."""
    cells = 1.0 * batch * rows * columns
    return (
        8.0 * down_bytes / profiles["down_bps"],
        chunks * profiles["overhead_s"] + 2 * cells * inner / profiles["flops"],
        8 * BYTES * cells / profiles["up_bps"],
    )


def block_seconds(
    profiles: NDArray[np.void],
    batch: Any,
    rows: Any,
    inner: int,
    columns: Any,
    down_bytes: Any = None,
    chunks: Any = 1,
) -> Numbers:
    """Time of one block on each device of `profiles`, alone on that device. `down_bytes`: unless it needs all."""
    if down_bytes is None:
        down_bytes = operand_bytes(batch, rows, inner, columns)
    down, compute, up = block_queues(profiles, batch, rows, inner, columns, down_bytes, chunks)
    seconds: Numbers = 2 * profiles["latency_s"] + np.maximum(down + compute / chunks, down / chunks + compute) + up
    return seconds


def usable_bytes(profiles: NDArray[np.void]) -> Integers:
    """Memory for a block: half of what the device lends, the other half is for slabs that it keeps."""
    usable: Integers = profiles["memory_bytes"] // 2
    return usable
