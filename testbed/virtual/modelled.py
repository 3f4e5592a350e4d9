"""Passes the blocks that the dispatcher sends to the device model: the only place where virtual time schedules them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.model.device import Devices
from ps.planning.cost import BYTES
from ps.scheduling.events import SendBlocks

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One entry per block, in the order of sending."""

    boxes: Integers  # [k, 6]
    down_bytes: Integers
    due_s: Numbers  # when the answer arrives at the server
    compute_s: Numbers

    @property
    def cells(self) -> Integers:
        cells: Integers = self.boxes[:, 1] * self.boxes[:, 3] * self.boxes[:, 5]
        return cells


def schedule(devices: Devices, rows: Integers, blocks: SendBlocks, sent_s: float) -> Scheduled:
    """These blocks, sent at `sent_s`; `rows` gives the index in `devices` of each block's device."""
    boxes = np.array(blocks.boxes, np.int64)
    down_bytes, chunk, inner = (np.array(of, np.int64) for of in (blocks.down_bytes, blocks.chunk, blocks.inner))
    if (chunk >= inner).all():
        shapes = np.stack([boxes[:, 1], boxes[:, 3], inner, boxes[:, 5]], axis=1)
        cells = boxes[:, 1] * boxes[:, 3] * boxes[:, 5]
        due_s, compute_s = devices.schedule(sent_s, rows, down_bytes, shapes, BYTES * cells)
        return Scheduled(boxes, down_bytes, due_s, compute_s)
    # blocks that do not fit into a device's memory are sent in chunks along the inner dimension; only the last chunk is
    # answered
    count = -(-inner // chunk)
    parts = np.repeat(np.arange(len(rows)), count)
    first = np.cumsum(count) - count
    place = np.arange(len(parts)) - first[parts]
    length = np.minimum(chunk[parts], inner[parts] - place * chunk[parts])
    last = place == count[parts] - 1
    cells = (boxes[:, 1] * boxes[:, 3] * boxes[:, 5])[parts]
    part_bytes = down_bytes[parts] * length // inner[parts]
    shapes = np.column_stack([boxes[parts][:, [1, 3]], length, boxes[parts][:, 5]])
    due_s, compute_s = devices.schedule(sent_s, rows[parts], part_bytes, shapes, BYTES * cells * last)
    return Scheduled(boxes, down_bytes, due_s[last], np.add.reduceat(compute_s, first))
