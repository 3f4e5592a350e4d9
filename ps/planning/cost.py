"""The cost model, written as the formula.

One block of `batch` x `rows` x `columns` cells over the inner length n, 4 bytes per value, on a device:

    down    = (new_rows + new_columns) batch n 32 bit / down_rate       only slabs that the device does not hold
    compute = chunks x overhead + 2 batch rows columns n / flops
    up      = batch rows columns 32 bit / up_rate
    time    = latency + max(down + compute / chunks, down / chunks + compute) + up + latency

A block's operands arrive in `chunks` equal parts along the inner dimension, and the device adds up the products as the
parts arrive. If the operands fit its memory, they come whole, in one part. Across the blocks of a device the three
queues overlap.

Memory: the output and the operands if they come whole; otherwise the output twice (the sum so far and the part being
added) and three chunks (one computed, one waiting, one arriving).

A device has three queues: downlink, processor, uplink. A block passes them in order. While one block is uploaded, the
next is computed and the one after that downloaded. So a device has three times at which it is free, not one: while it
still uploads for a second, it can already download.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]

BYTES = 4  # float32 on the wire
CHUNKS_HELD = 3  # as the agent works: one computed, one waiting, one arriving


def chunk_length(batch: Any, rows: Any, inner: int, columns: Any, budget_bytes: Any) -> Integers:
    """Inner values per chunk, so that the block fits the budget: all of them if possible, 0 if it cannot fit."""
    output = BYTES * batch * rows * columns
    a_value = BYTES * batch * (rows + columns)
    longest = (budget_bytes - 2 * output) // (CHUNKS_HELD * a_value)
    streamed = np.where(longest >= settings.NOW.least_chunk, np.minimum(longest, inner - 1), 0)
    return np.where(budget_bytes >= output + a_value * inner, inner, streamed)


def chunk_of(boxes: Integers, device: Integers, inner: int, profiles: NDArray[np.void]) -> Integers:
    """The same for each of these blocks, [k, 6], on its device."""
    return chunk_length(boxes[:, 1], boxes[:, 3], inner, boxes[:, 5], usable_bytes(profiles)[device])


def block_bytes(batch: Any, rows: Any, inner: int, columns: Any, chunk: Any) -> Any:
    """Memory of one block on its device."""
    streamed = chunk < inner
    outputs, held = np.where(streamed, 2, 1), np.where(streamed, CHUNKS_HELD * chunk, inner)
    return BYTES * batch * (outputs * rows * columns + (rows + columns) * held)


def least_bytes(inner: int) -> int:
    """Memory that a device needs to compute one cell."""
    return BYTES * min(1 + 2 * inner, 2 + 2 * CHUNKS_HELD * settings.NOW.least_chunk)


def queue_seconds(
    profiles: NDArray[np.void],
    device: Integers | slice,
    inner: int,
    batches: Any,
    rows: Any,
    columns: Any,
    lines: Any,
    chunks: Any = 0,
) -> tuple[Numbers, Numbers, Numbers]:
    """Seconds to download `lines` rows and columns of the operands, to compute with the overhead of `chunks` calls, and
    to upload, on these devices of the table. (Taking whole records for thousands of blocks would cost more than all
    the rest: field by field is 10 times faster.)"""
    cells = 1.0 * batches * rows * columns
    return (
        8.0 * BYTES * inner * lines / profiles["down_bps"][device],
        chunks * profiles["overhead_s"][device] + 2.0 * inner * cells / profiles["flops"][device],
        8.0 * BYTES * cells / profiles["up_bps"][device],
    )


def block_seconds(
    profiles: NDArray[np.void],
    batch: Any,
    rows: Any,
    inner: int,
    columns: Any,
    lines: Any = None,
    chunks: Any = 1,
) -> Numbers:
    """Time of one block on each device of `profiles`, alone on that device. `lines`: of rows and columns that it
    downloads; None for all."""
    lines = batch * (rows + columns) if lines is None else lines
    down, compute, up = queue_seconds(profiles, slice(None), inner, batch, rows, columns, lines, chunks)
    seconds: Numbers = 2 * profiles["latency_s"] + np.maximum(down + compute / chunks, down / chunks + compute) + up
    return seconds


def usable_bytes(profiles: NDArray[np.void]) -> Integers:
    """Memory for a block: half of the memory that the device lends; the other half is for slabs that it keeps."""
    return profiles["memory_bytes"] // 2


# ---- three queues per device

# Seconds of a block in each queue, and its number of chunks. A block in several chunks is computed while it arrives.
Passage = tuple[float, float, float, int]


def alone_s(block: Passage) -> float:
    """Time of a block on a device that does nothing else."""
    down_s, compute_s, up_s, chunks = block
    return max(down_s / chunks + compute_s, down_s + compute_s / chunks) + up_s


@dataclass(slots=True)
class QueueTimes:
    """Seconds, or points in time, of the three queues."""

    down_s: float = 0.0
    compute_s: float = 0.0
    up_s: float = 0.0

    def clear(self) -> None:
        self.down_s = self.compute_s = self.up_s = 0.0

    def add(self, block: Passage) -> None:
        self.down_s += block[0]
        self.compute_s += block[1]
        self.up_s += block[2]

    def remove(self, block: Passage) -> None:
        self.down_s -= block[0]
        self.compute_s -= block[1]
        self.up_s -= block[2]

    def send(self, block: Passage, now_s: float) -> float:
        """Send this block now; the fields are the times at which the queues are free. Returns when the block's
        upload ends."""
        down_s, compute_s, up_s, chunks = block
        begins_s = self.down_s if self.down_s > now_s else now_s
        self.down_s = begins_s + down_s
        if chunks == 1:
            ready_s = self.down_s
            computed_s = (self.compute_s if self.compute_s > ready_s else ready_s) + compute_s
        else:
            ready_s = begins_s + max(down_s / chunks + compute_s, down_s + compute_s / chunks)
            computed_s = max(self.compute_s + compute_s, ready_s)
        self.compute_s = computed_s
        self.up_s = (self.up_s if self.up_s > computed_s else computed_s) + up_s
        return self.up_s

    def dry_s(self, block: Passage) -> float:
        """The time by which this block must be sent so that at least one queue does not run dry."""
        return max(self.down_s, self.compute_s - block[0], self.up_s - block[0] - block[1])

    def left(self, now_s: float, most_s: float) -> tuple[float, float, float]:
        """How long each queue will be busy; at most `most_s`."""
        return (
            min(most_s, max(0.0, self.down_s - now_s)),
            min(most_s, max(0.0, self.compute_s - now_s)),
            min(most_s, max(0.0, self.up_s - now_s)),
        )


def after(busy_s: tuple[float, float, float], waiting: QueueTimes, count: int) -> tuple[float, float, float]:
    """How long the queues will be busy if `count` blocks of this total follow their present work: exact for equal
    blocks."""
    if not count:
        return busy_s
    down_s, compute_s, up_s = busy_s
    first_s = max(compute_s, down_s + waiting.down_s / count)  # when the processor can begin
    down_s += waiting.down_s
    computed_s = max(first_s + waiting.compute_s, down_s + waiting.compute_s / count)
    one_s = waiting.up_s / count
    up_s = max(max(up_s, first_s + waiting.compute_s / count) + waiting.up_s, computed_s + one_s)
    return down_s, computed_s, up_s
