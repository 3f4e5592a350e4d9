"""Which slabs of which operands devices keep, so that they are not sent again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.cost import BYTES, Integers
from ps.ledger import Device, Job


@dataclass(slots=True)
class Slabs:
    """What each device keeps of one operand: one range of its rows a device, empty where high is 0."""

    low: Integers
    high: Integers
    row_bytes: int

    def hold(self, devices: Integers, low: Integers, high: Integers) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (self.low[devices] <= low) & (high <= self.high[devices])
        return inside


class KeptSlabs:
    def __init__(self) -> None:
        self.of: dict[int, Slabs] = {}  # by operand

    def __iter__(self) -> Iterator[Slabs]:
        return iter(self.of.values())

    def grow(self, devices: int) -> None:
        """So many devices have joined."""
        nothing = np.zeros(devices, np.int64)
        for slabs in self.of.values():
            slabs.low, slabs.high = np.concatenate([slabs.low, nothing]), np.concatenate([slabs.high, nothing])

    def forget(self, operand: int, records: list[Device]) -> None:
        slabs = self.of.pop(operand, None)
        if slabs is None:
            return
        held = np.flatnonzero(slabs.high)
        freed = slabs.row_bytes * (slabs.high[held] - slabs.low[held])
        for device, size in zip(held.tolist(), freed.tolist(), strict=True):
            if records[device].alive:
                records[device].kept_bytes -= size

    def account(
        self,
        job: Job,
        tiles: Integers,
        devices: Integers,
        fresh: NDArray[np.bool_],
        whole: NDArray[np.bool_],
        records: list[Device],
    ) -> tuple[NDArray[np.bool_], Integers]:
        """Which slabs each block still has to bring, and which are among those that the device keeps (see Job.kept).
        A device keeps the first slab of an operand that it gets, if half its memory has room for it."""
        new = fresh | ~whole[:, None]  # a streamed block brings both, chunk by chunk, and leaves nothing
        kept = np.zeros(len(tiles), np.int64)
        for side, operand in enumerate(job.operands):
            if operand is None or job.shape.batch > 1:
                continue
            slabs = self.of.get(operand)
            if slabs is None:
                nothing = np.zeros(len(records), np.int64)
                slabs = self.of[operand] = Slabs(nothing, nothing.copy(), BYTES * job.shape.inner)
            low = tiles[:, 2 + 2 * side]
            high = low + tiles[:, 3 + 2 * side]
            held = slabs.hold(devices, low, high)
            candidates = np.flatnonzero(whole & fresh[:, side] & (slabs.high[devices] == 0))
            owners, first = np.unique(devices[candidates], return_index=True)
            for device, block in zip(owners.tolist(), candidates[first].tolist(), strict=True):
                size, record = slabs.row_bytes * int(high[block] - low[block]), records[device]
                with_it = record.kept_bytes + size
                if 2 * with_it <= record.memory_bytes and with_it + record.in_flight_bytes <= record.memory_bytes:
                    record.kept_bytes = with_it
                    slabs.low[device], slabs.high[device] = low[block], high[block]
            new[:, side] &= ~held | ~whole
            kept += (slabs.hold(devices, low, high) & whole) << side
        return new, kept
