"""What the dispatcher knows of jobs, devices and kept slabs: plain records."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ps.events import CancelBlocks, Instruction, SendBlocks
from ps.planner import Integers, Request, Shape
from ps.stages import Passage, Stages, after

REACTION_S = 0.01  # the server looks at the clock so often, and answers wait so long for each other
AHEAD_S = 0.5  # work that a device may always have before it, whatever the model says that it needs
UNSURE = 1.25  # an answer may take so many times what the model says
IDLE = (0.0, 0.0, 0.0)
PENDING, IN_FLIGHT, DONE, CUT = range(4)


@dataclass(slots=True)
class Job:
    request: Request
    urgent: bool
    operands: tuple[int | None, int | None] = (None, None)  # whose slabs may be kept
    tiles: Integers = field(default_factory=lambda: np.empty((0, 6), np.int64))
    state: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    passage: list[Passage] = field(default_factory=list)  # what it takes in each queue of its device
    size_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)  # what the device does not hold yet
    chunk: list[int] = field(default_factory=list)  # inner values at a time; all of them: it is sent whole
    kept: list[int] = field(default_factory=list)  # 1: its left slab is one that the device keeps; 2: its right one
    loss: list[int] = field(default_factory=list)  # the loss of devices that it repairs; 0: none
    first: list[bool] = field(default_factory=list)  # it overtakes what waits
    sent_s: list[float] = field(default_factory=list)
    expected_s: list[float] = field(default_factory=list)  # from sending to answer, by the model
    patience_s: list[float] = field(default_factory=list)  # at least so much is expected before it is overdue
    open: int = 0  # blocks neither done nor cut up
    firm: bool = False  # see Plan

    @property
    def shape(self) -> Shape:
        return self.request.shape


NO_QUEUE: deque[tuple[int, int]] = deque(maxlen=0)


@dataclass(slots=True)
class Device:
    credit_blocks: int
    memory_bytes: int
    round_trip_s: float
    urgent: deque[tuple[int, int]] = field(default_factory=deque)
    background: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: dict[tuple[int, int], float] = field(default_factory=dict)  # when each answer leaves, by the model
    in_flight_bytes: int = 0
    kept_bytes: int = 0
    free: Stages = field(default_factory=Stages)  # when, by the model, its queues have done all that it was sent
    in_flight_s: float = 0.0  # modelled seconds of what it was sent and has not returned, one after the other
    late_s: float = 0.0  # by which its latest answer came later than that; or sooner
    waiting: Stages = field(default_factory=Stages)  # modelled seconds of what waits for it
    refusals: int = 0
    alive: bool = True
    worked: bool = False  # a block that it returned has counted

    def gone(self) -> Device:
        """What stays of it for the results; it holds nothing, and takes next to no room: many may come and go."""
        return Device(
            self.credit_blocks,
            self.memory_bytes,
            self.round_trip_s,
            NO_QUEUE,
            NO_QUEUE,
            {},
            alive=False,
            worked=self.worked,
        )

    def model_s(self, now_s: float) -> float:
        """Where it is in the model: as far behind as its latest answer was, and surely not beyond its next one."""
        if not self.in_flight:
            return now_s
        return min(now_s - self.late_s, next(iter(self.in_flight.values())) + self.round_trip_s)

    def take(self, key: tuple[int, int], size_bytes: int, passage: Passage, now_s: float) -> float:
        """This block is sent to it now. In how many seconds its answer leaves, by the model."""
        model_s = self.model_s(now_s)
        self.in_flight_bytes += size_bytes
        self.in_flight_s += passage[0] + passage[1] + passage[2]
        self.in_flight[key] = through_s = self.free.send(passage, model_s)
        return through_s - model_s

    def land(self, key: tuple[int, int], size_bytes: int, passage: Passage, answered_s: float | None) -> None:
        """It has answered this block now, or need not do it any more."""
        self.in_flight_bytes -= size_bytes
        self.in_flight_s -= passage[0] + passage[1] + passage[2]
        through_s = self.in_flight.pop(key)
        if not self.in_flight:
            self.in_flight_s = self.late_s = 0.0
            self.free.clear()
        elif answered_s is not None:
            self.late_s = answered_s - self.round_trip_s - through_s

    def busy_s(self, now_s: float) -> tuple[float, float, float]:
        """For how long, by the model, its queues are busy with what it was sent."""
        return self.free.left(self.model_s(now_s), self.in_flight_s) if self.in_flight else IDLE

    def busy_with_all_s(self, now_s: float) -> tuple[float, float, float]:
        """And with what waits for it."""
        return after(self.busy_s(now_s), self.waiting, len(self.urgent) + len(self.background))

    def ends_s(self, now_s: float) -> float:
        """In how many seconds it returns the last of all that it has. Whoever is late will be as late again."""
        return self.busy_with_all_s(now_s)[2] + self.round_trip_s + now_s - self.late_s - self.model_s(now_s)

    def wants(self, passage: Passage, now_s: float) -> bool:
        """Whether it may need this block before its next answer is here, upon which it would be sent."""
        if not self.in_flight:
            return True
        model_s = self.model_s(now_s)
        if self.free.up_s - model_s < AHEAD_S:
            return True
        answer_s = next(iter(self.in_flight.values())) - model_s
        return self.free.dry_s(passage) - model_s < max(AHEAD_S, UNSURE * answer_s + self.round_trip_s + REACTION_S)

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
