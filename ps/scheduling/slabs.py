"""The operand slabs that devices keep, so that they are not sent again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.planning import settings
from ps.planning.cost import BYTES, Integers
from ps.scheduling.state import Device, Job

RANGES = settings.NOW.most_strips  # that a device keeps of one operand


@dataclass(slots=True)
class Slabs:
    """What each device keeps of one operand: a few ranges of its rows, as received; empty where high is 0."""

    low: Integers  # [devices, RANGES]
    high: Integers
    row_bytes: int

    def hold(self, devices: Integers, low: Integers, high: Integers) -> NDArray[np.bool_]:
        """Whether one range contains this one. Adjacent ranges are two pieces on the device and do not count as one."""
        inside: NDArray[np.bool_] = (self.low[devices] <= low[:, None]) & (high[:, None] <= self.high[devices])
        some: NDArray[np.bool_] = np.logical_or.reduce(inside, axis=1)
        return some


class KeptSlabs:
    def __init__(self) -> None:
        self.of: dict[int, Slabs] = {}  # by operand

    def joined(self, again: list[int], new: int) -> None:
        """Add devices that keep nothing: those with reused ids, and `new` more."""
        nothing = np.zeros((new, RANGES), np.int64)
        for slabs in self.of.values():
            slabs.low, slabs.high = np.concatenate([slabs.low, nothing]), np.concatenate([slabs.high, nothing])
            slabs.low[again] = slabs.high[again] = 0

    def forget(self, operand: int, records: list[Device]) -> None:
        slabs = self.of.pop(operand, None)
        if slabs is None:
            return
        held = np.flatnonzero(slabs.high.any(axis=1))
        freed = slabs.row_bytes * (slabs.high[held] - slabs.low[held]).sum(axis=1)
        for device, size in zip(held.tolist(), freed.tolist(), strict=True):
            if records[device].alive:
                records[device].kept_bytes -= size

    def account(
        self,
        job: Job,
        boxes: Integers,
        devices: Integers,
        fresh: NDArray[np.bool_],
        whole: NDArray[np.bool_],
        records: list[Device],
    ) -> tuple[NDArray[np.bool_], Integers]:
        """Which slabs each block still has to download, and which of its slabs the device keeps (see Job.kept). A
        device keeps the first slabs of an operand that it gets (blocks of one rectangle), while half its memory has
        room."""
        new = fresh | ~whole[:, None]  # a streamed block downloads both, chunk by chunk, and leaves nothing
        kept = np.zeros(len(boxes), np.int64)
        for side, operand in enumerate(job.operands):
            if operand is None or job.shape.batch > 1:
                continue
            slabs = self.of.get(operand)
            if slabs is None:
                nothing = np.zeros((len(records), RANGES), np.int64)
                slabs = self.of[operand] = Slabs(nothing, nothing.copy(), BYTES * job.shape.inner)
            low = boxes[:, 2 + 2 * side]
            high = low + boxes[:, 3 + 2 * side]
            held = slabs.hold(devices, low, high)
            candidates = np.flatnonzero(whole & fresh[:, side] & ~slabs.high[devices].any(axis=1))
            for block in candidates.tolist():
                device, begin, end = int(devices[block]), int(low[block]), int(high[block])
                place = int(np.count_nonzero(slabs.high[device]))
                if place == RANGES:
                    continue
                record = records[device]
                with_it = record.kept_bytes + slabs.row_bytes * (end - begin)
                if 2 * with_it <= record.memory_bytes and with_it + record.in_flight_bytes <= record.memory_bytes:
                    record.kept_bytes = with_it
                    slabs.low[device, place], slabs.high[device, place] = begin, end
            new[:, side] &= ~held | ~whole
            kept += (slabs.hold(devices, low, high) & whole) << side
        return new, kept
