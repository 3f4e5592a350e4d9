"""Passes the blocks the dispatcher sends to the device model: the one place where virtual time schedules blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.model.device import Devices
from ps.planning.cost import BYTES
from ps.scheduling.events import SendBlocks
from ps.scheduling.state import Job

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One entry per block, in the order of sending."""

    tiles: Integers  # [k, 6]
    down_bytes: Integers
    due_s: Numbers  # when its answer is back at the server
    compute_s: Numbers

    @property
    def cells(self) -> Integers:
        cells: Integers = self.tiles[:, 1] * self.tiles[:, 3] * self.tiles[:, 5]
        return cells


def schedule(devices: Devices, rows: Integers, jobs: Mapping[int, Job], blocks: SendBlocks, sent_s: float) -> Scheduled:
    """These blocks, sent at `sent_s`; `rows` gives the index in `devices` of each block's device."""
    tiles = np.empty((len(rows), 6), np.int64)
    down_bytes, chunk, inner = np.empty((3, len(rows)), np.int64)
    positions: dict[int, list[int]] = {}
    for position, number in enumerate(blocks.jobs):
        positions.setdefault(number, []).append(position)
    for number, at in positions.items():
        job, mine = jobs[number], [blocks.blocks[position] for position in at]
        tiles[at] = job.tiles[mine]
        down_bytes[at] = [job.down_bytes[block] for block in mine]
        chunk[at] = [job.chunk[block] for block in mine]
        inner[at] = job.shape.inner
    # blocks that do not fit into a device's memory come in chunks along the inner dimension; only the last sends an
    # answer
    count = -(-inner // chunk)
    parts = np.repeat(np.arange(len(rows)), count)
    first = np.cumsum(count) - count
    place = np.arange(len(parts)) - first[parts]
    length = np.minimum(chunk[parts], inner[parts] - place * chunk[parts])
    last = place == count[parts] - 1
    cells = (tiles[:, 1] * tiles[:, 3] * tiles[:, 5])[parts]
    part_bytes = down_bytes[parts] * length // inner[parts]
    shapes = np.column_stack([tiles[parts][:, [1, 3]], length, tiles[parts][:, 5]])
    due_s, compute_s = devices.schedule(sent_s, rows[parts], part_bytes, shapes, BYTES * cells * last)
    return Scheduled(tiles, down_bytes, due_s[last], np.add.reduceat(compute_s, first))
