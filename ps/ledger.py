"""What the dispatcher knows of jobs, devices and kept slabs: plain records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ps.events import CancelBlocks, Instruction, SendBlocks
from ps.planner import Integers, Request, Shape

PENDING, IN_FLIGHT, DONE, CUT = range(4)


@dataclass(slots=True)
class Job:
    request: Request
    urgent: bool
    operands: tuple[int | None, int | None] = (None, None)  # whose slabs may be kept
    tiles: Integers = field(default_factory=lambda: np.empty((0, 6), np.int64))
    state: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    cost_s: list[float] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)  # what the device does not hold yet
    chunk: list[int] = field(default_factory=list)  # inner values at a time; all of them: it is sent whole
    kept: list[int] = field(default_factory=list)  # 1: its left slab is one that the device keeps; 2: its right one
    loss: list[int] = field(default_factory=list)  # the loss of devices that it repairs; 0: none
    sent_s: list[float] = field(default_factory=list)
    expected_s: list[float] = field(default_factory=list)  # from sending to answer, by the model
    patience_s: list[float] = field(default_factory=list)  # at least so much is expected before it is overdue
    open: int = 0  # blocks neither done nor cut up

    @property
    def shape(self) -> Shape:
        return self.request.shape


_NO_QUEUE: deque[tuple[int, int]] = deque(maxlen=0)


@dataclass(slots=True)
class Device:
    credit_blocks: int
    memory_bytes: int
    round_trip_s: float
    urgent: deque[tuple[int, int]] = field(default_factory=deque)
    background: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: set[tuple[int, int]] = field(default_factory=set)
    in_flight_bytes: int = 0
    kept_bytes: int = 0
    backlog_s: float = 0.0  # modelled seconds of work given and not yet returned
    free_s: float = 0.0  # when, by the model, it has done all that it was sent
    refusals: int = 0
    alive: bool = True
    worked: bool = False  # a block that it returned has counted

    def gone(self) -> Device:
        """What stays of it for the results; it holds nothing, and takes next to no room: many may come and go."""
        return Device(
            self.credit_blocks,
            self.memory_bytes,
            self.round_trip_s,
            _NO_QUEUE,
            _NO_QUEUE,
            set(),
            alive=False,
            worked=self.worked,
        )

    def take(self, key: tuple[int, int], size_bytes: int, seconds: float, now_s: float) -> None:
        """This block is sent to it now."""
        self.in_flight.add(key)
        self.in_flight_bytes += size_bytes
        self.free_s = (self.free_s if self.free_s > now_s else now_s) + seconds

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.urgent or self.background)


@dataclass(slots=True)
class Turn:
    """What one event leads to."""

    out: list[Instruction] = field(default_factory=list)
    send: SendBlocks = field(default_factory=lambda: SendBlocks([], [], []))
    cancel: CancelBlocks = field(default_factory=lambda: CancelBlocks([], [], []))
    freed: dict[int, None] = field(default_factory=dict)  # devices that may take more, in order

    def stop(self, device: int, job: int, block: int) -> None:
        """Tell the device that this need not go on; if it has not been told to begin, say nothing at all."""
        for at in range(len(self.send.devices) - 1, -1, -1):
            if (self.send.devices[at], self.send.jobs[at], self.send.blocks[at]) == (device, job, block):
                for column in (self.send.devices, self.send.jobs, self.send.blocks):
                    del column[at]
                return
        self.cancel.devices.append(device)
        self.cancel.jobs.append(job)
        self.cancel.blocks.append(block)


def whole(shape: Shape) -> Integers:
    """The rectangle that is all of a product's output."""
    return np.array([[0, shape.batch, 0, shape.rows, 0, shape.columns]])
